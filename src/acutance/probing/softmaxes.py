"""Attention written out by hand: a softmax whose result a matrix product then takes.

A softmax alone may be a gate, a mixture or a classifier. What makes it attention is a matrix
product that sums over the dimension that was normalised, so a softmax waits here until one comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from acutance.probing.call import VERIFY_TOLERANCE

__all__ = ["Softmaxes", "fold", "heads_of"]

#: How a module may name its number of heads.
HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "nhead",
    "heads",
    "attention_heads",
    "num_attn_heads",
)
_LEFT = {"matmul", "__matmul__", "bmm", "mm"}
_MAPS = ("linear", "conv", "norm", "embedding")  # what they give is no longer the weights
_FEWEST = 3  # dimensions: routers and classifiers have two

#: Reports scores of attention, and a check that the product took the softmax of just these.
Report = Callable[[Tensor, Callable[[], str | None]], None]


class _Softmax:
    """One softmax that no product has taken yet.

    Attributes:
        scores: what it was taken of.
        module: where.
        version: of the scores when it was taken.
        aliases: tensors alive that hold its result, as it was or changed.
        dropped: whether weights were dropped from it.
    """

    def __init__(self, scores: Tensor, module: str | None) -> None:
        self.scores, self.module = scores, module
        self.version = -1 if scores.is_inference() else scores._version
        self.aliases: set[int] = set()
        self.dropped = False

    def overwritten(self) -> bool:
        return self.version != -1 and self.scores._version != self.version


class Softmaxes:
    """The softmaxes of one thread that wait for a product.

    Args:
        report: called with the scores when a product comes.
        unused: called with module and shape of the scores when a result is gone and no product
            came.
    """

    def __init__(
        self, report: Report, unused: Callable[[str | None, tuple[int, ...]], None]
    ) -> None:
        self._report, self._unused = report, unused
        self._waiting: dict[int, tuple[weakref.ref[Tensor], _Softmax]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def made(self, scores: Tensor, result: Tensor, module: str | None) -> None:
        """A softmax over the last dimension was taken, in this module."""
        if scores.dim() >= _FEWEST and scores.is_floating_point() and scores.shape[-1] > 1:
            self._alias(result, _Softmax(scores, module))

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
        name = getattr(func, "__name__", "")
        sums = summed(name, args, kwargs)
        if sums is not None:
            for weights in given:
                if any(weights is tensor for tensor in sums) and id(weights) in self._waiting:
                    self._used(weights)
            return
        softmax = self._waiting[id(given[0])][1]
        if "dropout" in name:
            softmax.dropped |= _drops(args, kwargs)
        if any(word in name for word in _MAPS) or _gates(name, args, given[0]):
            return
        for tensor in _tensors((result,)):
            if tensor.is_floating_point() and 2 * tensor.numel() >= given[0].numel():
                self._alias(tensor, softmax)

    def clear(self) -> None:
        """Forget everything."""
        self._waiting.clear()

    def _used(self, weights: Tensor) -> None:
        softmax = self._waiting[id(weights)][1]
        for place in list(softmax.aliases):
            self._waiting.pop(place, None)
        softmax.aliases.clear()
        self._report(softmax.scores, lambda: _doubt(softmax, weights))

    def _alias(self, tensor: Tensor, softmax: _Softmax) -> None:
        place = id(tensor)
        if place in softmax.aliases:
            return

        def gone(_: object) -> None:
            if place in softmax.aliases:
                softmax.aliases.discard(place)
                self._waiting.pop(place, None)
                if not softmax.aliases:
                    self._unused(softmax.module, tuple(softmax.scores.shape))

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


def _doubt(softmax: _Softmax, weights: Tensor) -> str | None:
    """Why the weights of a product are not the softmax of the scores, None if they are."""
    if softmax.overwritten():
        return "its scores were overwritten after the softmax"
    if softmax.dropped:
        return None
    scores = softmax.scores.detach()
    wide = scores if scores.dtype == torch.float64 else scores.float()
    expected = torch.softmax(wide, -1)
    theirs = weights.detach()
    if theirs.stride(-1) != 1 and theirs.stride(-2) == 1:
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
    tolerance = max(VERIFY_TOLERANCE.get(part.dtype, 1e-4) for part in (weights, scores))
    if difference > tolerance:
        return f"its weights were changed by as much as {difference:.2g} after the softmax"
    return None


def summed(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor] | None:
    """Operands of a product that it sums over the dimension a softmax runs along.

    That dimension is the one whose entries lie side by side, however the result was turned since.

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
        return _by_strides(given[:2])
    if name == "__rmatmul__":
        return _by_strides([given[1], given[0]])
    if name == "baddbmm":
        return _by_strides(given[1:3])
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
        if (label := _side_by_side(term, operand))
        and label not in right
        and any(label in other for i, other in enumerate(terms) if i != index)
    ]


def _by_strides(pair: Sequence[Any]) -> list[Tensor]:
    if len(pair) != 2 or not all(isinstance(each, Tensor) and each.dim() > 1 for each in pair):
        return []
    left, right = pair
    found = [left] if left.stride(-1) == 1 or left.shape[-1] == 1 else []
    return [*found, right] if right.stride(-2) == 1 else found


def _side_by_side(term: str, operand: Tensor) -> str:
    """The label of the dimension whose entries lie side by side; empty if it has none."""
    before, dots, after = term.partition("...")
    missing = operand.dim() - len(before) - len(after)
    labels: list[str] = [*before, *([""] * missing if dots else []), *after]
    if len(labels) != operand.dim():
        return ""
    strides = [operand.stride(i) if operand.shape[i] > 1 else 1 << 62 for i in range(operand.dim())]
    return labels[strides.index(min(strides))]


def heads_of(module: torch.nn.Module | None) -> int | None:
    """Number of heads a module says it has, None if it says nothing.

    Example:
        >>> heads_of(torch.nn.MultiheadAttention(8, 2))
        2
    """
    for holder in (module, getattr(module, "config", None)):
        for name in HEADS:
            heads = getattr(holder, name, None)
            if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
                return heads
    return None


def fold(scores: Tensor, heads: int | None) -> Tensor:
    """Scores of any rank as (B, H, L, S).

    Three dimensions are batches of heads, or of a single head where their number does not fit. Of
    four, the second is heads, unless only the third has their number. More have heads where their
    number is, and are folded into the batch otherwise.

    Args:
        scores: (..., S).
        heads: how many there are, None if unknown.

    Raises:
        ValueError: if heads cannot be told from other dimensions.

    Example:
        >>> [list(fold(torch.zeros(shape), 2).shape) for shape in ((6, 5, 7), (3, 5, 2, 7))]
        [[3, 2, 5, 7], [3, 2, 5, 7]]
        >>> list(fold(torch.zeros(3, 9, 2, 5, 7), 2).shape)
        [27, 2, 5, 7]
    """
    shape = scores.shape
    if scores.dim() == 3:
        fits = heads is not None and shape[0] % heads == 0
        three: Tensor = scores.unflatten(0, (-1, heads if fits and heads else 1))
        return three
    if scores.dim() == 4:
        turned = heads is not None and shape[1] != heads and shape[2] == heads
        return scores.transpose(1, 2) if turned else scores
    places = [place for place in range(1, scores.dim() - 1) if shape[place] == heads]
    if not places:
        raise ValueError(
            f"which of the dimensions {tuple(shape)} of its softmax are heads is not known"
        )
    place = places[0] if places[0] == 1 else places[-1]
    return scores.movedim(place, -3).flatten(0, -4)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (part for part in value if isinstance(part, Tensor))


def _drops(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``F.dropout`` or ``torch.dropout`` drops anything."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and float(p) > 0.0
