"""The two forms of a call: rows that see all keys, and rows that see keys up to their position."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.mechanisms.call import NO_ROWS, Call
from acutance.mechanisms.scan import Carry, Sums, read
from acutance.mechanisms.state import LinearState, Rows, begin, first_weight, follow, past
from acutance.rowstats.state import NO_KEY

__all__ = ["causal", "full", "onwards", "remembered"]


def remembered(call: Call, state: LinearState, keys: int, length: int) -> LinearState:
    """The state after the first ``keys`` keys of a call, and empty positions up to ``length``."""
    for part in call.stretches(0, keys):
        state = past(state, call.features(NO_ROWS, part), part.stop - part.start)
    if length > keys:
        state = past(state, call.features(NO_ROWS, NO_ROWS), length - keys)
    return state


def onwards(
    call: Call,
    state: LinearState,
    *,
    row: int = 0,
    key: int = 0,
    strict: bool = False,
    finish: bool = True,
) -> tuple[Rows, LinearState]:
    """Causal rows from ``row`` on after a state, the first of them at the place of key ``key``."""
    found = []
    for part in call.stretches(row, call.rows):
        start, stop = part.start - row + key, part.stop - row + key
        keys = slice(min(start, call.keys), min(stop, call.keys))
        missing = stop - start - (keys.stop - keys.start)
        given = call.features(part, keys, missing)
        rows, state = follow(state, given, chunk=call.chunk, strict=strict)
        found.append(_finished(call, rows) if finish else rows)
    if not found:
        given = call.features(NO_ROWS, NO_ROWS)
        found.append(follow(state, given, chunk=call.chunk)[0])
    return _together(found), state


def causal(
    call: Call, offset: int, *, squares: bool, strict: bool = False, finish: bool = True
) -> Rows:
    """Rows that see keys up to their own position, i + offset."""
    before, skip = max(offset, 0), min(max(-offset, 0), call.rows)
    state = begin(call.features(NO_ROWS, NO_ROWS), squares)
    state = remembered(call, state, min(before, call.keys), before)
    rows, _ = onwards(call, state, row=skip, key=before, strict=strict, finish=finish)
    return _together([_blank(rows, skip), rows]) if skip else rows


def full(call: Call, offset: int, *, squares: bool) -> Rows:
    """Rows that see every key, from one sum over keys or, with a decay, one from each side."""
    state = begin(call.features(NO_ROWS, NO_ROWS), squares)
    state = remembered(call, state, call.keys, call.keys)
    sums = None
    if call.log_decay is not None:
        earlier = causal(call, offset, squares=squares, finish=False).sums
        left = call.keys - call.rows - offset
        turned = call.turned()
        later = causal(turned, left, squares=squares, strict=True, finish=False).sums
        sums = Sums(
            earlier.values + later.values.flip(-2),
            earlier.total + later.total.flip(-1),
            earlier.squares + later.squares.flip(-1) if squares else earlier.squares,
        )
    found = []
    for part in call.stretches(0, call.rows) if call.rows else [NO_ROWS]:
        given = call.features(part, NO_ROWS)
        first = first_weight(given, state.first, state.first_index, call.row_places[part])
        first = torch.where((state.n > 0)[:, None, None, None], first, 0.0)
        shape = (-1, part.stop - part.start)
        carry = Carry(state.values, state.keys, state.squares)
        if sums is None:
            mine = read(given.q, carry)
        else:
            mine = Sums(
                sums.values[..., part, :],
                sums.total[..., part],
                sums.squares[..., part] if squares else sums.squares,
            )
        n, index = state.n[:, None].expand(shape), state.first_index[:, None].expand(shape)
        found.append(_finished(call, Rows(mine, n, first, index)))
    return _together(found)


def _finished(call: Call, rows: Rows) -> Rows:
    """Rows with their output in place of its numerator: 0 where all weights are 0."""
    sums = rows.sums
    out = sums.values
    if call.by_sum:
        total = sums.total.unsqueeze(-1) + call.eps
        none = total == 0
        out = out * torch.where(none, 0.0, 1 / torch.where(none, 1.0, total))
    return rows._replace(sums=sums._replace(values=out.to(call.query.dtype)))


def _together(found: list[Rows]) -> Rows:
    """Consecutive rows as one."""
    if len(found) == 1:
        return found[0]
    sums = [rows.sums for rows in found]
    known = sums[-1].squares.shape == sums[-1].total.shape
    return Rows(
        Sums(
            torch.cat([part.values for part in sums], -2),
            torch.cat([part.total for part in sums], -1),
            torch.cat([part.squares for part in sums], -1) if known else sums[-1].squares,
        ),
        torch.cat([rows.n for rows in found], -1),
        torch.cat([rows.first for rows in found], -1),
        torch.cat([rows.first_index for rows in found], -1),
    )


def _blank(like: Rows, count: int) -> Rows:
    """Rows that see no key."""

    def zeros(part: Tensor, dim: int, value: int = 0) -> Tensor:
        shape = list(part.shape)
        shape[dim] = count
        return part.new_full(shape, value)

    sums = like.sums
    return Rows(
        Sums(zeros(sums.values, -2), zeros(sums.total, -1), zeros(sums.squares, -1)),
        zeros(like.n, -1),
        zeros(like.first, -1),
        zeros(like.first_index, -1, NO_KEY),
    )
