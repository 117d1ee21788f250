"""The forward kernel: a block of query rows against all the keys it sees, every sum in one pass.

Tiles at the edges of what a block sees come first and pay for masks; the whole tiles between them
do not. With a mask that is data every tile is an edge. The plain mean and squared deviations of an
edge are about its own mean and merged. Of the whole tiles they follow from moments of the keys
(:mod:`~acutance.kernels.gpu.key_moments`) where these were summed, and where a row's logits are not
so alike that the products cancel: less than a digit of seven is lost. Of other whole tiles they are
about one centre, the mean of the edges' keys, of which there is then always a tile's worth: two
sums, which wait for no maximum and merge once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (what a kernel is given are pointers and numbers of the device: Python has no types for them)

from __future__ import annotations

from acutance.kernels.gpu.forward_tile import multiply_add, tile
from acutance.kernels.gpu.key_moments import last_chunk
from acutance.kernels.gpu.language import constant, jit, tl
from acutance.kernels.gpu.scores import (
    LOG2E,
    NONE,
    at_head,
    band,
    same_documents,
    visible_range,
)

__all__ = ["forward_kernel"]

LN2 = constant(0.6931471805599453)
#: Share of a squared correction up to which rounding of it passes for a second moment: 8 eps.
TINY = constant(2.0**-20)
NO_KEY = constant(2**63 - 1)  # first visible key of a row without one


@jit
def forward_kernel(
    QUERY,
    KEY,
    VALUE,
    CENTRE,
    ROW_MEANS,
    ROW_SQUARES,
    SINKS,
    MASK,
    BIAS,
    KEY_MASK,
    ROW_DOCUMENTS,
    KEY_DOCUMENTS,
    SLOPES,
    OUT,
    N,
    M,
    NORMALISER,
    FIRST_MOMENT,
    SECOND_MOMENT,
    SQUARES,
    MEAN,
    DEVIATIONS,
    DEPTH,
    FIRST,
    FIRST_INDEX,
    SUM,
    NOISE_MEAN,
    NOISE_SPREAD,
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
    size,  # only so that configurations are chosen by it
    E: tl.constexpr,
    EV: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NOISE: tl.constexpr,
    CHUNK: tl.constexpr,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: ``BLOCK_M`` rows of one head."""
    blocks = tl.cdiv(queries, BLOCK_M)
    block = tl.program_id(0) % blocks
    whole_head = tl.program_id(0) // blocks
    if FLAGS.causal:
        block = blocks - 1 - block  # long rows first
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
    rows = first_row + tl.arange(0, BLOCK_M)
    i = rows[:, None]
    e_index = tl.arange(0, BLOCK_E)[None, :]
    v_index = tl.arange(0, BLOCK_V)[None, :]
    wide_batch = batch.to(tl.int64)
    QUERY += wide_batch * query_batch + head.to(tl.int64) * query_head
    KEY += wide_batch * key_batch + (head // group).to(tl.int64) * key_head
    VALUE += wide_batch * value_batch + (head // group).to(tl.int64) * value_head
    q = tl.load(
        QUERY + i.to(tl.int64) * query_row + e_index,
        mask=(i < queries) & (e_index < E),
        other=0.0,
    )
    if FLAGS.widen:
        q = q.to(tl.float32)
    centre = 0.0
    if NOISE:
        key_heads = query_heads // group
        mean_at = (batch * key_heads + head // group) * EV + v_index
        centre = tl.load(CENTRE + mean_at, mask=v_index < EV, other=0.0)

    zero = tl.zeros((BLOCK_M,), tl.float32)
    acc, squares = zero, zero
    if EV > 0:
        acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    if NOISE:
        squares = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    none = tl.full((BLOCK_M,), NONE, tl.int32)
    least = zero - float("inf")
    state = (
        acc,
        least,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        none,
        squares,
        zero,
        zero,
        zero,
        zero,
    )
    since, upto = visible_range(rows, masks, FLAGS)
    last_row = tl.minimum(first_row + BLOCK_M, queries) - 1
    start, all_start, all_stop, stop = band(first_row, last_row, masks, BLOCK_N, 1, FLAGS)
    left = (all_start - start + BLOCK_N - 1) // BLOCK_N
    right = (stop - all_stop + BLOCK_N - 1) // BLOCK_N
    for index in tl.range(0, left + right):
        at = tl.where(index < left, start + index * BLOCK_N, all_stop + (index - left) * BLOCK_N)
        meets = True
        if FLAGS.documents:
            meets = same_documents(rows, at + tl.arange(0, BLOCK_N), masks)
        if meets:
            state = tile(
                state,
                q,
                KEY,
                VALUE,
                centre,
                masks,
                i,
                since,
                upto,
                at,
                scale,
                key_row,
                value_row,
                BLOCK_N,
                E,
                EV,
                NOISE,
                True,
                True,
                FLAGS,
            )
    acc, m, Z, U, W, Q, n, middle, M2, first, first_key, squares, spread, about, away1, away2 = (
        state
    )
    log2 = scale * LOG2E
    if FLAGS.changed:
        log2 = 1.0 * LOG2E
    edges = m * log2
    about = tl.where(log2 == 0.0, m, (edges + middle) / tl.where(log2 == 0.0, 1.0, log2))
    state = (
        acc,
        m,
        Z,
        U,
        W,
        Q,
        n,
        middle,
        M2,
        first,
        first_key,
        squares,
        spread,
        about,
        away1,
        away2,
    )
    # of whole tiles those from summed_start to summed_stop leave their moments to the keys'
    summed_start, summed_stop = all_stop, all_stop
    row = whole_head.to(tl.int64) * queries + rows
    there = rows < queries
    if CHUNK > 0:
        last = last_chunk(first_row, keys, offset, CHUNK, FLAGS.causal)
        if last > 0:
            squared = tl.load(ROW_SQUARES + row, mask=there, other=0.0)
            if tl.min((squared == squared).to(tl.int32), 0) > 0:
                summed_start = tl.zeros((), tl.int32) + CHUNK
                summed_stop = (last + 1) * CHUNK
    left = tl.maximum(summed_start - all_start, 0) // BLOCK_N
    right = (all_stop - summed_stop) // BLOCK_N
    for index in tl.range(0, left + right):
        at = all_start + index * BLOCK_N
        if CHUNK > 0:
            at += tl.where(index < left, 0, summed_stop - summed_start)
        state = tile(
            state,
            q,
            KEY,
            VALUE,
            centre,
            masks,
            i,
            since,
            upto,
            at,
            scale,
            key_row,
            value_row,
            BLOCK_N,
            E,
            EV,
            NOISE,
            False,
            True,
            FLAGS,
        )
    acc, m, Z, U, W, Q, n, middle, M2, first, first_key, squares, spread, about, away1, away2 = (
        state
    )
    top = m * log2
    if left + right > 0:
        middle += edges - top
        count = ((left + right) * BLOCK_N).to(tl.float32)
        slip = away1 / count
        apart = tl.maximum(away2 - slip * away1, 0.0, propagate_nan=tl.PropagateNan.ALL)
        step = multiply_add(about, log2, -top, FLAGS) + slip * log2 - middle
        share = count / (n + count)
        M2 += apart * (log2 * log2) + step * step * n * share
        middle += step * share
        n += count
    if CHUNK > 0:  # noqa: SIM102 (decided when the kernel is compiled)
        if summed_stop > summed_start:
            before = top
            state = (
                acc,
                m,
                Z,
                U,
                W,
                Q,
                zero,
                zero,
                zero,
                zero,
                none,
                squares,
                spread,
                zero,
                zero,
                zero,
            )
            for at in tl.range(summed_start, summed_stop, BLOCK_N):
                state = tile(
                    state,
                    q,
                    KEY,
                    VALUE,
                    centre,
                    masks,
                    i,
                    since,
                    upto,
                    at,
                    scale,
                    key_row,
                    value_row,
                    BLOCK_N,
                    E,
                    EV,
                    NOISE,
                    False,
                    False,
                    FLAGS,
                )
            acc, m, Z, U, W, Q, _, _, _, _, _, squares, spread, _, _, _ = state
            top = m * log2
            middle += before - top
            count = (summed_stop - summed_start).to(tl.float32)
            mean = tl.load(ROW_MEANS + row, mask=there, other=0.0)
            squared = tl.load(ROW_SQUARES + row, mask=there, other=0.0)
            step = multiply_add(first, log2, -top, FLAGS) + mean * log2 - middle
            share = count / (n + count)
            M2 += squared * (log2 * log2) + step * step * n * share
            middle += step * share
            n += count
    # sums are about the rounded product of maximum and factor: now about the maximum itself
    rest = multiply_add(m, log2, -top, FLAGS)
    rest = tl.where(tl.abs(m) < float("inf"), rest, 0.0)
    decay = tl.exp2(-rest)
    W = decay * (W - rest * (2.0 * U - rest * Z))
    U = decay * (U - rest * Z)
    Z = decay * Z
    Q = decay * decay * Q
    middle -= rest

    unit = scale
    if FLAGS.changed:
        unit = 1.0
    empty = n == 0.0
    inverse = tl.where(Z == 0.0, 0.0, 1.0 / tl.where(Z == 0.0, 1.0, Z))
    known = (Z == Z) | (m == float("inf"))
    m = tl.where(empty, -float("inf"), tl.where(known, m * unit, float("nan")))
    tl.store(N + row, n.to(tl.int64), mask=there)
    tl.store(M + row, m, mask=there)
    tl.store(NORMALISER + row, Z, mask=there)
    tl.store(FIRST_MOMENT + row, U * LN2, mask=there)
    about_mean = tl.maximum(W - U * U * inverse, 0.0, propagate_nan=tl.PropagateNan.ALL)
    about_mean = tl.where(about_mean <= rest * rest * Z * TINY, 0.0, about_mean)  # rounding alone
    tl.store(SECOND_MOMENT + row, about_mean * (LN2 * LN2), mask=there)
    tl.store(SQUARES + row, Q, mask=there)
    depth = -middle * LN2
    tl.store(MEAN + row, tl.where(empty, 0.0, m - depth), mask=there)
    tl.store(DEVIATIONS + row, M2 * (LN2 * LN2), mask=there)
    tl.store(DEPTH + row, tl.where(empty, 0.0, depth), mask=there)
    tl.store(FIRST + row, tl.where(empty, 0.0, first * unit), mask=there)
    index = tl.where(first_key == NONE, NO_KEY, first_key.to(tl.int64))
    tl.store(FIRST_INDEX + row, index, mask=there)
    if EV > 0:
        if HAS_SINKS:
            sink = tl.load(SINKS + head).to(tl.float32)
            whole = Z + tl.exp2((sink - tl.where(m == -float("inf"), 0.0, m)) * LOG2E)
            inverse = tl.where(whole == 0.0, 0.0, 1.0 / tl.where(whole == 0.0, 1.0, whole))
        out_at = row[:, None] * EV + v_index
        stored = there[:, None] & (v_index < EV)
        out = acc * (inverse * decay)[:, None]
        tl.store(OUT + out_at, out.to(OUT.dtype.element_ty), mask=stored)
        if NOISE:
            heavy = tl.where(Q == 0.0, 1.0, Q)
            squares, spread = squares * (decay * decay)[:, None], spread * decay * decay
            average = squares / heavy[:, None]
            inner = tl.maximum(spread - Q * tl.sum(average * average, 1), 0.0)
            tl.store(SUM + out_at, acc * decay[:, None], mask=stored)
            average = tl.where(empty[:, None], 0.0, average + centre)
            tl.store(NOISE_MEAN + out_at, average, mask=stored)
            tl.store(NOISE_SPREAD + row, inner, mask=there)
