"""Times of the native kernels: one pass on a small call, and the results cached on disk.

Native calls are made here outside of PyTorch, so that no mode, tracer or fake tensor sees them.
They stay in a core's cache, and run on one thread.

The cache is one small file for each processor, library and version of torch. A file that is
damaged, unreadable or of another machine is ignored, and one that cannot be written is not written.
Processes that measure at the same time each replace the whole file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from acutance.kernels import blocked
from acutance.kernels.bindings import ABI, CALL, GRADIENTS, SUMS, Library
from acutance.kernels.call import KernelCall, Rule
from acutance.masks import Masking

__all__ = [
    "CACHE_VARIABLE",
    "DTYPE_CODES",
    "PASSES",
    "Sample",
    "Times",
    "blocked_timer",
    "cache_file",
    "cpu_seconds",
    "read",
    "sample",
    "seconds",
    "write",
]


#: The passes that are chosen for, in the order of their numbers in ``cpu/api.h``.
PASSES = ("forward", "decode", "backward")
#: Numbers of the dtypes in ``cpu/api.h``.
DTYPE_CODES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
_WIDTH = 64
#: CPU time of this thread; on Windows, whose CPU clock is too coarse, wall time.
_clock = time.perf_counter if sys.platform == "win32" else time.thread_time


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


@dataclass(frozen=True)
class Sample:
    """A call of the native library for timing, packed, with the tensors it reads and writes."""

    call: bytes
    result: bytes
    memory: tuple[NDArray[np.generic], ...]


def _numbers(dtype: str, rows: int) -> NDArray[np.generic]:
    """Random numbers (rows, width) in the memory layout of a dtype."""
    values = np.random.default_rng(0).standard_normal((rows, _WIDTH), dtype=np.float32)
    if dtype == "bfloat16":  # the upper half of a float
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def sample(dtype: str, name: str, queries: int, keys: int) -> Sample:
    """A call of one head, its queries, keys and values of width 64."""
    memory = [_numbers(dtype, size) for size in (queries, keys, keys)]
    stride = (_WIDTH * keys, _WIDTH * keys, _WIDTH)
    q, k, v = (part.ctypes.data for part in memory)
    call = CALL.pack(
        abi=ABI, dtype=DTYPE_CODES[dtype], batch=1, heads=1, group=1, queries=queries, keys=keys,
        width=_WIDTH, value_width=_WIDTH, query=q, key=k, value=v, query_stride=stride,
        key_stride=stride, value_stride=stride, scale=_WIDTH**-0.5, threads=1,
    )  # fmt: skip
    wide = np.float64 if dtype == "float64" else np.float32

    def row(value: float = 0.0, *extra: int) -> int:
        memory.append(np.full((queries, *extra), value, dtype=wide))
        return memory[-1].ctypes.data

    def index() -> int:
        memory.append(np.zeros(queries, dtype=np.int64))
        return memory[-1].ctypes.data

    if name == "backward":
        memory.append(_numbers(dtype, queries))
        places = {part: row() for part in ("m", "constant", "linear")}
        gradients = {part: row(0.0, _WIDTH) for part in ("query",)}
        for part in ("key", "value"):
            memory.append(np.zeros((keys, _WIDTH), dtype=wide))
            gradients[part] = memory[-1].ctypes.data
        result = GRADIENTS.pack(
            **places, **gradients, inverse=row(1.0 / keys), first_index=index(),
            grad_out=memory[3].ctypes.data, grad_out_stride=stride,
        )  # fmt: skip
    else:
        memory.append(np.zeros((queries, _WIDTH), dtype=memory[0].dtype))
        places = {part: row() for part in ("m", "Z", "U", "W", "Q", "mean", "M2", "depth", "first")}
        result = SUMS.pack(
            **places, out=memory[3].ctypes.data, out_stride=stride, n=index(), first_index=index()
        )
    return Sample(call, result, tuple(memory))


def seconds(library: Library, kernel: str, name: str, call: Sample) -> Callable[[], float]:
    """A function that runs a call once and returns how many seconds that took.

    Args:
        library: the native library.
        kernel: name of the instruction set, one of ``library.cpus``.
        name: name of the pass, one of :data:`PASSES`.
        call: the call, from :func:`sample`.
    """
    place, code, run = library.cpus.index(kernel), PASSES.index(name), library.run

    def once() -> float:
        start = _clock()
        run(place, code, call.call, call.result)
        return _clock() - start

    return once


def blocked_timer(queries: int, keys: int) -> Callable[[], float]:
    """A function that runs the plain PyTorch kernel on one float32 head; it returns CPU seconds."""
    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(1, 1, rows, _WIDTH, generator=generator, dtype=torch.float32, device=device)
        for rows in (queries, keys)
    )
    masking = Masking(batch=1, heads=1, group=1, queries=queries, keys=keys, device=device)
    call = KernelCall(query, key, key, masking, Rule(scale=_WIDTH**-0.5))

    def once() -> float:
        start = cpu_seconds()
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            blocked.forward(call)
        return cpu_seconds() - start

    return once


#: Environment variable that names the folder of measured times.
CACHE_VARIABLE = "ACUTANCE_CACHE"
SCHEMA = "acutance.kernel-times/1"
_MOST_BYTES = 65536

#: Seconds that a pass of a dtype took, by instruction set: {dtype: {pass: {name: seconds}}}.
Times = dict[str, dict[str, dict[str, float]]]


@cache
def processor_id() -> str:
    """A string that identifies the CPU model, ignoring its microcode version."""
    lines = [platform.machine(), platform.version(), os.environ.get("PROCESSOR_IDENTIFIER", "")]
    with suppress(OSError, UnicodeError), open("/proc/cpuinfo", encoding="utf-8") as stream:
        first = stream.read(8192).partition("\n\n")[0].splitlines()
        named = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU", "Features")
        lines += [line for line in first if line.startswith(named)]
    return "\n".join(lines)


def _identity(library: Library) -> dict[str, str]:
    """What stored times belong to: processor, library build and torch version."""
    built = library.path.stat()
    return {
        "processor": hashlib.sha256(processor_id().encode()).hexdigest(),
        "library": f"{library.compiler}, {' '.join(library.cpus)}, {built.st_size} bytes,"
        f" {built.st_mtime_ns}",
        "torch": torch.__version__,
    }


def _folder() -> Path:
    """The user's cache folder, or the folder in the environment variable :data:`CACHE_VARIABLE`."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "acutance"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "acutance"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "acutance"


def cache_file(library: Library) -> Path | None:
    """Path of the times of this machine and build; None if there is no home directory.

    The name depends on the machine, as several may share a home directory.
    """
    try:
        identity = json.dumps(_identity(library), sort_keys=True)
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return _folder() / f"kernels-{name}.json"
    except (OSError, RuntimeError):
        return None


def read(library: Library) -> Times | None:
    """The cached times for this machine and build, or None."""
    path = cache_file(library)
    if path is None:
        return None
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        record = json.loads(path.read_bytes())
        if record["schema"] != SCHEMA or record["of"] != _identity(library):
            return None
        return _checked(record["seconds"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _checked(seconds: Any) -> Times:
    """Check that data from a cache file has the form of :data:`Times`, and return it.

    Raises:
        ValueError: if it has another form.
    """
    times: Times = {}
    for dtype, passes in seconds.items():
        for name, kernels in passes.items():
            for kernel, number in kernels.items():
                if type(number) is not float or not 0.0 < number < math.inf:
                    raise ValueError(f"no time: {number!r}")
                times.setdefault(dtype, {}).setdefault(name, {})[kernel] = number
    return times


def write(library: Library, times: Times) -> None:
    """Cache the times; errors are ignored."""
    path = cache_file(library)
    if path is None:
        return
    text = json.dumps({"schema": SCHEMA, "of": _identity(library), "seconds": times}, indent=1)
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(part, path)
    except OSError:
        if part is not None:
            with suppress(OSError):
                os.unlink(part)
