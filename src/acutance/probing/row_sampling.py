"""Restrict a captured call to some of its heads, or to rows sampled at random with a seed."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall

__all__ = ["Sample", "draw", "take_heads", "take_rows"]


@dataclass(frozen=True)
class Sample:
    """Rows sampled uniformly, without replacement, from one call.

    Attributes:
        positions: (B, r) indices of sampled queries, ascending; padded at the end of each sequence.
        real: boolean (B, r), False where ``positions`` is padded.
        total: number of rows of the call, without padding.
        n_sampled: number of sampled rows.
    """

    positions: Tensor
    real: Tensor
    total: int
    n_sampled: int

    def select(self, rows: Tensor) -> Tensor:
        """The sampled rows (B, H, r, ...) of a tensor (B, H, L, ...)."""
        index = self.positions.view(len(self.positions), 1, -1, *[1] * (rows.dim() - 3))
        index = index.expand(-1, rows.shape[1], -1, *rows.shape[3:])
        return torch.gather(rows.expand(len(self.positions), *rows.shape[1:]), 2, index)


def draw(
    batch: int,
    queries: int,
    real: Tensor | None,
    max_rows: int,
    seed: tuple[object, ...],
    device: torch.device | None = None,
) -> Sample | None:
    """Sample ``max_rows`` rows of a call at random; None if the call has no more rows than that.

    Args:
        batch: number of sequences, B.
        queries: queries per sequence, L.
        real: boolean (B, L), False on padding; None if there is no padding.
        max_rows: number of rows to sample.
        seed: any values; the same values give the same rows.
        device: device of the result.

    Example:
        >>> sample = draw(2, 5, None, 3, (0, "layer", 0))
        >>> sample.n_sampled, sample.total, int(sample.real.sum())
        (3, 10, 3)
        >>> draw(2, 5, None, 10, (0,)) is None
        True
    """
    if real is None:
        rows = torch.arange(batch * queries, device="cpu")
    else:
        rows = real.flatten().nonzero()[:, 0].cpu()
    if len(rows) <= max_rows:
        return None
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(repr(seed).encode()))
    order = torch.randperm(len(rows), generator=generator, device="cpu")
    drawn = rows[order[:max_rows]].sort().values
    sequence, place = drawn // queries, drawn % queries
    counts = torch.bincount(sequence, minlength=batch)
    longest = int(counts.max())
    column = torch.arange(max_rows, device="cpu") - (counts.cumsum(0) - counts)[sequence]
    positions = torch.zeros(batch, longest, dtype=torch.int64, device="cpu")
    is_real = torch.zeros(batch, longest, dtype=torch.bool, device="cpu")
    positions[sequence, column], is_real[sequence, column] = place, True
    return Sample(positions.to(device), is_real.to(device), len(rows), max_rows)


def take_heads(call: AttentionCall, heads: list[int]) -> AttentionCall:
    """Restrict a call to some query heads, with the key head of each."""
    total, group = call.query.shape[1], call.query.shape[1] // call.key.shape[1]
    shared = [head // group for head in heads]

    def select(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.dim() < 3 or tensor.shape[-3] != total or total == 1:
            return tensor
        return tensor[..., heads, :, :]

    return replace(
        call,
        query=call.query[:, heads],
        key=call.key[:, shared],
        value=call.value[:, shared],
        attn_mask=select(call.attn_mask),
        bias=select(call.bias),
        sinks=None if call.sinks is None else call.sinks[heads],
    )


def take_rows(call: AttentionCall, sample: Sample) -> AttentionCall:
    """Restrict a call to sampled rows; causality, window and documents become an explicit mask."""
    visible = call.seen_by_position(sample.positions)

    def select(tensor: Tensor | None) -> Tensor | None:
        while tensor is not None and tensor.dim() < 4:
            tensor = tensor.unsqueeze(0)
        if tensor is None or tensor.shape[2] == 1:
            return tensor
        return sample.select(tensor)

    mask = select(call.attn_mask)
    if visible is not None and mask is not None and mask.dtype != torch.bool:
        mask = torch.where(visible, mask, -torch.inf)
    elif visible is not None:
        mask = visible if mask is None else mask & visible
    return replace(
        call,
        query=sample.select(call.query),
        attn_mask=mask,
        bias=select(call.bias),
        is_causal=False,
        query_offset=0,
        window=None,
        cu_seqlens=None,
        real=sample.real,
    )
