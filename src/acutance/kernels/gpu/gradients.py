"""Gradients of a tile's scores, for both backward kernels.

A row contributes a few coefficients (:func:`acutance.kernels.backward.row_coefficients`):
with t = s − m and e = exp t, the gradient of a score is

    e (constant + linear t + square t² + weight e + inverse dO·v) + plain + slope t

and what falls on a single key, the first or the largest.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (what a kernel is given are pointers and numbers of the device: Python has no types for them)

from __future__ import annotations

from typing import NamedTuple

from acutance.kernels.gpu.language import jit, tl
from acutance.kernels.gpu.scores import LOG2E, in_place, natural, visible

__all__ = ["COEFFICIENTS", "Terms", "coefficients", "finite", "load", "score_gradients"]

#: Rows of the table of coefficients, in order.
COEFFICIENTS = (
    *("shift", "constant", "linear", "square", "weight", "inverse", "plain", "slope"),
    *("first", "largest"),
)


class Terms(NamedTuple):
    """Which coefficients a call has; ``shift``, ``constant`` and ``linear`` are always there."""

    square: bool
    weight: bool
    out: bool  # the output has a gradient: inverse, and dO
    level: bool  # plain and slope
    first: bool
    largest: bool


@jit
def load(X, at, there, row, width: tl.constexpr, BLOCK: tl.constexpr, FLAGS: tl.constexpr):
    """Some rows of a matrix, zero where there is none."""
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
def finite(x):
    """0 for what is not finite: a gradient of 0, where a key is hidden, times that would be NaN."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@jit
def coefficients(ROWS, INDICES, count, at, there, AXIS: tl.constexpr, TERMS: tl.constexpr):
    """The coefficients of some rows, along the other axis than ``AXIS``."""
    shift = tl.load(ROWS + at, mask=there, other=0.0)
    constant = tl.load(ROWS + count + at, mask=there, other=0.0)
    linear = tl.load(ROWS + 2 * count + at, mask=there, other=0.0)
    square, weight, inverse, plain, slope = constant, constant, constant, constant, constant
    first, largest = constant, constant
    first_key = tl.zeros(at.shape, tl.int32)
    largest_key = first_key
    if TERMS.square:
        square = tl.load(ROWS + 3 * count + at, mask=there, other=0.0)
    if TERMS.weight:
        weight = tl.load(ROWS + 4 * count + at, mask=there, other=0.0)
    if TERMS.out:
        inverse = tl.load(ROWS + 5 * count + at, mask=there, other=0.0)
    if TERMS.level:
        plain = tl.load(ROWS + 6 * count + at, mask=there, other=0.0)
        slope = tl.load(ROWS + 7 * count + at, mask=there, other=0.0)
    if TERMS.first:
        first = tl.load(ROWS + 8 * count + at, mask=there, other=0.0)
        first_key = tl.load(INDICES + at, mask=there, other=0)
    if TERMS.largest:
        largest = tl.load(ROWS + 9 * count + at, mask=there, other=0.0)
        largest_key = tl.load(INDICES + count + at, mask=there, other=0)
    return (
        tl.expand_dims(shift, AXIS),
        tl.expand_dims(constant, AXIS),
        tl.expand_dims(linear, AXIS),
        tl.expand_dims(square, AXIS),
        tl.expand_dims(weight, AXIS),
        tl.expand_dims(inverse, AXIS),
        tl.expand_dims(plain, AXIS),
        tl.expand_dims(slope, AXIS),
        tl.expand_dims(first, AXIS),
        tl.expand_dims(first_key, AXIS),
        tl.expand_dims(largest, AXIS),
        tl.expand_dims(largest_key, AXIS),
    )


@jit
def score_gradients(
    x,
    dp,
    i,
    j,
    rows,
    masks,
    scale,
    EDGE: tl.constexpr,
    TERMS: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Exponentials, gradients of the scores and where they are, and the softcap's slope."""
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
