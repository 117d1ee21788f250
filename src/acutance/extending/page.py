"""The page of a search: one HTML file without scripts that makes no network requests."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Any

from acutance.extending.record import Extension, sentences, tried_table
from acutance.report.plot_style import DARK, LIGHT, curves

_WIDTH, _HEIGHT = 860, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 14, 44
_DASHES = ("none", "7 3", "2 2", "8 3 2 3")
_STYLE = (
    "body{background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif}"
    "main{max-width:860px;margin:2rem auto;padding:0 1rem}svg{width:100%;height:auto}"
    "svg text{fill:var(--muted);font-size:13px}svg .grid{stroke:var(--grid)}"
    "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}"
    "td,th{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--grid)}"
    "td:not(:first-child),th:not(:first-child){white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left;overflow-wrap:anywhere}"
    "tr.dim td{color:var(--muted)}.key{display:inline-block;margin-right:1.5rem}"
)
_COLOURS = ("page", "ink", "muted", "grid")


def page(found: Extension) -> str:
    """The page of a search: loss by position, entropy by number of keys, what was tried.

    Example:
        >>> import torch, acutance
        >>> from acutance.reproduce import decoder, texts
        >>> windows = texts.read(texts.files("held out"))[: 4 * 256].long().view(4, 256)
        >>> law = "clip_log_n:train_length=128"
        >>> page(acutance.extend(decoder(), 256, windows, train_length=128, laws=law))[:15]
        '<!doctype html>'
    """
    middles = [(first + last) / 2 for first, last in found.ranges]
    losses = [(middles, final.loss, final.errors) for final in found.finals]
    entropies = [tuple(zip(*final.entropy, strict=True)) for final in found.finals if final.entropy]
    trained, title = found.train_length, f"Reading {found.to:,} tokens"
    body = [f"<h1>{title}</h1>", *(f"<p>{html.escape(line)}</p>" for line in sentences(found))]
    keys = [
        '<span class="key"><svg style="width:36px;height:10px" viewBox="0 0 36 10">'
        f'<path d="M0 5H36" {_stroke(k)} stroke-width="2.5"/></svg> '
        f"{html.escape(final.name)}</span>"
        for k, final in enumerate(found.finals)
    ]
    body += [
        f"<p>{''.join(keys)}</p>",
        "<h2>Loss by position</h2>",
        f"<p>Nats a token on {found.final_windows} windows that no choice was made on; bars are "
        "standard errors from window to window. The vertical line is the trained length.</p>",
        _chart(losses, "position", "loss, nats", trained, log_x=False),
    ]
    if entropies:
        body += [
            "<h2>Entropy by number of keys</h2>",
            "<p>Mean of all heads on one window; bars are standard deviations from head to "
            "head.</p>",
            _chart(entropies, "keys n", "entropy, nats", trained, log_x=True),
        ]
    body += [
        "<h2>What was tried</h2>",
        f"<p>Differences of loss to the model as it is, on the windows of the search; up to "
        f"{trained:,} tokens at most {found.max_cost:+g} was allowed (* is more).</p>",
        tried_table(found).to_html(),
    ]
    style = _STYLE
    for theme in (LIGHT, DARK):
        colours = [f"--{name}:{getattr(theme, name)}" for name in _COLOURS]
        lines = curves(len(found.finals), theme)
        colours += [f"--curve{k}:{curve.colour}" for k, curve in enumerate(lines)]
        style += f"@media (prefers-color-scheme: {theme.name}) {{:root{{{';'.join(colours)}}}}}"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{style}</style><main>{''.join(body)}</main></html>\n"
    )


def _stroke(k: int) -> str:
    """Attributes of the k-th curve's line."""
    dash = _DASHES[k % len(_DASHES)]
    return f'style="stroke:var(--curve{k})" fill="none" stroke-dasharray="{dash}"'


def _chart(lines: Sequence[Any], x: str, y: str, mark: float, *, log_x: bool) -> str:
    """SVG line chart with error bars.

    Args:
        lines: the curves: x, y, and half-heights of the error bars of each.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        mark: horizontal position of a vertical line.
        log_x: whether the horizontal axis is logarithmic.
    """
    across: Callable[[float], float] = math.log if log_x else float
    xs: list[float] = [value for line in lines for value in line[0]]
    ys: list[float] = [value for line in lines for value in line[1]]
    first, last = across(min(*xs, mark)), across(max(*xs, mark))
    step = _step(max(ys) - min(ys))
    low = step * math.floor(min(ys) / step)
    high = max(step * math.ceil(max(ys) / step), low + step)
    bottom = _HEIGHT - _BOTTOM

    def at_x(value: float) -> float:
        share = (across(value) - first) / max(last - first, 1e-12)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def at_y(value: float) -> float:
        share = (min(max(value, low), high) - low) / (high - low)
        return bottom - share * (bottom - _TOP)

    drawn = []
    for index in range(round((high - low) / step) + 1):
        value = low + index * step
        drawn.append(
            f'<path class="grid" d="M{_LEFT} {at_y(value):.1f}H{_WIDTH - _RIGHT}"/>'
            f'<text x="{_LEFT - 6}" y="{at_y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    drawn += [
        f'<text x="{at_x(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{tick:,}</text>'
        for tick in _ticks(min(xs), max(xs), log_x)
    ]
    drawn.append(f'<path d="M{at_x(mark):.1f} {_TOP}V{bottom}" style="stroke:var(--muted)"/>')
    for k, line in enumerate(lines):
        points = [(at_x(a), b, error) for a, b, error in zip(*line, strict=True)]
        path = "L".join(f"{a:.1f} {at_y(b):.1f}" for a, b, _ in points)
        bars = "".join(f"M{a:.1f} {at_y(b - e):.1f}V{at_y(b + e):.1f}" for a, b, e in points)
        drawn.append(f'<path d="M{path}" {_stroke(k)} stroke-width="2"/>')
        drawn.append(f'<path d="{bars}" style="stroke:var(--curve{k})" opacity="0.5"/>')
    drawn.append(
        f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{x}</text>'
        f'<text transform="translate(14 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{y}</text>'
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(drawn)}</svg>'


def _step(span: float) -> float:
    """Distance between grid lines: a round number that divides ``span`` into at most five parts."""
    rough = max(span, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * one for one in (1, 2, 2.5, 5, 10) if power * one >= rough)


def _ticks(low: float, high: float, log_x: bool) -> list[int]:
    """At most eight powers of 2, or multiples of one, from ``low`` to ``high``, ascending."""
    if log_x:
        first, last = math.ceil(math.log2(low) - 0.01), math.floor(math.log2(high) + 0.01)
        return [1 << power for power in range(last, first - 1, -(1 + (last - first) // 8))][::-1]
    step = 1 << max(0, math.ceil(math.log2(high / 8)))
    return [value for value in range(0, math.floor(high) + 1, step) if value >= low]
