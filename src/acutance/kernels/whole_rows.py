"""Attention in blocks of whole rows, for weights that need all scores of a row.

A block of query rows is taken against every key it can see, weighted, multiplied with the values
and summed up. Memory is that of one block; under autograd a block keeps its inputs and is run again
for its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from acutance.compiling import transformed
from acutance.kernels.call import KernelCall, accumulate_dtype
from acutance.kernels.hidden import all_finite
from acutance.masks import Masking, Region, Tile
from acutance.rowstats import RowState, WeightSums, observe_weights
from acutance.rowstats.state import observe_visible
from acutance.rowstats.weighted import Slopes
from acutance.weights import Sink, Softmax, SoftmaxOne, Weighting
from acutance.weights.weightings import Jacobian, inverse

#: Scores of one block: 4 MiB in float32, a cache's share.
BLOCK_ELEMENTS = 1 << 20


class WeighedRows(NamedTuple):
    """Result of :func:`weigh_rows`.

    Attributes:
        out: (B, Hq, L, Ev); None if the call has no values.
        weights: sums of each row's weights.
        scores: sums of each row's scores.
        slopes: derivatives of each row's weights by its scores; None if not computed.
    """

    out: Tensor | None
    weights: WeightSums
    scores: RowState
    slopes: Slopes | None


def weigh_rows(call: KernelCall) -> WeighedRows:
    """Weights of any kind over validated input, row block by row block.

    Returns:
        Output and sums, the latter in float32 or float64. For softmax the state of the scores is
        complete; for other weights it has counts, extremes and plain moments, and NaN for the sums
        of exponentials, which none of their metrics needs. ``slopes`` is None for softmax, and for
        weightings without a ``jacobian``.
    """
    call = _with_sinks_as_weighting(call)
    value, masking = call.value, call.masking
    inputs = (call.query, call.key, value, *masking.additive)
    learned = call.score is not None or _learned(call.weighting)
    learned = learned or any(tensor is not None and tensor.requires_grad for tensor in inputs)
    # torch.func knows no checkpoints
    grad = learned and torch.is_grad_enabled() and not transformed()

    def block(region: Region) -> WeighedRows:
        with torch.autocast(call.query.device.type, enabled=False):  # the inputs are cast already
            return _block(call, region)

    run = partial(checkpoint, block, use_reentrant=False) if grad else block
    batches = [slice(b, b + 1) for b in range(masking.batch)] or [slice(0, 0)]
    results: list[list[WeighedRows]] = []
    for batch in batches:
        regions = [Region(batch, slice(0, masking.heads), rows) for rows in _row_blocks(masking)]
        results.append([run(region) for region in regions])
    outs = [[found.out for found in rows if found.out is not None] for rows in results]
    slopes = [[found.slopes for found in rows if found.slopes is not None] for rows in results]
    return WeighedRows(
        out=None if value is None else torch.cat([torch.cat(rows, 2) for rows in outs]),
        weights=WeightSums(*_joined([[found.weights for found in rows] for rows in results])),
        scores=RowState(*_joined([[found.scores for found in rows] for rows in results])),
        slopes=Slopes(*_joined(slopes)) if slopes[0] else None,
    )


def _with_sinks_as_weighting(call: KernelCall) -> KernelCall:
    """The call with its sinks, which take part in a softmax, as its weighting."""
    return call if call.sinks is None else call._replace(weighting=Sink(call.sinks))


def _ordinary(tensor: Tensor) -> bool:
    """Whether all values are known to be finite.

    False without a check where it would wait for a GPU or break a compiled graph.
    """
    if torch.compiler.is_compiling() or transformed() or tensor.device.type != "cpu":
        return False
    return all_finite(tensor)


def _learned(weighting: Weighting) -> bool:
    """Whether a weighting has tensors that require gradients."""
    return any(isinstance(part, Tensor) and part.requires_grad for part in vars(weighting).values())


def _row_blocks(masking: Masking) -> list[slice]:
    """Slices of query rows such that a block of whole rows fits the memory bound."""
    across = max(1, masking.heads * masking.group * masking.keys)
    rows = max(1, BLOCK_ELEMENTS // across)
    starts = range(0, masking.queries, rows)
    return [slice(i, min(i + rows, masking.queries)) for i in starts] or [slice(0, 0)]


def _joined(blocks: Sequence[Sequence[tuple[Tensor, ...]]]) -> Iterator[Tensor]:
    """Join the sums of blocks of rows: each field as one tensor (B, Hq, L).

    (B, Hq, L, 0) for a field that was not requested.
    """
    for field in range(len(blocks[0][0])):
        yield torch.cat([torch.cat([block[field] for block in rows], 2) for rows in blocks])


def whole_weights(call: KernelCall) -> Tensor:
    """The weights (B, Hq, L, S) of every row, all in memory at once; see :func:`weigh_rows`."""
    call, masking = _with_sinks_as_weighting(call), call.masking
    region = Region(slice(0, masking.batch), slice(0, masking.heads), slice(0, masking.queries))
    with torch.autocast(call.query.device.type, enabled=False):
        s, seen, keys = _scores(call, region)
        weights = call.weighting(s, seen)
        return torch.nn.functional.pad(weights, (keys.start, masking.keys - keys.stop))


def _scores(call: KernelCall, region: Region) -> tuple[Tensor, Tensor | None, slice]:
    """Scores of some rows (batch, Hq, rows, keys), which keys each sees, and which keys these are.

    Keys that no row sees may be left out at both ends. All are seen if there is no second tensor.
    """
    query, key, _, masking, scale, softcap, *_ = call
    dtype = accumulate_dtype(query.dtype)
    q = query[region.batch, :, region.rows].to(dtype)
    k = key[region.batch].to(dtype)
    rows = region.rows.stop - region.rows.start
    tile = next(masking.tiles(region, max(1, masking.keys)), None) if rows else None
    start, stop = (0, 0) if tile is None else (tile.start, tile.stop)
    k = k[:, :, start:stop]
    # hidden keys and values may be NaN: where they are, 0 takes their place in products, and NaN
    # comes back where a row sees them
    strange = None if _ordinary(k) else torch.logical_not(k.isfinite().all(-1))
    k = k if strange is None else torch.nan_to_num(k, 0.0, 0.0, 0.0)
    fold = (q.shape[0], masking.heads, masking.group, rows)
    if call.score is None:
        s = (q.reshape(*fold[:2], fold[2] * rows, q.shape[-1]) @ k.mT).view(*fold, stop - start)
    else:
        s = call.score(q, k, start).to(dtype).view(*fold, stop - start)
    s = s * scale
    if call.row_scale is not None:
        part = call.row_scale[region.batch, :, region.rows].to(dtype)
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
    if strange is not None:
        s = s.masked_fill(strange[:, :, None, None], torch.nan)
    return s.flatten(1, 2), seen, slice(start, stop)


def _block(call: KernelCall, region: Region) -> WeighedRows:
    """Output and statistics of one region of whole rows."""
    value, noise, weighting = call.value, call.noise, call.weighting
    s, seen, keys = _scores(call, region)
    weights = weighting(s, seen)
    distribution = weighting.distribution
    sums = observe_weights(weights, seen, distribution=distribution, first_key=keys.start)
    v = None if value is None else value[region.batch, :, keys].to(s.dtype)
    answer = None
    softmax = isinstance(weighting, Softmax | SoftmaxOne | Sink)
    visible = torch.ones_like(s, dtype=torch.bool) if seen is None else seen.expand_as(s)
    state = observe_visible(
        s, visible, first_key=keys.start, gaps=call.gaps and softmax, exponentials=softmax
    )
    if softmax and noise and v is not None:
        state = _with_values(state, s, seen, v)
    if not softmax or (isinstance(weighting, Softmax) and weighting.temperature != 1.0):
        with torch.no_grad():
            answer = _slopes(weighting, s, weights, seen, v if noise else None)
    if v is None:
        return WeighedRows(None, sums, state, answer)
    if call.dropout_p > 0.0:
        weights = torch.nn.functional.dropout(weights, call.dropout_p)
    out = weighted_values(weights, v)
    return WeighedRows(out.to(call.query.dtype), sums, state, answer)


def weighted_values(weights: Tensor, v: Tensor) -> Tensor:
    """Weighted sums of values, (B, Hq, L, Ev).

    Values of keys without weight may be NaN or infinite; rows that weigh such a value are NaN.

    Args:
        weights: (B, Hq, L, S).
        v: (B, H, S, Ev).
    """
    if _ordinary(v):
        return _weighed(weights, v)
    wrong = torch.logical_not(v.isfinite()).to(weights.dtype)
    reached = _weighed((weights != 0).to(weights.dtype), wrong) > 0
    out = _weighed(weights, torch.nan_to_num(v, 0.0, 0.0, 0.0))
    return out.masked_fill(reached, torch.nan)


def _weighed(weights: Tensor, v: Tensor) -> Tensor:
    """Weighted sums of values: (b, Hq, rows, S) and (b, H, S, Ev) to (b, Hq, rows, Ev)."""
    batch, heads, rows, keys = weights.shape
    group = heads // max(1, v.shape[1])
    out = weights.reshape(batch, v.shape[1], group * rows, keys) @ v
    return out.view(batch, heads, rows, v.shape[-1])


def _with_values(state: RowState, s: Tensor, seen: Tensor | None, v: Tensor) -> RowState:
    """A softmax row state with the sums over values ``O``, ``R1`` and ``R2`` filled in."""
    with torch.no_grad():
        e = torch.exp(s - torch.where(state.n == 0, 0.0, state.m).unsqueeze(-1))
        e = e if seen is None else torch.where(seen, e, 0.0)
        e = torch.where(s == -torch.inf, 0.0, e)
        centre = v.mean(2, keepdim=True)
        squared, moved = e.square(), v - centre
        average = _weighed(squared, moved) * inverse(state.Q).unsqueeze(-1)
        R2 = _weighed(squared, moved.square().sum(-1, keepdim=True)).squeeze(-1)
        R2 = (R2 - state.Q * average.square().sum(-1)).clamp(min=0.0)
        group = s.shape[1] // v.shape[1]
        R1 = average + centre.repeat_interleave(group, 1)
        return state._replace(
            O=_weighed(e, v), R1=torch.where(state.Q.unsqueeze(-1) > 0, R1, 0), R2=R2
        )


def _slopes(
    weighting: Weighting, s: Tensor, weights: Tensor, seen: Tensor | None, v: Tensor | None
) -> Slopes | None:
    """Trace of the weights' Jacobian, and noise gain, of a block's rows; None without Jacobian."""
    if seen is not None:
        s = torch.where(seen, s, 0.0)
    found = weighting.jacobian(s, weights, seen) if s.numel() else Jacobian(s)
    if found is None:
        return None
    g, left, right = found
    if seen is not None:
        same = right is g
        g = torch.where(seen, g, 0.0)
        right = g if same else None if right is None else torch.where(seen, right, 0.0)
    trace = g.sum(-1)
    if left is not None and right is not None:
        trace = trace - (left * right).sum(-1)
    if v is None:
        return Slopes(trace, trace.unsqueeze(-1)[..., :0])
    squared = g.square()
    if left is None or right is None:
        noise = _weighed(squared, v.square().sum(-1, keepdim=True)).squeeze(-1)
    elif right is g:  # about the values' mean: a shift of all of them is no noise
        centre = v.mean(2, keepdim=True) if v.shape[2] else v.sum(2, keepdim=True)
        moved, total = v - centre, squared.sum(-1)
        average = _weighed(squared, moved) * inverse(total).unsqueeze(-1)
        spread = _weighed(squared, moved.square().sum(-1, keepdim=True)).squeeze(-1)
        spread = (spread - total * average.square().sum(-1)).clamp(min=0.0)
        about = _weighed(left, v) - centre.repeat_interleave(s.shape[1] // v.shape[1], 1)
        noise = spread + total * (average - about).square().sum(-1)
    else:
        o = _weighed(left, v)
        noise = _weighed(squared, v.square().sum(-1, keepdim=True)).squeeze(-1)
        noise = noise - 2 * (o * _weighed(g * right, v)).sum(-1)
        noise = (noise + o.square().sum(-1) * right.square().sum(-1)).clamp(min=0.0)
    return Slopes(trace, noise)


def _seen(tile: Tile, fold: tuple[int, int, int, int]) -> Tensor | None:
    """Which keys of a tile each row sees, (batch or 1, Hq or 1, rows or 1, keys).

    Args:
        tile: keys of a block, and those that a mask hides.
        fold: batch, key heads, queries of each key head, rows.

    Returns:
        A boolean tensor, True where the row sees the key; None if no key is hidden.
    """
    hidden = tile.hidden
    if hidden is None:
        return None
    seen = torch.logical_not(hidden.mask)
    if seen.shape[1] != 1 or seen.shape[2] != 1:
        seen = seen.expand(-1, *fold[1:3], -1, -1)
    seen = seen.flatten(1, 2)
    left, right = hidden.start, tile.width - hidden.stop
    return torch.nn.functional.pad(seen, (left, right), value=True) if left or right else seen
