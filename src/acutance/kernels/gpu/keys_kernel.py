"""The backward kernel of keys and values: a block of them, over the rows that see them.

All query heads that share a key head are one program's, one after the other: nothing is added up
across programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (what a kernel is given are pointers and numbers of the device: Python has no types for them)
# ruff: noqa: RUF059 (tuples are unpacked whole)

from __future__ import annotations

from acutance.kernels.gpu.gradients import coefficients, finite, load, score_gradients
from acutance.kernels.gpu.language import jit, tl
from acutance.kernels.gpu.scores import at_head, rows_band, same_documents

__all__ = ["keys_kernel"]


@jit
def keys_tile(
    dk,
    dv,
    k,
    v,
    QUERY,
    GRAD_OUT,
    ROWS,
    INDICES,
    count,
    row,
    masks,
    j,
    start,
    scale,
    undo,
    query_row,
    BLOCK: tl.constexpr,
    E: tl.constexpr,
    EV: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EDGE: tl.constexpr,
    TERMS: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Add what one tile of query rows gives to the gradients of a block of keys and values."""
    queries = masks[0][0]
    at = start + tl.arange(0, BLOCK)
    there = at < queries
    rows = coefficients(ROWS, INDICES, count, row + at, there, 0, TERMS)
    q = load(QUERY, at, there, query_row, E, BLOCK_E, FLAGS)
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
    QUERY,
    KEY,
    VALUE,
    GRAD_OUT,
    ROWS,
    INDICES,
    UNDO,
    MASK,
    BIAS,
    KEY_MASK,
    ROW_DOCUMENTS,
    KEY_DOCUMENTS,
    SLOPES,
    DK,
    DV,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
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
    count,  # of all rows
    size,
    E: tl.constexpr,
    EV: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TERMS: tl.constexpr,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradients of ``BLOCK_N`` keys and values of one head, from all query heads that share it."""
    blocks = tl.cdiv(keys, BLOCK_N)
    block = tl.program_id(0) % blocks
    whole_head = tl.program_id(0) // blocks
    key_heads = query_heads // group
    batch = whole_head // key_heads
    key_at = whole_head % key_heads
    wide = batch.to(tl.int64)
    KEY += wide * key_batch + key_at.to(tl.int64) * key_head
    VALUE += wide * value_batch + key_at.to(tl.int64) * value_head
    QUERY += wide * query_batch
    first_key = block * BLOCK_N
    columns = first_key + tl.arange(0, BLOCK_N)
    j = columns[:, None]
    kept = columns < keys
    k = load(KEY, columns, kept, key_row, E, BLOCK_E, FLAGS)
    dk = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    v, dv = k, dk
    if TERMS.out:
        v = load(VALUE, columns, kept, value_row, EV, BLOCK_V, FLAGS)
        dv = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    last_key = tl.minimum(first_key + BLOCK_N, keys) - 1
    undo = tl.load(UNDO)
    for member in tl.range(0, group):
        head = key_at * group + member
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
        row = (wide * query_heads + head) * queries
        at_query = QUERY + tl.cast(head, tl.int64) * query_head
        start, all_start, all_stop, stop = rows_band(first_key, last_key, masks, BLOCK_M, FLAGS)
        left = (all_start - start + BLOCK_M - 1) // BLOCK_M
        right = (stop - all_stop + BLOCK_M - 1) // BLOCK_M
        for index in tl.range(0, left + right):
            tile = tl.where(
                index < left, start + index * BLOCK_M, all_stop + (index - left) * BLOCK_M
            )
            meets = True
            if FLAGS.documents:
                meets = same_documents(tile + tl.arange(0, BLOCK_M), columns, masks)
            if meets:
                dk, dv = keys_tile(
                    dk,
                    dv,
                    k,
                    v,
                    at_query,
                    GRAD_OUT,
                    ROWS,
                    INDICES,
                    count,
                    row,
                    masks,
                    j,
                    tile,
                    scale,
                    undo,
                    query_row,
                    BLOCK_M,
                    E,
                    EV,
                    BLOCK_E,
                    BLOCK_V,
                    True,
                    TERMS,
                    FLAGS,
                )
        for tile in tl.range(all_start, all_stop, BLOCK_M):
            dk, dv = keys_tile(
                dk,
                dv,
                k,
                v,
                at_query,
                GRAD_OUT,
                ROWS,
                INDICES,
                count,
                row,
                masks,
                j,
                tile,
                scale,
                undo,
                query_row,
                BLOCK_M,
                E,
                EV,
                BLOCK_E,
                BLOCK_V,
                False,
                TERMS,
                FLAGS,
            )
    at = (whole_head.to(tl.int64) * keys + columns)[:, None]
    column = tl.arange(0, BLOCK_E)[None, :]
    stored = kept[:, None] & (column < E)
    tl.store(DK + at * E + column, (dk * (scale * undo)).to(DK.dtype.element_ty), mask=stored)
    if TERMS.out:
        column = tl.arange(0, BLOCK_V)[None, :]
        stored = kept[:, None] & (column < EV)
        tl.store(DV + at * EV + column, dv.to(DV.dtype.element_ty), mask=stored)
