"""What a monitor records, and where it goes: trackers, SummaryWriters, files of JSON lines."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from acutance.files import as_json
from acutance.summary.head_summary import HeadSummary
from acutance.summary.readouts.moments import Moments, edges
from acutance.training.alarms import KINDS, Alarm, layer_means

PREFIX = "attention"
#: The scalar of the learning rate, from which a replay knows the warm-up.
LEARNING_RATE = f"{PREFIX}/learning_rate"
#: Of scalars of passes without gradients: generated text and its scoring.
ROLLOUT = f"rollout/{PREFIX}"
#: Metrics that are extremes themselves: their worst head is that of the most extreme row.
_EXTREMES = ("max_logit",)
#: A function of scalars by name and the step, a SummaryWriter, or the path of a JSON lines file.
Log = Callable[[dict[str, float], int], object] | str | os.PathLike[str] | Any


@dataclass(frozen=True)
class MonitorRecord:
    """The measurements of one optimiser step.

    Attributes:
        step: number of the optimiser step, from 1.
        summary: every head's statistics over the rows of the step, over all ranks.
        scalars: numbers by name, ``attention/<layer>/<metric>``, for loggers.
        alarms: every head beyond a threshold, also if it was before.
        rollout: statistics of the passes without gradients; None if there were none, or they were
            not requested.
    """

    step: int
    summary: HeadSummary
    scalars: dict[str, float]
    alarms: tuple[Alarm, ...]
    rollout: HeadSummary | None = None


def scalars(
    summary: HeadSummary,
    metrics: Sequence[str],
    alarms: Sequence[Alarm] | None = None,
    prefix: str = PREFIX,
) -> dict[str, float]:
    """Scalars of each layer by name, without metrics that have no rows.

    ``attention/<layer>/<metric>`` is the mean over rows and heads; ``<metric>_min`` and
    ``<metric>_max`` are the lowest and highest mean of a head. ``max_logit`` has only ``_max``, the
    largest logit of any row. ``attention/alarms/<kind>`` is the number of heads beyond a threshold.
    ``logit_std``, which the alarm of growing logits follows, is always there with alarms.
    In the name of a second call, ``layer#1``, the ``#`` becomes ``_``: MLflow refuses it.

    Args:
        summary: a summary that recorded the metrics.
        metrics: names of the metrics.
        alarms: the alarms of this step; None leaves their numbers out.
        prefix: beginning of all names.

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
        attention/MultiheadAttention/logit_std 0.0
        attention/alarms/logit_growth 0.0
        attention/alarms/entropy_collapse 0.0
        attention/alarms/large_logit 0.0
        attention/alarms/not_finite 0.0
    """
    followed = alarms is not None and "logit_std" in summary.metrics
    names = {*metrics, "logit_std"} if followed else set(metrics)
    means = {name: layer_means(summary, name) for name in names}
    heads = {name: summary.grid(name) for name in names}
    highest = summary.moments.high.split([layer.heads for layer in summary.layers])
    values: dict[str, float] = {}
    for index, layer in enumerate(summary.layers):
        tag = _tag(prefix, layer.module)
        for name in metrics:
            of_heads = [mean for mean in heads[name][index] if not math.isnan(mean)]
            if not of_heads:
                continue
            values[f"{tag}/{name}"] = means[name][index]
            if name in _EXTREMES:
                values[f"{tag}/{name}_max"] = float(highest[index][:, summary.column(name)].max())
            else:
                values[f"{tag}/{name}_min"] = min(of_heads)
                values[f"{tag}/{name}_max"] = max(of_heads)
        if followed and not math.isnan(means["logit_std"][index]):
            values[f"{tag}/logit_std"] = means["logit_std"][index]
    if alarms is not None:
        for kind in KINDS:
            values[f"{prefix}/alarms/{kind}"] = float(sum(alarm.kind == kind for alarm in alarms))
    return values


def _tag(prefix: str, module: str) -> str:
    """The beginning of a module's names in logs."""
    return f"{prefix}/{module.replace('#', '_')}"


class JsonLines:
    r"""Appends each record as one JSON object to a file.

    ``step`` comes first, then the scalars. Numbers that are not finite, which JSON does not have,
    are null.

    Args:
        path: the file. It is created with the first record.

    Raises:
        FileNotFoundError: if its folder does not exist.
        IsADirectoryError: if it is a folder.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "attention.jsonl"
        >>> log = JsonLines(path)
        >>> log({"attention/layer/entropy": 1.5}, 10)
        >>> path.read_text()
        '{"step": 10, "attention/layer/entropy": 1.5}\n'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise IsADirectoryError(f"log must be a file, but {self.path} is a folder")
        if not self.path.parent.is_dir():
            raise FileNotFoundError(
                f"log is {self.path}, but there is no folder {self.path.parent}"
            )

    def __call__(self, scalars: Mapping[str, float], step: int) -> None:
        """Append one line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(as_json({"step": step, **scalars}) + "\n")


def destinations(log: Log | Sequence[Log] | None) -> tuple[Any, ...]:
    """The functions and writers that ``log`` names; paths become :class:`JsonLines`.

    Raises:
        TypeError: if one is neither a function, a SummaryWriter nor a path.

    Example:
        >>> destinations(print)
        (<built-in function print>,)
        >>> destinations("out.jsonl")[0].path.name
        'out.jsonl'
    """
    if log is None:
        return ()
    checked: list[Any] = []
    for target in log if isinstance(log, list | tuple) else (log,):
        if isinstance(target, str | os.PathLike):
            checked.append(JsonLines(target))
        elif hasattr(target, "add_scalar") or (callable(target) and not isinstance(target, type)):
            checked.append(target)
        else:
            raise TypeError(
                "log must be a function of scalars and step such as wandb.log, a SummaryWriter, "
                f"the path of a JSON lines file, or a list of these, got {target!r}"
            )
    return tuple(checked)


def send(scalars: Mapping[str, float], step: int, targets: Sequence[Any]) -> None:
    """Send scalars to the destinations that :func:`destinations` returned."""
    for target in targets:
        if hasattr(target, "add_scalar"):
            for name, value in scalars.items():
                target.add_scalar(name, value, step)
        else:
            target(dict(scalars), step)


def write(writer: Any, summary: HeadSummary, metrics: Sequence[str], each: str, step: int) -> None:
    """Write histograms of each layer or head to TensorBoard.

    Args:
        writer: a ``SummaryWriter`` of torch or tensorboardX.
        summary: a summary that recorded the metrics.
        metrics: names of the metrics.
        each: "layer", "head" or "none".
        step: the global step.
    """
    if each == "none" or not hasattr(writer, "add_histogram_raw"):
        return
    tags = [_tag(PREFIX, layer.module) for layer in summary.layers]
    if each == "layer":
        histograms = [(tag, "", summary.layer(index)) for index, tag in enumerate(tags)]
    else:
        histograms = [
            (tags[layer], f"/head{head}", summary.moments.heads(row, row + 1))
            for row, (layer, head) in enumerate(summary.places)
        ]
    for tag, of_head, moments in histograms:
        for name in metrics:
            raw = _histogram(moments, summary.metrics.index(name), name)
            if raw is not None:
                writer.add_histogram_raw(f"{tag}/{name}{of_head}", **raw, global_step=step)


def _histogram(moments: Moments, column: int, name: str) -> dict[str, Any] | None:
    """Arguments of ``add_histogram_raw`` for one head; None if it has no rows."""
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
