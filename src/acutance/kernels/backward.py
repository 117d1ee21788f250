"""Gradients of the output and of every row sum in one recomputing pass of O(n) memory.

The state's sums are the variables: given their gradients, and the output's, the gradient of
score j is

    e_j [gZ + gU (1 + t) + gW ((t − μ)² + 2 (t − μ)) + 2 gQ e_j] + p_j (dO·v_j − δ)
    + g_mean / n + 2 g_M2 (s_j − mean) + [j first] g_first + [j largest] g_m

with t = s_j − m, μ = U/Z, δ = dO·o. Metrics are plain functions of the sums, so any of them, and
any mixture, is differentiable through this one pass.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.kernels.call import ALL, Gradients, KernelCall, SumGradients, Sums, accumulate_dtype
from acutance.kernels.hidden import all_finite, hides_keys, value_gradient, zeroed
from acutance.kernels.tiles import (
    FLOOR,
    LOG2E,
    Buffers,
    Work,
    as_mask_shape,
    draw_kept,
    dropout_generator,
    finite,
    fold_rows,
    inverse_normaliser,
    ratio,
    sink_rows,
    tile_rows,
    tile_scores,
    tile_shape,
)
from acutance.masks import Masking, Tile


def backward(
    grad: SumGradients, sums: Sums, call: KernelCall, wanted: tuple[bool, ...] = ALL
) -> Gradients:
    """Gradients of a forward call's inputs from the gradients of its results.

    Args:
        grad: gradients of the loss with respect to the output and each row sum.
        sums: the results of the forward call.
        call: the forward call.
        wanted: whether each field of :class:`~acutance.kernels.call.Gradients` is requested; the
            others are None.
    """
    query, key, value, masking, *_ = call
    dtype = accumulate_dtype(query.dtype)
    B, H, g, L = masking.batch, masking.heads, masking.group, masking.queries

    def split(tensor: Tensor) -> Tensor:
        return tensor.reshape(B, H, g, L, *tensor.shape[3:])

    q5, rows = split(query), [split(part) for part in sums]
    grads = [None if part is None else split(part) for part in converted(grad, dtype)]
    dq = torch.zeros(q5.shape, dtype=dtype, device=query.device)
    dk = torch.zeros(key.shape, dtype=dtype, device=key.device)
    want_q, want_k, want_v, want_mask, want_bias, want_sinks = wanted
    dv = None
    if value is not None and want_v:
        dv = torch.zeros(value.shape, dtype=dtype, device=value.device)
    dsinks = torch.zeros(H, g, dtype=dtype, device=query.device)
    added_mask = _SharedGradient(masking, masking.attn_mask, dtype) if want_mask else None
    added_bias = _SharedGradient(masking, masking.bias, dtype) if want_bias else None
    _, width = tile_shape(masking)
    scratch = Buffers(query, dtype)
    generator = dropout_generator(call)
    # what is hidden has gradients of 0 for its scores, which must not multiply NaN
    hides = hides_keys(masking)
    clean_key, clean_q5 = (zeroed(key), zeroed(q5)) if hides else (key, q5)
    for work in tile_rows(call):
        region = work.region
        q = fold_rows(q5, work).to(dtype) * call.scale
        block = Sums(*(fold_rows(part, work) if part.numel() else part for part in rows))
        given = SumGradients(*(None if part is None else fold_rows(part, work) for part in grads))
        row = row_coefficients(block, given, sink_rows(call, work, q))
        shift, d_out = finite(block.m).unsqueeze(-1), None
        if given.out is not None and row.inverse is not None:
            d_out = given.out * row.inverse.unsqueeze(-1)
        # a row's normaliser may be NaN where its gradient of the output is not
        finite_out = not hides or d_out is None or all_finite(d_out)
        clean_q, clean_keys = q, work.key
        if clean_q5 is not q5:
            clean_q = fold_rows(clean_q5, work).to(dtype) * call.scale
        if clean_key is not key:
            clean_keys = clean_key[region.batch, region.heads].to(dtype).flatten(0, 1)
        row_dq = torch.zeros_like(q)
        part_dk = dk[region.batch, region.heads]
        largest = _largest(q, work, call, scratch, width) if given.m is not None else None
        for tile in masking.tiles(region, width):
            columns = slice(tile.start, tile.stop)
            s = tile_scores(q, work, tile, call.softcap, scratch)
            t, folded = s.sub_(shift), as_mask_shape(s, work)
            if tile.hidden is not None:
                tile.hidden.blank(folded)
                tile.hidden.bury(folded, FLOOR)
            e = torch.mul(t, LOG2E, out=scratch("weights", *t.shape)).exp2_()
            keep = draw_kept(tuple(e.shape), call.dropout_p, generator, e)
            ds = scratch("gradient", *t.shape)
            if d_out is not None and work.value is not None:
                torch.bmm(d_out, work.value[:, columns].transpose(1, 2), out=ds)
                if keep is not None:
                    ds.mul_(keep)
                if dv is not None:
                    dropped = e if keep is None else e * keep
                    part_dv = dv[region.batch, region.heads, columns]
                    part_dv += value_gradient(dropped, d_out, finite_out).view(part_dv.shape)
            else:
                ds.zero_()
            _to_scores(ds, t, e, row)
            if tile.hidden is not None:
                tile.hidden.blank(as_mask_shape(ds, work))
            _put_single(ds, block.first_index, given.first, tile)
            _put_single(ds, largest, given.m, tile)
            for shared in (added_mask, added_bias):
                if shared is not None:
                    shared.add(ds, work, tile)
            if call.softcap is not None:
                ds.mul_(scratch("slope", *ds.shape))
                if tile.hidden is not None and not (clean_key is key and clean_q5 is q5):
                    tile.hidden.blank(as_mask_shape(ds, work))  # the slope of a NaN score is NaN
            if want_q:
                row_dq.baddbmm_(ds, clean_keys[:, columns])
            if want_k:
                part = part_dk[:, :, columns]
                part += torch.bmm(ds.transpose(1, 2), clean_q).view(part.shape)
        target = dq[region.batch, region.heads, :, region.rows]
        target.copy_(row_dq.mul_(call.scale).view(target.shape))
        if row.sink is not None:
            dsinks[region.heads] += row.sink.view(work.fold).sum((0, 3))
    return Gradients(
        query=dq.view(query.shape).to(query.dtype) if want_q else None,
        key=dk.to(key.dtype) if want_k else None,
        value=None if dv is None or value is None else dv.to(value.dtype),
        attn_mask=None if added_mask is None else added_mask.result(),
        bias=None if added_bias is None else added_bias.result(),
        sinks=dsinks.view(-1).to(call.sinks.dtype)
        if want_sinks and call.sinks is not None
        else None,
    )


class Coefficients(NamedTuple):
    """Coefficients of the gradient with respect to a row's scores, one for each row; None is 0.

    With t the score less the row's maximum m, e = exp(t), v_j the value of key j and dO the
    gradient of the output, the gradient with respect to score j is ``e (dO·v_j inverse + constant
    + linear t + square t² + weight e) + slope t + plain``.
    """

    inverse: Tensor | None  #: 1 / normaliser, where the output has a gradient
    constant: Tensor | None
    linear: Tensor | None
    square: Tensor | None
    weight: Tensor | None
    slope: Tensor | None
    plain: Tensor | None
    sink: Tensor | None  #: gradient of the row's sink


def converted(grad: SumGradients, dtype: torch.dtype) -> SumGradients:
    """Gradients of sums in a dtype; None for one without elements, as of an output of no values."""
    return SumGradients._make(
        [None if part is None or not part.numel() else part.to(dtype) for part in grad]
    )


def row_coefficients(sums: Sums, grad: SumGradients, sink: Tensor | None) -> Coefficients:
    """The coefficients of rows, from their sums and the gradients of these.

    Args:
        sums: of any rows.
        grad: their gradients, in the sums' dtype.
        sink: the rows' sink logits.
    """
    m, Z = sums.m, sums.Z
    constant: list[Tensor] = []
    linear: list[Tensor] = []
    plain: list[Tensor] = []
    slope = inverse = of_sink = None
    if grad.Z is not None:
        constant.append(grad.Z)
    if grad.U is not None:
        constant.append(grad.U)
        linear.append(grad.U)
    if grad.W is not None:
        mu = ratio(sums.U, Z)
        constant.append(grad.W * (mu.square() - 2 * mu))
        linear.append(grad.W * (2 - 2 * mu))
    n = sums.n.to(Z.dtype).clamp(min=1)
    if grad.mean is not None:
        plain.append(grad.mean / n)
    if grad.M2 is not None:
        slope = 2 * grad.M2
        plain.append(slope * sums.depth)
    if grad.depth is not None:
        plain.append(-grad.depth / n)
    if grad.out is not None:
        inverse = inverse_normaliser(Z, m, sink)
        delta = (grad.out * sums.out.to(Z.dtype)).sum(-1)
        constant.append(-delta * inverse)
        if sink is not None:
            none = (sink == -torch.inf) | (Z == 0)
            of_sink = torch.where(none, 0.0, -delta / (1.0 + Z * torch.exp(m - sink)))
    return Coefficients(
        inverse=inverse,
        constant=reduce(torch.add, constant) if constant else None,
        linear=reduce(torch.add, linear) if linear else None,
        square=grad.W,
        weight=None if grad.Q is None else 2 * grad.Q,
        slope=slope,
        plain=reduce(torch.add, plain) if plain else None,
        sink=of_sink,
    )


def sink_gradient(sinks: Tensor | None, rows: Coefficients) -> Tensor | None:
    """Gradient of the sink logits (Hq,), which comes from the output's gradient alone; or None."""
    if sinks is None:
        return None
    if rows.sink is None:
        return torch.zeros_like(sinks)
    return rows.sink.sum((0, 2)).to(sinks.dtype)


def _to_scores(ds: Tensor, t: Tensor, e: Tensor, row: Coefficients) -> None:
    """Turn ``ds``, in place, into the gradient with respect to a tile's scores.

    All are (blocks, rows, keys). On entry ``ds`` contains dO·v / Z and ``t`` the scores minus
    the row's maximum; ``t`` is overwritten. ``e`` is exp(t).
    """
    if row.constant is not None:
        ds.add_(row.constant.unsqueeze(-1))
    if row.linear is not None:
        ds.addcmul_(row.linear.unsqueeze(-1), t)
    if row.weight is not None:
        ds.addcmul_(row.weight.unsqueeze(-1), e)
    if row.square is not None:
        ds.addcmul_(row.square.unsqueeze(-1), t.square_() if row.slope is None else t.square())
    ds.mul_(e)
    if row.slope is not None:
        ds.addcmul_(row.slope.unsqueeze(-1), t)
    if row.plain is not None:
        ds.add_(row.plain.unsqueeze(-1))


def _put_single(ds: Tensor, index: Tensor | None, grad: Tensor | None, tile: Tile) -> None:
    """Add ``grad`` (blocks, rows) to ``ds`` at each row's key ``index``, if it is in this tile."""
    if index is None or grad is None:
        return
    inside = (index >= tile.start) & (index < tile.stop)
    column = torch.where(inside, index - tile.start, 0).unsqueeze(-1)
    ds.scatter_add_(-1, column, torch.where(inside, grad, 0.0).unsqueeze(-1))


def _largest(q: Tensor, work: Work, call: KernelCall, scratch: Buffers, width: int) -> Tensor:
    """Index of the key with each row's largest visible score, the first of equal ones."""
    best = torch.full(q.shape[:2], -torch.inf, dtype=q.dtype, device=q.device)
    index = torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device)
    for tile in call.masking.tiles(work.region, width):
        s = tile_scores(q, work, tile, call.softcap, scratch)
        if tile.hidden is not None:
            tile.hidden.blank(as_mask_shape(s, work))
            tile.hidden.bury(as_mask_shape(s, work), -torch.inf)
        top, column = s.max(-1)
        index = torch.where(top > best, column + tile.start, index)
        best = torch.maximum(best, top)
    return index


class _SharedGradient:
    """Gradient of one additive mask: the scores' gradient summed over its dimensions of size 1."""

    def __init__(self, masking: Masking, tensor: Tensor | None, dtype: torch.dtype) -> None:
        if tensor is None:
            raise ValueError("the gradient of a mask was requested, but the call has no mask")
        self._tensor = tensor
        self._sum = torch.zeros_like(masking.spread(tensor), dtype=dtype)

    def add(self, ds: Tensor, work: Work, tile: Tile) -> None:
        """Add the gradient with respect to the scores of one tile, (blocks, rows, keys)."""
        folded = as_mask_shape(ds, work)
        region = work.region
        cuts = (region.batch, region.heads, slice(None), region.rows, slice(tile.start, tile.stop))
        sizes = self._sum.shape
        shared = [axis for axis, size in enumerate(sizes) if size == 1]
        part = folded.sum(shared, keepdim=True) if shared else folded
        where = tuple(
            slice(None) if size == 1 else cut for cut, size in zip(cuts, sizes, strict=True)
        )
        self._sum[where] += part

    def result(self) -> Tensor:
        """The gradient in the mask's shape and dtype."""
        return self._sum.reshape(self._tensor.shape).to(self._tensor.dtype).contiguous()
