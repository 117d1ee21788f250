"""The result of a calibration: a law, with the measurements of each head."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from acutance.calibration.fit.measure import TARGETS
from acutance.calibration.law import Law
from acutance.files import as_json, finite, write_text
from acutance.report.table import Cell, Column, Table
from acutance.summary.layer import UNTRAINED, not_loaded_sentence

__all__ = ["Calibration", "HeadCalibration"]

#: Heads that a table lists one by one; more are summed up by layer.
MOST_HEADS = 64
#: The last line of a report: what the law was not judged on.
OTHER_TEXT = (
    "A law is fitted to, and judged on, one kind of text; it can raise the loss of another. Before "
    "you use it, judge it on yours: acutance judge MODEL --law LAW --text FILE."
)
_FAMILIES = {"sqrt_log_n": "√log n", "log_n": "log n"}
#: What the heads with a status at some length have in common.
_STATUSES = {
    "kept": "the change that a law would make there is insignificant or below 1 %",
    "impossible": "rows with few keys have at most log n nats (and at least 1/n as a top weight); "
    "the factor there is 1",
    "limited": "the target is not reached within the limit of the factors",
    "missed": "try more passes, or another law",
}
_MARKS = {"impossible": " ✗", "limited": " ▲", "missed": " !"}

#: A target is held where the value is within this share of it.
HELD = 0.05
#: What each status of a length means.
STATUSES = {
    "held": "within 5 % of the target with the law",
    "missed": "more than 5 % from the target with the law",
    "kept": "unchanged: without a law its difference from the target is insignificant or below 1 %",
    "impossible": "the target cannot be reached with this number of keys",
    "limited": "the factor is at its limit and the target is not reached",
}
Numbers = tuple[float, ...]


@dataclass(frozen=True)
class HeadCalibration:
    """One head: numbers at each of its lengths.

    Attributes:
        layer: number among the attention layers.
        head: query head.
        module: qualified name of the layer.
        lengths: visible keys n.
        target: what was wanted.
        before: what rows of n keys have without a law.
        before_error: its standard error over parts of the text.
        predicted: what was to be expected under the law, before it was measured.
        after: what was measured under the law.
        after_error: its standard error.
        factors: of the law.
        factor_errors: their standard errors, by the measured slope.
        status: one of :data:`STATUSES`.
        family: the growth of the factors: ``constant``, ``sqrt_log_n``, ``log_n``, ``n``,
            ``undecided``, or ``limited`` where a factor is at its limit.
        candidates: families that cannot be distinguished from the best.
        family_errors: relative error of the factors under each family, root mean square.
        growth: increase of the factor per unit of log n, with its standard error; NaN where there
            is one length, or a factor is at its limit.
    """

    layer: int
    head: int
    module: str
    lengths: tuple[int, ...]
    target: Numbers
    before: Numbers
    before_error: Numbers
    predicted: Numbers
    after: Numbers
    after_error: Numbers
    factors: Numbers
    factor_errors: Numbers
    status: tuple[str, ...]
    family: str
    candidates: tuple[str, ...]
    family_errors: Mapping[str, float]
    growth: tuple[float, float]


@dataclass(frozen=True, repr=False)
class Calibration(Law):
    """The result of :func:`acutance.calibrate`: a law to apply and save, with its measurements.

    :meth:`Law.save` writes the law alone, :meth:`to_json` everything.

    Attributes:
        heads: every head that was fitted, in model order.
        metric: what was held constant.
        value: the wanted value; None where it is each head's own at the reference.
        reference: length whose value is kept, or at which short rows' factors end.
        family: the law that was requested.
        passes: measurements made.
        windows: length and number of windows measured.
        skipped: module name and why it was not fitted.
    """

    heads: tuple[HeadCalibration, ...] = ()
    metric: str = "entropy"
    value: float | None = None
    reference: int = 0
    family: str = "table"
    passes: int = 0
    windows: Mapping[int, int] = field(default_factory=dict, hash=False)
    skipped: Mapping[str, str] = field(default_factory=dict, hash=False)

    def counts(self) -> dict[str, int]:
        """How many (head, length) pairs have each status.

        The reference length is left out where its own value is the target.
        """
        counts = dict.fromkeys(STATUSES, 0)
        for head in self.heads:
            for n, status in zip(head.lengths, head.status, strict=True):
                if self.value is not None or n != self.reference or len(head.lengths) == 1:
                    counts[status] += 1
        return counts

    def size(self, target: float) -> float:
        """The number that a distance from a target is divided by.

        It is the target, or for targets near 0 a size at which 5 % is of no interest (0.2 nats for
        entropy).
        """
        return max(abs(target), TARGETS[self.metric].floor / HELD)

    def worst(self, *, law: bool = True) -> float:
        """Largest relative distance from the target, over heads and lengths that can reach it.

        The distance is divided by :meth:`size` of the target.

        Args:
            law: measure under the law; False for the model without it.
        """
        distances = [
            abs(value - target) / self.size(target)
            for head in self.heads
            for value, target, status in zip(
                head.after if law else head.before, head.target, head.status, strict=True
            )
            if status != "impossible"
        ]
        return max(distances, default=0.0)

    def table(self) -> Table:
        """The values and factors at each n, by head, or layer means if there are many heads."""
        lengths = sorted({n for head in self.heads for n in head.lengths})
        single = len(self.heads) <= MOST_HEADS
        rows = []
        for group in [[head] for head in self.heads] if single else _by_layer(self.heads):
            names: list[int | None] = [group[0].layer, group[0].head if single else len(group)]
            for row, numbers, errors, style in (
                ("before", "before", "before_error", ""),
                ("predicted", "predicted", None, "dim"),
                ("after", "after", "after_error", "bold"),
                ("factor", "factors", "factor_errors", "cyan"),
            ):
                cells = [Cell(_cell(group, numbers, errors, n), style) for n in lengths]
                rows.append([*names, Cell(row, "dim"), *cells, _grows(group) * (row == "factor")])
                names = [None, None]
        what = f"kept at its value for n = {self.reference}"
        if self.value is not None:
            what = f"{self.value:g}{_unit(self)} at every n"
        headings = ("layer", "head" if single else "heads", "n =", *map(str, lengths))
        title = (
            f"{self.metric.replace('_', ' ')}, {what}: without and with a law ({self.family}), "
            "at n visible keys"
        )
        columns = [*map(Column, headings), Column("grows as", "words")]
        return Table(title, columns, rows, [*sentences(self)], keys=3)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; numbers that are not finite become None."""
        return {
            "schema": "acutance.calibration_report/1",
            "law": self.record(),
            "metric": self.metric,
            "value": self.value,
            "reference": self.reference,
            "family": self.family,
            "passes": self.passes,
            "windows": {str(length): count for length, count in self.windows.items()},
            "skipped": dict(self.skipped),
            "statuses": STATUSES,
            "beyond": BEYOND,
            "counts": self.counts(),
            "heads": [finite(asdict(one)) for one in self.heads],
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict`, whole or not at all."""
        write_text(path, as_json(self.to_dict(), indent=1) + "\n")


#: What a table does where nothing was measured.
BEYOND = (
    "beyond the longest calibrated length each head's factor is extrapolated by its fitted "
    "family, without measurement; rows shorter than the shortest length use its factor"
)


def _cell(group: Sequence[HeadCalibration], field: str, errors: str | None, n: int) -> str:
    """The mean of a field over heads at length n, or one head's number with its error.

    After it, ✗ marks an impossible target, ▲ a factor at its limit, and ! a missed target.
    """
    numbers = [getattr(head, field)[head.lengths.index(n)] for head in group if n in head.lengths]
    numbers = [number for number in numbers if math.isfinite(number)]
    if not numbers:
        return "–"
    text = f"{sum(numbers) / len(numbers):.3g}"
    if len(group) > 1:
        return text
    at = group[0].lengths.index(n)
    error = 0.0 if errors is None else getattr(group[0], errors)[at]
    if 0 < error <= 10 * max(abs(numbers[0]), 1e-9):
        text += f"±{error:.1g}"
    return text + (_MARKS.get(group[0].status[at], "") if field == "after" else "")


def _grows(group: Sequence[HeadCalibration]) -> str:
    """The growth of a head's factors in words, or the two most frequent ones of several heads."""
    if len(group) > 1:
        counts = Counter(head.family for head in group)
        return ", ".join(f"{n}× {_FAMILIES.get(name, name)}" for name, n in counts.most_common(2))
    head = group[0]
    names = head.candidates if head.family == "undecided" else (head.family,)
    return " or ".join(_FAMILIES.get(n, n) for n in names) + "?" * (head.family == "undecided")


def sentences(result: Calibration) -> Iterator[str]:
    """What a calibration achieved and what it did not, one sentence for each point."""
    yield from of_model(result)
    yield (
        f"Largest distance from the target over heads and n: {result.worst(law=False):.0%} "
        f"without, {result.worst():.1%} with the law (held means within {HELD:.0%}, or "
        f"{TARGETS[result.metric].floor:g}{_unit(result)})."
    )
    counts = result.counts()
    several = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    yield f"Of {sum(counts.values())} pairs of head and n: {several}."
    for status, meaning in _STATUSES.items():
        if heads := [head for head in result.heads if status in head.status]:
            yield f"{status.capitalize()} at some n: {_listed(heads)}; {meaning}."
    families = Counter(_FAMILIES.get(head.family, head.family) for head in result.heads)
    grown = ", ".join(f"{count} {family}" for family, count in families.most_common())
    few = "; at least 3 lengths are needed to distinguish families"
    yield f"Growth of the factors with n: {grown}{few if len(result.lengths) < 3 else ''}."
    windows = ", ".join(f"{count} of {length} tokens" for length, count in result.windows.items())
    yield f"Measured {result.passes} times on windows: {windows}; ± is one standard error."
    errors = sorted(
        error / result.size(target)
        for head in result.heads
        for error, target, status in zip(head.after_error, head.target, head.status, strict=True)
        if status != "impossible" and math.isfinite(error)
    )
    if errors:
        yield (
            "Other text differs by chance: the standard error of a value is "
            f"{errors[len(errors) // 2]:.1%} of its target for the median and at most "
            f"{errors[-1]:.1%}. Four times as many windows halve it."
        )
    yield from not_fitted(result)
    beyond = f"Beyond n = {result.lengths[-1]} "
    if result.family == "table":
        yield (
            f"{beyond}each head's factor is extrapolated by its family (for undecided heads the "
            "best one that grows no faster than log n), without measurement. Rows with fewer than "
            f"{result.lengths[0]} keys use that length's factor."
        )
    else:
        yield f"{beyond}nothing was measured."
    yield OTHER_TEXT


def of_model(result: Calibration) -> Iterator[str]:
    """Sentences on a model whose weights are missing or look untrained."""
    if result.weights_not_loaded is not None:
        yield not_loaded_sentence(result.weights_not_loaded)
    if result.untrained:
        yield UNTRAINED


def not_fitted(result: Calibration) -> Iterator[str]:
    """Sentences on the layers that were left out."""
    for name, why in list(result.skipped.items())[:4]:
        yield f"Not fitted: {name}: {why}."
    if len(result.skipped) > 4:
        yield f"Not fitted: {len(result.skipped) - 4} more layers."


def _listed(heads: Sequence[HeadCalibration]) -> str:
    """Layers and heads as text, or only their numbers if there are many."""
    groups = _by_layer(heads)
    if len(groups) > 4 or max(map(len, groups)) > 8:
        return f"{len(heads)} heads of {len(groups)} layers"
    return "; ".join(
        f"layer {group[0].layer} head{'s' * (len(group) > 1)} "
        + ", ".join(str(head.head) for head in group)
        for group in groups
    )


def _by_layer(heads: Iterable[HeadCalibration]) -> list[list[HeadCalibration]]:
    """The heads in one list for each layer."""
    layers: dict[str, list[HeadCalibration]] = {}
    for head in heads:
        layers.setdefault(head.module, []).append(head)
    return list(layers.values())


def _unit(result: Calibration) -> str:
    """Unit of the target with a space before it; empty for pure numbers."""
    unit = TARGETS[result.metric].unit
    return "" if unit == "1" else f" {unit}"
