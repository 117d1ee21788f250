"""What every kernel does to a tile of dot products: scale, softcap, biases, and who sees whom.

Row and key positions come as index tensors of any two shapes that broadcast, (rows, 1) and
(1, keys) or the other way round: the same code serves a tile and its transpose.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (what a kernel is given are pointers and numbers of the device: Python has no types for them)
# ruff: noqa: RUF059 (tuples are unpacked whole)

from __future__ import annotations

from typing import NamedTuple

from acutance.kernels.gpu.language import constant, jit, tl

LOG2E = constant(1.4426950408889634)
NEAR = constant(0.625)
# tanh y = y + y³ P(y²) where |y| < 0.625: coefficients of least relative error, 4.4e-9
P0, P1, P2 = constant(-0.33333282), constant(0.13331442), constant(-0.05373969)
P3, P4 = constant(0.02063901), constant(-0.00570490)
NONE = constant(2**31 - 1)  # column of a row that has not met a visible key


class Flags(NamedTuple):
    """Compile-time options of a kernel: which masks and biases a call has, and its precision."""

    causal: bool
    window: bool
    mask: int  # 0: none, 1: boolean, 2: additive
    bias: bool
    key_mask: bool
    documents: bool
    alibi: bool
    softcap: bool
    changed: bool  # scores are more than scale times the dot product
    data: bool  # a mask that is data may hide any key
    precision: str  # of products of float32
    widen: bool  # multiply in float32 whatever the inputs are
    interpreted: bool  # multiply-adds round twice


@jit
def tanh(y):
    """Hyperbolic tangent: a polynomial near 0, where the exponential form would cancel."""
    size = tl.abs(y)
    square = y * y
    near = y + y * square * (P0 + square * (P1 + square * (P2 + square * (P3 + square * P4))))
    away = 1.0 - 2.0 / (tl.exp2(size * (2.0 * LOG2E)) + 1.0)
    return tl.where(size < NEAR, near, tl.where(y < 0.0, -away, away))


@jit
def load(X, at, there, row, width: tl.constexpr, BLOCK: tl.constexpr, FLAGS: tl.constexpr):
    """Load rows ``at`` of a matrix, (rows, BLOCK); 0 where not ``there`` or beyond ``width``."""
    column = tl.arange(0, BLOCK)[None, :]
    found = tl.load(
        X + tl.cast(at, tl.int64)[:, None] * row + column,
        mask=there[:, None] & (column < width),
        other=0.0,
    )
    if FLAGS.widen:
        found = found.to(tl.float32)
    return found


@jit
def rows_of(X, batch, head):
    """Pointer to the rows of one head, and their stride, of a pointer and its strides."""
    pointer, by_batch, by_head, row = X
    return pointer + batch.to(tl.int64) * by_batch + head.to(tl.int64) * by_head, row


@jit
def block_of_queries(
    QUERY, MASKS, query_heads, queries, keys, offset, window, E: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """A program's queries: batch, head, head among those of all batches, rows, vectors, masks."""
    blocks = tl.cdiv(queries, BLOCK)
    block = tl.program_id(0) % blocks
    whole_head = tl.program_id(0) // blocks
    if LAST_FIRST:  # of causal attention the last rows are the longest
        block = blocks - 1 - block
    batch = whole_head // query_heads
    head = whole_head % query_heads
    masks = at_head(queries, keys, offset, window, MASKS, batch, head, FLAGS)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    Q, query_row = rows_of(QUERY, batch, head)
    q = load(Q, rows, rows < queries, query_row, E, BLOCK_E, FLAGS)
    return batch, head, whole_head, block * BLOCK, rows, q, masks


@jit
def edge_tile(index, left, start, all_stop, BLOCK: tl.constexpr):
    """First key of edge tile ``index`` of :func:`band`; ``left`` of them begin at ``start``."""
    return tl.where(index < left, start + index * BLOCK, all_stop + (index - left) * BLOCK)


@jit
def at_head(queries, keys, offset, window, MASKS, batch, head, FLAGS: tl.constexpr):
    """The masks' pointers moved to one batch entry and query head, and its ALiBi slope."""
    mask, bias, others = MASKS
    softcap, SLOPES, KEY_MASK, ROW_DOCUMENTS, row_documents, KEY_DOCUMENTS, key_documents = others
    batch = batch.to(tl.int64)
    head = head.to(tl.int64)
    slope = 0.0
    if FLAGS.alibi:
        slope = tl.load(SLOPES + head).to(tl.float32)
    return (
        (queries, keys, offset, window, softcap, slope),
        (mask[0] + batch * mask[1] + head * mask[2], mask[3], mask[4], mask[5]),
        (bias[0] + batch * bias[1] + head * bias[2], bias[3], bias[4], bias[5]),
        (
            KEY_MASK + batch * keys,
            ROW_DOCUMENTS + batch * row_documents,
            KEY_DOCUMENTS + batch * key_documents,
        ),
    )


@jit
def band(
    first, masks, COUNT: tl.constexpr, BLOCK: tl.constexpr, LEAD: tl.constexpr,
    OF_ROWS: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """The range of keys, in tiles of ``BLOCK``, that any of ``COUNT`` rows sees by position.

    With ``OF_ROWS`` the range of rows that see any of ``COUNT`` keys. Inside it are whole tiles
    that all of these see: none if a mask is given by data; the first ``LEAD`` do not count.

    Returns:
        Start of the range and of the whole tiles, stop of these and of the range, and the numbers
        of tiles before and after the whole ones, where masks hide some keys.
    """
    queries, keys, offset, window, softcap, slope = masks[0]
    these, others = queries, keys
    if OF_ROWS:
        these, others, offset = keys, queries, -offset
    last = tl.minimum(first + COUNT, these) - 1
    start = tl.zeros((), tl.int32)
    stop = start + others
    all_start, all_stop = start, stop
    if FLAGS.window:
        start = tl.maximum(start, first + offset - window + 1)
        all_start = tl.maximum(all_start, last + offset - window + 1)
        stop = tl.minimum(stop, last + offset + window)
        all_stop = tl.minimum(all_stop, first + offset + window)
    if FLAGS.causal:
        if OF_ROWS:
            start = tl.maximum(start, first + offset)
            all_start = tl.maximum(all_start, last + offset)
        else:
            stop = tl.minimum(stop, last + offset + 1)
            all_stop = tl.minimum(all_stop, first + offset + 1)
    stop = tl.maximum(stop, start)
    start = start // BLOCK * BLOCK
    all_start = ((all_start + BLOCK - 1) // BLOCK + LEAD) * BLOCK
    all_stop = tl.maximum(all_stop, 0) // BLOCK * BLOCK
    none = all_stop <= all_start
    if FLAGS.data:
        none = none | True
    all_start, all_stop = tl.where(none, stop, all_start), tl.where(none, stop, all_stop)
    left = (all_start - start + BLOCK - 1) // BLOCK
    right = (stop - all_stop + BLOCK - 1) // BLOCK
    return start, all_start, all_stop, stop, left, right


@jit
def natural(x, i, j, masks, scale, FLAGS: tl.constexpr):
    """Scores from dot products x: scale, softcap, ALiBi; and the derivative of the softcap."""
    queries, keys, offset, window, softcap, slope = masks[0]
    s = x * scale
    bend = 1.0
    if FLAGS.softcap:
        bounded = tanh(s / softcap)
        bend = 1.0 - bounded * bounded
        s = bounded * softcap
    if FLAGS.alibi:
        s = s - slope * tl.abs(i + offset - j).to(tl.float32)
    return s, bend


@jit
def in_place(i, j, masks, FLAGS: tl.constexpr):
    """True for pairs of query i and key j that exist and are visible by position."""
    queries, keys, offset, window, softcap, slope = masks[0]
    seen = (i < queries) & (j < keys)
    if FLAGS.causal:
        seen = seen & (j <= i + offset)
    if FLAGS.window:
        seen = seen & (i + offset - j < window) & (j - i - offset < window)
    return seen


@jit
def visible_range(rows, masks, FLAGS: tl.constexpr):
    """The range of keys, [first, end), that causality and window let each row see."""
    queries, keys, offset, window, softcap, slope = masks[0]
    since = tl.zeros(rows.shape, tl.int32)
    upto = since + keys
    if FLAGS.window:
        since = tl.maximum(since, rows + offset - window + 1)
        upto = tl.minimum(upto, rows + offset + window)
    if FLAGS.causal:
        upto = tl.minimum(upto, rows + offset + 1)
    return since, upto


@jit
def visible(s, seen, i, j, masks, FLAGS: tl.constexpr):
    """Scores s with bias and mask added, and ``seen`` less pairs that masks or documents hide."""
    queries, keys, offset, window, softcap, slope = masks[0]
    KEY_MASK, ROW_DOCUMENTS, KEY_DOCUMENTS = masks[3]
    if FLAGS.bias:
        added, limit = _entries(masks[2], i, j, seen)
        added = added.to(tl.float32)
        s = s + added
        seen = seen & ((added <= limit) == 0)
    if FLAGS.mask == 2:
        added, limit = _entries(masks[1], i, j, seen)
        added = added.to(tl.float32)
        s = s + added
        seen = seen & ((added <= limit) == 0)
    if FLAGS.mask == 1:
        shown, limit = _entries(masks[1], i, j, seen)
        seen = seen & (shown != 0)
    if FLAGS.key_mask:
        seen = seen & (tl.load(KEY_MASK + j, mask=j < keys, other=0) != 0)
    if FLAGS.documents:
        mine = tl.load(ROW_DOCUMENTS + i, mask=i < queries, other=0)
        seen = seen & (mine == tl.load(KEY_DOCUMENTS + j, mask=j < keys, other=0))
    return s, seen


@jit
def same_documents(rows, columns, masks):
    """Whether a row and a key of a tile may be in one document, judged by their ranges of ids."""
    queries, keys, offset, window, softcap, slope = masks[0]
    KEY_MASK, ROW_DOCUMENTS, KEY_DOCUMENTS = masks[3]
    # an index clamped to the last one repeats an id of the tile and changes no range
    mine = tl.load(ROW_DOCUMENTS + tl.minimum(rows, queries - 1))
    theirs = tl.load(KEY_DOCUMENTS + tl.minimum(columns, keys - 1))
    return (tl.min(mine, 0) <= tl.max(theirs, 0)) & (tl.min(theirs, 0) <= tl.max(mine, 0))


@jit
def _entries(matrix, i, j, there):
    """Entries (i, j) of an L × S mask and its limit, with 64-bit offsets; 0 where not ``there``."""
    X, row, key, limit = matrix
    return tl.load(X + i.to(tl.int64) * row + j.to(tl.int64) * key, mask=there, other=0), limit
