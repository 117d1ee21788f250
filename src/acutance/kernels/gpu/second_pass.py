"""Passes after the forward kernel: the gap histogram, and where each row's largest score is."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (what a kernel is given are pointers and numbers of the device: Python has no types for them)
# ruff: noqa: RUF059 (tuples are unpacked whole)

from __future__ import annotations

from acutance.kernels.gpu.language import constant, jit, tl
from acutance.kernels.gpu.scores import (
    NONE,
    band,
    block_of_queries,
    edge_tile,
    in_place,
    load,
    natural,
    rows_of,
    visible,
)

BINS = constant(64)
STEPS = constant(4.0)  # bins of a unit of logit
WORDS = constant(16)


@jit
def count_tile(
    q, K, to, top, there, start, i, masks, scale, keys, key_row, E: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, EDGE: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Add a tile's visible keys to the rows' gap histograms, at address ``to``.

    Keys are counted by the distance of their score below the row's maximum ``top``.
    """
    columns = start + tl.arange(0, BLOCK_N)
    j = columns[None, :]
    k = load(K, columns, columns < keys, key_row, E, BLOCK_E, FLAGS)
    x = tl.dot(q, tl.trans(k), input_precision=FLAGS.precision)
    s, _ = natural(x, i, j, masks, scale, FLAGS)
    if EDGE:
        s, seen = visible(s, in_place(i, j, masks, FLAGS), i, j, masks, FLAGS)
    gap = top[:, None] - tl.floor(s * STEPS)
    inside = gap < BINS  # not where it is NaN
    if EDGE:
        inside = inside & seen
    bin = tl.where(inside, tl.maximum(gap, 0.0), BINS).to(tl.int32)
    word = bin >> 2
    one = 1 << ((bin & 3) * 8)
    place = tl.arange(0, 4)[None, :]
    least = tl.min(word)
    most = tl.max(tl.where(inside, word, -1))
    for each in tl.range(least, most + 1):
        total = tl.sum(tl.where(word == each, one, 0), 1)  # bytes, of at most BLOCK_N each
        found = (total[:, None] >> (place * 8)) & 255
        tl.atomic_add(to + each * 4 + place, found, mask=there[:, None], sem="relaxed")


@jit
def gaps_kernel(
    QUERY, KEY, MASKS, M, GAPS, query_heads, group, queries, keys, offset, window, scale,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr, FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fill the gap histograms, zero before, of ``BLOCK_M`` rows of one head; one program each."""
    batch, head, whole_head, first_row, rows, q, masks = block_of_queries(
        QUERY, MASKS, query_heads, queries, keys, offset, window, E, BLOCK_E, BLOCK_M, False, FLAGS
    )
    K, key_row = rows_of(KEY, batch, head // group)
    there = rows < queries
    i = rows[:, None]
    row = whole_head.to(tl.int64) * queries + rows
    top = tl.floor(tl.load(M + row, mask=there, other=0.0) * STEPS)
    to = GAPS + row[:, None] * BINS
    start, all_start, all_stop, stop, left, right = band(
        first_row, masks, BLOCK_M, BLOCK_N, 0, False, FLAGS
    )
    for index in tl.range(0, left + right):
        tile = edge_tile(index, left, start, all_stop, BLOCK_N)
        count_tile(
            q, K, to, top, there, tile, i, masks, scale, keys, key_row, E, BLOCK_E, BLOCK_N, True,
            FLAGS,
        )  # fmt: skip
    for tile in tl.range(all_start, all_stop, BLOCK_N):
        count_tile(
            q, K, to, top, there, tile, i, masks, scale, keys, key_row, E, BLOCK_E, BLOCK_N, False,
            FLAGS,
        )  # fmt: skip


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
