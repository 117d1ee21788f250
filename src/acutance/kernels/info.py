"""Which kernels run on this machine, and why: :func:`info`."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from acutance.kernels import dispatch, library
from acutance.kernels.bindings import Choice
from acutance.kernels.call import KernelCall, Rule
from acutance.kernels.selection.timing import cache_file
from acutance.masks import Masking

__all__ = ["KernelInfo", "info"]


@dataclass(frozen=True)
class KernelInfo:
    """The kernels of this process; printed, a few lines of text.

    Attributes:
        native: whether the native CPU kernels are loaded.
        why_not: in a sentence why they are not; None where they are.
        path: file of their library, or None.
        compiler: what built it, or None.
        cpu: instruction set of float32 with many queries, or None; ``ACUTANCE_CPU`` names another.
        cpus: instruction sets that this machine and build have, widest first.
        choices: the instruction set of each dtype and pass, with the times that decided.
        times_file: file that keeps those times, or None.
        most_queries: queries up to which the native kernel is faster than plain PyTorch; infinite
            if it always is.
        openmp: whether the threads are those of the OpenMP library that torch runs on.
        threads: how many a call uses, torch's own number.
        triton: why the Triton kernels cannot run, or None if they can.
        forced: backend that ``ACUTANCE_BACKEND`` names, or "auto".
        auto: backend that a call without dropout takes on the CPU.
    """

    native: bool
    why_not: str | None
    path: str | None
    compiler: str | None
    cpu: str | None
    cpus: tuple[str, ...]
    choices: tuple[Choice, ...]
    times_file: str | None
    most_queries: float
    openmp: bool
    threads: int
    triton: str | None
    forced: str
    auto: str

    def __str__(self) -> str:
        """A few lines, one fact each."""
        if self.native:
            others = ", ".join(name for name in self.cpus if name != self.cpu)
            kernel = f"{self.cpu} (also here: {others})" if others else str(self.cpu)
            built = f"{self.compiler}, {self.path}"
            pool = "of torch's OpenMP" if self.openmp else "of a separate OpenMP"
        else:
            kernel, built, pool = f"no: {self.why_not}", "-", "of torch"
        if self.forced != "auto":
            why = f"set by {dispatch.BACKEND_VARIABLE}"
        elif self.native:
            why = "the fastest available; blocked handles dropout and widths above 256"
            if self.most_queries < math.inf:
                why += f", and more than {self.most_queries:.0f} queries"
        else:
            why = "plain PyTorch, because the native kernel is absent"
        lines = {
            "native kernel": kernel,
            "built by": built,
            "threads": f"{self.threads}, {pool}",
            "triton": "yes" if self.triton is None else f"no: {self.triton}",
            "auto on the CPU": f"{self.auto}: {why}",
        }
        lines |= _chosen(self.choices)
        if any(choice.seconds for choice in self.choices):
            lines["times cached in"] = str(self.times_file)
        return "\n".join(f"{name:16} {text}" for name, text in lines.items())


def _chosen(choices: tuple[Choice, ...]) -> dict[str, str]:
    """A line for each dtype: the instruction set of each pass, and the measured times."""
    lines = {}
    for dtype in dict.fromkeys(choice.dtype for choice in choices):
        parts = []
        for choice in choices:
            if choice.dtype == dtype:
                times = ", ".join(
                    f"{name} {1e6 * seconds:.0f} µs" for name, seconds in choice.seconds.items()
                )
                parts.append(f"{choice.name} {choice.cpu} ({times or 'not timed'})")
        lines[dtype] = "; ".join(parts)
    return lines


def info() -> KernelInfo:
    """Which kernels are available, which one a call uses, and why.

    Kernels that were not timed yet on this machine are timed now, in less than 0.1 s, unless
    ``ACUTANCE_CPU`` or ``ACUTANCE_MEASURE=never`` says what runs.

    Returns:
        The record; its text is for reading.

    Raises:
        ValueError: if ``ACUTANCE_CPU``, ``ACUTANCE_BACKEND`` or ``ACUTANCE_MEASURE`` has an unknown
            value.

    Example:
        >>> info().auto in ("native", "blocked")
        True
    """
    found = library.load()
    here = not isinstance(found, str)
    query = torch.empty(1, 1, 1, 1)
    masking = Masking(batch=1, heads=1, group=1, queries=1, keys=1)
    chosen = None if isinstance(found, str) else found.selection
    if chosen is not None:
        chosen.complete()
    return KernelInfo(
        native=here,
        why_not=None if here else str(found),
        path=None if isinstance(found, str) else str(found.path),
        compiler=None if isinstance(found, str) else found.compiler,
        cpu=None if chosen is None else chosen.choice("float32", "forward").cpu,
        cpus=() if isinstance(found, str) else found.cpus,
        choices=() if chosen is None else chosen.choices(),
        times_file=None if isinstance(found, str) else _text(cache_file(found)),
        most_queries=math.inf if isinstance(found, str) else found.most_queries,
        openmp=not isinstance(found, str) and found.openmp is not None,
        threads=torch.get_num_threads(),
        triton=_why_no_triton(),
        forced=dispatch.forced(),
        auto=dispatch.choose("auto", KernelCall(query, query, query, masking, Rule(1.0))),
    )


def _text(path: Path | None) -> str | None:
    """A path as text; None for None."""
    return None if path is None else str(path)


def _why_no_triton() -> str | None:
    """Why the Triton kernels cannot run; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None
