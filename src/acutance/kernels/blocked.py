"""The pure-torch kernel: every row sum and the output, tile by tile, in memory of O(n).

A tile's scores are made by one matrix product into a buffer that is used again for every tile, and
everything a row needs is summed while the tile is in cache. Between tiles a row carries only its
running sums (see :mod:`acutance.rowstats.state`).

Three things keep float32 exact enough: exponents are of ``s − m`` with m the row's running
maximum, second moments are taken about the tile's own mean, and the exponent is multiplied by
log₂ e *after* that subtraction, unless every score is small: folding it into the query costs half
an ulp of the score itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acutance.kernels.call import KernelCall, Rule, Sums, accumulate_dtype
from acutance.kernels.tile_sums import (
    LOG2E,
    MODERATE,
    Part,
    Running,
    inverse_normaliser,
    ratio,
    row_fields,
)
from acutance.kernels.tiles import (
    Buffers,
    Work,
    draw_kept,
    dropout_generator,
    fold_rows,
    sink_rows,
    tile_rows,
    tile_scores,
    tile_shape,
)
from acutance.masks import Masking
from acutance.rowstats.gaps import BINS

__all__ = ["forward"]


#: Sums that need no more than to be written down.
_AS_FOUND = ("out", "first_index", "O", "R1", "R2", "gaps")
#: Keys up to which float32 counts exactly.
EXACT = 1 << 24


def forward(call: KernelCall) -> Sums:
    """The output and every row sum of softmax attention, for validated input."""
    query, _, value, masking, rule, noise, gaps = call
    dtype = accumulate_dtype(query.dtype)
    B, H, g, L = masking.batch, masking.heads, masking.group, masking.queries
    width = 0 if value is None else value.shape[-1]
    q5 = query.reshape(B, H, g, L, query.shape[-1])

    def rows(*extra: int, dtype: torch.dtype = dtype) -> Tensor:
        return query.new_empty(B, H, g, L, *extra, dtype=dtype)

    kept = width if noise else 0
    found = _Found(
        n=rows(dtype=torch.int64) if masking.keys > EXACT else None,
        parts=query.new_empty(len(Part._fields) + 1, B, H, g, L, dtype=dtype),
        first_index=rows(dtype=torch.int64).zero_(),
        out=rows(width, dtype=query.dtype),
        O=rows(kept),
        R1=rows(kept),
        R2=rows() if noise else rows(0),
        gaps=rows(BINS if gaps else 0, dtype=torch.int32),
    )
    _, tile_width = tile_shape(masking)
    scratch = Buffers(query, dtype)
    generator = dropout_generator(rule, query.device)
    small = _moderate(call)
    # small scores take log₂ e along from the query, others are multiplied about their maximum
    folds = small and rule.softcap is None
    scale, log2 = (rule.scale * LOG2E, 1.0) if folds else (rule.scale, LOG2E)
    for work in tile_rows(call):
        q = fold_rows(q5, work).to(dtype) * scale
        running = Running(q, small, log2, gaps)
        centre = work.value.mean(1, keepdim=True) if noise and work.value is not None else None
        for tile in masking.tiles(work.region, tile_width):
            s = tile_scores(q, work, tile, rule.softcap, scratch)
            keep = draw_kept(tuple(s.shape), rule, generator, s)
            running.observe(s, work, tile, scratch, keep, centre)
        found.store(running, work, rule, masking, centre)
    fields = row_fields(found.parts, log2)
    if found.raw:
        sink = None if rule.sinks is None else rule.sinks.to(dtype).view(H, g, 1)
        found.out.mul_(inverse_normaliser(fields["Z"], fields["m"], sink).unsqueeze(-1))
    fields |= {name: getattr(found, name) for name in _AS_FOUND}
    fields["n"] = fields["n"].to(torch.int64) if found.n is None else found.n
    return Sums(**{name: part.view(B, H * g, *part.shape[3:]) for name, part in fields.items()})


@dataclass(frozen=True)
class _Found:
    """Output tensors of finished tile rows; all but ``parts`` have shape (B, H, group, L, …)."""

    n: Tensor | None  # None where the floating count in ``parts`` is exact
    parts: Tensor  # (fields of Part and the first score, B, H, group, L)
    first_index: Tensor
    out: Tensor
    O: Tensor
    R1: Tensor
    R2: Tensor
    gaps: Tensor

    @property
    def raw(self) -> bool:
        """Whether ``out`` contains the unnormalised Σ e v, to be divided for all rows at once."""
        return self.out.dtype == self.parts.dtype

    def store(
        self, running: Running, work: Work, rule: Rule, masking: Masking, centre: Tensor | None
    ) -> None:
        """Write a finished tile row."""
        region = work.region

        def put(target: Tensor, rows: Tensor | float) -> None:
            where = target[region.batch, region.heads, :, region.rows]
            if not isinstance(rows, Tensor):
                where.fill_(rows)
            elif rows.numel():
                where.copy_(rows.view(where.shape))

        part = running.part()
        if self.n is not None:
            put(self.n, running.count())
        first = torch.zeros_like(part.Z) if running.first is None else running.first
        where = self.parts[:, region.batch, region.heads, :, region.rows]
        where.copy_(torch.stack([*part, first]).view(where.shape))
        if isinstance(running.first_index, Tensor) or running.first_index > 0:
            put(self.first_index, running.first_index)
        put(self.gaps, 0.0 if running.gaps is None else running.gaps)
        if running.O is None:  # no values, or no key in sight
            for target in (self.out, self.O, self.R1, self.R2):
                put(target, 0.0)
            return
        if centre is not None and running.R1 is not None and running.R2 is not None:
            # moments of the values about their own e²-weighted mean: no cancellation on merging
            Q = part.norm.square().unsqueeze(-1)
            average = running.R1 * ratio(torch.ones_like(Q), Q)
            put(self.O, running.O if running.whole is None else running.whole)
            put(self.R1, torch.where(Q == 0, 0.0, average + centre))
            spread = running.R2 - Q * average.square().sum(-1, keepdim=True)
            put(self.R2, spread.clamp(min=0.0))
        if self.raw:
            put(self.out, running.O)
        else:
            m = part.m * running.unit
            inverse = inverse_normaliser(part.Z, m, sink_rows(rule, work, masking, m))
            put(self.out, running.O.mul_(inverse.unsqueeze(-1)))


def _moderate(call: KernelCall) -> bool:
    """Whether all scores are small, by ‖q‖ ‖k‖; checked only where that is cheap."""
    query, key, masking, rule = call.query, call.key, call.masking, call.rule
    if query.device.type != "cpu" or masking.additive or masking.alibi_slopes is not None:
        return False
    if rule.softcap is not None and rule.softcap < MODERATE:
        return True
    if masking.queries < 256 or not key.numel() or not query.numel():
        return False
    longest = [
        float(torch.linalg.vector_norm(t, dim=-1, dtype=accumulate_dtype(t.dtype)).amax())
        for t in (query, key)
    ]
    return abs(rule.scale) * longest[0] * longest[1] < MODERATE
