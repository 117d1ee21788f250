"""Times one pass of one native kernel on a small call, and of the plain PyTorch kernel.

Native calls are made here outside of PyTorch, so that no mode, tracer or fake tensor sees them.
They stay in a core's cache, and run on one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from acutance.kernels import blocked
from acutance.kernels.bindings import ABI, CALL, GRADIENTS, SUMS, Library
from acutance.kernels.call import KernelCall, Rule
from acutance.masks import Masking

__all__ = ["DTYPE_CODES", "PASSES", "Sample", "blocked_timer", "sample", "seconds"]

#: The passes that are chosen for, in the order of their numbers in ``cpu/api.h``.
PASSES = ("forward", "decode", "backward")
#: Numbers of the dtypes in ``cpu/api.h``.
DTYPE_CODES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
_WIDTH = 64
#: Time of this thread alone, where it is told finely enough.
_clock = time.perf_counter if sys.platform == "win32" else time.thread_time


@dataclass(frozen=True)
class Sample:
    """One call, packed, with the memory that it reads and writes."""

    call: bytes
    result: bytes
    memory: tuple[NDArray[np.generic], ...]


def _numbers(dtype: str, rows: int) -> NDArray[np.generic]:
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


def seconds(library: Library, kernel: str, name: str, made: Sample) -> Callable[[], float]:
    """A function that runs the sample once by one kernel and returns how long that took."""
    place, code, run = library.cpus.index(kernel), PASSES.index(name), library.run

    def once() -> float:
        start = _clock()
        run(place, code, made.call, made.result)
        return _clock() - start

    return once


def blocked_timer(queries: int, keys: int) -> Callable[[], float]:
    """A function that runs the blocked path on one float32 head and returns its CPU seconds."""
    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(1, 1, rows, _WIDTH, generator=generator, dtype=torch.float32, device=device)
        for rows in (queries, keys)
    )
    masking = Masking(batch=1, heads=1, group=1, queries=queries, keys=keys, device=device)
    call = KernelCall(query, key, key, masking, Rule(scale=_WIDTH**-0.5))

    def once() -> float:
        start = time.process_time()
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            blocked.forward(call)
        return time.process_time() - start

    return once
