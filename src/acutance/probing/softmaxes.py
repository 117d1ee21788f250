"""Attention written out by hand: a softmax whose result a matrix product then takes.

A softmax alone may be a gate, a mixture or a classifier. What makes it attention is a matrix
product that sums over the dimension that was normalised, so a softmax waits here until one comes.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance.probing.call import VERIFY_TOLERANCE

__all__ = [
    "FEWEST",
    "LOG_OPERATORS",
    "LOG_SOFTMAX",
    "NOISY",
    "OPERATORS",
    "SOFTMAX",
    "Softmax",
    "Softmaxes",
    "drops",
    "scores_of",
    "version_of",
]

SOFTMAX = {
    torch.softmax,
    torch.Tensor.softmax,
    F.softmax,
    torch.special.softmax,
    torch._softmax,
    torch._safe_softmax,
}
LOG_SOFTMAX = {
    torch._log_softmax,
    torch.log_softmax,
    torch.Tensor.log_softmax,
    F.log_softmax,
    torch.special.log_softmax,
}
#: The same as operators of ``torch.ops.aten``, which exported graphs call.
OPERATORS = {"softmax", "_softmax", "_safe_softmax", "special_softmax"}
LOG_OPERATORS = {"log_softmax", "_log_softmax", "special_log_softmax"}
#: Softmaxes that add noise of their own to their scores.
NOISY = {F.gumbel_softmax}
_LEFT = {"matmul", "__matmul__", "bmm", "mm"}
_PRODUCTS = {*_LEFT, "__rmatmul__", "baddbmm", "einsum"}
_MAPS = ("linear", "conv", "norm", "embedding")  # what they give is no longer the weights
FEWEST = 3  # dimensions: routers and classifiers have two


class Softmax:
    """One softmax that no product has taken yet.

    Attributes:
        scores: what it was taken of, the dimension that was normalised last.
        base: that, as it was.
        dim: the dimension that was normalised.
        module: where.
        version: of the scores before it was taken.
        dtype: in which it was taken: transformers asks for float32, whatever its scores are.
        last: whether that dimension was the last.
        step: how far apart its entries lie in the result.
        place: which of the result's dimensions it is, in the order in which they lie in memory.
        log: whether it is still the logarithm of weights.
        aliases: tensors alive that hold its result, as it was or changed.
        dropped: whether weights were dropped from it.
        inplace: whether the result was written over the scores.
        why_not: why its rows cannot be read, if so.
    """

    def __init__(
        self,
        scores: Tensor,
        result: Tensor,
        module: str | None,
        dim: int,
        version: int,
        log: bool,
        why_not: str = "",
    ) -> None:
        dim %= scores.dim()
        self.why_not = why_not
        self.scores, self.module, self.log = scores.movedim(dim, -1), module, log
        self.dim = dim
        self.base, self.version, self.dtype = scores, version, result.dtype
        self.last = dim == scores.dim() - 1
        self.step, self.place = result.stride(dim), _order(result).index(dim)
        self.aliases: set[int] = set()
        self.dropped = False
        self.inplace = result.numel() > 0 and result.data_ptr() == scores.data_ptr()

    def overwritten(self) -> bool:
        """Whether the scores are no longer what they were."""
        return self.inplace or (self.version != -1 and self.base._version != self.version)


def version_of(scores: object) -> int:
    """Rises each time a tensor is written to; −1 where that is not counted."""
    counted = isinstance(scores, Tensor) and not scores.is_inference()
    return scores._version if counted else -1  # type: ignore[attr-defined]


def _order(tensor: Tensor) -> list[int]:
    """Dimensions of a tensor from the widest step in memory to the smallest."""
    steps = tensor.stride()
    return sorted(range(len(steps)), key=lambda dim: (-steps[dim], dim))


def scores_of(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, int] | tuple[None, None]:
    """What a call of a softmax is taken of, and over which dimension; None where that is not told.

    Example:
        >>> scores_of((torch.zeros(2, 3), torch.tensor(1)), {})[1]
        1
    """
    scores = args[0] if args else kwargs.get("input", kwargs.get("self"))
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(scores, Tensor) or not isinstance(dim, SupportsIndex):
        return None, None
    return scores, operator.index(dim)


#: Reports a softmax of attention, and a check that the product took the softmax of its scores.
Report = Callable[[Softmax, Callable[[], str | None]], None]


class Softmaxes:
    """The softmaxes of one thread that wait for a product.

    Args:
        report: called when a product comes.
        unused: called when a result is gone and no product came.
    """

    def __init__(self, report: Report, unused: Callable[[Softmax], None]) -> None:
        self._report, self._unused = report, unused
        self._waiting: dict[int, tuple[weakref.ref[Tensor], Softmax]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def made(
        self,
        scores: Tensor,
        result: Tensor,
        module: str | None,
        *,
        dim: int = -1,
        version: int | None = None,
        log: bool = False,
        why_not: str = "",
    ) -> None:
        """A softmax, or its logarithm, was taken over a dimension, in this module.

        Args:
            scores: of three dimensions or more.
            result: what came out.
            module: its name.
            dim: which dimension.
            version: of the scores before; None is now.
            log: whether the result is the logarithm of the weights.
            why_not: why its rows cannot be read, if so.
        """
        if scores.dim() >= FEWEST and scores.is_floating_point() and scores.shape[dim] > 0:
            version = version_of(scores) if version is None else version
            self._alias(result, Softmax(scores, result, module, dim, version, log, why_not))

    def called(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Any other function was called: a product, a copy, a view, or none of these."""
        given = [each for each in _tensors((*args, *kwargs.values())) if id(each) in self._waiting]
        if not given:
            return
        name = getattr(func, "__name__", "").partition(".")[0]  # an operator's overload follows
        if name in _PRODUCTS:
            for weights in given:
                softmax = self._waiting[id(weights)][1] if id(weights) in self._waiting else None
                if softmax is None or softmax.log:
                    continue
                sums = summed(name, args, kwargs, softmax.step) or ()
                if any(weights is tensor for tensor in sums):
                    self._used(weights)
            return
        softmax = self._waiting[id(given[0])][1]
        if name in ("exp", "exp_"):
            softmax.log = False
        if "dropout" in name:
            softmax.dropped |= drops(args, kwargs)
        if any(word in name for word in _MAPS) or _gates(name, args, given[0]):
            return
        for tensor in _tensors((result,)):
            if tensor.is_floating_point() and 2 * tensor.numel() >= given[0].numel():
                self._alias(tensor, softmax)

    def clear(self) -> None:
        """Forget everything."""
        self._waiting.clear()

    def finish(self) -> None:
        """No product will come: a graph of gradients may keep results alive."""
        for softmax in {id(each): each for _, each in self._waiting.values()}.values():
            self._unused(softmax)
        self.clear()

    def _used(self, weights: Tensor) -> None:
        softmax = self._waiting[id(weights)][1]
        for place in list(softmax.aliases):
            self._waiting.pop(place, None)
        softmax.aliases.clear()
        self._report(softmax, lambda: _doubt(softmax, weights))

    def _alias(self, tensor: Tensor, softmax: Softmax) -> None:
        place = id(tensor)
        if place in softmax.aliases:
            return

        def gone(_: object) -> None:
            if place in softmax.aliases:
                softmax.aliases.discard(place)
                self._waiting.pop(place, None)
                if not softmax.aliases:
                    self._unused(softmax)

        softmax.aliases.add(place)
        self._waiting[place] = (weakref.ref(tensor, gone), softmax)


def _gates(name: str, args: Sequence[Any], weights: Tensor) -> bool:
    """Whether a multiplication makes weights a gate of values, where a mask would keep them."""
    if name.strip("_").removeprefix("r").removeprefix("i") != "mul":
        return False
    others = [each for each in _tensors(args) if each is not weights]
    return any(
        other.numel() >= weights.numel() and bool(((other < 0) | (other > 1)).any())
        for other in others
    )


def _doubt(softmax: Softmax, weights: Tensor) -> str | None:
    """Why the weights of a product are not the softmax of the scores, None if they are."""
    if softmax.dropped:
        return None
    scores = softmax.scores.detach()
    wide = scores if scores.dtype == torch.float64 else scores.float()
    expected = torch.softmax(wide, -1)
    theirs = weights.detach()
    if not softmax.last:  # their dimensions as they lie in memory, turned as those of the scores
        theirs = theirs.permute(_order(theirs)).movedim(softmax.place, -1)
        if theirs.shape != expected.shape:
            return None
    elif theirs.stride(-1) != 1 and theirs.stride(-2) == 1:
        theirs = theirs.mT
    width = theirs.shape[-1]
    parts = [expected]
    if theirs.shape[:-1] == expected.shape[:-1]:  # a slice leaves a sink out, or global keys
        parts = [expected[..., :width], expected[..., expected.shape[-1] - width :]]
    elif theirs.shape[-1] != expected.shape[-1] or not theirs.is_contiguous():
        return None  # laid out anew: which weight went where is not known
    if theirs.numel() != parts[0].numel():
        return None
    theirs = theirs.to(expected.dtype)
    differences = [(theirs.reshape(part.shape) - part).nan_to_num().abs() for part in parts]
    difference = min((float(each.max()) for each in differences if each.numel()), default=0.0)
    dtypes = (weights.dtype, scores.dtype, softmax.dtype)
    tolerance = max(VERIFY_TOLERANCE.get(dtype, 1e-4) for dtype in dtypes)
    if difference > tolerance:
        return f"its weights were changed by as much as {difference:.2g} after the softmax"
    return None


def summed(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], step: int = 1
) -> list[Tensor] | None:
    """Operands of a product that it sums over the dimension a softmax runs along.

    That dimension is told by its entries' distance in memory, however the result was turned since.

    Args:
        name: the function's.
        args: what it was called with.
        kwargs: by name.
        step: how far apart the entries of that dimension lie; 1 is side by side.

    Returns:
        Those operands; None for a function that is no product.

    Example:
        >>> weights, values = torch.rand(2, 3, 5), torch.rand(2, 5, 4)
        >>> [len(summed("bmm", pair, {})) for pair in ((weights, values), (values.mT, weights.mT))]
        [1, 1]
        >>> len(summed("einsum", ("bqk,bkd->bqd", weights, values), {}))
        1
        >>> summed("einsum", ("bqk,bqd->bkd", weights, torch.rand(2, 3, 4)), {})
        []
        >>> summed("add", (weights, weights), {}) is None
        True
    """
    given = [*args, *kwargs.values()]
    if name in _LEFT:
        return _by_strides(given[:2], step)
    if name == "__rmatmul__":
        return _by_strides([given[1], given[0]], step)
    if name == "baddbmm":
        return _by_strides(given[1:3], step)
    if name != "einsum":
        return None
    operands = list(_tensors(given[1:]))
    if not isinstance(given[0], str):
        return operands
    left, _, right = given[0].replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands) or not _:
        return operands
    return [
        operand
        for index, (term, operand) in enumerate(zip(terms, operands, strict=True))
        if (label := _label(term, operand, step))
        and label not in right
        and any(label in other for i, other in enumerate(terms) if i != index)
    ]


def _by_strides(pair: Sequence[Any], step: int) -> list[Tensor]:
    if len(pair) != 2 or not all(isinstance(each, Tensor) and each.dim() > 1 for each in pair):
        return []
    left, right = pair
    found = [left] if left.stride(-1) == step or left.shape[-1] == 1 else []
    return [*found, right] if right.stride(-2) == step else found


def _label(term: str, operand: Tensor, step: int) -> str:
    """The label of the dimension whose entries lie so far apart; empty if it has none."""
    before, dots, after = term.partition("...")
    missing = operand.dim() - len(before) - len(after)
    labels: list[str] = [*before, *([""] * missing if dots else []), *after]
    if len(labels) != operand.dim():
        return ""
    strides = [operand.stride(i) if operand.shape[i] > 1 else 1 << 62 for i in range(operand.dim())]
    step = min(strides) if step == 1 else step
    return labels[strides.index(step)] if step in strides else ""


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (part for part in value if isinstance(part, Tensor))


def drops(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``F.dropout`` or ``torch.dropout`` drops anything."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and float(p) > 0.0
