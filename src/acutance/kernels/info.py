"""Which kernels run on this machine, and why: :func:`info`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from acutance.kernels import dispatch, library
from acutance.kernels.call import KernelCall
from acutance.kernels.library import CPU_VARIABLE, Library
from acutance.kernels.native import DTYPES
from acutance.masks import Masking


@dataclass(frozen=True)
class KernelInfo:
    """The kernels of this process; printed, a few lines of text.

    Attributes:
        native: whether the native CPU kernels are loaded.
        why_not: in a sentence why they are not; None where they are.
        path: file of their library, or None.
        compiler: what built it, or None.
        cpu: instruction set that it uses, or None; ``ACUTANCE_CPU`` names another.
        cpus: instruction sets that this machine and build have, widest first.
        dtypes: what computes each dtype on the CPU, and why.
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
    dtypes: dict[str, str]
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
            why = "every call that it supports; plain PyTorch for dropout and widths above 256"
        else:
            why = "plain PyTorch, because the native kernel is absent"
        lines = {
            "native kernel": kernel,
            "built by": built,
            "threads": f"{self.threads}, {pool}",
            "triton": "yes" if self.triton is None else f"no: {self.triton}",
            "auto on the CPU": f"{self.auto}: {why}",
            **self.dtypes,
        }
        return "\n".join(f"{name:16} {text}" for name, text in lines.items())


def _used(found: Library | str, auto: str, dtype: torch.dtype) -> str:
    """What computes a dtype on the CPU, and why."""
    if auto != "native" or isinstance(found, str):
        return auto
    used = f"native, {found.cpu}"
    if found.named is not None:
        return f"{used}: set by {CPU_VARIABLE}"
    if dtype != torch.bfloat16 or "avx512_bf16" not in found.cpus:
        return f"{used}: the widest here for this dtype"
    if found.cpu == "avx512_bf16":
        return f"{used}: multiplies pairs, at twice float32's rate on this processor"
    return f"{used}: avx512_bf16 is not known to be faster on this processor"


def info() -> KernelInfo:
    """Which kernels are available, which one a call uses, and why.

    Returns:
        The record; its text is for reading.

    Raises:
        ValueError: if ``ACUTANCE_CPU`` or ``ACUTANCE_BACKEND`` has an unknown value.

    Example:
        >>> info().auto in ("native", "blocked")
        True
    """
    found = library.load()
    here = not isinstance(found, str)
    query = torch.empty(1, 1, 1, 1)
    masking = Masking(batch=1, heads=1, group=1, queries=1, keys=1)
    auto = dispatch.choose(KernelCall(query, query, query, masking, scale=1.0))
    return KernelInfo(
        native=here,
        why_not=None if here else str(found),
        path=None if isinstance(found, str) else str(found.path),
        compiler=None if isinstance(found, str) else found.compiler,
        cpu=None if isinstance(found, str) else found.cpu,
        cpus=() if isinstance(found, str) else found.cpus,
        dtypes={str(dtype)[6:]: _used(found, auto, dtype) for dtype in DTYPES},
        openmp=not isinstance(found, str) and found.openmp is not None,
        threads=torch.get_num_threads(),
        triton=_why_no_triton(),
        forced=dispatch.forced(),
        auto=auto,
    )


def _why_no_triton() -> str | None:
    """Why the Triton kernels cannot run; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None
