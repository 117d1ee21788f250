"""What the scores of a hand-written softmax are made of: matrix products, and what is added.

A law multiplies the products alone. What they become on their way to the softmax (scaled, masked,
moved, with a bias added) is followed as it happens, so that it can be run once more with every
product at zero: the scores without their products.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from acutance.masks import mask_limit
from acutance.probing.operands import operands
from acutance.probing.softmaxes import drops, version_of

__all__ = ["Lineage", "LineageError", "name_of"]

_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"}
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
    *("index_copy", "slice_scatter", "select_scatter", "copy", "fill_diagonal"),
}
_TWICE = {"mul", "multiply", "div", "divide", "true_divide"}  # affine in one tensor at a time
_BOUNDS = {"max", "maximum", "clamp", "clamp_min"}  # affine for scores above a mask's value
_SHIFTS = {"max", "amax", "mean", "logsumexp"}  # over all keys: a softmax does not notice them
_MOVES = {"add", "sub", "subtract", "unsqueeze", "view", "reshape", "expand", "detach", "to"}
_ENDS = ("linear", "conv", "norm", "embedding", "softmax")  # what comes out is no score
_LOW = -1e4  # no score that a row sees is as low


class LineageError(ValueError):
    """Scores were made in a way that cannot be run again."""


_Call: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class _Made:
    """How a tensor was made, with the ones before it that were made of products.

    Attributes:
        func: what made it.
        args: what it was called with, in the place of tensors :class:`_Made` or :class:`_Fixed`.
        kwargs: by name.
        writes: whether the function writes to its first argument.
        part: which of the function's results it is; None for the only one.
        broken: why it cannot be made again, if so.
        narrow: of the dtypes on the way, the one with the highest mask value.
        active: whether a product of two tensors went into it that both depend on the input.
        shift: whether it has one value for all keys of a row, a largest score.
        calls: the products that went into it: name, arguments.
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
    calls: tuple[_Call, ...] = ()


class _Fixed:
    """A tensor that no product went into, as it was."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, version_of(tensor)


class Lineage:
    """Follows the matrix products of one thread.

    Args:
        operands: also keep what each product was made of.

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

    def __init__(self, *, operands: bool = False) -> None:
        self._operands = operands
        self._known: dict[int, tuple[weakref.ref[Tensor], _Made, int]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function, and note what it makes of products.

        Args:
            func: any function of PyTorch.
            args: what it is called with.
            kwargs: by name.
        """
        name = name_of(func)
        if name in _PRODUCTS and (name != "einsum" or len(list(_tensors(args, kwargs))) > 1):
            result = func(*args, **kwargs)
            if isinstance(result, Tensor) and result.dim() > 2 and result.is_floating_point():
                product = _product(name, result, args, kwargs)
                if self._operands:
                    product = replace(product, calls=((name, tuple(args), dict(kwargs)),))
                self._mark(result, product)
            return result
        if not self._known or not any(id(each) in self._known for each in _tensors(args, kwargs)):
            return func(*args, **kwargs)
        made = self._noted(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if made is not None:
            self._note_result(made, args[0] if made.writes else None, result)
        return result

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
            found: Tensor = _again(made, {})
        return found.expand(scores.shape)

    def pairs(self, scores: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Queries (..., L, E) and keys (..., S, E) of each product that went into scores.

        Raises:
            ValueError: if they cannot be told.
        """
        known = self._known.get(id(scores))
        calls = () if known is None else known[1].calls
        return tuple(operands(name, args, kwargs) for name, args, kwargs in calls)

    def narrowest(self, scores: Tensor) -> torch.dtype:
        """The dtype with the highest mask value among those that scores had on their way."""
        known = self._known.get(id(scores))
        return scores.dtype if known is None else _narrower(scores.dtype, known[1].narrow)

    # -- following --------------------------------------------------------------------------------

    def _of(self, tensor: Tensor) -> _Made | None:
        known = self._known.get(id(tensor))
        if known is None:
            return None
        _, made, version = known
        if version != version_of(tensor):
            return replace(made, broken="were written to through a view")
        return made

    def _noted(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Made | None:
        """How the result of a call is made, None where products end."""
        plain = _plain(name)
        if any(word in plain for word in _ENDS) or plain.endswith("_like") or plain[:4] == "new_":
            return None
        marked = [each for each in _tensors(args, kwargs) if id(each) in self._known]
        given = [self._known[id(each)][1] for each in marked]
        made = _Made(
            func,
            writes=_writes(name),
            narrow=functools.reduce(_narrower, [each.narrow for each in given]),
            active=any(each.active for each in given),
            calls=tuple({id(call): call for each in given for call in each.calls}.values()),
        )
        if plain in _SHIFTS and _along_last(args, kwargs):
            return replace(made, shift=True, broken="are divided by their largest")
        shifts = [each for each in given if each.shift]
        if len(shifts) == len(given) and plain in _MOVES:
            return replace(made, shift=True, broken=shifts[0].broken)
        fixed = plain in ("add", "sub", "subtract")  # a row moved as a whole
        reason = "" if fixed else next((each.broken for each in shifts), "")
        reason = next((each.broken for each in given if each.broken and not each.shift), reason)
        reason = reason or _why_not(plain, name, args, kwargs, marked)
        if reason:
            return replace(made, broken=reason)
        kept = self._kept(args)
        if made.writes and isinstance(args[0], Tensor):
            known = self._known.get(id(args[0]))
            if known is None:
                kept = (_Fixed(args[0].clone()), *kept[1:])  # as it is before this writes to it
            elif name == "__setitem__" and _shares(args[-1], args[0]):
                kept = (known[1], *kept[1:])  # x[i] += y has written to x already, through a view
        return replace(made, args=kept, kwargs=self._kept(kwargs))

    def _note_result(self, made: _Made, target: Any, result: Any) -> None:
        if isinstance(target, Tensor):
            self._mark(target, made)
        elif isinstance(result, Tensor):
            if result.is_floating_point():
                self._mark(result, made)
        elif isinstance(result, list | tuple):
            for part, tensor in enumerate(result):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    self._mark(tensor, replace(made, part=part))

    def _kept(self, value: Any) -> Any:
        """Arguments with what was made of products as :class:`_Made`."""
        if isinstance(value, Tensor):
            made = self._of(value)
            return _Fixed(value) if made is None or made.shift else made
        if isinstance(value, Mapping):
            return {name: self._kept(part) for name, part in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self._kept(part) for part in value)
        return value

    def _mark(self, tensor: Tensor, made: _Made) -> None:
        place = id(tensor)

        def gone(_: object) -> None:
            self._known.pop(place, None)

        self._known[place] = (weakref.ref(tensor, gone), made, version_of(tensor))


def name_of(func: Callable[..., Any]) -> str:
    """A function's name; of a property's getter, the property's."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name.partition(".")[0]


def _plain(name: str) -> str:
    """``__iadd__``, ``__radd__`` and ``add_`` as ``add``; item access as it is.

    Example:
        >>> [
        ...     _plain(name)
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


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_")


def _why_not(
    plain: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], marked: list[Tensor]
) -> str:
    """Why a function is not affine in what was made of products; empty if it is."""
    if kwargs.get("out") is not None:
        return "are written to with out="
    if "dropout" in plain:
        return "are dropped out" if drops(args, kwargs) else ""
    if plain in _BOUNDS:
        return "" if _is_bound(args, kwargs) else f"go through {plain}"
    if plain not in _AFFINE:
        return f"go through {plain}"
    if plain in _TWICE and len(marked) > 1:
        return "are products multiplied or divided by products"
    divisor = args[0] if name.startswith("__r") else kwargs.get("other", args[-1])
    if plain in _TWICE and "div" in plain and divisor is marked[0]:
        return "are divided by products"
    return ""


def _product(name: str, result: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Made:
    """A product as the zeros that stand for it, or what ``baddbmm`` adds it to."""
    shape, dtype, device = result.shape, result.dtype, result.device
    given = list(_tensors(args, kwargs))
    active = not any(each.dim() < 3 and _is_parameter(each) for each in given)
    beta = kwargs.get("beta", 1)
    if name == "baddbmm" and beta != 0:

        def around(added: Tensor) -> Tensor:
            scaled: Tensor = added * beta
            return scaled.to(dtype).expand(shape).clone()

        return _Made(around, (_Fixed(given[0]),), narrow=dtype, active=active)

    def zeros() -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return _Made(zeros, narrow=dtype, active=active)


def _is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one."""
    base = tensor if tensor.is_inference() or tensor._base is None else tensor._base
    return isinstance(base, torch.nn.Parameter)


def _again(made: _Made, known: dict[int, Any]) -> Any:
    """Run what made a tensor once more, from products at zero; each step once."""
    if id(made) in known:
        return known[id(made)][0]
    if made.broken:
        raise LineageError(f"its scores {made.broken}")
    args = [_value(each, known) for each in made.args]
    kwargs = {name: _value(each, known) for name, each in made.kwargs.items()}
    if made.writes:
        args[0] = args[0].clone()  # others may have been made of it before
    result = made.func(*args, **kwargs)
    if made.writes:
        result = args[0]
    elif made.part is not None:
        result = result[made.part]
    known[id(made)] = (result, made)
    return result


def _value(each: Any, known: dict[int, Any]) -> Any:
    if isinstance(each, _Made):
        return _again(each, known)
    if isinstance(each, _Fixed):
        if each.version != version_of(each.tensor):
            raise LineageError("what its scores were made with was overwritten since")
        return each.tensor
    if isinstance(each, dict):
        return {name: _value(part, known) for name, part in each.items()}
    if isinstance(each, list | tuple) and not hasattr(each, "_fields"):
        return type(each)(_value(part, known) for part in each)
    return each


def _narrower(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Of two dtypes the one whose mask value is higher."""
    return dtype if mask_limit(dtype) >= mask_limit(other) else other


def _along_last(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a largest value is taken over the last dimension, or over everything."""
    scores = args[0] if args else kwargs.get("input")
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(scores, Tensor) or isinstance(dim, Tensor) or "other" in kwargs:
        return False
    return dim is None or dim in (-1, scores.dim() - 1, (-1,), [-1])


def _is_bound(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether scores are held above a value so low that only masked ones are."""
    given = [*args[1:], *(kwargs.get(name) for name in ("other", "min", "max"))]
    bounds = [each for each in given if each is not None]
    if len(bounds) != 1:
        return False
    low = bounds[0]
    if isinstance(low, Tensor):
        return low.numel() == 1 and float(low) <= _LOW
    return isinstance(low, int | float) and "max" not in kwargs and low <= _LOW


def _shares(view: Any, base: Tensor) -> bool:
    return isinstance(view, Tensor) and (
        view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    )


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (part for part in value if isinstance(part, Tensor))
