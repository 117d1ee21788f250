"""Hand-written attention: a softmax followed by a matrix product.

A softmax alone may be a gate, a mixture or a classifier. It is attention if a matrix product sums
over the normalised dimension, so each softmax is remembered until such a product comes. Weights
that are computed without a softmax from a product of activations, such as sparsemax, are recognised
where a second product takes them: they sum to 1.
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
from acutance.capture.handwritten.product_layout import (
    PRODUCTS,
    Layout,
    Product,
    ProductAxes,
    is_parameter,
    layout_of,
    shares_memory,
    tensors_in,
)

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
_MAPS = ("linear", "conv", "norm", "embedding")  # what they give is no longer the weights
FEWEST = 3  # dimensions: routers and classifiers have two


class Softmax:
    """A softmax that no product has used yet.

    It is made of the input and the result, ``dim`` of either sign, and ``version``, the write count
    of the input before the softmax if that is not the present one. If ``over_keys`` is False, any
    product that uses it is reported.

    Attributes:
        scores: its input, with the normalised dimension moved last.
        base: its input as it was.
        dim: the normalised dimension.
        module: name of the module.
        version: write count of the scores before the softmax.
        dtype: dtype of the result; transformers requests float32 whatever the scores' dtype.
        last: whether the normalised dimension was the last.
        step: stride of the normalised dimension in the result.
        axis: its rank among the result's dimensions by stride, largest first.
        log: whether the result is still the logarithm of the weights.
        aliases: ids of living tensors that hold the result or a function of it.
        dropped: whether dropout was applied.
        inplace: whether the result was written over the scores.
        unreadable_reason: why its rows cannot be read; empty if they can.
        over_keys: whether the normalised dimension could be keys.
        layout: strides and sizes of the result.
        rearranged: whether a copy may have moved its dimensions.
        product_axes: what the product that uses it says about its dimensions.
        left_out: number of keys that the product that uses it leaves out.
    """

    def __init__(
        self,
        scores: Tensor,
        result: Tensor,
        module: str | None,
        *,
        dim: int,
        version: int | None = None,
        log: bool = False,
        unreadable_reason: str = "",
        over_keys: bool = True,
    ) -> None:
        dim %= scores.dim()
        self.over_keys = over_keys
        self.unreadable_reason = unreadable_reason
        self.scores, self.module, self.log = scores.movedim(dim, -1), module, log
        self.dim = dim
        self.version = version_of(scores) if version is None else version
        self.base, self.dtype = scores, result.dtype
        self.last = dim == scores.dim() - 1
        self.step, self.axis = result.stride(dim), _dims_by_stride(result).index(dim)
        self.aliases: set[int] = set()
        self.dropped = False
        self.product_axes = ProductAxes()
        self.left_out = 0
        self.layout, self.rearranged = layout_of(result), False
        self.inplace = result.numel() > 0 and result.data_ptr() == scores.data_ptr()

    def follow_copy(self, inputs: Tensor, result: Tensor) -> None:
        """Record whether a view or elementwise function may have rearranged the dimensions."""
        alike = inputs.shape == result.shape and inputs.stride() == result.stride()
        self.rearranged |= not (alike or shares_memory(result, inputs))

    def note_product(self, product: Product, weights: Tensor) -> None:
        """Record queries, heads and keys left out, from a product that uses the softmax."""
        size = product.summed_size(weights)
        self.left_out = 0 if size is None else self.scores.shape[-1] - size
        if not self.rearranged and len(self.layout) == 4:
            self.product_axes = product.axes(weights, self.layout)

    def overwritten(self) -> bool:
        """Whether the scores were overwritten after the softmax."""
        return self.inplace or (self.version != -1 and self.base._version != self.version)


def version_of(scores: object) -> int:
    """Number of writes to a tensor; −1 if PyTorch does not count them."""
    counted = isinstance(scores, Tensor) and not scores.is_inference()
    return scores._version if counted else -1  # type: ignore[attr-defined]


def _by_step(layout: Layout) -> list[int]:
    """Dimensions by stride, smallest first."""
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
    """The softmaxes of one thread that no product has used yet.

    Args:
        report: called with a softmax when a product uses it.
        unused: called with a softmax when its result is freed unused.
        written_out: called when a product takes weights that were computed without a softmax.

    Attributes:
        pending: by ``id``, the tensors that hold their results.
        products: by ``id``, the products of activations, and what was computed from them.
    """

    def __init__(
        self,
        report: Report,
        unused: Callable[[Softmax], None],
        written_out: Callable[[], None],
    ) -> None:
        self._report, self._unused, self._written_out = report, unused, written_out
        self.pending: dict[int, tuple[weakref.ref[Tensor], Softmax]] = {}
        self.products: dict[int, weakref.ref[Tensor]] = {}

    def add(
        self, scores: Tensor, result: Tensor, module: str | None, *, dim: int, **fields: Any
    ) -> None:
        """Register a softmax of a module, if it has three dimensions or more.

        Args:
            scores: its input.
            result: its output.
            module: name of the module.
            dim: normalised dimension.
            fields: other arguments of :class:`Softmax`.
        """
        if scores.dim() >= FEWEST and scores.is_floating_point() and scores.shape[dim] > 0:
            self._alias(result, Softmax(scores, result, module, dim=dim, **fields))

    def follow(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        *,
        remember: bool = True,
    ) -> None:
        """Track where the result of a registered softmax goes when another torch function reads it.

        A matrix product with the weights ends the tracking: the softmax is reported as attention. A
        copy, view, dropout or other elementwise function continues it: its result is registered as
        holding the same weights. A call that reads no registered tensor is ignored.

        Args:
            func: the function that was called.
            args: its positional arguments.
            kwargs: its keyword arguments.
            result: what it returned.
            remember: whether the result may be weights in the making, if it is a product or
                computed from one.
        """
        given = tensors_in((*args, *kwargs.values()))
        inputs = [each for each in given if id(each) in self.pending]
        computed = [each for each in given if id(each) in self.products]
        name = getattr(func, "__name__", "").partition(".")[0]  # an operator's overload follows
        if name in PRODUCTS:
            product = Product.of(name, args, kwargs)
            for weights in inputs:
                softmax = self.pending[id(weights)][1] if id(weights) in self.pending else None
                if softmax is None or softmax.log:
                    continue
                if product is not None and softmax.over_keys:
                    if not product.sums(weights, softmax.step):
                        continue
                    softmax.note_product(product, weights)
                if product is not None or not softmax.over_keys or name == "einsum":
                    self._used(weights)
            if not inputs:
                self._follow_product(product, given, result if remember else None)
            return
        if any(word in name for word in _MAPS):
            return
        for tensor in tensors_in((result,)) if computed and remember else ():
            if tensor.is_floating_point() and 2 * tensor.numel() >= computed[0].numel():
                self._remember_product(tensor)
        if not inputs:
            return
        softmax = self.pending[id(inputs[0])][1]
        if name in ("exp", "exp_"):
            softmax.log = False
        if "dropout" in name:
            softmax.dropped |= drops(args, kwargs)
        if _gates(name, args, inputs[0]):
            return
        for tensor in tensors_in((result,)):
            if not softmax.over_keys and tensor.numel() > inputs[0].numel():
                continue  # what it was multiplied by, not weights
            if tensor.is_floating_point() and 2 * tensor.numel() >= inputs[0].numel():
                softmax.follow_copy(inputs[0], tensor)
                self._alias(tensor, softmax)

    def _follow_product(
        self, product: Product | None, given: Sequence[Tensor], result: Any
    ) -> None:
        """Report a product that takes weights computed from another; remember one of activations.

        Args:
            product: the product; None if it is not understood.
            given: the tensors among its arguments.
            result: what it returned, if it is to be remembered.
        """
        for weights in given:
            if id(weights) in self.products and product and product.sums_to_one(weights):
                self._written_out()
                return
        activations = all(each.dim() >= FEWEST and not is_parameter(each) for each in given)
        if activations and isinstance(result, Tensor) and result.is_floating_point():
            self._remember_product(result)

    def _remember_product(self, tensor: Tensor) -> None:
        """Remember a product, or what was computed from it, until it is freed."""
        key = id(tensor)
        self.products[key] = weakref.ref(tensor, lambda _: self.products.pop(key, None))

    def clear(self) -> None:
        """Forget all softmaxes and products."""
        self.pending.clear()
        self.products.clear()

    def finish(self) -> None:
        """Report the remaining softmaxes as unused and forget them."""
        for softmax in {id(each): each for _, each in self.pending.values()}.values():
            self._unused(softmax)
        self.clear()

    def _used(self, weights: Tensor) -> None:
        """Report a softmax that a product uses."""
        softmax = self.pending[id(weights)][1]
        for axis in list(softmax.aliases):
            self.pending.pop(axis, None)
        softmax.aliases.clear()
        self._report(softmax, lambda: _doubt(softmax, weights))

    def _alias(self, tensor: Tensor, softmax: Softmax) -> None:
        """Register a tensor as holding a softmax's result."""
        axis = id(tensor)
        if axis in softmax.aliases:
            return

        def on_deleted(_: object) -> None:
            if axis in softmax.aliases:
                softmax.aliases.discard(axis)
                self.pending.pop(axis, None)
                if not softmax.aliases:
                    self._unused(softmax)

        softmax.aliases.add(axis)
        self.pending[axis] = (weakref.ref(tensor, on_deleted), softmax)


def _gates(name: str, args: Sequence[Any], weights: Tensor) -> bool:
    """Whether a multiplication uses weights as a gate of values, rather than a mask."""
    if name.strip("_").removeprefix("r").removeprefix("i") != "mul":
        return False
    others = [each for each in tensors_in(args) if each is not weights]
    return any(
        other.numel() >= weights.numel() and bool(((other < 0) | (other > 1)).any())
        for other in others
    )


def _doubt(softmax: Softmax, weights: Tensor) -> str | None:
    """Why the weights in a product are not the softmax of the scores; None if they are."""
    if softmax.dropped:
        return None
    scores = softmax.scores.detach()
    wide = scores if scores.dtype == torch.float64 else scores.float()
    expected = torch.softmax(wide, -1)
    theirs = weights.detach()
    if not softmax.last:  # their dimensions as they lie in memory, turned as those of the scores
        theirs = theirs.permute(_dims_by_stride(theirs)).movedim(softmax.axis, -1)
        if theirs.shape != expected.shape:
            return None
    elif not softmax.rearranged and sorted(layout_of(theirs)) == sorted(softmax.layout):
        product_axes = [_by_step(layout) for layout in (softmax.layout, layout_of(theirs))]
        theirs = theirs.permute([axis for _, axis in sorted(zip(*product_axes, strict=True))])
    elif softmax.rearranged and len(set(theirs.shape[:-1])) < theirs.dim() - 1:
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
