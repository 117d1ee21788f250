"""LogitGrowth: how much each layer's logits grew in the last quarter of the training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from acutance.shapes import check_count, check_number

__all__ = ["LogitGrowth", "growth_limit"]

#: Measurements before there is a growth, and values whose median a value is compared with.
FEWEST, AROUND = 16, 3
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
    """Values of one layer, as far back as they are needed."""

    def __init__(self, count: int = 0, stride: int = 1, values: Sequence[float] = ()) -> None:
        self.count, self.stride, self.values = count, stride, list(values)

    def add(self, value: float) -> float | None:
        """Store a value; return its growth, or None if there are too few values."""
        index, self.count = self.count, self.count + 1
        if index % self.stride == 0:
            self.values.append(value)
        if index < FEWEST:
            return None
        first = index // self.stride + 1 - len(self.values)  # its number, in strides
        middle = 3 * index // 4 // self.stride
        del self.values[: max(0, middle - AROUND // 2 - first)]
        around = np.median(self.values[:AROUND])
        if len(self.values) > STORED:
            first = index // self.stride + 1 - len(self.values)
            self.values, self.stride = self.values[first % 2 :: 2], 2 * self.stride
        return value - float(around)


class LogitGrowth:
    """By which factor the logits of each layer grew in the last quarter of the training so far.

    A layer's value is the standard deviation of a row's logits, averaged over rows and heads. It is
    divided by the median of the three measurements around three quarters of the measurements so
    far. There is no growth before the 17th measurement.

    Args:
        false_alarms: alarms per million optimiser steps of healthy training, which determine
            ``limit``; None for no alarms.

    Attributes:
        limit: growth beyond which there is an alarm; infinite without alarms.

    Raises:
        ValueError: if ``false_alarms`` is not above 0.

    Example:
        The logits grow by 10 % a measurement; measurement 20 is compared with number 15:

        >>> growth = LogitGrowth()
        >>> for step in range(21):
        ...     grown = growth.update({"layer": 1.1**step})
        >>> f"{grown['layer']:.3f}", f"{1.1**5:.3f}"
        ('1.611', '1.611')
    """

    def __init__(self, false_alarms: float | None = 100.0) -> None:
        self.limit = math.inf if false_alarms is None else growth_limit(false_alarms)
        self._layers: dict[str, _History] = {}

    def update(self, deviations: Mapping[str, float]) -> dict[str, float]:
        """Add a measurement.

        Args:
            deviations: the mean standard deviation of a row's logits, by layer; values that are 0
                or not finite are left out.

        Returns:
            The growth of each layer that has been measured often enough.
        """
        grown = {}
        for layer, value in deviations.items():
            if 0 < value < math.inf:
                growth = self._layers.setdefault(layer, _History()).add(math.log(value))
                if growth is not None:
                    grown[layer] = math.exp(growth)
        return grown

    def clear(self) -> None:
        """Forget all measurements."""
        self._layers.clear()

    def state_dict(self) -> dict[str, Any]:
        """The measurements, as JSON-compatible values."""
        return {
            layer: {"count": one.count, "stride": one.stride, "values": list(one.values)}
            for layer, one in self._layers.items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: if something is missing, or of the wrong kind.
        """
        layers = {}
        for layer, one in state_dict.items():
            if not isinstance(one, Mapping) or set(one) != {"count", "stride", "values"}:
                raise ValueError(
                    f"the logits of {layer!r} must have count, stride and values, got {one!r}"
                )
            layers[str(layer)] = _History(
                check_count("count", one["count"], 0),
                check_count("stride", one["stride"], 1),
                [check_number("values", value) for value in one["values"]],
            )
        self._layers = layers
