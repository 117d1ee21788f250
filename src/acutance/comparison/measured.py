"""Run one mechanism on the inputs of a comparison: metrics of its rows, and time."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.comparison.record import COMPARED, Inputs
from acutance.mechanisms import Mechanism
from acutance.mechanisms.entry import Decay, Gated, Linear, Recurrence, Statistics

_MISSING = {
    "entropy": "The weights are not a distribution.",
    "jacobian_trace": "Not defined for these weights.",
    "noise_gain": "Not defined for these weights.",
}


@dataclass(frozen=True)
class Rows:
    """Metrics of every row of one mechanism.

    Attributes:
        values: each quantity, (heads, rows) float64; heads of different batch items count
            separately.
        why: the reason for each missing quantity.
        statistics: the statistics of all rows.
    """

    values: dict[str, Tensor]
    why: dict[str, str]
    statistics: Statistics


def fixed_weights(mechanism: Mechanism) -> bool:
    """Whether a mechanism's weights depend only on distance, so that rows are not random."""
    return isinstance(mechanism.form, Decay | Recurrence)


def measure(mechanism: Mechanism, inputs: Inputs, seed: int = 0) -> Rows:
    """Run a mechanism and compute the metrics of its rows.

    Args:
        mechanism: an entry of the table.
        inputs: the queries, keys and values.
        seed: seed of the random direction for the gradient.
    """
    with torch.no_grad():
        statistics = mechanism.run(
            inputs.query, inputs.key, inputs.value, is_causal=inputs.is_causal,
            query_offset=inputs.offset, noise=True,
        )[1]  # fmt: skip
    values, why = {}, {}
    for name in COMPARED:
        if name == "query_gradient":
            continue
        if name in statistics.available:
            values[name] = _heads_rows(statistics[name])
        else:
            why[name] = _MISSING[name]
    if isinstance(mechanism.form, Gated):
        why["query_gradient"] = "Its queries and keys come from one sequence."
    else:
        values["query_gradient"] = query_gradient(mechanism, inputs, seed)
    return Rows(values, why, statistics)


def query_gradient(mechanism: Mechanism, inputs: Inputs, seed: int = 0) -> Tensor:
    r"""Relative change of each output with its query, (heads, rows).

    .. math:: \frac{\lVert J^\top u \rVert \, \lVert q \rVert}{\sqrt d \, \lVert o \rVert},
        \qquad J = \partial o / \partial q, \quad u \sim N(0, I)

    The root mean square of :math:`\lVert J^\top u \rVert` is the Frobenius norm of J. The result is
    about 1 for an output that is linear in the query, and nearly 0 if the row is saturated on one
    key or averages all keys.

    Args:
        mechanism: an entry of the table.
        inputs: the queries, keys and values.
        seed: seed of u.
    """
    query = inputs.query.detach().clone().requires_grad_()
    out, _ = mechanism.run(
        query, inputs.key, inputs.value, is_causal=inputs.is_causal, query_offset=inputs.offset,
    )  # fmt: skip
    u = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
    gradient = None
    if out.requires_grad:
        (gradient,) = torch.autograd.grad((out * u).sum(), query, allow_unused=True)
    if gradient is None:
        return torch.zeros_like(_heads_rows(query[..., 0].detach()))
    size = out.detach().norm(dim=-1).double() * math.sqrt(query.shape[3])
    ratio = gradient.norm(dim=-1).double() * query.detach().norm(dim=-1).double() / size
    return _heads_rows(torch.where(size > 0, ratio, torch.nan))


def mean_and_error(
    values: Tensor, *, fixed: bool = False, alike: bool = True
) -> tuple[float, float]:
    """Mean over rows and its standard error; heads are treated as independent.

    Args:
        values: (heads, rows); NaN is ignored.
        fixed: rows are not random, so the error is 0.
        alike: heads have the same distribution; otherwise the error is unknown.

    Example:
        >>> mean_and_error(torch.tensor([[1.0, 3.0], [4.0, 4.0]], dtype=torch.float64))
        (3.0, 1.0)
    """
    heads = values.nanmean(1)
    heads = heads[~heads.isnan()]
    if not len(heads):
        return math.nan, math.nan
    mean = float(heads.mean())
    if fixed:
        return mean, 0.0
    if len(heads) < 2 or not alike:
        return mean, math.nan
    return mean, float(heads.std()) / math.sqrt(len(heads))


def heads_alike(mechanism: Mechanism) -> bool:
    """Whether all heads of a mechanism have the same distribution."""
    return not (isinstance(mechanism.form, Linear) and mechanism.form.decays is not None)


def _heads_rows(values: Tensor) -> Tensor:
    """Reshape (B, H, rows) to (B · H, rows) in float64."""
    return values.detach().double().flatten(0, 1)


#: A call shorter than this is taken three times, seconds, and the quickest counts.
QUICK = 0.1


class Seconds(NamedTuple):
    """Wall and process CPU seconds of a call."""

    wall: float
    cpu: float


def cpu_seconds() -> float:
    """CPU seconds of all threads of this process so far.

    Read from ``getrusage`` where there is one: Linux moves ``time.process_time`` on in steps of a
    few milliseconds while CPU time is limited (``ulimit -t``).
    """
    if sys.platform == "win32":
        return time.process_time()
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(call: Callable[[], object], repeats: int = 1) -> Seconds:
    """Mean wall and process CPU seconds of a call over ``repeats`` calls."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    for _ in range(repeats):
        call()
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    return Seconds(wall / repeats, cpu / repeats)


def cost(mechanism: Mechanism, inputs: Inputs) -> Seconds:
    """Time of a mechanism, statistics included, after a warm-up over 64 rows."""

    def run(tensors: Iterable[Tensor]) -> None:
        mechanism.run(*tensors, is_causal=inputs.is_causal)

    tensors = inputs.query, inputs.key, inputs.value
    with torch.no_grad():
        run(tensor[:, :, :64] for tensor in tensors)
        timings = [timed(lambda: run(tensors))]
        if timings[0].wall < QUICK:
            timings += [timed(lambda: run(tensors)) for _ in range(2)]
    return min(timings, key=lambda seconds: seconds.wall)
