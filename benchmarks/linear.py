"""Time of the O(n) forms at 65536 positions over their time at 16384: at most 4.6 is linear.

    python benchmarks/linear.py                      # 8 heads of width 64, forward and backward
    python benchmarks/linear.py causal decay --heads 2 --rounds 7

Process CPU time on one thread. Rounds interleave the two lengths; the medians are compared. The
command ends with status 1 if a ratio is above the limit.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from acutance import mechanisms
from acutance.comparison.measured import cpu_seconds

SHORT, LONG, LIMIT = 16384, 65536, 4.6


def forms(heads: int, width: int) -> dict[str, tuple[int, Callable[..., Tensor]]]:
    """Each form: how many tensors (1, heads, n, width) it takes, and the call."""
    decays = mechanisms.retnet_decays(heads)
    ring = torch.polar(torch.linspace(0.9, 0.999, width), torch.linspace(0, 3, width))
    unit = mechanisms.lru_parameters(width, width, r_min=0.9, r_max=0.99)
    linear, decaying = mechanisms.linear_attention, mechanisms.decay_attention
    return {
        "full": (3, lambda q, k, v: linear(q, k, v)),
        "causal": (3, lambda q, k, v: linear(q, k, v, is_causal=True)),
        "statistics": (3, lambda q, k, v: linear(q, k, v, is_causal=True, return_stats=True)[0]),
        "decay": (3, lambda q, k, v: decaying(q, k, v, decay=decays, feature_map="elu1")),
        "recurrence": (1, lambda x: mechanisms.diagonal_recurrence(x, ring.abs())),
        "complex": (1, lambda x: mechanisms.diagonal_recurrence(x, ring)),
        "unit": (1, lambda x: mechanisms.linear_recurrent_unit(x, unit)[0]),
    }


def timed(call: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass."""
    gc.collect()
    with torch.no_grad():
        start = cpu_seconds()
        call(*inputs)
        forward = cpu_seconds() - start
    out = call(*inputs)
    upstream = torch.ones_like(out)
    start = cpu_seconds()
    torch.autograd.grad(out, inputs, upstream)
    return forward, cpu_seconds() - start


def main() -> int:
    """Time the forms that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("forms", nargs="*", help="full, causal, statistics, decay, ... (all)")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = forms(given.heads, given.width)
    if unknown := set(given.forms) - set(known):
        parser.error(
            f"no form is named {', '.join(sorted(unknown))}: choose from {', '.join(known)}"
        )
    worst = 0.0
    for name in given.forms or known:
        count, call = known[name]
        shape = (count, 1, given.heads)
        inputs = {
            n: [x.requires_grad_() for x in torch.randn(*shape, n, given.width).unbind(0)]
            for n in (SHORT, LONG)
        }
        times: dict[int, list[tuple[float, float]]] = {SHORT: [], LONG: []}
        for turn in range(given.rounds + 1):
            for n in times:
                found = timed(call, inputs[n])
                if turn:  # the first warms up
                    times[n].append(found)
        for index, direction in enumerate(("forward", "backward")):
            short, long = (statistics.median(t[index] for t in times[n]) for n in (SHORT, LONG))
            worst = max(worst, long / short)
            print(f"{name:12} {direction:9} {short:7.3f} s {long:7.3f} s  {long / short:.2f}")
    print(f"largest ratio {worst:.2f}, limit {LIMIT}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
