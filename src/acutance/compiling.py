"""What acutance tells PyTorch's compiler, without loading it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from torch.compiler import is_compiling

__all__ = ["constant", "traceable_property"]

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
