"""How tensors were computed from matrix products, to recompute them without the products."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "Fixed",
    "LineageError",
    "Node",
    "Version",
    "compose_views",
    "recompute",
    "storage_address",
    "shares_memory",
    "as_view",
    "write_through",
]


class LineageError(ValueError):
    """Raised for scores whose computation cannot be repeated."""


Call: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]
Version: TypeAlias = tuple[int, int]
View: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Node:
    """How a tensor was computed from matrix products and other tensors.

    Attributes:
        func: the function that computed it.
        args: its arguments; tensors are replaced by :class:`Node` or :class:`Fixed`.
        kwargs: its keyword arguments, likewise.
        writes: whether the function writes to its first argument.
        part: index among the function's results; None for a single result.
        broken: why it cannot be recomputed; empty if it can.
        narrow: of the dtypes on the way, the one with the highest mask value.
        active: whether it depends on a product of two tensors that both depend on the input.
        shift: whether it has one value for all keys of a row, such as the largest score.
        weights: whether it was computed from the result of a softmax.
        log: whether its exponential is the result of a softmax.
        calls: the products it depends on: name and arguments.
        bases: the tensors that it is a view of, and how to view each.
        steps: number of functions in sequence that computed it.
        saved_bytes: size of the tensors kept alive to recompute it.
    """

    func: Callable[..., Any]
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    writes: bool = False
    part: int | None = None
    broken: str = ""
    narrow: torch.dtype = torch.float32
    active: bool = False
    shift: bool = False
    weights: bool = False
    log: bool = False
    calls: tuple[Call, ...] = ()
    bases: tuple[tuple[weakref.ref[Tensor], View], ...] = ()
    steps: int = 1
    saved_bytes: int = 0


class Fixed:
    """A tensor that depends on no product, and its version when it was recorded."""

    def __init__(self, tensor: Tensor, version: Version) -> None:
        self.tensor, self.version = tensor, version


def recompute(node: Node, results: dict[int, Any], version: Callable[[Tensor], Version]) -> Any:
    """Recompute a tensor with its products set to zero; each node is computed once."""
    if id(node) in results:
        return results[id(node)][0]
    if node.broken:
        raise LineageError(f"its scores {node.broken}")
    args = [_value(argument, results, version) for argument in node.args]
    kwargs = {name: _value(argument, results, version) for name, argument in node.kwargs.items()}
    if node.writes:
        args[0] = args[0].clone()  # others may have been made of it before
    result = node.func(*args, **kwargs)
    if node.writes:
        result = args[0]
    elif node.part is not None:
        result = result[node.part]
    results[id(node)] = (result, node)
    return result


def _value(argument: Any, results: dict[int, Any], version: Callable[[Tensor], Version]) -> Any:
    """Value of a recorded argument: recomputed, or the fixed tensor."""
    if isinstance(argument, Node):
        return recompute(argument, results, version)
    if isinstance(argument, Fixed):
        if argument.version != version(argument.tensor):
            raise LineageError("a tensor that its scores depend on was overwritten")
        return argument.tensor
    if isinstance(argument, dict):
        return {name: _value(part, results, version) for name, part in argument.items()}
    if isinstance(argument, list | tuple) and not hasattr(argument, "_fields"):
        return type(argument)(_value(part, results, version) for part in argument)
    return argument


def as_view(node: Node, other_args: Sequence[Any], kwargs: Mapping[str, Any]) -> View:
    """A function that repeats how ``node`` views its first argument."""
    func, part, named = node.func, node.part, dict(kwargs)

    def view(base: Tensor) -> Tensor:
        result = func(base, *other_args, **named)
        viewed: Tensor = result if part is None else result[part]
        if not shares_memory(viewed, base):
            raise LineageError("its scores were written to through a view")
        return viewed

    return view


def compose_views(first: View, then: View) -> View:
    """A view of a view: first ``first``, then ``then``."""
    return lambda base: then(first(base))


def write_through(view: View, base: Tensor, value: Tensor) -> None:
    """Write ``value`` to a view of ``base``."""
    view(base).copy_(value)


def storage_address(tensor: Tensor) -> int:
    """Address of a tensor's storage, which its views share; 0 if it has no accessible storage."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def shares_memory(view: Any, base: Tensor) -> bool:
    """Whether two tensors share the same storage."""
    return isinstance(view, Tensor) and storage_address(view) == storage_address(base) != 0
