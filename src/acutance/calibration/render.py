"""A calibration as a table, and in sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from acutance.calibration.fit.measure import TARGETS
from acutance.calibration.fit.result import HELD, Calibration, HeadCalibration
from acutance.report.table import Cell, Column, Table
from acutance.summary.layer import UNTRAINED, not_loaded_sentence

__all__ = ["OTHER_TEXT", "not_fitted", "of_model", "sentences", "table"]

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


def table(result: Calibration) -> Table:
    """The values and factors at each n, by head, or layer means if there are many heads."""
    lengths = sorted({n for head in result.heads for n in head.lengths})
    single = len(result.heads) <= MOST_HEADS
    rows = []
    for group in [[head] for head in result.heads] if single else _by_layer(result.heads):
        names: list[int | None] = [group[0].layer, group[0].head if single else len(group)]
        for row, field, errors, style in (
            ("before", "before", "before_error", ""),
            ("predicted", "predicted", None, "dim"),
            ("after", "after", "after_error", "bold"),
            ("factor", "factors", "factor_errors", "cyan"),
        ):
            cells = [Cell(_cell(group, field, errors, n), style) for n in lengths]
            rows.append([*names, Cell(row, "dim"), *cells, _grows(group) * (row == "factor")])
            names = [None, None]
    what = f"kept at its value for n = {result.reference}"
    if result.value is not None:
        what = f"{result.value:g}{_unit(result)} at every n"
    headings = ("layer", "head" if single else "heads", "n =", *map(str, lengths))
    title = (
        f"{result.metric.replace('_', ' ')}, {what}: without and with a law ({result.family}), "
        "at n visible keys"
    )
    columns = [*map(Column, headings), Column("grows as", "words")]
    return Table(title, columns, rows, [*sentences(result)], keys=3)


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
