"""Whether a compiler, tracer or mode watches, and marks for PyTorch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from torch.autograd import forward_ad
from torch.compiler import is_compiling

try:
    from torch._C import (
        _get_tracing_state,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
    from torch._C._functorch import maybe_current_level

    _KNOWN = forward_ad._current_level is not None
except (ImportError, AttributeError):  # a torch that keeps its modes elsewhere
    _KNOWN = False

__all__ = ["constant", "traceable_property", "undispatched", "unobserved"]

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


if TYPE_CHECKING:
    traceable_property = cached_property
else:

    class _Traceable(cached_property):
        """A cached property, computed anew wherever a compiler traces it.

        Python 3.11 and older take a lock to cache, which ends the graph of ``torch.compile``, and
        inside of :func:`torch.func.grad` no graph may end.

        Example:
            >>> class Square:
            ...     side = 3
            ...
            ...     @traceable_property
            ...     def area(self) -> int:
            ...         return self.side**2
            >>> Square().area
            9
        """

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is not None and is_compiling():
                return self.func(instance)
            return super().__get__(instance, owner)

    traceable_property = _Traceable


def unobserved() -> bool:
    """Whether no compiler, tracer, mode or transform sees what PyTorch does."""
    return undispatched() and not _len_torch_function_stack()


def undispatched() -> bool:
    """The same but for modes of functions, which see what Python calls, not operators."""
    return (
        not is_compiling()
        and _KNOWN
        and not _len_torch_dispatch_stack()
        and maybe_current_level() is None
        and forward_ad._current_level < 0
        and _get_tracing_state() is None
    )
