"""The terminal: text from outside never drives it, and is never taken for markup."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from acutance.escapes import visible, visible_lines

__all__ = ["Screen", "note"]


class Screen(Console):
    r"""A rich console without markup, on which control characters are shown as escapes.

    Args:
        given: options of :class:`rich.console.Console`.

    Example:
        >>> Screen(width=40).print("[red]a\x1b[31m", Text("b\u202e"))
        [red]a\x1b[31m b\u202e
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False} | given)

    def render_str(self, text: str, **given: Any) -> Text:
        """Text of a string."""
        return super().render_str(visible_lines(text), **given)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments of anything that can be printed."""
        if isinstance(renderable, Text):
            shown = visible_lines(renderable.plain)
            if shown != renderable.plain:  # its styles go: their places have moved
                renderable = renderable.blank_copy(shown)
        return super().render(renderable, options)


def note(*parts: str | tuple[str, str]) -> Text:
    """A line for a console: pieces of text, or pairs of one and its style.

    Example:
        >>> note(("state written to", "dim"), " /tmp/[/]").plain
        'state written to /tmp/[/]'
    """
    shown = [visible(one) if isinstance(one, str) else (visible(one[0]), one[1]) for one in parts]
    return Text.assemble(*shown)
