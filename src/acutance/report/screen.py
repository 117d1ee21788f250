"""Output to a terminal: a console that shows text literally, and tables that never cut a number."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from acutance.escapes import printable, visible, visible_lines

__all__ = [
    "NumberTable",
    "Screen",
    "Wrapped",
    "bulleted",
    "least_width",
    "note",
    "print_sentences",
    "wrap",
]


class Screen(Console):
    r"""A rich console without markup that shows control characters as escapes.

    Args:
        given: options of :class:`rich.console.Console`.

    Example:
        >>> Screen(width=40).print("[red]a\x1b[31m", Text("b\u202e"))
        [red]a\x1b[31m b\u202e
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False} | options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a string to text without interpreting it."""
        return super().render_str(visible_lines(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escape control characters in text, then render as rich does."""
        if isinstance(renderable, Text):
            text = visible_lines(renderable.plain)
            if text != renderable.plain:  # its styles go: their places have moved
                renderable = renderable.blank_copy(text)
        return super().render(renderable, options)


def note(*parts: str | tuple[str, str]) -> Text:
    """A rich ``Text`` from strings and (string, style) pairs; brackets are not markup.

    Example:
        >>> note(("state written to", "dim"), " /tmp/[/]").plain
        'state written to /tmp/[/]'
    """
    pieces = [
        visible(part) if isinstance(part, str) else (visible(part[0]), part[1]) for part in parts
    ]
    return Text.assemble(*pieces)


#: Where a line may end: best before a space, else behind a comma and the like, else behind others.
#: Not beside ±, and not in a number such as 8,192.
_BREAKS = (r"(?<!±) (?!±)", r"(?<=[,;:+])(?!\d{3}\b)", r"(?<=[=_(\[/])", "(?<=.)")


def wrap(text: str, width: int) -> list[str]:
    """Break a text into lines so that words, names of laws and numbers stay whole.

    Lines break at spaces. A word longer than a line, such as the name of a law, is broken behind a
    comma, colon or plus sign, and only if that is not enough behind other signs.

    Args:
        text: the text.
        width: of a line, in characters.

    Example:
        >>> wrap("window:size=2048,beyond=8192 helps", 20)
        ['window:size=2048,', 'beyond=8192 helps']
    """
    lines = [""]
    _place(text, 0, width, lines)
    return [line.strip() for line in lines]


def _place(text: str, level: int, width: int, lines: list[str]) -> None:
    """Append the parts of a text to the last of ``lines``, or to new ones that are as wide."""
    for part in _parts(text, level):
        if cell_len(lines[-1] + part) <= width:
            lines[-1] += part
        elif cell_len(part.strip()) <= width or level == len(_BREAKS) - 1:
            lines.append(part.lstrip())
        else:
            _place(part, level + 1, width, lines)


class Wrapped:
    """A text on as many lines as it needs, which :func:`wrap` breaks.

    Args:
        text: the text.
        style: of all lines.
        bullet: what stands before the first line; the others are indented by its width.
    """

    def __init__(self, text: str, style: str = "", bullet: str = "") -> None:
        self.text, self._style, self._bullet = text, style, bullet

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text, bullet = (printable(part, options.ascii_only) for part in (self.text, self._bullet))
        indent = cell_len(bullet)
        for index, line in enumerate(wrap(text, max(1, options.max_width - indent))):
            yield Text((" " * indent if index else bullet) + line, style=self._style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        text, indent = visible(self.text), cell_len(self._bullet)
        return Measurement(least_width(text) + indent, cell_len(text) + indent)


def bulleted(sentence: str | Wrapped) -> Wrapped:
    """A sentence of a list; one that is wrapped already keeps its own bullet."""
    return Wrapped(sentence, bullet=" • ") if isinstance(sentence, str) else sentence


def least_width(text: str) -> int:
    """Width in which names of laws break behind commas, colons and plus signs only."""
    parts = [part for word in _parts(text, 0) for part in _parts(word, 1)]
    return max(cell_len(part.strip()) for part in parts)


def _parts(text: str, level: int) -> list[str]:
    """The parts of a text between the places where a line may end, at one level."""
    ends = [match.start() for match in re.finditer(_BREAKS[level], text)]
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


#: Characters to which a column of words may be narrowed.
_WORDS = 12


class NumberTable(Table):
    """A rich table that never truncates a number: columns that do not fit continue below.

    Text columns are wrapped first, then gaps narrow to one space, then the columns are split into
    blocks, one below the other, each starting with the key columns. Only numbers wider than the
    terminal are broken.

    Args:
        *headers: columns, as for a rich table.
        keys: number of key columns with which each block begins.
        options: options of a rich table.

    Example:
        >>> table = NumberTable(keys=1, box=None, padding=(0, 2, 0, 0), pad_edge=False)
        >>> for name in ("metric", "expected", "measured"):
        ...     table.add_column(name, no_wrap=True)
        >>> table.add_row("entropy", "1.2345678", "1.2345679")
        >>> Console(width=18).print(table)
        metric  expected
        entropy 1.2345678
        <BLANKLINE>
        metric  measured
        entropy 1.2345679
    """

    def __init__(self, *headers: Column | str, keys: int = 1, **options: Any) -> None:
        super().__init__(*headers, **options)
        self.keys = keys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width
        widths = [self._natural(console, column) for column in self.columns]
        everything = range(len(self.columns))
        for gap in (self.padding[1], min(1, self.padding[1])):
            if self._needed(everything, widths, gap) <= room:
                yield from self._part(everything, widths, gap, room, console, options)
                return
        blocks = self._blocks(widths, gap, room)
        for index, block in enumerate(blocks):
            if index:
                yield Text()
            part = self._part(
                block, widths, gap, room, console, options, index == 0, index == len(blocks) - 1
            )
            yield from part

    @staticmethod
    def _natural(console: Console, column: Column) -> int:
        """The width of a column without folding."""
        unbounded = console.options.update(width=100_000)
        cells = [column.header, *column._cells]
        longest = max(Measurement.get(console, unbounded, cell).maximum for cell in cells)
        return max(longest, column.width or 0)

    def _least(self, column: Column, width: int) -> int:
        """Smallest width of a column, in characters."""
        wrapped = [least_width(cell.text) for cell in column._cells if isinstance(cell, Wrapped)]
        return width if column.no_wrap else min(width, max([_WORDS, *wrapped]))

    def _needed(self, block: Sequence[int], widths: Sequence[int], gap: int) -> int:
        """Smallest width of a block of columns, in characters."""
        least = sum(self._least(self.columns[index], widths[index]) for index in block)
        lines = 0 if self.box is None else len(block) - 1 + 2 * self.show_edge
        left = self.padding[3] * len(block) if self.pad_edge else 0
        return least + gap * (len(block) - (not self.pad_edge)) + lines + left

    def _blocks(self, widths: Sequence[int], gap: int, room: int) -> list[list[int]]:
        """Split the columns into blocks that fit; each repeats the key columns."""
        keys = list(range(self.keys))
        blocks, block = [], list(keys)
        for index in range(self.keys, len(self.columns)):
            if len(block) > len(keys) and self._needed([*block, index], widths, gap) > room:
                blocks.append(block)
                block = list(keys)
            block.append(index)
        return [*blocks, block]

    def _part(
        self,
        block: Sequence[int],
        widths: Sequence[int],
        gap: int,
        room: int,
        console: Console,
        options: ConsoleOptions,
        first: bool = True,
        last: bool = True,
    ) -> RenderResult:
        """Render some of the columns as a separate table.

        Args:
            block: indices of the columns.
            widths: unwrapped width of every column of the whole table, in characters.
            gap: number of spaces between columns.
            room: number of characters per line.
            console: the console to print on.
            options: rich's options for this console.
            first: whether to print the table's title.
            last: whether to print its caption.
        """
        part = copy.copy(self)
        part.padding = (*self.padding[:1], gap, *self.padding[2:])
        crowded = self._needed(block, widths, gap) > room
        part.columns = []
        for place, index in enumerate(block):
            column = self.columns[index]
            whole = column.no_wrap and not (crowded and place < self.keys)
            part.columns.append(
                replace(
                    column,
                    _index=place,
                    no_wrap=whole,
                    overflow="fold",
                    width=None,
                    min_width=min(widths[index], room) if whole else None,
                )
            )
        part.title = self.title if first else None
        part.caption = self.caption if last else None
        part.show_header = self.show_header or not (first and last)
        yield from Table.__rich_console__(part, console, options)


def print_sentences(console: Console, title: str, sentences: Iterable[str]) -> None:
    """Print a heading, and a bullet for each sentence."""
    console.print(f"\n{title}", style="bold")
    for sentence in sentences:
        console.print(bulleted(sentence))
