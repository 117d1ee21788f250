"""Tools for tests: inputs of attention, an oracle, a tolerance rule, the command in-process.

:func:`attention_case` draws a legal call of :func:`acutance.attention`; :func:`dense_statistics`
says in float64 and by definition what its rows hold; :func:`compare` says whether something that
was measured is as near to that as its precision allows, and what is farthest away. :func:`run`
runs the ``acutance`` command without starting a process.
"""

from __future__ import annotations

from acutance.rowstats import dense_statistics
from acutance.testing.command import CommandResult, run
from acutance.testing.inputs import MASKS, AttentionCase, attention_case, exact_scores
from acutance.testing.tolerance import (
    Comparison,
    assert_close_to_oracle,
    compare,
    score_error,
)

__all__ = [
    "MASKS",
    "AttentionCase",
    "CommandResult",
    "Comparison",
    "assert_close_to_oracle",
    "attention_case",
    "compare",
    "dense_statistics",
    "exact_scores",
    "run",
    "score_error",
]
