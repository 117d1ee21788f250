"""The scores of a softmax written by hand, with their products scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.calibration.factors import query_factor
from acutance.calibration.law import HeadLaws
from acutance.capture.head_axis import folded
from acutance.masks import hidden_scores

__all__ = ["has_shallow_mask", "scaled_scores"]

_SHALLOW = -1e4  # the least of the numbers that models hide keys with


def scaled_scores(
    scores: Tensor, bare: Tensor, dim: int, laws: HeadLaws, heads: int | None, narrow: torch.dtype
) -> Tensor:
    r"""Scores whose products are multiplied by a law's factor of each row, biases as they are.

    .. math:: s' = s + (\lambda - 1)(s - s_0)

    with :math:`s_0` the scores without their products.

    Args:
        scores: what a softmax is about to take, two dimensions or more.
        bare: :math:`s_0`, same shape.
        dim: over which dimension: the last, or of four one before, with heads last.
        laws: of the layer.
        heads: how many there are, None if unknown.
        narrow: a key is hidden by a score that hides in this dtype.

    Raises:
        ValueError: if heads cannot be told, or a law is for others.

    Example:
        >>> from acutance import scaling
        >>> scores = torch.tensor([[[4.0, 1.0], [2.0, -torch.inf]]])
        >>> bare = torch.tensor([[[1.0, 1.0], [1.0, -torch.inf]]])
        >>> scaled_scores(scores, bare, -1, HeadLaws(scaling.HeadTable([2.0])), 1, torch.float32)
        tensor([[[7., 1.],
                 [3., -inf]]])
    """
    if scores.dim() == 2:  # rows of one query each
        three = scaled_scores(scores[:, None], bare[:, None], -1, laws, heads, narrow)
        return three.squeeze(1)
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    with torch._C.DisableTorchFunction():
        factor, hidden = _factor(scores, dim, laws, heads, narrow)
    # seen by what is around this: another law follows these to the softmax too
    products = (scores.to(wide) - bare.to(wide)).masked_fill(hidden, 0.0)
    return scores + (products * (factor - 1)).to(scores.dtype)


def has_shallow_mask(bare: Tensor, dim: int, narrow: torch.dtype) -> bool:
    """Whether keys seem hidden by a number that does not count as hiding, such as −1e4.

    A row then has scores about there and none halfway, as ALiBi would have.

    Args:
        bare: scores without their products.
        dim: of the keys.
        narrow: as for :func:`scaled_scores`.

    Example:
        >>> mask = torch.tensor([[0.0, -1e4, -1e4], [0.0, 0.0, -1e4]])
        >>> has_shallow_mask(mask, -1, torch.float32), has_shallow_mask(mask * 1e6, -1, mask.dtype)
        (True, False)
    """
    with torch._C.DisableTorchFunction(), torch.no_grad():
        low = (bare <= 0.99 * _SHALLOW) & torch.logical_not(hidden_scores(bare, narrow))
        between = (bare <= 0.5 * _SHALLOW) & (bare > 0.99 * _SHALLOW)
        rows = low.any(dim) & torch.logical_not(between.any(dim))
        try:
            return bool(rows.any())
        except RuntimeError:  # under vmap, which has no numbers to ask
            return False


def _factor(
    scores: Tensor, dim: int, laws: HeadLaws, heads: int | None, narrow: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Factor of each row of scores, of size 1 along the keys, and the mask of hidden keys."""
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    hidden = hidden_scores(scores, narrow)
    with torch.no_grad():
        count = torch.logical_not(hidden).sum(dim, keepdim=True)
        n = folded(count, dim, heads).squeeze(-1)
        entropy = None
        if laws.needs_entropy:
            weights = torch.softmax(scores.detach().to(wide).masked_fill(hidden, -torch.inf), dim)
            rows = torch.special.entr(weights).sum(dim, keepdim=True).nan_to_num()
            entropy = folded(rows, dim, heads).squeeze(-1)
        places = torch.arange(count.numel(), device=scores.device)
        order = folded(places.view(count.shape), dim, heads).flatten()
    factor = query_factor(laws, n, n.shape[1], wide, entropy).expand(n.shape)
    row = torch.empty_like(order)
    row[order] = places  # where each row of the scores lies among the folded ones
    return factor.flatten()[row].view(count.shape), hidden
