"""How tensors were computed from matrix products, to recompute them with changed products."""

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
    "Made",
    "Version",
    "after",
    "again",
    "storage_address",
    "shares_memory",
    "viewing",
    "written_through",
]


class LineageError(ValueError):
    """Scores whose computation cannot be repeated."""


Call: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]
Version: TypeAlias = tuple[int, int]
View: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Made:
    """How a tensor was computed, with the earlier tensors that depend on products.

    Attributes:
        func: what made it.
        args: what it was called with, in the place of tensors :class:`Made` or :class:`Fixed`.
        kwargs: by name.
        writes: whether the function writes to its first argument.
        part: which of the function's results it is; None for the only one.
        broken: why it cannot be made again, if so.
        narrow: of the dtypes on the way, the one with the highest mask value.
        active: whether a product of two tensors went into it that both depend on the input.
        shift: whether it has one value for all keys of a row, a largest score.
        weights: whether it is the result of a softmax, or made of one.
        log: whether its exponential is the result of a softmax.
        calls: the products that went into it: name, arguments.
        bases: the tensors that it is a view of, and how to view each.
        steps: how many functions made it, one after the other.
        kept: bytes of the tensors that are kept to make it again.
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
    kept: int = 0


class Fixed:
    """A tensor that no product went into, as it was."""

    def __init__(self, tensor: Tensor, version: Version) -> None:
        self.tensor, self.version = tensor, version


def again(made: Made, known: dict[int, Any], version: Callable[[Tensor], Version]) -> Any:
    """Recompute a tensor with its products set to zero; each step runs once."""
    if id(made) in known:
        return known[id(made)][0]
    if made.broken:
        raise LineageError(f"its scores {made.broken}")
    args = [_value(each, known, version) for each in made.args]
    kwargs = {name: _value(each, known, version) for name, each in made.kwargs.items()}
    if made.writes:
        args[0] = args[0].clone()  # others may have been made of it before
    result = made.func(*args, **kwargs)
    if made.writes:
        result = args[0]
    elif made.part is not None:
        result = result[made.part]
    known[id(made)] = (result, made)
    return result


def _value(each: Any, known: dict[int, Any], version: Callable[[Tensor], Version]) -> Any:
    if isinstance(each, Made):
        return again(each, known, version)
    if isinstance(each, Fixed):
        if each.version != version(each.tensor):
            raise LineageError("a tensor that its scores depend on was overwritten")
        return each.tensor
    if isinstance(each, dict):
        return {name: _value(part, known, version) for name, part in each.items()}
    if isinstance(each, list | tuple) and not hasattr(each, "_fields"):
        return type(each)(_value(part, known, version) for part in each)
    return each


def viewing(made: Made, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> View:
    """How a function views its first argument."""
    func, part, named = made.func, made.part, dict(kwargs)

    def view(base: Tensor) -> Tensor:
        found = func(base, *rest, **named)
        viewed: Tensor = found if part is None else found[part]
        if not shares_memory(viewed, base):
            raise LineageError("its scores were written to through a view")
        return viewed

    return view


def after(first: View, then: View) -> View:
    """The view of a view."""
    return lambda base: then(first(base))


def written_through(view: View, base: Tensor, value: Tensor) -> None:
    """Record a write to a tensor through a view of it."""
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
