"""LinearState: the state of linear attention between calls, for prompts and decoding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acutance.mechanisms import relative
from acutance.mechanisms.call import Features
from acutance.mechanisms.scan import Carry, Sums, absorb, advance, empty_carry, has_squares, scan
from acutance.rowstats.state import NO_KEY
from acutance.rowstats.weighted import WeightSums, unknown

__all__ = [
    "LinearState",
    "Rows",
    "begin",
    "first_weight",
    "follow",
    "in_units",
    "keeps_squares",
    "past",
    "weight_sums",
]


class LinearState(NamedTuple):
    """Sums over past keys of linear attention; its size does not depend on their number.

    Attributes:
        values: decayed Σ k' vᵀ, (B, H, G, F, Ev); G is 1 unless query heads that share a key head
            decay differently.
        keys: decayed Σ k', (B, H, G, F).
        squares: Σ k' k'ᵀ with squared decay, (B, H, G, F, F), or (..., 0) if later rows need no
            statistics.
        exponents: log of the unit of each feature, (B, H, G, F), if a decay could make the sums
            underflow; else (..., 0).
        n: number of visible keys so far, (B,), int64.
        first: features of the first visible key, (B, H, F).
        first_index: its position, (B,), int64.
        position: number of positions so far, (), int64.
    """

    values: Tensor
    keys: Tensor
    squares: Tensor
    exponents: Tensor
    n: Tensor
    first: Tensor
    first_index: Tensor
    position: Tensor


class Rows(NamedTuple):
    """Sums of each row, number of visible keys (B, L), and the first key's weight and position."""

    sums: Sums
    n: Tensor
    first: Tensor
    first_index: Tensor


def begin(features: Features, squares: bool, *, in_units: bool = False) -> LinearState:
    """The state before any key; with ``in_units``, sums are stored relative to their size."""
    batch, heads, _, _, width = features.k.shape
    group = 1 if features.log_decay is None else features.log_decay.shape[1]
    count = torch.zeros(batch, dtype=torch.int64, device=features.k.device)
    carry = empty_carry(features.k, features.v, group, squares)
    return LinearState(
        *(relative.relative(carry) if in_units else carry),
        n=count,
        first=features.k.new_zeros(batch, heads, width),
        first_index=torch.full_like(count, NO_KEY),
        position=count.new_zeros(()),
    )


def _carry(state: LinearState) -> Carry:
    """The sums of a state."""
    return Carry(state.values, state.keys, state.squares, state.exponents)


def in_units(state: LinearState) -> LinearState:
    """Convert a state's sums to sums relative to their size."""
    return state._replace(**relative.relative(_carry(state))._asdict())


def _noted(state: LinearState, features: Features, length: int) -> LinearState:
    """Update the state's counts for further keys, over ``length`` positions."""
    if features.visible.shape[1] == 0:
        return state._replace(position=state.position + length)
    seen = features.visible.sum(-1)
    column = features.visible.to(torch.uint8).argmax(-1)
    index = column.view(-1, 1, 1, 1).expand(-1, features.k.shape[1], 1, features.k.shape[-1])
    candidate = features.k.squeeze(2).gather(2, index).squeeze(2)
    fresh = (state.first_index == NO_KEY) & (seen > 0)
    return state._replace(
        n=state.n + seen,
        first=torch.where(fresh[:, None, None], candidate, state.first),
        first_index=torch.where(fresh, state.position + column, state.first_index),
        position=state.position + length,
    )


def past(state: LinearState, features: Features, length: int) -> LinearState:
    """The state after further keys, padded with empty positions to ``length``."""
    carry, empty = _carry(state), length - features.k.shape[-2]
    if features.log_decay is not None and relative.is_relative(carry):
        carry = relative.absorb(carry, features.k, features.v, features.log_decay)
        carry = relative.advance(carry, features.log_decay, empty)
    else:
        carry = absorb(carry, features.k, features.v, features.log_decay)
        carry = advance(carry, features.log_decay, empty)
    return _noted(state, features, length)._replace(**carry._asdict())


def follow(
    state: LinearState, features: Features, *, chunk: int, strict: bool = False
) -> tuple[Rows, LinearState]:
    """Causal rows that continue a state, one key per row, and the state after them."""
    length = features.q.shape[-2]
    before = _carry(state)
    sums, carry = scan(
        features.q,
        features.k,
        features.v,
        features.log_decay,
        before,
        chunk=chunk,
        strict=strict,
        chunks=relative.chunks if relative.is_relative(before) else None,
    )
    after = _noted(state, features, length)
    counted = features.visible.long().cumsum(-1)
    n = state.n[:, None] + counted - features.visible.long() * strict
    places = state.position + torch.arange(length, device=n.device)
    first = first_weight(features, after.first, after.first_index, places, sums.exponents)
    first = torch.where((n > 0)[:, None, None], first, 0.0)
    index = torch.where(n > 0, after.first_index[:, None], NO_KEY)
    after = after._replace(**carry._asdict())
    return Rows(sums, n, first, index), after


def first_weight(
    features: Features, first: Tensor, index: Tensor, places: Tensor, exponents: Tensor
) -> Tensor:
    """Weight, in rows at ``places``, of the first key, given its features and position."""
    weight = (features.q @ first[:, :, None, :, None]).squeeze(-1)
    if features.log_decay is None:
        return weight
    known = torch.where(index == NO_KEY, 0, index)
    distance = (places - known[:, None]).abs()[:, None, None]
    if exponents.shape == weight.shape:
        return weight * relative.faded(features.log_decay, distance, exponents).to(weight.dtype)
    return weight * torch.exp(features.log_decay[:, :, None] * distance.to(weight.dtype))


def weight_sums(rows: Rows, nonnegative: bool) -> WeightSums:
    """The sums for statistics, (B, Hq, L); sizes of signed weights are unknown."""
    total = rows.sums.total.flatten(1, 2)
    n = rows.n[:, None].expand(total.shape)
    nothing_known = unknown(total)
    squares = rows.sums.squares
    c, first = (n > 0).to(total.dtype), rows.first.flatten(1, 2)
    if rows.sums.exponents.shape == rows.sums.total.shape:
        unit = relative.representable(rows.sums.exponents, total.dtype).flatten(1, 2)
        c, first = c * unit, first * unit
    return WeightSums(
        n=n,
        c=c,
        T=total,
        A=total if nonnegative else nothing_known,
        Q=squares.flatten(1, 2) if squares.shape == rows.sums.total.shape else nothing_known,
        X=nothing_known,
        top=nothing_known,
        first=first,
        first_index=rows.first_index[:, None].expand(total.shape),
    )


def keeps_squares(state: LinearState) -> bool:
    """Whether rows that continue this state can have statistics."""
    return has_squares(_carry(state))
