"""Parts of a call: some of its heads, and some of its rows, drawn at random with a seed."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall

__all__ = ["Sample", "draw", "take_heads", "take_rows"]


@dataclass(frozen=True)
class Sample:
    """Rows drawn from one call, without replacement, all equally likely.

    Attributes:
        positions: (B, r) queries, ascending in each sequence; the tail of a row may be filler.
        real: boolean (B, r), False on filler.
        total: rows the call has, padding aside.
        taken: rows drawn.
    """

    positions: Tensor
    real: Tensor
    total: int
    taken: int

    def of(self, rows: Tensor) -> Tensor:
        """The drawn rows of a tensor (B, H, L, ...)."""
        index = self.positions.view(len(self.positions), 1, -1, *[1] * (rows.dim() - 3))
        index = index.expand(-1, rows.shape[1], -1, *rows.shape[3:])
        return torch.gather(rows.expand(len(self.positions), *rows.shape[1:]), 2, index)


def draw(
    batch: int,
    queries: int,
    real: Tensor | None,
    most: int,
    seed: tuple[object, ...],
    device: torch.device | None = None,
) -> Sample | None:
    """Draw at most ``most`` rows of a call; None where it has no more than that.

    Args:
        batch: B.
        queries: L.
        real: boolean (B, L), False on padding; None if all rows count.
        most: rows to draw.
        seed: what decides the draw: the same parts, the same rows.
        device: where the rows are.

    Example:
        >>> sample = draw(2, 5, None, 3, (0, "layer", 0))
        >>> sample.taken, sample.total, int(sample.real.sum())
        (3, 10, 3)
        >>> draw(2, 5, None, 10, (0,)) is None
        True
    """
    if real is None:
        rows = torch.arange(batch * queries, device="cpu")
    else:
        rows = real.flatten().nonzero()[:, 0].cpu()
    if len(rows) <= most:
        return None
    chance = torch.Generator("cpu").manual_seed(zlib.crc32(repr(seed).encode()))
    order = torch.randperm(len(rows), generator=chance, device="cpu")
    drawn = rows[order[:most]].sort().values
    sequence, place = drawn // queries, drawn % queries
    counts = torch.bincount(sequence, minlength=batch)
    widest = int(counts.max())
    column = torch.arange(most, device="cpu") - (counts.cumsum(0) - counts)[sequence]
    positions = torch.zeros(batch, widest, dtype=torch.int64, device="cpu")
    there = torch.zeros(batch, widest, dtype=torch.bool, device="cpu")
    positions[sequence, column], there[sequence, column] = place, True
    return Sample(positions.to(device), there.to(device), len(rows), most)


def take_heads(call: AttentionCall, heads: list[int]) -> AttentionCall:
    """The call of some of the query heads, with the key head of each."""
    total, group = call.query.shape[1], call.query.shape[1] // call.key.shape[1]
    shared = [head // group for head in heads]

    def of(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.dim() < 3 or tensor.shape[-3] != total or total == 1:
            return tensor
        return tensor[..., heads, :, :]

    return replace(
        call,
        query=call.query[:, heads],
        key=call.key[:, shared],
        value=call.value[:, shared],
        attn_mask=of(call.attn_mask),
        bias=of(call.bias),
        sinks=None if call.sinks is None else call.sinks[heads],
    )


def take_rows(call: AttentionCall, sample: Sample) -> AttentionCall:
    """The call of the rows drawn: what depends on their positions becomes a mask."""
    seen = call.seen_by_position(sample.positions)

    def of(tensor: Tensor | None) -> Tensor | None:
        while tensor is not None and tensor.dim() < 4:
            tensor = tensor.unsqueeze(0)
        if tensor is None or tensor.shape[2] == 1:
            return tensor
        return sample.of(tensor)

    mask = of(call.attn_mask)
    if seen is not None and mask is not None and mask.dtype != torch.bool:
        mask = torch.where(seen, mask, -torch.inf)
    elif seen is not None:
        mask = seen if mask is None else mask & seen
    return replace(
        call,
        query=sample.of(call.query),
        attn_mask=mask,
        bias=of(call.bias),
        is_causal=False,
        query_offset=0,
        window=None,
        cu_seqlens=None,
        real=sample.real,
    )
