"""The terminal report of a calibration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from acutance.calibration.fit.collect import HELD, TARGETS
from acutance.calibration.fit.next_factors import ROUNDING
from acutance.calibration.fit.result import Calibration, HeadCalibration
from acutance.report.screen import NumberTable, Wrapped
from acutance.summary.layer import UNTRAINED, not_loaded_sentence

__all__ = ["OTHER_TEXT", "sentences", "show"]

#: Heads that a table lists one by one; more are summed up by layer.
MOST_HEADS = 64
#: The last line of a report: what the law was not judged on.
OTHER_TEXT = (
    "A law is fitted to, and judged on, one kind of text; it can raise the loss of another. Before "
    "you use it, judge it on yours: acutance judge MODEL --law LAW --text FILE."
)
_FAMILIES = {
    "constant": "constant",
    "sqrt_log_n": "√log n",
    "log_n": "log n",
    "n": "n",
    "undecided": "undecided",
    "limited": "limited",
}


def show(result: Calibration) -> RenderableType:
    """A calibration for a rich console: title, table of heads, and sentences."""
    title = Text(_title(result), style="bold")
    lines = [Wrapped(line, bullet=" • ") for line in sentences(result)]
    return Group(title, "", _table(result), "", *lines)


def _title(result: Calibration) -> str:
    """What was held constant and at which value, and the kind of law."""
    name = result.metric.replace("_", " ")
    if result.value is not None:
        bound = "at most " if result.metric == "max_logit" else ""
        what = f"{bound}{result.value:g}{_unit(result)} at every n"
    else:
        what = f"kept at its value for n = {result.reference}"
    return f"{name}, {what}: without and with a law ({result.family}), at n visible keys"


def _table(result: Calibration) -> NumberTable:
    """The values and factors at each n, by head, or layer means if there are many heads."""
    table = NumberTable(keys=3, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    lengths = _lengths(result)
    single = len(result.heads) <= MOST_HEADS
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column("head" if single else "heads", justify="right", no_wrap=True)
    table.add_column("n =", justify="right", no_wrap=True)
    for n in lengths:
        table.add_column(str(n), justify="right", no_wrap=True)
    table.add_column("grows as")
    groups = [[one] for one in result.heads] if single else _by_layer(result.heads)
    for group in groups:
        label = str(group[0].head) if single else str(len(group))
        rows = (
            ("before", [one.before for one in group], None),
            ("predicted", [one.predicted for one in group], "dim"),
            ("after", [one.after for one in group], "bold"),
            ("factor", [one.factors for one in group], "cyan"),
        )
        for index, (what, values, style) in enumerate(rows):
            cells = [_cell(group, values, n, what, result) for n in lengths]
            first = index == 0
            table.add_row(
                str(group[0].layer) if first else "",
                label if first else "",
                Text(what, style="dim"),
                *[Text(cell, style=style or "") for cell in cells],
                _grows(group) if what == "factor" else "",
            )
    return table


def _cell(
    group: Sequence[HeadCalibration],
    values: Sequence[tuple[float, ...]],
    n: int,
    what: str,
    result: Calibration,
) -> str:
    """One cell of the table at length n: the mean over the heads, or a single head with its error.

    Args:
        group: the heads of the row.
        values: for each of them, the row's numbers at its lengths.
        n: the column's length.
        what: the row: ``before``, ``predicted``, ``after`` or ``factor``.
        result: the calibration.

    Returns:
        The text; "–" if no number is finite. In the row ``after``, ✗ marks an impossible target, ▲
        a factor at its limit, and ! a missed target.
    """
    there = [
        (value[one.lengths.index(n)], one)
        for value, one in zip(values, group, strict=True)
        if n in one.lengths
    ]
    numbers = [value for value, _ in there if math.isfinite(value)]
    if not numbers:
        return "–"
    mean = sum(numbers) / len(numbers)
    if len(group) > 1:
        return f"{mean:.3g}"
    one = there[0][1]
    at = one.lengths.index(n)
    error = {"before": one.before_error, "after": one.after_error, "factor": one.factor_errors}.get(
        what
    )
    text = _with_error(mean, error[at]) if error is not None else f"{mean:.3g}"
    mark = {"impossible": " ✗", "limited": " ▲", "missed": " !"}.get(one.status[at], "")
    return text + (mark if what == "after" else "")


def _with_error(value: float, error: float) -> str:
    """A value with its error, if that is above 0 and at most ten times the value."""
    if not 0 < error <= 10 * max(abs(value), 1e-9):
        return f"{value:.3g}"
    return f"{value:.3g}±{error:.1g}"


def _grows(group: Sequence[HeadCalibration]) -> str:
    """The growth of a head's factors in words, or the two most frequent ones of several heads."""
    counts = Counter(one.family for one in group)
    if len(group) == 1:
        one = group[0]
        if one.family == "undecided":
            return " or ".join(_FAMILIES[name] for name in one.candidates) + "?"
        return _FAMILIES[one.family]
    return ", ".join(f"{count}× {_FAMILIES[name]}" for name, count in counts.most_common(2))


def sentences(result: Calibration) -> Iterator[str]:
    """What a calibration achieved and what it did not, one sentence for each point."""
    unit = _unit(result)
    if result.weights_not_loaded is not None:
        yield not_loaded_sentence(result.weights_not_loaded)
    if result.untrained:
        yield UNTRAINED
    if result.metric == "max_logit":
        over = sum(_exceeds(one.before, one.target) for one in result.heads)
        still = sum(_exceeds(one.after, one.target) for one in result.heads)
        yield (
            f"{over} of {len(result.heads)} heads exceeded the bound without a law; with the "
            f"law {still} do."
        )
    else:
        yield (
            f"Largest distance from the target over heads and n: {result.worst(law=False):.0%} "
            f"without, {result.worst():.1%} with the law (held means within {HELD:.0%}, or "
            f"{TARGETS[result.metric].floor:g}{unit})."
        )
    counts = result.counts()
    total = sum(counts.values())
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    yield f"Of {total} pairs of head and n: {', '.join(parts)}."
    if unchanged := _heads(result, "kept"):
        yield from _unchanged_heads(result, unchanged)
    if gone := _heads(result, "impossible"):
        yield (
            f"{_listed(gone)} cannot reach the target at some n: rows with few keys have at "
            "most log n nats (and at least 1/n as a top weight). Their factor there is 1."
        )
    if limited := _heads(result, "limited"):
        edges = {
            factor
            for one in limited
            for factor, status in zip(one.factors, one.status, strict=True)
            if status == "limited"
        }
        text = " and ".join(dict.fromkeys(f"{edge:.3g}" for edge in sorted(edges)))
        yield (
            f"{_listed(limited)} do{_verb_ending(limited)} not reach the target within the limit "
            f"of the factors, {text}."
        )
    if missed := _heads(result, "missed"):
        yield f"{_listed(missed)} missed the target at some n: try more passes, or another law."
    yield from _growth(result)
    windows = ", ".join(f"{count} of {length} tokens" for length, count in result.windows.items())
    measured = f"Measured {result.passes} times on windows: {windows}"
    if result.metric == "max_logit":
        yield f"{measured}."
        yield (
            "Other text may exceed the bound, especially a longer one: use a lower value than "
            "the bound that you need."
        )
    else:
        yield f"{measured}; ± is one standard error."
        yield from _noise(result)
    for name, why in list(result.skipped.items())[:4]:
        yield f"Not fitted: {name}: {why}."
    if len(result.skipped) > 4:
        yield f"Not fitted: {len(result.skipped) - 4} more layers."
    if result.family == "table":
        yield (
            f"Beyond n = {result.lengths[-1]} each head's factor is extrapolated by its family "
            "(for undecided heads the best one that grows no faster than log n), without "
            f"measurement. Rows with fewer than {result.lengths[0]} keys use that length's "
            "factor."
        )
    else:
        yield f"Beyond n = {result.lengths[-1]} nothing was measured."
    yield OTHER_TEXT


def _exceeds(shown: Sequence[float], bound: Sequence[float]) -> bool:
    """Whether a head's largest logits exceed its bound, which is one for all n."""
    return max(shown) > bound[0] + ROUNDING * abs(bound[0])


def _unchanged_heads(result: Calibration, heads: Sequence[HeadCalibration]) -> Iterator[str]:
    """A sentence on heads that were left unchanged, and how far they are from the target."""
    if result.metric == "max_logit":
        yield f"Below the bound and unchanged: {_listed(heads)}."
        return
    left = max(
        abs(one.before[at] - one.target[at]) / _target_size(result, one, at)
        for one in heads
        for at in _possible_lengths(one)
    )
    more = "; more windows reduce the noise" if left > HELD else ""
    yield (
        f"Unchanged: {_listed(heads)}. The change that a law would make there, at most "
        f"{left:.1%} of the target, is insignificant or below 1 %{more}."
    )


def _noise(result: Calibration) -> Iterator[str]:
    """A sentence on how far other text may be from these values by chance; none if unknown."""
    errors = sorted(
        error
        for one in result.heads
        for at in _possible_lengths(one)
        if math.isfinite(error := one.after_error[at] / _target_size(result, one, at))
    )
    if errors:
        yield (
            "Other text differs by chance: the standard error of a value is "
            f"{errors[len(errors) // 2]:.1%} of its target for the median and at most "
            f"{errors[-1]:.1%}. Four times as many windows halve it."
        )


def _possible_lengths(one: HeadCalibration) -> list[int]:
    """Indices of the lengths at which the target is possible for a head."""
    return [at for at, status in enumerate(one.status) if status != "impossible"]


def _target_size(result: Calibration, one: HeadCalibration, at: int) -> float:
    """The number that a head's distance from its target at length ``at`` is divided by.

    It is the target, or for targets near 0 a size at which 5 % is of no interest.
    """
    return max(abs(one.target[at]), TARGETS[result.metric].floor / HELD, 1e-12)


def _growth(result: Calibration) -> Iterator[str]:
    """Sentences on how the factors grow with n, and on β/Λ, the factor over the critical scale."""
    families = Counter(one.family for one in result.heads)
    limited = families.pop("limited", 0)
    text = ", ".join(f"{count} {_FAMILIES[name]}" for name, count in families.most_common())
    if limited:
        yield (
            f"{limited} of {len(result.heads)} heads reach the limit of the factors and have no "
            "family."
        )
    if not families:
        pass
    elif len(result.lengths) < 3:
        yield (
            f"Growth of the factors: {text}; at least 3 lengths are needed to distinguish families."
        )
    else:
        yield f"Growth of the factors with n, by fit error: {text}."
    last = [
        (one.critical[-1], one.focus[-1]) for one in result.heads if math.isfinite(one.critical[-1])
    ]
    if last:
        before = sorted(1 / scale if scale > 0 else math.inf for scale, _ in last)
        after = sorted(focus for _, focus in last)
        middle = len(last) // 2
        yield (
            f"β/Λ at n = {result.lengths[-1]} (above 1, one key dominates): median head "
            f"{before[middle]:.2g} without, {after[middle]:.2g} with the law."
        )


def _heads(result: Calibration, status: str) -> list[HeadCalibration]:
    """The heads with this status at some length."""
    return [one for one in result.heads if status in one.status]


def _verb_ending(heads: Sequence[HeadCalibration]) -> str:
    """The ending of "do" for one head ("es") or several (none)."""
    return "es" if len(heads) == 1 else ""


def _listed(heads: Sequence[HeadCalibration]) -> str:
    """Layers and heads as text, or only their numbers if there are more than four layers."""
    text = [f"layer {group[0].layer} {_numbers(group)}" for group in _by_layer(heads)]
    if len(text) > 4:
        return f"{len(heads)} heads of {len(text)} layers"
    return "; ".join(text)


def _numbers(group: Sequence[HeadCalibration]) -> str:
    """Heads of one layer as text, or only their number if there are more than eight."""
    heads = [str(one.head) for one in group]
    if len(heads) > 8:
        return f"({len(heads)} heads)"
    return f"head{'s' if len(heads) > 1 else ''} {', '.join(heads)}"


def _by_layer(heads: Iterable[HeadCalibration]) -> list[list[HeadCalibration]]:
    """The heads in one list for each layer."""
    result: dict[str, list[HeadCalibration]] = {}
    for one in heads:
        result.setdefault(one.module, []).append(one)
    return list(result.values())


def _lengths(result: Calibration) -> list[int]:
    """All lengths of a calibration, ascending."""
    return sorted({n for one in result.heads for n in one.lengths})


def _unit(result: Calibration) -> str:
    """Unit of the target with a space before it; empty for pure numbers."""
    unit = TARGETS[result.metric].unit
    return "" if unit == "1" else f" {unit}"
