"""Figures as data: a page of panels, each with two axes and the curves that a record gives.

Lines are predictions and marks are measurements, in the style of every figure of acutance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from scipy.interpolate import PchipInterpolator

from acutance.plugins import plot_style
from acutance_lab.record import Record, Row, Value, values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The style of a curve that is not of the panel's palette: a thin grey line.
GREY = "grey"


class Points(NamedTuple):
    """Positions of the marks or of the line of a curve, and perhaps standard errors."""

    x: Any
    y: Any
    error: Any = None


@dataclass(frozen=True)
class Curve:
    """One entry of a legend.

    Attributes:
        name: in the legend; "" for none.
        line: what is predicted, drawn as a smooth line through these points.
        marks: what is measured.
        hollow: draw marks without a filling.
        style: place in the panel's palette, or :data:`GREY`; None takes the next place.
    """

    name: str
    line: Points | None = None
    marks: Points | None = None
    hollow: bool = False
    style: int | str | None = None


def number(row: Row, name: str) -> Any:
    """The measurement or prediction of a row, or the value of one of its conditions."""
    return getattr(row, name) if name in ("measured", "predicted") else row.condition[name]


@dataclass(frozen=True)
class Lines:
    """Curves of a record: predictions as lines, measurements as marks.

    Attributes:
        claim: key of the claim whose rows are drawn; "" draws all rows of a ``quantity``, their
            marks joined by the line.
        at: what is on the horizontal axis, a condition or "predicted".
        name: in the legend, with the value of ``by`` in the place of {}; or names of the values
            that are drawn, in their order.
        by: the condition whose values have a curve each, "" for one curve.
        quantity: of the rows, "" for any.
        where: conditions that the rows meet.
        last: a condition of which only the value of the last row is drawn, "" for none.
        of: what is on the vertical axis, "measured" or a condition.
        line: whether lines are drawn.
        marks: "means", one mark for all rows at the same place, as those of several seeds; "bars",
            one for each row, with bars of one standard error; "" for none.
        hollow: draw marks without a filling.
        style: of the first curve, the others follow: as in :class:`Curve`.
    """

    claim: str
    at: str
    name: str | Mapping[Any, str] = ""
    by: str = ""
    quantity: str = ""
    where: Mapping[str, Value] = field(default_factory=dict)
    last: str = ""
    of: str = "measured"
    line: bool = True
    marks: str = "means"
    hollow: bool = False
    style: int | str | None = None

    def __call__(self, record: Record) -> Iterator[Curve]:
        """The curves of a record."""
        rows = [
            row for row in record.rows
            if self.claim in ("", row.claim) and self.quantity in ("", row.quantity)
            and self.where.items() <= row.condition.items()
            and (not self.by or self.by in row.condition)
        ]  # fmt: skip
        if self.last and rows:
            last = rows[-1].condition[self.last]
            rows = [row for row in rows if row.condition[self.last] == last]
        shown = values(rows, self.by) if self.by else [None]
        if not isinstance(self.name, str):
            shown = [value for value in self.name if value in shown]
        for index, value in enumerate(shown):
            members = [row for row in rows if not self.by or row.condition[self.by] == value]
            marks = self._marks(members)
            line = marks
            if self.claim and self.of == "measured":
                predicted = {number(row, self.at): row.predicted for row in members}
                line = Points(*zip(*sorted(predicted.items()), strict=True))
            yield Curve(
                self.name.format(value) if isinstance(self.name, str) else self.name[value],
                line if self.line else None, marks if self.marks else None, self.hollow,
                self.style + index if isinstance(self.style, int) else self.style,
            )  # fmt: skip

    def _marks(self, rows: Sequence[Row]) -> Points:
        """The measurements of rows."""
        x, y = ([number(row, name) for row in rows] for name in (self.at, self.of))
        if self.marks == "bars":
            return Points(x, y, [row.error for row in rows])
        by_place: dict[Any, list[float]] = {}
        for place, value in zip(x, y, strict=True):
            by_place.setdefault(place, []).append(value)
        return Points([*by_place], [sum(numbers) / len(numbers) for numbers in by_place.values()])


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Attributes:
        label: what it shows, with its unit.
        log: whether it is logarithmic; a number is where it turns linear, around 0.
        ticks: values, or texts by value; () leaves them to matplotlib.
        limits: least and largest value shown.
        slanted: draw the texts of the ticks aslant, because they are words.
    """

    label: str
    log: bool | float = False
    ticks: Sequence[float] | Mapping[float, str] = ()
    limits: tuple[float | None, float | None] = (None, None)
    slanted: bool = False

    def set(self, axes: Axes, side: Literal["x", "y"]) -> None:
        """Set the scale, ticks and limits of the ``side`` "x" or "y"."""
        if self.log is True:
            getattr(axes, f"set_{side}scale")("log")
        elif self.log:
            getattr(axes, f"set_{side}scale")("symlog", linthresh=self.log)
        if self.ticks:
            texts = self.ticks
            if not isinstance(texts, Mapping):
                texts = {at: f"{at:,g}" for at in texts}
            axis, seen = getattr(axes, f"{side}axis"), getattr(axes, f"get_{side}lim")()
            axis.set_ticks(list(texts), list(texts.values()))
            axis.minorticks_off()
            getattr(axes, f"set_{side}lim")(seen)  # a tick beyond the curves is not shown
        if self.slanted:
            axes.tick_params(side, rotation=30)
        if self.limits != (None, None):
            getattr(axes, f"set_{side}lim")(*self.limits)

    def scaled(self, numbers: Any) -> Any:
        """Numbers as places along the axis."""
        return np.log(numbers) if self.log is True else np.asarray(numbers, float)


class Level(NamedTuple):
    """A thin reference line at a value of one axis, or of both; with neither, where x = y."""

    x: float | None = None
    y: float | None = None
    name: str = "_nolegend_"


@dataclass(frozen=True)
class Panel:
    """A panel of a page.

    Attributes:
        x: horizontal axis.
        y: vertical axis.
        curves: what is drawn: :class:`Lines`, or functions of the record that give curves.
        title: of the panel.
        levels: reference lines, or a function of the record that gives them.
        legend: heading of the legend, which is drawn if anything has a name.
    """

    x: Axis
    y: Axis
    curves: Sequence[Callable[[Record], Iterable[Curve]]]
    title: str = ""
    levels: Sequence[Level] | Callable[[Record], Sequence[Level]] = ()
    legend: str = ""

    def draw(self, axes: Axes, record: Record, theme: plot_style.Theme) -> None:
        """Draw the panel on its axes."""
        curves = [curve for draw in self.curves for curve in draw(record)]
        following = itertools.count()
        styles = [next(following) if c.style is None else c.style for c in curves]
        most = max((style for style in styles if isinstance(style, int)), default=0)
        palette = plot_style.curves(1 + most, theme)
        for curve, style in zip(curves, styles, strict=True):
            self._draw(axes, curve, palette[style] if isinstance(style, int) else style, theme)
        for level in self.levels(record) if callable(self.levels) else self.levels:
            if level.x is level.y is None:
                axes.axline((0, 0), slope=1, color=theme.muted, linewidth=1.0, label=level.name)
            plot_style.reference(axes, theme, x=level.x, y=level.y, name=level.name)
        self.x.set(axes, "x")
        self.y.set(axes, "y")
        plot_style.label(axes, x=self.x.label, y=self.y.label, title=self.title)
        if entries := len(axes.get_legend_handles_labels()[1]):
            plot_style.legend(axes, theme, title=self.legend, columns=1 + (entries > 6))

    def _draw(
        self, axes: Axes, curve: Curve, style: plot_style.Curve | str, theme: plot_style.Theme
    ) -> None:
        """Draw a curve under one entry of the legend."""
        marks, name = curve.marks, curve.name or "_nolegend_"
        line = curve.line if curve.line is marks else self._smooth(curve.line)
        if isinstance(style, str):
            if line is not None:
                axes.plot(line.x, line.y, label=name, color=theme.muted, linewidth=1.0, zorder=1.5)
        elif line is not None and marks is not None and not curve.hollow:
            plot_style.draw_line_and_marks(
                axes, line.x, line.y, marks.x, marks.y, style, name, error=marks.error
            )
        else:
            if line is not None:
                plot_style.draw_line(axes, line.x, line.y, style, "_nolegend_" if marks else name)
            if marks is not None:
                plot_style.draw_marks(
                    axes, marks.x, marks.y, style, name, error=marks.error, hollow=curve.hollow
                )

    def _smooth(self, line: Points | None) -> Points | None:
        """A line through points that bends smoothly on these axes, and swings nowhere."""
        if line is None or len(line.x) < 3:
            return line
        bent = PchipInterpolator(self.x.scaled(line.x), self.y.scaled(line.y))
        fine = np.linspace(bent.x[0], bent.x[-1], 200)
        x, y = (np.exp(v) if axis.log else v for axis, v in ((self.x, fine), (self.y, bent(fine))))
        return Points(x.tolist(), y.tolist())


@dataclass(frozen=True)
class Page:
    """A figure of one or several panels side by side; called, it draws a record in a theme.

    Attributes:
        title: what the figure shows, in words.
        note: a line or two under the title.
        panels: from left to right.
    """

    title: str
    note: str
    panels: Sequence[Panel]

    def __call__(self, record: Record, theme: plot_style.Theme) -> Figure:
        """Draw the record."""
        note = self.note
        if any(isinstance(c, Lines) and c.line and c.claim for p in self.panels for c in p.curves):
            note += " Lines are interpolated between the marks."
        panels = len(self.panels)
        figure, places = plot_style.new_figure(self.title, note, panels=panels, theme=theme)
        for axes, panel in zip(places, self.panels, strict=True):
            panel.draw(axes, record, theme)
        return figure
