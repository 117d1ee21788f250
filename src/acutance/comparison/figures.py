"""The figure of a comparison: effective keys against n, theory as lines, measurements as marks."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from acutance.comparison.record import Comparison, heading
from acutance.report import plot_style
from acutance.report.plot_style import LIGHT, Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(comparison: Comparison, path: str | os.PathLike[str], *, theme: Theme = LIGHT) -> None:
    """Write :func:`figure` to a .png or .svg file.

    Raises:
        ImportError: without matplotlib.
        ValueError: for another ending, or if nothing was measured.
    """
    plot_style.save(figure(comparison, theme=theme), path)


def figure(comparison: Comparison, *, theme: Theme = LIGHT) -> Figure:
    """Draw effective keys against n, a line and marks for each mechanism.

    Marks without a line are of mechanisms that no function predicts, and hollow.

    Args:
        comparison: a comparison.
        theme: the page, light or dark.

    Raises:
        ImportError: without matplotlib.
        ValueError: if nothing was measured.
    """
    names = [
        name
        for name in comparison.mechanisms
        if any(not math.isnan(result["effective_keys"].measured) for result in comparison.of(name))
    ]
    if not names:
        raise ValueError("nothing to draw: no mechanism has effective keys")
    names.sort(key=lambda name: -comparison.of(name)[-1]["effective_keys"].measured)
    drawing, [axes] = plot_style.new_figure(
        "Effective number of keys per row",
        f"{heading(comparison)}. Lines: theory. Marks: measured.",
        theme=theme,
        height=max(5.2, 1.6 + 0.235 * len(names)),
    )
    for name, curve in zip(names, plot_style.curves(len(names), theme), strict=True):
        readings = [(result.n, result["effective_keys"]) for result in comparison.of(name)]
        readings = [each for each in readings if not math.isnan(each[1].measured)]
        at = [n for n, _ in readings]
        marks = [reading.measured for _, reading in readings]
        error = [0.0 if math.isnan(r.error) else r.error for _, r in readings]
        line = [(n, r.predicted) for n, r in readings if not math.isnan(r.predicted)]
        if line:
            places, values = zip(*line, strict=True)
            plot_style.draw_line_and_marks(
                axes, places, values, at, marks, curve, name, error=error
            )
        else:
            plot_style.draw_marks(axes, at, marks, curve, error=error, hollow=True)
            axes.plot(
                [], [], color=curve.colour, linestyle="None", marker=curve.mark, markersize=6.0,
                markerfacecolor=theme.page, markeredgewidth=1.3, label=name,
            )  # fmt: skip
    lengths = comparison.lengths
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.minorticks_off()
    pad = (lengths[-1] / lengths[0]) ** 0.06 if len(lengths) > 1 else 1.3
    axes.set_xlim(lengths[0] / pad, lengths[-1] * pad)
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.8, low), max(1.4 * lengths[-1], high))
    axes.plot(
        [lengths[0] / pad, lengths[-1] * pad], [lengths[0] / pad, lengths[-1] * pad],
        color=theme.muted, linewidth=1.1, linestyle=(0, (1, 1.5)), label="all n keys", zorder=1,
    )  # fmt: skip
    plot_style.reference(axes, theme, y=1.0)
    plot_style.label(axes, x="keys n", y="effective keys (Σ|a|)² / Σa²")
    plot_style.legend(axes, theme, where="upper left")
    box = axes.get_legend()
    assert box is not None
    box.set_bbox_to_anchor((1.01, 1.0))
    return drawing
