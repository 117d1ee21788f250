r"""Count the visible keys of each row without forming the L×S mask.

Position alone is arithmetic; key padding is a difference of two prefix sums; documents are two
searches in the keys sorted by document. Only a mask that is itself L×S is read, block by block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.masks import Masking, Region, hides

__all__ = ["visible_keys"]

#: Elements of the mask that are in memory at a time, where there is a mask to read.
BLOCK_ELEMENTS = 1 << 20


def visible_keys(masking: Masking) -> Tensor:
    """Number of visible keys of each row, the n of every metric and scaling.

    Args:
        masking: all masks of a call, from :func:`acutance.masks.check_masking`.

    Returns:
        (B, Hq, L) where a mask differs from head to head, otherwise (B, 1, L); int64. 0 for a row
        that sees nothing. Never the padded length: a padded, packed or windowed row counts what it
        sees.

    Example:
        Three keys, the last one padding, under a causal mask:

        >>> padding = torch.tensor([[True, True, False]])
        >>> visible_keys(Masking(1, 1, 1, 3, 3, key_mask=padding, causal=True))
        tensor([[[1, 2, 2]]])
    """
    masks = [
        tensor for tensor in (masking.boolean, *masking.additive) if isinstance(tensor, Tensor)
    ]
    if any(mask.shape[3] != 1 for mask in masks):
        return _read(masking, masks)
    seen = _seen_keys(masking, masks)
    start, stop = _reach(masking)
    if masking.query_documents is not None and masking.key_documents is not None:
        return _in_documents(masking, seen, start, stop)
    if seen is None:
        count = (stop - start).clamp(min=0)
        return count.expand(masking.batch, 1, masking.queries).clone()
    before = torch.nn.functional.pad(seen.to(torch.int64).cumsum(-1), (1, 0))
    count = before[..., torch.maximum(start, stop)] - before[..., start]
    return count.expand(masking.batch, -1, -1).clone()


def _reach(masking: Masking) -> tuple[Tensor, Tensor]:
    """The range of keys that position alone allows each row: first, and one past the last, (L,)."""
    position = torch.arange(masking.queries, device=masking.device) + masking.offset
    start = torch.zeros_like(position)
    stop = torch.full_like(position, masking.keys)
    if masking.window is not None:
        start = (position - masking.window + 1).clamp(min=0, max=masking.keys)
        stop = torch.minimum(stop, position + masking.window)
    if masking.causal:
        stop = torch.minimum(stop, position + 1)
    return start, stop.clamp(min=0)


def _seen_keys(masking: Masking, masks: list[Tensor]) -> Tensor | None:
    """Keys that masks without a row dimension allow, (B or 1, Hq or 1, S); None for all."""
    seen = None
    if masking.key_mask is not None:
        seen = masking.key_mask[:, None]
    for mask in masks:
        part = (mask if mask.dtype == torch.bool else torch.logical_not(hides(mask))).squeeze(3)
        if part.shape[1] * part.shape[2] == 1:
            part = part.squeeze(2)
        else:
            part = part.expand(-1, masking.heads, masking.group, -1).flatten(1, 2)
        part = part.expand(-1, -1, masking.keys)
        seen = part if seen is None else seen & part
    return seen


def _in_documents(masking: Masking, seen: Tensor | None, start: Tensor, stop: Tensor) -> Tensor:
    """Number of allowed keys in each row's own document.

    Keys are sorted by (document, column), and the rank of a document's first key stands for the
    document, so that one number orders both.
    """
    assert masking.query_documents is not None
    assert masking.key_documents is not None
    B, S = masking.batch, masking.keys
    keys = masking.key_documents.expand(B, -1).to(torch.int64).contiguous()
    rows = masking.query_documents.expand(B, -1).to(torch.int64).contiguous()
    ids, order = keys.sort(dim=-1, stable=True)
    code = torch.searchsorted(ids, ids) * (S + 1) + order
    first = torch.searchsorted(ids, rows)
    present = torch.searchsorted(ids, rows, right=True) > first
    low = torch.searchsorted(code, first * (S + 1) + start)
    high = torch.searchsorted(code, first * (S + 1) + torch.maximum(start, stop))
    if seen is None:
        count = (high - low)[:, None]
    else:
        seen = seen.expand(B, -1, -1)
        heads = seen.shape[1]
        sorted_seen = seen.gather(-1, order[:, None].expand(-1, heads, -1)).to(torch.int64)
        before = torch.nn.functional.pad(sorted_seen.cumsum(-1), (1, 0))
        low, high = (edge[:, None].expand(-1, heads, -1) for edge in (low, high))
        count = before.gather(-1, high) - before.gather(-1, low)
    return torch.where(present[:, None], count, 0)


def _read(masking: Masking, masks: list[Tensor]) -> Tensor:
    """Count the keys of a mask that differs by row, block by block."""
    by_head = any(mask.shape[1] * mask.shape[2] != 1 for mask in masks)
    heads = masking.heads * masking.group if by_head else 1
    result = torch.zeros(
        masking.batch, heads, masking.queries, dtype=torch.int64, device=masking.device
    )
    step = max(1, BLOCK_ELEMENTS // max(1, heads * masking.keys))
    width = max(1, BLOCK_ELEMENTS // max(1, heads))
    for b in range(masking.batch):
        for i in range(0, masking.queries, step):
            rows = slice(i, min(i + step, masking.queries))
            region = Region(slice(b, b + 1), slice(0, masking.heads), rows)
            size = (1, masking.heads, masking.group) if by_head else (1, 1, 1)
            for tile in masking.tiles(region, width):
                count: Tensor | int = tile.width
                if tile.hidden is not None:
                    count = tile.hidden.visible(tile.width, torch.int64)
                    length = rows.stop - rows.start
                    count = count.expand(*size, length).reshape(heads, length)
                result[b, :, rows] += count
    return result
