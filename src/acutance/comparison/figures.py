"""The figure of a comparison: effective keys against n, theory as lines, measurements as marks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

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
    points = {}  # by mechanism: n, measured, error, predicted
    for name in comparison.mechanisms:
        readings = [(result.n, result["effective_keys"]) for result in comparison.of(name)]
        rows = np.array([(n, keys.measured, keys.error, keys.predicted) for n, keys in readings])
        rows = rows[~np.isnan(rows[:, 1])]
        if len(rows):
            points[name] = rows
    if not points:
        raise ValueError("nothing to draw: no mechanism has effective keys")
    names = sorted(points, key=lambda name: -points[name][-1, 1])
    drawing, [axes] = plot_style.new_figure(
        "Effective number of keys per row",
        f"{heading(comparison)}. Lines: theory. Marks: measured.",
        theme=theme,
        height=max(5.2, 1.6 + 0.235 * len(names)),
    )
    for name, curve in zip(names, plot_style.curves(len(names), theme), strict=True):
        n, measured, error, predicted = points[name].T
        error, known = np.nan_to_num(error), ~np.isnan(predicted)
        if known.any():
            plot_style.draw_line_and_marks(
                axes, n[known], predicted[known], n, measured, curve, name, error=error
            )
        else:
            plot_style.draw_marks(axes, n, measured, curve, name, error=error, hollow=True)
    lengths = comparison.lengths
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.minorticks_off()
    pad = (lengths[-1] / lengths[0]) ** 0.06 if len(lengths) > 1 else 1.3
    axes.set_xlim(lengths[0] / pad, lengths[-1] * pad)
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.8, low), max(1.4 * lengths[-1], high))
    ends, dots = axes.get_xlim(), (0, (1, 1.5))
    axes.plot(ends, ends, color=theme.muted, linestyle=dots, label="all n keys", zorder=1)
    plot_style.reference(axes, theme, y=1.0)
    plot_style.label(axes, x="keys n", y="effective keys (Σ|a|)² / Σa²")
    plot_style.legend(axes, theme, where="upper left")
    box = axes.get_legend()
    assert box is not None
    box.set_bbox_to_anchor((1.01, 1.0))
    return drawing
