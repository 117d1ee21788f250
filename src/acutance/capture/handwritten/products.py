"""Trace the scores of a hand-written softmax to matrix products and added terms.

A law multiplies the products alone. What they become on their way to the softmax (scaled, masked,
moved, with a bias added) is followed as it happens, so that it can be run once more with every
product at zero: the scores without their products.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acutance.capture.handwritten.graph import (
    Fixed,
    LineageError,
    Made,
    Version,
    after,
    again,
    shares_memory,
    storage_address,
    viewing,
    written_through,
)
from acutance.capture.handwritten.operands import operands
from acutance.capture.handwritten.operations import (
    ENDS,
    MOVES,
    PRODUCTS,
    is_parameter,
    is_shift,
    is_weight,
    name_of,
    owner_of_keys,
    plain_name,
    target_of,
    tensors_of,
    why_not,
    writes,
)
from acutance.capture.handwritten.softmax import version_of
from acutance.masks import mask_limit

__all__ = ["Lineage", "LineageError"]

_STEPS = 150  # of one tensor, at most: each is a level of recursion, and may copy it
_MEMORY = 16  # times a tensor's size, at most, that is kept alive to make it again
_LEAST = 1 << 24  # bytes that may be kept for any
_EXP, _SUMS = "go through exp", "go through sums of exp"
_BY_HAND = "are exponentiated and divided by their sum"
_LOG = "are divided by their logsumexp"


class Lineage:
    """Tracks which tensors of one thread were computed from matrix products.

    By this the scores of hand-written attention are recognised.

    Args:
        operands: also keep the operands of each product.
        by_hand: callback for a product that takes weights formed without a softmax.

    Example:
        >>> lineage = Lineage()
        >>> query, key, bias = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(3, 3)
        >>> product = lineage.call(torch.bmm, (query, key.mT), {})
        >>> scores = lineage.call(torch.add, (product, bias), {})
        >>> torch.equal(lineage.without_products(scores), bias.expand(2, 3, 3))
        True
        >>> lineage.without_products(bias) is None
        True
    """

    def __init__(
        self, *, operands: bool = False, by_hand: Callable[[str], None] | None = None
    ) -> None:
        self._operands, self._by_hand = operands, by_hand
        self._known: dict[int, tuple[weakref.ref[Tensor], Made, Version]] = {}
        self._written: Counter[int] = Counter()  # by memory: inference mode does not count, and
        # what is written through ``tensor.data`` counts there alone

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._written.clear()

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function and record how its result depends on products.

        Args:
            func: any function of PyTorch.
            args: what it is called with.
            kwargs: by name.
        """
        name = name_of(func)
        if name in PRODUCTS and (name != "einsum" or len(list(tensors_of(args, kwargs))) > 1):
            return self._multiply(func, name, args, kwargs)
        if not self._known:
            if self._written:
                self._written.clear()
            return func(*args, **kwargs)
        target = target_of(name, args, kwargs)
        made = None
        if any(id(each) in self._known for each in tensors_of(args, kwargs)):
            made = self._noted(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if target is not None:
            self._wrote(target)
            if made is None:
                self._known.pop(id(target), None)
        if made is not None:
            self._note_result(made, args, kwargs, result)
        return result

    def weights(self, tensor: Tensor) -> None:
        """Register a softmax result: products with it are outputs, not scores."""
        self._mark(tensor, Made(torch.softmax, broken="go through softmax", weights=True))

    def is_active(self, scores: Tensor) -> bool:
        """Whether a product of two tensors that depend on the input went into scores."""
        known = self._known.get(id(scores))
        return known is not None and known[1].active

    def without_products(self, scores: Tensor) -> Tensor | None:
        """The scores with each product at zero, same shape; None if no product went into them.

        Raises:
            LineageError: if something on their way is not affine in the products, or a tensor was
                overwritten since.
        """
        made = self._of(scores)
        if made is None or not made.active:
            return None
        with torch._C.DisableTorchFunction():
            try:
                found: Tensor = again(made, {}, self._version)
                return found.expand(scores.shape)
            except RuntimeError as error:
                raise LineageError(f"its scores cannot be recomputed: {error}") from error

    def pairs(self, scores: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Queries (..., L, E) and keys (..., S, E) of each product that went into scores.

        Raises:
            ValueError: if they cannot be determined.
        """
        known = self._known.get(id(scores))
        calls = () if known is None else known[1].calls
        return tuple(operands(name, args, kwargs) for name, args, kwargs in calls)

    def narrowest(self, scores: Tensor) -> torch.dtype:
        """The dtype with the highest mask value among those that scores had on their way."""
        known = self._known.get(id(scores))
        return scores.dtype if known is None else _narrower(scores.dtype, known[1].narrow)

    # -- following --------------------------------------------------------------------------------

    def _version(self, tensor: Tensor) -> Version:
        return version_of(tensor), self._written[storage_address(tensor)] if self._written else 0

    def _of(self, tensor: Tensor) -> Made | None:
        known = self._known.get(id(tensor))
        if known is None:
            return None
        _, made, version = known
        if version != self._version(tensor):
            return replace(made, broken="were written to through a view")
        return made

    def _wrote(self, target: Tensor) -> None:
        self._written[storage_address(target)] += 1

    def _multiply(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a matrix product; one with attention weights gives no scores."""
        out = kwargs.get("out")
        factors = [each for each in tensors_of(args, kwargs) if each is not out]
        given = [self._known[id(each)][1] for each in factors if id(each) in self._known]
        if self._by_hand is not None:
            for each in given:
                if each.broken == _BY_HAND and each.active:
                    self._by_hand(f"its scores {_BY_HAND}, without a softmax call")
        made, owner, weights = None, None, any(each.weights for each in given)
        if not weights:
            owner = owner_of_keys(name, args if name == "einsum" else factors)
            if owner is not None and _mixes(self._known.get(id(owner)), name, owner, factors):
                made = self._noted(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if out is not None:
            self._wrote(out)
            self._known.pop(id(out), None)
        if weights:
            return result
        if isinstance(result, Tensor) and result.dim() > 2 and result.is_floating_point():
            if made is None:
                made = self._product(name, result, owner, factors, kwargs)
                if self._operands:
                    made = replace(made, calls=(*made.calls, (name, tuple(args), dict(kwargs))))
            self._mark(result, made)
        return result

    def _noted(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Made | None:
        """How the result of a call depends on products; None if it does not."""
        plain = plain_name(name)
        if any(word in plain for word in ENDS) or plain.endswith("_like") or plain[:4] == "new_":
            return None
        marked = [each for each in tensors_of(args, kwargs) if id(each) in self._known]
        given = [self._known[id(each)][1] for each in marked]
        made = Made(
            func,
            writes=writes(name),
            narrow=functools.reduce(_narrower, [each.narrow for each in given]),
            active=any(each.active for each in given),
            weights=any(each.weights for each in given),
            calls=tuple({id(call): call for each in given for call in each.calls}.values()),
            steps=1 + max(each.steps for each in given),
            kept=max(each.kept for each in given),
        )
        if is_shift(plain, args, kwargs):
            what = "largest" if "max" in plain else plain
            return replace(made, shift=True, broken=f"are divided by their {what}")
        shifts = [each for each in given if each.shift]
        if len(shifts) == len(given) and plain in MOVES:
            return replace(made, shift=True, broken=shifts[0].broken)
        fixed = plain in ("add", "sub", "subtract")  # a row moved as a whole
        reason = "" if fixed else next((each.broken for each in shifts), "")
        reason = next((each.broken for each in given if each.broken and not each.shift), reason)
        reason = _by_hand(plain, given) or reason or why_not(plain, name, args, kwargs, marked)
        if not reason and made.steps > _STEPS:
            reason = f"are computed in more than {_STEPS} steps"
        if reason:
            return replace(made, broken=reason)
        if fixed and any(each.broken == _LOG for each in shifts):
            made = replace(made, log=True)
        kept = self._kept(args)
        if made.writes and isinstance(args[0], Tensor):
            known = self._known.get(id(args[0]))
            if known is None and not made.active:  # a cache that outlives its scores, most likely
                return replace(made, broken="are written into a tensor")
            if known is None:  # as it is before this writes to it
                kept = (self._fixed(args[0].clone()), *kept[1:])
            elif name == "__setitem__" and shares_memory(args[-1], args[0]):
                kept = (known[1], *kept[1:])  # x[i] += y has written to x already, through a view
        held = [each for each in tensors_of(args, kwargs) if id(each) not in self._known]
        size = sum(each.nbytes for each in held if not is_parameter(each))
        return replace(made, args=kept, kwargs=self._kept(kwargs), kept=made.kept + size)

    def _product(
        self,
        name: str,
        result: Tensor,
        owner: Tensor | None,
        factors: Sequence[Tensor],
        kwargs: Mapping[str, Any],
    ) -> Made:
        """A product as zeros, or what ``baddbmm`` adds it to."""
        shape, dtype, device = result.shape, result.dtype, result.device
        active = not any(map(is_weight, factors if owner is None else [owner]))
        beta = kwargs.get("beta", 1)
        if name == "baddbmm" and beta != 0:

            def around(added: Tensor) -> Tensor:
                scaled: Tensor = added * beta
                return scaled.to(dtype).expand(shape).clone()

            added = self._kept(factors[0])
            made = Made(around, (added,), narrow=dtype, active=active)
            if isinstance(added, Made):
                both = active or added.active
                made = replace(made, active=both, calls=added.calls, broken=added.broken)
            return made

        def zeros() -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return Made(zeros, narrow=dtype, active=active)

    def _note_result(
        self, made: Made, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        if made.writes and isinstance(args[0], Tensor):
            self._note_write(made, args[0])
        elif isinstance(result, Tensor):
            self._note_part(made, args, kwargs, result, None)
        elif isinstance(result, list | tuple):
            for part, tensor in enumerate(result):
                if isinstance(tensor, Tensor):
                    self._note_part(made, args, kwargs, tensor, part)

    def _note_part(
        self,
        made: Made,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensor: Tensor,
        part: int | None,
    ) -> None:
        if not tensor.is_floating_point():
            return
        made = replace(made, part=part)
        if made.kept > max(_MEMORY * tensor.nbytes, _LEAST):
            made = replace(made, args=(), kwargs={}, broken="are computed from too many tensors")
        if args and isinstance(args[0], Tensor) and shares_memory(tensor, args[0]):
            view = viewing(made, args[1:], kwargs)
            known = self._known.get(id(args[0]))
            above = () if known is None else known[1].bases
            further = [(base, after(first, view)) for base, first in above]
            made = replace(made, bases=((weakref.ref(args[0]), view), *further))
        self._mark(tensor, made)

    def _note_write(self, made: Made, target: Tensor) -> None:
        """Mark what a function wrote to, and what that is a view of."""
        known = self._known.get(id(target))
        bases = () if known is None else known[1].bases
        self._mark(target, replace(made, bases=bases))
        for reference, view in bases:
            base = reference()
            known = None if base is None else self._known.get(id(base))
            if base is None or known is None or not self._one_behind(known[2], base):
                continue
            before = known[1]
            calls = {id(call): call for call in (*before.calls, *made.calls)}
            whole = replace(
                made,
                func=functools.partial(written_through, view),
                args=(before, made),
                kwargs={},
                broken=made.broken or before.broken,
                active=made.active or before.active,
                calls=tuple(calls.values()),
                steps=made.steps + 1,
                bases=before.bases,
            )
            self._mark(base, whole)

    def _one_behind(self, version: Version, tensor: Tensor) -> bool:
        """Whether nothing but the present write happened to a tensor since it was marked."""
        now = self._version(tensor)
        return version[1] + 1 == now[1] and now[0] - version[0] in (0, 1)

    def _fixed(self, tensor: Tensor) -> Fixed:
        return Fixed(tensor, self._version(tensor))

    def _kept(self, value: Any) -> Any:
        """The arguments, with tensors that depend on products as :class:`Made`."""
        if isinstance(value, Tensor):
            made = self._of(value)
            return self._fixed(value) if made is None or made.shift else made
        if isinstance(value, Mapping):
            return {name: self._kept(part) for name, part in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self._kept(part) for part in value)
        return value

    def _mark(self, tensor: Tensor, made: Made) -> None:
        place = id(tensor)

        def gone(_: object) -> None:
            self._known.pop(place, None)

        self._known[place] = (weakref.ref(tensor, gone), made, self._version(tensor))


def _mixes(
    known: tuple[Any, Made, Version] | None, name: str, owner: Tensor, factors: Sequence[Tensor]
) -> bool:
    """Whether parameters mix scores over heads, which is affine in them."""
    others = [each for each in factors if each is not owner]
    if known is None or not known[1].active or not others or name == "baddbmm":
        return False
    return all(map(is_parameter, others))


def _by_hand(plain: str, given: Sequence[Made]) -> str:
    """What a function adds to a softmax that is written out; empty if nothing."""
    if plain == "sum" and given[0].broken == _EXP:
        return _SUMS
    if plain == "exp" and given[0].log:
        return _BY_HAND
    if "div" in plain and [each.broken for each in given] == [_EXP, _SUMS]:
        return _BY_HAND
    return ""


def _narrower(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Of two dtypes the one whose mask value is higher."""
    return dtype if mask_limit(dtype) >= mask_limit(other) else other
