"""How many keys each row of a captured call sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.masks import hides
from acutance.scaling import visible_keys
from acutance.shapes import check_masking

__all__ = ["count", "count_call"]


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
