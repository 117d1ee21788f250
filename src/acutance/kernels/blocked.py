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
from math import prod

import torch
from torch import Tensor

from acutance.kernels.call import KernelCall, Sums, accumulate_dtype
from acutance.kernels.tiles import (
    LOG2E,
    MODERATE,
    Part,
    Running,
    Work,
    draw_kept,
    dropout_generator,
    fold_rows,
    inverse_normaliser,
    lent_buffers,
    ratio,
    row_fields,
    sink_rows,
    tile_rows,
    tile_scores,
    tile_shape,
)
from acutance.masks import Masking
from acutance.rowstats.gaps import BINS

#: Sums that need no more than to be written down.
_UNCHANGED = ("out", "first_index", "O", "R1", "R2", "gaps")
#: Keys up to which float32 counts exactly.
EXACT = 1 << 24


def forward(call: KernelCall) -> Sums:
    """Output and statistics sums of softmax attention, for validated input, in plain PyTorch.

    Returns:
        The sums of every row, in the call's accumulation dtype; ``out`` in the query's dtype.
    """
    query, value, masking, noise = call.query, call.value, call.masking, call.noise
    dtype = accumulate_dtype(query.dtype)
    B, H, g, L = masking.batch, masking.heads, masking.group, masking.queries
    width = 0 if value is None else value.shape[-1]
    # small scores take log₂ e along from the query, others are multiplied about their maximum
    folds = call.softcap is None and _moderate(call)
    scale, log2 = (call.scale * LOG2E, 1.0) if folds else (call.scale, LOG2E)
    q5 = query.reshape(B, H, g, L, query.shape[-1])

    def rows(*extra: int, dtype: torch.dtype = dtype) -> Tensor:
        return query.new_empty(B, H, g, L, *extra, dtype=dtype)

    kept = width if noise else 0
    many = masking.keys > EXACT
    outputs = _OutputTensors(
        n=rows(dtype=torch.int64) if many else None,
        parts=query.new_zeros(len(Part._fields), B * H * g * L, dtype=dtype),
        first_index=rows(dtype=torch.int64).zero_(),
        out=rows(width, dtype=query.dtype),
        O=rows(kept),
        R1=rows(kept),
        R2=rows() if noise else rows(0),
        gaps=rows(BINS if call.gaps else 0, dtype=torch.int32),
    )
    tile_width = tile_shape(masking)[1]
    generator = dropout_generator(call)
    with lent_buffers(query, dtype) as scratch:
        for work in tile_rows(call):
            region, q = work.region, fold_rows(q5, work).to(dtype)
            q = torch.mul(q, scale, out=scratch("query", *q.shape))
            centre = work.value.mean(1, keepdim=True) if noise and work.value is not None else None
            start, stop, *_ = masking.band(region.rows.start, region.rows.stop - 1)
            # the sums of a single tile are written where they belong
            single = outputs.raw and centre is None and 0 < stop - start <= tile_width
            places = outputs.places(work, masking) if single else (None, None)
            running = Running(q, log2, call.gaps, many, *places)
            for tile in masking.tiles(region, tile_width):
                s = tile_scores(q, work, tile, call.softcap, scratch)
                keep = draw_kept(tuple(s.shape), call.dropout_p, generator, s)
                running.observe(s, work, tile, scratch, keep, centre)
            outputs.store(running, work, call, centre)
    fields, decay = row_fields(Part(*outputs.by_head(masking)), log2)
    if outputs.raw:
        sink = None if call.sinks is None else call.sinks.to(dtype).view(H, g, 1)
        factor = inverse_normaliser(fields["Z"], fields["m"], sink).mul_(decay)
        outputs.out.mul_(factor.unsqueeze(-1))
    fields |= {name: getattr(outputs, name) for name in _UNCHANGED}
    fields["n"] = fields["n"].to(torch.int64) if outputs.n is None else outputs.n
    return Sums(**{name: part.view(B, H * g, *part.shape[3:]) for name, part in fields.items()})


@dataclass(frozen=True)
class _OutputTensors:
    """Output tensors of a forward pass, filled one block of query rows after another.

    All but ``parts`` have shape (B, H, group, L, …).
    """

    n: Tensor | None  # None where the floating count in ``parts`` is exact
    parts: Tensor  # (fields of Part, rows): whole tile rows, one after the other
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

    def part(self, work: Work, masking: Masking) -> Part:
        """Views into ``parts`` for the sums of one block of query rows, each (blocks, rows)."""
        _, _, group, rows = work.fold
        region, size = work.region, work.blocks * group * rows
        head = region.batch.start * masking.heads + region.heads.start
        start = group * (region.rows.start * masking.batch * masking.heads + head * rows)
        cut = self.parts[:, start : start + size].view(-1, work.blocks, group * rows)
        return Part(*cut.unbind())

    def places(self, work: Work, masking: Masking) -> tuple[Part, Tensor | None]:
        """Views for the sums of one block of query rows, and for its Σ e v in ``out``.

        The second is None unless these rows are contiguous in ``out``.
        """
        region, (batch, heads, group, rows) = work.region, work.fold
        whole = (batch == 1 or heads == masking.heads) and (group == 1 or rows == masking.queries)
        out = None
        if work.blocks == group == 1 and self.out.numel():
            head = region.batch.start * masking.heads + region.heads.start
            start = head * masking.queries + region.rows.start
            out = self.out.view(1, -1, self.out.shape[-1])[:, start : start + rows]
        elif whole and self.out.numel():
            out = self.out[region.batch, region.heads, :, region.rows]
            out = out.view(work.blocks, group * rows, -1)
        return self.part(work, masking), out

    def by_head(self, masking: Masking) -> Tensor:
        """The sums ``parts`` in the order of heads and rows, (fields of Part, B, H, group, L)."""
        heads = (masking.batch, masking.heads, masking.group)
        each, rows = self.parts.shape[0], tile_shape(masking)[0]
        if rows >= masking.queries or not self.parts.numel():
            return self.parts.view(each, *heads, masking.queries)
        return torch.cat(
            [part.view(each, *heads, -1) for part in self.parts.split(rows * prod(heads), -1)], -1
        )

    def store(self, running: Running, work: Work, call: KernelCall, centre: Tensor | None) -> None:
        """Copy the sums of one finished block of query rows into the output tensors.

        Args:
            running: its sums over all keys.
            work: which batches, heads and rows it is.
            call: the call.
            centre: (blocks, 1, Ev), the point from which ``running`` measured values for the noise
                sums; None without them.
        """
        region = work.region

        def put(target: Tensor, rows: Tensor | float) -> None:
            where = target[region.batch, region.heads, :, region.rows]
            if not isinstance(rows, Tensor):
                where.fill_(rows)
            elif rows.numel():
                where.copy_(rows.view(where.shape))

        part, values = running.finish(about_maximum=not self.raw or centre is not None)
        if self.n is not None and running.count is not None:
            put(self.n, running.count)
        if part is not running.rows:
            for place, sums in zip(self.part(work, call.masking), part, strict=True):
                place.copy_(sums)
        if isinstance(running.first_index, Tensor) or running.first_index > 0:
            put(self.first_index, running.first_index)
        if self.gaps.numel():
            put(self.gaps, 0.0 if running.gaps is None else running.gaps)
        if values is None:  # no values, or no key in sight
            for target in (self.out, self.O, self.R1, self.R2):
                put(target, 0.0)
            return
        if centre is not None and values.R1 is not None and values.R2 is not None:
            # moments of the values about their own e²-weighted mean: no cancellation on merging
            Q = part.norm.square().unsqueeze(-1)
            average = values.R1 * ratio(torch.ones_like(Q), Q)
            put(self.O, values.O if values.whole is None else values.whole)
            put(self.R1, torch.where(Q == 0, 0.0, average + centre))
            spread = values.R2 - Q * average.square().sum(-1, keepdim=True)
            put(self.R2, spread.clamp(min=0.0))
        if self.raw:
            if values.O is not running.out:
                put(self.out, values.O)
        else:
            m = part.m * running.unit
            inverse = inverse_normaliser(part.Z, m, sink_rows(call, work, m))
            put(self.out, values.O.mul_(inverse.unsqueeze(-1)))


def _moderate(call: KernelCall) -> bool:
    """Whether ‖q‖ ‖k‖ shows that all scores are small.

    False without a check where that would cost much: on other devices than the CPU, with additive
    masks, and for fewer than 256 queries.
    """
    query, key, masking = call.query, call.key, call.masking
    if query.device.type != "cpu" or masking.additive or masking.alibi_slopes is not None:
        return False
    if masking.queries < 256 or not key.numel() or not query.numel():
        return False
    longest = [
        float(torch.linalg.vector_norm(t, dim=-1, dtype=accumulate_dtype(t.dtype)).amax())
        for t in (query, key)
    ]
    return abs(call.scale) * longest[0] * longest[1] < MODERATE
