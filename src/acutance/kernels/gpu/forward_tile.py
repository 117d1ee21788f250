"""One tile of the forward kernel: a block of rows and some keys, added to the rows' sums.

Sums are of t, the score in units of log 2 less the rounded product of the row's maximum and the
factor of its scores: one multiply-add a pair, rounded once. What the product was rounded by is
corrected when all keys are summed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (what a kernel is given are pointers and numbers of the device: Python has no types for them)
# ruff: noqa: RUF059 (tuples are unpacked whole)

from __future__ import annotations

from acutance.kernels.gpu.language import constant, jit, tl
from acutance.kernels.gpu.scores import LOG2E, NONE, natural, visible

__all__ = ["multiply_add", "tile"]

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
    state,
    q,
    K,
    V,
    centre,
    masks,
    i,
    since,
    upto,
    start,
    scale,
    key_row,
    value_row,
    BLOCK: tl.constexpr,
    E: tl.constexpr,
    EV: tl.constexpr,
    NOISE: tl.constexpr,
    EDGE: tl.constexpr,
    MOMENTS: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Add one tile of keys to the rows' sums."""
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
