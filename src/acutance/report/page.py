"""The HTML report: one file with its data, style and script, which asks the network for nothing.

The data is JSON in a script element that is no script; the page's code puts every string of it into
the document as text, never as markup, and a content security policy lets no other code run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import torch

from acutance.files import write_text
from acutance.probing import STATUSES, HeadSummary, edges
from acutance.probing.moments import BINS, SCALES
from acutance.report.colours import ANCHORS, as_hex, scale_of
from acutance.report.findings import LABELS, findings
from acutance.rowstats import METRICS

#: Summaries of more heads have their histogram bins joined in pairs, which bounds the file.
MOST_FINE_HEADS = 2000
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
#: Characters that could end the data's script element; JSON itself leaves nothing beyond ASCII.
_ESCAPED = {ord(part): f"\\u{ord(part):04x}" for part in "<>&"}


def write_html(summary: HeadSummary, path: str | os.PathLike[str]) -> None:
    """Write :func:`html` of a summary to a file, which is replaced whole or not at all."""
    text = html(summary)
    write_text(path, text)


def html(summary: HeadSummary) -> str:
    """The report of a summary as one self-contained HTML page.

    The same summary always gives the same page. Numbers keep five significant digits for means and
    four for spreads and extremes; histograms keep the height of each bin to 1/63 of the tallest.

    Example:
        >>> import torch, acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(1, 4, 8)] * 3)
        >>> html(probe.summary())[:15]
        '<!doctype html>'
    """
    template = files(__package__).joinpath("template.html").read_text(encoding="utf-8")
    page = template.replace("{{policy}}", _policy(template))
    before, _, after = page.partition("{{data}}")
    data = json.dumps(_data(summary), allow_nan=False, separators=(",", ":"))
    return before + data.translate(_ESCAPED) + after


def _policy(template: str) -> str:
    """Content security policy under which only the template's own style and script work."""
    sources = []
    for kind in ("style", "script"):
        (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>", template, re.DOTALL)
        digest = hashlib.sha256(content.encode("utf-8")).digest()
        sources.append(f"{kind}-src 'sha256-{base64.b64encode(digest).decode()}'")
    return "; ".join(["default-src 'none'", "base-uri 'none'", "form-action 'none'", *sources])


def _data(summary: HeadSummary) -> dict[str, Any]:
    """What the page shows, as plain JSON values."""
    return {
        "about": [[_text(name), _text(value)] for name, value in summary.about.items()],
        "layers": [
            {**asdict(layer), "module": _text(layer.module), "error": _round(layer.error, 3)}
            for layer in summary.layers
        ],
        "statuses": STATUSES,
        "metrics": _metrics(summary),
        "edges": {
            kind: [_round(edge, 6) for edge in edges(name)[:: _join(summary)]]
            for name, kind in ((name, SCALES.get(name, "unit")) for name in summary.metrics)
        },
        "digits": _DIGITS,
        "colours": [as_hex(anchor) for anchor in ANCHORS],
        "findings": [
            {**asdict(found), "label": LABELS[found.kind], "value": _round(found.value, 5)}
            for found in findings(summary)
        ],
        "unread": [_text(reason) for reason in summary.unread],
    }


def _metrics(summary: HeadSummary) -> list[dict[str, Any]]:
    """Each metric's description and its numbers for every head, all layers one after the other."""
    columns, moments = summary.columns(), summary.moments
    rows = columns["rows"]
    step = _join(summary)
    histogram = moments.histogram.unflatten(-1, (BINS // step, step)).sum(-1)
    metrics = []
    for column, name in enumerate(summary.metrics):
        described = METRICS[name]
        means = columns[f"{name}_mean"]
        scale = scale_of(name, means)
        counts = moments.count[:, column].tolist()
        bins = histogram[:, column]
        used = (bins.sum(0) > 0).nonzero().flatten().tolist() if len(rows) else []
        metrics.append(
            {
                "name": name,
                "unit": described.unit,
                "range": described.range,
                "meaning": described.meaning,
                "source": described.source,
                "kind": SCALES.get(name, "unit"),
                "low": _round(scale.low, 5),
                "high": _round(scale.high, 5),
                "log": scale.log,
                "mean": [_round(value, 5) for value in means],
                **{
                    part: [_round(value, 4) for value in columns[f"{name}_{part}"]]
                    for part in ("std", "min", "max")
                },
                "rows": None if counts == rows else counts,
                "layer": _layer_means(summary, column),
                "span": [used[0], used[-1]] if used else None,
                "peak": bins.amax(-1).tolist() if len(rows) else [],
                "bins": [_bins(row) for row in bins.tolist()],
            }
        )
    return metrics


def _join(summary: HeadSummary) -> int:
    return 1 if len(summary.moments.count) <= MOST_FINE_HEADS else 2


def _layer_means(summary: HeadSummary, column: int) -> list[float | None]:
    """A metric's mean over all rows of all heads of each layer."""
    count = summary.moments.count[:, column].to(torch.float64)
    total = torch.where(count > 0, summary.moments.mean[:, column] * count, 0.0)
    sizes = [layer.heads for layer in summary.layers]
    parts = zip(total.split(sizes), count.split(sizes), strict=True) if sizes else ()
    return [
        _round(float(part.sum() / rows.sum()) if rows.sum() else None, 5) for part, rows in parts
    ]


def _bins(counts: list[int]) -> str:
    """A histogram as text: the first used bin, then the height of each up to the last, 0 to 63.

    A bin that holds any row has at least height 1.

    Example:
        >>> _bins([0, 0, 100, 1, 0, 50, 0])
        'C/BAg'
    """
    used = [index for index, count in enumerate(counts) if count]
    if not used:
        return ""
    most = max(counts)
    heights = [-(-63 * count // most) for count in counts[used[0] : used[-1] + 1]]
    return _DIGITS[used[0]] + "".join(_DIGITS[height] for height in heights)


def _round(value: float | None, digits: int) -> float | int | None:
    """To significant digits; None for what JSON cannot say."""
    if value is None or not math.isfinite(value):
        return None
    number = float(f"{value:.{digits}g}")
    return int(number) if number.is_integer() and abs(number) < 1e15 else number


def _text(value: Any) -> str:
    """A value of ``about`` as a reader would write it."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and all(
        isinstance(part, (str, int, float)) for part in value
    ):
        return ", ".join(map(str, value))
    return str(value)
