"""Where each row's largest score is: the key that the gradient of the maximum goes to."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (what a kernel is given are pointers and numbers of the device: Python has no types for them)
# ruff: noqa: RUF059 (tuples are unpacked whole)

from __future__ import annotations

from acutance.kernels.gpu.gradients import load
from acutance.kernels.gpu.language import jit, tl
from acutance.kernels.gpu.scores import NONE, at_head, band, in_place, natural, visible

__all__ = ["largest_kernel"]


@jit
def largest_kernel(
    QUERY,
    KEY,
    INDICES,
    MASK,
    BIAS,
    KEY_MASK,
    ROW_DOCUMENTS,
    KEY_DOCUMENTS,
    SLOPES,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    mask_batch,
    mask_head,
    mask_row,
    mask_key,
    mask_limit,
    bias_batch,
    bias_head,
    bias_row,
    bias_key,
    bias_limit,
    row_documents,
    key_documents,
    query_heads,
    group,
    queries,
    keys,
    offset,
    window,
    softcap,
    scale,
    size,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store, for each of ``BLOCK_M`` rows, the key with the largest visible score.

    Of equal scores it is the first.
    """
    blocks = tl.cdiv(queries, BLOCK_M)
    block = tl.program_id(0) % blocks
    whole_head = tl.program_id(0) // blocks
    batch = whole_head // query_heads
    head = whole_head % query_heads
    masks = at_head(
        (
            (queries, keys, offset, window, softcap),
            (MASK, mask_batch, mask_head, mask_row, mask_key, mask_limit),
            (BIAS, bias_batch, bias_head, bias_row, bias_key, bias_limit),
            (KEY_MASK, ROW_DOCUMENTS, row_documents, KEY_DOCUMENTS, key_documents, SLOPES),
        ),
        batch,
        head,
        FLAGS,
    )
    first_row = block * BLOCK_M
    at = first_row + tl.arange(0, BLOCK_M)
    there = at < queries
    i = at[:, None]
    batch = batch.to(tl.int64)
    QUERY += batch * query_batch + head.to(tl.int64) * query_head
    KEY += batch * key_batch + (head // group).to(tl.int64) * key_head
    q = load(QUERY, at, there, query_row, E, BLOCK_E, FLAGS)
    best = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    found = tl.full((BLOCK_M,), NONE, tl.int32)
    last_row = tl.minimum(first_row + BLOCK_M, queries) - 1
    start, all_start, all_stop, stop = band(first_row, last_row, masks, BLOCK_N, 0, FLAGS)
    for tile in tl.range(start, stop, BLOCK_N):
        columns = tile + tl.arange(0, BLOCK_N)
        j = columns[None, :]
        k = load(KEY, columns, columns < keys, key_row, E, BLOCK_E, FLAGS)
        x = tl.dot(q, tl.trans(k), input_precision=FLAGS.precision)
        x, bend = natural(x, i, j, masks, scale, FLAGS)
        x, seen = visible(x, in_place(i, j, masks, FLAGS), i, j, masks, FLAGS)
        x = tl.where(seen, x, -float("inf"))
        top = tl.max(x, 1)
        column = tl.min(tl.where(seen & (x == top[:, None]), j, NONE), 1)
        found = tl.where(top > best, column, found)
        best = tl.maximum(best, top)
    tl.store(INDICES + whole_head.to(tl.int64) * queries + at, found, mask=there)
