"""Attention by whole rows: for weights that need all scores of a row before they know one weight.

A block of query rows is taken against every key it can see, weighted, multiplied with the values
and summed up. Memory is that of one block; under autograd a block keeps its inputs and is run again
for its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from acutance.kernels.tiles import accumulate_dtype
from acutance.masks import Masking, Region, Tile
from acutance.rowstats import RowState, WeightSums, observe, observe_weights
from acutance.weights import Weighting

__all__ = ["ScoreTile", "WeighedRows", "weigh_rows"]

#: Scores of one block: 8 MiB in float32.
BLOCK_ELEMENTS = 1 << 21

#: Scores (b, Hq, l, s) of queries (b, Hq, l, E) with keys (b, H, s, E) that begin at a position.
ScoreTile = Callable[[Tensor, Tensor, int], Tensor]


class WeighedRows(NamedTuple):
    """What a call gives: the output (B, Hq, L, Ev), absent without values, and each row's sums."""

    out: Tensor | None
    weights: WeightSums
    scores: RowState


def weigh_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    masking: Masking,
    weighting: Weighting,
    *,
    scale: float,
    row_scale: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    score: ScoreTile | None = None,
) -> WeighedRows:
    """Weights of any kind over validated input, row block by row block.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev), or None for the statistics alone.
        masking: which keys each row sees, and what is added to its scores.
        weighting: how scores become weights.
        scale: factor of the scores.
        row_scale: another for each row, (B, Hq, L, 1).
        softcap: bounds the scaled scores as c · tanh(s / c).
        dropout_p: probability of dropping a weight, after the statistics are taken.
        score: scores of a block, before the scale; None is the dot product.

    Returns:
        Output and sums, the latter in float32 or float64.
    """
    dtype = accumulate_dtype(query.dtype)
    grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (query, key, value, *masking.additive)
    )

    def block(region: Region) -> tuple[Tensor | None, WeightSums, RowState]:
        return _block(
            query,
            key,
            value,
            masking,
            weighting,
            scale,
            row_scale,
            softcap,
            dropout_p,
            score,
            region,
            dtype,
        )

    grad = grad or (torch.is_grad_enabled() and (score is not None or _learned(weighting)))
    batches = [slice(b, b + 1) for b in range(masking.batch)] or [slice(0, 0)]
    results: list[list[tuple[Tensor | None, WeightSums, RowState]]] = []
    for batch in batches:
        results.append([])
        for row in _row_blocks(masking):
            region = Region(batch, slice(0, masking.heads), row)
            again = checkpoint(block, region, use_reentrant=False) if grad else block(region)
            results[-1].append(again)
    outs = [[out for out, _, _ in rows if out is not None] for rows in results]
    return WeighedRows(
        out=None if value is None else torch.cat([torch.cat(rows, 2) for rows in outs]),
        weights=WeightSums(*_joined([[weights for _, weights, _ in rows] for rows in results])),
        scores=RowState(*_joined([[scores for _, _, scores in rows] for rows in results])),
    )


def _learned(weighting: Weighting) -> bool:
    return any(isinstance(part, Tensor) and part.requires_grad for part in vars(weighting).values())


def _row_blocks(masking: Masking) -> list[slice]:
    across = max(1, masking.heads * masking.group * masking.keys)
    rows = max(1, BLOCK_ELEMENTS // across)
    starts = range(0, masking.queries, rows)
    return [slice(i, min(i + rows, masking.queries)) for i in starts] or [slice(0, 0)]


def _joined(blocks: list[list[tuple[Tensor, ...]]]) -> Iterator[Tensor]:
    """Each field of blocks' sums as one tensor (B, Hq, L), or (B, Hq, L, 0) where it is absent."""
    for field in range(len(blocks[0][0])):
        yield torch.cat([torch.cat([block[field] for block in rows], 2) for rows in blocks])


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    masking: Masking,
    weighting: Weighting,
    scale: float,
    row_scale: Tensor | None,
    softcap: float | None,
    dropout_p: float,
    score: ScoreTile | None,
    region: Region,
    dtype: torch.dtype,
) -> tuple[Tensor | None, WeightSums, RowState]:
    q = query[region.batch, :, region.rows].to(dtype)
    k = key[region.batch].to(dtype)
    rows = region.rows.stop - region.rows.start
    tile = next(masking.tiles(region, max(1, masking.keys)), None) if rows else None
    start, stop = (0, 0) if tile is None else (tile.start, tile.stop)
    k = k[:, :, start:stop]
    fold = (q.shape[0], masking.heads, masking.group, rows)
    if score is None:
        s = (q.reshape(*fold[:2], fold[2] * rows, q.shape[-1]) @ k.mT).view(*fold, stop - start)
    else:
        s = score(q, k, start).to(dtype).view(*fold, stop - start)
    s = s * scale
    if row_scale is not None:
        part = row_scale[region.batch, :, region.rows].to(dtype)
        s = s * part.view(*fold, 1)
    if softcap is not None:
        s = torch.tanh(s / softcap) * softcap
    seen = None
    if tile is not None:
        if tile.alibi is not None:
            slopes, distance = tile.alibi
            s = s - slopes.to(dtype) * distance.to(dtype)
        for bias in tile.biases:
            s = s + bias.to(dtype)
        seen = _seen(tile, fold)
    s = s.flatten(1, 2)
    weights = weighting(s, seen) if s.numel() else s
    distribution = weighting.distribution
    sums = observe_weights(weights, seen, distribution=distribution, first_key=start)
    state = observe(s, seen, first_key=start)
    if value is None:
        return None, sums, state
    if dropout_p > 0.0:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    v = value[region.batch, :, start:stop].to(dtype)
    out = weights.view(*fold[:2], fold[2] * rows, stop - start) @ v
    return out.view(*q.shape[:3], v.shape[-1]).to(query.dtype), sums, state


def _seen(tile: Tile, fold: tuple[int, int, int, int]) -> Tensor | None:
    """Which keys of a tile each row sees, (batch or 1, Hq or 1, rows or 1, keys)."""
    hidden = tile.hidden
    if hidden is None:
        return None
    seen = torch.logical_not(hidden.mask)
    if seen.shape[1] != 1 or seen.shape[2] != 1:
        seen = seen.expand(-1, *fold[1:3], -1, -1)
    seen = seen.flatten(1, 2)
    left, right = hidden.start, tile.width - hidden.stop
    return torch.nn.functional.pad(seen, (left, right), value=True) if left or right else seen
