"""Figures as data: a page of panels, each with two axes and the curves that a record gives.

Lines are predictions and marks are measurements, in the style of every figure of acutance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from acutance.plugins import plot_style
from acutance_lab.record import Record, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
#: Styles of a curve that is not of the panel's palette: thin and grey, or broad and pale.
GREY, BROAD = "grey", "broad"


class Points(NamedTuple):
    """Positions of the marks or of the line of a curve, and perhaps standard errors."""

    x: Sequence[Any] | Array
    y: Sequence[Any] | Array
    error: Sequence[float] | None = None


def measured(rows: Iterable[Row], at: str, *, bars: bool = False) -> Points:
    """The measurements of rows against one of their conditions, with their errors as ``bars``."""
    rows = list(rows)
    errors = [row.error for row in rows] if bars else None
    return Points([row.condition[at] for row in rows], [row.measured for row in rows], errors)


def predicted(rows: Iterable[Row], at: str) -> Points:
    """The predictions of rows against one of their conditions."""
    rows = list(rows)
    return Points([row.condition[at] for row in rows], [row.predicted for row in rows])


@cache
def exact(form: Callable[..., Any], *arguments: float, at: tuple[float, ...]) -> Array:
    """``form(*arguments, x)`` for each x of ``at``, cached: a figure is drawn in two themes.

    Example:
        >>> exact(pow, 2.0, at=(1.0, 2.0, 3.0))
        array([2., 4., 8.])
    """
    return np.array([float(form(*arguments, point)) for point in at])


@dataclass(frozen=True)
class Curve:
    """One entry of a legend.

    Attributes:
        name: in the legend; "" for none.
        line: what is predicted.
        marks: what is measured.
        hollow: draw marks without a filling.
        style: place in the panel's palette; None takes the next, or :data:`GREY`, :data:`BROAD`.
    """

    name: str
    line: Points | None = None
    marks: Points | None = None
    hollow: bool = False
    style: int | str | None = None


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Attributes:
        label: what it shows, with its unit.
        log: whether it is logarithmic.
        ticks: values, or texts by value; () leaves them to matplotlib.
        limits: least and largest value shown.
    """

    label: str
    log: bool = False
    ticks: Sequence[float] | Mapping[float, str] = ()
    limits: tuple[float | None, float | None] = (None, None)

    def set(self, axes: Axes, side: str) -> None:
        """Set the scale, ticks and limits of the ``side`` "x" or "y"."""
        if self.log:
            getattr(axes, f"set_{side}scale")("log")
        ticks = self.ticks
        if ticks:
            texts = ticks if isinstance(ticks, Mapping) else {at: f"{at:,g}" for at in ticks}
            axis = getattr(axes, f"{side}axis")
            axis.set_ticks(list(texts), list(texts.values()))
            axis.minorticks_off()
        if self.limits != (None, None):
            getattr(axes, f"set_{side}lim")(*self.limits)


class Level(NamedTuple):
    """A thin reference line at a value of one axis, or of both."""

    x: float | None = None
    y: float | None = None
    name: str = "_nolegend_"


@dataclass(frozen=True)
class Panel:
    """A panel of a page.

    Attributes:
        x: horizontal axis.
        y: vertical axis.
        curves: from a record to what is drawn.
        title: of the panel.
        levels: reference lines, or a function of the record that gives them.
        legend: place of the legend; None draws none.
        legend_title: heading of the legend.
        columns: of the legend.
        also: draws what is neither curve nor level.
    """

    x: Axis
    y: Axis
    curves: Callable[[Record], Iterable[Curve]]
    title: str = ""
    levels: Sequence[Level] | Callable[[Record], Sequence[Level]] = ()
    legend: str | tuple[float, float] | None = "best"
    legend_title: str = ""
    columns: int = 1
    also: Callable[[Axes, Record, plot_style.Theme], object] | None = None

    def draw(self, axes: Axes, record: Record, theme: plot_style.Theme) -> None:
        """Draw the panel on its axes."""
        curves = list(self.curves(record))
        following = itertools.count()
        places = [next(following) if c.style is None else c.style for c in curves]
        count = 1 + max((place for place in places if isinstance(place, int)), default=0)
        palette = plot_style.curves(count, theme)
        for curve, place in zip(curves, places, strict=True):
            if isinstance(place, str):
                _plain_line(axes, curve, theme)
            else:
                _draw(axes, curve, palette[place])
        for level in self.levels(record) if callable(self.levels) else self.levels:
            plot_style.reference(axes, theme, x=level.x, y=level.y, name=level.name)
        if self.also is not None:
            self.also(axes, record, theme)
        self.x.set(axes, "x")
        self.y.set(axes, "y")
        plot_style.label(axes, x=self.x.label, y=self.y.label, title=self.title)
        if self.legend is not None:
            plot_style.legend(
                axes, theme, where=self.legend, title=self.legend_title, columns=self.columns
            )


def _plain_line(axes: Axes, curve: Curve, theme: plot_style.Theme) -> None:
    """Draw the line of a curve that is not of the palette."""
    assert curve.line is not None
    look: dict[str, Any] = {"color": theme.muted, "linewidth": 1.0, "zorder": 1.5}
    if curve.style == BROAD:
        look = {"color": theme.ink, "linewidth": 2.6, "alpha": 0.55}
    axes.plot(curve.line.x, curve.line.y, label=curve.name or "_nolegend_", **look)


def _draw(axes: Axes, curve: Curve, style: plot_style.Curve) -> None:
    """Draw a curve under one entry of the legend."""
    line, marks, name = curve.line, curve.marks, curve.name or "_nolegend_"
    if line is not None and marks is not None and not curve.hollow:
        plot_style.draw_line_and_marks(
            axes, line.x, line.y, marks.x, marks.y, style, name, error=marks.error
        )
        return
    if line is not None:
        plot_style.draw_line(axes, line.x, line.y, style, name if marks is None else "_nolegend_")
    if marks is not None:
        plot_style.draw_marks(
            axes, marks.x, marks.y, style, name, error=marks.error, hollow=curve.hollow
        )


class Page:
    """A figure of one or several panels side by side; called, it draws a record in a theme.

    Args:
        title: what the figure shows, in words.
        note: a line or two under the title, or a function of the record that gives them.
        panels: from left to right.
    """

    def __init__(self, title: str, note: str | Callable[[Record], str], *panels: Panel) -> None:
        self.title, self.note, self.panels = title, note, panels

    def __call__(self, record: Record, theme: plot_style.Theme) -> Figure:
        """Draw the record."""
        note = self.note(record) if callable(self.note) else self.note
        figure, places = plot_style.new_figure(
            self.title, note, panels=len(self.panels), theme=theme
        )
        for axes, panel in zip(places, self.panels, strict=True):
            panel.draw(axes, record, theme)
        return figure
