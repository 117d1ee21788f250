"""The figure of a diff: a map of changes, the heads that changed most, and the layers.

Needs matplotlib (the extra ``plots``). Changes are coloured from purple (less) over the page's
colour to orange (more), which colour-blind readers tell apart; a ring marks the heads that moved.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import numpy as np

from acutance.escapes import printable
from acutance.report import plot_style
from acutance.report.plot_style import LIGHT, Theme
from acutance.report.terminal import in_words
from acutance.summary.diff import Diff

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_diff"]

_LESS = {"light": ("#7b3294", "#c2a5cf"), "dark": ("#d3a4e6", "#7d4f93")}
_MORE = {"light": ("#b35806", "#f1b36b"), "dark": ("#fdb863", "#9a5a12")}
_NAMED = 12


def draw_diff(
    changes: Diff,
    path: str | os.PathLike[str],
    metric: str = "normalized_entropy",
    *,
    theme: Theme = LIGHT,
) -> None:
    """Draw the change of a metric: a map, the heads that moved most with intervals, the layers.

    Args:
        changes: a diff.
        path: a .png or .svg file.
        metric: one that both states have.
        theme: the page, light or dark.

    Raises:
        ImportError: without matplotlib.
        ValueError: if the two do not share the metric, or no head has rows in both.
    """
    changed = changes.moved(metric, _NAMED)
    if not changed:
        raise ValueError(f"nothing to draw: no head has rows in both states for {metric}")
    name = metric.replace("_", " ")
    unit = in_words(metric).removeprefix(name)
    models = [printable(str(about.get("model", "?")))[:40] for about in changes.about]
    layers = changes.layers(metric)
    figure, [left, middle, right] = plot_style.new_figure(
        f"Change of {name}: {models[0]} → {models[1]}",
        "Left: every head, with a ring around those that moved. Middle: the heads that "
        "changed most, with confidence intervals. Right: mean change of each layer's heads, "
        "± at most one standard error.",
        panels=3,
        theme=theme,
        height=min(9.0, max(4.9, 2.6 + 0.16 * len(layers))),
        widths=(1.25, 1.0, 0.9),
    )
    _map(figure, left, changes, metric, theme)
    plot_style.reference(middle, theme, x=0.0)
    shades = _LESS[theme.name][0], _MORE[theme.name][0]
    for row, head in enumerate(changed):
        shade = shades[head.change > 0]
        if math.isfinite(head.low):
            middle.plot([head.low, head.high], [row, row], color=shade, linewidth=1.6)
        face = shade if head.verdict == "moved" else theme.page
        middle.plot(
            head.change, row, marker="o", markersize=6.5, color=shade, markerfacecolor=face,
            markeredgewidth=1.4, linestyle="None", zorder=3,
        )  # fmt: skip
    middle.set_yticks(
        range(len(changed)), [f"layer {head.layer} head {head.head}" for head in changed]
    )
    middle.set_ylim(len(changed) - 0.4, -0.6)
    plot_style.label(middle, x=f"change{unit}", y="", title="changed most (filled: moved)")
    plot_style.reference(right, theme, x=0.0)
    for row, layer in enumerate(layers):
        if not math.isfinite(layer.change):
            continue
        shade = shades[layer.change > 0]
        right.barh(row, layer.change, height=0.72, color=shade, alpha=0.85, zorder=2)
        if math.isfinite(layer.error):
            right.plot([layer.change - layer.error, layer.change + layer.error], [row, row],
                       color=theme.ink, linewidth=1.0, zorder=3)  # fmt: skip
    step = math.ceil(len(layers) / 24)
    right.set_yticks(range(0, len(layers), step), [str(layer.layer) for layer in layers[::step]])
    right.set_ylim(len(layers) - 0.4, -0.6)
    plot_style.label(right, x=f"mean change{unit}", y="layer", title="by layer")
    plot_style.save(figure, path)


def _map(figure: Figure, axes: Axes, changes: Diff, metric: str, theme: Theme) -> None:
    """Draw the change of each layer and head as colour; a ring marks significant changes."""
    from matplotlib.colors import LinearSegmentedColormap

    heads = changes.of(metric)
    rows = {layer: row for row, layer in enumerate(dict.fromkeys(head.layer for head in heads))}
    across = 1 + max(head.head for head in heads)
    cells = np.full((len(rows), across), np.nan)
    for head in heads:
        cells[rows[head.layer], head.head] = head.change
    reach = float(np.nanmax(np.abs(cells))) or 1.0
    colours = LinearSegmentedColormap.from_list(
        "change", [*_LESS[theme.name], theme.page, *reversed(_MORE[theme.name])]
    )
    axes.grid(False)
    mesh = axes.pcolormesh(
        cells, cmap=colours, vmin=-reach, vmax=reach, edgecolors=theme.grid,
        linewidth=0.6 if max(cells.shape) <= 24 else 0.0,
    )  # fmt: skip
    ring = [(rows[head.layer], head.head) for head in heads if head.verdict == "moved"]
    size = 60 if max(cells.shape) <= 16 else 14 if max(cells.shape) <= 40 else 4
    if ring:
        strong = [abs(cells[place]) > reach / 2 for place in ring]
        edges = [theme.page if dark else theme.ink for dark in strong]
        y, x = np.array(ring).T + 0.5
        axes.scatter(x, y, s=size, facecolors="none", edgecolors=edges, linewidths=1.3, zorder=3)
    plot_style.name_cells(axes.xaxis, range(across), 16)
    plot_style.name_cells(axes.yaxis, list(rows), 16)
    axes.set_ylim(len(rows), 0)
    plot_style.label(axes, x="head", y="layer", title=f"{len(ring)} of {len(heads)} heads moved")
    title = f"change of {in_words(metric)}"
    plot_style.colour_bar(figure, mesh, theme, title, ax=axes, pad=0.02, fraction=0.06)
