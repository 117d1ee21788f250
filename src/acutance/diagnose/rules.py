"""The facts of each head, and the rules that judge it once.

Classes, findings and recommendations read the result: for each kind of rule that a head meets, the
numbers by which it is beyond a threshold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from acutance.diagnose.thresholds import NEAR, limit
from acutance.structure.statistics import PEAKS

#: What a head does, then what calls for a change, most urgent first.
Kind = Literal[
    "sink", "special_sink", "local", "previous-token", "diffuse", "sharp", "dead", "positional",
    "not_finite", "large_logits", "coarse_scores", "entropy_collapse", "dilution",
]  # fmt: skip
#: An :class:`acutance.HeadSummary`: it has the rules that each head meets, made of what is here.
Summary: TypeAlias = Any

LARGE_LOGIT = limit("large_logits")
COLLAPSE = limit("entropy_collapse")
SINK = limit("sink")
DEAD = limit("dead")
DIFFUSE = limit("diffuse")
LEAST_KEYS = limit("least_keys")
LIFT = limit("lift")
OCTAVES = 4  # octaves of n that a slope is fitted to: the largest n and its eighth
FEW_ROWS = int(limit("few_rows"))
_BITS = {"bfloat16": 8, "float16": 11}  # significant bits
#: Heads of these classes have little entropy because of what they do.
_BY_DESIGN = frozenset({"previous-token", "positional", "local"})
#: Rules that also hold for rows of few keys.
_ANY_LENGTH = frozenset({"not_finite", "large_logits", "coarse_scores", "dilution"})


@dataclass(frozen=True)
class Judgement:
    """One rule that a head meets, with its numbers.

    Attributes:
        size: how far beyond the threshold it is; ranks heads of the same kind.
        numbers: numbers for sentences about it.
    """

    size: float
    numbers: Mapping[str, float]


class _ByMetric(dict[str, float]):
    """Numbers by metric; NaN for one that was not recorded."""

    def __missing__(self, name: str) -> float:
        return math.nan


@dataclass(frozen=True, eq=False)
class HeadFacts:
    """The numbers of one head; NaN if a metric was not recorded or there are no rows.

    Attributes:
        summary: the summary that it is of.
        index: index of the head in the summary's arrays.
        layer: index of the layer, in model order.
        head: number of the head in its layer.
        mean: of each metric over the head's rows.
        low: smallest value of each metric.
        high: largest value of each metric.
        count: number of rows on which each metric is finite.
        near: mean weight within :data:`~acutance.diagnose.thresholds.NEAR` positions of the query.
        even: the same for uniform attention.
        peak: most frequent position of a row's largest weight, relative to the query.
        peak_share: share of rows with that position.
    """

    summary: Summary = field(repr=False)
    index: int
    layer: int
    head: int
    mean: Mapping[str, float]
    low: Mapping[str, float]
    high: Mapping[str, float]
    count: Mapping[str, float]
    near: float = math.nan
    even: float = math.nan
    peak: float = math.nan
    peak_share: float = math.nan

    @property
    def record(self) -> Any:
        """The layer."""
        return self.summary.layers[self.layer]

    @property
    def dtype(self) -> str:
        """Dtype of the model's scores, such as "bfloat16"; empty if unknown."""
        return str(self.summary.about.get("dtype", "")).removeprefix("torch.")

    @property
    def sees_all(self) -> bool:
        """Whether its rows see whole sequences, as in an encoder, not only what precedes them.

        True if no row sees one key alone, as the first row of a causal head does, and a call has as
        many rows as keys, unlike one that decodes. Unknown, and False, if rows were left out.
        """
        record = self.record
        whole = not (record.excluded or record.skipped)
        rows = (record.rows + record.padded) / max(record.calls, 1)
        return whole and 1 < self.low["n_keys"] <= rows

    @cached_property
    def rules(self) -> dict[Kind, Judgement]:
        """The rules that the head meets.

        Empty if the layer's capture is known to be wrong. Rules about weights apply only to heads
        whose rows see at least eight keys on average: with fewer, every head looks sharp, local or
        uniform.
        """
        if self.record.status == "mismatch":
            return {}
        few = self.mean["n_keys"] < LEAST_KEYS
        met = {kind: rule for kind, rule in _met(self) if not few or kind in _ANY_LENGTH}
        if met.keys() & _BY_DESIGN:
            met.pop("entropy_collapse", None)
        return met


def facts(summary: Summary) -> list[HeadFacts]:
    """The facts of every head, in the order of :attr:`acutance.HeadSummary.places`."""
    moments = summary.moments
    none = moments.count == 0
    values = (moments.mean, moments.low, moments.high)
    arrays = [*(array.masked_fill(none, math.nan) for array in values), moments.count]
    columns: list[list[Any]] = [
        [_ByMetric(zip(summary.metrics, row, strict=True)) for row in array.tolist()]
        for array in arrays
    ]
    if (distances := summary.distances) is not None:
        most = distances.peaks.max(1)
        share = most.values.double() / distances.rows.clamp(min=1).double()
        nearby = (*distances.within(NEAR), most.indices.double() - PEAKS, share)
        none = distances.rows == 0
        columns += [column.masked_fill(none, math.nan).tolist() for column in nearby]
    return [
        HeadFacts(summary, index, *place, *numbers)
        for index, (place, *numbers) in enumerate(zip(summary.places, *columns, strict=True))
    ]


def _met(head: HeadFacts) -> Iterator[tuple[Kind, Judgement]]:
    """Every rule that the head is beyond the threshold of."""
    mean, n_keys = head.mean, head.mean["n_keys"]
    share = mean["normalized_entropy"]

    def numbers(*metrics: str) -> Judgement:
        """The means of some metrics; the first is what the rule compares."""
        return Judgement(mean[metrics[0]], {name: mean[name] for name in metrics})

    first = mean["first_weight"]
    if first > SINK and not first * n_keys < LIFT:
        yield "sink", numbers("first_weight", "mass_special", "n_keys")
    if mean["mass_special"] > SINK:
        yield "special_sink", numbers("mass_special", "first_weight", "n_keys")
    if head.near > limit("local") and head.near > LIFT * head.even:
        distance = mean["attention_distance"]
        weights = {"near": head.near, "even": head.even, "attention_distance": distance}
        yield "local", Judgement(head.near, weights)
    if mean["mass_previous"] > limit("previous-token"):
        yield "previous-token", numbers("mass_previous")
    if DIFFUSE < share <= DEAD:
        yield "diffuse", numbers("normalized_entropy")
    if mean["top_weight"] > limit("sharp"):
        yield "sharp", numbers("top_weight", "effective_keys")
    if share > DEAD:
        yield "dead", numbers("normalized_entropy", "n_keys")
    if head.peak_share > limit("positional"):
        peak = {"position": head.peak, "share": head.peak_share}
        yield "positional", Judgement(head.peak_share, peak)

    rows = head.count.get("n_keys", 0.0)
    not_finite = rows - head.count.get("lse", rows)
    if not_finite > 0:
        counted = {"rows": float(rows), "not_finite": float(not_finite)}
        yield "not_finite", Judgement(not_finite / rows, counted)
    largest, bits = head.high["max_logit"], _BITS.get(head.dtype)
    if largest > LARGE_LOGIT:
        yield "large_logits", Judgement(largest, {"max_logit": largest})
    if bits is not None and largest > 0:
        step = 2.0 ** (math.floor(math.log2(largest)) + 1 - bits)  # to the next number of the dtype
        if step >= limit("coarse_scores"):
            yield "coarse_scores", Judgement(step, {"max_logit": largest, "step": step})
    if share < COLLAPSE:
        sharpness = numbers("normalized_entropy", "effective_keys").numbers
        yield "entropy_collapse", Judgement(1 / max(share, 1e-12), sharpness)
    if (growth := _growth(head)) is not None:
        yield "dilution", growth


def _growth(head: HeadFacts) -> Judgement | None:
    """The significant slope of entropy against log n; None without one, or if diffuse anyway."""
    profile, metrics = head.summary.profile, head.summary.metrics
    if profile is None or "entropy" not in metrics or head.mean["normalized_entropy"] > DIFFUSE:
        return None
    entropy = metrics.index("entropy")
    slope = profile.final_slope(head.index, entropy, octaves=OCTAVES, least_n=LEAST_KEYS)
    if slope is None or slope.value - slope.margin <= limit("steep"):
        return None
    if slope.high - slope.low <= limit("growth"):
        return None
    numbers: dict[str, float] = slope._asdict()
    for end in ("high", "low"):  # measured there: entropy need not follow the line
        mean, error = profile.at(head.index, entropy, numbers[f"{end}_n"])
        numbers |= {f"{end}_entropy": float(mean), f"{end}_error": float(error)}
    return Judgement(slope.value, numbers)


def extremes(heads: Sequence[HeadFacts]) -> tuple[str, HeadFacts, HeadFacts] | None:
    """The sharpest and the most diffuse head, by the first of three metrics that was recorded.

    Of heads that tie, the first and the last: two heads all alike are still two heads.

    Returns:
        The metric's name and the two heads; None if none of the metrics was recorded.
    """
    for name in ("normalized_entropy", "entropy", "effective_keys"):
        if known := [head for head in heads if math.isfinite(head.mean[name])]:
            sharpest = min(known, key=lambda head: head.mean[name])
            return name, sharpest, max(reversed(known), key=lambda head: head.mean[name])
    return None
