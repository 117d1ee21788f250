"""The scores of a softmax written by hand, with their products scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.calibration.factors import factor_of
from acutance.calibration.law import HeadLaws
from acutance.masks import mask_limit
from acutance.probing.softmaxes import fold

__all__ = ["scaled_scores"]


def scaled_scores(
    scores: Tensor, bare: Tensor, dim: int, laws: HeadLaws, heads: int | None, narrow: torch.dtype
) -> Tensor:
    r"""Scores whose products are multiplied by a law's factor of each row, biases as they are.

    .. math:: s' = s + (\lambda - 1)(s - s_0)

    with :math:`s_0` the scores without their products.

    Args:
        scores: what a softmax is about to take, three dimensions or more.
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
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    last, base = scores.movedim(dim, -1), bare.movedim(dim, -1)
    hidden = last <= mask_limit(narrow)
    products = (last.to(wide) - base.to(wide)).masked_fill(hidden, 0.0)
    with torch.no_grad():
        n = _folded(torch.logical_not(hidden).sum(-1, keepdim=True), scores, dim, heads).squeeze(-1)
        entropy = None
        if laws.needs_entropy:
            weights = torch.softmax(last.detach().to(wide).masked_fill(hidden, -torch.inf), -1)
            rows = torch.special.entr(weights).sum(-1, keepdim=True).nan_to_num()
            entropy = _folded(rows, scores, dim, heads).squeeze(-1)
        places = torch.arange(last[..., 0].numel(), device=scores.device)
        order = _folded(places.view(last.shape[:-1]).unsqueeze(-1), scores, dim, heads).flatten()
    factor = factor_of(laws, n, n.shape[1], wide, entropy).expand(n.shape)
    row = torch.empty_like(order)
    row[order] = places  # where each row of the scores lies among the folded ones
    extra = products * (factor.flatten()[row].view(last.shape[:-1]).unsqueeze(-1) - 1)
    return (last + extra.to(scores.dtype)).movedim(-1, dim)


def _folded(rows: Tensor, scores: Tensor, dim: int, heads: int | None) -> Tensor:
    """What each row has, (..., 1) with the row's dimensions of the scores, as (B, H, L, 1)."""
    if dim in (-1, scores.dim() - 1):
        return fold(rows, heads)
    turned: Tensor = rows.transpose(1, 2)  # (B, L, H, 1), as heads were last
    return turned
