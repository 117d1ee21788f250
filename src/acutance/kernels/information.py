"""What runs here, and why: :func:`info`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from acutance.kernels import dispatch, library

__all__ = ["KernelInfo", "info"]


@dataclass(frozen=True)
class KernelInfo:
    """The kernels of this process; printed, a few lines of text.

    Attributes:
        native: whether the native CPU kernels are loaded.
        why_not: in a sentence why they are not; None where they are.
        path: file of their library, or None.
        compiler: what built it, or None.
        cpu: instruction set in use, or None; ``ACUTANCE_CPU`` names another one.
        cpus: instruction sets that this machine and build have, best first.
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
            pool = "of torch's OpenMP" if self.openmp else "of its own"
        else:
            kernel, built, pool = f"no: {self.why_not}", "-", "of torch"
        if self.forced != "auto":
            why = f"{dispatch.BACKEND_VARIABLE} says so"
        elif self.native:
            why = "the fastest there is; blocked takes dropout and widths above 256"
            if self.cpu == "baseline":
                why += f", and more than {dispatch.MOST_QUERIES_OF_BASELINE} queries"
        else:
            why = "plain PyTorch, the native kernel being absent"
        lines = {
            "native kernel": kernel,
            "built by": built,
            "threads": f"{self.threads}, {pool}",
            "triton": "yes" if self.triton is None else f"no: {self.triton}",
            "auto on the CPU": f"{self.auto}: {why}",
        }
        return "\n".join(f"{name:16} {text}" for name, text in lines.items())


def info() -> KernelInfo:
    """Which kernels are there, which one a call takes, and why.

    Returns:
        The record; its text is for reading.

    Raises:
        ValueError: if ``ACUTANCE_CPU`` or ``ACUTANCE_BACKEND`` names what there is not.

    Example:
        >>> info().auto in ("native", "blocked")
        True
    """
    found = library.load()
    here = not isinstance(found, str)
    query = torch.empty(1, 1, 1, 1)
    return KernelInfo(
        native=here,
        why_not=None if here else str(found),
        path=None if isinstance(found, str) else str(found.path),
        compiler=None if isinstance(found, str) else found.compiler,
        cpu=None if isinstance(found, str) else found.cpu,
        cpus=() if isinstance(found, str) else found.cpus,
        openmp=not isinstance(found, str) and found.openmp is not None,
        threads=torch.get_num_threads(),
        triton=_why_no_triton(),
        forced=dispatch.forced(),
        auto=dispatch.choose("auto", query, query, 0.0),
    )


def _why_no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None
