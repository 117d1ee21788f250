"""The pure-torch kernel: every row sum and the output, tile by tile, in memory of O(n).

A tile's scores are made by one matrix product into a buffer that is used again for every tile, and
everything a row needs is summed while the tile is in cache. Between tiles a row carries only its
running sums (see :mod:`acutance.rowstats.state`).

Three things keep float32 exact enough: exponents are of ``s − m`` with m the row's running
maximum, second moments are taken about the tile's own mean, and the exponent is multiplied by
log₂ e *after* that subtraction (folding it into the query costs half an ulp of the score itself).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acutance.kernels.running import Running, inverse_normaliser, ratio
from acutance.kernels.tiles import (
    Buffers,
    Rule,
    Work,
    accumulate_dtype,
    draw_kept,
    dropout_generator,
    fold_rows,
    sink_rows,
    tile_rows,
    tile_scores,
    tile_shape,
)
from acutance.masks import Masking

__all__ = ["Sums", "forward"]

#: Sums that are stored together, one copy a tile row.
_STACKED = ("n", "m", "Z", "U", "W", "Q", "mean", "M2", "depth", "first")


class Sums(NamedTuple):
    """What the kernel returns: the output and the sums of :class:`acutance.rowstats.RowState`.

    Fields are (B, Hq, L), ``out`` and the values' moments (B, Hq, L, Ev); absent ones have no
    element.
    """

    out: Tensor
    n: Tensor
    m: Tensor
    Z: Tensor
    U: Tensor
    W: Tensor
    Q: Tensor
    mean: Tensor
    M2: Tensor
    depth: Tensor
    first: Tensor
    first_index: Tensor
    O: Tensor
    R1: Tensor
    R2: Tensor


def forward(
    query: Tensor, key: Tensor, value: Tensor | None, masking: Masking, rule: Rule, noise: bool
) -> Sums:
    """The output and every row sum of softmax attention, for validated input.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev), or None for the statistics alone.
        masking: which keys each row sees.
        rule: scale, softcap, sinks and dropout.
        noise: also sum e² v and e² ‖v‖² (a third matrix product).

    Returns:
        The sums, in float32 or float64; ``out`` in the query's dtype.
    """
    dtype = accumulate_dtype(query.dtype)
    B, H, g, L = masking.batch, masking.heads, masking.group, masking.queries
    width = 0 if value is None else value.shape[-1]
    q5 = query.reshape(B, H, g, L, query.shape[-1])

    def rows(*extra: int, dtype: torch.dtype = dtype) -> Tensor:
        return query.new_empty(B, H, g, L, *extra, dtype=dtype)

    kept = width if noise else 0
    stacked = query.new_empty(len(_STACKED), B, H, g, L, dtype=dtype)
    sums = Sums(
        out=rows(width, dtype=query.dtype),
        **dict(zip(_STACKED, stacked, strict=True)),
        first_index=rows(dtype=torch.int64),
        O=rows(kept),
        R1=rows(kept),
        R2=rows() if noise else rows(0),
    )
    _, tile_width, _ = tile_shape(masking)
    scratch = Buffers(query, dtype)
    generator = dropout_generator(rule, query.device)
    for work in tile_rows(key, value, masking, dtype):
        region = work.region
        q = fold_rows(q5, work).to(dtype) * rule.scale
        running = Running(q, width, noise)
        centre = work.value.mean(1, keepdim=True) if noise and work.value is not None else None
        for tile in masking.tiles(region, tile_width):
            s = tile_scores(q, work, tile, rule.softcap, scratch)
            keep = draw_kept(tuple(s.shape), rule, generator, s)
            running.observe(s, work, tile, scratch, keep, centre)
        _store(sums, stacked, running, work, rule, masking, centre)
    apart = {name: part.clone() for name, part in zip(_STACKED, stacked, strict=True)}
    sums = sums._replace(**apart | {"n": apart["n"].to(torch.int64)})
    return sums._replace(
        **{name: part.reshape(B, H * g, *part.shape[3:]) for name, part in sums._asdict().items()}
    )


def _store(
    sums: Sums,
    stacked: Tensor,
    running: Running,
    work: Work,
    rule: Rule,
    masking: Masking,
    centre: Tensor | None,
) -> None:
    """Write a finished tile row into the results."""
    region = work.region

    def put(target: Tensor, rows: Tensor) -> None:
        part = target[region.batch, region.heads, :, region.rows]
        part.copy_(rows.view(part.shape))

    part = stacked[:, region.batch, region.heads, :, region.rows]
    part.copy_(torch.stack([getattr(running, name) for name in _STACKED]).view(part.shape))
    put(sums.first_index, running.first_index)
    if sums.O.shape[-1] and centre is not None:
        # moments of the values about their own e²-weighted mean: no cancellation when they merge
        average = running.R1 * ratio(torch.ones_like(running.Q), running.Q).unsqueeze(-1)
        put(sums.O, running.O if running.whole is None else running.whole)
        put(sums.R1, torch.where((running.Q == 0).unsqueeze(-1), 0.0, average + centre))
        spread = running.R2 - running.Q * average.square().sum(-1)
        put(sums.R2, spread.clamp(min=0.0))
    if sums.out.shape[-1]:
        sink = sink_rows(rule, work, masking, running.Z)
        inverse = inverse_normaliser(running.Z, running.m, sink)
        put(sums.out, running.O.mul_(inverse.unsqueeze(-1)))
