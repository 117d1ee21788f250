"""Scores a block of whole rows at a time: what the structure of a row is read from.

A block is some query rows of some heads against every key they can see, so memory is that of the
rows in flight and never that of the map.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.kernels.tiles import accumulate_dtype
from acutance.masks import Masking, Region, Tile

__all__ = ["Block", "Rows", "blocks"]

#: Scores of a block: 2 MiB in float32, which stays in a shared cache.
BLOCK_ELEMENTS = 1 << 19
_FEW_ROWS = 64  # rows of a block below which fewer heads are taken at once


@dataclass(frozen=True)
class Rows:
    """A validated call: what decides the scores of its rows.

    Attributes:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        masking: which keys each row sees, and what is added to its scores.
        scale: factor of the scores.
        softcap: bounds the scaled scores as c · tanh(s / c).
        sinks: (Hq,) logits in the normaliser.
    """

    query: Tensor
    key: Tensor
    masking: Masking
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def cast(self) -> Rows:
        """The same with the inputs in the dtype that autocast gives those of SDPA, if it is on."""
        kind = self.query.device.type
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return self
        if self.query.dtype == torch.float64:
            return self
        dtype = torch.get_autocast_dtype(kind)
        return replace(self, query=self.query.to(dtype), key=self.key.to(dtype))

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Context in which products are made in the dtype they are given in, without gradients."""
        with torch.no_grad(), torch.autocast(self.query.device.type, enabled=False):
            yield

    @property
    def dtype(self) -> torch.dtype:
        """What everything is summed in."""
        return accumulate_dtype(self.query.dtype)


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


def blocks(rows: Rows, at: Region | None = None) -> Iterator[Block]:
    """The blocks of a call; rows that position alone hides every key from may be in none.

    Args:
        rows: the call.
        at: only this part of it, as one block.
    """
    masking = rows.masking
    for region in _regions(masking) if at is None else (at,):
        for tile in masking.tiles(region, max(1, masking.keys)):
            yield _block(rows, region, tile)


def _regions(masking: Masking) -> Iterator[Region]:
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


def _block(rows: Rows, region: Region, tile: Tile) -> Block:
    masking, dtype = rows.masking, rows.dtype
    b, h, r = region.batch, region.heads, region.rows
    group = masking.group
    heads = slice(h.start * group, h.stop * group)
    q = rows.query[b, heads, r].to(dtype) * rows.scale
    k = rows.key[b, h, tile.start : tile.stop].to(dtype)
    count, length = q.shape[0], q.shape[2]
    fold = (count, h.stop - h.start, group, length)
    s = (q.reshape(*fold[:2], group * length, q.shape[-1]) @ k.mT).view(*fold, tile.width)
    if rows.softcap is not None:
        s.div_(rows.softcap).tanh_().mul_(rows.softcap)
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
    if rows.sinks is not None:
        sink = rows.sinks.to(dtype).view(1, masking.heads, group, 1)[:, h]
    return Block(region, tile.start, s, seen, sink)
