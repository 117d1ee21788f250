"""LogitGrowth: how much each layer's logits grew in the last quarter of the training."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from acutance.shapes import check_count, check_number

__all__ = ["LogitGrowth", "growth_limit"]

#: Measurements before there is a growth, and values whose median a value is compared with.
FEWEST, AROUND = 16, 3
#: Steps after the learning rate's warm-up in which growth is not judged.
SETTLING = 100
#: Values of a layer that are stored at most; with more, every second one is dropped.
STORED = 512
#: False alarms per million steps, and the logarithm of the growth that healthy trainings exceed so
#: often: from the controls of both repetitions in ``python -m benchmarks.instability report``.
LIMITS = ((100.0, 0.46), (300.0, 0.34), (1000.0, 0.24), (3000.0, 0.14))


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


class _History:
    """Values of one layer by step, as far back as they are needed."""

    def __init__(
        self, count: int = 0, first: int = 0, steps: Sequence[int] = (),
        values: Sequence[float] = (),
    ) -> None:  # fmt: skip
        self.count, self.first, self.steps, self.values = count, first, list(steps), list(values)

    def add(self, step: int, value: float) -> float | None:
        """Store a value; return its growth, or None if there are too few values."""
        if not self.count:
            self.first = step
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
        self._layers: dict[str, _History] = {}
        self._warmup = 0  # the last step of the warm-up
        self._rate: float | None = -1.0  # the highest so far; None after the warm-up

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
        if rate is not None and self._rate is not None:
            if rate > self._rate:
                self._warmup, self._rate = step, rate
            else:
                self._rate = None
        grown = {}
        for layer, value in deviations.items():
            if 0 < value < math.inf:
                growth = self._layers.setdefault(layer, _History()).add(step, math.log(value))
                if growth is not None and step - self._warmup >= SETTLING:
                    grown[layer] = math.exp(growth)
        return grown

    def clear(self) -> None:
        """Forget all measurements."""
        self._layers.clear()
        self._warmup, self._rate = 0, -1.0

    def state_dict(self) -> dict[str, Any]:
        """The measurements, as JSON-compatible values."""
        return {
            "warmup": self._warmup,
            "rate": self._rate,
            "layers": {
                layer: {
                    "count": one.count,
                    "first": one.first,
                    "steps": list(one.steps),
                    "values": list(one.values),
                }
                for layer, one in self._layers.items()
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; nothing, if it is empty.

        An earlier form counted measurements without their steps: from it, nothing is restored.

        Raises:
            ValueError: if something is missing, or of the wrong kind.
        """
        if all(isinstance(one, Mapping) and "stride" in one for one in state_dict.values()):
            self.clear()
            return
        if set(state_dict) != {"warmup", "rate", "layers"}:
            raise ValueError(
                f"the state of growing logits must have warmup, rate and layers, got "
                f"{', '.join(sorted(map(str, state_dict)))}"
            )
        layers = {}
        for layer, one in state_dict["layers"].items():
            if not isinstance(one, Mapping) or set(one) != {"count", "first", "steps", "values"}:
                raise ValueError(
                    f"the logits of {layer!r} must have count, first, steps and values, got {one!r}"
                )
            steps = [check_count("steps", step, 0) for step in one["steps"]]
            values = [check_number("values", value) for value in one["values"]]
            if len(steps) != len(values):
                raise ValueError(
                    f"the logits of {layer!r} must have a value at each step, got {len(steps)} "
                    f"steps and {len(values)} values"
                )
            count, first = (check_count(name, one[name], 0) for name in ("count", "first"))
            layers[str(layer)] = _History(count, first, steps, values)
        rate = state_dict["rate"]
        self._warmup = check_count("warmup", state_dict["warmup"], 0)
        self._rate = None if rate is None else check_number("rate", rate)
        self._layers = layers
