"""Follow the scores of hand-written attention from a product of queries and keys to a softmax.

In the plain form that people write, products are scaled and masked: every function on the way is
linear, or hides keys. Then a factor on the input of the softmax is a factor on the queries. With
anything else on the way, such as a bias or a softcap, it is not, and the reason is noted.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from acutance.capture.handwritten.product_layout import (
    PRODUCTS,
    Product,
    is_parameter,
    storage_address,
    tensors_in,
)
from acutance.capture.handwritten.softmax import drops, version_of
from acutance.masks import hidden_scores, mask_limit, shallow_mask

Call: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]

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
#: Functions that put other numbers beside or onto the scores, and from which argument on these are.
_ADDS = {
    **dict.fromkeys(("add", "sub", "subtract", "cat", "concat", "concatenate", "stack"), 0),
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
_ENDS = ("linear", "conv", "norm", "embedding", "softmax")  # what comes out is not a score
_NUMBERS = ("input", "other", "value", "tensors", "alpha")  # keywords of such numbers
_LOW = -0.99e4  # models hide keys with numbers from about here on; no score that is seen is as low
_OVERWRITTEN = "were overwritten"
_BIAS = "have numbers added that are no mask, such as a bias"


@dataclass(frozen=True)
class Scores:
    """How a tensor was computed from products of queries and keys.

    Attributes:
        products: the products that it is a sum of: name of the function, and its arguments if the
            tracker keeps them.
        active: whether one of them is of two tensors that both depend on the input.
        scale: what the products were multiplied by, one number; None for several.
        narrow: of the dtypes on the way, the one whose masks hide keys with the number closest
            to 0: they often hold the lowest number, −65504 in float16 and −3e38 in float32.
        weights: whether it was computed from the result of a softmax.
        is_shift: whether it has one value for all keys of a row, such as the largest score: what a
            softmax takes does not change with it.
        problem: why a factor on it is not a factor on its products; empty if it is.
    """

    products: tuple[Call, ...] = ()
    active: bool = False
    scale: Any = 1.0
    narrow: torch.dtype = torch.float32
    weights: bool = False
    is_shift: bool = False
    problem: str = ""


class ScoreTracker:
    """Follows the tensors of one thread that are computed from products of queries and keys.

    Args:
        factors: also keep the factors of each product, for :func:`products_of`.

    Attributes:
        known: by ``id``, the followed tensors.

    Example:
        >>> tracker = ScoreTracker()
        >>> query, key, bias = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(3, 3)
        >>> product = tracker.call(torch.bmm, (query, key.mT), {})
        >>> scores = tracker.call(torch.div, (product, 2.0), {})
        >>> tracker.of(scores).scale, tracker.of(scores).problem
        (0.5, '')
        >>> biased = tracker.call(torch.add, (scores, bias), {})
        >>> tracker.of(biased).problem
        'have numbers added that are no mask, such as a bias'
    """

    def __init__(self, *, factors: bool = False) -> None:
        self._keeps_factors = factors
        # the tensor, what is known of it, its number of writes, its memory
        self.known: dict[int, tuple[weakref.ref[Tensor], Scores, int, int]] = {}

    def clear(self) -> None:
        """Forget all tensors."""
        self.known.clear()

    def of(self, tensor: Tensor) -> Scores | None:
        """What is known of a tensor; None if it was not computed from products."""
        entry = self.known.get(id(tensor))
        if entry is None:
            return None
        _, scores, version, _ = entry
        if version != version_of(tensor):
            return replace(scores, problem=scores.problem or _OVERWRITTEN)
        return scores

    def mark_weights(self, tensor: Tensor) -> None:
        """Register a softmax's result: products with it are outputs, not scores."""
        self._mark(tensor, Scores(weights=True, problem="go through softmax"))

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function, and follow what it computes from products."""
        name = _name_of(func)
        if not self.known and name not in PRODUCTS:
            return func(*args, **kwargs)
        out = kwargs.get("out")
        named = [value for key, value in kwargs.items() if key != "out"]
        given = tensors_in((*args, *named))
        inputs = [tensor for tensor in given if id(tensor) in self.known]
        scores, is_product = None, name in PRODUCTS and len(given) > 1
        if is_product:
            scores = self._product(name, args, kwargs, given)
        elif inputs:
            scores = self._computed(name, args, kwargs, inputs)
        result = func(*args, **kwargs)
        target = out if out is not None else args[0] if args and _writes(name) else None
        if isinstance(target, Tensor) and self.known:
            self._note_write(target, scores)
        elif scores is not None:
            for tensor in tensors_in((result,)):
                if tensor.is_floating_point() and (tensor.dim() > 2 or not is_product):
                    self._mark(tensor, scores)
        return result

    def _product(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor]
    ) -> Scores | None:
        """What is known of a matrix product; None if a factor is attention weights."""
        added, pair = (given[0], given[1:]) if name == "baddbmm" else (None, given)
        if any((known := self.of(factor)) is not None and known.weights for factor in pair):
            return None
        product = Product.of(name, args, kwargs)
        keys = None if product is None else product.with_label(product.out[-1:])
        mixed = None if keys is None else self.of(keys)
        if mixed is not None and all(_is_model_weight(x) for x in pair if x is not keys):
            return replace(mixed, problem=mixed.problem or f"go through {name}")
        active = not any(map(_is_model_weight, pair if keys is None else [keys]))
        call: Call = name, (), {}
        if self._keeps_factors and active:
            call = name, tuple(args), dict(kwargs)
        scores = Scores((call,), active, scale=kwargs.get("alpha", 1.0))
        if added is None or kwargs.get("beta", 1) == 0:
            return scores
        if (other := self.of(added)) is not None:
            return _join([other, scores])
        return scores if _is_mask(added) else replace(scores, problem=_BIAS)

    def _computed(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]
    ) -> Scores | None:
        """What is known of the result of a function of followed tensors; None if nothing is."""
        base_name = _base_name_of(name)
        if base_name.endswith("_like") or base_name[:4] == "new_":
            return None
        if any(word in base_name for word in _ENDS):
            return None
        first = not args or id(args[0]) in self.known
        if not first and base_name in _MOVES:
            return None  # of another tensor, such as ``mask.to(scores)``
        parts = [known for tensor in inputs if (known := self.of(tensor)) is not None]
        if base_name in ("add", "sub", "subtract") and len(parts) > 1:
            parts = [part for part in parts if not part.is_shift] or parts
        scores = _join(parts)
        scores = replace(scores, is_shift=scores.is_shift and base_name in _KEEPS_ROWS)
        problem = ""
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
            elif "div" in base_name and (not first or name[:3] == "__r"):
                problem = "are divided by products"
        elif base_name in _ADDS:
            numbers = [
                *args[_ADDS[base_name] :],
                *(kwargs[key] for key in _NUMBERS if key in kwargs),
            ]
            problem = self._problem_of_numbers(base_name, numbers, first and name[:3] != "__r")
        elif base_name in _BOUNDS:
            bounds = [each for each in (*args, *kwargs.values()) if each is not inputs[0]]
            is_mask = "max" not in kwargs and len(bounds) == 1 and _is_low(bounds[0])
            problem = "" if is_mask else f"go through {base_name}"
        elif base_name not in _MOVES:
            problem = f"go through {base_name}"
        return replace(scores, problem=scores.problem or problem)

    def _problem_of_numbers(self, base_name: str, numbers: Sequence[Any], first: bool) -> str:
        """Why scores that get these numbers beside or added to them are not the plain form.

        Args:
            base_name: name of the function.
            numbers: what it puts there: tensors, numbers, and lists of them.
            first: whether its first argument are scores.
        """
        if base_name == "__setitem__" and not first:
            return "are written into a tensor"
        if base_name in ("sub", "subtract") and not first:
            return "are subtracted from something"
        tensors = [each for each in tensors_in(numbers) if id(each) not in self.known]
        added: list[Any] = [*tensors]
        if base_name not in ("cat", "concat", "concatenate", "stack"):
            added += [x for x in numbers if type(x) in (int, float)]
        if base_name in ("sub", "subtract"):
            added = [-each for each in added]
        return "" if all(map(_is_mask, added)) else _BIAS

    def _note_write(self, target: Tensor, scores: Scores | None) -> None:
        """Follow a tensor that was written to, and those that share its memory."""
        written = Scores(problem=_OVERWRITTEN) if scores is None else scores
        address = storage_address(target)
        for reference, known, _, other_address in list(self.known.values()):
            other = reference()
            if other is not None and other is not target and other_address == address:
                self._mark(other, _join([known, written]))
        if scores is not None or id(target) in self.known:
            self._mark(target, written)

    def _mark(self, tensor: Tensor, scores: Scores) -> None:
        """Follow a tensor until it is freed."""
        key = id(tensor)

        def forget(_: object) -> None:
            self.known.pop(key, None)

        scores = replace(scores, narrow=_narrower(scores.narrow, tensor.dtype))
        reference = weakref.ref(tensor, forget)
        self.known[key] = reference, scores, version_of(tensor), storage_address(tensor)


def _join(parts: Sequence[Scores]) -> Scores:
    """What is known of a sum of scores."""
    first = parts[0]
    if len(parts) == 1:
        return first
    calls = {id(call): call for part in parts for call in part.products}
    return Scores(
        products=tuple(calls.values()),
        active=any(part.active for part in parts),
        scale=first.scale if all(part.scale is first.scale for part in parts) else None,
        narrow=functools.reduce(_narrower, [part.narrow for part in parts]),
        weights=any(part.weights for part in parts),
        problem=next((part.problem for part in parts if part.problem), ""),
    )


def _narrower(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Of two dtypes, the one whose masks hide keys with the number closer to 0."""
    return dtype if mask_limit(dtype) >= mask_limit(other) else other


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


def _name_of(func: Callable[..., Any]) -> str:
    """Name of a function; for a property's getter, the property's name."""
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
    calls = () if known is None or not known.active else known.products
    if known is None or len(calls) != 1:
        description = f"the sum of {len(calls)} products" if calls else "not a product"
        raise ValueError(
            f"its scores are {description} of queries and keys; only one product can be read"
        )
    query, key = _match_scores(_factors(*calls[0]), scores)
    hidden = hidden_scores(scores, known.narrow)
    products = scores
    if known.problem == _BIAS and known.scale is not None:  # the products without what was added
        groups = scores.shape[1] // key.shape[1]
        products = query @ key.repeat_interleave(groups, 1).mT * known.scale
    elif known.problem:
        raise ValueError(f"its scores {known.problem}")
    elif (shallow := shallow_mask(scores, dtype=known.narrow)) is not None:
        hidden |= shallow
    return products.masked_fill(hidden, -torch.inf), query, key


def _factors(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The two factors of a product, as queries (..., L, E) and keys (..., S, E).

    The factor whose unshared dimension comes first in the result is the queries.

    Args:
        name: name of the function.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        ValueError: if it is not a product of two tensors that sums over one dimension and keeps
            one unshared dimension of each.

    Example:
        >>> query, key = torch.zeros(2, 5, 3, 4), torch.zeros(2, 7, 3, 4)
        >>> pair = _factors("einsum", ("blhe,bshe->bhls", query, key), {})
        >>> [tuple(part.shape) for part in pair]
        [(2, 3, 5, 4), (2, 3, 7, 4)]
        >>> pair = _factors("einsum", ("...ie,...je->...ij", query.mT, torch.zeros(2, 5, 7, 3)), {})
        >>> [tuple(part.shape) for part in pair]
        [(2, 5, 4, 3), (2, 5, 7, 3)]
        >>> pair = _factors("matmul", (torch.zeros(2, 5, 4), torch.zeros(2, 4, 7)), {})
        >>> [tuple(part.shape) for part in pair]
        [(2, 5, 4), (2, 7, 4)]
    """
    product = Product.of(name, args, kwargs)
    unknown = f"it is not known which factor of its {name} is the queries"
    if product is None or len(product.factors) != 2:
        raise ValueError(unknown)
    labels, out = product.labels, product.out
    shared = [label for label in labels[0] if label in labels[1]]
    over, batch = ([x for x in shared if (x in out) == in_result] for in_result in (False, True))
    unshared = [[label for label in term if label not in shared] for term in labels]
    if len(over) != 1 or any(len(own) != 1 or own[0] not in out for own in unshared):
        raise ValueError(unknown)
    query, key = (
        factor.permute([term.index(label) for label in (*batch, *own, *over)])
        for factor, term, own in zip(product.factors, labels, unshared, strict=True)
    )
    return (query, key) if out.index(unshared[0][0]) < out.index(unshared[1][0]) else (key, query)


def _match_scores(pair: tuple[Tensor, Tensor], scores: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape factors to (B, Hq, L, E) and (B, H, S, E), for scores (B, Hq, L, S).

    Raises:
        ValueError: if they do not have the sizes of the scores.

    Example:
        >>> pair = torch.zeros(6, 5, 4), torch.zeros(6, 7, 4)
        >>> [tuple(part.shape) for part in _match_scores(pair, torch.zeros(2, 3, 5, 7))]
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
