"""Time and memory: turns, medians of ratios, and a process of its own for each peak.

:func:`main` is what that process runs; it prints one JSON object.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from acutance.bench.cases import Case
from acutance.bench.records import case_from_dict

MIB = 1 << 20
#: No contender's maps may take more than this, however much the machine has.
MEMORY_CAP = 6 << 30
#: A call shorter than this is repeated and averaged, seconds.
SHORTEST = 0.02
MOST_REPEATS = 5000
WARM_LENGTH = 64

Call = Callable[[], object]
#: Prepares a turn, untimed, and gives the call that is timed.
Job = Callable[[], AbstractContextManager[Call]]


class Taken(NamedTuple):
    """Seconds per call of one contender in one round."""

    wall: float
    cpu: float


def turns(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round, reversed every other one, so that nobody always follows the same.

    Example:
        >>> list(turns(["a", "b", "c"], 3))
        [['a', 'b', 'c'], ['c', 'b', 'a'], ['a', 'b', 'c']]
    """
    for index in range(rounds):
        yield list(names) if index % 2 == 0 else list(reversed(names))


def timed(call: Call, repeats: int = 1) -> Taken:
    """Wall and process CPU seconds of one call, the mean of ``repeats``."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Taken(wall / repeats, cpu / repeats)


def warm_up(jobs: Mapping[str, Job]) -> dict[str, int]:
    """Call each twice; returns how often each is repeated so that a measurement is long enough."""
    repeats = {}
    for name, job in jobs.items():
        with job() as call:
            first = timed(call).wall
            again = first if first > 50 * SHORTEST else timed(call).wall
            if again < SHORTEST / 50:  # so short that one call says little
                again = timed(call, 20).wall
        repeats[name] = max(1, min(MOST_REPEATS, math.ceil(SHORTEST / max(again, 1e-9))))
    return repeats


def take_turns(
    jobs: Mapping[str, Job], rounds: int, repeats: Mapping[str, int]
) -> Iterator[dict[str, Taken]]:
    """Time calls in turns; yields each round when it is whole."""
    for order in turns(list(jobs), rounds):
        taken = {}
        for name in order:
            with jobs[name]() as call:
                taken[name] = timed(call, repeats[name])
        yield taken


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping, or None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: sysconf may say
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def no_room(needed: int) -> str | None:
    """Why maps of so many bytes cannot be made here, or None if they can."""
    available = available_memory()
    limit = MEMORY_CAP if available is None else min(MEMORY_CAP, available)
    if needed <= limit:
        return None
    return f"needs {needed / 2**30:.1f} GiB, limit {limit / 2**30:.1f} GiB"


# -- memory ---------------------------------------------------------------------------------------


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


def _trim() -> None:
    """Give freed heap back, so that what is allocated next shows; only glibc can."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def high_water(call: Call) -> int:
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


def weigh(case: Case, contender: str, *, threads: int) -> float:
    """MiB above the inputs at a contender's peak, measured in this process after a small call."""
    import torch

    from acutance.bench.contenders import CONTENDERS
    from acutance.bench.inputs import make_inputs
    from acutance.bench.passes import execute, make_upstream, ready

    torch.set_num_threads(threads)
    entry = CONTENDERS[contender]
    small = replace(case, queries=min(case.queries, WARM_LENGTH), keys=min(case.keys, WARM_LENGTH))
    for each in (small, case):
        inputs = make_inputs(each)
        upstream = make_upstream(inputs) if case.backward else None
        if each is small:
            execute(entry, inputs, upstream)
    if upstream is not None:  # of a backward pass, the forward pass that it needs too
        return high_water(lambda: execute(entry, inputs, upstream)) / MIB
    with ready(entry, inputs) as call:  # what it leaves unread stays so
        return high_water(call) / MIB


#: The program of a process of its own. ``python -m`` and ``-c`` look for modules in the current
#: directory first, so a ``json.py`` there would run; Python 3.10 has no option ``-P`` against it.
_APART = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; "
    "from acutance.bench.measure import main; main(sys.argv[2:])"
)


def weigh_apart(case: Case, contender: str, *, threads: int) -> float:
    """:func:`weigh` in a fresh process.

    Raises:
        RuntimeError: if that process fails; the message ends with its last line.
    """
    job = {"case": asdict(case), "contender": contender, "threads": threads}
    package = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", _APART, package, json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise RuntimeError(f"the memory of {contender} could not be measured: {last[0]}")
    return float(json.loads(done.stdout)["mib"])


def main(arguments: Sequence[str]) -> None:
    """Weigh the one job described by the JSON in the first argument."""
    job: dict[str, Any] = json.loads(arguments[0])
    case = case_from_dict(job.pop("case"))
    print(json.dumps({"mib": weigh(case, job.pop("contender"), **job)}))
