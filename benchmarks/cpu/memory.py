"""Peak memory: each contender in a process of its own, which is this module run as a program."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.cpu.cases import Case
from benchmarks.cpu.contenders import CONTENDERS
from benchmarks.cpu.inputs import make_inputs
from benchmarks.cpu.passes import execute, make_upstream, ready
from benchmarks.cpu.records import case_from_dict

#: No contender's maps may take more than this, however much the machine has.
MEMORY_CAP = 6 << 30
WARM_LENGTH = 64
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def high_water(call: Callable[[], object]) -> int:
    """Bytes by which a call raises the peak resident size, its result included.

    Raises:
        OSError: if the system does not report it.
    """
    _trim()
    resettable = _resettable()
    before = _status("VmRSS") if resettable else _largest_so_far()
    if resettable:
        _reset_high_water()
    result = call()
    peak = _status("VmHWM") if resettable else _largest_so_far()
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
    raise OSError(f"peak memory cannot be measured: /proc/self/status has no {field_name}")


def _reset_high_water() -> None:
    """Reset the kernel's record of the peak resident size."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _largest_so_far() -> int:
    """The process's largest resident size, bytes."""
    if sys.platform == "win32":
        raise OSError("peak memory cannot be measured on Windows")
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


def weigh(case: Case, contender: str, *, threads: int) -> float:
    """MiB above the inputs at a contender's peak, measured in this process after a small call."""
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


def weigh_apart(case: Case, contender: str, *, threads: int) -> float:
    """:func:`weigh` in a fresh process.

    Raises:
        RuntimeError: if that process fails; the message ends with its last line.
    """
    job = json.dumps({"case": asdict(case), "contender": contender, "threads": threads})
    command = [sys.executable, "-m", __name__, job]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise RuntimeError(f"the memory of {contender} could not be measured: {last[0]}")
    return float(json.loads(done.stdout)["mib"])


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    case = case_from_dict(job["case"])
    print(json.dumps({"mib": weigh(case, job["contender"], threads=job["threads"])}))
