"""Which of the library's kernels runs: the one that was the fastest on this machine.

An instruction set that a processor has need not be fast there: products of bfloat16 pairs run at
twice the rate of float32 on some, at half on others. So the kernels are timed, once for each dtype
and machine, when a process has given them work enough to repay it, and the times stay on disk
(:mod:`acutance.kernels.selection.timing`). Until then the widest instruction set runs.
"""

from __future__ import annotations

import math
import os
import struct
import threading
from collections.abc import Callable, Iterable

from acutance.compiling import unobserved
from acutance.kernels.bindings import Choice, Library
from acutance.kernels.selection import timing
from acutance.kernels.selection.timing import (
    DTYPE_CODES,
    PASSES,
    Times,
    blocked_timer,
    sample,
    seconds,
)

__all__ = ["MEASURE_VARIABLE", "Selection", "fastest", "install", "interleaved"]

#: Environment variable: ``auto`` times kernels when it pays, ``never`` does not and reads no times,
#: ``again`` does not believe the times on disk.
MEASURE_VARIABLE = "ACUTANCE_MEASURE"
#: A wider instruction set stays unless another is faster by this factor: noise must not decide.
MARGIN = 1.05
#: Products of two numbers that a dtype is given before it is timed: some 10 to 20 ms of work.
ENOUGH_WORK = 1e9
#: Calls after which a process is no longer watched for dtypes that were not timed yet.
MOST_CALLS = 1000

#: Queries and keys of the samples. ``decode_rows`` is a decoding call of several rows.
_SHAPES = {
    "forward": (64, 512),
    "decode": (1, 2048),
    "backward": (32, 512),
    "decode_rows": (8, 512),
}
_ROUNDS = 5
_HOPELESS = 2.0
_BLOCKED_QUERIES = (16, 256)


def fastest(times: dict[str, float], order: Iterable[str]) -> str | None:
    """The first name in ``order`` that no other beats by :data:`MARGIN`; None without times.

    Example:
        >>> fastest({"avx512_bf16": 9e-5, "avx512": 5e-5}, ("avx512_bf16", "avx512"))
        'avx512'
    """
    known = [name for name in order if name in times]
    least = min((times[name] for name in known), default=0.0)
    return next((name for name in known if times[name] <= MARGIN * least), None)


def interleaved(runs: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Run functions that return their time in turns, several rounds; return the least time of each.

    A function that is twice as slow as another in one round is not run again.
    """
    least: dict[str, float] = {}
    for _ in range(_ROUNDS):
        bound = _HOPELESS * min(least.values(), default=math.inf)
        for name, once in runs.items():
            if least.get(name, 0.0) <= bound:
                least[name] = min(least.get(name, math.inf), once())
    return least


class Selection:
    """Chooses the instruction sets of a native library by their times on this machine."""

    def __init__(self, library: Library, times: Times | None = None) -> None:
        """Use stored times; those of other dtypes or instruction sets are ignored."""
        self.library = library
        self.times: Times = {
            dtype: passes
            for dtype, passes in (times or {}).items()
            if dtype in DTYPE_CODES
            and all(set(passes.get(name, {})) == set(library.cpus) for name in PASSES)
        }
        for dtype in self.times:
            self.apply(dtype)

    def choice(self, dtype: str, name: str) -> Choice:
        """The instruction set in use for the pass ``name`` of a dtype, and the times behind it."""
        times = self.times.get(dtype, {}).get(name, {})
        cpus = self.library.cpus
        if self.library.named is not None:
            return Choice(dtype, name, self.library.named, {})
        return Choice(dtype, name, fastest(times, cpus) or cpus[0], times)

    def choices(self) -> tuple[Choice, ...]:
        """The instruction sets in use for every dtype and pass."""
        return tuple(self.choice(dtype, name) for dtype in DTYPE_CODES for name in PASSES)

    def complete(self) -> None:
        """Time the dtypes without times, unless the environment selects an instruction set."""
        if self.library.named is None and mode() != "never":
            for dtype in DTYPE_CODES:
                if dtype not in self.times:
                    self.measure(dtype)

    def apply(self, dtype: str) -> None:
        """Make the native library use, from now on, the variants timed fastest for a dtype.

        ``dtype`` is a name such as ``"float32"`` with times in :attr:`times`. It also sets the
        library's cost of starting a row and, for float32, the most queries for the native kernel.
        """
        times, cpus = self.times[dtype], self.library.cpus
        chosen = {name: fastest(times[name], cpus) for name in PASSES}
        for code, name in enumerate(PASSES):
            self.library.choose(code, DTYPE_CODES[dtype], cpus.index(str(chosen[name])))
        lane = times["forward"][str(chosen["forward"])] / math.prod(_SHAPES["forward"])
        queries, keys = _SHAPES["decode_rows"]
        row = times.get("decode_rows", {}).get(str(chosen["decode"]))
        if row is not None:  # starting a row takes as long as 64 keys
            cost = row / (queries * (keys + 64)) / lane
            self.library.row_cost(DTYPE_CODES[dtype], min(max(cost, 1.0), 8.0))
        blocked = [times.get("blocked", {}).get(str(size)) for size in _BLOCKED_QUERIES]
        if dtype == "float32" and None not in blocked:
            self.library.most_queries = _most_queries(
                lane * _SHAPES["forward"][1], *[part for part in blocked if part is not None]
            )

    def measure(self, dtype: str) -> None:
        """Time the kernels for a dtype, choose the fastest, and store the times."""
        library = self.library
        times: dict[str, dict[str, float]] = {}
        for name in PASSES:
            made = sample(dtype, name, *_SHAPES[name])
            runs = {cpu: seconds(library, cpu, name, made) for cpu in library.cpus}
            runs[library.cpus[0]]()  # the first to run brings the sample into the cache
            times[name] = interleaved(runs)
        decode = fastest(times["decode"], library.cpus)
        if decode is not None:
            made = sample(dtype, "decode", *_SHAPES["decode_rows"])
            times["decode_rows"] = interleaved({decode: seconds(library, decode, "decode", made)})
        if dtype == "float32":
            times["blocked"] = _time_blocked()
        self.times[dtype] = times
        self.apply(dtype)
        timing.write(library, {**(timing.read(library) or {}), **self.times})


def _most_queries(native: float, few: float, many: float) -> float:
    """Queries up to which the native kernel is faster than plain PyTorch; infinite if it always is.

    Args:
        native: time of the native kernel for each query.
        few: time of plain PyTorch for the smaller number of ``_BLOCKED_QUERIES``.
        many: its time for the larger number.
    """
    least, most = _BLOCKED_QUERIES
    each = (many - few) / (most - least)
    if each <= 0.0:  # the clock's steps are too coarse, as Windows' are
        return math.inf
    start = max(few - least * each, 0.0)
    return math.inf if native <= each else start / (native - each)


def _time_blocked() -> dict[str, float]:
    """CPU seconds of the plain PyTorch kernel, by number of queries.

    Empty if a profiler or a dispatch mode observes PyTorch now.
    """
    if not unobserved():
        return {}
    keys = _SHAPES["forward"][1]
    runs = {str(size): blocked_timer(size, keys) for size in _BLOCKED_QUERIES}
    return {name: min(once() for _ in range(3)) for name, once in runs.items()}


class _Watch:
    """Counts the library's work, and times the kernels of a dtype after enough work."""

    _head = struct.Struct("=9q")  # abi, dtype, batch, heads, group, queries, keys, two widths

    def __init__(self, selection: Selection) -> None:
        self.selection, library = selection, selection.library
        self._forward, self._backward = library.forward, library.backward
        self._names = {code: name for name, code in DTYPE_CODES.items()}
        self._work = dict.fromkeys(self._names, 0.0)
        self._calls = 0
        self._lock = threading.Lock()
        library.forward, library.backward = self.forward, self.backward

    def forward(self, call: bytes, sums: bytes) -> int:
        """Run the library's forward pass and count its work."""
        self._count(call)
        status: int = self._forward(call, sums)
        return status

    def backward(self, call: bytes, gradients: bytes) -> int:
        """Run the library's backward pass and count its work."""
        self._count(call)
        status: int = self._backward(call, gradients)
        return status

    def _count(self, call: bytes) -> None:
        """Add the work of a call, and time the kernels once a dtype has done enough."""
        _, code, *sizes, width, values = self._head.unpack_from(call)
        self._calls += 1
        self._work[code] += math.prod(sizes) * (width + values)
        dtype = self._names[code]
        if self._work[code] >= ENOUGH_WORK and dtype not in self.selection.times:
            if not self._lock.acquire(blocking=False):
                return  # another thread is at it
            try:
                if dtype not in self.selection.times:
                    self.selection.measure(dtype)
            finally:
                self._lock.release()
        library = self.selection.library
        if self._calls >= MOST_CALLS or len(self.selection.times) == len(DTYPE_CODES):
            if library.forward == self.forward:  # unless someone else stands there by now
                library.forward = self._forward
            if library.backward == self.backward:
                library.backward = self._backward


def mode() -> str:
    """The value of the environment variable :data:`MEASURE_VARIABLE`.

    Raises:
        ValueError: if it says something else than ``auto``, ``never`` or ``again``.
    """
    said = os.environ.get(MEASURE_VARIABLE) or "auto"
    if said not in ("auto", "never", "again"):
        raise ValueError(
            f"{MEASURE_VARIABLE} must be one of 'auto', 'never', 'again', got {said!r}"
        )
    return said


def install(library: Library) -> Selection:
    """Make the library use the instruction sets that were fastest when timed earlier.

    Dtypes without stored times are timed later, once they have run enough to make up for it. The
    environment variables :data:`MEASURE_VARIABLE` and ``ACUTANCE_CPU`` can forbid that.
    """
    how = mode()
    times = timing.read(library) if how == "auto" else None
    selection = Selection(library, times)
    if how != "never" and library.named is None and len(selection.times) < len(DTYPE_CODES):
        _Watch(selection)
    return selection
