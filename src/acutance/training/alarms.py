"""Alarms of heads beyond a threshold, and of layers whose logits grew late in the training."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch

from acutance.from_json import checked
from acutance.shapes import check_number
from acutance.summary.head_summary import HeadSummary

Kind = Literal["logit_growth", "entropy_collapse", "large_logit", "not_finite"]
#: What a head has, by the kind of its alarm.
_WHAT: dict[Kind, str] = {
    "logit_growth": "the largest logits of its layer, which grew by a factor of {value:.3g} in the "
    "last quarter of the training, more than {threshold:.3g}",
    "entropy_collapse": "a normalized entropy of {value:.2g}, below {threshold:g}",
    "large_logit": "a logit of {value:.4g}, above {threshold:g}",
    "not_finite": "{value:.0f} rows whose scores are not finite",
}
#: Every kind of alarm, in the order of warnings.
KINDS = tuple(_WHAT)
#: Metrics that every alarm needs; the bound on collapse needs one more.
NEEDED = ("max_logit", "lse", "n_keys", "logit_std")
COLLAPSING = "normalized_entropy"
_NAMED = 3  # heads that a warning names
#: Measurements before there is a growth, and values whose median a value is compared with.
FEWEST, AROUND = 16, 3
#: Steps after the learning rate's warm-up in which growth is not judged.
SETTLING = 100
#: Values of a layer that are stored at most; with more, every second one is dropped.
STORED = 512
#: False alarms per million steps, and the logarithm of the growth that healthy trainings exceed so
#: often: from the controls of both repetitions in ``python -m benchmarks.instability report``.
LIMITS = ((100.0, 0.46), (300.0, 0.34), (1000.0, 0.24), (3000.0, 0.14))


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
        return f"head {self.head} of {self.module} has {_WHAT[self.kind].format(**vars(self))}"


def growth_limit(false_alarms: float) -> float:
    """The growth of a layer's logits that healthy training exceeds at a given rate.

    The logarithm of the growth is linear in that of the rate between the measured points
    :data:`LIMITS`, and beyond them.

    Args:
        false_alarms: alarms per million optimiser steps of healthy training.

    Returns:
        The factor by which logits grow over the last quarter of a training.

    Raises:
        ValueError: if the rate is not above 0.

    Example:
        >>> growth_limit(10) > growth_limit(100) > growth_limit(1000) > 1
        True

    Source:
        The laboratory of failing trainings, ``benchmarks/instability``.
    """
    rate = math.log(check_number("false_alarms", false_alarms, above=0.0))
    rates, limits = [math.log(point[0]) for point in LIMITS], [point[1] for point in LIMITS]
    right = min(max(int(np.searchsorted(rates, rate)), 1), len(rates) - 1)
    slope = (limits[right] - limits[right - 1]) / (rates[right] - rates[right - 1])
    return math.exp(max(0.0, limits[right] + slope * (rate - rates[right])))


@dataclass
class _History:
    """Values of one layer by step, as far back as they are needed."""

    count: int
    first: int
    steps: list[int]
    values: list[float]

    def add(self, step: int, value: float) -> float | None:
        """Store a value; return its growth, or None if there are too few values."""
        self.count += 1
        self.steps.append(step)
        self.values.append(value)
        middle = bisect_right(self.steps, self.first + 3 * (step - self.first) / 4) - 1
        if self.count <= FEWEST or len(self.steps) - 1 - middle < FEWEST // 4:
            return None
        old = max(0, middle - AROUND // 2)
        del self.steps[:old], self.values[:old]
        around = np.median(self.values[:AROUND])
        if len(self.values) > STORED:
            del self.steps[1::2], self.values[1::2]
        return value - float(around)


@dataclass
class _Measured:
    """What is known of all layers: the last step of the warm-up, and the highest learning rate.

    The rate is below 0 before the first one, and None after the warm-up.
    """

    warmup: int
    rate: float | None
    layers: dict[str, _History]


class LogitGrowth:
    """By which factor the logits of each layer grew in the last quarter of the training so far.

    A layer's value is the standard deviation of a row's logits, averaged over rows and heads. It is
    divided by the median of the three measurements around three quarters of the steps so far.
    There is no growth before the 17th measurement, with fewer than four in the last quarter, during
    the warm-up and in the 100 steps after it. The warm-up lasts as long as the learning rate rises
    from one measurement to the next; if the rate is unknown, it has no steps.

    How often healthy training exceeds the limit depends on the data. Where the limit promises one
    false alarm in 10,000 steps (``false_alarms=100``), trainings on four texts that were measured
    every 10 steps raised 0 to 1.1, by text; measured every 8 steps and judged at once, 0 to 2.8,
    and 3.9 on a fifth. A model that suddenly learns to copy alarms as one that diverges: so did 12
    of 12 trainings on random symbols, whose loss then fell.

    Args:
        false_alarms: alarms per million optimiser steps of healthy training, which determine
            ``limit``; None for no alarms.

    Attributes:
        limit: growth beyond which there is an alarm; infinite without alarms.

    Raises:
        ValueError: if ``false_alarms`` is not above 0.

    Example:
        The logits grow by 10 % a measurement; measurement 20, at step 200, is
        compared with that at step 150:

        >>> growth = LogitGrowth()
        >>> for number in range(21):
        ...     grown = growth.update(10 * number, {"layer": 1.1**number})
        >>> f"{grown['layer']:.3f}", f"{1.1**5:.3f}"
        ('1.611', '1.611')
    """

    def __init__(self, false_alarms: float | None = 100.0) -> None:
        self.limit = math.inf if false_alarms is None else growth_limit(false_alarms)
        self.clear()

    def update(
        self, step: int, deviations: Mapping[str, float], rate: float | None = None
    ) -> dict[str, float]:
        """Add a measurement.

        Args:
            step: the optimiser step, above that of the last measurement.
            deviations: the mean standard deviation of a row's logits, by layer; values that are 0
                or not finite are left out.
            rate: the learning rate; None if it is unknown.

        Returns:
            The growth of each layer that has been measured often enough, after the warm-up.
        """
        known = self._measured
        if rate is not None and known.rate is not None:
            if rate > known.rate:
                known.warmup, known.rate = step, rate
            else:
                known.rate = None
        grown = {}
        for layer, value in deviations.items():
            if 0 < value < math.inf:
                history = known.layers.setdefault(layer, _History(0, step, [], []))
                growth = history.add(step, math.log(value))
                if growth is not None and step - known.warmup >= SETTLING:
                    grown[layer] = math.exp(growth)
        return grown

    def clear(self) -> None:
        """Forget all measurements."""
        self._measured = _Measured(0, -1.0, {})

    def state_dict(self) -> dict[str, Any]:
        """The measurements, as JSON-compatible values."""
        return asdict(self._measured)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; nothing, if it is empty.

        An earlier form counted measurements without their steps: from it, nothing is restored.

        Raises:
            ValueError: if something is missing, or of the wrong kind.
        """
        entries = state_dict.values()
        if all(isinstance(entry, Mapping) and "stride" in entry for entry in entries):
            self.clear()
            return
        measured = checked(_Measured, dict(state_dict), "the state of growing logits")
        for layer, history in measured.layers.items():
            if len(history.steps) != len(history.values):
                raise ValueError(
                    f"the logits of {layer!r} must have a value at each step, got "
                    f"{len(history.steps)} steps and {len(history.values)} values"
                )
        self._measured = measured


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
        alarms = []
        columns = [summary.metrics.index(name) for name in self.metrics]
        moments = summary.moments
        arrays = (moments.count, moments.mean, moments.high)
        numbers = [array[:, columns].tolist() for array in arrays]
        for (layer, head), count, mean, high in zip(summary.places, *numbers, strict=True):
            place = summary.layers[layer].module, head
            # a row counts towards a metric only if that is a finite number, as n always is
            not_finite = count[2] - min(count[:2])
            if not_finite > 0:
                alarms.append(Alarm("not_finite", *place, float(not_finite), 0.0, step))
            if self.collapse is not None and count[-1] and mean[-1] < self.collapse:
                alarms.append(Alarm("entropy_collapse", *place, mean[-1], self.collapse, step))
            if self.max_logit is not None and high[0] > self.max_logit:
                alarms.append(Alarm("large_logit", *place, high[0], self.max_logit, step))
        modules = [layer.module for layer in summary.layers]
        deviations = dict(zip(modules, layer_means(summary, "logit_std"), strict=True))
        for module, value in growth.update(step, deviations, rate).items():
            if value > growth.limit:
                layer = modules.index(module)
                of_heads = summary.grid("logit_std")[layer]
                largest = int(np.nanargmax(of_heads))
                head = summary.layers[layer].numbers[largest]
                alarms.append(Alarm("logit_growth", module, head, value, growth.limit, step))
        return tuple(alarms)


def layer_means(summary: HeadSummary, name: str) -> list[float]:
    """Mean of a metric over the rows and heads of each layer; NaN without rows."""
    column = summary.column(name)
    weights = summary.moments.weight[:, column]
    sums = torch.where(weights > 0, summary.moments.mean[:, column] * weights, 0.0)
    sizes = [layer.heads for layer in summary.layers]
    pairs = zip(sums.split(sizes), weights.split(sizes), strict=True)
    return [float(of_heads.sum() / weight.sum()) for of_heads, weight in pairs]


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
    worst = sorted(alarms, key=lambda alarm: sign * alarm.value)
    heads = "one head" if len(alarms) == 1 else f"{len(alarms)} heads"
    text = "; ".join(map(str, worst[:_NAMED]))
    more = f"; and {len(alarms) - _NAMED} more" if len(alarms) > _NAMED else ""
    label = kind.replace("_", " ")
    return f"attention at step {alarms[0].step}, {label} in {heads}: {text}{more}"
