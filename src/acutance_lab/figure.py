"""Figures as data: a page of panels, each with two axes and the curves that a record gives.

Lines are predictions and marks are measurements, in the style of every figure of acutance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from acutance.plugins import plot_style
from acutance_lab.record import Record, Row, Value, values

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


def means(rows: Iterable[Row], at: str) -> Points:
    """Mean measurements against a condition, over the rows with the same value of it."""
    by_place: dict[Any, list[float]] = {}
    for row in rows:
        by_place.setdefault(row.condition[at], []).append(row.measured)
    return Points([*by_place], [sum(numbers) / len(numbers) for numbers in by_place.values()])


def predicted(rows: Iterable[Row], at: str) -> Points:
    """Predictions against a condition, in rising order of it."""
    by_place = {float(row.condition[at]): row.predicted for row in rows}
    return Points(*zip(*sorted(by_place.items()), strict=True))


@dataclass(frozen=True)
class Curve:
    """One entry of a legend.

    Attributes:
        name: in the legend; "" for none.
        line: what is predicted, drawn as a smooth line through these points.
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
class Lines:
    """Curves of a record: predictions as lines, measurements as marks.

    Measurements that test no claim are joined by the line. Without bars, rows at the same place,
    as those of several seeds, are one mark at their mean.

    Attributes:
        claim: key of the claim whose rows are drawn; "" for those that test none.
        at: the condition on the horizontal axis.
        name: in the legend, with the value of ``by`` in the place of {}; or names of the values
            that are drawn, in their order.
        by: the condition whose values have a curve each, "" for one curve.
        quantity: of the rows, "" for any.
        where: conditions that the rows meet.
        largest: a condition of which only the largest value is drawn, "" for none.
        line: whether lines are drawn.
        marks: whether marks are drawn.
        bars: whether marks have bars of one standard error.
        hollow: draw marks without a filling.
        style: of the first curve, the others follow: as in :class:`Curve`.
    """

    claim: str
    at: str
    name: str | Mapping[Any, str] = ""
    by: str = ""
    quantity: str = ""
    where: Mapping[str, Value] = field(default_factory=dict)
    largest: str = ""
    line: bool = True
    marks: bool = True
    bars: bool = False
    hollow: bool = False
    style: int | str | None = None

    def __call__(self, record: Record) -> Iterator[Curve]:
        """The curves of a record."""
        rows = [
            row for row in record.of(self.claim, **self.where)
            if (not self.quantity or row.quantity == self.quantity)
            and self.at in row.condition and (not self.by or self.by in row.condition)
        ]  # fmt: skip
        if self.largest:
            top = max(values(rows, self.largest))
            rows = [row for row in rows if row.condition[self.largest] == top]
        shown = values(rows, self.by) if self.by else [None]
        if not isinstance(self.name, str):
            shown = [value for value in self.name if value in shown]
        for index, value in enumerate(shown):
            members = [row for row in rows if not self.by or row.condition[self.by] == value]
            marks = measured(members, self.at, bars=True) if self.bars else means(members, self.at)
            line = predicted(members, self.at) if self.claim else marks
            name = self.name.format(value) if isinstance(self.name, str) else self.name[value]
            yield Curve(
                name, line if self.line else None, marks if self.marks else None, self.hollow,
                self.style + index if isinstance(self.style, int) else self.style,
            )  # fmt: skip


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
            axis, seen = getattr(axes, f"{side}axis"), getattr(axes, f"get_{side}lim")()
            axis.set_ticks(list(texts), list(texts.values()))
            axis.minorticks_off()
            getattr(axes, f"set_{side}lim")(seen)  # a tick beyond the curves is not shown
        if self.limits != (None, None):
            getattr(axes, f"set_{side}lim")(*self.limits)

    def scaled(self, numbers: Any) -> Array:
        """Numbers as places along the axis."""
        return np.log(numbers) if self.log else np.asarray(numbers, float)


class Level(NamedTuple):
    """A thin reference line at a value of one axis, or of both."""

    x: float | None = None
    y: float | None = None
    name: str = "_nolegend_"


class Panel:
    """A panel of a page.

    Args:
        x: horizontal axis.
        y: vertical axis.
        curves: what is drawn: :class:`Lines`, or functions of the record that give curves.
        title: of the panel.
        levels: reference lines, or a function of the record that gives them.
        legend: place of the legend; None draws none.
        legend_title: heading of the legend.
        columns: of the legend.
        also: draws what is neither curve nor level.
    """

    def __init__(
        self,
        x: Axis,
        y: Axis,
        *curves: Callable[[Record], Iterable[Curve]],
        title: str = "",
        levels: Sequence[Level] | Callable[[Record], Sequence[Level]] = (),
        also: Callable[[Axes, Record, plot_style.Theme], object] | None = None,
        legend: str | tuple[float, float] | None = "best",
        legend_title: str = "",
        columns: int = 1,
    ) -> None:
        self.x, self.y, self.curves = x, y, curves
        self.title, self.levels, self.also = title, levels, also
        self.legend = legend
        self.legend_options: dict[str, Any] = {"title": legend_title, "columns": columns}

    def draw(self, axes: Axes, record: Record, theme: plot_style.Theme) -> None:
        """Draw the panel on its axes."""
        curves = [curve for draw in self.curves for curve in draw(record)]
        following = itertools.count()
        places = [next(following) if c.style is None else c.style for c in curves]
        count = 1 + max((place for place in places if isinstance(place, int)), default=0)
        palette = plot_style.curves(count, theme)
        for curve, place in zip(curves, places, strict=True):
            line = curve.line
            if line is not None and line is not curve.marks:
                line = self._smooth(line)
            if not isinstance(place, str):
                _draw(axes, curve, line, palette[place])
            elif line is not None:
                look: dict[str, Any] = {"color": theme.muted, "linewidth": 1.0, "zorder": 1.5}
                if place == BROAD:
                    look = {"color": theme.ink, "linewidth": 2.6, "alpha": 0.55}
                axes.plot(line.x, line.y, label=curve.name or "_nolegend_", **look)
        for level in self.levels(record) if callable(self.levels) else self.levels:
            plot_style.reference(axes, theme, x=level.x, y=level.y, name=level.name)
        if self.also is not None:
            self.also(axes, record, theme)
        self.x.set(axes, "x")
        self.y.set(axes, "y")
        plot_style.label(axes, x=self.x.label, y=self.y.label, title=self.title)
        if self.legend is not None:
            plot_style.legend(axes, theme, where=self.legend, **self.legend_options)

    def _smooth(self, line: Points) -> Points:
        """A line through points that bends smoothly on these axes, and swings nowhere."""
        if len(line.x) < 3:
            return line
        bent = PchipInterpolator(self.x.scaled(line.x), self.y.scaled(line.y))
        fine = np.linspace(bent.x[0], bent.x[-1], 200)
        x, y = (np.exp(v) if axis.log else v for axis, v in ((self.x, fine), (self.y, bent(fine))))
        return Points(x.tolist(), y.tolist())


def _draw(axes: Axes, curve: Curve, line: Points | None, style: plot_style.Curve) -> None:
    """Draw a curve under one entry of the legend."""
    marks, name = curve.marks, curve.name or "_nolegend_"
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
        if any(isinstance(c, Lines) and c.line and c.claim for p in self.panels for c in p.curves):
            note += " Lines are interpolated between the marks."
        figure, places = plot_style.new_figure(
            self.title, note, panels=len(self.panels), theme=theme
        )
        for axes, panel in zip(places, self.panels, strict=True):
            panel.draw(axes, record, theme)
        return figure
