"""What a monitor and QKClip report: alarms, logged scalars, and scaled layers."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from acutance.shapes import check_number
from acutance.summary.head_summary import HeadSummary
from acutance.summary.layer import Layer
from acutance.training.growth import LogitGrowth

__all__ = [
    "Alarm",
    "AttentionWarning",
    "ClipReport",
    "Kind",
    "LayerClip",
    "MonitorRecord",
    "Thresholds",
    "layer_heads",
    "scalars",
    "summed_up",
]


Kind = Literal["logit_growth", "entropy_collapse", "large_logit", "not_finite"]
#: Every kind of alarm, in the order of warnings.
KINDS: tuple[Kind, ...] = ("logit_growth", "entropy_collapse", "large_logit", "not_finite")
#: Metrics that every alarm needs; the bound on collapse needs one more.
NEEDED = ("max_logit", "lse", "n_keys", "logit_std")
COLLAPSING = "normalized_entropy"
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

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that a summary must have."""
        return NEEDED if self.collapse is None else (*NEEDED, COLLAPSING)

    def alarms(
        self, summary: HeadSummary, growth: LogitGrowth, step: int, rate: float | None = None
    ) -> tuple[Alarm, ...]:
        """The heads of a summary that are beyond a limit, layer by layer.

        Args:
            summary: the measurement.
            growth: earlier measurements, to which this one is added.
            step: the optimiser step.
            rate: the learning rate; None if it is unknown.
        """
        column = summary.metrics.index("logit_std")
        found = list(self._exceeding(summary, step))
        numbers = _Numbers.of(summary)
        layers = {layer.module: (layer, heads) for layer, heads in layer_heads(summary)}
        deviations = {name: numbers.mean_over(heads, column) for name, (_, heads) in layers.items()}
        grown = growth.update(step, deviations, rate)
        for module, value in grown.items():
            if value > growth.limit:
                layer, heads = layers[module]
                largest = max(numbers.counted(heads, column), key=lambda h: numbers.mean[h][column])
                head = layer.numbers[largest - heads.start]
                found.append(Alarm("logit_growth", module, head, value, growth.limit, step))
        return tuple(found)

    def _exceeding(self, summary: HeadSummary, step: int) -> Iterator[Alarm]:
        """An alarm for each head and threshold that it exceeds."""
        columns = [summary.metrics.index(name) for name in self.metrics]
        counts, means, highs = (
            part[:, columns].tolist()
            for part in (summary.moments.count, summary.moments.mean, summary.moments.high)
        )
        for (index, head), count, mean, high in zip(
            summary.places, counts, means, highs, strict=True
        ):
            where = summary.layers[index].module, head
            # a row counts towards a metric only if that is a finite number, as n always is
            not_finite = count[2] - min(count[:2])
            if not_finite > 0:
                yield Alarm("not_finite", *where, float(not_finite), 0.0, step)
            if self.collapse is not None and count[-1] and mean[-1] < self.collapse:
                yield Alarm("entropy_collapse", *where, mean[-1], self.collapse, step)
            if self.max_logit is not None and count[0] and high[0] > self.max_logit:
                yield Alarm("large_logit", *where, high[0], self.max_logit, step)


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
#: The scalar of the learning rate, from which a replay knows the warm-up.
LEARNING_RATE = f"{PREFIX}/learning_rate"
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
    numbers = _Numbers.of(summary)
    for layer, heads in layer_heads(summary):
        for name, column in zip(metrics, columns, strict=True):
            counted = numbers.counted(heads, column)
            if not counted:
                continue
            means = [numbers.mean[head][column] for head in counted]
            tag = f"{prefix}/{layer.module.replace('#', '_')}/{name}"
            values[tag] = numbers.mean_over(heads, column)
            if name in _EXTREMES:
                values[f"{tag}_max"] = max(numbers.high[head][column] for head in counted)
            else:
                values[f"{tag}_min"] = min(means)
                values[f"{tag}_max"] = max(means)
        if alarms is not None and "logit_std" in summary.metrics:  # what alarms follow
            mean = numbers.mean_over(heads, summary.metrics.index("logit_std"))
            if not math.isnan(mean):
                values[f"{prefix}/{layer.module.replace('#', '_')}/logit_std"] = mean
    for kind in () if alarms is None else KINDS:
        values[f"{prefix}/alarms/{kind}"] = float(sum(alarm.kind == kind for alarm in alarms or ()))
    return values


class _Numbers(NamedTuple):
    """Moments of a summary as lists by head and metric: reading tensors one by one is slow."""

    rows: list[list[int]]
    mean: list[list[float]]
    weight: list[list[float]]
    high: list[list[float]]

    @staticmethod
    def of(summary: HeadSummary) -> _Numbers:
        """The numbers of a summary."""
        moments = summary.moments
        parts = moments.count, moments.mean, moments.weight, moments.high
        return _Numbers(*(part.tolist() for part in parts))

    def counted(self, heads: range, column: int) -> list[int]:
        """The heads with rows on which a metric is finite."""
        return [head for head in heads if self.rows[head][column]]

    def mean_over(self, heads: range, column: int) -> float:
        """Mean of a metric over rows and heads; NaN without rows."""
        counted = self.counted(heads, column)
        total = float(sum(self.weight[head][column] for head in counted))
        if not total:
            return math.nan
        shares = [self.weight[head][column] / total for head in counted]
        means = [self.mean[head][column] for head in counted]
        return float(sum(map(operator.mul, means, shares)))


def layer_heads(summary: HeadSummary) -> list[tuple[Layer, range]]:
    """Each layer with the indices of its heads."""
    ends = list(itertools.accumulate(layer.heads for layer in summary.layers))
    return [
        (layer, range(end - layer.heads, end))
        for layer, end in zip(summary.layers, ends, strict=True)
    ]


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
