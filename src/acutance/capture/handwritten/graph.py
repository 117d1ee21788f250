"""How tensors were computed from matrix products, and the queries and keys of these products."""

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
    "as_view",
    "compose_views",
    "einsum_terms",
    "is_parameter",
    "match_scores",
    "operands",
    "recompute",
    "shares_memory",
    "storage_address",
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
    """Value of a recorded argument: a node's recomputed result, or a tensor without products.

    Nodes that are not in ``results`` are recomputed first. Containers are handled by element, and
    other values returned as they are.

    Raises:
        LineageError: if such a tensor was overwritten since it was recorded.
    """
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
    """A function that takes the same view of another tensor as ``node`` of its first argument.

    ``other_args`` and ``kwargs`` are the remaining arguments of the recorded operation.
    """
    func, part, named = node.func, node.part, dict(kwargs)

    def view(base: Tensor) -> Tensor:
        result = func(base, *other_args, **named)
        viewed: Tensor = result if part is None else result[part]
        if not shares_memory(viewed, base):
            raise LineageError("its scores were written to through a view")
        return viewed

    return view


def compose_views(first: View, then: View) -> View:
    """A function that applies the view ``first`` to a tensor, and ``then`` to the result."""
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


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one."""
    base = tensor if tensor.is_inference() or tensor._base is None else tensor._base
    return isinstance(base, torch.nn.Parameter)


_DOTS = "0123456789"  # labels that no einsum has


def operands(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The two factors of a product, as queries (..., L, E) and keys (..., S, E).

    Args:
        name: name of the function.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        ValueError: if they cannot be determined.

    Example:
        >>> import torch
        >>> query, key = torch.zeros(2, 5, 3, 4), torch.zeros(2, 7, 3, 4)
        >>> pair = operands("einsum", ("blhe,bshe->bhls", query, key), {})
        >>> [tuple(part.shape) for part in pair]
        [(2, 3, 5, 4), (2, 3, 7, 4)]
        >>> pair = operands("einsum", ("...ie,...je->...ij", query.mT, torch.zeros(2, 5, 7, 3)), {})
        >>> [tuple(part.shape) for part in pair]
        [(2, 5, 4, 3), (2, 5, 7, 3)]
        >>> pair = operands("matmul", (torch.zeros(2, 5, 4), torch.zeros(2, 4, 7)), {})
        >>> [tuple(part.shape) for part in pair]
        [(2, 5, 4), (2, 7, 4)]
    """
    arguments = [*args, *kwargs.values()]
    if name == "einsum":
        return _einsum_operands(arguments)
    if name == "baddbmm":
        arguments = [*args, *(kwargs[key] for key in ("batch1", "batch2") if key in kwargs)][1:]
    if name == "__rmatmul__":
        arguments = arguments[1::-1]
    pair = [each for each in arguments if isinstance(each, Tensor)]
    if len(pair) != 2 or min(each.dim() for each in pair) < 2:
        raise ValueError(f"the factors of its {name} are not known")
    return pair[0], pair[1].transpose(-1, -2)


def einsum_terms(args: Sequence[Any]) -> tuple[list[str], list[Any], str] | None:
    """Labels of an einsum's two factors, the factors, and the labels of its result.

    None if it does not have two factors, or its formula has no arrow.

    Example:
        >>> import torch
        >>> einsum_terms(("...ij,...jd->...id", torch.zeros(2, 5, 3), torch.zeros(2, 3, 4)))[0]
        ['9ij', '9jd']
    """
    terms, arrow, out = str(args[0]).replace(" ", "").partition("->")
    names = terms.split(",")
    pair = list(args[1]) if isinstance(args[1], list | tuple) else list(args[1:])
    if not arrow or len(names) != 2 or len(pair) != 2:
        return None
    if "..." in terms:  # as many labels, the same from the right, as the dots stand for
        dots = [
            part.dim() - len(name.replace("...", ""))
            for part, name in zip(pair, names, strict=True)
        ]
        names = [
            name.replace("...", _DOTS[-n:] if n else "")
            for n, name in zip(dots, names, strict=True)
        ]
        out = out.replace("...", _DOTS[-max(dots) :] if max(dots) else "")
    if "." in "".join(names) or any(
        part.dim() != len(name) for part, name in zip(pair, names, strict=True)
    ):
        return None
    return names, pair, out


def _einsum_operands(args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Queries (..., L, E) and keys (..., S, E) of an einsum that computes scores.

    The operand whose unshared label comes first in the result is the queries.

    Raises:
        ValueError: if the einsum is not a product of two tensors that sums over one label and keeps
            one unshared label of each.
    """
    unknown = f"it is not known which factor of its einsum is the queries: {args[0]!r:.60}"
    terms = einsum_terms(args)
    if terms is None:
        raise ValueError(unknown)
    names, pair, out = terms
    shared = [label for label in names[0] if label in names[1]]
    over, batch = ([x for x in shared if (x in out) == in_result] for in_result in (False, True))
    unshared = [[label for label in name if label not in shared] for name in names]
    if len(over) != 1 or any(len(labels) != 1 or labels[0] not in out for labels in unshared):
        raise ValueError(unknown)
    turned = [
        part.permute([name.index(label) for label in (*batch, *labels, *over)])
        for part, name, labels in zip(pair, names, unshared, strict=True)
    ]
    first = out.index(unshared[0][0]) < out.index(unshared[1][0])  # keys come after queries
    return (turned[0], turned[1]) if first else (turned[1], turned[0])


def match_scores(pair: tuple[Tensor, Tensor], scores: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape factors to (B, Hq, L, E) and (B, H, S, E), for scores (B, Hq, L, S).

    Raises:
        ValueError: if they do not have the sizes of the scores.

    Example:
        >>> import torch
        >>> pair = torch.zeros(6, 5, 4), torch.zeros(6, 7, 4)
        >>> [tuple(part.shape) for part in match_scores(pair, torch.zeros(2, 3, 5, 7))]
        [(2, 3, 5, 4), (2, 3, 7, 4)]
    """
    batch, heads, rows, keys = scores.shape
    matched = []
    for part, length in zip(pair, (rows, keys), strict=True):
        three = part.dim() == 3 and part.shape[0] == batch * heads
        four = part.unflatten(0, (batch, heads)) if three else part
        if four.dim() != 4 or four.shape[0] != batch or four.shape[2] != length:
            raise ValueError(
                f"its scores have shape {tuple(scores.shape)}, but a factor of their product "
                f"has {tuple(part.shape)}"
            )
        matched.append(four)
    if matched[0].shape[1] != heads or heads % matched[1].shape[1]:
        raise ValueError(
            f"its product has {matched[0].shape[1]} heads of queries, expected {heads}"
        )
    return matched[0], matched[1]
