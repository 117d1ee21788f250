"""Which dimension of scores is heads, and which is keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["fold", "folded", "head_places", "heads_at_once", "heads_of", "over_keys"]

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


def over_keys(scores: Tensor, dim: int, heads: int | None) -> bool:
    """Whether a softmax over this dimension may be one over keys.

    It is the last, or before that of heads, which then has their number. Other softmaxes are over
    the channels of a picture, the taps of a kernel, or the positions of each feature.

    Example:
        >>> scores = torch.zeros(2, 5, 5, 3)
        >>> over_keys(scores, -1, None), over_keys(scores, 2, 3), over_keys(scores, 2, 4)
        (True, True, False)
    """
    if scores.dim() == 0 or dim in (-1, scores.dim() - 1):
        return scores.dim() > 0
    return scores.dim() == 4 and dim % 4 in (1, 2) and scores.shape[-1] == heads


def heads_of(module: torch.nn.Module | None) -> int | None:
    """Number of heads a module says it has, None if it says nothing.

    Example:
        >>> heads_of(torch.nn.MultiheadAttention(8, 2))
        2
    """
    for holder in (module, getattr(module, "config", None)):
        for name in HEADS:
            try:
                heads = getattr(holder, name, None)
            except RuntimeError:  # layers have numbers of their own, says the configuration
                continue
            if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
                return heads
    return None


def heads_at_once(module: torch.nn.Module | None) -> int | None:
    """Number of heads in one softmax of a module: with diffusers' sliced attention some of them."""
    heads = heads_of(module)
    size = getattr(getattr(module, "processor", None), "slice_size", None)
    sliced = isinstance(size, int) and heads is not None and size > 0 and heads % size == 0
    return size if sliced else heads


def fold(scores: Tensor, heads: int | None, place: int | None = None) -> Tensor:
    """Scores of any rank as (B, H, L, S).

    Three dimensions are batches of heads, or of a single head where their number does not fit. Of
    four, the second is heads, unless only another one before the last has their number. More have
    heads where their number is, and the rest is folded into the batch.

    Args:
        scores: (..., S).
        heads: how many there are, None if unknown.
        place: which of four dimensions is heads, where that is known of other calls.

    Raises:
        ValueError: if heads cannot be told from other dimensions.

    Example:
        >>> [list(fold(torch.zeros(shape), 2).shape) for shape in ((6, 5, 7), (3, 5, 2, 7))]
        [[3, 2, 5, 7], [3, 2, 5, 7]]
        >>> list(fold(torch.zeros(3, 9, 2, 5, 7), 2).shape)
        [27, 2, 5, 7]
        >>> list(fold(torch.zeros(2, 3, 5, 7), 2).shape)  # heads first
        [3, 2, 5, 7]
    """
    shape = scores.shape
    if scores.dim() == 3:
        fits = heads is not None and shape[0] % heads == 0
        three: Tensor = scores.unflatten(0, (-1, heads if fits and heads else 1))
        return three
    if scores.dim() == 4:
        places = head_places(shape, heads)
        if len(places) == 1:
            return scores.transpose(1, places[0])
        return scores.transpose(1, place) if place in places else scores
    places = [place for place in range(1, scores.dim() - 1) if shape[place] == heads]
    if not places and shape[0] == heads:
        places = [0]
    if not places:
        raise ValueError(
            f"which of the dimensions {tuple(shape)} of its softmax are heads is not known"
        )
    place = places[0] if places[0] == 1 else places[-1]
    return scores.movedim(place, -3).flatten(0, -4)


def head_places(shape: Sequence[int], heads: int | None) -> list[int]:
    """Which of four dimensions, the last of them keys, have the number of heads.

    Example:
        >>> head_places((4, 2, 9, 9), 4), head_places((4, 4, 9, 9), 4)
        ([0], [0, 1])
    """
    return [place for place in range(3) if shape[place] == heads] if len(shape) == 4 else []


def folded(scores: Tensor, dim: int, heads: int | None, place: int | None = None) -> Tensor:
    """Scores whose keys are some dimension as (B, H, L, S): :func:`fold`, or heads are last.

    Args:
        scores: of any rank; of four dimensions (B, L, S, H) or (B, S, L, H) where ``dim`` is not
            the last.
        dim: that of the keys.
        heads: how many there are, None if unknown.
        place: as for :func:`fold`.

    Raises:
        ValueError: as :func:`fold`.

    Example:
        >>> list(folded(torch.zeros(2, 5, 7, 3), 2, 3).shape)
        [2, 3, 5, 7]
    """
    if dim in (-1, scores.dim() - 1):
        return fold(scores, heads, place)
    return scores.movedim(dim, -1).transpose(1, 2)
