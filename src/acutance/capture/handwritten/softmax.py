"""Attention written with torch operations: a softmax followed by a matrix product.

A softmax alone may be a gate, a mixture or a classifier. What makes it attention is a matrix
product that sums over the dimension that was normalised, so a softmax waits here until one comes.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance.capture.attention_call import VERIFY_TOLERANCE
from acutance.capture.handwritten.graph import shares_memory
from acutance.capture.handwritten.product_layout import (
    LEFT,
    Layout,
    Places,
    layout_of,
    places_in_product,
    summed,
    tensors_in,
)

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
_PRODUCTS = {*LEFT, "__rmatmul__", "baddbmm", "einsum"}
_MAPS = ("linear", "conv", "norm", "embedding")  # what they give is no longer the weights
FEWEST = 3  # dimensions: routers and classifiers have two


class Softmax:
    """A softmax that no product has used yet.

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
        layout: of the result in memory.
        relaid: whether a copy may have moved its dimensions.
        places: what the product that takes it says of its dimensions.
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
        self.step, self.place = result.stride(dim), _dims_by_stride(result).index(dim)
        self.aliases: set[int] = set()
        self.dropped = False
        self.places = Places()
        self.layout, self.relaid = layout_of(result), False
        self.inplace = result.numel() > 0 and result.data_ptr() == scores.data_ptr()

    def passes(self, given: Tensor, result: Tensor) -> None:
        """Follow a softmax through a view or an elementwise function."""
        alike = given.shape == result.shape and given.stride() == result.stride()
        self.relaid |= not (alike or shares_memory(result, given))

    def note_product(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Tensor
    ) -> None:
        """Record which dimensions are which, for a product that uses a softmax."""
        if not self.relaid and len(self.layout) == 4:
            self.places = places_in_product(name, args, kwargs, weights, self.layout)

    def overwritten(self) -> bool:
        """Whether the scores were overwritten after the softmax."""
        return self.inplace or (self.version != -1 and self.base._version != self.version)


def version_of(scores: object) -> int:
    """Rises each time a tensor is written to; −1 where that is not counted."""
    counted = isinstance(scores, Tensor) and not scores.is_inference()
    return scores._version if counted else -1  # type: ignore[attr-defined]


def _by_step(layout: Layout) -> list[int]:
    """Dimensions from the smallest step in memory to the widest."""
    return sorted(range(len(layout)), key=lambda dim: layout[dim])


def _dims_by_stride(tensor: Tensor) -> list[int]:
    """The dimensions of a tensor, sorted by stride, largest first."""
    steps = tensor.stride()
    return sorted(range(len(steps)), key=lambda dim: (-steps[dim], dim))


def scores_of(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, int] | tuple[None, None]:
    """The input and dimension of a softmax call; (None, None) if they cannot be read.

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
        """Register a softmax, or its logarithm, over a dimension in this module.

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
        given = [
            each for each in tensors_in((*args, *kwargs.values())) if id(each) in self._waiting
        ]
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
                    softmax.note_product(name, args, kwargs, weights)
                    self._used(weights)
            return
        softmax = self._waiting[id(given[0])][1]
        if name in ("exp", "exp_"):
            softmax.log = False
        if "dropout" in name:
            softmax.dropped |= drops(args, kwargs)
        if any(word in name for word in _MAPS) or _gates(name, args, given[0]):
            return
        for tensor in tensors_in((result,)):
            if tensor.is_floating_point() and 2 * tensor.numel() >= given[0].numel():
                softmax.passes(given[0], tensor)
                self._alias(tensor, softmax)

    def clear(self) -> None:
        """Forget everything."""
        self._waiting.clear()

    def finish(self) -> None:
        """Drop softmaxes that no product used."""
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
    """Whether a multiplication turns weights into a gate of values, unlike a mask."""
    if name.strip("_").removeprefix("r").removeprefix("i") != "mul":
        return False
    others = [each for each in tensors_in(args) if each is not weights]
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
        theirs = theirs.permute(_dims_by_stride(theirs)).movedim(softmax.place, -1)
        if theirs.shape != expected.shape:
            return None
    elif not softmax.relaid and sorted(layout_of(theirs)) == sorted(softmax.layout):
        places = [_by_step(layout) for layout in (softmax.layout, layout_of(theirs))]
        theirs = theirs.permute([place for _, place in sorted(zip(*places, strict=True))])
    elif softmax.relaid and len(set(theirs.shape[:-1])) < theirs.dim() - 1:
        return None  # of sizes that are alike, which is which is not known
    elif theirs.stride(-1) != 1 and theirs.stride(-2) == 1:
        theirs = theirs.mT
    width = theirs.shape[-1]
    parts = [expected]
    if theirs.shape[:-1] == expected.shape[:-1]:  # a slice leaves a sink out, or global keys
        parts = [expected[..., :width], expected[..., expected.shape[-1] - width :]]
    elif theirs.shape[-1] != expected.shape[-1] or not theirs.is_contiguous():
        return None  # laid out again: which weight went where is not known
    if theirs.numel() != parts[0].numel():
        return None
    theirs = theirs.to(expected.dtype)
    differences = [(theirs.reshape(part.shape) - part).nan_to_num().abs() for part in parts]
    difference = min((float(each.max()) for each in differences if each.numel()), default=0.0)
    dtypes = (weights.dtype, scores.dtype, softmax.dtype)
    tolerance = max(VERIFY_TOLERANCE.get(dtype, 1e-4) for dtype in dtypes)
    if difference > tolerance:
        return f"its weights changed by up to {difference:.2g} after the softmax"
    return None


def drops(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``F.dropout`` or ``torch.dropout`` drops anything."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and float(p) > 0.0
