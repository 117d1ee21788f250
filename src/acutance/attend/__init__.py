"""Attention with its statistics: :func:`attention` and :func:`row_statistics`."""

from __future__ import annotations

from acutance.attend.functions import attention, row_statistics

__all__ = ["attention", "row_statistics"]
