"""The terminal view of a diff: how many heads moved, which moved most, and layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from acutance.escapes import printable
from acutance.report.colours import brief
from acutance.report.screen import NumberTable
from acutance.structure import describe
from acutance.summary.diff.records import CONFIDENCE, VERDICTS, Diff
from acutance.summary.layer import notices

__all__ = ["print_diff"]

_WIDE = 100  # columns from which on intervals and bars have room
_LONG = 120
_BAR = 8  # cells of a bar to either side


def print_diff(changes: Diff, console: Console, metrics: Sequence[str], top: int) -> None:
    """Print a diff at the width of a console.

    Args:
        changes: the diff.
        console: where to print.
        metrics: metrics whose heads and layers are listed.
        top: number of heads to list for each.
    """
    ascii_only = console.options.ascii_only

    def say(text: str, style: str = "") -> None:
        console.print(Text(printable(text, ascii_only), style=style))

    def title(text: str) -> None:
        console.print()
        say(text, "bold")

    for name, about in zip(("before", "after"), changes.about, strict=True):
        say(f"{name}: {_subject(about)}")
        for sentence in notices({**about, "complete": True}):  # the warnings say what is incomplete
            say(sentence, "bold red")
    for sentence in changes.warnings:
        say(f"! {sentence}", "yellow")
    if changes.keys is not None:
        say(f"Compared: rows that see about {changes.keys[0]:,.0f} to {changes.keys[1]:,.0f} keys.")
    for which, only in zip(("first", "second"), changes.matched.only, strict=True):
        for part in only:
            say(f"! Only in the {which}: {part}.", "yellow")
    title(
        f"Number of {len(changes.matched.places):,} heads that moved, with median and largest "
        "change"
    )
    console.print(_overview(changes, ascii_only))
    for metric in metrics:
        unit = describe(metric).unit
        name = metric.replace("_", " ") + ("" if unit == "1" else f" ({unit})")
        changed = [head for head in changes.moved(metric) if head.verdict != "equal"]
        title(f"Heads whose {name} changed most; heads that moved come first")
        if not changed:
            say("None: no change, or no head has rows in both states.")
            continue
        console.print(_heads(changed[:top], metric, console.width, ascii_only))
        if (rest := len(changed) - top) > 0:
            say(f"and {rest:,} more; show them with --top, --csv or --json", "dim")
        title(f"Layer by layer: mean {name} over heads")
        console.print(_layers(changes, metric, console.width, ascii_only))
    console.print()
    for sentence in _footnotes(changes):
        say(sentence, "dim")


def _subject(about: Mapping[str, Any]) -> str:
    """A line that describes one side of the diff."""
    text = about.get("text")
    names = ", ".join(map(str, text)) if isinstance(text, list | tuple) else text
    parts = [str(about.get("model", "a model"))]
    if names:
        parts.append(str(names))
    if "windows" in about and "window_length" in about:
        parts.append(f"{about['windows']} windows of {about['window_length']} tokens")
    return " · ".join(part if len(part) <= _LONG else f"{part[: _LONG - 1]}…" for part in parts)


def _table(ascii_only: bool, keys: int, *columns: str) -> NumberTable:
    """A borderless table: a text column, then number columns."""
    table = NumberTable(
        keys=keys, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim"
    )
    for index, name in enumerate(columns):
        left = index == 0 or name in ("verdict", "at", "", "module")
        table.add_column(
            printable(name, ascii_only), justify="left" if left else "right",
            no_wrap=name != "module",
        )  # fmt: skip
    return table


def _overview(changes: Diff, ascii_only: bool) -> NumberTable:
    """A table with one line for each metric: verdicts, median and largest change."""
    unclear = changes.how != "sequences"
    names = ["metric", "moved", *(["unclear"] if unclear else []), "noise", "equal"]
    table = _table(ascii_only, 1, *names, "median", "largest", "at")
    for metric in changes.metrics:
        heads = changes.moved(metric)
        if not heads:
            continue
        most = max(heads, key=lambda head: abs(head.change))
        counts = [
            changes.count(metric, verdict)
            for verdict in ("moved", "unclear", "within noise", "equal")
            if verdict != "unclear" or unclear
        ]
        usual = median(abs(head.change) for head in heads)
        same = most.change == 0
        cells = [
            metric,
            *map(str, counts),
            _number(usual, metric),
            "0" if same else _signed(most.change, metric),
            "" if same else f"L{most.layer} h{most.head}",
        ]
        style = None if counts[0] else "dim"
        table.add_row(*_plain(cells, ascii_only), style=style)
    return table


def _heads(heads: Sequence[Any], metric: str, width: int, ascii_only: bool) -> NumberTable:
    """The table of the heads that changed most."""
    wide = width >= _WIDE
    names = ["layer", "head", "before", "after", "change", "± error"]
    table = _table(ascii_only, 2, *names, *(["interval"] if wide else []), "verdict")
    table.columns[0].justify = "right"
    for head in heads:
        cells = [
            str(head.layer),
            f"h{head.head}",
            _number(head.before, metric),
            _number(head.after, metric),
            _signed(head.change, metric),
            _error(head.error, metric),
        ]
        if wide:
            known = math.isfinite(head.low)
            ends = (_signed(end, metric) for end in (head.low, head.high))
            cells.append(" to ".join(ends) if known else "–")
        cells.append(head.verdict)
        style = "bold" if head.verdict == "moved" else None
        table.add_row(*_plain(cells, ascii_only), style=style)
    return table


def _layers(changes: Diff, metric: str, width: int, ascii_only: bool) -> NumberTable:
    """The table of mean changes by layer."""
    wide = width >= _WIDE
    layers = changes.layers(metric)
    names = ["layer", "before", "after", "change", "± error", "moved", "most"]
    table = _table(ascii_only, 1, *names, "", *(["module"] if wide else []))
    table.columns[0].justify = "right"
    reach = max((abs(layer.change) for layer in layers if math.isfinite(layer.change)), default=0.0)
    for layer in layers:
        cells = [
            str(layer.layer),
            _number(layer.before, metric),
            _number(layer.after, metric),
            _signed(layer.change, metric),
            _error(layer.error, metric),
            f"{layer.moved}/{layer.heads}",
            "" if layer.most is None else f"h{layer.most}",
            _bar(layer.change, reach, ascii_only),
            *([layer.module] if wide else []),
        ]
        table.add_row(*_plain(cells, ascii_only))
    return table


def _plain(cells: Sequence[str], ascii_only: bool) -> Iterator[Text]:
    """Table cells as plain text: brackets in a module's name are not markup."""
    return (Text(printable(cell, ascii_only)) for cell in cells)


def _bar(value: float, reach: float, ascii_only: bool) -> str:
    """A change as a bar to the left or right of a centre line.

    Example:
        >>> _bar(-0.5, 1.0, True), _bar(1.0, 1.0, True)
        ('    ####|        ', '        |########')
    """
    if not math.isfinite(value) or reach == 0:
        return ""
    mark, middle = ("#", "|") if ascii_only else ("█", "│")
    cells = mark * min(_BAR, round(_BAR * abs(value) / reach))
    return f"{cells if value < 0 else '':>{_BAR}}{middle}{cells if value > 0 else '':<{_BAR}}"


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


def _number(value: float, metric: str) -> str:
    """A value with at least three digits, so that a change between two runs shows."""
    if not math.isfinite(value):
        return "–"
    if value and abs(value) < 1:
        return f"{value:.3f}" if abs(value) >= 5e-4 else f"{value:.0e}"
    return brief(value, metric) if abs(value) >= 100 else f"{value:.3g}"


def _signed(value: float, metric: str) -> str:
    """A change with its sign."""
    text = _number(value, metric)
    return text if value < 0 or text == "–" else f"+{text}"


def _error(value: float, metric: str) -> str:
    """A standard error as ``± value``, or "unknown"."""
    return "unknown" if not math.isfinite(value) else f"± {_number(value, metric)}"
