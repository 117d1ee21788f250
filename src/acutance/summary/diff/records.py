"""Records of what changed between two summaries, head by head and layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from acutance.files import finite
from acutance.summary.columns import Columns
from acutance.summary.diff.match_heads import Matched
from acutance.summary.standard_errors import HOW, How

SCHEMA = "acutance.diff/1"
Verdict = Literal["moved", "unclear", "within noise", "equal"]
VERDICTS: dict[str, str] = {
    "moved": "the change is larger than that from choosing another text of the same kind",
    "unclear": (
        "larger than for independent rows, but the variation between sequences is not known "
        "well enough to say more"
    ),
    "within noise": "no larger than the change from choosing another text of the same kind",
    "equal": "no change except rounding",
}
#: Verdicts by what ``Diff.verdicts`` holds.
ORDER: tuple[Verdict, ...] = ("equal", "within noise", "unclear", "moved")
#: The intervals of all heads of one metric hold together with this probability, or more.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class HeadChange:
    """The change of one metric of one head.

    Attributes:
        metric: its name.
        layer: index of the layer in the first state.
        head: number of the head in its layer.
        module: qualified name of the layer's module in the first state.
        before: mean over rows in the first state, NaN where no row counts.
        after: the same in the second.
        change: ``after − before``.
        error: standard error of the change, between sequences; NaN where it is not known.
        low: lower end of the interval of the change; see :class:`Diff`.
        high: upper end.
        size: the change in units of the rows' standard deviation.
        rows: rows of both states that count.
        verdict: one of :data:`VERDICTS`; None where a side has no row.
    """

    metric: str
    layer: int
    head: int
    module: str
    before: float
    after: float
    change: float
    error: float
    low: float
    high: float
    size: float
    rows: tuple[int, int]
    verdict: Verdict | None


@dataclass(frozen=True)
class LayerChange:
    """The change of one metric over the shared heads of a layer.

    Attributes:
        metric: name of the metric.
        layer: index of the layer in the first summary.
        module: qualified name of its module there.
        before: mean over heads in the first summary.
        after: the same in the second.
        change: mean change of a head.
        error: upper bound on the standard error of ``change``, since heads may err in common.
        heads: number of heads that both summaries have.
        moved: number of heads whose verdict is "moved".
        most: number, in the layer of the first summary, of the head with the largest absolute
            change; None if no head has rows on both sides.
    """

    metric: str
    layer: int
    module: str
    before: float
    after: float
    change: float
    error: float
    heads: int
    moved: int
    most: int | None


@dataclass(frozen=True)
class Diff(Columns):
    """The result of :func:`diff`: (heads, metrics) arrays over the shared heads, in model order.

    The interval of a change, ``low`` to ``high``, is t-distributed with Welch's degrees of freedom
    and widened (Bonferroni), so that the intervals of all heads of a metric hold together with
    probability :data:`CONFIDENCE`. A head whose interval excludes 0 has moved.

    Attributes:
        about: the facts stored in both summaries.
        matched: which layers and heads both have, and what only one of them has.
        metrics: the metrics that both recorded.
        before: means of the first.
        after: means of the second.
        error: standard error of ``after − before``; NaN if not known.
        floor: the standard error if rows were independent.
        low: lower end of the interval.
        high: upper end.
        verdicts: int8, index in ("equal", "within noise", "unclear", "moved"); −1 if a side has no
            rows.
        rows: (2, heads, metrics) int64, number of rows.
        deviation: standard deviation over the rows of both.
        shift: total variation distance of the two histograms, from 0 (equal) to 1 (disjoint); it
            also shows changes that leave the mean unchanged, and is larger for few rows. NaN at
            equal n.
        how: source of ``error``: a key of :data:`acutance.summary.standard_errors.HOW`.
        keys: smallest and largest mean number of keys of the compared octaves; None for all rows.
        warnings: sentences on what makes the two hard to compare.
    """

    about: tuple[Mapping[str, Any], Mapping[str, Any]]
    matched: Matched
    metrics: tuple[str, ...]
    before: Tensor
    after: Tensor
    error: Tensor
    floor: Tensor
    low: Tensor
    high: Tensor
    verdicts: Tensor
    rows: Tensor
    deviation: Tensor
    shift: Tensor
    how: How
    keys: tuple[float, float] | None
    warnings: tuple[str, ...]

    @property
    def change(self) -> Tensor:
        """``after − before``."""
        return self.after - self.before

    @property
    def assumes(self) -> str:
        """What the standard errors assume, as a sentence."""
        return HOW[self.how]

    def _column(self, metric: str) -> int:
        """Index of a shared metric.

        Raises:
            ValueError: if the two do not share it.
        """
        if metric not in self.metrics:
            raise ValueError(
                f"{metric!r} is not in both states; they share {', '.join(self.metrics)}"
            )
        return self.metrics.index(metric)

    def of(self, metric: str) -> list[HeadChange]:
        """The change of a metric in every shared head, in model order.

        Raises:
            ValueError: if the two do not share the metric.
        """
        column = self._column(metric)
        size = self.change / self.deviation.masked_fill(self.deviation == 0, math.nan)
        numbers = {
            "before": self.before,
            "after": self.after,
            "change": self.change,
            "error": self.error,
            "low": self.low,
            "high": self.high,
            "size": size,
        }
        values = torch.stack([part[:, column] for part in numbers.values()], 1).tolist()
        rows, verdicts = self.rows[:, :, column].T.tolist(), self.verdicts[:, column].tolist()
        return [
            HeadChange(
                metric,
                place.layer,
                place.head,
                place.module,
                **dict(zip(numbers, values[index], strict=True)),
                rows=(rows[index][0], rows[index][1]),
                verdict=None if verdicts[index] < 0 else ORDER[verdicts[index]],
            )
            for index, place in enumerate(self.matched.places)
        ]

    def moved(self, metric: str, limit: int | None = None) -> list[HeadChange]:
        """Heads whose change is significant first, then the others, each group by size of change.

        Args:
            metric: a shared metric.
            limit: largest number of heads to return; None for all.
        """
        judged = [head for head in self.of(metric) if head.verdict is not None]
        judged.sort(key=lambda head: (head.verdict != "moved", -abs(head.change)))
        return judged[:limit]

    def count(self, metric: str, verdict: Verdict) -> int:
        """Number of heads with a given verdict."""
        return int((self.verdicts[:, self._column(metric)] == ORDER.index(verdict)).sum())

    def layers(self, metric: str) -> list[LayerChange]:
        """The change of each shared layer, in model order.

        Raises:
            ValueError: if the two do not share the metric.
        """
        by_layer: dict[int, list[HeadChange]] = {}
        for head in self.of(metric):
            by_layer.setdefault(head.layer, []).append(head)
        return [_layer(metric, heads) for heads in by_layer.values()]

    def columns(self) -> dict[str, list[Any]]:
        """One row for each metric and shared head, as columns: the fields of :class:`HeadChange`.

        ``rows`` becomes two columns, ``floor`` and ``shift`` are added, and unknown values are
        None.
        """
        table: dict[str, list[Any]] = {}
        for column, metric in enumerate(self.metrics):
            extra = torch.stack([self.floor[:, column], self.shift[:, column]], 1).tolist()
            for head, (floor, shift) in zip(self.of(metric), extra, strict=True):
                record = asdict(head)
                record["rows_before"], record["rows_after"] = record.pop("rows")
                verdict = record.pop("verdict")
                record |= {"floor": floor, "shift": shift, "verdict": verdict}
                for name, value in record.items():
                    table.setdefault(name, []).append(finite(value))
        return table

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; unknown values are None."""
        columns = self.columns()
        names = list(columns)
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        record = {
            "schema": SCHEMA,
            "before": dict(self.about[0]),
            "after": dict(self.about[1]),
            "warnings": self.warnings,
            "only_before": self.matched.only[0],
            "only_after": self.matched.only[1],
            "equal_n": self.keys,
            "errors": self.how,
            "assumes": self.assumes,
            "confidence": CONFIDENCE,
            "verdicts": VERDICTS,
            "layers": [asdict(layer) for name in self.metrics for layer in self.layers(name)],
            "heads": rows,
        }
        return {name: finite(value) for name, value in record.items()}


def _layer(metric: str, heads: list[HeadChange]) -> LayerChange:
    """The mean change of one layer's heads."""
    judged = [head for head in heads if head.verdict is not None]

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values) if values else math.nan

    return LayerChange(
        metric,
        heads[0].layer,
        heads[0].module,
        before=mean([head.before for head in judged]),
        after=mean([head.after for head in judged]),
        change=mean([head.change for head in judged]),
        error=mean([head.error for head in judged]),
        heads=len(heads),
        moved=sum(head.verdict == "moved" for head in judged),
        most=max(judged, key=lambda head: abs(head.change)).head if judged else None,
    )
