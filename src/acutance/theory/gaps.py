r"""Gaps of measured scores: how far a row's maximum is ahead of the other keys.

With N(t) the number of keys within t of the row's maximum, :math:`\Lambda = \sup_t \log N(t) / t`
is the scale above which the maximum stands alone.

Source: Hayase & Karakida (2026), arXiv:2605.12697.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from acutance.theory.arguments import Array, require, result

__all__ = ["critical_scale", "gap_count"]

_BLOCK = 1 << 20  # scores that are in memory as float64 at a time, or one row


def gap_count(scores: ArrayLike, t: ArrayLike) -> float | Array:
    r"""Number of keys within t of the row's maximum.

    .. math:: N(t) = \#\{j : \max_i s_i - s_j \le t\}

    The maximum counts, so N(0) is the number of keys tied for it. The difference is taken in
    float64, whatever the scores' own precision.

    Args:
        scores: Rows of scores, shape (..., n); -inf where a key is masked, which never counts.
        t: Gaps t >= 0 in the unit of the scores, any shape; infinity counts the visible keys.

    Returns:
        N(t) as float64, of the shape of the rows followed by that of ``t``; a float for one row
        and one t. It is 0 for a row without a visible key.

    Raises:
        ValueError: If some t is negative or NaN, some score is NaN or +inf, or rows have no keys.

    Example:
        >>> gap_count([3.0, 2.5, 0.0, -float("inf")], [0.0, 0.5, 10.0])
        array([1., 2., 3.])

    Source:
        Hayase & Karakida (2026), arXiv:2605.12697.
    """
    rows, reach = np.asarray(scores), np.asarray(t, np.float64)
    require("t", reach, reach >= 0, "the gap is at least 0")
    counts = np.empty((math.prod(rows.shape[:-1]), reach.size))
    for block, gaps in _sorted_gaps(rows):
        counts[block] = [
            np.searchsorted(row[row < np.inf], reach.ravel(), side="right") for row in gaps
        ]
    return result(counts.reshape(rows.shape[:-1] + reach.shape))


def critical_scale(scores: ArrayLike) -> float | Array:
    r"""Scale above which a row's maximum stands out from all its competitors.

    .. math:: \Lambda = \sup_{t > 0} \frac{\log N(t)}{t} = \max_{j \ge 2} \frac{\log j}{g_{(j)}}

    with N the ``gap_count`` and :math:`g_{(1)} = 0 \le g_{(2)} \le \dots` the gaps to the maximum,
    sorted. Between gaps N stays and t grows, so one of the gaps attains the supremum. At a scale
    λ of at least Λ every count is bounded, :math:`N(t) \le e^{\lambda t}`; below Λ some N(t) keys
    outweigh the maximum even if each had only the least weight among them, exp(-λt) times its.

    Args:
        scores: Rows of scores, shape (..., n); -inf where a key is masked, which never counts.

    Returns:
        Λ in one over the unit of the scores, shape (...); a float for one row. It is infinity if
        two keys share the maximum, N(0) > 1: no scale separates them (and scores kept in 16 bits
        do tie). It is 0 for a row with one visible key and NaN for a row with none.

    Raises:
        ValueError: If some score is NaN or +inf, or rows have no keys.

    Example:
        One key 2 above seven equal ones needs log 8 / 2; a nearby second one needs more:

        >>> critical_scale([2.0, 0, 0, 0, 0, 0, 0, 0])
        1.03972077
        >>> critical_scale([[3.0, 2.5, 0.0], [3.0, 3.0, 0.0]])
        array([1.38629436,        inf])

    Source:
        Hayase & Karakida (2026), arXiv:2605.12697.
    """
    rows = np.asarray(scores)
    scale = np.empty(math.prod(rows.shape[:-1]))
    for block, gaps in _sorted_gaps(rows):
        ranks = np.log(np.arange(1.0, gaps.shape[-1] + 1))
        with np.errstate(divide="ignore"):
            ratio = ranks[1:] / gaps[:, 1:]
        best = ratio.max(axis=-1, initial=0.0)
        scale[block] = np.where(np.isinf(gaps[:, 0]), np.nan, best)
    return result(scale.reshape(rows.shape[:-1]))


def _sorted_gaps(rows: NDArray[Any]) -> Iterator[tuple[slice, Array]]:
    """Blocks of rows, in the order of the flattened ones, as gaps to their maximum, rising.

    A masked key has gap infinity, and in a row without a visible key all have.
    """
    if rows.ndim == 0 or rows.shape[-1] == 0:
        raise ValueError(f"scores: rows of at least one key, shape (..., n), got {rows.shape}")
    rows = rows[None] if rows.ndim == 1 else rows
    lead = rows.shape[:-1]
    count, step = math.prod(lead), max(1, _BLOCK // rows.shape[-1])
    for first in range(0, count, step):
        block = slice(first, min(first + step, count))
        gaps = rows[np.unravel_index(np.arange(block.start, block.stop), lead)].astype(np.float64)
        top = gaps.max(axis=-1, keepdims=True)
        if np.isnan(top).any() or (top == np.inf).any():
            raise ValueError("scores: finite, or -inf where a key is masked, got NaN or +inf")
        np.subtract(np.where(np.isinf(top), 0.0, top), gaps, out=gaps)
        gaps.sort(axis=-1)
        yield block, gaps
