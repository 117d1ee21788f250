"""What acutance tells PyTorch's compiler, without loading it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["constant"]

_Function = TypeVar("_Function", bound=Callable[..., object])


def constant(function: _Function) -> _Function:
    """Mark a function whose result a compiled graph may hold as a constant.

    The mark is the one that :func:`torch.compiler.assume_constant_result` sets, which imports
    ``torch._dynamo`` for it: more than a second of CPU for a program that compiles nothing.

    Example:
        >>> @constant
        ... def width() -> int:
        ...     return 64
        >>> width()
        64
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
