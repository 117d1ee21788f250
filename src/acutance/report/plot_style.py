"""The style of every figure: light or dark, and curves that remain distinct in greyscale.

Lines are predictions, marks are measurements. Curves use viridis in order, so that lightness
distinguishes them, and each has its own dash and mark. With more than seven curves, the combination
of colour, dash and mark is unique.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acutance.extras import install
from acutance.files import write_whole
from acutance.report.colours import as_hex, colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 160
_TITLE, _SUBTITLE, _LABEL, _TICK = 14.0, 10.0, 10.5, 9.5  # points
_DASHES: tuple[Any, ...] = (
    "solid",
    (0, (6, 2)),
    (0, (2, 1.6)),
    (0, (7, 2, 1.5, 2)),
    (0, (3, 1.5, 1, 1.5, 1, 1.5)),
    (0, (10, 3)),
    (0, (1, 2.2)),
)
#: Places on the scale of colours: neighbours in this order are 0.4 or more apart.
_FAR = (0.0, 0.5, 1.0, 0.25, 0.75)
_MARKS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Theme:
    """Colours of a page.

    Attributes:
        name: "light" or "dark".
        page: background.
        ink: titles, labels and reference lines.
        muted: ticks and notes.
        grid: grid lines and frames.
    """

    name: str
    page: str
    ink: str
    muted: str
    grid: str


LIGHT = Theme("light", page="#ffffff", ink="#1f2328", muted="#59636e", grid="#d9dee4")
DARK = Theme("dark", page="#0d1117", ink="#e6edf3", muted="#9aa4af", grid="#30363d")
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}


@dataclass(frozen=True)
class Curve:
    """The colour, dash and mark of one curve."""

    colour: str
    dash: Any
    mark: str


def curves(count: int, theme: Theme = LIGHT) -> list[Curve]:
    """``count`` curve styles, the most prominent first.

    Args:
        count: how many curves, at least 0; beyond seven, colours repeat every five, dashes and
            marks every seven, so 35 differ.
        theme: the page.

    Example:
        >>> [curve.mark for curve in curves(3)]
        ['o', 's', '^']
        >>> len({curve.colour for curve in curves(6, DARK)})
        6
    """
    first, last = (0.97, 0.45) if theme.name == "dark" else (0.03, 0.76)
    if count > len(_MARKS):  # steps too small to see: a few colours, each far from its neighbours
        places = [_FAR[index % len(_FAR)] for index in range(count)]
    else:
        places = [index / max(count - 1, 1) for index in range(count)]
    return [
        Curve(
            as_hex(colour(first + (last - first) * place)),
            _DASHES[index % len(_DASHES)],
            _MARKS[index % len(_MARKS)],
        )
        for index, place in enumerate(places)
    ]


def new_figure(
    title: str,
    note: str = "",
    *,
    panels: int = 1,
    theme: Theme = LIGHT,
    height: float = 4.9,
    widths: Sequence[float] | None = None,
) -> tuple[Figure, list[Axes]]:
    """A titled page with one panel or several side by side.

    Args:
        title: what the figure shows, in words.
        note: a line or two under the title; wrapped to the width.
        panels: how many panels.
        theme: :data:`LIGHT` or :data:`DARK`.
        height: of the page, in inches; it is 8 wide with one panel, 5.5 a panel with more.
        widths: relative widths of the panels, even if left out.

    Returns:
        The figure and its panels, left to right. Nothing is shown and no global state changes.

    Raises:
        ImportError: without matplotlib.

    Example:
        >>> figure, [axes] = new_figure("Entropy", "of n = 64 keys")
        >>> label(axes, x="logit deviation γ", y="entropy H, nat")
        >>> axes.get_ylabel()
        'entropy H, nat'
    """
    width = 8.0 if panels == 1 else 5.5 * panels
    figure = blank(width, height, facecolor=theme.page, layout="constrained")
    side = 0.14
    fonts: dict[str, dict[str, Any]] = {
        title: {"size": _TITLE, "weight": "bold", "color": theme.ink},
        note: {"size": _SUBTITLE, "color": theme.muted},
    }
    top = 0.27
    for text, font in fonts.items():
        for line in _lines(figure, text, (width - 2 * side) * _DPI, font):
            figure.text(side / width, 1 - top / height, line, va="center", parse_math=False, **font)
            top += font["size"] / 72 * (1.34 if text == title else 1.45)
        top += 0.04
    top -= 0.09
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0.0, 0.0, 1.0, 1 - top / height), w_pad=0.12, h_pad=0.1)  # type: ignore[call-arg]
    grid = figure.subplots(1, panels, squeeze=False, width_ratios=widths)
    for axes in grid[0]:
        axes.set_facecolor(theme.page)
        axes.grid(True, color=theme.grid, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", length=0, labelsize=_TICK, labelcolor=theme.muted)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(theme.muted)
            spine.set_linewidth(0.8)
        axes.xaxis.label.set_color(theme.ink)
        axes.yaxis.label.set_color(theme.ink)
    return figure, list(grid[0])


def blank(
    width: float, height: float, module: str = "acutance.report.plot_style", **options: Any
) -> Figure:
    """A figure of some inches that is drawn to files alone.

    Raises:
        ImportError: without matplotlib, naming the module that needs it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{module} needs matplotlib; install it with: {install('plots')}"
        ) from error
    figure = Figure(figsize=(width, height), dpi=_DPI, **options)
    FigureCanvasAgg(figure)
    return figure


def _lines(figure: Figure, text: str, room: float, font: dict[str, Any]) -> list[str]:
    """Break a text into lines of at most ``room`` pixels."""
    lines: list[str] = []
    ruler = figure.text(0, 0, "", parse_math=False, **font)
    for word in text.split():
        ruler.set_text(f"{lines[-1]} {word}" if lines else word)
        if lines and ruler.get_window_extent().width <= room:
            lines[-1] = ruler.get_text()
        else:
            lines.append(word)
    ruler.remove()
    return lines


def label(axes: Axes, *, x: str, y: str, title: str = "") -> None:
    """Name what the axes show, with units, and the panel if there are several."""
    axes.set_xlabel(x, size=_LABEL, labelpad=5)
    axes.set_ylabel(y, size=_LABEL, labelpad=6)
    if title:
        ink = axes.xaxis.label.get_color()
        axes.set_title(title, size=_LABEL + 0.5, loc="left", pad=8, color=ink)


def draw_line(axes: Axes, x: Any, y: Any, curve: Curve, name: str = "_nolegend_") -> None:
    """Draw predicted values as a line."""
    axes.plot(
        x, y, color=curve.colour, linestyle=curve.dash, linewidth=1.8, label=name, marker="None"
    )


def draw_marks(
    axes: Axes,
    x: Any,
    y: Any,
    curve: Curve,
    name: str = "_nolegend_",
    *,
    error: Any = None,
    hollow: bool = False,
) -> None:
    """Draw measured values as marks, with bars of ± ``error`` if given."""
    face = axes.get_facecolor() if hollow else curve.colour
    axes.errorbar(
        x, y, yerr=error, label=name, linestyle="None", marker=curve.mark, markersize=6.0,
        color=curve.colour, markerfacecolor=face, markeredgecolor=curve.colour,
        markeredgewidth=1.3, elinewidth=1.1, capsize=2.5, zorder=3,
    )  # fmt: skip


def draw_line_and_marks(
    axes: Axes,
    x: Any,
    line: Any,
    at: Any,
    marks: Any,
    curve: Curve,
    name: str,
    *,
    error: Any = None,
) -> None:
    """Draw a predicted line and measured points under a single legend entry.

    Args:
        axes: the panel.
        x: x of the predicted values.
        line: predicted values.
        at: x of the measured values.
        marks: measured values.
        curve: style of both.
        name: text of the legend entry.
        error: standard errors of the measured values.
    """
    draw_line(axes, x, line, curve)
    draw_marks(axes, at, marks, curve, error=error)
    axes.plot(
        [], [], color=curve.colour, linestyle=curve.dash, marker=curve.mark, markersize=6.0,
        linewidth=1.8, label=name,
    )  # fmt: skip


def reference(
    axes: Axes,
    theme: Theme,
    *,
    x: float | None = None,
    y: float | None = None,
    name: str = "_nolegend_",
) -> None:
    """Draw a thin line across the panel at a value, such as a limit or a critical point."""
    how: dict[str, Any] = {"color": theme.muted, "linewidth": 1.1, "linestyle": (0, (1, 1.5))}
    if x is not None:
        axes.axvline(x, label=name, **how)
    if y is not None:
        axes.axhline(y, label=name if x is None else "_nolegend_", **how)


def legend(
    axes: Axes, theme: Theme, *, title: str = "", where: Any = "best", columns: int = 1
) -> None:
    """Draw the legend inside the panel; ``where`` is matplotlib's ``loc``."""
    how: dict[str, Any] = {
        "loc": where,
        "ncols": columns,
        "title": title or None,
        "fontsize": _TICK,
        "title_fontsize": _TICK,
        "labelcolor": theme.ink,
        "facecolor": theme.page,
        "edgecolor": theme.grid,
        "framealpha": 0.88,
        "handlelength": 3.2,
        "borderpad": 0.6,
    }
    box = axes.legend(**how)
    box.get_title().set_color(theme.ink)
    box.set_zorder(5)


def colour_bar(figure: Figure, drawn: Any, theme: Theme, name: str, **where: Any) -> Any:
    """Draw and return the bar of what is drawn in colours; ``where`` are matplotlib's options."""
    bar = figure.colorbar(drawn, **where)
    outline: Any = bar.outline
    outline.set_visible(False)
    bar.ax.minorticks_off()
    bar.ax.tick_params(length=0, labelsize=_TICK, labelcolor=theme.muted)
    bar.set_label(name, color=theme.ink, size=_SUBTITLE, labelpad=6)
    return bar


def name_cells(axis: Any, names: Sequence[Any], most: int) -> None:
    """Name the rows or columns of a map at their middle, or every few if there are over ``most``.

    Example:
        >>> figure, [axes] = new_figure("Heads")
        >>> name_cells(axes.xaxis, range(48), 16)
        >>> [text.get_text() for text in axes.get_xticklabels()][:3]
        ['0', '4', '8']
    """
    count = len(names)
    steps = (1, 2, 4, 5, 8, 10, 16, 32, 64, count)
    step = next(step for step in steps if count <= most * step)
    middles = [index + 0.5 for index in range(0, count, step)]
    axis.set_ticks(middles, [str(name) for name in names[::step]])


def save(figure: Figure, path: str | os.PathLike[str], kind: str = "") -> None:
    """Write a figure as PNG or SVG, by ``kind`` or the path's ending, atomically, reproducibly.

    The same figure gives the same bytes: no date, no random identifiers. Letters are outlines, so
    an SVG needs no font.

    Raises:
        ValueError: if the ending is neither .png nor .svg.
    """
    import matplotlib

    kind = kind or Path(path).suffix.lower()[1:]
    if kind not in ("png", "svg"):
        raise ValueError(f"the name of a figure must end in .png or .svg, got {os.fspath(path)!r}")
    metadata: dict[str, Any] = {"Software": None} if kind == "png" else {"Date": None}
    with matplotlib.rc_context({"svg.hashsalt": "acutance", "svg.fonttype": "path"}):
        write_whole(path, lambda where: figure.savefig(where, format=kind, metadata=metadata))
