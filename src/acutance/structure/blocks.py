"""Scores a block of whole rows at a time: what the structure of a row is read from.

A block is some query rows of some heads against every key they can see, so memory is that of the
rows in flight and never that of the map.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.kernels.call import KernelCall, accumulate_dtype
from acutance.masks import Masking, Region, Tile
from acutance.shapes import cast_inputs

__all__ = ["Block", "blocks", "exact", "last_visible"]

#: Scores of a block: 2 MiB in float32, which stays in a shared cache.
BLOCK_ELEMENTS = 1 << 19
_FEW_ROWS = 64  # rows of a block below which fewer heads are taken at once


@contextmanager
def exact(call: KernelCall) -> Iterator[KernelCall]:
    """The call with inputs as autocast casts them, in a context without autocast and gradients."""
    query, key, _ = cast_inputs(call.query, call.key, None)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        yield call._replace(query=query.detach(), key=key.detach())


class Block(NamedTuple):
    """Scores of some whole rows.

    Attributes:
        region: the batches, key heads and queries they are of.
        start: key of the first column.
        scores: (batch, heads, group, rows, width), −inf where a key is hidden.
        seen: boolean, each size full or 1, False where a key is hidden; None where none is.
        sink: (1, heads, group, 1) logits in the normaliser, or None.
    """

    region: Region
    start: int
    scores: Tensor
    seen: Tensor | None
    sink: Tensor | None

    def largest(self) -> Tensor:
        """The largest score of each row, (…, rows); −inf where it sees nothing."""
        s = self.scores
        return s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)

    def exponentials(self, top: Tensor) -> tuple[Tensor, Tensor]:
        """Weights times their normaliser, and the normaliser: (…, rows, width) and (…, rows).

        Written over the scores. A row that sees nothing has normaliser 0, or that of its sink.

        Args:
            top: what :meth:`largest` gives.
        """
        s = self.scores
        if self.sink is not None:
            top = torch.maximum(top, self.sink)
        top = torch.where(top == -torch.inf, 0.0, top)
        e = s.sub_(top.unsqueeze(-1)).exp_()
        Z = e.sum(-1)
        if self.sink is not None:
            Z = Z + torch.exp(self.sink - top)
        return e, Z


def blocks(call: KernelCall, at: Region | None = None) -> Iterator[Block]:
    """The blocks of a call; rows that position alone hides every key from may be in none.

    Inside of :func:`exact`.

    Args:
        call: the call; its values are not read.
        at: only this part of it, as one block.
    """
    masking = call.masking
    for region in _regions(masking) if at is None else (at,):
        for tile in masking.tiles(region, max(1, masking.keys)):
            yield _block(call, region, tile)


def _regions(masking: Masking) -> Iterator[Region]:
    """Regions of rows whose scores fill at most one block."""
    keys = max(1, masking.keys)
    if masking.window is not None:
        keys = min(keys, 2 * masking.window + _FEW_ROWS)
    whole = max(1, BLOCK_ELEMENTS // keys)  # rows of one head that fill a block
    few = min(masking.queries, _FEW_ROWS) * masking.group
    heads = min(masking.heads, max(1, whole // max(1, few)))
    rows = min(masking.queries, max(1, whole // (heads * masking.group)))
    batches = 1
    if heads == masking.heads and rows == masking.queries:
        batches = max(1, whole // max(1, rows * masking.group * heads))
    for b in range(0, masking.batch, batches):
        batch = slice(b, min(b + batches, masking.batch))
        for h in range(0, masking.heads, max(1, heads)):
            head = slice(h, min(h + heads, masking.heads))
            for i in range(0, masking.queries, max(1, rows)):
                yield Region(batch, head, slice(i, min(i + rows, masking.queries)))


def _block(call: KernelCall, region: Region, tile: Tile) -> Block:
    """The scores of one region, (B, H, g, L, S), with its visible keys and positions."""
    masking, rule, dtype = call.masking, call.rule, accumulate_dtype(call.query.dtype)
    b, h, r = region.batch, region.heads, region.rows
    group = masking.group
    heads = slice(h.start * group, h.stop * group)
    q = call.query[b, heads, r].to(dtype) * rule.scale
    k = call.key[b, h, tile.start : tile.stop].to(dtype)
    count, length = q.shape[0], q.shape[2]
    fold = (count, h.stop - h.start, group, length)
    s = (q.reshape(*fold[:2], group * length, q.shape[-1]) @ k.mT).view(*fold, tile.width)
    if rule.softcap is not None:
        s.div_(rule.softcap).tanh_().mul_(rule.softcap)
    if tile.alibi is not None:
        slopes, distance = tile.alibi
        s.addcmul_(slopes.to(dtype), distance.to(dtype), value=-1.0)
    for bias in tile.biases:
        s.add_(bias.to(dtype))
    seen = None
    if tile.hidden is not None:
        hidden = tile.hidden
        s[..., hidden.start : hidden.stop].masked_fill_(hidden.mask, -torch.inf)
        seen = torch.logical_not(hidden.mask)
        left, right = hidden.start, tile.width - hidden.stop
        if left or right:
            seen = torch.nn.functional.pad(seen, (left, right), value=True)
    sink = None
    if rule.sinks is not None:
        sink = rule.sinks.to(dtype).view(1, masking.heads, group, 1)[:, h]
    return Block(region, tile.start, s, seen, sink)


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
