"""A diff in the terminal: how many heads moved, which moved most, and layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Group

from acutance.report.screen import Wrapped
from acutance.report.table import Column, Table, figures, styled
from acutance.report.terminal import in_words
from acutance.summary.diff import CONFIDENCE, VERDICTS, Diff
from acutance.summary.layer import notices

_WIDE = 100  # columns from which on intervals and modules have room
_LONG = 120
_BAR = 8  # cells of a bar to either side


def diff_view(changes: Diff, metrics: Sequence[str], top: int) -> Group:
    """What a console prints of a diff.

    Args:
        changes: the diff.
        metrics: metrics whose heads and layers are listed.
        top: number of heads to list for each.
    """
    parts: list[Any] = [Wrapped(text, style) for text, style in _heading(changes)]
    parts += ["", _overview(changes)]
    for metric in metrics:
        name = in_words(metric, " ({})")
        heads = _heads(changes, metric, name, top)
        parts += ["", heads]
        if heads.rows:
            parts += ["", _layers(changes, metric, name)]
    return Group(*parts, "", *(Wrapped(sentence, "dim") for sentence in _footnotes(changes)))


def _heading(changes: Diff) -> Iterator[tuple[str, str]]:
    """Lines on both sides and on what makes them hard to compare, each with its style."""
    for side, about in zip(("before", "after"), changes.about, strict=True):
        yield f"{side}: {_subject(about)}", ""
        for sentence in notices({**about, "complete": True}):  # the warnings say what is incomplete
            yield sentence, "bold red"
    for sentence in changes.warnings:
        yield f"! {sentence}", "yellow"
    if changes.keys is not None:
        first, last = changes.keys
        yield f"Compared: rows that see about {first:,.0f} to {last:,.0f} keys.", ""
    for which, only in zip(("first", "second"), changes.matched.only, strict=True):
        for what in only:
            yield f"! Only in the {which}: {what}.", "yellow"


def _subject(about: Mapping[str, Any]) -> str:
    """A line that describes one side of the diff."""
    text = about.get("text")
    names = ", ".join(map(str, text)) if isinstance(text, list | tuple) else text
    facts = [str(about.get("model", "a model"))]
    if names:
        facts.append(str(names))
    if "windows" in about and "window_length" in about:
        facts.append(f"{about['windows']} windows of {about['window_length']} tokens")
    return " · ".join(fact if len(fact) <= _LONG else f"{fact[: _LONG - 1]}…" for fact in facts)


def _overview(changes: Diff) -> Table:
    """One line for each metric: verdicts, median and largest change."""
    verdicts = {"moved": "moved", "unclear": "unclear", "within noise": "noise", "equal": "equal"}
    if changes.how == "sequences":
        del verdicts["unclear"]
    rows = []
    for metric in changes.metrics:
        heads = changes.moved(metric)
        if not heads:
            continue
        most = max(heads, key=lambda head: abs(head.change))
        counts = [sum(head.verdict == verdict for head in heads) for verdict in verdicts]
        usual = median(abs(head.change) for head in heads)
        place = f"L{most.layer} h{most.head}" if most.change else ""
        row = (metric, *counts, _number(usual), _signed(most.change), place)
        rows.append(row if counts[0] else styled(row, "dim"))
    return Table(
        f"Number of {len(changes.matched.places):,} heads that moved, with median and largest "
        "change",
        [
            Column("metric", "name"),
            *map(Column, (*verdicts.values(), "median", "largest")),
            Column("at", "name"),
        ],
        rows,
    )


def _heads(changes: Diff, metric: str, name: str, top: int) -> Table:
    """The heads that changed most."""
    changed = [head for head in changes.moved(metric) if head.verdict != "equal"]
    rows = []
    for head in changed[:top]:
        ends = f"{_signed(head.low)} to {_signed(head.high)}" if math.isfinite(head.low) else "–"
        numbers = (head.before, head.after, _signed(head.change), _error(head.error), ends)
        row = (head.layer, f"h{head.head}", *numbers, head.verdict)
        rows.append(styled(row, "bold") if head.verdict == "moved" else row)
    notes = []
    if not changed:
        notes = ["None: no change, or no head has rows in both states."]
    elif len(changed) > top:
        notes = [f"and {len(changed) - top:,} more; show them with --top, --csv or --json"]
    return Table(
        f"Heads whose {name} changed most; heads that moved come first",
        [
            *map(Column, ("layer", "head")),
            *(Column(side, format=_number) for side in ("before", "after")),
            *map(Column, ("change", "± error")),
            Column("interval", from_width=_WIDE),
            Column("verdict", "name"),
        ],
        rows,
        notes=notes,
        keys=2,
    )


def _layers(changes: Diff, metric: str, name: str) -> Table:
    """Mean changes by layer."""
    layers = changes.layers(metric)
    reach = max((abs(layer.change) for layer in layers if math.isfinite(layer.change)), default=0.0)
    rows = [
        (
            *(layer.layer, layer.before, layer.after),
            *(_signed(layer.change), _error(layer.error), f"{layer.moved}/{layer.heads}"),
            "" if layer.most is None else f"h{layer.most}",
            *(_bar(layer.change, reach), layer.module),
        )
        for layer in layers
    ]
    return Table(
        f"Layer by layer: mean {name} over heads",
        [
            Column("layer"),
            *(Column(side, format=_number) for side in ("before", "after")),
            *map(Column, ("change", "± error", "moved", "most")),
            Column("", "name"),
            Column("module", "words", from_width=_WIDE),
        ],
        rows,
    )


def _bar(value: float, reach: float) -> str:
    """A change as a bar to the left or right of a centre line.

    Example:
        >>> _bar(-0.5, 1.0), _bar(1.0, 1.0)
        ('    ████│        ', '        │████████')
    """
    if not math.isfinite(value) or reach == 0:
        return ""
    cells = "█" * min(_BAR, round(_BAR * abs(value) / reach))
    return f"{cells if value < 0 else '':>{_BAR}}│{cells if value > 0 else '':<{_BAR}}"


def _footnotes(changes: Diff) -> Iterator[str]:
    """Notes on how to read the numbers and what they assume."""
    yield (
        "Moved: the confidence interval of the change excludes 0. Intervals hold for all "
        f"heads of a metric simultaneously with probability {CONFIDENCE:.0%}."
    )
    if changes.how != "sequences":
        yield f"Unclear: {VERDICTS['unclear']}."
    yield (
        f"±: one standard error of the change (for a layer, an upper bound). {changes.assumes} "
        "The two states are treated as independent; if both read the same text, changes are "
        "more certain than stated."
    )
    if changes.how == "bound":
        yield (
            "States written by this version record how sequences differ: probe again for "
            "better errors."
        )


def _number(value: float) -> str:
    """A value with three digits behind the point, or an exponent where that shows none."""
    return figures(value, places=3) if math.isfinite(value) else "–"


def _signed(value: float) -> str:
    """A change with its sign."""
    return _number(value) if value <= 0 or not math.isfinite(value) else f"+{_number(value)}"


def _error(value: float) -> str:
    """A standard error as ``± value``, or "unknown"."""
    return f"± {_number(value)}" if math.isfinite(value) else "unknown"
