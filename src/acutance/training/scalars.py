"""Scalars and histograms that a monitor logs, named by layer and metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from acutance.summary.head_summary import HeadSummary
from acutance.summary.moments import Moments, edges
from acutance.training.alarms import KINDS, Alarm

__all__ = ["MonitorRecord", "scalars", "write"]

PREFIX = "attention"
#: Metrics that are extremes themselves: their worst head is that of the most extreme row.
_EXTREMES = ("max_logit",)


@dataclass(frozen=True)
class MonitorRecord:
    """The measurements of one optimiser step.

    Attributes:
        step: number of the optimiser step, from 1.
        summary: every head's statistics over the rows of the step, of all ranks.
        scalars: numbers by name, ``attention/<layer>/<metric>``, as loggers take them.
        alarms: every head that is beyond a threshold, whether or not it was before.
    """

    step: int
    summary: HeadSummary
    scalars: dict[str, float]
    alarms: tuple[Alarm, ...]


def scalars(
    summary: HeadSummary, metrics: Sequence[str], alarms: Sequence[Alarm]
) -> dict[str, float]:
    """Scalars of each layer by name, without those that no row defines.

    ``attention/<layer>/<metric>`` is the mean over rows and heads; ``<metric>_min`` and
    ``<metric>_max`` are the lowest and the highest mean of a head, and for ``max_logit``, which has
    ``_max`` alone, the largest logit of any row. ``attention/alarms/<kind>`` counts the heads that
    are beyond a threshold.

    Args:
        summary: one that recorded the metrics.
        metrics: which of them.
        alarms: those of this step.

    Example:
        >>> import torch, acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(1, 4, 8)] * 3)
        >>> for name, value in scalars(probe.summary(), ["effective_keys"], []).items():
        ...     print(name, value)
        attention/MultiheadAttention/effective_keys 4.0
        attention/MultiheadAttention/effective_keys_min 4.0
        attention/MultiheadAttention/effective_keys_max 4.0
        attention/alarms/entropy_collapse 0.0
        attention/alarms/logit_growth 0.0
        attention/alarms/not_finite 0.0
    """
    values: dict[str, float] = {}
    columns = [summary.metrics.index(name) for name in metrics]
    for layer, start in _layers(summary):
        heads = summary.moments.heads(start, start + layer.heads)
        for name, column in zip(metrics, columns, strict=True):
            counted = heads.count[:, column] > 0
            if not bool(counted.any()):
                continue
            means, weight = heads.mean[counted, column], heads.weight[counted, column]
            tag = f"{PREFIX}/{layer.module}/{name}"
            values[tag] = float((means * (weight / weight.sum())).sum())
            if name in _EXTREMES:
                values[f"{tag}_max"] = float(heads.high[:, column].max())
            else:
                values[f"{tag}_min"] = float(means.min())
                values[f"{tag}_max"] = float(means.max())
    for kind in KINDS:
        values[f"{PREFIX}/alarms/{kind}"] = float(sum(alarm.kind == kind for alarm in alarms))
    return values


def write(writer: Any, summary: HeadSummary, metrics: Sequence[str], each: str, step: int) -> None:
    """Write histograms of each layer or head to TensorBoard.

    Args:
        writer: a ``SummaryWriter`` of torch or of tensorboardX.
        summary: one that recorded the metrics.
        metrics: which of them.
        each: "layer", "head" or "none".
        step: the global step.
    """
    if each == "none" or not hasattr(writer, "add_histogram_raw"):
        return
    for index, (layer, start) in enumerate(_layers(summary)):
        tag = f"{PREFIX}/{layer.module}"
        parts = {tag: summary.layer(index)} if each == "layer" else {}
        if each == "head":
            parts = {
                f"{tag}/head{head}": summary.moments.heads(start + row, start + row + 1)
                for row, head in enumerate(layer.numbers)
            }
        for place, moments in parts.items():
            for name in metrics:
                raw = _histogram(moments, summary.metrics.index(name), name)
                if raw is not None:
                    label = f"{PREFIX}/{layer.module}/{name}{place.removeprefix(tag)}"
                    writer.add_histogram_raw(label, **raw, global_step=step)


def _histogram(moments: Moments, column: int, name: str) -> dict[str, Any] | None:
    """The arguments of ``add_histogram_raw`` for one head; None if no row counts."""
    count = int(moments.count[0, column])
    if not count:
        return None
    bins = moments.histogram[0, column]
    low, high = float(moments.low[0, column]), float(moments.high[0, column])
    mean = float(moments.mean[0, column])
    filled = bins.nonzero()[:, 0]
    first, last = int(filled[0]), int(filled[-1])
    limits = torch.tensor(edges(name)[first : last + 2], dtype=torch.float64)
    limits[-1] = max(float(limits[-1]), math.nextafter(high, math.inf))  # the last bin is open
    return {
        "min": low,
        "max": high,
        "num": count,
        "sum": count * mean,
        "sum_squares": count * (float(moments.std[0, column]) ** 2 + mean * mean),
        # right edges; an empty bin before the first gives that its left edge
        "bucket_limits": limits.tolist(),
        "bucket_counts": [0, *bins[first : last + 1].tolist()],
    }


def _layers(summary: HeadSummary) -> list[tuple[Any, int]]:
    """Each layer with the index of its first head."""
    layers, start = [], 0
    for layer in summary.layers:
        layers.append((layer, start))
        start += layer.heads
    return layers
