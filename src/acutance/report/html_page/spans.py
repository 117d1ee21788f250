"""The page's data on parts of the input: weight on spans, and rows of named heads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acutance.escapes import visible
from acutance.report.html_page.packing import SOFT, Level, Packer, encode, rounded
from acutance.summary.head_summary import HeadSummary
from acutance.summary.spans import ALL_ROWS, OTHER, Spans

__all__ = ["MOST_MAP_KEYS", "head_rows", "span_metrics", "span_tables"]

#: Rows of a head's weights that the page shows, and keys of each.
MOST_MAP_ROWS, MOST_MAP_KEYS = 8, 1024


def span_metrics(summary: HeadSummary, level: Level, packer: Packer) -> list[dict[str, Any]]:
    """Pack the mean weight on each span, and return descriptions for the page's map."""
    if summary.spans is None:
        return []
    return [_metric(summary, summary.spans, name, level, packer) for name in summary.spans.names]


def _metric(
    summary: HeadSummary, spans: Spans, span: str, level: Level, packer: Packer
) -> dict[str, Any]:
    """Add the mean weight on one span to the packer; return its description."""
    name, weight = f"weight_on_{visible(span)}", spans.weight(span)
    parts = {"mean": weight, "std": torch.full_like(weight, math.nan)}  # rows' spread is not known
    codes = {}
    for part, values in parts.items():
        width = level.mean if part == "mean" else level.rest
        coded = encode(values.numpy(), width, SOFT["unit"])
        packer.add(f"{name}.{part}", coded.values)
        codes[part] = [coded.low, coded.high]
    return {
        "name": name,
        "group": "Where it looks",
        "unit": "1",
        "range": "[0, 1]",
        "meaning": f"weight that rows put on the tokens of the span {visible(span)}",
        "source": "",
        "ends": ["looks elsewhere", "looks there only"],
        "kind": "unit",
        "soft": SOFT["unit"],
        "codes": codes,
        "low": 0,
        "high": 1,
        "log": False,
        "first": None,
        "span": True,
        "rows": spans.rows[:, -1].tolist(),
        "layer": _layer_means(summary, weight, spans.rows[:, -1]),
    }


def _layer_means(summary: HeadSummary, weight: Tensor, rows: Tensor) -> list[float | int | None]:
    """The mean over all rows of all heads of each layer."""
    sizes = [layer.heads for layer in summary.layers]
    total = torch.where(rows > 0, weight * rows, 0.0)
    parts = zip(total.split(sizes), rows.split(sizes), strict=True) if sizes else ()
    return [
        rounded(float(part.sum() / count.sum()) if count.sum() else None, 5)
        for part, count in parts
    ]


def span_tables(spans: Spans | None, level: Level, packer: Packer) -> dict[str, Any]:
    """Each head's weight by span of query and key, with uniform shares; {} in a coarse report."""
    if spans is None or not level.distances:
        return {}
    for part, values in (("mean", spans.mean), ("even", spans.even)):
        shares = values.masked_fill((spans.rows == 0).unsqueeze(-1), math.nan).flatten(1).numpy()
        known = np.isfinite(shares)
        codes = np.where(known, np.rint(np.where(known, shares, 0.0).clip(0, 1) * 65534), 65535)
        packer.add(f"spans.{part}", codes.astype(np.uint16))
    names = [visible(name) for name in spans.names]
    return {"spans": {"rows": [*names, OTHER, ALL_ROWS], "keys": [*names, OTHER]}}


def head_rows(summary: HeadSummary) -> dict[str, Any]:
    """The recorded rows of named heads, by index of the head; {} if none were requested.

    Weights are in thousandths. At most 8 rows of a head and 1024 keys of each are included.
    """
    modules = {layer.module: index for index, layer in enumerate(summary.layers)}
    places = {place: index for index, place in enumerate(summary.places)}
    shown: dict[int, list[dict[str, Any]]] = {}
    for one in summary.maps:
        head = places.get((modules.get(one.module, -1), one.head))
        if head is None:
            continue
        rows = shown.setdefault(head, [])
        for position, weights in zip(one.positions, one.weights, strict=True):
            if len(rows) >= MOST_MAP_ROWS:
                break
            used = int(weights.nonzero()[-1]) + 1 if bool(weights.any()) else 0
            keys = min(used, MOST_MAP_KEYS)
            rows.append(
                {
                    "sequence": one.sequence,
                    "position": position,
                    "keys": used,
                    "weights": (weights[:keys] * 1000).round().int().tolist(),
                    "tokens": [visible(token) for token in one.tokens[:keys]],
                }
            )
    return {"maps": {str(head): rows for head, rows in shown.items()}} if shown else {}
