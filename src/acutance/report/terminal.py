"""The terminal table of a summary: a metric for every layer and head, coloured, at any width."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from statistics import fmean, quantiles

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.style import Style
from rich.text import Text

from acutance.diagnose.classes import CLASSES, classify
from acutance.diagnose.sentences import crossing
from acutance.escapes import printable, ranges
from acutance.report.colours import as_hex, brief, colour, colour_scale, ink
from acutance.report.screen import Wrapped
from acutance.report.table import Cell, Column, Table
from acutance.structure import describe
from acutance.summary.head_summary import HeadSummary
from acutance.summary.layer import STATUSES, Layer, notices

#: A folded table of more lines than this gives way to one line for each layer.
MOST_LINES = 100
_PREFERRED = ("normalized_entropy", "entropy", "effective_keys")
#: What stands before the means of the layers.
_BAR = Cell("│", "dim")


def console_table(summary: HeadSummary, metric: str | None = None) -> ConsoleRenderable:
    """A rich renderable: mean of a metric for each layer and head, then notes.

    Long layers continue on further lines; if that takes more than 100 lines, each layer gets one
    line with its lowest, quartile, median and highest head. Numbers repeat what colours show, so
    the table also works in a file or with ``NO_COLOR``.

    Args:
        summary: any head summary.
        metric: metric of the cells; None for normalized entropy, or the next best one recorded.

    Raises:
        ValueError: if the metric does not exist or was not recorded.

    Example:
        >>> import torch, acutance
        >>> from rich.console import Console
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(1, 4, 8)] * 3)
        >>> Console(width=80, no_color=True).print(console_table(probe.summary()))
        How diffuse attention is: mean normalized entropy over rows, layer × head
        sharp, one key  0.00  0.20  0.40  0.60  0.80  1.00  diffuse, uniform weights
        <BLANKLINE>
        layer    h0    h1 │  mean
            0  1.00  1.00 │  1.00
        <BLANKLINE>
        4 rows read per head; left out: 0 padded, 0 that see no key.
        Verified: every call's output was recomputed from the captured arguments and agrees with
        the model's (relative difference up to 0.0e+00).
    """
    return _HeadTable(summary, metric)


class _HeadTable:
    """The renderable of :func:`console_table`; its layout depends on the width."""

    def __init__(self, summary: HeadSummary, metric: str | None) -> None:
        self.summary = summary
        self.metric = metric or headline(summary.metrics)
        self.grid = summary.grid(self.metric) if self.metric else []
        numbers = [layer.numbers for layer in summary.layers]
        most = max(numbers, key=len, default=())
        alike = all(part == most[: len(part)] for part in numbers)
        #: what the columns are called: heads' numbers, or places where layers read different heads
        self.names = [f"h{head}" for head in most] if alike else [f"#{i}" for i in range(len(most))]
        self.whole = most == tuple(range(len(most))) and alike
        self.scale = colour_scale(self.metric, (value for row in self.grid for value in row))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, coloured = options.max_width, console.color_system in ("256", "truecolor")
        for notice in notices(self.summary.about):
            yield Wrapped(f"! {notice}", "bold red")
            yield Text()
        if any(self.grid):
            yield from self._head(width, coloured, options.ascii_only)
            yield Text()
            yield from self._body(width, coloured)
            yield Text()
        yield from _footnotes(self.summary)

    def _head(self, width: int, coloured: bool, ascii_only: bool) -> Iterator[Text | Wrapped]:
        """The title and the colour scale."""
        if self.metric == "normalized_entropy":
            title, low, high = (
                "How diffuse attention is: ",
                "sharp, one key",
                "diffuse, uniform weights",
            )
        else:
            title, low, high = "", "low", "high" + (", log scale" if self.scale.log else "")
        name = in_words(self.metric, " ({})")
        yield Wrapped(f"{title}mean {name} over rows, layer × head", "bold")
        short = low.split(",")[0], high.split(",")[0]
        for count, ends in ((6, (low, high)), (6, short), (3, short)):
            cells = [self._cell(tick, coloured) for tick in self.scale.ticks(count)]
            if len("".join((*ends, *(cell.value for cell in cells)))) + 2 * count + 2 <= width:
                break
        ramp = Text(no_wrap=True, overflow="crop").append(f"{ends[0]} ", "dim")
        for cell in cells:
            ramp.append(printable(f" {cell.value} ", ascii_only), cell.style)
        yield ramp.append(f" {ends[1]}", "dim")

    def _cell(self, value: float, coloured: bool) -> Cell:
        """A value as text in its colours."""
        place = self.scale.place(value) if coloured else None
        return Cell(brief(value, self.metric), "" if place is None else _shade(place))

    def _body(self, width: int, coloured: bool) -> Iterator[Table | Text | Wrapped]:
        """The heat map of the heads, or the distribution in each layer if it does not fit."""
        widest = max(map(len, self.grid))
        cells = [[self._cell(value, coloured) for value in row] for row in self.grid]
        cell = max(4, *(len(cell.value) for row in cells for cell in row), *map(len, self.names))
        room = width - max(5, len(str(len(self.grid)))) - cell - 3  # beside layer, bar and mean
        folded = widest * (cell + 1) > room
        names, chunk = self.names, widest
        if folded:  # lines are labelled with their heads
            chunk = _chunk(widest, max(1, (room - 2 * len(str(widest - 1)) - 2) // (cell + 1)))
            names = [f"{'h' if self.whole else '#'}+{i}" for i in range(chunk)]
            if sum(max(1, math.ceil(len(row) / chunk)) for row in self.grid) > MOST_LINES:
                yield Wrapped(
                    "The heads do not fit side by side, so this shows their distribution in each "
                    "layer.",
                    "dim",
                )
                yield Text()
                yield self._digest(coloured)
                return
        means, rows = [self._cell(_mean(row), coloured) for row in self.grid], []
        for layer, row in enumerate(cells):
            mark = "×" if crossing(self.summary.layers[layer].module) else ""
            for start in range(0, max(1, len(row)), chunk):
                some = row[start : start + chunk]
                heads = [Cell(ranges(range(start, start + len(some))), "dim")] * folded
                ends = ("", None) if start else (f"{layer}{mark}", means[layer])
                empty = [None] * (chunk - len(some))
                rows.append((Cell(ends[0], "bold"), *heads, *some, *empty, _BAR, ends[1]))
        headings = ["heads"] * folded + [name.rjust(cell) for name in names]
        columns = map(Column, ("layer", *headings))
        yield Table("", [*columns, Column("│", "name"), Column("mean".rjust(cell))], rows)

    def _digest(self, coloured: bool) -> Table:
        """One line for each layer: the distribution over its heads, and the extreme ones."""
        rows = []
        for index, row in enumerate(self.grid):
            pairs = zip(row, self.summary.layers[index].numbers, strict=True)
            ranked = sorted(pair for pair in pairs if math.isfinite(pair[0]))
            values = [value for value, _ in ranked] or [math.nan]
            quarters = quantiles(values, n=4, method="inclusive") if values[1:] else values * 3
            shown = (values[0], values[-1], *quarters, _mean(row))
            low, high, *middle, mean = (self._cell(value, coloured) for value in shown)
            heads = [Cell(f"h{ranked[at][1]}" if ranked else "", "dim") for at in (0, -1)]
            rows.append((index, low, heads[0], *middle, high, heads[1], _BAR, mean))
        names = ("layer", "lowest", "head", "25 %", "median", "75 %", "highest", "head")
        return Table("", [*map(Column, names), Column("│", "name"), Column("mean")], rows)


@cache
def _shade(place: float) -> Style:
    """Colours of a cell whose value is at a place of the scale."""
    background = colour(place)
    return Style(color=as_hex(ink(background)), bgcolor=as_hex(background))


def headline(metrics: Sequence[str]) -> str:
    """The metric that a table shows by default; empty if there is none.

    Example:
        >>> headline(("lse", "entropy")), headline(("lse",)), headline(())
        ('entropy', 'lse', '')
    """
    first = metrics[0] if metrics else ""
    return next((name for name in _PREFERRED if name in metrics), first)


def in_words(metric: str, unit: str = ", {}") -> str:
    """A metric's name as words, with its unit if it has one, in the form of ``unit``.

    Example:
        >>> in_words("mean_field_entropy"), in_words("entropy", " ({})"), in_words("top_weight")
        ('mean field entropy, nat', 'entropy (nat)', 'top weight')
    """
    symbol = describe(metric).unit
    return metric.replace("_", " ") + ("" if symbol == "1" else unit.format(symbol))


def _footnotes(summary: HeadSummary) -> Iterator[Wrapped]:
    """Notes on what was read and how reliable it is."""
    layers = summary.layers
    yield from map(Wrapped, (*row_sentences(layers), *chosen_sentences(layers)))
    if any(crossing(layer.module) for layer in layers):
        yield Wrapped("× is cross-attention: queries of one sequence, keys of another.")
    counts = Counter(head_class.name for head in classify(summary) for head_class in head)
    if counts:
        class_counts = ", ".join(f"{name} {counts[name]}" for name in CLASSES if name in counts)
        yield Wrapped(f"Heads by class: {class_counts}.")
    for sentence, wrong in status_sentences(layers):
        yield Wrapped(sentence, "bold red" if wrong else "")
    if len(layers) != 1:
        yield from (Wrapped(sentence, "dim") for sentence in module_sentences(layers))
    if summary.unread:
        yield Wrapped(summary.coverage)
    for title, reasons in {
        "Attention that could not be read:": summary.unread,
        "Attention left to the model, which acutance could not provide:": summary.not_provided,
    }.items():
        if reasons:
            yield Wrapped(title, "bold")
        yield from (Wrapped(reason, bullet="  – ") for reason in reasons)


def row_sentences(layers: tuple[Layer, ...]) -> list[str]:
    """Sentences on rows read, rows left out, and possible padding.

    Example:
        >>> for said in row_sentences((Layer("a", 2, rows=9, padded=3, padded_by="key_mask"),)):
        ...     print(said)
        9 rows read per head; left out: 3 padded (by key_mask), 0 that see no key.
        >>> print(row_sentences((Layer("a", 2, rows=9, unseen=2),))[1])
        2 belong to tokens that no row sees: if padding, pass attention_mask= to the probe.
    """
    names = sorted({name for layer in layers for name in layer.padded_by.split(", ")} - {""})
    left = [
        f"{span(layer.padded for layer in layers)} padded"
        + (f" (by {', '.join(names)})" if names else ""),
        f"{span(layer.empty for layer in layers)} that see no key",
    ]
    for field, reason in (("excluded", "not selected"), ("skipped", "not sampled")):
        if any(getattr(layer, field) for layer in layers):
            left.append(f"{span(getattr(layer, field) for layer in layers)} {reason}")
    read = span(layer.rows for layer in layers)
    sentences = [f"{read} rows read per head; left out: {', '.join(left)}."]
    if any(layer.unseen for layer in layers):
        sentences.append(
            f"{span(layer.unseen for layer in layers)} belong to tokens that no row sees: if "
            "padding, pass attention_mask= to the probe."
        )
    return sentences


def chosen_sentences(layers: tuple[Layer, ...]) -> list[str]:
    """Sentences on which heads were read, for layers that were not read in full.

    Example:
        >>> chosen_sentences((Layer("a", 2, chosen=(1, 4)), Layer("b", 2, chosen=(1, 4))))
        ['Read in layers 0–1: heads 1, 4.']
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.chosen:
            alike.setdefault(layer.chosen, []).append(index)
    return [
        f"Read in {ranges(those, 'layer')}: {ranges(list(heads), 'head')}."
        for heads, those in alike.items()
    ]


def span(values: Iterable[int]) -> str:
    """One number if all are equal, else the smallest and largest.

    Example:
        >>> span([1752, 1752]), span([12, 1752]), span([])
        ('1,752', '12 to 1,752', '0')
    """
    distinct = sorted(set(values)) or [0]
    return f"{distinct[0]:,}" if len(distinct) == 1 else f"{distinct[0]:,} to {distinct[-1]:,}"


def status_sentences(layers: tuple[Layer, ...]) -> list[tuple[str, bool]]:
    """For each status, a sentence on the layers that have it; the flag is True for a mismatch.

    Example:
        >>> status_sentences((Layer("a", 1, "verified", error=1e-6), Layer("b", 1, "verified")))
        [("Verified: every call's output was recomputed from the captured arguments and agrees with
        the model's (relative difference up to 1.0e-06).", False)]
    """
    sentences = []
    for status, meaning in STATUSES.items():
        those = [index for index, layer in enumerate(layers) if layer.status == status]
        if not those:
            continue
        errors = [error for index in those if (error := layers[index].error) is not None]
        which = "" if len(those) == len(layers) else f" ({ranges(those, 'layer')})"
        note = ""
        if errors and status in ("verified", "checked"):
            note = f" (relative difference up to {max(errors):.1e})"
        elif errors and status == "mismatch":
            note = f" (relative difference {max(errors):.1e})"
        sentence = f"{status.capitalize()}{which}: {meaning}{note}."
        sentences.append((sentence, status == "mismatch"))
    return sentences


def module_sentences(layers: tuple[Layer, ...]) -> list[str]:
    """Sentences that list the layers' modules, with names of one pattern grouped.

    Example:
        >>> module_sentences((Layer("h.0.attn", 2), Layer("h.1.attn", 2), Layer("pool", 1)))
        ['layers 0–1: h.*.attn', 'layer 2: pool']
        >>> module_sentences((Layer("block.0.EncDecAttention", 2),))
        ['layer 0: block.0.EncDecAttention (cross-attention)']
    """
    alike: dict[tuple[str, ...], list[int]] = {}
    for index, layer in enumerate(layers):
        alike.setdefault(tuple(re.split(r"\d+", layer.module)), []).append(index)
    sentences = []
    for those in alike.values():
        names = [re.split(r"(\d+)", layers[index].module) for index in those]
        parts = [column[0] if len(set(column)) == 1 else "*" for column in zip(*names, strict=True)]
        sentences.append(f"{ranges(those, 'layer')}: {''.join(parts)}{crossing(''.join(parts))}")
    return sentences


def _chunk(heads: int, fit: int) -> int:
    """Number of heads in a line of a folded row."""
    divisor = max(size for size in range(1, min(fit, heads) + 1) if heads % size == 0)
    return divisor if 2 * divisor > fit else math.ceil(heads / math.ceil(heads / fit))


def _mean(row: list[float]) -> float:
    """Mean of the finite values; NaN without any."""
    finite = [value for value in row if math.isfinite(value)]
    return fmean(finite) if finite else math.nan
