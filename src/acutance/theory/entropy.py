r"""Entropy of one row of logits, exact and by mean field, and the row's softmax Jacobian.

A row has weights :math:`p = \mathrm{softmax}(\lambda s)`. The mean-field entropy replaces the
normaliser by its Jensen bound and the mean attended logit by the maximum,
:math:`H_{mf} = \log n - \lambda (s_{max} - \bar s)`. Both steps lower it, by known amounts:

.. math::

    H = H_{mf} + J + G, \qquad
    J = \log \frac1n \sum_j e^{\lambda s_j} - \lambda \bar s \ge 0, \qquad
    G = \lambda \Bigl( s_{max} - \sum_j p_j s_j \Bigr) \ge 0.

So the mean-field entropy is a rigorous lower bound, and says nothing once it is negative. The two
steps cannot be merged: the first is right at small scales, the second at large ones.

Everything is computed from the gaps below the maximum, so that no logit is too large, and entropies
and gaps keep 12 digits down to the smallest float64.

Sources: Su Jianlin, kexue.fm/archives/9034 (the mean-field entropy, as a quick derivation of a
scale log n); Zhai et al. (2023), arXiv:2303.06296 (lowest entropy at a given norm of the logits).
"""

from math import factorial

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import zeta

from acutance.theory.arguments import Array, checked, result

__all__ = [
    "jacobian_fro2",
    "jacobian_trace",
    "jensen_gap",
    "max_gap",
    "mean_field_entropy",
    "onehot_entropy",
    "softmax_entropy",
    "uniform_entropy_drop",
]

_LARGE = float(np.finfo(np.float64).max)


#: (e^x - 1 - x) / x² = 1/2 + x/6 + ..., 16 terms: to the last bit for abs(x) <= 0.5.
_EXP_REST = [1 / factorial(k) for k in range(2, 18)]


#: D = half_range²/6 - half_range⁴/60 + ..., 18 terms: to the last bit for half_range <= 1.
_K = np.arange(1, 19)


_DROP = -((-1.0) ** _K) * (2 - 1 / _K) * zeta(2 * _K) / np.pi ** (2.0 * _K)


def softmax_entropy(logits: ArrayLike, scale: ArrayLike = 1.0) -> float | Array:
    r"""Shannon entropy of softmax(scale · logits) along the last axis.

    .. math:: H = \log \sum_j e^{-g_j} + \sum_j p_j g_j, \qquad g_j = \lambda (s_{max} - s_j)

    It falls from log n at scale 0 to 0, or to log k where k logits share the maximum.

    Args:
        logits: Finite logits, shape (..., n).
        scale: Factor lambda >= 0 of the logits; broadcasts against the leading shape of ``logits``.

    Returns:
        H in nats, float64 of the broadcast leading shape; a float for a single row. Both terms
        are positive, so it keeps its relative accuracy until it underflows.

    Raises:
        ValueError: If there is no logit, a logit or a scale is not finite, or a scale is negative.

    Example:
        >>> softmax_entropy([2.0, 1.0, 0.5, -0.25, -3.0], [0.0, 0.1, 10.0])
        array([1.60943791e+00, 1.59650450e+00, 5.04275637e-04])

    Source:
        Shannon (1948); the form with gaps is used by streaming softmax statistics.
    """
    gaps = _gaps(logits, scale)
    _, rest = _weights(gaps)
    return result(np.log1p(rest) + _mean_gap(gaps))


def jensen_gap(logits: ArrayLike, scale: ArrayLike = 1.0) -> float | Array:
    r"""Difference between the logarithm of the mean exponential of scaled logits and their mean.

    .. math:: J = \log \frac1n \sum_j e^{\lambda s_j} - \lambda \bar s
              = \mathrm{KL}(\mathrm{uniform} \,\|\, p), \qquad
              0 \le J \le \tfrac18 \lambda^2 (s_{max} - s_{min})^2

    It is about half the variance of the scaled logits at small scales. The entropy is
    :math:`H = H_{mf} + J + G` with :func:`mean_field_entropy` and :func:`max_gap`.

    Args:
        logits: Finite logits, shape (..., n).
        scale: Factor lambda >= 0 of the logits; broadcasts against the leading shape of ``logits``.

    Returns:
        J in nats, float64 of the broadcast leading shape; a float for a single row.

    Raises:
        ValueError: If there is no logit, a logit or a scale is not finite, or a scale is negative.

    Example:
        >>> jensen_gap([2.0, 1.0, 0.5, -0.25, -3.0], [0.0, 0.1, 10.0])
        array([0.00000000e+00, 1.36201452e-02, 1.78906078e+01])

    Source:
        Su Jianlin, kexue.fm/archives/9034, first approximation.
    """
    gaps = _gaps(logits, scale)
    n = gaps.shape[-1]
    mean = (gaps / n).sum(axis=-1, keepdims=True)
    centred = mean - gaps
    centred -= (centred / n).sum(axis=-1, keepdims=True)
    near = np.log1p(_exp_rest(np.clip(centred, None, 500)).sum(axis=-1) / n)
    _, rest = _weights(gaps)
    far = mean[..., 0] + np.log1p(rest) - np.log(n)
    return result(np.where(mean[..., 0] < 500, near, far))


def max_gap(logits: ArrayLike, scale: ArrayLike = 1.0) -> float | Array:
    r"""The largest scaled logit less the mean of the scaled logits under the weights.

    .. math:: G = \lambda \Bigl( s_{max} - \sum_j p_j s_j \Bigr) = \sum_j p_j g_j \ge 0

    Here :math:`g_j = \lambda (s_{max} - s_j)`.

    Args:
        logits: Finite logits, shape (..., n).
        scale: Factor lambda >= 0 of the logits; broadcasts against the leading shape of ``logits``.

    Returns:
        G in nats, float64 of the broadcast leading shape; a float for a single row.

    Raises:
        ValueError: If there is no logit, a logit or a scale is not finite, or a scale is negative.

    Example:
        >>> max_gap([2.0, 1.0, 0.5, -0.25, -3.0], [0.0, 0.1, 10.0])
        array([0. , 0.16844644, 0.00045857])

    Source:
        Su Jianlin, kexue.fm/archives/9034, second approximation.
    """
    return result(_mean_gap(_gaps(logits, scale)))


def mean_field_entropy(logits: ArrayLike, scale: ArrayLike = 1.0) -> float | Array:
    r"""Mean-field approximation of the entropy of softmax(scale · logits), a lower bound.

    .. math:: H_{mf} = \log n - \lambda (s_{max} - \bar s) = H - J - G \le H

    with :func:`jensen_gap` J and :func:`max_gap` G.

    Args:
        logits: Finite logits, shape (..., n).
        scale: Factor lambda >= 0 of the logits; broadcasts against the leading shape of ``logits``.

    Returns:
        The approximation in nats, float64 of the broadcast leading shape; a float for a single row.
        Negative where the bound says nothing.

    Raises:
        ValueError: If there is no logit, a logit or a scale is not finite, or a scale is negative.

    Example:
        >>> row = [2.0, 1.0, 0.5, -0.25, -3.0]
        >>> mean_field_entropy(row, 0.5)
        0.634437912434
        >>> softmax_entropy(row, 0.5) - jensen_gap(row, 0.5) - max_gap(row, 0.5)
        0.634437912434

    Source:
        Su Jianlin, kexue.fm/archives/9034.
    """
    gaps = _gaps(logits, scale)
    n = gaps.shape[-1]
    return result(np.log(n) - (gaps / n).sum(axis=-1))


def uniform_entropy_drop(half_range: ArrayLike) -> float | Array:
    r"""Difference between log n and the entropy, for many logits uniform on an interval.

    .. math:: D = \lambda \coth \lambda - 1 - \log \frac{\sinh \lambda}{\lambda}

    for scaled logits uniform on [-lambda, lambda]. It is about lambda²/6 near 0 and
    log(2 lambda) - 1 far from it.

    Args:
        half_range: Half the length of the interval, lambda >= 0, scale included.

    Returns:
        D in nats, shape of ``half_range``; a float for a scalar.

    Raises:
        ValueError: If some half_range is negative or not finite.

    Example:
        >>> uniform_entropy_drop([1e-6, 0.5, 4.0])
        array([1.66666667e-13, 4.06518523e-02, 1.08246166e+00])

    Source:
        Differential entropy of an exponential density cut to an interval; kexue.fm/archives/9034
        treats the same logits.
    """
    size = checked("half_range", half_range, "half the range must be finite and at least 0", 0.0)
    low, high = np.minimum(size, 1), np.maximum(size, 1)
    series = low * low * np.polynomial.polynomial.polyval(low * low, _DROP)
    capped = np.minimum(high, 300)  # from where on coth is 1
    coth = 2 * capped / np.expm1(2 * capped)  # lambda (coth lambda - 1)
    closed = np.log(high) + (np.log(2) - 1) + coth - np.log1p(-np.exp(-2 * capped))
    return result(np.where(size < 1, series, closed))


def onehot_entropy(n: ArrayLike, lam: ArrayLike) -> float | Array:
    r"""Entropy of a row in which one logit is ``lam`` above n - 1 equal ones.

    .. math:: H = \log(1 + w) + \frac{\lambda w}{1 + w}, \qquad w = (n - 1) e^{-\lambda}

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        lam: Distance of the one logit above the others, scale included, lam >= 0.

    Returns:
        H in nats, float64 of the broadcast shape; a float for scalars. It is log n at lam = 0.

    Raises:
        ValueError: If some n is below 1, some lam negative, or either is not finite.

    Example:
        >>> onehot_entropy(10, [0.0, 1.0, 10.0])
        array([2.30258509, 2.22918086, 0.00449284])

    Source:
        Su Jianlin, kexue.fm/archives/9034 (its comments take lam = n).
    """
    keys = checked("n", n, "the number of keys must be finite and at least 1", 1.0)
    gap = checked("lam", lam, "the distance of the top logit must be finite and at least 0", 0.0)
    return result(onehot_entropy_of_gap(keys, gap))


def _gaps(logits: ArrayLike, scale: ArrayLike) -> Array:
    """Check arguments; return lambda (s_max - s_j), shape (..., n), at most float64's largest."""
    rows = checked("logits", logits, "logits must be finite")
    factor = checked("scale", scale, "the scale of the logits must be finite and at least 0", 0.0)
    if rows.ndim == 0 or rows.shape[-1] == 0:
        raise ValueError(
            f"logits: a row must have the shape (..., n) with n >= 1, got {rows.shape}"
        )
    with np.errstate(over="ignore"):
        below = np.minimum(rows.max(axis=-1, keepdims=True) - rows, _LARGE)
        gaps: Array = np.minimum(factor[..., None] * below, _LARGE)
    return gaps


def _weights(gaps: Array) -> tuple[Array, Array]:
    """exp(-gaps), with 0 in place of one key at the maximum, and its sum over the last axis."""
    others = np.exp(-gaps)
    np.put_along_axis(others, gaps.argmin(axis=-1)[..., None], 0.0, axis=-1)
    return others, others.sum(axis=-1)


def _mean_gap(gaps: Array) -> Array:
    """Weighted mean of the gaps to the largest score, over the last axis."""
    others, rest = _weights(gaps)
    return np.asarray((others * gaps).sum(axis=-1) / (1 + rest))


def _exp_rest(x: Array) -> Array:
    """Compute e^x - 1 - x >= 0 without cancellation."""
    near = np.clip(x, -0.5, 0.5)
    series = near * near * np.polynomial.polynomial.polyval(near, _EXP_REST)
    rest: Array = np.where(np.abs(x) < 0.5, series, np.expm1(x) - x)
    return rest


def onehot_entropy_of_gap(n: Array, gap: Array) -> Array:
    """Entropy of a softmax row with one logit ``gap`` above n - 1 equal ones; checks nothing."""
    half = np.exp(-gap / 2)
    others = (n - 1) * half * half  # in two steps: the product may be normal where e^-gap is 0
    return np.asarray(np.log1p(others) + gap * (others / (1 + others)))


def jacobian_trace(logits: ArrayLike, scale: ArrayLike = 1.0) -> float | Array:
    r"""Trace of the softmax Jacobian diag p - p p^T, p = softmax(scale · logits).

    .. math:: \operatorname{tr} \mathcal J = \sum_j p_j (1 - p_j) = 1 - Y

    with :math:`Y = \sum_j p_j^2`. It is also the nuclear norm, and half the sum of the absolute
    entries. The factor lambda of the derivative with respect to the logits is not included.

    Args:
        logits: Finite logits, shape (..., n).
        scale: Factor lambda >= 0 of the logits; broadcasts against the leading shape of ``logits``.

    Returns:
        1 - Y, between 0 (all weight on one key) and 1 - 1/n (even weights), float64 of the
        broadcast leading shape; a float for a single row. Not computed as a difference: it keeps
        its relative accuracy until it underflows.

    Raises:
        ValueError: If there is no logit, a logit or a scale is not finite, or a scale is negative.

    Example:
        >>> jacobian_trace([2.0, 1.0, 0.5, -0.25, -3.0], [0.0, 0.1, 10.0])
        array([8.00000000e-01, 7.95039130e-01, 9.14036748e-05])

    Source:
        Su Jianlin, kexue.fm/archives/9593.
    """
    others, top, lost = _probabilities(logits, scale)
    return result(top * lost + (others * (1 - others)).sum(axis=-1))


def jacobian_fro2(logits: ArrayLike, scale: ArrayLike = 1.0) -> float | Array:
    r"""Squared Frobenius norm of the softmax Jacobian diag p - p p^T, p = softmax(scale · logits).

    .. math:: \lVert \mathcal J \rVert_F^2 = Y - 2T + Y^2
              = \sum_i p_i^2 (1 - p_i)^2 + \sum_{i \ne j} p_i^2 p_j^2, \qquad
              Y = \sum_j p_j^2, \quad T = \sum_j p_j^3

    Args:
        logits: Finite logits, shape (..., n).
        scale: Factor lambda >= 0 of the logits; broadcasts against the leading shape of ``logits``.
            It multiplies the logits alone, not the Jacobian.

    Returns:
        The squared norm, (n - 1)/n² for even weights, float64 of the broadcast leading
        shape; a float for a single row. A sum of positive terms: it keeps its relative accuracy
        until it underflows.

    Raises:
        ValueError: If there is no logit, a logit or a scale is not finite, or a scale is negative.

    Example:
        >>> jacobian_fro2([2.0, 1.0, 0.5, -0.25, -3.0], [0.0, 0.1, 10.0])
        array([1.60000000e-01, 1.61206916e-01, 8.27126913e-09])

    Source:
        Su Jianlin, kexue.fm/archives/9593 and 9812, treat other norms of the same matrix.
    """
    others, top, lost = _probabilities(logits, scale)
    squares = others * others
    rest = squares.sum(axis=-1)
    # Y less one square; for keys other than the top one it is at least half of Y
    without = (top * top + rest)[..., None] - squares
    total = (squares * ((1 - others) ** 2 + without)).sum(axis=-1)
    return result(total + top * top * (lost * lost + rest))


def _probabilities(logits: ArrayLike, scale: ArrayLike) -> tuple[Array, Array, Array]:
    """Weights (..., n) with 0 in place of the largest, the largest weight p (...), and 1 - p."""
    others, rest = _weights(_gaps(logits, scale))
    total = 1 + rest
    return others / total[..., None], 1 / total, rest / total
