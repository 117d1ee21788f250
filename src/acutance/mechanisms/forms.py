"""Linear attention of whole calls: rows that see all keys, and causal rows."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.mechanisms.call import NO_ROWS, Call
from acutance.mechanisms.relative import NOTHING, added, unit_of
from acutance.mechanisms.scan import Carry, Sums, read
from acutance.mechanisms.segments import Part, in_segments
from acutance.mechanisms.state import LinearState, Rows, begin, first_weight, follow, past
from acutance.rowstats.state import NO_KEY

__all__ = ["causal", "full", "onwards", "remembered"]


def remembered(call: Call, state: LinearState, keys: int, length: int) -> LinearState:
    """State after the first ``keys`` keys of a call, and empty positions up to ``length``."""
    parts = call.segments(0, keys)

    def absorbed(
        index: int, log_decay: Tensor | None, state: LinearState, key: Tensor, value: Tensor
    ) -> tuple[None, LinearState]:
        features = call.features(
            call.placed(NO_ROWS, parts[index], key=key, value=value), log_decay
        )
        return None, past(state, features, key.shape[2])

    if parts:
        cuts = [Part(call.key, 2, parts), Part(call.value, 2, parts)]
        state = in_segments(absorbed, cuts, call.log_decay, state, closed=call.closed)[1]
    if length > keys:
        state = past(state, call.empty_features(), length - keys)
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
    """Causal rows from ``row`` to the last, continuing from the state of earlier keys.

    Args:
        call: queries, keys and values.
        state: sums over all keys before ``key``.
        row: index of the first query.
        key: index of the last key that query ``row`` sees; the next query sees one more.
        strict: whether that last key is hidden from its query.
        finish: whether to normalise the rows; False returns their sums.

    Returns:
        The rows, and the state after their last key.
    """
    parts = call.segments(row, call.rows)
    edges = [(part.start - row + key, part.stop - row + key) for part in parts]
    keys = [slice(min(start, call.keys), min(stop, call.keys)) for start, stop in edges]

    def followed(
        index: int, log_decay: Tensor | None, state: LinearState, *tensors: Tensor
    ) -> tuple[Rows, LinearState]:
        piece = call.placed(parts[index], keys[index], *tensors)
        missing = tensors[0].shape[2] - tensors[1].shape[2]
        features = call.features(piece, log_decay, missing)
        rows, state = follow(state, features, chunk=call.chunk, strict=strict)
        return _finished(call, rows) if finish else rows, state

    if not parts:
        return follow(state, call.empty_features(), chunk=call.chunk)
    cuts = [Part(call.query, 2, parts), Part(call.key, 2, keys), Part(call.value, 2, keys)]
    rows, state = in_segments(followed, cuts, call.log_decay, state, closed=call.closed)
    assert rows is not None
    return rows, state


def causal(
    call: Call, offset: int, *, squares: bool, strict: bool = False, finish: bool = True
) -> Rows:
    """Rows that see keys up to their own position, i + offset."""
    before, skip = max(offset, 0), min(max(-offset, 0), call.rows)
    state = begin(call.empty_features(), squares, in_units=call.in_units)
    state = remembered(call, state, min(before, call.keys), before)
    rows, _ = onwards(call, state, row=skip, key=before, strict=strict, finish=finish)
    return _stacked(_blank(rows, skip, squares, call.in_units), rows) if skip else rows


def full(call: Call, offset: int, *, squares: bool) -> Rows:
    """Rows that see every key: one sum over keys or, with a decay, one from each side."""
    state = begin(call.empty_features(), squares)
    state = remembered(call, state, call.keys, call.keys)
    sums = None
    if call.log_decay is not None:
        earlier = causal(call, offset, squares=squares, finish=False).sums
        left = call.keys - call.rows - offset
        reversed_call = call.reversed()
        later = causal(reversed_call, left, squares=squares, strict=True, finish=False).sums
        values, *others = later
        sums = added(earlier, Sums(values.flip(-2), *(part.flip(-1) for part in others)))
    parts = call.segments(0, call.rows) or [NO_ROWS]
    order = [0, 1, *([2] if squares else []), *([3] if call.in_units else [])]

    def seeing_all(
        index: int, log_decay: Tensor | None, state: LinearState, query: Tensor, *sides: Tensor
    ) -> tuple[Rows, LinearState]:
        """The rows of one segment when every row sees all keys."""
        piece = call.placed(parts[index], NO_ROWS, query=query)
        features = call.features(piece, log_decay)
        if sides:
            mine = Sums(
                *(sides[order.index(i)] if i in order else sides[1][..., :0] for i in range(4))
            )
        else:
            carry = Carry(state.values, state.keys, state.squares, state.exponents)
            mine = read(features.q, carry)
        place = piece.row_places
        first = first_weight(features, state.first, state.first_index, place, mine.exponents)
        first = torch.where((state.n > 0)[:, None, None, None], first, 0.0)
        shape = (-1, query.shape[2])
        n, place = state.n[:, None].expand(shape), state.first_index[:, None].expand(shape)
        return _finished(call, Rows(mine, n, first, place)), state

    cuts = [Part(call.query, 2, parts)]
    if sums is not None:
        cuts += [Part(sums[i], 3, parts) for i in order]
    rows, _ = in_segments(seeing_all, cuts, call.log_decay, state, closed=call.closed)
    assert rows is not None
    return rows


def _finished(call: Call, rows: Rows) -> Rows:
    """Divide the rows' numerators by their normalisers; 0 where all weights are 0."""
    sums = rows.sums
    out = sums.values
    in_units = sums.exponents.shape == sums.total.shape
    eps: Tensor | float = call.eps
    if in_units and call.by_sum and call.eps > 0:
        eps = (call.eps * torch.exp(-unit_of(sums.exponents))).to(out.dtype).unsqueeze(-1)
    elif in_units and not call.by_sum:
        out = out * torch.exp(unit_of(sums.exponents)).to(out.dtype).unsqueeze(-1)
    if call.by_sum:
        total = sums.total.unsqueeze(-1) + eps
        none = total == 0
        out = out * torch.where(none, 0.0, 1 / torch.where(none, 1.0, total))
    return rows._replace(sums=sums._replace(values=out.to(call.query.dtype)))


def _stacked(above: Rows, below: Rows) -> Rows:
    """Concatenate rows."""
    fields = zip([*above.sums, *above[1:]], [*below.sums, *below[1:]], strict=True)
    dims = (-2, -1, -1, -1, -1, -1, -1)
    values, total, squares, exponents, *rest = (
        torch.cat(pair, dim) for pair, dim in zip(fields, dims, strict=True)
    )
    return Rows(Sums(values, total, squares, exponents), *rest)


def _blank(like: Rows, count: int, squares: bool, in_units: bool) -> Rows:
    """Rows that see no key, without the sums that were not requested."""

    def zeros(part: Tensor, dim: int, value: float = 0) -> Tensor:
        shape = list(part.shape)
        shape[dim] = count
        return part.new_full(shape, value)

    sums = like.sums
    return Rows(
        Sums(
            zeros(sums.values, -2),
            zeros(sums.total, -1),
            zeros(sums.squares, -1) if squares else sums.squares,
            zeros(sums.exponents, -1, NOTHING) if in_units else sums.exponents,
        ),
        zeros(like.n, -1),
        zeros(like.first, -1),
        zeros(like.first_index, -1, NO_KEY),
    )
