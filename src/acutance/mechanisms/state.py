"""The state of linear attention between calls: a prompt's keys summed, then one token at a time."""

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
    """What linear attention remembers of its keys, of a size that does not grow with them.

    Attributes:
        values: decayed sum of k' vᵀ, (B, H, G, F, Ev); G is 1 unless the query heads that share a
            key head decay differently.
        keys: decayed sum of k', (B, H, G, F).
        squares: sum of k' k'ᵀ under the squared decay, (B, H, G, F, F), or (..., 0) when no
            statistics are asked of later rows.
        exponents: log of the unit of each feature, (B, H, G, F), where a decay could make the sums
            underflow; else no element, (..., 0).
        n: visible keys so far, (B,), int64.
        first: features of the first visible key, (B, H, F).
        first_index: its position, (B,), int64.
        position: how many positions have passed, (), int64.
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
    """Sums of each row, number of keys seen (B, L), and the first key's weight and position."""

    sums: Sums
    n: Tensor
    first: Tensor
    first_index: Tensor


def begin(given: Features, squares: bool, *, in_units: bool = False) -> LinearState:
    """The state before any key; ``in_units`` stores each sum relative to its size."""
    batch, heads, _, _, features = given.k.shape
    group = 1 if given.log_decay is None else given.log_decay.shape[1]
    count = torch.zeros(batch, dtype=torch.int64, device=given.k.device)
    carry = empty_carry(given.k, given.v, group, squares)
    return LinearState(
        *(relative.relative(carry) if in_units else carry),
        n=count,
        first=given.k.new_zeros(batch, heads, features),
        first_index=torch.full_like(count, NO_KEY),
        position=count.new_zeros(()),
    )


def _carry(state: LinearState) -> Carry:
    return Carry(state.values, state.keys, state.squares, state.exponents)


def in_units(state: LinearState) -> LinearState:
    """The state with each sum relative to its own size."""
    return state._replace(**relative.relative(_carry(state))._asdict())


def _noted(state: LinearState, given: Features, length: int) -> LinearState:
    """The state's counts after these keys, on a stretch of ``length`` positions."""
    if given.visible.shape[1] == 0:
        return state._replace(position=state.position + length)
    seen = given.visible.sum(-1)
    column = given.visible.to(torch.uint8).argmax(-1)
    index = column.view(-1, 1, 1, 1).expand(-1, given.k.shape[1], 1, given.k.shape[-1])
    candidate = given.k.squeeze(2).gather(2, index).squeeze(2)
    fresh = (state.first_index == NO_KEY) & (seen > 0)
    return state._replace(
        n=state.n + seen,
        first=torch.where(fresh[:, None, None], candidate, state.first),
        first_index=torch.where(fresh, state.position + column, state.first_index),
        position=state.position + length,
    )


def past(state: LinearState, given: Features, length: int) -> LinearState:
    """The state after these keys, padded with empty positions to ``length``."""
    carry, empty = _carry(state), length - given.k.shape[-2]
    if given.log_decay is not None and relative.is_relative(carry):
        carry = relative.absorb(carry, given.k, given.v, given.log_decay)
        carry = relative.advance(carry, given.log_decay, empty)
    else:
        carry = absorb(carry, given.k, given.v, given.log_decay)
        carry = advance(carry, given.log_decay, empty)
    return _noted(state, given, length)._replace(**carry._asdict())


def follow(
    state: LinearState, given: Features, *, chunk: int, strict: bool = False
) -> tuple[Rows, LinearState]:
    """Causal rows after a state, one key to a row, and the state after them."""
    length = given.q.shape[-2]
    before = _carry(state)
    sums, carry = scan(
        given.q,
        given.k,
        given.v,
        given.log_decay,
        before,
        chunk=chunk,
        strict=strict,
        chunks=relative.chunks if relative.is_relative(before) else None,
    )
    after = _noted(state, given, length)
    counted = given.visible.long().cumsum(-1)
    n = state.n[:, None] + counted - given.visible.long() * strict
    places = state.position + torch.arange(length, device=n.device)
    first = first_weight(given, after.first, after.first_index, places, sums.exponents)
    first = torch.where((n > 0)[:, None, None], first, 0.0)
    index = torch.where(n > 0, after.first_index[:, None], NO_KEY)
    after = after._replace(**carry._asdict())
    return Rows(sums, n, first, index), after


def first_weight(
    given: Features, first: Tensor, index: Tensor, places: Tensor, exponents: Tensor
) -> Tensor:
    """Weight of a key with these features at this position, for rows at ``places``."""
    weight = (given.q @ first[:, :, None, :, None]).squeeze(-1)
    if given.log_decay is None:
        return weight
    known = torch.where(index == NO_KEY, 0, index)
    distance = (places - known[:, None]).abs()[:, None, None]
    if exponents.shape == weight.shape:
        return weight * relative.faded(given.log_decay, distance, exponents).to(weight.dtype)
    return weight * torch.exp(given.log_decay[:, :, None] * distance.to(weight.dtype))


def weight_sums(rows: Rows, nonnegative: bool) -> WeightSums:
    """The sums for statistics, (B, Hq, L); absolute values of signed weights are unknown."""
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
    """Whether rows that follow this state can have statistics."""
    return has_squares(_carry(state))
