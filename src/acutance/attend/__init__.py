"""Attention with its statistics: :func:`attention` and :func:`row_statistics`."""

from __future__ import annotations

from acutance.attend.output import attention
from acutance.attend.statistics import row_statistics

__all__ = ["attention", "row_statistics"]
