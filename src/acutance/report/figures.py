"""The heat map of a metric over layers and heads (needs the extra ``plots``)."""

from __future__ import annotations

import os
import textwrap

from acutance.escapes import printable
from acutance.report.colours import as_hex, brief, colour, colour_scale, ink
from acutance.report.plot_style import LIGHT, Theme, blank, colour_bar, name_cells, save
from acutance.report.terminal import span
from acutance.structure import describe
from acutance.summary.head_summary import HeadSummary

_WIDTH = 10.0  # inches: 1600 pixels


def draw_heads(
    summary: HeadSummary,
    path: str | os.PathLike[str],
    metric: str = "normalized_entropy",
    *,
    theme: Theme = LIGHT,
) -> None:
    """Draw a heat map (layer × head) of a metric's mean over rows, 1600 pixels wide.

    The image is a card with rounded corners on a transparent background.

    Args:
        summary: any head summary.
        path: output file, written atomically; SVG if it ends in .svg, else PNG.
        metric: a recorded metric.
        theme: light or dark.

    Raises:
        ImportError: without matplotlib.
        ValueError: if the metric does not exist or was not recorded, or there is no head.
    """
    grid = summary.grid(metric)
    layers, heads = len(grid), max((len(row) for row in grid), default=0)
    if not heads:
        raise ValueError(f"draw_heads needs at least one head, got a summary of {layers} layers")
    scale = colour_scale(metric, (value for row in grid for value in row))
    name, entry = metric.replace("_", " "), describe(metric)

    left, right, top, bottom = 0.95, 1.75, 1.15, 0.75  # margins in inches
    across = _WIDTH - left - right
    down = min(max(across / heads * layers, 1.6), 9.0)
    down = max(min(down, 0.52 * layers), 1.6)
    height = down + top + bottom
    figure = blank(_WIDTH, height, "acutance.report.figures", facecolor="none")
    from matplotlib.colors import ListedColormap, LogNorm, Normalize
    from matplotlib.patches import FancyBboxPatch

    figure.add_artist(
        FancyBboxPatch(
            (0.012 * 10 / _WIDTH, 0.12 / height),
            1 - 0.024,
            1 - 0.24 / height,
            boxstyle=f"round,pad=0,rounding_size={0.012}",
            mutation_aspect=_WIDTH / height,
            facecolor=theme.page,
            edgecolor=theme.grid,
            linewidth=1.0,
            transform=figure.transFigure,
            zorder=-1,
        )
    )
    axes = figure.add_axes((left / _WIDTH, bottom / height, across / _WIDTH, down / height))
    cells = [row + [float("nan")] * (heads - len(row)) for row in grid]
    colours = ListedColormap([as_hex(colour(step / 255)) for step in range(256)], name="viridis")
    norm = (LogNorm if scale.log else Normalize)(scale.low, scale.high)
    mesh = axes.pcolormesh(
        cells,
        cmap=colours,
        norm=norm,
        edgecolors=theme.page,
        linewidth=1.5 if max(layers, heads) <= 24 else 0.6,
    )
    axes.set_xlim(0, heads)
    axes.set_ylim(layers, 0)
    axes.set_facecolor(theme.page)
    if heads <= 16 and layers <= 32:
        size = 9.5 if heads <= 12 else 8
        for layer, row in enumerate(grid):
            for head, value in enumerate(row):
                place = scale.place(value)
                shade = theme.muted if place is None else as_hex(ink(colour(place)))
                text = "–" if place is None else _short(value, metric)
                axes.text(
                    head + 0.5, layer + 0.5, text, ha="center", va="center", color=shade, size=size
                )
    numbers = max((layer.numbers for layer in summary.layers), key=len)
    alike = all(layer.numbers == numbers[: layer.heads] for layer in summary.layers)
    names = numbers if alike else tuple(range(heads))
    name_cells(axes.xaxis, names, 32)
    name_cells(axes.yaxis, range(layers), 24)
    axes.tick_params(length=0, labelsize=10, labelcolor=theme.muted, pad=5)
    which = "head" if names is numbers else "head, in the order read"
    axes.set_xlabel(which, size=11, color=theme.ink, labelpad=6)
    axes.set_ylabel("layer", size=11, color=theme.ink, labelpad=8)
    for spine in axes.spines.values():
        spine.set_visible(False)

    rows = span(layer.rows for layer in summary.layers)
    figure.text(
        left / _WIDTH, 1 - 0.52 / height, f"{subject(summary)}{name} of every head",
        size=15, weight="bold", color=theme.ink, va="center", parse_math=False,
    )  # fmt: skip
    figure.text(
        left / _WIDTH, 1 - 0.85 / height, f"mean over {rows} rows; {entry.meaning}",
        size=10.5, color=theme.muted, va="center", parse_math=False,
    )  # fmt: skip
    bar_axes = figure.add_axes(
        ((left + across + 0.32) / _WIDTH, bottom / height, 0.2 / _WIDTH, down / height)
    )
    between = "  " if down > 3.2 else "\n"  # a short bar's name has two lines
    ends = f"{between}(0 sharp, 1 diffuse)" if metric == "normalized_entropy" else ""
    what = f"{name}{ends}" if entry.unit == "1" else f"{name}, {entry.unit}"
    bar = colour_bar(figure, mesh, theme, what, cax=bar_axes)
    bar.set_ticks(scale.ticks(5), labels=[_short(value, metric) for value in scale.ticks(5)])
    bar_axes.minorticks_off()
    save(figure, path, "svg" if os.fspath(path).lower().endswith(".svg") else "png")


def subject(summary: HeadSummary) -> str:
    """The model's name as the start of a title; empty if unknown."""
    model = textwrap.shorten(printable(str(summary.about.get("model", ""))), 44, placeholder="…")
    return f"{model}: " if model else ""


def _short(value: float, metric: str) -> str:
    """A metric's value as text for a cell of the heat map."""
    return brief(value, metric).replace("-", "−")
