"""Output to a terminal: a console that shows text literally, and how lines break."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from acutance.escapes import printable, visible, visible_lines


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
