"""Facts: the numbers of one head that rules and sentences read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from acutance.diagnose.thresholds import limit
from acutance.structure.parts import PEAKS

__all__ = ["NEAR", "HeadFacts", "Summary", "facts"]

#: Positions that count as near, for the class "local".
NEAR = int(limit("near"))


class Summary(Protocol):
    """The parts of :class:`acutance.HeadSummary` that a diagnosis reads, as a protocol."""

    @property
    def about(self) -> Mapping[str, Any]:
        """What was probed: dtype, whether the model is untrained."""

    @property
    def layers(self) -> Sequence[Any]:
        """The layers, in model order."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics, columns of ``moments``."""

    @property
    def moments(self) -> Any:
        """Moments, a row for each head."""

    @property
    def profile(self) -> Any:
        """Each metric by octave of n, or None."""

    @property
    def distances(self) -> Any:
        """Weight by octave of distance, or None."""

    @property
    def places(self) -> list[tuple[int, int]]:
        """(layer, head) of each row of ``moments``."""


class HeadFacts:
    """One head's numbers by name; NaN where a metric was not recorded or no row counts.

    Attributes:
        index: row of the summary's arrays.
        layer: index of the layer, in model order.
        head: number of the head in its layer.
        record: the layer.
        dtype: of the model's scores, such as "bfloat16"; empty if unknown.
        near: mean weight within :data:`NEAR` positions.
        even: what even weights would have there.
        peak: where a row's largest weight stands most often, relative to the query.
        peak_share: the share of rows in which it stands there.
    """

    near = even = peak = peak_share = math.nan

    def __init__(self, summary: Summary, arrays: _Arrays, index: int) -> None:
        self.index = index
        self.layer, self.head = arrays.places[index]
        self.record = summary.layers[self.layer]
        self.dtype = str(summary.about.get("dtype", "")).removeprefix("torch.")
        self._profile = summary.profile
        self._columns, self._arrays = arrays.columns, arrays
        if arrays.near is not None:
            self.near, self.even, self.peak, self.peak_share = arrays.near[index]

    def mean(self, name: str) -> float:
        """Mean of a metric over the head's rows."""
        return self._value(name, self._arrays.mean)

    def high(self, name: str) -> float:
        """The largest value of a metric among the head's rows."""
        return self._value(name, self._arrays.high)

    def has(self, name: str) -> bool:
        """Whether the summary recorded a metric."""
        return name in self._columns

    def count(self, name: str) -> int:
        """Number of rows on which a metric is finite."""
        column = self._columns.get(name)
        return 0 if column is None else int(self._arrays.count[self.index][column])

    def _value(self, name: str, values: list[list[float]]) -> float:
        return values[self.index][self._columns[name]] if self.count(name) else math.nan

    def entropy_slope(self, *, octaves: int, least_n: float) -> Any:
        """The slope of the entropy against log n over the largest octaves, or None."""
        column = self._columns.get("entropy")
        if column is None or self._profile is None:
            return None
        return self._profile.final_slope(self.index, column, octaves=octaves, least_n=least_n)

    def entropy_at(self, n: float) -> tuple[float, float]:
        """Measured entropy and its standard error in the octave whose typical count is n."""
        mean, error = self._profile.at(self.index, self._columns["entropy"], n)
        return float(mean), float(error)


class _Arrays:
    """The arrays of a summary as lists, converted once for all heads."""

    def __init__(self, summary: Summary) -> None:
        moments = summary.moments
        self.places = summary.places
        self.columns = {name: column for column, name in enumerate(summary.metrics)}
        self.mean: list[list[float]] = moments.mean.tolist()
        self.high: list[list[float]] = moments.high.tolist()
        self.count: list[list[int]] = moments.count.tolist()
        self.near: list[list[float]] | None = None
        distances = summary.distances
        if distances is not None:
            mass, even = distances.within(NEAR)
            most = distances.peaks.max(1)
            share = most.values.double() / distances.rows.clamp(min=1).double()
            none = distances.rows == 0
            columns = (mass, even, most.indices.double() - PEAKS, share)
            self.near = [
                list(row)
                for row in zip(
                    *(part.masked_fill(none, math.nan).tolist() for part in columns), strict=True
                )
            ]


def facts(summary: Summary) -> list[HeadFacts]:
    """The facts of every head, in the order of :attr:`acutance.HeadSummary.places`."""
    arrays = _Arrays(summary)
    return [HeadFacts(summary, arrays, index) for index in range(len(arrays.places))]
