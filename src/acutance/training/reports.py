"""What a monitor and QKClip report: alarms, logged scalars and histograms, and scaled layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from acutance.shapes import check_number
from acutance.summary.head_summary import HeadSummary
from acutance.summary.moments import Moments, edges
from acutance.training.growth import LogitGrowth

__all__ = [
    "Alarm",
    "AttentionWarning",
    "ClipReport",
    "Kind",
    "LayerClip",
    "MonitorRecord",
    "Thresholds",
    "scalars",
    "summed_up",
    "write",
]


Kind = Literal["logit_growth", "entropy_collapse", "large_logit", "not_finite"]
#: Every kind of alarm, in the order in which they are told.
KINDS: tuple[Kind, ...] = ("logit_growth", "entropy_collapse", "large_logit", "not_finite")
#: Metrics that the thresholds are about.
NEEDED = ("normalized_entropy", "max_logit", "lse", "n_keys", "logit_std")
_NAMED = 3


class AttentionWarning(UserWarning):
    """Warning that attention is beyond a threshold, or that a monitor cannot read it."""


@dataclass(frozen=True)
class Alarm:
    """One head that is beyond a threshold.

    Attributes:
        kind: "logit_growth", "entropy_collapse", "large_logit" or "not_finite".
        module: qualified name of the layer's module.
        head: number of the head in its layer; of growth, the head
            whose logits deviate most.
        value: the measurement: factor by which the layer's logits grew, mean of H / log n, largest
            logit, or number of rows that are not finite.
        threshold: the threshold.
        step: the optimiser step.

    Example:
        >>> print(Alarm("logit_growth", "layers.3.self_attn", 5, 1.834, 1.5, 300))
        head 5 of layers.3.self_attn has the largest logits of its layer, which grew by a factor of
        1.83 in the last quarter of the training, more than 1.5
        >>> print(Alarm("large_logit", "layers.3.self_attn", 5, 214.2, 100.0, 300))
        head 5 of layers.3.self_attn has a logit of 214.2, above 100
    """

    kind: Kind
    module: str
    head: int
    value: float
    threshold: float
    step: int

    @property
    def place(self) -> tuple[str, str, int]:
        """Kind, module and head, by which repeated alarms are recognised.

        A growth is that of the layer, whichever head has the largest logits: its head is 0.
        """
        return self.kind, self.module, 0 if self.kind == "logit_growth" else self.head

    def __str__(self) -> str:
        head = f"head {self.head} of {self.module}"
        if self.kind == "entropy_collapse":
            return f"{head} has a normalized entropy of {self.value:.2g}, below {self.threshold:g}"
        if self.kind == "logit_growth":
            return (
                f"{head} has the largest logits of its layer, which grew by a factor of "
                f"{self.value:.3g} in the last quarter of the training, more than "
                f"{self.threshold:.3g}"
            )
        if self.kind == "large_logit":
            return f"{head} has a logit of {self.value:.4g}, above {self.threshold:g}"
        return f"{head} has {self.value:.0f} rows whose scores are not finite"


@dataclass(frozen=True)
class Thresholds:
    """The limits beyond which an alarm is raised.

    Attributes:
        collapse: lowest mean of H / log n over a head's rows; None for no limit.
        max_logit: highest logit of a head; None for no limit.
    """

    collapse: float | None = None
    max_logit: float | None = None

    def __post_init__(self) -> None:
        if self.collapse is not None:
            check_number("collapse", self.collapse, above=0.0)
            if self.collapse >= 1:
                raise ValueError(
                    f"collapse must be a fraction of log n below 1, got {self.collapse!r}"
                )
        if self.max_logit is not None:
            check_number("max_logit", self.max_logit)

    def alarms(self, summary: HeadSummary, growth: LogitGrowth, step: int) -> tuple[Alarm, ...]:
        """The heads of a summary that are beyond a limit, layer by layer.

        Args:
            summary: the measurement.
            growth: earlier measurements, to which this one is added.
            step: the optimiser step.
        """
        column = summary.metrics.index("logit_std")
        found = list(self._exceeding(summary, step))
        layers = {
            layer.module: (layer, summary.moments.heads(start, start + layer.heads))
            for layer, start in _layers(summary)
        }
        grown = growth.update({name: _mean(heads, column) for name, (_, heads) in layers.items()})
        for module, value in grown.items():
            if value > growth.limit:
                layer, heads = layers[module]
                head = layer.numbers[int(heads.mean[:, column].nan_to_num(0.0).argmax())]
                found.append(Alarm("logit_growth", module, head, value, growth.limit, step))
        return tuple(found)

    def _exceeding(self, summary: HeadSummary, step: int) -> Iterator[Alarm]:
        """An alarm for each head and threshold that it exceeds."""
        columns = [summary.metrics.index(name) for name in NEEDED]
        counts, means, highs = (
            part[:, columns].tolist()
            for part in (summary.moments.count, summary.moments.mean, summary.moments.high)
        )
        for (index, head), count, mean, high in zip(
            summary.places, counts, means, highs, strict=True
        ):
            where = summary.layers[index].module, head
            # a row counts towards a metric only if that is a finite number, as n always is
            not_finite = count[3] - min(count[1], count[2])
            if not_finite > 0:
                yield Alarm("not_finite", *where, float(not_finite), 0.0, step)
            if self.collapse is not None and count[0] and mean[0] < self.collapse:
                yield Alarm("entropy_collapse", *where, mean[0], self.collapse, step)
            if self.max_logit is not None and count[1] and high[1] > self.max_logit:
                yield Alarm("large_logit", *where, high[1], self.max_logit, step)


def summed_up(alarms: Sequence[Alarm]) -> str:
    """One sentence for the alarms of one kind in a step; the worst heads are named.

    Example:
        >>> kind = "large_logit"
        >>> heads = [Alarm(kind, "attn", head, 101.0 + head, 100.0, 7) for head in range(5)]
        >>> print(summed_up(heads))
        attention at step 7, large logit in 5 heads: head 4 of attn has a logit of 105,
        above 100; head 3 of attn has a logit of 104, above 100; head 2 of attn has a logit
        of 103, above 100; and 2 more
    """
    kind = alarms[0].kind
    sign = 1 if kind == "entropy_collapse" else -1
    worst = sorted(alarms, key=lambda alarm: sign * _ordered(alarm.value))
    heads = "one head" if len(alarms) == 1 else f"{len(alarms)} heads"
    text = "; ".join(map(str, worst[:_NAMED]))
    more = f"; and {len(alarms) - _NAMED} more" if len(alarms) > _NAMED else ""
    label = kind.replace("_", " ")
    return f"attention at step {alarms[0].step}, {label} in {heads}: {text}{more}"


def _ordered(value: float) -> float:
    """A value for sorting, with NaN last."""
    return math.inf if math.isnan(value) else value


PREFIX = "attention"
#: Of scalars of passes without gradients: generated text and its scoring.
ROLLOUT = f"rollout/{PREFIX}"
#: Metrics that are extremes themselves: their worst head is that of the most extreme row.
_EXTREMES = ("max_logit",)


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
    values: dict[str, float] = {}
    columns = [summary.metrics.index(name) for name in metrics]
    for layer, start in _layers(summary):
        heads = summary.moments.heads(start, start + layer.heads)
        for name, column in zip(metrics, columns, strict=True):
            counted = heads.count[:, column] > 0
            if not bool(counted.any()):
                continue
            means = heads.mean[counted, column]
            tag = f"{prefix}/{layer.module.replace('#', '_')}/{name}"
            values[tag] = _mean(heads, column)
            if name in _EXTREMES:
                values[f"{tag}_max"] = float(heads.high[:, column].max())
            else:
                values[f"{tag}_min"] = float(means.min())
                values[f"{tag}_max"] = float(means.max())
        if alarms is not None and "logit_std" in summary.metrics:  # what alarms follow
            mean = _mean(heads, summary.metrics.index("logit_std"))
            if not math.isnan(mean):
                values[f"{prefix}/{layer.module.replace('#', '_')}/logit_std"] = mean
    for kind in () if alarms is None else KINDS:
        values[f"{prefix}/alarms/{kind}"] = float(sum(alarm.kind == kind for alarm in alarms or ()))
    return values


def _mean(heads: Moments, column: int) -> float:
    """Mean of a metric over rows and heads; NaN without rows."""
    counted = heads.count[:, column] > 0
    means, weight = heads.mean[counted, column], heads.weight[counted, column]
    return float((means * (weight / weight.sum())).sum()) if len(means) else math.nan


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
    for index, (layer, start) in enumerate(_layers(summary)):
        tag = f"{PREFIX}/{layer.module.replace('#', '_')}"
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


def _layers(summary: HeadSummary) -> list[tuple[Any, int]]:
    """Each layer with the index of its first head."""
    layers, start = [], 0
    for layer in summary.layers:
        layers.append((layer, start))
        start += layer.heads
    return layers


@dataclass(frozen=True)
class LayerClip:
    """The effect of one step on one layer.

    Attributes:
        module: qualified name of the module.
        max_logit: largest logit of each head since the last step, over all ranks.
        factor: γ of each head; 1 for unchanged heads.
    """

    module: str
    max_logit: tuple[float, ...]
    factor: tuple[float, ...]


@dataclass(frozen=True)
class ClipReport:
    """The effect of one step of :class:`acutance.training.QKClip`.

    Attributes:
        layers: the layers that ran since the last step.
        not_finite: heads, as ``(module, head)``, whose largest logit was not finite. They were not
            changed.
    """

    layers: tuple[LayerClip, ...]
    not_finite: tuple[tuple[str, int], ...] = ()

    @property
    def max_logit(self) -> float:
        """The largest logit of all heads; −inf without rows."""
        return max((value for layer in self.layers for value in layer.max_logit), default=-math.inf)

    @property
    def clipped(self) -> tuple[tuple[str, int], ...]:
        """Heads that were scaled, as ``(module, head)``."""
        return tuple(
            (layer.module, head)
            for layer in self.layers
            for head, factor in enumerate(layer.factor)
            if factor != 1.0
        )
