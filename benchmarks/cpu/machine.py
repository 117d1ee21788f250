"""The machine: its description, and the rates that a floor is computed from."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from acutance.comparison.timing import cpu_seconds
from acutance.kernels import info, library
from benchmarks.cpu.memory import memory_method
from benchmarks.cpu.records import Environment, Peak

#: Sizes of square matrices, and channels, height and kernel of convolutions.
_SQUARES = (512, 1024)
_CONVOLUTIONS = ((256, 28, 3), (128, 56, 3))
_TRIES = 4
_OFTEN = 100
#: Dtypes worth a look: float16 is multiplied in float32 where a processor has no better way.
PEAK_DTYPES = ("float32", "bfloat16")
_EXPS = (1 << 13, 3 << 13)  # below what malloc takes from the system each time


def describe() -> Environment:
    """The versions and the machine, now."""
    try:
        version = importlib.metadata.version("acutance")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    kernels = info()
    return Environment(
        acutance=version,
        torch=torch.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        processor=processor(),
        cores=os.cpu_count() or 1,
        cpu=kernels.cpu or "",
        compiler=kernels.compiler or f"none: {kernels.why_not}",
        memory_method=memory_method(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        load=_load(),
        torch_cpu=torch.backends.cpu.get_cpu_capability(),
    )


def measure_peak(threads: int, dtypes: Iterable[str]) -> Peak:
    """The fastest of some products and convolutions, and exponentials, with so many threads.

    Torch's matrix product alone does not reach a processor's peak where MKL is not at its best;
    its convolutions, by oneDNN, come closer. A second or two.

    Args:
        threads: torch uses as many for the products; exponentials are one thread's, times this.
        dtypes: names of the dtypes that cases have.
    """
    dtypes = [name for name in PEAK_DTYPES if name in {*dtypes, "float32"}]
    former = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            gflops = {name: _products(getattr(torch, name), threads) for name in dtypes}
            return Peak(threads, gflops, threads * _exponentials() / 1e9)
    finally:
        torch.set_num_threads(former)


def _products(dtype: torch.dtype, threads: int) -> float:
    found = []
    for n in _SQUARES:
        left, right = torch.randn(2, n, n).to(dtype)
        seconds = _shortest(partial(torch.mm, left, right), threads)
        found.append(2e-9 * n**3 / seconds)
    for channels, size, kernel in _CONVOLUTIONS:
        image = torch.randn(threads, channels, size, size).to(dtype)
        weight = torch.randn(channels, channels, kernel, kernel).to(dtype)
        image, weight = (t.to(memory_format=torch.channels_last) for t in (image, weight))
        products = threads * (channels * kernel * size) ** 2
        convolve = partial(F.conv2d, image, weight, padding=kernel // 2)
        seconds = _shortest(convolve, threads)
        found.append(2e-9 * products / seconds)
    return max(found)


def _exponentials() -> float:
    """Exponentials a second of one thread, the fastest found: torch's or the native kernel's.

    The difference of two sizes, so that what a call costs by itself does not count.
    """
    found = library.load()
    ways: list[Callable[[torch.Tensor], object]] = [torch.exp2]
    if not isinstance(found, str):
        ways.append(found.exp)
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sizes = [-torch.rand(size) for size in _EXPS]
        return max((_EXPS[1] - _EXPS[0]) / _slope(way, sizes) for way in ways)
    finally:
        torch.set_num_threads(former)


def _slope(way: Callable[[torch.Tensor], object], sizes: list[torch.Tensor]) -> float:
    """By how many seconds the second size takes longer than the first."""

    def often(numbers: torch.Tensor) -> None:
        for _ in range(_OFTEN):
            way(numbers)

    few, many = (_shortest(partial(often, numbers), 1) / _OFTEN for numbers in sizes)
    return max(many - few, 1e-9)


def _shortest(call: Callable[[], object], threads: int) -> float:
    """Seconds of the fastest of some tries: CPU time with one thread, wall time with more."""
    clock = cpu_seconds if threads == 1 else time.perf_counter
    call()
    taken = []
    for _ in range(_TRIES):
        begin = clock()
        call()
        taken.append(clock() - begin)
    return max(min(taken), 1e-9)


def processor() -> str:
    """Model name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux, where platform knows what there is to know
    return platform.processor() or "unknown"


def _load() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None
