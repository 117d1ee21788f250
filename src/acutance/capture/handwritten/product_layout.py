"""Matrix products as einsums, and which dimensions of a softmax the product that uses it shows.

These are keys, queries and heads. The values have no dimension of queries. If they come from a
projection, a token's values hold its heads side by side, so that heads have a smaller stride than
keys.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Names of all matrix products.
PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "baddbmm", "einsum"}
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


@dataclass(frozen=True)
class Product:
    """A matrix product, written as an einsum.

    Attributes:
        factors: its factors.
        labels: of each, a letter for each dimension.
        out: a letter for each dimension of the result.
    """

    factors: tuple[Tensor, ...]
    labels: tuple[str, ...]
    out: str

    @classmethod
    def of(cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Product | None:
        """The product that a call of this function computes; None if it is not understood.

        Example:
            >>> Product.of("matmul", (torch.zeros(2, 3, 5), torch.zeros(5, 4)), {}).labels
            ('axy', 'yz')
            >>> pair = torch.zeros(2, 5, 3), torch.zeros(2, 3, 4)
            >>> Product.of("einsum", ("...ij,...jd->...id", *pair), {}).labels
            ('9ij', '9jd')
        """
        values = [*args, *(value for key, value in kwargs.items() if key != "out")]
        factors = tensors_in(values)
        if name == "einsum":
            return cls._of_einsum(str(values[0]).replace(" ", ""), factors)
        factors = factors[name == "baddbmm" :]
        if name == "__rmatmul__":
            factors.reverse()
        if len(factors) != 2 or min(factor.dim() for factor in factors) < 2:
            return None
        batch = string.ascii_letters[: max(factor.dim() for factor in factors) - 2]
        labels = [
            batch[len(batch) - factor.dim() + 2 :] + last
            for factor, last in zip(factors, ("xy", "yz"), strict=True)
        ]
        return cls(tuple(factors), tuple(labels), f"{batch}xz")

    @classmethod
    def _of_einsum(cls, formula: str, factors: Sequence[Tensor]) -> Product | None:
        """The product of an einsum's formula and factors; None if they do not fit each other."""
        terms, arrow, out = formula.partition("->")
        labels = terms.split(",")
        if not arrow or len(labels) != len(factors):
            return None
        if "..." in terms:  # as many labels, the same from the right, as the dots stand for
            dots = [
                factor.dim() - len(term.replace("...", ""))
                for factor, term in zip(factors, labels, strict=True)
            ]
            labels = [
                term.replace("...", _DOTS[-n:] if n else "")
                for n, term in zip(dots, labels, strict=True)
            ]
            out = out.replace("...", _DOTS[-max(dots) :] if max(dots) else "")
        if any(factor.dim() != len(term) for factor, term in zip(factors, labels, strict=True)):
            return None
        return cls(tuple(factors), tuple(labels), out)

    def with_label(self, label: str) -> Tensor | None:
        """The factor that has a dimension of this label; None if there are several, or none."""
        pairs = zip(self.factors, self.labels, strict=True)
        having = [factor for factor, labels in pairs if label in labels]
        return having[0] if len(having) == 1 else None

    def sums(self, weights: Tensor, step: int) -> bool:
        """Whether it sums over the dimension along which a softmax ran, together with a factor.

        That dimension is recognised by its stride, in whatever order the dimensions are now.

        Args:
            weights: the factor that is the softmax's result.
            step: stride of that dimension.

        Example:
            >>> weights, values = torch.rand(2, 3, 5), torch.rand(2, 5, 4)
            >>> Product.of("bmm", (weights, values), {}).sums(weights, 1)
            True
            >>> pair = weights, torch.rand(2, 3, 4)
            >>> Product.of("einsum", ("bqk,bqd->bkd", *pair), {}).sums(weights, 1)
            False
        """
        layout = layout_of(weights)
        least = min((stride for stride, size in layout if size > 1), default=1)
        for place, labels in enumerate(self.labels):
            if self.factors[place] is weights:
                others = "".join(self.labels[:place] + self.labels[place + 1 :])
                summed = [
                    dimension
                    for label, dimension in zip(labels, layout, strict=True)
                    if label in others and label not in self.out
                ]
                steps = (step, least) if step == 1 else (step,)
                if any(size == 1 or stride in steps for stride, size in summed):
                    return True
        return False

    def summed_size(self, weights: Tensor) -> int | None:
        """Entries of the dimension of a factor that it sums over; None if that is unclear.

        Example:
            >>> weights, values = torch.rand(2, 3, 5), torch.rand(2, 5, 4)
            >>> Product.of("matmul", (weights, values), {}).summed_size(weights)
            5
        """
        dim = self._summed_dim(weights)
        return None if dim is None else weights.shape[dim]

    def sums_to_one(self, weights: Tensor) -> bool:
        """Whether a factor is not negative and sums to 1 over the dimension that it sums over.

        Rows of zeros alone, which see no key, are left out.

        Example:
            >>> weights, values = torch.full((2, 3, 4), 0.25), torch.rand(2, 4, 5)
            >>> [
            ...     Product.of("matmul", (left, right), {}).sums_to_one(left)
            ...     for left, right in ((weights, values), (weights.mT, weights))
            ... ]
            [True, False]
        """
        dim = self._summed_dim(weights)
        if dim is None or weights.numel() == 0:
            return False
        with torch.no_grad(), torch._C.DisableTorchFunction():
            sums = weights.sum(dim)
            tolerance = min(0.05, max(1e-6, 100 * torch.finfo(weights.dtype).eps))
            near = (sums - 1).abs() <= tolerance
            try:
                return bool((near | (sums == 0)).all() & near.any() & (weights >= 0).all())
            except (RuntimeError, NotImplementedError):  # no numbers to ask: vmap, or meta
                return False

    def axes(self, weights: Tensor, result: Layout) -> ProductAxes:
        """Query and head dimensions of a softmax's result.

        Args:
            weights: the factor that is the softmax's result, a view or an entrywise function of it.
            result: strides and sizes of the softmax's result.

        Example:
            >>> weights = torch.rand(2, 5, 5, 7)  # (B, L, H, S)
            >>> values = torch.rand(2, 7, 5, 3)  # (B, S, H, D)
            >>> pair = weights.transpose(1, 2), values.transpose(1, 2)
            >>> Product.of("matmul", pair, {}).axes(pair[0], layout_of(weights))
            ProductAxes(queries=1, heads=2, width=3)
            >>> pair = "blhs,bshd->blhd", weights, values
            >>> Product.of("einsum", pair, {}).axes(weights, layout_of(weights))
            ProductAxes(queries=1, heads=2, width=3)
        """
        dim = self._summed_dim(weights)
        if dim is None:
            return ProductAxes()
        mine = int(self.factors[1] is weights)
        ours, theirs, values = self.labels[mine], self.labels[1 - mine], self.factors[1 - mine]
        key, steps = ours[dim], dict(zip(theirs, layout_of(values), strict=True))
        place = {
            label: _matching_axis(dimension, result)
            for label, dimension in zip(ours, layout_of(weights), strict=True)
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

    def _summed_dim(self, weights: Tensor) -> int | None:
        """The one dimension of a factor that is summed over with the other; None if unclear."""
        if len(self.factors) != 2 or sum(factor is weights for factor in self.factors) != 1:
            return None
        ours, theirs = self.labels if self.factors[0] is weights else self.labels[::-1]
        over = [label for label in ours if label in theirs and label not in self.out]
        return ours.index(over[0]) if len(over) == 1 else None


def layout_of(tensor: Tensor) -> Layout:
    """Stride and size of each dimension."""
    return list(zip(tensor.stride(), tensor.shape, strict=True))


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


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among some values, also inside lists and tuples."""
    tensors = []
    for value in values:
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor):
                tensors.append(item)
    return tensors


def _matching_axis(dimension: tuple[int, int], result: Layout) -> int | None:
    """Index of the result's only dimension with this (stride, size); None if none or several match.

    None also for a dimension of size 1, whose stride says nothing.
    """
    same = [place for place, each in enumerate(result) if each == dimension]
    return same[0] if len(same) == 1 and dimension[1] > 1 else None
