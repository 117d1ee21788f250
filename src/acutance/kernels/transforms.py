"""Which transforms of functions are running: `torch.func`, forward-mode automatic differentiation.

The operators of :mod:`acutance.kernels.ops` answer to plain autograd and to compilers. Under one
level of :func:`torch.func.grad` (vjp, jacrev) and under :func:`torch.func.vmap` the same kernels
are called; what only PyTorch's own operations can differentiate is computed by whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

__all__ = ["by_operations", "transformed", "vmapped"]


def _levels() -> list[Any]:
    """The kinds of transforms of :mod:`torch.func` that are running, outermost first."""
    return [level.key() for level in get_interpreter_stack() or ()]


def transformed() -> bool:
    """Whether a transform of :mod:`torch.func`, or forward mode, is running."""
    return forward_ad._current_level >= 0 or bool(_levels())


def by_operations() -> bool:
    """Whether only PyTorch's own operations have the derivative that is being taken.

    Those are forward mode, more than one level of :func:`torch.func.grad`, and all of
    :mod:`torch.func` inside of a compiled function.
    """
    return _forward_or_nested() or (is_compiling() and transformed())


def _forward_or_nested() -> bool:
    kinds = _levels()
    several = forward_ad._current_level >= 0 or kinds.count(TransformType.Grad) > 1
    return several or TransformType.Jvp in kinds


# A compiler cannot look into these: what they answer while it traces holds for what it traces.
for _each in (transformed, _forward_or_nested):
    _each._dynamo_marked_constant = True  # type: ignore[attr-defined]


def vmapped(
    call: Callable[..., Sequence[Tensor]],
    size: int,
    in_dims: Sequence[Any],
    arguments: Sequence[Any],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """A function's results for each slice of the mapped dimension, stacked along a new first one.

    Args:
        call: of one slice.
        size: of the mapped dimension.
        in_dims: where it is in each argument; None where it is not.
        arguments: the function's.
    """
    each = [
        part.unbind(dim) if isinstance(dim, int) else [part] * size
        for part, dim in zip(arguments, in_dims, strict=True)
    ]
    found = [call(*slices) for slices in zip(*each, strict=True)]
    results = tuple(torch.stack(parts) for parts in zip(*found, strict=True))
    return results, (0,) * len(results)
