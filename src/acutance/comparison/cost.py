"""What a mechanism costs: time and peak memory of one head with as many rows as keys."""

from __future__ import annotations

import math
from typing import NamedTuple

from acutance.bench.measure import MIB, Taken, high_water, timed
from acutance.comparison.inputs import Inputs
from acutance.mechanisms import Mechanism

__all__ = ["Cost", "cost"]

#: A call shorter than this is taken three times, seconds, and the quickest counts.
QUICK = 0.1


class Cost(NamedTuple):
    """Wall and process CPU seconds, and MiB above the inputs at the peak."""

    seconds: float
    cpu_seconds: float
    mib: float


def cost(mechanism: Mechanism, inputs: Inputs) -> Cost:
    """Time and weigh a mechanism on its inputs, statistics included.

    The first call, over 64 rows, is not counted. Memory is the rise of the process's resident size
    while the mechanism runs once; NaN where the system does not say.
    """
    import torch

    def call() -> object:
        return mechanism.run(
            inputs.query, inputs.key, inputs.value, is_causal=inputs.is_causal, rows="sums"
        )

    taken: list[Taken] = []
    with torch.no_grad():
        few = min(64, inputs.n)
        parts = (part[:, :, :few] for part in (inputs.query, inputs.key, inputs.value))
        mechanism.run(*parts, is_causal=inputs.is_causal, rows="sums")
        try:
            mib = high_water(lambda: taken.append(timed(call))) / MIB
        except OSError:
            mib = math.nan
            taken.append(timed(call))
        if taken[0].wall < QUICK:
            taken += [timed(call) for _ in range(2)]
    quickest = min(taken, key=lambda each: each.wall)
    return Cost(quickest.wall, quickest.cpu, mib)
