"""Hand-written attention, followed from products of queries and keys through a softmax to values.

A softmax alone may be a gate, a mixture or a classifier. It is attention if a matrix product sums
over the normalised dimension, so its result is followed until such a product comes. Weights that
are computed without a softmax from a product of activations, such as sparsemax, are recognised
where a second product takes them: they sum to 1.

A law also asks what the scores of a softmax consist of. In the plain form that people write,
products are scaled and masked: every function on the way is linear, or hides keys. Then a factor on
the input of the softmax is a factor on the queries. With anything else on the way, such as a bias
or a softcap, it is not, and the reason is noted.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance.capture.attention_call import VERIFY_TOLERANCE
from acutance.capture.handwritten.product_layout import (
    PRODUCTS,
    Product,
    ProductAxes,
    is_parameter,
    layout_of,
    shares_memory,
    storage_address,
    tensors_in,
)
from acutance.masks import hidden_scores, mask_limit, shallow_mask

_HOLDERS = (torch, torch.Tensor, torch.special, F)
SOFTMAX = {*(holder.softmax for holder in _HOLDERS), torch._softmax, torch._safe_softmax}
LOG_SOFTMAX = {*(holder.log_softmax for holder in _HOLDERS), torch._log_softmax}
#: The same as operators of ``torch.ops.aten``, which exported graphs call.
OPERATORS = {"softmax", "_softmax", "_safe_softmax", "special_softmax"}
LOG_OPERATORS = {"log_softmax", "_log_softmax", "special_log_softmax"}
#: Softmaxes that add noise of their own to their scores.
NOISY = {F.gumbel_softmax}
FEWEST = 3  # dimensions: routers and classifiers have two

#: What these give is no longer weights; with a softmax, nor scores.
_MAPS = ("linear", "conv", "norm", "embedding")
#: Linear functions of a single tensor: views, copies, choices of entries, and other dtypes.
_MOVES = {
    *("view", "reshape", "view_as", "reshape_as", "transpose", "permute", "swapaxes", "swapdims"),
    *("movedim", "moveaxis", "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to"),
    *("flatten", "unflatten", "ravel", "repeat", "repeat_interleave", "tile", "flip", "roll"),
    *("contiguous", "clone", "detach", "alias", "to", "type", "type_as", "float", "half", "double"),
    *("bfloat16", "cpu", "cuda", "T", "mT", "data", "t", "narrow", "select", "index_select"),
    *("gather", "take_along_dim", "diagonal", "tril", "triu", "__getitem__", "split", "chunk"),
    *("tensor_split", "unbind", "split_with_sizes", "as_strided", "requires_grad"),
}
_SCALES = {"mul", "multiply", "div", "divide", "true_divide"}
_SUBTRACTS = {"sub", "subtract"}
_JOINS = {"cat", "concat", "concatenate", "stack"}
#: Functions that put other numbers beside or onto the scores, and from which argument on these are.
_ADDS = dict.fromkeys(("add", *_SUBTRACTS, *_JOINS), 0) | {
    "where": 1,
    "copy": 1,
    "masked_fill": 2,
    "__setitem__": 2,
    "pad": 3,
    "_pad": 3,
}
_BOUNDS = {"max", "maximum", "clamp", "clamp_min"}
_SHIFTS = {"amax", "max", "logsumexp"}
_KEEPS_ROWS = {"detach", "to", "float"}
_NUMBERS = ("input", "other", "value", "tensors", "alpha")  # keywords of such numbers
_LOW = -0.99e4  # models hide keys with numbers from about here on; no score that is seen is as low
_OVERWRITTEN = "were overwritten"
_BIAS = "have numbers added that are no mask, such as a bias"


@dataclass(frozen=True)
class Scores:
    """How a tensor was computed from products of queries and keys.

    Attributes:
        products: the products that it is a sum of, if the tracker keeps them; None stands for
            those that are not understood or not active.
        active: whether one of them is of two tensors that both depend on the input.
        scale: what the products were multiplied by, one number; None for several.
        narrow: of the dtypes on the way, the one whose masks hide keys with the number closest
            to 0: they often hold the lowest number, −65504 in float16 and −3e38 in float32.
        weights: whether it was computed from the result of a softmax.
        is_shift: whether it has one value for all keys of a row, such as the largest score: what a
            softmax takes does not change with it.
        problem: why a factor on it is not a factor on its products; empty if it is.
    """

    products: tuple[Product | None, ...] = ()
    active: bool = False
    scale: Any = 1.0
    narrow: torch.dtype = torch.float32
    weights: bool = False
    is_shift: bool = False
    problem: str = ""


class Softmax:
    """One call of a softmax, which is attention if a matrix product uses its result.

    Args:
        function: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        log: whether its result is the logarithm of the weights; None where its name says so.

    Attributes:
        function: as given.
        base: its input; None if it cannot be read.
        dim: the normalised dimension; None likewise.
        log: whether the result is still the logarithm of the weights.
        module: name of the module under which it is followed.
        unreadable_reason: why its rows cannot be read; empty if they can.
        over_keys: whether the normalised dimension could be keys. If not, any product that uses the
            softmax is reported.
        scores: its input, with the normalised dimension moved last.
        dtype: dtype of the result; transformers requests float32 whatever the scores' dtype.
        last: whether the normalised dimension was the last.
        layout: strides and sizes of the result.
        aliases: ids of living tensors that hold the result or a function of it.
        dropped: whether dropout was applied.
        inplace: whether the result was written over the scores.
        rearranged: whether a copy may have moved its dimensions.
        product_axes: what the product that uses it says about its dimensions.
        left_out: number of keys that the product that uses it leaves out.

    Example:
        >>> Softmax(torch.softmax, (torch.zeros(2, 3), torch.tensor(1)), {}).dim
        1
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        log: bool | None = None,
    ) -> None:
        self.function, self._args, self._kwargs = function, args, kwargs
        self.log = function in LOG_SOFTMAX if log is None else log
        self.base: Any
        self.dim: Any
        if function in NOISY:  # (logits, tau, hard, eps, dim)
            self.base = args[0] if args else kwargs.get("logits")
            self.dim = kwargs.get("dim", args[4] if len(args) > 4 else -1)
        else:
            self.base = args[0] if args else kwargs.get("input", kwargs.get("self"))
            self.dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if isinstance(self.base, Tensor) and isinstance(self.dim, SupportsIndex):
                self.dim = operator.index(self.dim)
            else:
                self.base = self.dim = None
        self._version = version_of(self.base)
        self.module, self.unreadable_reason, self.over_keys = "", "", True
        self.aliases: set[int] = set()
        self.dropped = self.rearranged = False
        self.product_axes, self.left_out = ProductAxes(), 0

    def compute(self, changed: Tensor | None = None) -> Tensor:
        """Its result, or that of changed scores."""
        args, kwargs = self._args, self._kwargs
        if changed is not None:
            kwargs = {name: value for name, value in kwargs.items() if value is not self.base}
            args = (changed, *args[1:])
        self._args, self._kwargs = (), {}  # which may hold the result, as ``out``
        result: Tensor = self.function(*args, **kwargs)
        return result

    def ran(self, result: Tensor) -> None:
        """Note its result, once it is to be followed."""
        if self.function is F.softmin:  # the softmax of what is negated, in memory of its own
            self.base = -self.base
            self._version = version_of(self.base)
        self.dim %= self.base.dim()
        self.scores, self.last = self.base.movedim(self.dim, -1), self.dim == self.base.dim() - 1
        self.dtype, self.layout = result.dtype, layout_of(result)
        self.inplace = result.numel() > 0 and result.data_ptr() == self.base.data_ptr()

    def note_product(self, product: Product, weights: Tensor) -> None:
        """Record queries, heads and keys left out, from a product that uses the softmax."""
        size = product.summed_size(weights)
        self.left_out = 0 if size is None else self.scores.shape[-1] - size
        if not self.rearranged and len(self.layout) == 4:
            self.product_axes = product.axes(weights, self.layout)

    def overwritten(self) -> bool:
        """Whether the scores were overwritten after the softmax."""
        return self.inplace or (self._version != -1 and self.base._version != self._version)

    def doubt(self, weights: Tensor) -> str | None:
        """Why the weights in a product are not the softmax of the scores; None if they are."""
        if self.dropped:
            return None
        scores = self.scores.detach()
        wide = scores if scores.dtype == torch.float64 else scores.float()
        expected, theirs = torch.softmax(wide, -1), weights.detach()
        if not self.last:  # their dimensions as they lie in memory, turned as those of the scores
            place = _dims_by_stride([step for step, _ in self.layout]).index(self.dim)
            theirs = theirs.permute(_dims_by_stride(theirs.stride())).movedim(place, -1)
            if theirs.shape != expected.shape:
                return None
        elif not self.rearranged and sorted(layout_of(theirs)) == sorted(self.layout):
            ours, now = (
                sorted(range(len(layout)), key=layout.__getitem__)
                for layout in (self.layout, layout_of(theirs))
            )
            theirs = theirs.permute([dim for _, dim in sorted(zip(ours, now, strict=True))])
        elif self.rearranged and len(set(theirs.shape[:-1])) < theirs.dim() - 1:
            return None  # of sizes that are alike, which is which is not known
        elif theirs.stride(-1) != 1 and theirs.stride(-2) == 1:
            theirs = theirs.mT
        width, candidates = theirs.shape[-1], [expected]
        if theirs.shape[:-1] == expected.shape[:-1]:  # a slice leaves a sink out, or global keys
            candidates = [expected[..., :width], expected[..., expected.shape[-1] - width :]]
        elif theirs.shape[-1] != expected.shape[-1] or not theirs.is_contiguous():
            return None  # laid out again: which weight went where is not known
        if theirs.numel() != candidates[0].numel():
            return None
        theirs = theirs.to(expected.dtype)
        differences = [(theirs.reshape(x.shape) - x).nan_to_num().abs() for x in candidates]
        difference = min((float(each.max()) for each in differences if each.numel()), default=0.0)
        dtypes = (weights.dtype, scores.dtype, self.dtype)
        if difference > max(VERIFY_TOLERANCE.get(dtype, 1e-4) for dtype in dtypes):
            return f"its weights changed by up to {difference:.2g} after the softmax"
        return None


@dataclass(eq=False)
class Followed:
    """What is known of a tensor until it is freed.

    Attributes:
        reference: to the tensor.
        softmax: the one whose weights it holds, if no product has used them yet.
        product: whether it is a product of activations, or computed from one.
        scores: how it was computed from products; None if it was not, or if nobody asks.
        version: number of writes when its scores were noted.
        address: of its memory.
    """

    reference: weakref.ref[Tensor]
    softmax: Softmax | None = None
    product: bool = False
    scores: Scores | None = None
    version: int = -1
    address: int = 0


class Tracker:
    """Follows the tensors of one thread that may become attention weights, or hold them.

    Args:
        owner: what is told of attention. ``on_product(softmax, doubt)`` is called when a product
            uses a softmax, where ``doubt()`` says why it may not be that of its scores, or None;
            ``on_unused(softmax)`` when one that may be attention is freed unused; and
            ``on_written_out()`` when a product takes weights that were computed without a softmax.
        scores: also follow what scores consist of, for :meth:`of`.
        factors: of scores, also keep the products, for :func:`products_of`.

    Attributes:
        known: the followed tensors by ``id``.

    Example:
        >>> tracker = Tracker(None, scores=True)
        >>> query, key, bias = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(3, 3)
        >>> product = tracker.call(torch.bmm, (query, key.mT), {})
        >>> scores = tracker.call(torch.div, (product, 2.0), {})
        >>> tracker.of(scores).scale, tracker.of(scores).problem
        (0.5, '')
        >>> biased = tracker.call(torch.add, (scores, bias), {})
        >>> tracker.of(biased).problem
        'have numbers added that are no mask, such as a bias'
    """

    def __init__(self, owner: Any, *, scores: bool = False, factors: bool = False) -> None:
        self._owner = owner
        self._reads_scores, self._keeps_factors = scores, factors
        self.known: dict[int, Followed] = {}

    def clear(self) -> None:
        """Forget all tensors."""
        self.known.clear()

    def finish(self) -> None:
        """Report the remaining softmaxes as unused, and forget all tensors."""
        remaining = {id(entry.softmax): entry.softmax for entry in list(self.known.values())}
        for softmax in filter(None, remaining.values()):
            self._unused(softmax)
        self.clear()

    def of(self, tensor: Tensor) -> Scores | None:
        """How a tensor was computed from products; None if it was not."""
        entry = self.known.get(id(tensor))
        if entry is None or entry.scores is None:
            return None
        if entry.version != version_of(tensor):
            return replace(entry.scores, problem=entry.scores.problem or _OVERWRITTEN)
        return entry.scores

    def mark_weights(self, tensor: Tensor) -> None:
        """Register a softmax's result: products with it are outputs, not scores."""
        self._mark(tensor, Scores(weights=True, problem="go through softmax"))

    def add(self, softmax: Softmax, result: Tensor) -> None:
        """Follow the result of a softmax, if it has three dimensions or more."""
        scores = softmax.base
        if scores.dim() >= FEWEST and scores.is_floating_point() and scores.shape[softmax.dim] > 0:
            with torch._C.DisableTorchFunction():
                softmax.ran(result)
                self._alias(result, softmax)

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function, and follow what it computes from products and softmaxes."""
        name = _name_of(func)
        if not (self.known or name in PRODUCTS):
            return func(*args, **kwargs)
        out = kwargs.get("out")
        given = tensors_in((*args, *(value for key, value in kwargs.items() if key != "out")))
        is_product = name in PRODUCTS and len(given) > 1  # an einsum of one tensor is none
        product = Product.of(name, args, kwargs) if is_product else None
        scores = None
        if self._reads_scores and not is_product:
            scores = self._computed(name, args, kwargs, given)
        elif self._reads_scores:
            scores = self._multiplied(name, product, given, kwargs)
        result = func(*args, **kwargs)
        target = out if out is not None else args[0] if args and _writes(name) else None
        if self._reads_scores and isinstance(target, Tensor):
            self._note_write(target, scores)
        elif scores is not None:
            for tensor in tensors_in((result,)):
                if tensor.is_floating_point() and (tensor.dim() > 2 or not is_product):
                    self._mark(tensor, scores)
        if is_product:
            self._follow_product(name, product, given, result)
        elif not any(word in name for word in _MAPS):
            self._follow_weights(name, args, kwargs, given, result)
        return result

    # -- from a softmax, or a product, to the next product ----------------------------------------

    def _follow_product(
        self, name: str, product: Product | None, given: Sequence[Tensor], result: Any
    ) -> None:
        """Report softmaxes, and weights without one, that a product uses; or remember the product.

        Args:
            name: of the function.
            product: what it computes; None if it is not understood.
            given: the tensors among its arguments.
            result: what it returned.
        """
        weights = [tensor for tensor in given if self._softmax_of(tensor) is not None]
        for tensor in weights:
            softmax = self._softmax_of(tensor)
            if softmax is None or softmax.log:
                continue
            if product is not None and softmax.over_keys:
                if not product.sums(tensor, softmax.layout[softmax.dim][0]):
                    continue
                softmax.note_product(product, tensor)
            if product is not None or not softmax.over_keys or name == "einsum":
                self._release(softmax)
                self._owner.on_product(softmax, functools.partial(softmax.doubt, tensor))
        if weights:
            return
        computed = [t for t in given if (entry := self.known.get(id(t))) and entry.product]
        # a power of a matrix, such as a closure of a graph, takes no values
        is_power = len(computed) == len(given) and len({t.shape for t in given}) == 1
        if product is not None and not is_power and any(map(product.sums_to_one, computed)):
            self._owner.on_written_out()
            return
        if all(tensor.dim() >= FEWEST and not is_parameter(tensor) for tensor in given):
            self._remember(result)

    def _follow_weights(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        result: Any,
    ) -> None:
        """Follow a copy, view, dropout or other entrywise function of weights, or of a product."""
        results = [tensor for tensor in tensors_in((result,)) if tensor.is_floating_point()]
        for tensor in given:
            if (entry := self.known.get(id(tensor))) is not None and entry.product:
                for computed in results:
                    if 2 * computed.numel() >= tensor.numel():
                        self._remember(computed)
                break
        weights = next((each for each in given if self._softmax_of(each) is not None), None)
        if weights is None or (softmax := self._softmax_of(weights)) is None:
            return
        if name in ("exp", "exp_"):
            softmax.log = False
        if "dropout" in name:
            softmax.dropped |= drops(args, kwargs)
        if _gates(name, args, weights):
            return
        for tensor in results:
            if not softmax.over_keys and tensor.numel() > weights.numel():
                continue  # what it was multiplied by, not weights
            if 2 * tensor.numel() >= weights.numel():
                alike = layout_of(tensor) == layout_of(weights)
                softmax.rearranged |= not (alike or shares_memory(tensor, weights))
                self._alias(tensor, softmax)

    def _remember(self, tensor: Any) -> None:
        """Remember a product of activations, or what was computed from it, for its weights.

        Where scores are followed, only these can become weights.
        """
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return
        scores = self.of(tensor)
        if not self._reads_scores or (scores is not None and not scores.weights):
            self._entry(tensor).product = True

    def _softmax_of(self, tensor: Tensor) -> Softmax | None:
        """The softmax whose weights a tensor holds, if no product has used them."""
        entry = self.known.get(id(tensor))
        return None if entry is None else entry.softmax

    def _alias(self, tensor: Tensor, softmax: Softmax) -> None:
        """Register a tensor as holding a softmax's result."""
        softmax.aliases.add(id(tensor))
        self._entry(tensor).softmax = softmax

    def _unused(self, softmax: Softmax) -> None:
        """Report a four-dimensional softmax that no product used: it may still be attention.

        Log-probabilities that nobody exponentiates are those of an output, not weights.
        """
        weights = softmax.over_keys and not softmax.log
        if weights and softmax.scores.dim() == 4:
            self._owner.on_unused(softmax)

    def _release(self, softmax: Softmax) -> None:
        """Stop following a softmax."""
        for key in softmax.aliases:
            entry = self.known.get(key)
            if entry is not None and entry.softmax is softmax:
                entry.softmax = None
                if entry.scores is None and not entry.product:
                    del self.known[key]
        softmax.aliases.clear()

    def _entry(self, tensor: Tensor) -> Followed:
        """The record of a tensor, a new one if there is none."""
        key = id(tensor)

        def freed(_: object) -> None:
            entry = self.known.pop(key, None)
            softmax = None if entry is None else entry.softmax
            if softmax is not None:
                softmax.aliases.discard(key)
                if not softmax.aliases:
                    self._unused(softmax)

        if key not in self.known:
            self.known[key] = Followed(weakref.ref(tensor, freed))
        return self.known[key]

    # -- what scores consist of -------------------------------------------------------------------

    def _multiplied(
        self,
        name: str,
        product: Product | None,
        given: Sequence[Tensor],
        kwargs: Mapping[str, Any],
    ) -> Scores | None:
        """What is known of a matrix product; None if a factor is attention weights."""
        added, pair = (given[0], given[1:]) if name == "baddbmm" else (None, given)
        if any((known := self.of(factor)) is not None and known.weights for factor in pair):
            return None
        keys = None if product is None else product.with_label(product.out[-1:])
        mixed = None if keys is None else self.of(keys)
        if mixed is not None and all(_is_model_weight(x) for x in pair if x is not keys):
            return replace(mixed, problem=mixed.problem or f"go through {name}")
        active = not any(map(_is_model_weight, pair if keys is None else [keys]))
        kept = product if self._keeps_factors and active else None
        scores = Scores((kept,), active, scale=kwargs.get("alpha", 1.0))
        if added is None or kwargs.get("beta", 1) == 0:
            return scores
        if (other := self.of(added)) is not None:
            return _join([other, scores])
        return scores if _is_mask(added) else replace(scores, problem=_BIAS)

    def _computed(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor]
    ) -> Scores | None:
        """What is known of the result of a function that is no product; None if nothing is."""
        inputs = [tensor for tensor in given if self.of(tensor) is not None]
        base_name = _base_name_of(name)
        if not inputs or base_name.endswith("_like") or base_name.startswith("new_"):
            return None
        if any(word in base_name for word in (*_MAPS, "softmax")):
            return None  # what comes out is not a score
        first = not args or args[0] is inputs[0]
        if not first and base_name in _MOVES:
            return None  # of another tensor, such as ``mask.to(scores)``
        parts = [known for tensor in inputs if (known := self.of(tensor)) is not None]
        if base_name in ("add", *_SUBTRACTS) and len(parts) > 1:
            parts = [known for known in parts if not known.is_shift] or parts
        scores = _join(parts)
        scores = replace(scores, is_shift=scores.is_shift and base_name in _KEEPS_ROWS)
        problem, reverse = "", not first or name.startswith("__r")
        if base_name in _SHIFTS and _over_keys(inputs[0], args, kwargs):
            scores = replace(scores, is_shift=True)
            problem = f"go through {base_name}"
        elif "dropout" in base_name:
            problem = "are dropped out" if drops(args, kwargs) else ""
        elif base_name in _SCALES and "rounding_mode" not in kwargs:
            scale = _scaled(scores.scale, base_name, args, kwargs, inputs[0])
            scores = replace(scores, scale=scale)
            if len(inputs) > 1:
                problem = "are products multiplied or divided by products"
            elif "div" in base_name and reverse:
                problem = "are divided by products"
        elif base_name in _ADDS:
            numbers = [*args[_ADDS[base_name] :], *(kwargs[x] for x in _NUMBERS if x in kwargs)]
            added: list[Any] = [x for x in tensors_in(numbers) if self.of(x) is None]
            if base_name not in _JOINS:
                added += [x for x in numbers if type(x) in (int, float)]
            if base_name in _SUBTRACTS:
                added = [-each for each in added]
            if base_name == "__setitem__" and reverse:
                problem = "are written into a tensor"
            elif base_name in _SUBTRACTS and reverse:
                problem = "are subtracted from something"
            elif not all(map(_is_mask, added)):
                problem = _BIAS
        elif base_name in _BOUNDS:
            bounds = [each for each in (*args, *kwargs.values()) if each is not inputs[0]]
            is_mask = "max" not in kwargs and len(bounds) == 1 and _is_low(bounds[0])
            problem = "" if is_mask else f"go through {base_name}"
        elif base_name not in _MOVES:
            problem = f"go through {base_name}"
        return replace(scores, problem=scores.problem or problem)

    def _note_write(self, target: Tensor, scores: Scores | None) -> None:
        """Follow a tensor that was written to, and those that share its memory."""
        written = Scores(problem=_OVERWRITTEN) if scores is None else scores
        address, is_followed = storage_address(target), self.of(target) is not None
        for entry in list(self.known.values()):
            other = entry.reference()
            if entry.scores is None or other is None or other is target:
                continue
            if entry.address == address:
                self._mark(other, _join([entry.scores, written]))
        if scores is not None or is_followed:
            self._mark(target, written)

    def _mark(self, tensor: Tensor, scores: Scores) -> None:
        """Note how a tensor was computed from products."""
        entry = self._entry(tensor)
        narrow = max(scores.narrow, tensor.dtype, key=mask_limit)
        entry.scores = replace(scores, narrow=narrow)
        entry.version, entry.address = version_of(tensor), storage_address(tensor)


def _join(parts: Sequence[Scores]) -> Scores:
    """What is known of a sum of scores."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return Scores(
        products=tuple({id(x): x for known in parts for x in known.products}.values()),
        active=any(known.active for known in parts),
        scale=first.scale if all(known.scale is first.scale for known in parts) else None,
        narrow=max((known.narrow for known in parts), key=mask_limit),
        weights=any(known.weights for known in parts),
        problem=next((known.problem for known in parts if known.problem), ""),
    )


def _scaled(
    scale: Any, base_name: str, args: Sequence[Any], kwargs: Mapping[str, Any], scores: Tensor
) -> Any:
    """The scale of scores after a multiplication or division; None if it is several numbers."""
    others = [each for each in (*args, *kwargs.values()) if each is not scores]
    if scale is None or len(others) != 1:
        return None
    factor = others[0]
    if isinstance(factor, Tensor):
        if factor.numel() != 1:
            return None
        factor = factor.detach().reshape(())
    return scale / factor if "div" in base_name else scale * factor


def _is_mask(numbers: Any) -> bool:
    """Whether numbers added to scores are 0, or so low that they hide a key.

    Example:
        >>> _is_mask(torch.tensor([0.0, -torch.inf, -1e4])), _is_mask(torch.tensor([0.0, -2.0]))
        (True, False)
    """
    if not isinstance(numbers, Tensor):
        return bool(numbers == 0 or numbers <= _LOW)
    if numbers.requires_grad:
        return False
    with torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            return bool(((numbers == 0) | (numbers <= _LOW)).all())
        except (RuntimeError, NotImplementedError):  # no numbers to ask: vmap, or a meta tensor
            return False


def _over_keys(scores: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function reduces scores over the last dimension, and keeps it."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    return keeps is True and dim in (-1, scores.dim() - 1, (-1,), [-1])


def _is_low(bound: Any) -> bool:
    """Whether a lower bound affects only scores of hidden keys."""
    if isinstance(bound, Tensor) and bound.numel() != 1:
        return False
    return isinstance(bound, int | float | Tensor) and float(bound) <= _LOW


def _is_model_weight(tensor: Tensor) -> bool:
    """Whether a factor is a parameter, a view of one, or a tensor without a batch.

    Tensors that ``functional_call`` or a parametrization use in place of a parameter are not
    parameters.
    """
    return tensor.dim() < 3 or is_parameter(tensor)


def _gates(name: str, args: Sequence[Any], weights: Tensor) -> bool:
    """Whether a multiplication uses weights as a gate of values, rather than a mask."""
    if name.strip("_").removeprefix("r").removeprefix("i") != "mul":
        return False
    others = [each for each in tensors_in(args) if each is not weights]
    return any(
        other.numel() >= weights.numel() and bool(((other < 0) | (other > 1)).any())
        for other in others
    )


def drops(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``F.dropout`` or ``torch.dropout`` drops anything."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and float(p) > 0.0


def version_of(scores: object) -> int:
    """Number of writes to a tensor; −1 if PyTorch does not count them."""
    counted = isinstance(scores, Tensor) and not scores.is_inference()
    return scores._version if counted else -1  # type: ignore[attr-defined]


def _dims_by_stride(steps: Sequence[int]) -> list[int]:
    """The dimensions of a tensor with these strides, the largest first."""
    return sorted(range(len(steps)), key=lambda dim: (-steps[dim], dim))


# -- names of functions ----------------------------------------------------------------------------


def _name_of(func: Callable[..., Any]) -> str:
    """Name of a function, without an operator's overload; of a getter, that of its property."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name.partition(".")[0]


def _base_name_of(name: str) -> str:
    """Name of the plain operation: ``__iadd__``, ``__radd__`` and ``add_`` become ``add``.

    Example:
        >>> names = ("__iadd__", "__rsub__", "__truediv__", "mul_", "__getitem__")
        >>> [_base_name_of(name) for name in names]
        ['add', 'sub', 'div', 'mul', '__getitem__']
    """
    if name in ("__getitem__", "__setitem__"):
        return name
    if not name.startswith("__"):
        return name.rstrip("_")
    inner = name.strip("_")
    for rest in (inner, inner[1:]):
        if rest in ("add", "sub", "mul", "truediv", "div"):
            return "div" if rest == "truediv" else rest
    return inner


def _writes(name: str) -> bool:
    """Whether a function of this name writes to its first argument, as ``add_`` does."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_")


# -- queries and keys of scores --------------------------------------------------------------------


def products_of(known: Scores | None, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The scaled products of queries and keys in the scores of a softmax, and their factors.

    Args:
        known: how the scores were computed; None if not from a product.
        scores: (B, Hq, L, S).

    Returns:
        The products (B, Hq, L, S), −inf where a key is hidden, queries (B, Hq, L, E) and keys
        (B, H, S, E).

    Raises:
        ValueError: if the scores contain no product or several, or it is not known how the product
            was scaled.
    """
    products = () if known is None or not known.active else known.products
    if known is None or len(products) != 1:
        description = f"the sum of {len(products)} products" if products else "not a product"
        raise ValueError(
            f"its scores are {description} of queries and keys; only one product can be read"
        )
    query, key = _match_scores(_factors(products[0]), scores)
    hidden = hidden_scores(scores, known.narrow)
    scaled = scores
    if known.problem == _BIAS and known.scale is not None:  # the products without what was added
        groups = scores.shape[1] // key.shape[1]
        scaled = query @ key.repeat_interleave(groups, 1).mT * known.scale
    elif known.problem:
        raise ValueError(f"its scores {known.problem}")
    elif (shallow := shallow_mask(scores, dtype=known.narrow)) is not None:
        hidden |= shallow
    return scaled.masked_fill(hidden, -torch.inf), query, key


def _factors(product: Product | None) -> tuple[Tensor, Tensor]:
    """The two factors of a product, as queries (..., L, E) and keys (..., S, E).

    The factor whose unshared dimension comes first in the result is the queries.

    Raises:
        ValueError: if it is not a product of two tensors that sums over one dimension and keeps
            one unshared dimension of each.

    Example:
        >>> query, key = torch.zeros(2, 5, 3, 4), torch.zeros(2, 7, 3, 4)
        >>> formulas = {"blhe,bshe->bhls": (query, key), "bshe,blhe->bhls": (key, query)}
        >>> for formula, pair in formulas.items():
        ...     product = Product.of("einsum", (formula, *pair), {})
        ...     [tuple(factor.shape) for factor in _factors(product)]
        [(2, 3, 5, 4), (2, 3, 7, 4)]
        [(2, 3, 5, 4), (2, 3, 7, 4)]
        >>> product = Product.of("matmul", (torch.zeros(2, 5, 4), torch.zeros(2, 4, 7)), {})
        >>> [tuple(factor.shape) for factor in _factors(product)]
        [(2, 5, 4), (2, 7, 4)]
    """
    unknown = "it is not known which factor of its product is the queries"
    if product is None or len(product.factors) != 2:
        raise ValueError(unknown)
    labels, out = product.labels, product.out
    shared = [label for label in labels[0] if label in labels[1]]
    over, batch = ([x for x in shared if (x in out) == in_result] for in_result in (False, True))
    unshared = [[label for label in term if label not in shared] for term in labels]
    if len(over) != 1 or any(len(rest) != 1 or rest[0] not in out for rest in unshared):
        raise ValueError(unknown)
    query, key = (
        factor.permute([term.index(label) for label in (*batch, *rest, *over)])
        for factor, term, rest in zip(product.factors, labels, unshared, strict=True)
    )
    return (query, key) if out.index(unshared[0][0]) < out.index(unshared[1][0]) else (key, query)


def _match_scores(pair: tuple[Tensor, Tensor], scores: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape factors to (B, Hq, L, E) and (B, H, S, E), for scores (B, Hq, L, S).

    Raises:
        ValueError: if they do not have the sizes of the scores.

    Example:
        >>> pair = torch.zeros(6, 5, 4), torch.zeros(6, 7, 4)
        >>> [tuple(x.shape) for x in _match_scores(pair, torch.zeros(2, 3, 5, 7))]
        [(2, 3, 5, 4), (2, 3, 7, 4)]
    """
    batch, heads, rows, keys = scores.shape
    matched = []
    for factor, length in zip(pair, (rows, keys), strict=True):
        three = factor.dim() == 3 and factor.shape[0] == batch * heads
        four = factor.unflatten(0, (batch, heads)) if three else factor
        if four.dim() != 4 or four.shape[0] != batch or four.shape[2] != length:
            raise ValueError(
                f"its scores have shape {tuple(scores.shape)}, but a factor of their product "
                f"has {tuple(factor.shape)}"
            )
        matched.append(four)
    if matched[0].shape[1] != heads or heads % matched[1].shape[1]:
        raise ValueError(
            f"its product has {matched[0].shape[1]} heads of queries, expected {heads}"
        )
    return matched[0], matched[1]
