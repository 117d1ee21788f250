"""Figures of a summary: heat map of heads, layer profile, entropy by number of keys, theory.

Needs matplotlib (the extra ``plots``). All colours are of viridis.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from acutance.escapes import printable
from acutance.report import plot_style
from acutance.report.colours import as_hex, brief, colour, colour_scale, ink
from acutance.report.plot_style import DARK, LIGHT, Theme
from acutance.report.terminal import in_words, span
from acutance.structure import describe
from acutance.summary.head_summary import PREDICTED_FROM, HeadSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["CHARTS", "draw", "draw_heads", "draw_layers", "draw_lengths", "draw_theory"]

#: What ``acutance report --figure`` can draw, by name.
CHARTS: dict[str, str] = {
    "heads": "heat map of a metric, layers by heads",
    "layers": "a metric of each head by layer, with median and quartiles",
    "lengths": "a metric against the number of visible keys, a line for each head",
    "theory": "entropy measured and predicted from the logits' deviation, a point for each head",
}
_WIDTH = 10.0  # of the heat map, in inches: 1600 pixels
_MOST_LINES = 400
_NAMED = 3
_FEW = 0.1


def draw(
    summary: HeadSummary,
    path: str | os.PathLike[str],
    *,
    chart: str = "heads",
    metric: str | None = None,
    dark: bool = False,
) -> None:
    """Draw one of the figures in :data:`CHARTS` to a file.

    Args:
        summary: any head summary.
        path: a .png or .svg file.
        chart: name of the figure.
        metric: the metric to show; None for entropy in "lengths" and normalized entropy in others.
            "theory" accepts none.
        dark: use a dark background.

    Raises:
        ImportError: without matplotlib.
        ValueError: if there is no such chart or metric, or the summary lacks what it shows.
    """
    if chart not in CHARTS:
        raise ValueError(f"chart: must be one of {', '.join(CHARTS)}, got {chart!r}")
    if chart == "theory" and metric is not None:
        raise ValueError(
            "metric: the chart 'theory' shows entropy only and accepts no other metric"
        )
    drawing: dict[str, Callable[..., None]] = {
        "heads": draw_heads, "layers": draw_layers, "lengths": draw_lengths, "theory": draw_theory,
    }  # fmt: skip
    chosen = {} if metric is None else {"metric": metric}
    drawing[chart](summary, path, theme=DARK if dark else LIGHT, **chosen)


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
    figure = plot_style.blank(_WIDTH, height, "acutance.report.figures", facecolor="none")
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
                text = "–" if place is None else brief(value, metric).replace("-", "−")
                axes.text(
                    head + 0.5, layer + 0.5, text, ha="center", va="center", color=shade, size=size
                )
    numbers = max((layer.numbers for layer in summary.layers), key=len)
    alike = all(layer.numbers == numbers[: layer.heads] for layer in summary.layers)
    names = numbers if alike else tuple(range(heads))
    plot_style.name_cells(axes.xaxis, names, 32)
    plot_style.name_cells(axes.yaxis, range(layers), 24)
    axes.tick_params(length=0, labelsize=10, labelcolor=theme.muted, pad=5)
    which = "head" if names is numbers else "head, in the order read"
    axes.set_xlabel(which, size=11, color=theme.ink, labelpad=6)
    axes.set_ylabel("layer", size=11, color=theme.ink, labelpad=8)
    for spine in axes.spines.values():
        spine.set_visible(False)

    rows = span(layer.rows for layer in summary.layers)
    figure.text(
        left / _WIDTH, 1 - 0.52 / height, f"{_subject(summary)}{name} of every head",
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
    bar = plot_style.colour_bar(figure, mesh, theme, in_words(metric) + ends, cax=bar_axes)
    ticks = scale.ticks(5)
    bar.set_ticks(ticks, labels=[brief(value, metric).replace("-", "−") for value in ticks])
    bar_axes.minorticks_off()
    plot_style.save(figure, path, "svg" if os.fspath(path).lower().endswith(".svg") else "png")


def draw_layers(
    summary: HeadSummary,
    path: str | os.PathLike[str],
    metric: str = "normalized_entropy",
    *,
    theme: Theme = LIGHT,
) -> None:
    """Draw each layer's heads as dots, their median as a line and their quartiles as a band.

    Args:
        summary: any head summary.
        path: a .png or .svg file.
        metric: a metric the summary has.
        theme: the page, light or dark.

    Raises:
        ImportError: without matplotlib.
        ValueError: if the metric does not exist or was not recorded, or no head has a row.
    """
    grid = [[value for value in row if math.isfinite(value)] for row in summary.grid(metric)]
    if not any(grid):
        raise ValueError(f"nothing to draw: no head has a valid row for {metric}")
    name, entry = metric.replace("_", " "), describe(metric)
    scale = colour_scale(metric, (value for row in grid for value in row))
    figure, [axes] = plot_style.new_figure(
        f"{_subject(summary)}{name} by layer",
        "Each dot is a head's mean over rows, the line the layer's median, the band its "
        f"quartiles. {entry.meaning[0].upper()}{entry.meaning[1:]}.",
        theme=theme,
    )
    line, dot = _two(theme)
    filled = [index for index, row in enumerate(grid) if row]
    quarters = np.array([np.quantile(grid[index], (0.25, 0.5, 0.75)) for index in filled])
    low, middle, high = quarters.T
    axes.fill_between(filled, low, high, color=line, alpha=0.18, linewidth=0, label="quartiles")
    heads = max(map(len, grid))
    for index in filled:
        axes.plot(
            [index] * len(grid[index]), grid[index], linestyle="None", marker="o", color=dot,
            markersize=5.0 if heads <= 16 else 3.0, alpha=0.75, markeredgewidth=0,
            label="head" if index == filled[0] else "_nolegend_",
        )  # fmt: skip
    axes.plot(filled, middle, color=line, linewidth=2.0, marker="s", markersize=4.5,
              label="median")  # fmt: skip
    if scale.log:
        axes.set_yscale("log")
    elif entry.range in ("[0, 1]", "(0, 1]"):
        axes.set_ylim(-0.03, 1.03)
    axes.set_xticks(list(range(0, len(grid), math.ceil(len(grid) / 20))))
    axes.set_xlim(-0.6, len(grid) - 0.4)
    plot_style.label(axes, x="layer", y=in_words(metric))
    plot_style.legend(axes, theme)
    plot_style.save(figure, path)


def draw_lengths(
    summary: HeadSummary,
    path: str | os.PathLike[str],
    metric: str = "entropy",
    *,
    theme: Theme = LIGHT,
) -> None:
    """Draw a metric against the number of visible keys, a line for each head, octave by octave.

    Args:
        summary: one with a profile, as new probes record it.
        path: a .png or .svg file.
        metric: a metric the summary has; with "entropy" the most that n keys allow is drawn too.
        theme: the page, light or dark.

    Raises:
        ImportError: without matplotlib.
        ValueError: if the metric does not exist or was not recorded, or the state was written
            without a profile.
    """
    summary.mean(metric)  # names what is wrong with the metric
    column = summary.metrics.index(metric)
    profile: Any = getattr(summary, "profile", None)
    if profile is None:
        raise ValueError(
            "this state does not record how metrics depend on n, because an older version "
            "wrote it: probe the model again"
        )
    count = profile.count[:, column].numpy()
    count = np.where(_enough(profile.rows.sum(0).numpy()), count, 0)
    mean = np.where(count > 0, profile.mean[:, column].numpy(), np.nan)
    n = np.where(count > 0, np.exp(profile.log_n.numpy()), np.nan)
    if not count.any():
        raise ValueError(f"nothing to draw: no head has a valid row for {metric}")
    octaves = int((count.sum(0) > 0).sum())
    note = (
        "Each line is a head; a point is its mean over the rows that see 1, 2–3, 4–7, … keys."
        if octaves > 2
        else (
            "All rows see nearly the same number of keys, as in a bidirectional model: probe "
            "several lengths to see the dependence on n."
        )
    )
    figure, [axes] = plot_style.new_figure(
        f"{_subject(summary)}{metric.replace('_', ' ')} by number of keys", note, theme=theme
    )
    layers = np.array([layer for layer, _ in summary.places])
    order = np.arange(len(layers))
    if len(order) > _MOST_LINES:  # evenly spaced heads: more lines would be one grey area
        order = order[:: math.ceil(len(order) / _MOST_LINES)]
        figure.text(0.99, 0.012, f"{len(order)} of {len(layers)} heads, evenly spaced", ha="right",
                    size=8.5, color=theme.muted)  # fmt: skip
    colours = _by_layer(len(summary.layers), theme)
    few = len(order) <= 24
    for index in order:
        finite = np.isfinite(mean[index]) & np.isfinite(n[index])
        axes.plot(
            n[index][finite], mean[index][finite], color=colours(layers[index]), zorder=2,
            linewidth=1.6 if few else 0.9, alpha=0.95 if few else 0.6, marker="o",
            markersize=3.5 if few or octaves < 3 else 1.8, markeredgewidth=0,
        )  # fmt: skip
    drawn = np.isfinite(n)
    low, high = max(1.0, float(n[drawn].min())), float(n[drawn].max())
    if high < 1.05 * low:
        low, high = low / 1.3, high * 1.3
    if metric == "entropy":
        along = np.geomspace(low, high, 50)
        axes.plot(along, np.log(along), color=theme.muted, linewidth=1.3, linestyle=(0, (1, 1.5)),
                  label="log n: uniform weights")  # fmt: skip
        plot_style.legend(axes, theme, where="upper left")
    axes.set_xscale("log", base=2)
    ticks = [2**power for power in range(33) if low * 0.99 <= 2**power <= high * 1.01]
    if len(ticks) < 2:
        ticks = [round(low), round(high)]
    ticks = ticks[:: math.ceil(len(ticks) / 12)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    plot_style.label(axes, x="visible keys n", y=in_words(metric))
    _layer_bar(figure, axes, len(summary.layers), colours, theme)
    plot_style.save(figure, path)


def draw_theory(
    summary: HeadSummary, path: str | os.PathLike[str], *, theme: Theme = LIGHT
) -> None:
    """Draw measured entropy against predicted entropy, a point for each head.

    The prediction is :meth:`~acutance.summary.head_summary.HeadSummary.predict`'s, from the first
    key's gap and the spread and Jensen gap of the other logits; for a summary without these, the
    entropy of Gaussian logits with the same deviation. The three heads with the largest differences
    are labelled.

    Args:
        summary: one with ``entropy``, ``gaussian_entropy`` and ``logit_std``.
        path: a .png or .svg file.
        theme: the page, light or dark.

    Raises:
        ImportError: without matplotlib.
        ValueError: if one of them was not recorded, or no head has a row.
    """
    names = ("gaussian_entropy", "entropy", "logit_std")
    means = np.array([summary.mean(name).numpy() for name in names])
    text = (
        "Predicted: rows of independent Gaussian logits with each row's own n and deviation; below "
        "the line a head is sharper than that."
    )
    known = summary.profile is not None and set(PREDICTED_FROM) <= set(summary.metrics)
    if known and math.isfinite((heads := summary.predict()).r_squared()):
        means[:2] = np.stack([heads.predicted["entropy"], heads.measured["entropy"]])
        text = (
            f"Rows of about {float(heads.n.nanmedian()):.0f} keys. Predicted from four numbers of "
            "each head: gap of the first key and its deviation, deviation and Jensen gap of the "
            f"other logits. R² = {heads.r_squared():.2f}."
            + (
                f" Left out: {lost} heads in which a few keys beyond the first dominate."
                if (lost := int(heads.impossible.sum()))
                else ""
            )
        )
    finite = np.isfinite(means).all(0)
    if not finite.any():
        raise ValueError("nothing to draw: no head has a valid row")
    expected, entropy, spread = means[:, finite]
    places = [place for place, is_finite in zip(summary.places, finite, strict=True) if is_finite]
    off = entropy - expected
    figure, [left, right] = plot_style.new_figure(
        f"{_subject(summary)}entropy measured and predicted",
        f"Each point is a head, coloured by layer. {text} The three heads furthest from it "
        "are named, as layer.head.",
        panels=2,
        theme=theme,
        height=5.4,
    )
    colours = _by_layer(len(summary.layers), theme)
    shades = [colours(layer) for layer, _ in places]
    size = 34 if len(places) <= 200 else 9
    least, most = (float(pick([pick(expected), pick(entropy)])) for pick in (np.min, np.max))
    top = most + 0.06 * (most - least or 1.0)
    low = least - 0.06 * (most - least or 1.0) if least > 0.4 * most else 0.0
    left.plot([low, top], [low, top], color=theme.muted, linewidth=1.2, linestyle=(0, (1, 1.5)))
    edge: dict[str, Any] = {"edgecolors": theme.page, "linewidths": 0.4, "zorder": 3}
    left.scatter(expected, entropy, c=shades, s=size, **edge)
    right.scatter(spread, off, c=shades, s=size, **edge)
    plot_style.reference(right, theme, y=0.0)
    left.set_xlim(low, top)
    left.set_ylim(low, top)
    for axes, x, y in ((left, expected, entropy), (right, spread, off)):
        for index in np.argsort(-np.abs(off), kind="stable")[:_NAMED]:
            layer, head = places[index]
            axes.annotate(
                f"{layer}.{head}", (x[index], y[index]), xytext=(5, 4), size=8.5, zorder=4,
                textcoords="offset points", color=theme.ink,
            )  # fmt: skip
    plot_style.label(left, x="predicted entropy, nat", y="measured entropy, nat")
    across = "standard deviation of the logits, nat"
    plot_style.label(right, x=across, y="measured − predicted, nat")
    _layer_bar(figure, right, len(summary.layers), colours, theme)
    plot_style.save(figure, path)


def _subject(summary: HeadSummary) -> str:
    """The model's name as the start of a title; empty if unknown."""
    model = textwrap.shorten(printable(str(summary.about.get("model", ""))), 44, placeholder="…")
    return f"{model}: " if model else ""


def _enough(rows: Any) -> Any:
    """Boolean (octaves,): which octaves of n have enough rows to be drawn.

    ``rows`` counts the rows of each octave. An octave with less than a small share (``_FEW``) of
    the previous one's rows is omitted: only the last rows of each window reach it.

    Example:
        >>> _enough(np.array([20, 40, 80, 2])).tolist()
        [True, True, True, False]
    """
    return np.append(True, rows[1:] >= _FEW * rows[:-1])


def _two(theme: Theme) -> tuple[str, str]:
    """Two colours of viridis that contrast with the page and with each other."""
    return ("#fde725", "#21918c") if theme.name == "dark" else ("#440154", "#21918c")


def _by_layer(layers: int, theme: Theme) -> Callable[[int], Any]:
    """A colour for each layer, from the part of viridis that contrasts with the page."""
    first, last = (0.3, 1.0) if theme.name == "dark" else (0.0, 0.85)
    return lambda layer: as_hex(colour(first + (last - first) * int(layer) / max(1, layers - 1)))


def _layer_bar(
    figure: Any, axes: Axes, layers: int, colours: Callable[[int], Any], theme: Theme
) -> None:
    """Draw the colour bar of the layers."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    if layers < 2:
        return
    shades = ListedColormap([colours(layer) for layer in range(layers)])
    drawn = ScalarMappable(Normalize(-0.5, layers - 0.5), shades)
    bar = plot_style.colour_bar(figure, drawn, theme, "layer", ax=axes, pad=0.02, fraction=0.05)
    bar.set_ticks(list(range(0, layers, math.ceil(layers / 12))))
