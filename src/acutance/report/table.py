"""The table of a result: columns, rows and sentences as data, which draw themselves."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.style import Style
from rich.text import Text

from acutance.escapes import printable
from acutance.report.screen import Wrapped, bulleted, least_width, wrap

#: Below and from this size on, numbers have an exponent.
_SMALL, _LARGE = 1e-3, 1e7
#: Characters to which a column of words may be narrowed.
_WORDS = 12
#: Spaces between columns, and between those of a crowded table.
_GAPS = (2, 1)


def figures(value: float, digits: int = 3, places: int = 9) -> str:
    """A number with some significant digits; a dash for NaN.

    Args:
        value: the number.
        digits: significant digits; those before the point are always shown.
        places: most digits behind the point.

    Example:
        >>> [figures(value) for value in (0.0825, 1.87, 1516.2, -2e-5, 0.0, math.nan)]
        ['0.0825', '1.87', '1516', '−2.0e−5', '0', '–']
        >>> figures(0.1353353, 6, places=5), figures(4096.0, 6), figures(math.inf)
        ('0.13534', '4096', '∞')
    """
    if math.isnan(value):
        return "–"
    size = abs(value)
    if math.isinf(value):
        text = f"{value:f}".replace("inf", "∞")
    elif size and not _SMALL <= size < _LARGE:
        mantissa, _, exponent = f"{value:.{digits // 2}e}".partition("e")
        text = f"{mantissa}e{int(exponent)}"
    elif value == int(value) and (size >= 100 or not size):
        text = f"{value + 0.0:.0f}"
    else:
        power = int(f"{size:.{digits - 1}e}".partition("e")[2])
        text = f"{value:.{min(places, max(0, digits - 1 - power))}f}"
    return text.replace("-", "−")


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading, of one line or more.
        kind: ``"number"`` stands on the right, ``"name"`` on the left, and neither is broken;
            ``"words"`` may go on in a further line.
        format: how numbers become text: a format such as ``"+.4f"``, or a function.
        from_width: columns that a terminal must have for it to be shown.
        note: what it holds, a line below the table where it is shown.
    """

    name: str
    kind: Literal["number", "name", "words"] = "number"
    format: str | Callable[[Any], str] = ""
    from_width: int = 0
    note: str = ""

    def text(self, value: Any) -> str:
        """A value as text: nothing for None, a dash for NaN.

        Example:
            >>> loss = Column("loss", format="+.2f")
            >>> [loss.text(value) for value in (0.125, None, math.nan, "as it is")]
            ['+0.12', '', '–', 'as it is']
        """
        if value is None or isinstance(value, str):
            return value or ""
        if callable(self.format):
            return self.format(value)
        if isinstance(value, float) and math.isnan(value):
            return "–"
        return format(value, self.format)


@dataclass(frozen=True)
class Cell:
    """A value with a style of its own: of rich, or its name there."""

    value: Any
    style: str | Style = ""


def styled(values: Iterable[Any], style: str) -> tuple[Cell, ...]:
    """The cells of a row that all have one style."""
    return tuple(Cell(value, style) for value in values)


@dataclass(frozen=True)
class Table:
    """A title, columns, rows and sentences, which a rich console prints.

    In the terminal no number is ever cut. Columns of words are wrapped first, then gaps narrow to
    one space, then columns continue below, each block beginning with the key columns.

    Attributes:
        title: a line above, with the unit of the numbers; may be empty.
        columns: the columns.
        rows: for each row its values: numbers, text, None for an empty cell, or a :class:`Cell`.
        sentences: what the table says, in words, or a text with its own style and bullet.
        notes: lines below the table on how to read it.
        heading: a line above the sentences; may be empty.
        keys: number of columns with which each block begins.
        style: of the title.
        below: another table that follows it.

    Example:
        >>> table = Table(
        ...     "Loss, nats a token",
        ...     (Column("law", "name"), Column("loss", format=".3f"), Column("Δ", format="+.3f")),
        ...     [("none", 2.5, None), ("log_n", 2.45, -0.05)],
        ...     ["log_n helps."],
        ... )
        >>> print(table)
        Loss, nats a token
        <BLANKLINE>
        law     loss       Δ
        none   2.500
        log_n  2.450  -0.050
        <BLANKLINE>
         • log_n helps.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    sentences: Sequence[str | Wrapped] = ()
    notes: Sequence[str] = ()
    heading: str = ""
    keys: int = 1
    style: str = "bold"
    below: Table | None = None

    def __str__(self) -> str:
        with (console := Console(width=80, color_system=None)).capture() as text:
            console.print(self)
        return text.get().rstrip("\n")

    def texts(self) -> list[list[str]]:
        """The text of every cell, row by row."""
        return [
            [column.text(_value(cell)) for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]

    def to_html(self) -> str:
        """The columns and rows as an HTML table; the style of a row's first cell is its class."""
        heads = "".join(f"<th>{html.escape(column.name)}</th>" for column in self.columns)
        lines = [f"<tr>{heads}</tr>"]
        for row, texts in zip(self.rows, self.texts(), strict=True):
            style = _style(row[0])
            cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
            lines.append(f'<tr class="{style}">{cells}</tr>' if style else f"<tr>{cells}</tr>")
        return f"<table>{''.join(lines)}</table>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        shown = [column for column in self.columns if column.from_width <= width]
        notes = [*(column.note for column in shown if column.note), *self.notes]
        sentences = [bulleted(sentence) for sentence in self.sentences]
        parts: list[list[RenderableType]] = [
            [Wrapped(self.title, self.style)] if self.title else [],
            [*self._lines(width, options.ascii_only)] if self.rows else [],
            [Wrapped(note, "dim") for note in notes],
            [Wrapped(self.heading, "bold"), *sentences] if self.heading else [*sentences],
            [self.below] if self.below else [],
        ]
        for index, part in enumerate(filter(None, parts)):
            if index:
                yield Text()
            yield from part

    def _lines(self, width: int, ascii_only: bool) -> Iterator[Text]:
        """The lines of the heading and the rows, in blocks that fit."""
        shown = [at for at, column in enumerate(self.columns) if column.from_width <= width]
        names = [column.name.split("\n") for column in self.columns]
        height = max(map(len, names), default=1)
        head = [[""] * (height - len(lines)) + lines for lines in names]
        rows = [*zip(*head, strict=True), *self.texts()]
        texts = [[printable(text, ascii_only) for text in row] for row in rows]
        widths = [max(cell_len(row[at]) for row in texts) for at in range(len(self.columns))]
        least = [self._least(at, texts, widths[at]) for at in range(len(widths))]

        def needed(block: Sequence[int], gap: int) -> int:
            return sum(least[at] for at in block) + gap * (len(block) - 1)

        gap = next((gap for gap in _GAPS if needed(shown, gap) <= width), 0)
        blocks = [shown]
        if not gap:
            gap = _GAPS[-1]
            keys, rest = shown[: self.keys], shown[self.keys :]
            blocks = []
            for at in rest:
                if blocks and needed([*blocks[-1], at], gap) <= width:
                    blocks[-1].append(at)
                else:
                    blocks.append([*keys, at])
        for index, block in enumerate(blocks):
            if index:
                yield Text()
            room = width - gap * (len(block) - 1)
            yield from self._block(block, texts, self._widths(block, widths, least, room), gap)

    def _least(self, at: int, texts: Sequence[Sequence[str]], width: int) -> int:
        """Smallest width of a column, in characters."""
        if self.columns[at].kind != "words":
            return width
        return min(width, max(_WORDS, *(least_width(row[at]) for row in texts)))

    def _widths(
        self, block: Sequence[int], widths: Sequence[int], least: Sequence[int], room: int
    ) -> list[int]:
        """Widths of a block's columns that fill ``room`` at most.

        Columns of words shrink first, then, where even that is not enough, the keys and the rest.
        """
        chosen = {at: widths[at] for at in block}
        keys = block[: self.keys]
        for columns, floor in (
            (block, {at: least[at] for at in block}),
            (keys, dict.fromkeys(block, 1)),
            (block, dict.fromkeys(block, 1)),
        ):
            while sum(chosen.values()) > room:
                widest = max(columns, key=lambda at: (chosen[at] > floor[at], chosen[at]))
                if chosen[widest] <= floor[widest]:
                    break
                chosen[widest] -= 1
        return list(chosen.values())

    def _block(
        self, block: Sequence[int], texts: Sequence[Sequence[str]], widths: Sequence[int], gap: int
    ) -> Iterator[Text]:
        """The lines of some columns, the heading first."""
        for index, row in enumerate(texts, len(self.rows) - len(texts)):  # below 0: the heading
            styles = [_style(cell) for cell in self.rows[index]] if index >= 0 else []
            wrapped = [
                [row[at]] if cell_len(row[at]) <= size else wrap(row[at], size)
                for at, size in zip(block, widths, strict=True)
            ]
            for number in range(max(map(len, wrapped))):
                line = Text(no_wrap=True, overflow="crop")
                for at, size, lines in zip(block, widths, wrapped, strict=True):
                    text = lines[number] if number < len(lines) else ""
                    space = " " * (size - cell_len(text))
                    right = self.columns[at].kind == "number"
                    style = styles[at] if styles else "dim"
                    line.append(" " * gap if at != block[0] else "")
                    line.append(space + text if right else text + space, style)
                line.rstrip()
                yield line


def _value(cell: Any) -> Any:
    """What a cell holds, without its style."""
    return cell.value if isinstance(cell, Cell) else cell


def _style(cell: Any) -> str | Style:
    """The style of a cell, empty if it has none of its own."""
    return cell.style if isinstance(cell, Cell) else ""
