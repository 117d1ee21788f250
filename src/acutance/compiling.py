"""Detect compilers, tracers, modes, `torch.func` or forward mode around a call.

Without any of these, kernels are called directly, past PyTorch's dispatcher. The same kernels run
under one level of :func:`torch.func.grad` (vjp, jacrev) and under :func:`torch.func.vmap`. Where
only PyTorch's own operations can be differentiated, whole rows are computed with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
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

_Function = TypeVar("_Function", bound=Callable[..., object])


def constant(function: _Function) -> _Function:
    """Mark a function whose result a compiled graph may treat as a constant.

    Sets the same mark as :func:`torch.compiler.assume_constant_result`, without importing
    ``torch._dynamo``, which would cost a program that compiles nothing over a second of CPU time.

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
        """A cached property that is recomputed while a compiler traces it.

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
    """Whether no compiler, tracer, mode or transform observes PyTorch's operations now."""
    return (
        not is_compiling()
        and _KNOWN
        and not _len_torch_dispatch_stack()
        and not _len_torch_function_stack()
        and maybe_current_level() is None
        and forward_ad._current_level < 0
        and _get_tracing_state() is None
    )


def ordinary(tensors: Iterable[Tensor | None]) -> bool:
    """Whether all tensors are plain dense tensors with memory, and no operators are observed.

    Modes of torch functions may be active, since they see no operators.

    Example:
        >>> ordinary([torch.zeros(2), None]), ordinary([torch.zeros(2, device="meta")])
        (True, False)
    """
    if (
        is_compiling()
        or not _KNOWN
        or _len_torch_dispatch_stack()
        or maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
    ):
        return False
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in (Tensor, torch.nn.Parameter)
            or tensor.layout is not torch.strided
            or tensor.is_meta
        ):
            return False
    return True


def transformed() -> bool:
    """Whether a transform of :mod:`torch.func`, or forward mode, is running."""
    return forward_ad._current_level >= 0 or bool(get_interpreter_stack())


def by_operations() -> bool:
    """Whether the derivatives in use need PyTorch's own operations and not the custom kernels.

    They do in forward mode, with nested :func:`torch.func.grad`, and with any :mod:`torch.func`
    transform inside a compiled function.
    """
    return transformed() and (is_compiling() or _forward_or_nested())


def _forward_or_nested() -> bool:
    levels = get_interpreter_stack()
    if forward_ad._current_level >= 0 or not levels:
        return forward_ad._current_level >= 0
    kinds = [level.key() for level in levels]
    return kinds.count(TransformType.Grad) > 1 or TransformType.Jvp in kinds


# A compiler cannot look into these: what they answer while it traces holds for what it traces.
for _each in (transformed, _forward_or_nested):
    constant(_each)
