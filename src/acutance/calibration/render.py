"""The terminal report of a calibration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from acutance.calibration.fit.collect import HELD, TARGETS
from acutance.calibration.fit.next_factors import ROUNDING
from acutance.calibration.fit.result import Calibration, HeadCalibration
from acutance.report.screen import NumberTable
from acutance.summary.layer import not_loaded_sentence

__all__ = ["sentences", "show"]

#: Heads that a table lists one by one; more are summed up by layer.
MOST_HEADS = 64
_FAMILIES = {
    "constant": "constant",
    "sqrt_log_n": "√log n",
    "log_n": "log n",
    "n": "n",
    "undecided": "undecided",
    "limited": "limited",
}


def show(found: Calibration) -> RenderableType:
    """Table and sentences, for a rich console."""
    title = Text(_title(found), style="bold")
    lines = [Padding(Text(f"• {line}"), (0, 0, 0, 1)) for line in sentences(found)]
    return Group(title, "", _table(found), "", *lines)


def _title(found: Calibration) -> str:
    name = found.metric.replace("_", " ")
    if found.value is not None:
        bound = "at most " if found.metric == "max_logit" else ""
        what = f"{bound}{found.value:g}{_unit(found)} at every n"
    else:
        what = f"kept at its value for n = {found.reference}"
    return f"{name}, {what}: without and with a law ({found.family}), at n visible keys"


def _table(found: Calibration) -> NumberTable:
    """Head by head, or where there are many, the layers' means."""
    table = NumberTable(keys=3, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    lengths = _lengths(found)
    single = len(found.heads) <= MOST_HEADS
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column("head" if single else "heads", justify="right", no_wrap=True)
    table.add_column("n =", justify="right", no_wrap=True)
    for n in lengths:
        table.add_column(str(n), justify="right", no_wrap=True)
    table.add_column("grows as")
    groups = [[one] for one in found.heads] if single else _by_layer(found.heads)
    for group in groups:
        label = str(group[0].head) if single else str(len(group))
        rows = (
            ("before", [one.before for one in group], None),
            ("predicted", [one.predicted for one in group], "dim"),
            ("after", [one.after for one in group], "bold"),
            ("factor", [one.factors for one in group], "cyan"),
        )
        for index, (what, values, style) in enumerate(rows):
            cells = [_cell(group, values, n, what, found) for n in lengths]
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
    found: Calibration,
) -> str:
    """Mean over the heads; with one head and enough room, its error."""
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
    told = _pm(mean, error[at]) if error is not None else f"{mean:.3g}"
    mark = {"impossible": " ✗", "limited": " ▲", "missed": " !"}.get(one.status[at], "")
    return told + (mark if what == "after" else "")


def _pm(value: float, error: float) -> str:
    """A value with its standard error, if that is finite."""
    if not 0 < error <= 10 * max(abs(value), 1e-9):
        return f"{value:.3g}"
    return f"{value:.3g}±{error:.1g}"


def _grows(group: Sequence[HeadCalibration]) -> str:
    counts = Counter(one.family for one in group)
    if len(group) == 1:
        one = group[0]
        if one.family == "undecided":
            return " or ".join(_FAMILIES[name] for name in one.candidates) + "?"
        return _FAMILIES[one.family]
    return ", ".join(f"{count}× {_FAMILIES[name]}" for name, count in counts.most_common(2))


def sentences(found: Calibration) -> Iterator[str]:
    """The sentences below the table."""
    unit = _unit(found)
    if found.weights_not_loaded is not None:
        yield not_loaded_sentence(found.weights_not_loaded)
    if found.metric == "max_logit":
        over = sum(_exceeds(one.before, one.target) for one in found.heads)
        still = sum(_exceeds(one.after, one.target) for one in found.heads)
        yield (
            f"{over} of {len(found.heads)} heads exceeded the bound without a law; with the "
            f"law {still} do."
        )
    else:
        yield (
            f"Largest distance from the target over heads and n: {found.worst(law=False):.0%} "
            f"without, {found.worst():.1%} with the law (held means within {HELD:.0%}, or "
            f"{TARGETS[found.metric].floor:g}{unit})."
        )
    counts = found.counts()
    total = sum(counts.values())
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    yield f"Of {total} pairs of head and n: {', '.join(parts)}."
    if kept := _heads(found, "kept"):
        yield from _kept(found, kept)
    if gone := _heads(found, "impossible"):
        yield (
            f"{_named(gone)} cannot reach the target at some n: rows with few keys have at "
            "most log n nats (and at least 1/n as a top weight). Their factor there is 1."
        )
    if limited := _heads(found, "limited"):
        edges = {
            factor
            for one in limited
            for factor, status in zip(one.factors, one.status, strict=True)
            if status == "limited"
        }
        told = " and ".join(dict.fromkeys(f"{edge:.3g}" for edge in sorted(edges)))
        yield (
            f"{_named(limited)} do{_s(limited)} not reach the target within the limit of the "
            f"factors, {told}."
        )
    if missed := _heads(found, "missed"):
        yield f"{_named(missed)} missed the target at some n: try more passes, or another law."
    yield from _growth(found)
    windows = ", ".join(f"{count} of {length} tokens" for length, count in found.windows.items())
    measured = f"Measured {found.passes} times on windows: {windows}"
    if found.metric == "max_logit":
        yield f"{measured}."
        yield (
            "Other text may exceed the bound, especially a longer one: use a lower value than "
            "the bound that you need."
        )
    else:
        yield f"{measured}; ± is one standard error."
        yield from _noise(found)
    for name, why in list(found.skipped.items())[:4]:
        yield f"Not fitted: {name}: {why}."
    if len(found.skipped) > 4:
        yield f"Not fitted: {len(found.skipped) - 4} more layers."
    if found.family == "table":
        yield (
            f"Beyond n = {found.lengths[-1]} each head's factor is extrapolated by its family "
            "(for undecided heads the best one that grows no faster than log n), without "
            f"measurement. Rows with fewer than {found.lengths[0]} keys use that length's "
            "factor."
        )
    else:
        yield f"Beyond n = {found.lengths[-1]} nothing was measured."


def _exceeds(shown: Sequence[float], bound: Sequence[float]) -> bool:
    """Whether a head's largest logits exceed its bound, which is one for all n."""
    return max(shown) > bound[0] + ROUNDING * abs(bound[0])


def _kept(found: Calibration, heads: Sequence[HeadCalibration]) -> Iterator[str]:
    """What is not mended, and how large it may be."""
    if found.metric == "max_logit":
        yield f"Below the bound and unchanged: {_named(heads)}."
        return
    left = max(
        abs(one.before[at] - one.target[at]) / _size(found, one, at)
        for one in heads
        for at in _told(one)
    )
    more = "; more windows reduce the noise" if left > HELD else ""
    yield (
        f"Unchanged: {_named(heads)}. The change that a law would make there, at most "
        f"{left:.1%} of the target, is insignificant or below 1 %{more}."
    )


def _noise(found: Calibration) -> Iterator[str]:
    """How far a text of as many windows may be off by chance, as no fit to this one can show."""
    errors = sorted(
        error
        for one in found.heads
        for at in _told(one)
        if math.isfinite(error := one.after_error[at] / _size(found, one, at))
    )
    if errors:
        yield (
            "Other text differs by chance: the standard error of a value is "
            f"{errors[len(errors) // 2]:.1%} of its target for the median and at most "
            f"{errors[-1]:.1%}. Four times as many windows halve it."
        )


def _told(one: HeadCalibration) -> list[int]:
    """Indices of the lengths at which some factor brings a head to its target."""
    return [at for at, status in enumerate(one.status) if status != "impossible"]


def _size(found: Calibration, one: HeadCalibration, at: int) -> float:
    """What a distance from the target is a part of, as in :meth:`Calibration.worst`."""
    return max(abs(one.target[at]), TARGETS[found.metric].floor / HELD, 1e-12)


def _growth(found: Calibration) -> Iterator[str]:
    """Sentences on the families and on β/Λ."""
    families = Counter(one.family for one in found.heads)
    limited = families.pop("limited", 0)
    told = ", ".join(f"{count} {_FAMILIES[name]}" for name, count in families.most_common())
    if limited:
        yield (
            f"{limited} of {len(found.heads)} heads reach the limit of the factors and have no "
            "family."
        )
    if not families:
        pass
    elif len(found.lengths) < 3:
        yield (
            f"Growth of the factors: {told}; at least 3 lengths are needed to distinguish families."
        )
    else:
        yield f"Growth of the factors with n, by fit error: {told}."
    last = [
        (one.critical[-1], one.focus[-1]) for one in found.heads if math.isfinite(one.critical[-1])
    ]
    if last:
        before = sorted(1 / scale if scale > 0 else math.inf for scale, _ in last)
        after = sorted(focus for _, focus in last)
        middle = len(last) // 2
        yield (
            f"β/Λ at n = {found.lengths[-1]} (above 1, one key dominates): median head "
            f"{before[middle]:.2g} without, {after[middle]:.2g} with the law."
        )


def _heads(found: Calibration, status: str) -> list[HeadCalibration]:
    return [one for one in found.heads if status in one.status]


def _s(heads: Sequence[HeadCalibration]) -> str:
    """The ending of "do" where they are a single one."""
    return "es" if len(heads) == 1 else ""


def _named(heads: Sequence[HeadCalibration]) -> str:
    """Layers and heads, few enough to read."""
    told = [f"layer {group[0].layer} {_numbers(group)}" for group in _by_layer(heads)]
    if len(told) > 4:
        return f"{len(heads)} heads of {len(told)} layers"
    return "; ".join(told)


def _numbers(group: Sequence[HeadCalibration]) -> str:
    heads = [str(one.head) for one in group]
    if len(heads) > 8:
        return f"({len(heads)} heads)"
    return f"head{'s' if len(heads) > 1 else ''} {', '.join(heads)}"


def _by_layer(heads: Iterable[HeadCalibration]) -> list[list[HeadCalibration]]:
    found: dict[str, list[HeadCalibration]] = {}
    for one in heads:
        found.setdefault(one.module, []).append(one)
    return list(found.values())


def _lengths(found: Calibration) -> list[int]:
    return sorted({n for one in found.heads for n in one.lengths})


def _unit(found: Calibration) -> str:
    unit = TARGETS[found.metric].unit
    return "" if unit == "1" else f" {unit}"
