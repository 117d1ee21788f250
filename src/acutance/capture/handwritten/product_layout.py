"""Which dimensions of a softmax are keys, queries and heads, from the product that uses it.

The values have no dimension of queries. If they come from a projection, a token's values hold its
heads side by side, so that heads have a smaller stride than keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "PRODUCTS",
    "Layout",
    "ProductAxes",
    "axes_in_product",
    "einsum_terms",
    "is_parameter",
    "layout_of",
    "shares_memory",
    "storage_address",
    "summed_operands",
    "summed_size",
    "sums_to_one",
    "tensors_in",
]

#: Products of the factors as they are given.
_LEFT = {"matmul", "__matmul__", "bmm", "mm"}
#: All matrix products.
PRODUCTS = {*_LEFT, "__rmatmul__", "baddbmm", "einsum"}

_DOTS = "0123456789"  # labels that no einsum has

#: Step in memory and size of each dimension of a tensor.
Layout = list[tuple[int, int]]


class ProductAxes(NamedTuple):
    """Dimensions of a softmax's result, as seen by the product that uses it.

    Attributes:
        queries: the dimension that the values lack; None if unknown.
        heads: of the dimensions shared with the values, the one with the smallest stride, if that
            is smaller than that of keys; else None.
        width: width of the values; 0 if unknown.
    """

    queries: int | None = None
    heads: int | None = None
    width: int = 0


def layout_of(tensor: Tensor) -> Layout:
    """Stride and size of each dimension."""
    return list(zip(tensor.stride(), tensor.shape, strict=True))


def axes_in_product(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Tensor, result: Layout
) -> ProductAxes:
    """Query and head dimensions of a softmax's result, from the product that uses it.

    Args:
        name: name of the product's function.
        args: its arguments.
        kwargs: its keyword arguments.
        weights: the argument that is the softmax's result, a view or an entrywise function of it.
        result: strides and sizes of the softmax's result.

    Example:
        >>> weights = torch.rand(2, 5, 5, 7)  # (B, L, H, S)
        >>> values = torch.rand(2, 7, 5, 3)  # (B, S, H, D)
        >>> pair = weights.transpose(1, 2), values.transpose(1, 2)
        >>> axes_in_product("matmul", pair, {}, pair[0], layout_of(weights))
        ProductAxes(queries=1, heads=2, width=3)
        >>> pair = "blhs,bshd->blhd", weights, values
        >>> axes_in_product("einsum", pair, {}, weights, layout_of(weights))
        ProductAxes(queries=1, heads=2, width=3)
    """
    labels = _labels(name, args, kwargs, weights)
    if labels is None:
        return ProductAxes()
    ours, theirs, values, key = labels
    steps = dict(zip(theirs, layout_of(values), strict=True))
    place = {
        label: _matching_axis(each, result)
        for label, each in zip(ours, layout_of(weights), strict=True)
        if label != key
    }
    only_in_weights = [label for label in place if label not in steps]
    width = [size for label, (_, size) in steps.items() if label not in ours]
    near = [
        (steps[label][0], label)
        for label in place
        if label in steps and 0 < steps[label][0] < steps[key][0] and steps[label][1] > 1
    ]
    return ProductAxes(
        queries=place[only_in_weights[0]] if len(only_in_weights) == 1 else None,
        heads=place[min(near)[1]] if near and steps[key][1] > 1 else None,
        width=width[0] if len(width) == 1 else 0,
    )


def summed_operands(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], step: int = 1
) -> list[Tensor] | None:
    """Operands that a product sums over the dimension along which a softmax ran.

    That dimension is recognised by its stride, in whatever order the dimensions are now.

    Args:
        name: name of the function.
        args: its arguments.
        kwargs: its keyword arguments.
        step: stride of that dimension.

    Returns:
        The operands; None for a function that is not a product.

    Example:
        >>> weights, values = torch.rand(2, 3, 5), torch.rand(2, 5, 4)
        >>> [
        ...     len(summed_operands("bmm", pair, {}))
        ...     for pair in ((weights, values), (values.mT, weights.mT))
        ... ]
        [1, 1]
        >>> len(summed_operands("einsum", ("bqk,bkd->bqd", weights, values), {}))
        1
        >>> summed_operands("einsum", ("bqk,bqd->bkd", weights, torch.rand(2, 3, 4)), {})
        []
        >>> summed_operands("add", (weights, weights), {}) is None
        True
    """
    arguments = [*args, *kwargs.values()]
    if name in _LEFT:
        return _by_strides(arguments[:2], step)
    if name == "__rmatmul__":
        return _by_strides([arguments[1], arguments[0]], step)
    if name == "baddbmm":
        return _by_strides(arguments[1:3], step)
    if name != "einsum":
        return None
    operands = list(tensors_in(arguments[1:]))
    if not isinstance(arguments[0], str):
        return operands
    left, arrow, right = arguments[0].replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands) or not arrow:
        return operands
    return [
        operand
        for index, (term, operand) in enumerate(zip(terms, operands, strict=True))
        if (label := _label(term, operand, step))
        and label not in right
        and any(label in other for i, other in enumerate(terms) if i != index)
    ]


def summed_size(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Tensor
) -> int | None:
    """Entries of the dimension of a factor that a product sums over; None if that is unclear.

    Example:
        >>> weights, values = torch.rand(2, 3, 5), torch.rand(2, 5, 4)
        >>> summed_size("matmul", (weights, values), {}, weights)
        5
    """
    labels = _labels(name, args, kwargs, weights)
    return None if labels is None else weights.shape[labels[0].index(labels[3])]


def sums_to_one(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Tensor) -> bool:
    """Whether a factor is not negative and sums to 1 over the dimension that a product sums over.

    Rows of zeros alone, which see no key, are left out.

    Example:
        >>> weights, values = torch.full((2, 3, 4), 0.25), torch.rand(2, 4, 5)
        >>> [
        ...     sums_to_one("matmul", (left, right), {}, left)
        ...     for left, right in ((weights, values), (weights.mT, weights))
        ... ]
        [True, False]
    """
    labels = _labels(name, args, kwargs, weights)
    if labels is None or weights.numel() == 0:
        return False
    with torch.no_grad(), torch._C.DisableTorchFunction():
        sums = weights.sum(labels[0].index(labels[3]))
        near = (sums - 1).abs() <= min(0.05, max(1e-6, 100 * torch.finfo(weights.dtype).eps))
        try:
            return bool((near | (sums == 0)).all() & near.any() & (weights >= 0).all())
        except (RuntimeError, NotImplementedError):  # no numbers to ask: vmap, or a meta tensor
            return False


def einsum_terms(args: Sequence[Any]) -> tuple[list[str], list[Any], str] | None:
    """Labels of an einsum's two factors, the factors, and the labels of its result.

    None if it does not have two factors, or its formula has no arrow.

    Example:
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


def _by_strides(pair: Sequence[Any], step: int) -> list[Tensor]:
    """Of two factors, those whose summed dimension has the given stride."""
    if len(pair) != 2 or not all(isinstance(each, Tensor) and each.dim() > 1 for each in pair):
        return []
    left, right = pair
    summed = [left] if left.stride(-1) == step or left.shape[-1] == 1 else []
    return [*summed, right] if right.stride(-2) == step else summed


def _label(term: str, operand: Tensor, step: int) -> str:
    """The einsum label of the dimension with this stride; empty if there is none."""
    before, dots, after = term.partition("...")
    missing = operand.dim() - len(before) - len(after)
    labels: list[str] = [*before, *([""] * missing if dots else []), *after]
    if len(labels) != operand.dim():
        return ""
    strides = [operand.stride(i) if operand.shape[i] > 1 else 1 << 62 for i in range(operand.dim())]
    step = min(strides) if step == 1 else step
    return labels[strides.index(step)] if step in strides else ""


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among some values, also inside lists and tuples."""
    for value in values:
        parts = value if isinstance(value, list | tuple) else (value,)
        yield from (part for part in parts if isinstance(part, Tensor))


def _matching_axis(dimension: tuple[int, int], result: Layout) -> int | None:
    """Index of the result's only dimension with this (stride, size); None if none or several match.

    None also for a dimension of size 1, whose stride says nothing.
    """
    same = [place for place, each in enumerate(result) if each == dimension]
    return same[0] if len(same) == 1 and dimension[1] > 1 else None


def _labels(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Tensor
) -> tuple[str, str, Tensor, str] | None:
    """Einsum labels of weights and values, the values, and the label of keys; None if unclear."""
    arguments = [*args, *kwargs.values()]
    if name == "einsum":
        terms = einsum_terms(arguments)
        if terms is None:
            return None
        names, pair, out = terms
    else:
        if name == "__rmatmul__":
            arguments = [arguments[1], arguments[0]]
        pair = arguments[-2:] if name == "baddbmm" and not kwargs else arguments[:2]
        if len(pair) != 2 or not all(isinstance(each, Tensor) and each.dim() > 1 for each in pair):
            return None
        batch = "".join(map(chr, range(ord("a"), ord("a") + max(x.dim() for x in pair) - 2)))
        names = [
            batch[len(batch) - part.dim() + 2 :] + last
            for part, last in zip(pair, ("xy", "yz"), strict=True)
        ]
        out = f"{batch}xz"
    mine = next((i for i, part in enumerate(pair) if part is weights), None)
    if mine is None or pair[0] is pair[1]:
        return None
    ours, theirs, values = names[mine], names[1 - mine], pair[1 - mine]
    over = [label for label in ours if label in theirs and label not in out]
    return (ours, theirs, values, over[0]) if len(over) == 1 else None
