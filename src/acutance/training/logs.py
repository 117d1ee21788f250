"""Where a monitor's scalars and histograms go: trackers, SummaryWriters, files of JSON lines."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from acutance.files import as_json
from acutance.summary.head_summary import HeadSummary
from acutance.summary.moments import Moments, edges
from acutance.training.reports import PREFIX, layer_heads

__all__ = ["JsonLines", "Log", "destinations", "send", "write"]

#: A function of scalars by name and the step, a SummaryWriter, or the path of a JSON lines file.
Log = Callable[[dict[str, float], int], object] | str | os.PathLike[str] | Any


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
    each = log if isinstance(log, list | tuple) else (log,)
    checked: list[Any] = []
    for one in each:
        if isinstance(one, str | os.PathLike):
            checked.append(JsonLines(one))
        elif hasattr(one, "add_scalar") or (callable(one) and not isinstance(one, type)):
            checked.append(one)
        else:
            raise TypeError(
                "log must be a function of scalars and step such as wandb.log, a SummaryWriter, "
                f"the path of a JSON lines file, or a list of these, got {one!r}"
            )
    return tuple(checked)


def send(scalars: Mapping[str, float], step: int, each: Sequence[Any]) -> None:
    """Send scalars to the destinations that :func:`destinations` returned."""
    for one in each:
        if hasattr(one, "add_scalar"):
            for name, value in scalars.items():
                one.add_scalar(name, value, step)
        else:
            one(dict(scalars), step)


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
    for index, (layer, heads) in enumerate(layer_heads(summary)):
        tag = f"{PREFIX}/{layer.module.replace('#', '_')}"
        parts = {tag: summary.layer(index)} if each == "layer" else {}
        if each == "head":
            parts = {
                f"{tag}/head{head}": summary.moments.heads(row, row + 1)
                for row, head in zip(heads, layer.numbers, strict=True)
            }
        for place, moments in parts.items():
            for name in metrics:
                raw = _histogram(moments, summary.metrics.index(name), name)
                if raw is not None:
                    label = f"{tag}/{name}{place.removeprefix(tag)}"
                    writer.add_histogram_raw(label, **raw, global_step=step)


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
