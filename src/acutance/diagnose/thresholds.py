"""The table of thresholds that classes of heads, findings and recommendations use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from acutance.structure.blocks import PEAKS

_ACUTANCE = "acutance's own threshold"


@dataclass(frozen=True)
class Threshold:
    """A number that a head's statistic is compared with: a convention, not a law.

    Attributes:
        name: its name.
        metric: what is compared: a metric of :data:`acutance.METRICS`, or a description.
        side: on which side of the number the rule applies.
        value: the number.
        reason: why this number.
        source: where it comes from.
    """

    name: str
    metric: str
    side: Literal["above", "below"]
    value: float
    reason: str
    source: str = _ACUTANCE


_ROWS = (
    # which heads are compared at all
    ("least_keys", "n_keys", "above", 8.0,
     "with fewer keys every head looks sharp, local or uniform"),
    ("few_rows", "rows", "below", 30.0, "a mean over fewer rows is shown with the number of rows"),
    # what a head does
    ("sink", "first_weight, mass_special", "above", 0.3,
     "the usual criterion for an attention sink",
     "Gu et al. (2024), arXiv:2410.10781, for 0.3; Xiao et al. (2023), arXiv:2309.17453"),
    ("lift", "weight / uniform weight", "above", 2.0,
     "otherwise the number of keys explains the weight"),
    ("near", "distance in tokens", "below", 7.0, "three octaves of distance: 1, 2–3, 4–7"),
    ("local", "weight within 7 positions", "above", 0.5, "most of the weight",
     f"{_ACUTANCE}; the name as in Kovaleva et al. (2019), arXiv:1908.08593"),
    ("previous-token", "mass_previous", "above", 0.5, "most of the weight",
     "Clark et al. (2019), arXiv:1906.04341"),
    ("diffuse", "normalized_entropy", "above", 0.9, "close to uniform weights, at any length",
     f"{_ACUTANCE}; Clark et al. (2019) call such heads broad"),
    ("sharp", "top_weight", "above", 0.5, "one key outweighs all others together",
     f"{_ACUTANCE}: one key outweighs all others together"),
    ("dead", "normalized_entropy", "above", 0.98, "within 2 % of averaging everything",
     f"{_ACUTANCE}: within 2 % of averaging everything"),
    ("positional", "share of rows with one peak", "above", 0.9, "the same position almost always",
     "Voita et al. (2019), arXiv:1905.09418"),
    ("few_keys", "effective_keys", "below", 3.0,
     "close to picking one key; used only in sentences"),
    ("part", "normalized_entropy", "below", 0.5,
     "a small part of the keys; used only in sentences"),
    # what calls for a change
    ("entropy_collapse", "normalized_entropy", "below", 0.05,
     "rows this sharp pass little gradient",
     "Zhai et al. (2023), arXiv:2303.06296, on collapse; the value is a convention of acutance"),
    ("large_logits", "max_logit", "above", 100.0, "where QK-clip acts by default",
     "Kimi Team (2025), arXiv:2507.20534"),
    ("coarse_scores", "resolution of the dtype at max_logit", "above", 0.5,
     "rounding then changes a weight by a quarter"),
    ("steep", "slope of entropy against log n", "above", 0.25, "in nats per unit of log n"),
    ("growth", "entropy gained over the fit", "above", 0.5,
     "in nats; smaller growth hardly matters"),
)  # fmt: skip

#: Every threshold by name.
THRESHOLDS: dict[str, Threshold] = {row[0]: Threshold(*row) for row in _ROWS}


def limit(name: str) -> float:
    """Value of a threshold.

    Raises:
        KeyError: if the name is unknown.

    Example:
        >>> limit("sink"), limit("large_logits")
        (0.3, 100.0)
    """
    return THRESHOLDS[name].value


#: Positions that count as near, for the class "local".
NEAR = int(limit("near"))


#: An :class:`acutance.HeadSummary`: it has the rules that each head meets, made of what is here.
Summary: TypeAlias = Any


class HeadFacts:
    """The numbers of one head by name; NaN if a metric was not recorded or there are no rows.

    Attributes:
        index: index of the head in the summary's arrays.
        layer: index of the layer, in model order.
        head: number of the head in its layer.
        record: the layer.
        dtype: dtype of the model's scores, such as "bfloat16"; empty if unknown.
        near: mean weight within :data:`NEAR` positions of the query.
        even: the same for uniform attention.
        peak: most frequent position of a row's largest weight, relative to the query.
        peak_share: share of rows with that position.
    """

    near = even = peak = peak_share = math.nan

    def __init__(
        self, summary: Summary, index: int, place: tuple[int, int], rows: list[list[float]]
    ) -> None:
        self.index = index
        self.layer, self.head = place
        self.record = summary.layers[self.layer]
        self.dtype = str(summary.about.get("dtype", "")).removeprefix("torch.")
        self._profile, names = summary.profile, summary.metrics
        self._entropy = names.index("entropy") if "entropy" in names else None
        by_name: list[dict[str, float]] = [dict(zip(names, row, strict=True)) for row in rows]
        self._mean, self._low, self._high, self._count = by_name

    def mean(self, name: str) -> float:
        """Mean of a metric over the head's rows."""
        return self._mean.get(name, math.nan)

    def high(self, name: str) -> float:
        """Largest value of a metric over the head's rows."""
        return self._high.get(name, math.nan)

    def has(self, name: str) -> bool:
        """Whether the summary recorded a metric."""
        return name in self._mean

    def count(self, name: str) -> int:
        """Number of rows on which a metric is finite."""
        return int(self._count.get(name, 0))

    @property
    def sees_all(self) -> bool:
        """Whether its rows see whole sequences, as in an encoder, not only what precedes them.

        True if no row sees one key alone, as the first row of a causal head does, and a call has as
        many rows as keys, unlike one that decodes. Unknown, and False, if rows were left out.
        """
        record, low = self.record, self._low.get("n_keys", math.nan)
        whole = not (record.excluded or record.skipped)
        return whole and 1 < low <= (record.rows + record.padded) / max(record.calls, 1)

    def entropy_slope(self, *, octaves: int, least_n: float) -> Any:
        """Slope of the entropy against log n over the largest octaves, or None."""
        if self._entropy is None or self._profile is None:
            return None
        return self._profile.final_slope(
            self.index, self._entropy, octaves=octaves, least_n=least_n
        )

    def entropy_at(self, n: float) -> tuple[float, float]:
        """Mean entropy and its standard error in the octave that contains n keys."""
        mean, error = self._profile.at(self.index, self._entropy, n)
        return float(mean), float(error)


def facts(summary: Summary) -> list[HeadFacts]:
    """The facts of every head, in the order of :attr:`acutance.HeadSummary.places`."""
    moments = summary.moments
    none = moments.count == 0
    values = (moments.mean, moments.low, moments.high)
    arrays = [*(array.masked_fill(none, math.nan) for array in values), moments.count]
    by_head = zip(*[array.tolist() for array in arrays], strict=True)
    heads = [
        HeadFacts(summary, index, place, list(rows))
        for index, (place, rows) in enumerate(zip(summary.places, by_head, strict=True))
    ]
    distances = summary.distances
    if distances is not None:
        mass, even = distances.within(NEAR)
        most = distances.peaks.max(1)
        share = most.values.double() / distances.rows.clamp(min=1).double()
        columns = (mass, even, most.indices.double() - PEAKS, share)
        none = distances.rows == 0
        numbers = (column.masked_fill(none, math.nan).tolist() for column in columns)
        for head, row in zip(heads, zip(*numbers, strict=True), strict=True):
            head.near, head.even, head.peak, head.peak_share = row
    return heads


def extremes(heads: Sequence[HeadFacts]) -> tuple[str, HeadFacts, HeadFacts] | None:
    """The sharpest and the most diffuse head, by the first of three metrics that was recorded.

    Of heads that tie, the first and the last: two heads all alike are still two heads.

    Returns:
        The metric's name and the two heads; None if none of the metrics was recorded.
    """
    for name in ("normalized_entropy", "entropy", "effective_keys"):
        if known := [head for head in heads if math.isfinite(head.mean(name))]:
            sharpest = min(known, key=lambda head: head.mean(name))
            return name, sharpest, max(reversed(known), key=lambda head: head.mean(name))
    return None
