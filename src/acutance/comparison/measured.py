"""Run one mechanism on the inputs of a comparison: metrics of its rows, time and memory."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.comparison.record import COMPARED, Inputs
from acutance.mechanisms import Mechanism
from acutance.mechanisms.entry import Decay, Gated, Linear, Recurrence, Statistics

__all__ = [
    "Cost",
    "MIB",
    "Rows",
    "Seconds",
    "cost",
    "cpu_seconds",
    "fixed_weights",
    "high_water",
    "mean_and_error",
    "measure",
    "memory_method",
    "timed",
]


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
        rows="sums",
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


class Cost(NamedTuple):
    """Wall and process CPU seconds, and peak MiB above the inputs."""

    seconds: float
    cpu_seconds: float
    mib: float


def cost(mechanism: Mechanism, inputs: Inputs) -> Cost:
    """Measure time and peak memory of a mechanism, statistics included.

    A warm-up call over 64 rows is not counted. Memory is the rise of the process's resident size
    during one run; NaN if the system does not report it.
    """
    import torch

    def call() -> object:
        return mechanism.run(
            inputs.query, inputs.key, inputs.value, is_causal=inputs.is_causal, rows="sums"
        )

    timings: list[Seconds] = []
    with torch.no_grad():
        few = min(64, inputs.n)
        parts = (part[:, :, :few] for part in (inputs.query, inputs.key, inputs.value))
        mechanism.run(*parts, is_causal=inputs.is_causal, rows="sums")
        try:
            mib = high_water(lambda: timings.append(timed(call))) / MIB
        except OSError:
            mib = math.nan
            timings.append(timed(call))
        if timings[0].wall < QUICK:
            timings += [timed(call) for _ in range(2)]
    quickest = min(timings, key=lambda each: each.wall)
    return Cost(quickest.wall, quickest.cpu, mib)


MIB = 1 << 20


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


def high_water(call: Callable[[], object]) -> int:
    """Bytes by which a call raises the peak resident size, its result included.

    Raises:
        OSError: if the system does not report it.
    """
    _trim()
    if _resettable():
        before = _status("VmRSS")
        _reset_high_water()
        result = call()
        peak = _status("VmHWM")
    else:
        before = _largest_so_far()
        result = call()
        peak = _largest_so_far()
    del result
    return max(0, peak - before)


def memory_method() -> str:
    """How this system reports peak memory, as text."""
    if _resettable():
        return "resident high-water mark (VmHWM, reset before the call) above the inputs"
    if sys.platform == "win32":
        return "not available on this system"
    return (
        "growth of the process's largest resident size (ru_maxrss), a lower bound: the mark "
        "cannot be reset on this system"
    )


def _status(field_name: str) -> int:
    """A size from /proc/self/status, bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field_name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(
        f"peak memory cannot be measured: /proc/self/status has no {field_name}; pass costs=False "
        "(--no-costs)"
    )


def _reset_high_water() -> None:
    """Reset the kernel's record of the peak resident size."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _largest_so_far() -> int:
    """The process's largest resident size, bytes."""
    if sys.platform == "win32":
        raise OSError("peak memory cannot be measured on Windows; pass costs=False (--no-costs)")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resettable() -> bool:
    """Whether the peak resident size can be reset."""
    try:
        _reset_high_water()
        _status("VmHWM")
    except OSError:
        return False
    return True


def _trim() -> None:
    """Return freed memory to the system, so that new allocations are measured; glibc only."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
