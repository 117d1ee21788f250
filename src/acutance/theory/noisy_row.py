"""A row of weights and values, checked, and its values taken about its output."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from acutance.theory.arguments import Array

__all__ = [
    "NoisyRow",
    "finite",
    "noisy_row",
    "one_number",
]

_SUM_TOLERANCE = 1e-9  # how far from 1 the weights of a row may sum


class NoisyRow(NamedTuple):
    """A row's keys of positive weight."""

    p: Array  # weights, summing to 1
    u: Array  # values less the output


def noisy_row(p: ArrayLike, v: ArrayLike) -> NoisyRow:
    """Check a row, and take its values about its output.

    Values are first taken about that of the largest weight: a near one-hot row's output differs
    from it by little, and that difference must not cancel.
    """
    weights, values = finite("p", p, 1), finite("v", v, 2)
    shapes = f"(p {weights.shape}, v {values.shape})"
    if weights.size != values.shape[0]:
        raise ValueError(
            f"p and v share the number of keys n: {weights.size}, {values.shape[0]} {shapes}"
        )
    if weights.size == 0:
        raise ValueError(f"p: a row has at least one key {shapes}")
    if (weights < 0).any():
        raise ValueError(f"p: weights are at least 0, got {weights.min():g} {shapes}")
    total = float(weights.sum())
    if abs(total - 1) > _SUM_TOLERANCE:
        raise ValueError(f"p: weights sum to 1 within {_SUM_TOLERANCE:g}, got {total!r} {shapes}")
    live = weights > 0
    weights, values = weights[live] / total, values[live]
    values = values - values[weights.argmax()]
    return NoisyRow(weights, values - weights @ values)


def one_number(value: ArrayLike, name: str = "scale") -> Array:
    """As a 0-d array, if it is one number."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim:
        raise ValueError(f"{name}: one row takes one number, got shape {array.shape}")
    return array


def finite(name: str, x: ArrayLike, ndim: int) -> Array:
    """As float64, if it has the number of dimensions and no NaN or inf."""
    array = np.asarray(x, dtype=np.float64)
    if array.ndim != ndim:
        form = {1: "(n,)", 2: "(n, dim)"}[ndim]
        raise ValueError(f"{name} has shape {form}: got {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: every entry is finite, got {name} with NaN or inf {array.shape}")
    return array
