"""The factor of each row under a law, and the scores of a handwritten softmax that it scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acutance.calibration.law import HeadLaws
from acutance.capture.attention_call import AttentionCall
from acutance.capture.head_axis import folded
from acutance.masks import hidden_scores, hides
from acutance.scaling import AnyScaling, visible_keys
from acutance.shapes import check_masking

__all__ = ["count", "count_call", "has_shallow_mask", "query_factor", "scaled_scores"]


def count(query: Tensor, key: Tensor, masks: dict[str, Any]) -> Tensor:
    """Visible keys of each row, (B or 1, Hq or 1, L) of int64.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        masks: the fields of an :class:`AttentionCall` that hide keys; those left out hide none.

    Example:
        >>> query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
        >>> count(query, key, {"is_causal": True, "query_offset": 2})
        tensor([[[3, 4, 5]]])
    """
    given = {name: value for name, value in masks.items() if value is not None}
    queries, keys = query.shape[2], key.shape[2]
    mask: Tensor | None = given.get("attn_mask")
    if mask is not None and not given.get("is_causal") and set(given) <= _PLAIN:
        while mask.dim() < 4:
            mask = mask.unsqueeze(0)
        seen: Tensor = mask if mask.dtype == torch.bool else torch.logical_not(hides(mask))
        if seen.shape[3] == 1:
            seen = seen.expand(-1, -1, -1, keys)
        return seen.sum(-1)
    if mask is None and set(given) <= _PLAIN:
        if not given.get("is_causal"):
            return torch.full((1, 1, queries), keys, device=query.device)
        position = torch.arange(1, queries + 1, device=query.device)
        offset = int(given.get("query_offset", 0))
        return (position + offset).clamp(min=0, max=keys)[None, None]
    masking = check_masking(query, key, **given)
    return visible_keys(masking)


def count_call(call: AttentionCall) -> Tensor:
    """:func:`count` of a call that was read whole."""
    return count(call.query, call.key, {name: getattr(call, name) for name in _MASKS})


_PLAIN = {"attn_mask", "is_causal", "query_offset"}
_MASKS = (*sorted(_PLAIN), "window", "key_mask", "cu_seqlens", "bias")


def query_factor(
    laws: HeadLaws, n: Tensor, heads: int, dtype: torch.dtype, entropy: Tensor | None = None
) -> Tensor:
    """Factor that multiplies the query of each row, (B or 1, Hq or 1, L).

    Args:
        laws: calibrated laws of the layer's heads.
        n: number of visible keys, (B or 1, Hq or 1, L).
        heads: number of query heads of the call.
        dtype: of the query and the result; the factor is computed in float32, or in float64 for
            float64.
        entropy: of the unscaled rows, (B, Hq, L), if a law needs it.

    Raises:
        ValueError: if a law has parameters or entries for heads that the call does not have.

    Example:
        >>> from acutance import scaling
        >>> laws = HeadLaws(heads=((1, scaling.SSMax(s=1.0)),))
        >>> query_factor(laws, torch.tensor([[[8]]]), 2, torch.float32)[0]
        tensor([[1.0000],
                [2.0794]])
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def of(scaling: AnyScaling) -> Tensor:
        factor = scaling.factor(n, entropy=entropy, dtype=wide)
        if factor.dim() < 3 or factor.shape[-2] not in (1, heads):
            raise ValueError(
                f"the scaling has parameters for {factor.shape[-2]} heads, but the call has {heads}"
            )
        return factor

    if laws.whole is not None:
        return of(laws.whole).to(dtype)
    wrong = [head for head, _ in laws.heads if head >= heads]
    if wrong:
        raise ValueError(f"the law has head {wrong[0]}, but the call has {heads} heads")
    own = dict(laws.heads)
    made = {scaling: of(scaling) for scaling in set(own.values())}
    columns = []
    for head in range(heads):
        if head not in own:
            columns.append(torch.ones_like(n[:, 0], dtype=wide))
            continue
        factor = made[own[head]]
        columns.append(factor[:, head if factor.shape[1] > 1 else 0])
    batch = max(column.shape[0] for column in columns)
    return torch.stack([c.expand(batch, -1) for c in columns], 1).to(dtype)


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
