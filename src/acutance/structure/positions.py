"""Where queries stand among the keys, when a call does not say."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.masks import Masking, Region, Tile

__all__ = ["last_visible"]


def last_visible(masking: Masking) -> Tensor:
    """The last key that each row sees, (B, L) int64; −1 for a row that sees none.

    Where a causal row was given as a mask, or against a cache, this is where its query stands.
    Heads that see different keys are joined.

    Example:
        >>> mask = torch.tensor([[True, True, True, False, False]])
        >>> last_visible(Masking(batch=1, heads=2, group=1, queries=1, keys=5, attn_mask=mask))
        tensor([[2]])
    """
    shape = (masking.batch, masking.queries)
    found = torch.full(shape, -1, dtype=torch.int64, device=masking.device)
    rows = max(1, (1 << 22) // max(1, masking.keys * masking.heads * masking.group))
    whole = slice(0, masking.heads)
    for b in range(masking.batch):
        for start in range(0, masking.queries, rows):
            row = slice(start, min(start + rows, masking.queries))
            region = Region(slice(b, b + 1), whole, row)
            for tile in masking.tiles(region, max(1, masking.keys)):
                found[b, row] = tile.stop - 1
                if tile.hidden is not None and tile.hidden.stop == tile.width:
                    found[b, row] = _last(tile, tile.hidden.mask, tile.hidden.start)
    return found


def _last(tile: Tile, hidden: Tensor, start: int) -> Tensor:
    """Last visible key of rows whose tile ends in hidden columns, (1, heads, group, rows, …)."""
    seen = torch.logical_not(hidden).flatten(0, 2).any(0)
    backwards = seen.flip(-1).to(torch.uint8).argmax(-1)
    before = tile.start + start - 1 if start else -1  # columns left of the mask are all visible
    return torch.where(seen.any(-1), tile.start + start + seen.shape[-1] - 1 - backwards, before)
