"""Triton where it is installed; without it the kernels' modules can still be imported."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch's CPU wheels come without it
    triton = tl = None

__all__ = ["constant", "interpreted", "jit", "tl", "triton", "why_unavailable"]

#: Kernels are given their flags as named tuples, which earlier releases do not compile.
OLDEST = (3, 4)


#: Sizes that change from call to call, as in decoding: a kernel is not compiled again for each.
_SIZES = ("queries", "keys", "offset", "window", "count")


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, or the function as it is where Triton is missing."""
    if triton is None:
        return function
    changing = [name for name in _SIZES if name in inspect.signature(function).parameters]
    return triton.jit(function, do_not_specialize=changing)


def constant(value: float) -> Any:
    """A ``tl.constexpr`` of a number, so that kernels may read it as a global of their module."""
    return value if triton is None else tl.constexpr(value)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def why_unavailable() -> str | None:
    """Why no kernel of this package can run in this process, or None if they can."""
    if triton is None:
        return "triton is not installed"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST:
        return f"triton {triton.__version__} is older than {OLDEST[0]}.{OLDEST[1]}"
    return None
