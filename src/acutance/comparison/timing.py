"""Wall and CPU time of a call."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple


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
