"""What the HTML report shows of a summary, as one packed text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acutance.diagnose.classes import HeadClass, classify
from acutance.diagnose.findings import KEY_NORMS, LABELS, findings, say_key_norms
from acutance.diagnose.metric_words import GROUPS, crossing, words
from acutance.diagnose.recommendations import otherwise, recommendations
from acutance.escapes import visible
from acutance.report.colours import ANCHORS, as_hex, scale_of
from acutance.report.html_page.packing import (
    BUDGET,
    LEVELS,
    SOFT,
    Level,
    Packer,
    bars,
    encode,
    rounded,
)
from acutance.report.html_page.structure_data import advice, classes, structure
from acutance.report.terminal import module_sentences
from acutance.structure import describe
from acutance.summary.head_summary import STATUSES, HeadSummary
from acutance.summary.moments import BINS, SCALES, edges
from acutance.summary.notices import notices


def packed(summary: HeadSummary, key_norms: Mapping[str, Any] | None = None) -> str:
    """The page's data, as finely as :data:`~acutance.report.html_page.packing.BUDGET` allows."""
    record, found = _record(summary), classify(summary)
    if key_norms is not None:
        record["findings"].append(
            {
                "kind": "key_norms",
                "label": KEY_NORMS,
                "layer": None,
                "head": None,
                "sentence": visible(say_key_norms(key_norms)),
            }
        )
    text = ""
    for level in LEVELS:
        if _least(summary, level) > BUDGET:
            continue
        text = _packed(summary, record, found, level)
        if len(text) <= BUDGET:
            return text
    return text or _packed(summary, record, found, LEVELS[-1])


def _least(summary: HeadSummary, level: Level) -> float:
    """Characters below which a level hardly comes: spares packing what is far too much."""
    heads, metrics = summary.moments.count.shape
    histograms = metrics if level.bars is None else len(level.bars)
    extremes = metrics if level.extremes is None else len(level.extremes)
    numbers = metrics * (level.mean + level.rest) + 2 * extremes * level.rest
    return heads * (0.6 * numbers + 0.06 * histograms * BINS / level.join)


def _packed(
    summary: HeadSummary, record: dict[str, Any], found: list[tuple[HeadClass, ...]], level: Level
) -> str:
    packer = Packer()
    parts = {
        "mean": summary.moments.mean.masked_fill(summary.moments.count == 0, math.nan),
        "std": summary.moments.std,
        "min": summary.moments.low,
        "max": summary.moments.high,
    }
    if summary.sampled:
        parts["off"] = summary.moments.sampling_error
    metrics = [
        _metric(
            summary,
            index,
            {part: values[:, index] for part, values in parts.items()},
            level,
            packer,
        )
        for index in range(len(summary.metrics))
    ]
    more = structure(summary, level, packer) | classes(found, level)
    return packer.text({**record, **more, "metrics": metrics, "level": asdict(level)})


def _record(summary: HeadSummary) -> dict[str, Any]:
    """Everything but the numbers of single heads, as plain JSON values."""
    return {
        "about": [[visible(str(name)), _text(value)] for name, value in summary.about.items()],
        "layers": [
            {
                **asdict(layer),
                "numbers": layer.numbers,
                "module": visible(layer.module),
                "crossing": crossing(layer.module),
                "source": visible(layer.source),
                "error": rounded(layer.error, 3),
            }
            for layer in summary.layers
        ],
        "modules": [visible(said) for said in module_sentences(summary.layers)],
        "statuses": STATUSES,
        "groups": GROUPS,
        "edges": {
            kind: [rounded(edge, 6) for edge in edges(name)]
            for name, kind in ((name, SCALES.get(name, "unit")) for name in summary.metrics)
        },
        "colours": [as_hex(anchor) for anchor in ANCHORS],
        "findings": [
            {
                "kind": found.kind,
                "label": LABELS[found.kind],
                "layer": found.layer,
                "head": found.head,
                "sentence": visible(found.sentence),
            }
            for found in findings(summary)
        ],
        **advice(recommendations(summary), otherwise(summary)),
        "notices": [visible(notice) for notice in notices(summary.about)],
        "unread": [visible(reason) for reason in summary.unread],
        "not_provided": [visible(reason) for reason in summary.not_provided],
    }


def _metric(
    summary: HeadSummary, column: int, parts: dict[str, Tensor], level: Level, packer: Packer
) -> dict[str, Any]:
    """A metric's description; its numbers for every head go to the packer."""
    name, moments = summary.metrics[column], summary.moments
    described, said = describe(name), words(name)
    kind = SCALES.get(name, "unit")
    count = moments.count[:, column]
    scale = scale_of(name, parts["mean"].tolist())
    if level.extremes is not None and name not in level.extremes:
        parts = {part: values for part, values in parts.items() if part not in ("min", "max")}
    codes = {}
    for part, values in parts.items():
        width = level.mean if part == "mean" else level.rest
        coded = encode(values.numpy(), width, SOFT[kind])
        packer.add(f"{name}.{part}", coded.values)
        codes[part] = [coded.low, coded.high]
    first = None
    if level.bars is None or name in level.bars:
        counts = moments.histogram[:, column].numpy()
        heights, first = bars(counts, level)
        packer.add(f"{name}.bars", heights)
        joined = counts.reshape(-1, BINS // level.join, level.join).sum(-1)
        most = joined.max(-1, initial=0) / np.maximum(joined.sum(-1), 1)
        packer.add(f"{name}.peak", np.rint(most * 65535).astype(np.uint16))
    rows = torch.tensor(_rows(summary))
    return {
        "name": name,
        "group": said.group,
        "unit": described.unit,
        "range": described.range,
        "meaning": described.meaning,
        "source": described.source,
        "ends": [said.low, said.high],
        "kind": kind,
        "soft": SOFT[kind],
        "codes": codes,
        "low": rounded(scale.low, 5),
        "high": rounded(scale.high, 5),
        "log": scale.log,
        "first": first,
        "rows": None if bool((count == rows).all()) else count.tolist(),
        "layer": _layer_means(summary, column),
    }


def _rows(summary: HeadSummary) -> list[int]:
    return [layer.rows for layer in summary.layers for _ in range(layer.heads)]


def _layer_means(summary: HeadSummary, column: int) -> list[float | int | None]:
    """A metric's mean over all rows of all heads of each layer."""
    weight = summary.moments.weight[:, column]
    total = torch.where(weight > 0, summary.moments.mean[:, column] * weight, 0.0)
    sizes = [layer.heads for layer in summary.layers]
    parts = zip(total.split(sizes), weight.split(sizes), strict=True) if sizes else ()
    return [
        rounded(float(part.sum() / rows.sum()) if rows.sum() else None, 5) for part, rows in parts
    ]


def _text(value: Any) -> str:
    """A value of ``about`` as a reader would write it."""
    if isinstance(value, (list, tuple)) and all(
        isinstance(part, (str, int, float)) for part in value
    ):
        return ", ".join(visible(str(part)) for part in value)
    return visible(str(value))
