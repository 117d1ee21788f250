"""Compare attention mechanisms on the same queries and keys: predicted and measured metrics."""

from __future__ import annotations

from acutance.comparison.record import COMPARED, SCHEMA, Comparison, Quantity, Reading, Result
from acutance.comparison.runner import DEFAULT_LENGTHS, DEFAULT_MECHANISMS, Step, compare, pick

__all__ = [
    "COMPARED",
    "DEFAULT_LENGTHS",
    "DEFAULT_MECHANISMS",
    "SCHEMA",
    "Comparison",
    "Quantity",
    "Reading",
    "Result",
    "Step",
    "compare",
    "pick",
]
