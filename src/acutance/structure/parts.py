"""Part: where the weight of one block of whole rows goes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acutance.structure.blocks import Block

__all__ = ["NO_PEAK", "PEAKS", "Part", "Places", "critical_ratio"]

#: How far from its query the largest weight of a row is looked for.
PEAKS = 8
#: Stands for a row whose largest weight is not that near, or not alone.
NO_PEAK = -128


class Places(NamedTuple):
    """What places and tokens of a call's rows and keys are measured by.

    Attributes:
        positions: (1 or B, L) where queries stand among the keys; None where they are of another
            sequence, which leaves everything about distance NaN.
        tokens: (1 or B, S) ids of the keys, or None.
        asked: (1 or B, L) ids of the queries, or None.
        special: boolean (1 or B, S), True on special tokens, or None.
        critical_every: rows from one whose scores are sorted to the next; 0 is none.
        octaves: of distance, of each side.
    """

    positions: Tensor | None = None
    tokens: Tensor | None = None
    asked: Tensor | None = None
    special: Tensor | None = None
    critical_every: int = 1
    octaves: int = 1


class Part:
    """The structure of one block; tensors are (batch, heads, group, rows, …)."""

    def __init__(self, block: Block, places: Places) -> None:
        positions, tokens, asked, special, every, octaves = places
        batch, _, row = block.region.batch, block.region.heads, block.region.rows
        width = block.scores.shape[-1]
        columns = slice(block.start, block.start + width)
        self._block, self._every, self._count = block, every, octaves
        self._seen = block.seen
        at = None if positions is None else _cut(positions, batch)[:, row] - block.start
        #: column of each query, (batch or 1, 1, 1, rows); it may be outside the block
        self._at = None if at is None else at[:, None, None]
        self._special = None if special is None else _cut(special, batch)[:, columns]
        self._same = None
        if tokens is not None and asked is not None:
            keys, queries = _cut(tokens, batch)[:, columns], _cut(asked, batch)[:, row]
            same = (queries[:, :, None] == keys[:, None, :]) & (queries >= 0)[:, :, None]
            if at is not None:
                same &= torch.arange(width, device=same.device) != at[:, :, None]
            self._same = same[:, None, None]
        self.octaves = self.even = self.peak = block.scores.new_empty(0)

    def metrics(self) -> dict[str, Tensor]:
        """Every metric of this block's rows; also fills ``octaves``, ``even`` and ``peak``."""
        found: dict[str, Tensor] = {}
        s = self._block.scores
        if self._every and s.shape[-1]:
            found["critical_ratio"] = self._critical(s)
        top = self._block.largest()
        if self._at is not None:
            self.peak = self._peak(s, top)
        e, Z = self._block.exponentials(top)
        none = Z == 0 if self._seen is None else ~self._seen.any(-1).expand(Z.shape)
        inverse = torch.where(none, torch.nan, 1.0 / torch.where(none, 1.0, Z))
        if self._special is not None:
            marked = self._special[:, None, None, None]
            mass = (e @ self._special.to(e.dtype)[:, None, None, :, None]).squeeze(-1)
            found["mass_special"] = self._where(marked, mass * inverse)
        if self._same is not None:
            mass = (e * self._same).sum(-1)
            found["mass_same"] = self._where(self._same, mass * inverse)
        if self._at is not None:
            found["mass_self"] = self._one(e, self._at) * inverse
            found["mass_previous"] = self._one(e, self._at - 1) * inverse
            share = torch.where(none, 0.0, inverse)
            self.octaves = self._octave_sums(e.cumsum(-1)) * share[..., None, None]
            self.even = self._alike(e)
            width = e.shape[-1]
            away = (torch.arange(width, device=e.device) - self._at.unsqueeze(-1)).abs()
            found["attention_distance"] = e.mul_(away.to(e.dtype)).sum(-1) * inverse
        return found

    def _where(self, kind: Tensor, mass: Tensor) -> Tensor:
        """The mass; NaN for rows that see no key of that kind."""
        there = kind if self._seen is None else kind & self._seen
        return torch.where(there.any(-1), mass, torch.nan)

    def _one(self, e: Tensor, column: Tensor) -> Tensor:
        """The entry of one column of each row, NaN where there is none or it is hidden."""
        width = e.shape[-1]
        inside = (column >= 0) & (column < width)
        if width == 0:
            return torch.full(e.shape[:-1], torch.nan, dtype=e.dtype, device=e.device)
        place = column.clamp(0, width - 1).unsqueeze(-1)
        if self._seen is not None:
            size = torch.broadcast_shapes(self._seen.shape[:-1], place.shape[:-1])
            keys = self._seen.expand(*size, width)
            inside = inside & keys.gather(-1, place.expand(*size, 1)).squeeze(-1)
        value = e.gather(-1, place.expand(*e.shape[:-1], 1)).squeeze(-1)
        return torch.where(inside, value, torch.nan)

    def _octave_sums(self, running: Tensor) -> Tensor:
        """Sums over each octave of query-key distance, from cumulative sums over the columns.

        Returns (…, 2, K): keys behind the query, itself included, and ahead of it; K octaves.
        """
        assert self._at is not None
        step = 1 << torch.arange(self._count, device=running.device)
        behind = self._at.unsqueeze(-1) + 1 - step  # the first column of each octave
        ahead = self._at.unsqueeze(-1) + step  # the column after each octave
        edges = torch.cat([behind, ahead], -1)
        shape = (*running.shape[:-1], edges.shape[-1])
        if running.shape[-1] == 0:
            return running.new_zeros(*running.shape[:-1], 2, self._count)
        place = (edges - 1).clamp(0, running.shape[-1] - 1).expand(shape)
        below = torch.where(edges > 0, running.gather(-1, place), 0.0)
        low, high = below[..., : self._count], below[..., self._count :]
        own = high[..., :1] - low[..., :1]
        left, right = -low.diff(dim=-1), high.diff(dim=-1)
        nothing = torch.zeros_like(own)
        parts = [torch.cat([own, left], -1), torch.cat([nothing, right], -1)]
        return torch.stack(parts, -2).clamp_(min=0.0)

    def _alike(self, e: Tensor) -> Tensor:
        """Shares of the visible keys by octave."""
        assert self._at is not None
        ones = e.new_ones(1, 1, 1, 1, e.shape[-1])
        running = (ones if self._seen is None else self._seen.to(e.dtype)).cumsum(-1)
        lead = torch.broadcast_shapes(running.shape[:-1], self._at.shape)
        running = running.expand(*lead, -1)
        if running.shape[-1] == 0:
            return self._octave_sums(running)
        return self._octave_sums(running) / running[..., -1:].unsqueeze(-1).clamp(min=1.0)

    def _peak(self, s: Tensor, top: Tensor) -> Tensor:
        """Relative position of the one largest score of each row, if it is near."""
        assert self._at is not None
        near = torch.arange(-PEAKS, PEAKS + 1, device=s.device)
        column = self._at.unsqueeze(-1) + near
        if s.shape[-1] == 0:
            return torch.full(s.shape[:-1], NO_PEAK, device=s.device)
        place = column.clamp(0, s.shape[-1] - 1).expand(*s.shape[:-1], -1)
        largest = (s.gather(-1, place) == top.unsqueeze(-1)) & (column == place)
        largest &= (top > -torch.inf).unsqueeze(-1)
        alone = largest.sum(-1) == 1
        return torch.where(alone, largest.to(torch.uint8).argmax(-1) - PEAKS, NO_PEAK)

    def _critical(self, s: Tensor) -> Tensor:
        """β/Λ of every ``every``-th row, NaN on the others."""
        region = self._block.region.rows
        first = -region.start % self._every
        found = torch.full(s.shape[:-1], torch.nan, dtype=s.dtype, device=s.device)
        if first >= s.shape[-2] or s.shape[-1] < 2:
            return found
        found[..., first :: self._every] = critical_ratio(s[..., first :: self._every, :])
        return found


def critical_ratio(scores: Tensor) -> Tensor:
    """β/Λ of rows (…, keys) of scores, −inf where a key is hidden; NaN where one key is seen."""
    ordered = scores.sort(-1, descending=True).values
    top = ordered[..., :1]
    gaps = torch.where(top == -torch.inf, torch.nan, top) - ordered[..., 1:]
    ranks = torch.arange(2, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype).log()
    ratio = (gaps / ranks).amin(-1)
    return torch.where(ratio == torch.inf, torch.nan, ratio)


def _cut(tensor: Tensor, batch: slice) -> Tensor:
    return tensor if tensor.shape[0] == 1 else tensor[batch]
