"""The backward kernels: one for a block of queries, one for a block of keys and values.

A row contributes a few coefficients (:func:`acutance.kernels.backward.row_coefficients`):
with t = s − m and e = exp t, the gradient of a score is

    e (constant + linear t + square t² + weight e + inverse dO·v) + plain + slope t

and what falls on a single key, the first or the largest. Each query row belongs to one program, and
so does each key with all query heads that share it: nothing is added up across programs. A pass
before them finds where each row's largest score is, if its gradient is asked for.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (what a kernel is given are pointers and numbers of the device: Python has no types for them)
# ruff: noqa: RUF059 (tuples are unpacked whole)

from __future__ import annotations

from typing import NamedTuple

from acutance.kernels.gpu.language import jit, tl
from acutance.kernels.gpu.scores import (
    LOG2E,
    NONE,
    at_head,
    band,
    block_of_queries,
    edge_tile,
    in_place,
    load,
    natural,
    rows_of,
    same_documents,
    visible,
)

#: Rows of the table of coefficients, in order.
COEFFICIENTS = (
    *("shift", "constant", "linear", "square", "weight", "inverse", "plain", "slope"),
    *("first", "largest"),
)


class Terms(NamedTuple):
    """Which optional coefficients of the score gradients a call has, at compile time.

    ``shift``, ``constant`` and ``linear`` are always present.
    """

    square: bool
    weight: bool
    out: bool  # the output has a gradient: inverse, and dO
    level: bool  # plain and slope
    first: bool
    largest: bool


@jit
def finite(x):
    """Replace NaN and infinity by 0: times a gradient of 0 they would be NaN."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@jit
def by_row(TABLE, at, there, AXIS: tl.constexpr):
    """Load an entry of each of the rows ``at``, as a vector with a new dimension at ``AXIS``."""
    return tl.expand_dims(tl.load(TABLE + at, mask=there, other=0), AXIS)


@jit
def coefficients(ROWS, INDICES, count, at, there, AXIS: tl.constexpr, TERMS: tl.constexpr):
    """Load the coefficients of rows ``at``, as vectors with a new dimension at ``AXIS``."""
    shift = by_row(ROWS, at, there, AXIS)
    constant = by_row(ROWS + count, at, there, AXIS)
    linear = by_row(ROWS + 2 * count, at, there, AXIS)
    square, weight, inverse, plain, slope = constant, constant, constant, constant, constant
    first, largest = constant, constant
    first_key = tl.zeros(constant.shape, tl.int32)
    largest_key = first_key
    if TERMS.square:
        square = by_row(ROWS + 3 * count, at, there, AXIS)
    if TERMS.weight:
        weight = by_row(ROWS + 4 * count, at, there, AXIS)
    if TERMS.out:
        inverse = by_row(ROWS + 5 * count, at, there, AXIS)
    if TERMS.level:
        plain = by_row(ROWS + 6 * count, at, there, AXIS)
        slope = by_row(ROWS + 7 * count, at, there, AXIS)
    if TERMS.first:
        first = by_row(ROWS + 8 * count, at, there, AXIS)
        first_key = by_row(INDICES, at, there, AXIS)
    if TERMS.largest:
        largest = by_row(ROWS + 9 * count, at, there, AXIS)
        largest_key = by_row(INDICES + count, at, there, AXIS)
    return (
        shift, constant, linear, square, weight, inverse, plain, slope, first, first_key, largest,
        largest_key,
    )  # fmt: skip


@jit
def score_gradients(
    x, dp, i, j, rows, masks, scale, EDGE: tl.constexpr, TERMS: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Gradients with respect to the scores of one tile.

    ``x`` are dot products, ``dp`` products of the output's gradient with the values, ``i`` and
    ``j`` indices of queries and keys, ``rows`` the coefficients.

    Returns:
        The exponentials of the scores, the gradients, True for visible pairs, and the derivative of
        the softcap.
    """
    shift, constant, linear, square, weight, inverse, plain, slope = rows[:8]
    first, first_key, largest, largest_key = rows[8:]
    bend = 1.0
    s = x * scale
    if FLAGS.changed:
        s, bend = natural(x, i, j, masks, scale, FLAGS)
    seen = True
    if EDGE:
        s, seen = visible(s, in_place(i, j, masks, FLAGS), i, j, masks, FLAGS)
        t = tl.where(seen, s - shift, 0.0)
    else:
        t = s - shift
    e = tl.exp2(t * LOG2E)
    inner = linear
    if TERMS.square:
        inner = linear + square * t
    ds = constant + inner * t
    if TERMS.weight:
        ds += weight * e
    if TERMS.out:
        ds += inverse * dp
    ds *= e
    if TERMS.level:
        ds += plain + slope * t
    if TERMS.first:
        ds += tl.where(j == first_key, first, 0.0)
    if TERMS.largest:
        ds += tl.where(j == largest_key, largest, 0.0)
    if EDGE:
        e = tl.where(seen, e, 0.0)
        ds = tl.where(seen, ds, 0.0)
        if FLAGS.softcap:
            bend = tl.where(seen, bend, 0.0)  # of a NaN score it is NaN
    return e, ds, seen, bend


@jit
def queries_tile(
    dq, q, do, K, V, ADDED, rows, masks, i, start, scale, key_row, value_row,
    BLOCK: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr, ADD: tl.constexpr, EDGE: tl.constexpr, TERMS: tl.constexpr,
    FLAGS: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one tile of keys to ``dq``, the gradient of some queries; return it.

    With ``ADD``, the gradients of the scores are also written to ``ADDED``, for a full mask.
    """
    keys = masks[0][1]
    columns = start + tl.arange(0, BLOCK)
    j = columns[None, :]
    there = columns < keys
    k = load(K, columns, there, key_row, E, BLOCK_E, FLAGS)
    x = tl.dot(q, tl.trans(k), input_precision=FLAGS.precision)
    dp = 0.0
    if TERMS.out:
        v = load(V, columns, there, value_row, EV, BLOCK_V, FLAGS)
        dp = tl.dot(do, tl.trans(v), input_precision=FLAGS.precision)
    e, ds, seen, bend = score_gradients(x, dp, i, j, rows, masks, scale, EDGE, TERMS, FLAGS)
    if ADD:
        tl.store(ADDED + i.to(tl.int64) * keys + j, ds, mask=seen & (j < keys))
    if FLAGS.softcap:
        ds *= bend
    if EDGE:
        k = finite(k)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=FLAGS.precision)


@jit
def queries_kernel(
    QUERY, KEY, VALUE, MASKS, GRAD_OUT, ROWS, INDICES, UNDO, DQ, ADDED, query_heads, group, queries,
    keys, offset, window, scale, count, E: tl.constexpr, EV: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr, ADD: tl.constexpr, TERMS: tl.constexpr, FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradient with respect to ``BLOCK_M`` queries of one head; one program each."""
    batch, head, whole_head, first_row, at, q, masks = block_of_queries(
        QUERY, MASKS, query_heads, queries, keys, offset, window, E, BLOCK_E, BLOCK_M,
        FLAGS.causal, FLAGS,
    )  # fmt: skip
    K, key_row = rows_of(KEY, batch, head // group)
    V, value_row = rows_of(VALUE, batch, head // group)
    there = at < queries
    row = whole_head.to(tl.int64) * queries
    ADDED += row * keys
    do = 0.0
    if TERMS.out:
        do = load(GRAD_OUT + row * EV, at, there, EV, EV, BLOCK_V, FLAGS)
    rows = coefficients(ROWS, INDICES, count, row + at, there, 1, TERMS)
    i = at[:, None]
    dq = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    start, all_start, all_stop, stop, left, right = band(
        first_row, masks, BLOCK_M, BLOCK_N, 0, False, FLAGS
    )
    for index in tl.range(0, left + right):
        tile = edge_tile(index, left, start, all_stop, BLOCK_N)
        meets = True
        if FLAGS.documents:
            meets = same_documents(at, tile + tl.arange(0, BLOCK_N), masks)
        if meets:
            dq = queries_tile(
                dq, q, do, K, V, ADDED, rows, masks, i, tile, scale, key_row, value_row, BLOCK_N,
                E, EV, BLOCK_E, BLOCK_V, ADD, True, TERMS, FLAGS,
            )  # fmt: skip
    for tile in tl.range(all_start, all_stop, BLOCK_N):
        dq = queries_tile(
            dq, q, do, K, V, ADDED, rows, masks, i, tile, scale, key_row, value_row, BLOCK_N, E,
            EV, BLOCK_E, BLOCK_V, ADD, False, TERMS, FLAGS,
        )  # fmt: skip
    column = tl.arange(0, BLOCK_E)[None, :]
    tl.store(
        DQ + (row + at)[:, None] * E + column,
        (dq * (scale * tl.load(UNDO))).to(DQ.dtype.element_ty),
        mask=there[:, None] & (column < E),
    )


@jit
def keys_tile(
    dk, dv, k, v, Q, GRAD_OUT, ROWS, INDICES, count, row, masks, j, start, scale, undo, query_row,
    BLOCK: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr, EDGE: tl.constexpr, TERMS: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one tile of query rows to ``dk`` and ``dv``, and return both.

    ``dk`` and ``dv`` are the gradients of a block of keys and values, ``j`` their indices.
    """
    queries = masks[0][0]
    at = start + tl.arange(0, BLOCK)
    there = at < queries
    rows = coefficients(ROWS, INDICES, count, row + at, there, 0, TERMS)
    q = load(Q, at, there, query_row, E, BLOCK_E, FLAGS)
    x = tl.dot(k, tl.trans(q), input_precision=FLAGS.precision)
    dp = 0.0
    if TERMS.out:
        do = load(GRAD_OUT + row * EV, at, there, EV, EV, BLOCK_V, FLAGS)
        dp = tl.dot(v, tl.trans(do), input_precision=FLAGS.precision)
    i = at[None, :]
    e, ds, seen, bend = score_gradients(x, dp, i, j, rows, masks, scale, EDGE, TERMS, FLAGS)
    if TERMS.out:
        p = (e * (rows[5] * undo)).to(do.dtype)
        dv = tl.dot(p, do, dv, input_precision=FLAGS.precision)
    if FLAGS.softcap:
        ds *= bend
    if EDGE:
        q = finite(q)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=FLAGS.precision)
    return dk, dv


@jit
def keys_kernel(
    QUERY, KEY, VALUE, MASKS, GRAD_OUT, ROWS, INDICES, UNDO, DK, DV, query_heads, group, queries,
    keys, offset, window, scale, count, E: tl.constexpr, EV: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr, TERMS: tl.constexpr, FLAGS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients with respect to ``BLOCK_N`` keys and values of one head; one program each.

    They are summed over all query heads that share the key head.
    """
    blocks = tl.cdiv(keys, BLOCK_N)
    block = tl.program_id(0) % blocks
    whole_head = tl.program_id(0) // blocks
    key_heads = query_heads // group
    batch = whole_head // key_heads
    key_head = whole_head % key_heads
    K, key_row = rows_of(KEY, batch, key_head)
    V, value_row = rows_of(VALUE, batch, key_head)
    first_key = block * BLOCK_N
    columns = first_key + tl.arange(0, BLOCK_N)
    j = columns[:, None]
    kept = columns < keys
    k = load(K, columns, kept, key_row, E, BLOCK_E, FLAGS)
    dk = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    v, dv = k, dk
    if TERMS.out:
        v = load(V, columns, kept, value_row, EV, BLOCK_V, FLAGS)
        dv = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    undo = tl.load(UNDO)
    for member in tl.range(0, group):
        head = key_head * group + member
        masks = at_head(queries, keys, offset, window, MASKS, batch, head, FLAGS)
        row = (batch.to(tl.int64) * query_heads + head) * queries
        Q, query_row = rows_of(QUERY, batch, head)
        start, all_start, all_stop, stop, left, right = band(
            first_key, masks, BLOCK_N, BLOCK_M, 0, True, FLAGS
        )
        for index in tl.range(0, left + right):
            tile = edge_tile(index, left, start, all_stop, BLOCK_M)
            meets = True
            if FLAGS.documents:
                meets = same_documents(tile + tl.arange(0, BLOCK_M), columns, masks)
            if meets:
                dk, dv = keys_tile(
                    dk, dv, k, v, Q, GRAD_OUT, ROWS, INDICES, count, row, masks, j, tile, scale,
                    undo, query_row, BLOCK_M, E, EV, BLOCK_E, BLOCK_V, True, TERMS, FLAGS,
                )  # fmt: skip
        for tile in tl.range(all_start, all_stop, BLOCK_M):
            dk, dv = keys_tile(
                dk, dv, k, v, Q, GRAD_OUT, ROWS, INDICES, count, row, masks, j, tile, scale, undo,
                query_row, BLOCK_M, E, EV, BLOCK_E, BLOCK_V, False, TERMS, FLAGS,
            )  # fmt: skip
    at = (whole_head.to(tl.int64) * keys + columns)[:, None]
    column = tl.arange(0, BLOCK_E)[None, :]
    stored = kept[:, None] & (column < E)
    tl.store(DK + at * E + column, (dk * (scale * undo)).to(DK.dtype.element_ty), mask=stored)
    if TERMS.out:
        column = tl.arange(0, BLOCK_V)[None, :]
        stored = kept[:, None] & (column < EV)
        tl.store(DV + at * EV + column, dv.to(DV.dtype.element_ty), mask=stored)


@jit
def largest_kernel(
    QUERY, KEY, MASKS, INDICES, query_heads, group, queries, keys, offset, window, scale,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr, FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store, for each of ``BLOCK_M`` rows, the key with the largest visible score.

    Of equal scores it is the first.
    """
    batch, head, whole_head, first_row, rows, q, masks = block_of_queries(
        QUERY, MASKS, query_heads, queries, keys, offset, window, E, BLOCK_E, BLOCK_M, False, FLAGS
    )
    K, key_row = rows_of(KEY, batch, head // group)
    i = rows[:, None]
    best = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    found = tl.full((BLOCK_M,), NONE, tl.int32)
    start, all_start, all_stop, stop, left, right = band(
        first_row, masks, BLOCK_M, BLOCK_N, 0, False, FLAGS
    )
    for tile in tl.range(start, stop, BLOCK_N):
        columns = tile + tl.arange(0, BLOCK_N)
        j = columns[None, :]
        k = load(K, columns, columns < keys, key_row, E, BLOCK_E, FLAGS)
        x = tl.dot(q, tl.trans(k), input_precision=FLAGS.precision)
        x, bend = natural(x, i, j, masks, scale, FLAGS)
        x, seen = visible(x, in_place(i, j, masks, FLAGS), i, j, masks, FLAGS)
        x = tl.where(seen, x, -float("inf"))
        top = tl.max(x, 1)
        column = tl.min(tl.where(seen & (x == top[:, None]), j, NONE), 1)
        found = tl.where(top > best, column, found)
        best = tl.maximum(best, top)
    tl.store(INDICES + whole_head.to(tl.int64) * queries + rows, found, mask=rows < queries)
