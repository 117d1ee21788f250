"""Attention with its statistics by row, :func:`row_statistics`, and by key, :func:`key_mass`."""

from __future__ import annotations

from acutance.attend.call import key_mass
from acutance.attend.functions import attention, row_statistics

__all__ = ["attention", "key_mass", "row_statistics"]
