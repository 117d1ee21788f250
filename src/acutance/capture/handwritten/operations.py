"""Classify PyTorch functions by name: what they do to scores on the way to a softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from acutance.capture.handwritten.graph import Node, Version, is_parameter
from acutance.capture.handwritten.softmax import drops
from acutance.masks import mask_limit

__all__ = [
    "ENDS",
    "MOVES",
    "PRODUCTS",
    "is_parameter",
    "is_shift",
    "is_model_weight",
    "name_of",
    "owner_of_keys",
    "base_name_of",
    "target_of",
    "tensors_of",
    "not_affine_reason",
    "writes",
]

#: How scores may be broken on their way to a softmax: the steps of one written by hand.
EXP, SUMS = "go through exp", "go through sums of exp"
BY_HAND = "are exponentiated and divided by their sum"

PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"}
#: Functions whose result is affine in each of its tensors, the others held.
_AFFINE = {
    *("view", "reshape", "view_as", "reshape_as", "transpose", "permute", "swapaxes", "swapdims"),
    *("movedim", "moveaxis", "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to"),
    *("flatten", "unflatten", "ravel", "repeat", "repeat_interleave", "tile", "flip", "roll"),
    *("contiguous", "clone", "detach", "alias", "to", "type", "type_as", "float", "half", "double"),
    *("bfloat16", "cpu", "cuda", "T", "mT", "data", "t", "narrow", "select", "index_select"),
    *("gather", "take_along_dim", "diagonal", "tril", "triu", "__getitem__", "__setitem__"),
    *("cat", "concat", "concatenate", "stack", "split", "chunk", "tensor_split", "unbind"),
    *("split_with_sizes", "pad", "_pad", "as_strided", "unfold", "masked_fill", "where"),
    *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "neg"),
    *("index_copy", "slice_scatter", "select_scatter", "copy", "fill_diagonal", "index_fill"),
    *("scatter", "scatter_add", "index_add", "sum", "mean", "addcmul", "requires_grad"),
}
_TWICE = {"mul", "multiply", "div", "divide", "true_divide"}  # affine in one tensor at a time
_BOUNDS = {"max", "maximum", "clamp", "clamp_min"}  # affine for scores above a mask's value
_SHIFTS = {"max", "amax", "mean", "logsumexp"}  # over all keys: a softmax does not notice them
MOVES = {"add", "sub", "subtract", "unsqueeze", "view", "reshape", "expand", "detach", "to"}
ENDS = ("linear", "conv", "norm", "embedding", "softmax")  # what comes out is not a score
_LOW = -1e4  # no score that a row sees is as low


def name_of(func: Callable[..., Any]) -> str:
    """Name of a function; for a property's getter, the property's name."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name.partition(".")[0]


def base_name_of(name: str) -> str:
    """Name of the plain operation: ``__iadd__``, ``__radd__`` and ``add_`` become ``add``.

    Example:
        >>> [
        ...     base_name_of(name)
        ...     for name in ("__iadd__", "__rsub__", "__truediv__", "mul_", "__getitem__")
        ... ]
        ['add', 'sub', 'div', 'mul', '__getitem__']
    """
    if name in ("__getitem__", "__setitem__"):
        return name
    if not name.startswith("__"):
        return name.rstrip("_")
    inner = name.strip("_")
    for rest in (inner, inner[1:]):
        if rest in ("add", "sub", "mul", "truediv", "div", "neg"):
            return "div" if rest == "truediv" else rest
    return inner


def writes(name: str) -> bool:
    """Whether a function of this name writes to its first argument, as ``add_`` does."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_")


def target_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor that a call writes to, if any."""
    target = kwargs.get("out", args[0] if args and writes(name) else None)
    return target if isinstance(target, Tensor) else None


def not_affine_reason(
    base_name: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], marked: list[Tensor]
) -> str:
    """Why a function is not affine in the products; empty if it is."""
    if kwargs.get("out") is not None:
        return "are written to with out="
    if "dropout" in base_name:
        return "are dropped out" if drops(args, kwargs) else ""
    if base_name in _BOUNDS:
        return "" if _is_bound(args, kwargs) else f"go through {base_name}"
    if not (base_name in _AFFINE or name in PRODUCTS) or "reduce" in kwargs:
        return f"go through {base_name}"
    if len(marked) > 1 and (base_name in _TWICE or base_name == "addcmul"):
        return "are products multiplied or divided by products"
    divisor = args[0] if name.startswith("__r") else kwargs.get("other", args[-1])
    if base_name in _TWICE and "div" in base_name and divisor is marked[0]:
        return "are divided by products"
    return ""


def is_shift(base_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function returns one value per row: adding it leaves a softmax unchanged."""
    return base_name in _SHIFTS and _along_last(args, kwargs)


def _along_last(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function reduces over the last dimension or over everything."""
    scores = args[0] if args else kwargs.get("input")
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(scores, Tensor) or isinstance(dim, Tensor) or "other" in kwargs:
        return False
    return dim is None or dim in (-1, scores.dim() - 1, (-1,), [-1])


def _is_bound(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a clamp is so low that it affects only masked scores."""
    bounds = [*args[1:], *(kwargs.get(name) for name in ("other", "min", "max"))]
    bounds = [each for each in bounds if each is not None]
    if len(bounds) != 1:
        return False
    low = bounds[0]
    if isinstance(low, Tensor):
        return low.numel() == 1 and float(low) <= _LOW
    return isinstance(low, int | float) and "max" not in kwargs and low <= _LOW


def is_model_weight(tensor: Tensor) -> bool:
    """Whether a factor is a parameter, a view of one, or a tensor without a batch.

    Tensors that ``functional_call`` or a parametrization use in place of a parameter are not
    parameters.
    """
    return tensor.dim() < 3 or is_parameter(tensor)


def owner_of_keys(name: str, args: Sequence[Any]) -> Tensor | None:
    """The factor of a product that has the dimension of keys; None if unknown.

    Example:
        >>> queries, keys = torch.zeros(2, 3, 4), torch.zeros(2, 5, 4)
        >>> owner_of_keys("matmul", (queries, keys.mT)).shape
        torch.Size([2, 4, 5])
        >>> owner_of_keys("einsum", ("bqe,bke->bkq", queries, keys)) is queries
        True
    """
    factors = list(tensors_of(args, {}))
    if name == "baddbmm":
        factors = factors[1:]
    if name == "__rmatmul__":
        factors = factors[::-1]
    if name != "einsum":
        return factors[-1]
    terms, arrow, out = str(args[0] if args else "").replace(" ", "").partition("->")
    names = terms.split(",")
    if not arrow or not out or out.endswith(".") or len(names) != len(factors):
        return None
    owners = [each for term, each in zip(names, factors, strict=True) if out[-1] in term]
    return owners[0] if len(owners) == 1 else None


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among a call's arguments, including those inside lists and tuples."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (part for part in value if isinstance(part, Tensor))


def handwritten_step(base_name: str, inputs: Sequence[Node]) -> str:
    """Which step of a hand-written softmax a function is; empty if it is none."""
    if base_name == "sum" and inputs[0].broken == EXP:
        return SUMS
    if base_name == "exp" and inputs[0].log:
        return BY_HAND
    if "div" in base_name and [each.broken for each in inputs] == [EXP, SUMS]:
        return BY_HAND
    return ""


def narrower(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Of two dtypes, the one whose masks hide keys with the number closer to 0.

    Masks often hold the dtype's lowest number, which is −65504 in float16 and −3e38 in float32.
    """
    return dtype if mask_limit(dtype) >= mask_limit(other) else other


def mixes_heads(
    entry: tuple[Any, Node, Version] | None, name: str, owner: Tensor, factors: Sequence[Tensor]
) -> bool:
    """Whether a product only mixes tracked scores by parameters, which is affine in them."""
    others = [each for each in factors if each is not owner]
    if entry is None or not entry[1].active or not others or name == "baddbmm":
        return False
    return all(map(is_parameter, others))
