"""When something is recommended: a rule for each kind, by the one table of thresholds.

A rule looks at one head's numbers and says by which of them it is beyond a threshold, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from acutance.diagnose.classes import classify
from acutance.diagnose.thresholds import limit
from acutance.summary.head_summary import HeadSummary
from acutance.summary.slope import Slope, fit_slope

__all__ = ["RULES", "Heads", "Hit", "Kind"]

Kind = Literal[
    "mismatch",
    "not_finite",
    "large_logits",
    "coarse_scores",
    "entropy_collapse",
    "dilution",
    "sink",
    "dead",
]


LARGE_LOGIT = limit("large_logits")
COARSE_STEP = limit("coarse_scores")
COLLAPSE = limit("entropy_collapse")
SINK = limit("sink")
DEAD = limit("dead")
DIFFUSE = limit("diffuse")
LEAST_KEYS = limit("least_keys")
STEEP = limit("steep")
GROWTH = limit("growth")
OCTAVES = 4  # octaves of n that a slope is fitted to: the largest n and its eighth
THIN = 0.25  # of the rows of the octave before, that the last needs
FEW_ROWS = int(limit("few_rows"))
_BITS = {"bfloat16": 8, "float16": 11}  # significant bits
_BY_DESIGN = {"previous-token", "positional", "local"}


@dataclass(frozen=True)
class Hit:
    """A head that is beyond a threshold, and by which numbers; ``size`` ranks them."""

    head: int
    size: float
    numbers: dict[str, float]


class Heads:
    """Numbers of all heads by name, NaN for what was not recorded."""

    def __init__(self, summary: HeadSummary) -> None:
        self.summary = summary
        self._names = {name: column for column, name in enumerate(summary.metrics)}
        self._moments = summary.moments
        self.classes = [{one.name for one in each} for each in classify(summary)]
        self.dtype = str(summary.about.get("dtype", "")).removeprefix("torch.")

    def mean(self, name: str, row: int) -> float:
        """A head's mean of a metric."""
        return self._of(name, row, self._moments.mean[row])

    def high(self, name: str, row: int) -> float:
        """The largest of a head's rows."""
        return self._of(name, row, self._moments.high[row])

    def count(self, name: str, row: int) -> int:
        """A head's rows that count for a metric."""
        column = self._names.get(name)
        return 0 if column is None else int(self._moments.count[row, column])

    def _of(self, name: str, row: int, values: Any) -> float:
        column = self._names.get(name)
        if column is None or not int(self._moments.count[row, column]):
            return math.nan
        return float(values[column])

    def many_keys(self, row: int) -> bool:
        """Whether rows see keys enough, as far as that was recorded."""
        return not self.mean("n_keys", row) < LEAST_KEYS

    def growth(self, row: int) -> Slope | None:
        """The slope of the entropy against log n, over the largest octaves."""
        column, profile = self._names.get("entropy"), self.summary.profile
        if column is None or profile is None:
            return None
        used = (profile.groups[row, column] > 1).nonzero().flatten().tolist()
        count = profile.count[row, column].tolist()
        while len(used) > 1 and count[used[-1]] < THIN * count[used[-2]]:
            used.pop()  # the last row of a text of 1024 tokens is alone in its octave
        if not used:
            return None
        least, most = 2.0 ** (used[-1] - OCTAVES + 1), 2.0 ** (used[-1] + 1) - 1
        return fit_slope(profile, row, column, least_n=max(least, LEAST_KEYS), most_n=most)

    def entropy_at(self, row: int, n: float) -> tuple[float, float]:
        """The measured entropy, and its standard error, in the octave whose typical n that is."""
        profile = self.summary.profile
        assert profile is not None  # a slope was fitted to it
        octave = int((profile.log_n[row] - math.log(n)).abs().nan_to_num(math.inf).argmin())
        at = (row, self._names["entropy"], octave)
        return float(profile.mean[at]), float(profile.error[at])


def _not_finite(heads: Heads, row: int) -> Hit | None:
    lost = heads.count("n_keys", row) - heads.count("lse", row)
    if lost <= 0 or "lse" not in heads.summary.metrics:
        return None
    rows = float(heads.count("n_keys", row))
    return Hit(row, lost / rows, {"rows": rows, "not_finite": float(lost)})


def _large_logits(heads: Heads, row: int) -> Hit | None:
    value = heads.high("max_logit", row)
    return Hit(row, value, {"max_logit": value}) if value > LARGE_LOGIT else None


def _coarse_scores(heads: Heads, row: int) -> Hit | None:
    value, bits = heads.high("max_logit", row), _BITS.get(heads.dtype)
    if bits is None or not value > 0:
        return None
    step = 2.0 ** (math.floor(math.log2(value)) + 1 - bits)
    return Hit(row, step, {"max_logit": value, "step": step}) if step >= COARSE_STEP else None


def _collapse(heads: Heads, row: int) -> Hit | None:
    share = heads.mean("normalized_entropy", row)
    if not share < COLLAPSE or not heads.many_keys(row) or heads.classes[row] & _BY_DESIGN:
        return None
    keys = heads.mean("effective_keys", row)
    return Hit(row, 1 / max(share, 1e-12), {"normalized_entropy": share, "effective_keys": keys})


def _dilution(heads: Heads, row: int) -> Hit | None:
    found = heads.growth(row)
    if found is None or heads.mean("normalized_entropy", row) > DIFFUSE:
        return None
    if found.value - found.margin <= STEEP or found.high - found.low <= GROWTH:
        return None
    ends = {"high": found.high_n, "low": found.low_n}
    measured: dict[str, float] = {}
    for end, n in ends.items():  # entropy need not follow the line
        measured[f"{end}_entropy"], measured[f"{end}_error"] = heads.entropy_at(row, n)
    return Hit(row, found.value, {**found._asdict(), **measured})


def _sink(heads: Heads, row: int) -> Hit | None:
    value, n = heads.mean("first_weight", row), heads.mean("n_keys", row)
    if not value > SINK or not heads.many_keys(row) or value < limit("lift") / n:
        return None
    return Hit(row, value, {"first_weight": value, "n_keys": n})


def _dead(heads: Heads, row: int) -> Hit | None:
    share, n = heads.mean("normalized_entropy", row), heads.mean("n_keys", row)
    if not share > DEAD or not heads.many_keys(row):
        return None
    return Hit(row, share, {"normalized_entropy": share, "n_keys": n})


#: A rule for each kind, most urgent first; a mismatch is of layers, so no head's.
RULES: dict[Kind, Callable[[Heads, int], Hit | None]] = {
    "mismatch": lambda *_: None,
    "not_finite": _not_finite,
    "large_logits": _large_logits,
    "coarse_scores": _coarse_scores,
    "entropy_collapse": _collapse,
    "dilution": _dilution,
    "sink": _sink,
    "dead": _dead,
}
