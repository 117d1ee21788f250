"""Rows of linear attention formed after all, a block at a time: what sums alone cannot say."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from acutance.mechanisms.call import Call
from acutance.rowstats.weighted import WeightSums, merge_weights, observe_weights

__all__ = ["blockwise"]

QUERIES, KEYS = 256, 1024


def blockwise(call: Call, *, is_causal: bool, offset: int) -> WeightSums:
    """Sums of the weights of explicit rows, (B, Hq, L): time O(L S), memory O(L) and one block.

    Args:
        call: what is asked; its rows, divided by their sum, are distributions if no weight of its
            feature map is negative.
        is_causal: row i sees keys j ≤ i + offset.
        offset: position of query 0 among the keys.
    """
    parts = (call.query, call.key, call.log_decay)
    grad = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in parts)
    distribution = call.feature_map.nonnegative

    def block(rows: slice, keys: slice) -> WeightSums:
        given = call.features(rows, keys)
        a = given.q @ given.k.transpose(-1, -2)
        i = torch.arange(rows.start, rows.stop, device=a.device) + offset
        distance = i[:, None] - torch.arange(keys.start, keys.stop, device=a.device)
        if given.log_decay is not None:
            a = a * torch.exp(given.log_decay[:, :, None, None] * distance.abs().to(a.dtype))
        seen = given.visible[:, None, None]
        if is_causal:
            seen = seen & (distance >= 0)
        a = a.flatten(1, 2)
        return observe_weights(a, seen, distribution=distribution, first_key=keys.start)

    found = []
    for row in range(0, max(1, call.rows), QUERIES):
        rows = slice(row, min(row + QUERIES, call.rows))
        none = call.query.new_zeros(*call.query.shape[:2], rows.stop - row, 0, dtype=call.dtype)
        sums = observe_weights(none, distribution=distribution)
        end = min(call.keys, rows.stop + offset) if is_causal else call.keys
        for start in range(0, max(end, 0), KEYS):
            keys = slice(start, min(start + KEYS, call.keys))
            # a block is formed again for its gradient rather than kept
            made = checkpoint(block, rows, keys, use_reentrant=False) if grad else block(rows, keys)
            sums = merge_weights(sums, made)
        found.append(sums)
    return WeightSums(
        *(
            torch.cat(parts, -1) if parts[0].dim() == 3 else parts[0]  # a field that is not known
            for parts in zip(*found, strict=True)
        )
    )
