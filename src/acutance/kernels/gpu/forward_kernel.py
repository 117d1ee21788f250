"""The forward kernel: a block of query rows against all the keys it sees, every sum in one pass.

Tiles at the edges of what a block sees come first and pay for masks; the whole tiles between them
do not. With a mask that is data every tile is an edge. The plain mean and squared deviations of an
edge are about its own mean and merged. Of the whole tiles they follow from moments of the keys
(:mod:`~acutance.kernels.gpu.key_moments`) where these were summed, and where a row's logits are not
so alike that the products cancel: less than a digit of seven is lost. Of other whole tiles they are
about one centre, the mean of the edges' keys, of which there is then always a tile's worth: two
sums, which wait for no maximum and merge once.

Sums are of t, the score in units of log 2 less the rounded product of the row's maximum and the
factor of its scores: one multiply-add a pair, rounded once. What the product was rounded by is
corrected when all keys are summed. The gap histogram takes a pass of its own afterwards.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (what a kernel is given are pointers and numbers of the device: Python has no types for them)
# ruff: noqa: RUF059 (tuples are unpacked whole)

from __future__ import annotations

from acutance.kernels.gpu.key_moments import last_chunk
from acutance.kernels.gpu.language import constant, jit, tl
from acutance.kernels.gpu.scores import (
    LOG2E,
    NONE,
    band,
    block_of_queries,
    edge_tile,
    in_place,
    load,
    natural,
    rows_of,
    same_documents,
    visible,
    visible_range,
)

#: A maximum that rises by more than this, in log 2, leaves nothing of what was summed before.
DEEPEST = constant(-16384.0)


@jit
def multiply_add(x, y, z, FLAGS: tl.constexpr):
    """``x * y + z``, rounded once."""
    if FLAGS.interpreted:  # its own rounds twice
        return (x.to(tl.float64) * y + z.to(tl.float64)).to(tl.float32)
    return tl.fma(x, y, z)


@jit
def tile(
    state, q, K, V, centre, masks, i, since, upto, start, scale, key_row, value_row,
    BLOCK: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, NOISE: tl.constexpr,
    EDGE: tl.constexpr, MOMENTS: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Return the running sums ``state`` of some query rows after a tile of ``BLOCK`` keys.

    ``q`` are the queries, ``K`` and ``V`` pointers to the head's keys and values, ``i`` the rows'
    indices, ``start`` the tile's first key. With ``EDGE``, only keys from ``since`` to ``upto`` of
    each row that no mask hides count; else all of the tile.
    """
    acc, m, Z, U, W, Q, n, middle, M2, first, first_key, squares, spread, about, away1, away2 = (
        state
    )
    keys = masks[0][1]
    BLOCK_E: tl.constexpr = q.shape[1]
    columns = tl.arange(0, BLOCK)
    j = start + columns[None, :]
    e_index = tl.arange(0, BLOCK_E)[:, None]
    K += tl.cast(start, tl.int64) * key_row
    k_at = K + columns[None, :] * key_row + e_index
    if EDGE:
        k = tl.load(k_at, mask=(j < keys) & (e_index < E), other=0.0)
    elif E == BLOCK_E:
        k = tl.load(k_at)
    else:
        k = tl.load(k_at, mask=e_index < E, other=0.0)
    if FLAGS.widen:
        k = k.to(tl.float32)
    x = tl.dot(q, k, input_precision=FLAGS.precision)
    log2 = scale * LOG2E
    if FLAGS.changed:
        x, bend = natural(x, i, j, masks, scale, FLAGS)
        log2 = 1.0 * LOG2E
    if EDGE:
        seen = j < upto[:, None]
        if FLAGS.window:
            seen = seen & (j >= since[:, None])
        if FLAGS.data:
            x, seen = visible(x, seen & (i < masks[0][0]), i, j, masks, FLAGS)
            count = tl.sum(seen.to(tl.float32), 1)
            column = tl.min(tl.where(seen, j, NONE), 1)
        else:  # position alone says how many keys there are, and which is the first
            column = tl.maximum(since, start)
            within = tl.maximum(tl.minimum(upto, start + BLOCK) - column, 0)
            column = tl.where(within > 0, column, NONE)
            count = within.to(tl.float32)
        before = m
        m = tl.maximum(m, tl.max(tl.where(seen, x, -float("inf")), 1))
        top = tl.where(m == -float("inf"), 0.0, m * log2)
        fall = tl.where(before == -float("inf"), 0.0, before * log2 - top)
        t = tl.where(seen, multiply_add(x, log2, -top[:, None], FLAGS), 0.0)
        e = tl.where(seen, tl.exp2(t), 0.0)
        near = tl.sum(t, 1) / tl.maximum(count, 1.0)
        apart = tl.where(seen, t - near[:, None], 0.0)
        score = tl.sum(tl.where(j == column[:, None], x, 0.0), 1)
        first = tl.where(column < first_key, score, first)
        first_key = tl.minimum(first_key, column)
    else:
        before = m
        m = tl.maximum(m, tl.max(x, 1))
        top = m * log2
        fall = before * log2 - top
        t = multiply_add(x, log2, -top[:, None], FLAGS)
        e = tl.exp2(t)
        if MOMENTS:
            apart = x - about[:, None]
            away1 += tl.sum(apart, 1)
            away2 += tl.sum(apart * apart, 1)
    drop = tl.maximum(fall, DEEPEST)
    decay = tl.exp2(drop)
    weighted = e * t
    W = decay * (W + drop * (2.0 * U + drop * Z)) + tl.sum(weighted * t, 1)
    U = decay * (U + drop * Z) + tl.sum(weighted, 1)
    Z = decay * Z + tl.sum(e, 1)
    Q = decay * decay * Q + tl.sum(e * e, 1)

    if EDGE:
        slip = tl.sum(apart, 1) / tl.maximum(count, 1.0)
        squared = tl.maximum(tl.sum(apart * apart, 1) - slip * slip * count, 0.0)
        step = near + slip - (middle + fall)
        share = count / tl.maximum(n + count, 1.0)
        M2 += squared + step * step * n * share
        middle += fall + step * share
        n += count

    if EV > 0:
        BLOCK_V: tl.constexpr = acc.shape[1]
        v_index = tl.arange(0, BLOCK_V)[None, :]
        V += tl.cast(start, tl.int64) * value_row
        v_at = V + columns[:, None] * value_row + v_index
        if EDGE:
            v = tl.load(v_at, mask=(start + columns < keys)[:, None] & (v_index < EV), other=0.0)
        elif EV == BLOCK_V:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=v_index < EV, other=0.0)
        if EDGE and FLAGS.data:  # padding may hold NaN: what no row of the tile sees is 0
            v = tl.where(tl.max(seen.to(tl.int32), 0)[:, None] > 0, v, 0.0)
        p = e
        if NOISE:
            v = v.to(tl.float32)
        else:
            p = e.to(v.dtype)
        if FLAGS.widen:
            p = p.to(tl.float32)
            v = v.to(tl.float32)
        acc = tl.dot(p, v, acc * decay[:, None], input_precision=FLAGS.precision)
        if NOISE:
            twice = decay * decay
            away = v - centre
            squares = tl.dot(e * e, away, squares * twice[:, None], input_precision=FLAGS.precision)
            lengths = tl.sum(away * away, 1)
            spread = spread * twice + tl.sum(e * e * lengths[None, :], 1)
    return (
        acc, m, Z, U, W, Q, n, middle, M2, first, first_key, squares, spread, about, away1, away2,
    )  # fmt: skip


LN2 = constant(0.6931471805599453)
#: Share of a squared correction up to which rounding of it passes for a second moment: 8 eps.
TINY = constant(2.0**-20)
NO_KEY = constant(2**63 - 1)  # first visible key of a row without one


@jit
def forward_kernel(
    CENTRE, ROW_MEANS, ROW_SQUARES, SINKS, SUMS, QUERY, KEY, VALUE, MASKS, query_heads, group,
    queries, keys, offset, window, scale, E: tl.constexpr, EV: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr, HAS_SINKS: tl.constexpr, NOISE: tl.constexpr, CHUNK: tl.constexpr,
    FLAGS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Output and sums of ``BLOCK_M`` query rows of one head, over all keys; one program each.

    ``SUMS`` are the results, :class:`acutance.kernels.call.Sums`.
    """
    batch, head, whole_head, first_row, rows, q, masks = block_of_queries(
        QUERY, MASKS, query_heads, queries, keys, offset, window, E, BLOCK_E, BLOCK_M,
        FLAGS.causal, FLAGS,
    )  # fmt: skip
    K, key_row = rows_of(KEY, batch, head // group)
    V, value_row = rows_of(VALUE, batch, head // group)
    i = rows[:, None]
    v_index = tl.arange(0, BLOCK_V)[None, :]
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
        acc, least, zero, zero, zero, zero, zero, zero, zero, zero, none, squares, zero, zero,
        zero, zero,
    )  # fmt: skip
    since, upto = visible_range(rows, masks, FLAGS)
    start, all_start, all_stop, stop, left, right = band(
        first_row, masks, BLOCK_M, BLOCK_N, 1, False, FLAGS
    )
    for index in tl.range(0, left + right):
        at = edge_tile(index, left, start, all_stop, BLOCK_N)
        meets = True
        if FLAGS.documents:
            meets = same_documents(rows, at + tl.arange(0, BLOCK_N), masks)
        if meets:
            state = tile(
                state, q, K, V, centre, masks, i, since, upto, at, scale, key_row, value_row,
                BLOCK_N, E, EV, NOISE, True, True, FLAGS,
            )  # fmt: skip
    acc, m, Z, U, W, Q, n, middle, M2, first, first_key, squares, spread, about, away1, away2 = (
        state
    )
    log2 = scale * LOG2E
    if FLAGS.changed:
        log2 = 1.0 * LOG2E
    edges = m * log2
    about = tl.where(log2 == 0.0, m, (edges + middle) / tl.where(log2 == 0.0, 1.0, log2))
    state = (
        acc, m, Z, U, W, Q, n, middle, M2, first, first_key, squares, spread, about, away1, away2,
    )  # fmt: skip
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
            state, q, K, V, centre, masks, i, since, upto, at, scale, key_row, value_row,
            BLOCK_N, E, EV, NOISE, False, True, FLAGS,
        )  # fmt: skip
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
                acc, m, Z, U, W, Q, zero, zero, zero, zero, none, squares, spread, zero, zero,
                zero,
            )  # fmt: skip
            for at in tl.range(summed_start, summed_stop, BLOCK_N):
                state = tile(
                    state, q, K, V, centre, masks, i, since, upto, at, scale, key_row,
                    value_row, BLOCK_N, E, EV, NOISE, False, False, FLAGS,
                )  # fmt: skip
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
    tl.store(SUMS.n + row, n.to(tl.int64), mask=there)
    tl.store(SUMS.m + row, m, mask=there)
    tl.store(SUMS.Z + row, Z, mask=there)
    tl.store(SUMS.U + row, U * LN2, mask=there)
    about_mean = tl.maximum(W - U * U * inverse, 0.0, propagate_nan=tl.PropagateNan.ALL)
    about_mean = tl.where(about_mean <= rest * rest * Z * TINY, 0.0, about_mean)  # rounding alone
    tl.store(SUMS.W + row, about_mean * (LN2 * LN2), mask=there)
    tl.store(SUMS.Q + row, Q, mask=there)
    depth = -middle * LN2
    tl.store(SUMS.mean + row, tl.where(empty, 0.0, m - depth), mask=there)
    tl.store(SUMS.M2 + row, M2 * (LN2 * LN2), mask=there)
    tl.store(SUMS.depth + row, tl.where(empty, 0.0, depth), mask=there)
    tl.store(SUMS.first + row, tl.where(empty, 0.0, first * unit), mask=there)
    index = tl.where(first_key == NONE, NO_KEY, first_key.to(tl.int64))
    tl.store(SUMS.first_index + row, index, mask=there)
    if EV > 0:
        if HAS_SINKS:
            sink = tl.load(SINKS + head).to(tl.float32)
            whole = Z + tl.exp2((sink - tl.where(m == -float("inf"), 0.0, m)) * LOG2E)
            inverse = tl.where(whole == 0.0, 0.0, 1.0 / tl.where(whole == 0.0, 1.0, whole))
        out_at = row[:, None] * EV + v_index
        stored = there[:, None] & (v_index < EV)
        out = acc * (inverse * decay)[:, None]
        tl.store(SUMS.out + out_at, out.to(SUMS.out.dtype.element_ty), mask=stored)
        if NOISE:
            heavy = tl.where(Q == 0.0, 1.0, Q)
            squares, spread = squares * (decay * decay)[:, None], spread * decay * decay
            average = squares / heavy[:, None]
            inner = tl.maximum(spread - Q * tl.sum(average * average, 1), 0.0)
            tl.store(SUMS.O + out_at, acc * decay[:, None], mask=stored)
            average = tl.where(empty[:, None], 0.0, average + centre)
            tl.store(SUMS.R1 + out_at, average, mask=stored)
            tl.store(SUMS.R2 + row, inner, mask=there)


BINS = constant(64)
STEPS = constant(4.0)  # bins of a unit of logit


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
