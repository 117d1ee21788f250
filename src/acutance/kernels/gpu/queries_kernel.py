"""The backward kernel of the queries: a block of rows, over the keys they see.

Each row belongs to one program, so nothing is added up across programs and results do not depend on
which comes first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (what a kernel is given are pointers and numbers of the device: Python has no types for them)
# ruff: noqa: RUF059 (tuples are unpacked whole)

from __future__ import annotations

from acutance.kernels.gpu.gradients import coefficients, finite, load, score_gradients
from acutance.kernels.gpu.language import jit, tl
from acutance.kernels.gpu.scores import at_head, band, same_documents

__all__ = ["queries_kernel"]


@jit
def queries_tile(
    dq,
    q,
    do,
    KEY,
    VALUE,
    ADDED,
    rows,
    masks,
    i,
    start,
    scale,
    key_row,
    value_row,
    BLOCK: tl.constexpr,
    E: tl.constexpr,
    EV: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ADD: tl.constexpr,
    EDGE: tl.constexpr,
    TERMS: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Add what one tile of keys gives to the gradient of a block of queries."""
    keys = masks[0][1]
    columns = start + tl.arange(0, BLOCK)
    j = columns[None, :]
    there = columns < keys
    k = load(KEY, columns, there, key_row, E, BLOCK_E, FLAGS)
    x = tl.dot(q, tl.trans(k), input_precision=FLAGS.precision)
    dp = 0.0
    if TERMS.out:
        v = load(VALUE, columns, there, value_row, EV, BLOCK_V, FLAGS)
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
    DQ,
    ADDED,
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
    ADD: tl.constexpr,
    TERMS: tl.constexpr,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradient of ``BLOCK_M`` queries of one head."""
    blocks = tl.cdiv(queries, BLOCK_M)
    block = tl.program_id(0) % blocks
    whole_head = tl.program_id(0) // blocks
    if FLAGS.causal:
        block = blocks - 1 - block
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
    row = whole_head.to(tl.int64) * queries
    batch = batch.to(tl.int64)
    QUERY += batch * query_batch + head.to(tl.int64) * query_head
    KEY += batch * key_batch + (head // group).to(tl.int64) * key_head
    VALUE += batch * value_batch + (head // group).to(tl.int64) * value_head
    ADDED += row * keys
    q = load(QUERY, at, there, query_row, E, BLOCK_E, FLAGS)
    do = 0.0
    if TERMS.out:
        do = load(GRAD_OUT + row * EV, at, there, EV, EV, BLOCK_V, FLAGS)
    rows = coefficients(ROWS, INDICES, count, row + at, there, 1, TERMS)
    i = at[:, None]
    dq = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    last_row = tl.minimum(first_row + BLOCK_M, queries) - 1
    start, all_start, all_stop, stop = band(first_row, last_row, masks, BLOCK_N, 0, FLAGS)
    left = (all_start - start + BLOCK_N - 1) // BLOCK_N
    right = (stop - all_stop + BLOCK_N - 1) // BLOCK_N
    for index in tl.range(0, left + right):
        tile = tl.where(index < left, start + index * BLOCK_N, all_stop + (index - left) * BLOCK_N)
        meets = True
        if FLAGS.documents:
            meets = same_documents(at, tile + tl.arange(0, BLOCK_N), masks)
        if meets:
            dq = queries_tile(
                dq,
                q,
                do,
                KEY,
                VALUE,
                ADDED,
                rows,
                masks,
                i,
                tile,
                scale,
                key_row,
                value_row,
                BLOCK_N,
                E,
                EV,
                BLOCK_E,
                BLOCK_V,
                ADD,
                True,
                TERMS,
                FLAGS,
            )
    for tile in tl.range(all_start, all_stop, BLOCK_N):
        dq = queries_tile(
            dq,
            q,
            do,
            KEY,
            VALUE,
            ADDED,
            rows,
            masks,
            i,
            tile,
            scale,
            key_row,
            value_row,
            BLOCK_N,
            E,
            EV,
            BLOCK_E,
            BLOCK_V,
            ADD,
            False,
            TERMS,
            FLAGS,
        )
    column = tl.arange(0, BLOCK_E)[None, :]
    tl.store(
        DQ + (row + at)[:, None] * E + column,
        (dq * (scale * tl.load(UNDO))).to(DQ.dtype.element_ty),
        mask=there[:, None] & (column < E),
    )
