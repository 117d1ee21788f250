"""What a call costs: its time, and the peak of resident memory while it runs."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["MIB", "Seconds", "high_water", "memory_method", "timed"]

MIB = 1 << 20


class Seconds(NamedTuple):
    """Wall and process CPU seconds of a call."""

    wall: float
    cpu: float


def timed(call: Callable[[], object], repeats: int = 1) -> Seconds:
    """Wall and process CPU seconds of one call, the mean of ``repeats``."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Seconds(wall / repeats, cpu / repeats)


def high_water(call: Callable[[], object]) -> int:
    """Bytes by which a call raises the resident size at its peak, its result included.

    Raises:
        OSError: where the system has no such number.
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
    """How peak memory is read on this system."""
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
    raise OSError(f"/proc/self/status has no {field_name}")


def _reset_high_water() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _largest_so_far() -> int:
    """The process's largest resident size, bytes."""
    if sys.platform == "win32":
        raise OSError("no peak memory on this system")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resettable() -> bool:
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
