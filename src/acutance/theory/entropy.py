r"""Entropy of one row of logits, exact, by mean field and by bounds, and its softmax Jacobian.

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

Bounds hold for any scores. The entropy is bounded from a few numbers of the logits
(:func:`entropy_bounds`), from their norm or from the spectral norm of a head's projections. The
change of weights and output under any logit noise, dependent or adversarial, is bounded from its
oscillation :math:`\max \varepsilon - \min \varepsilon` over the row's keys.

Sources: Su Jianlin, kexue.fm/archives/9034 (the mean-field entropy, as a quick derivation of a
scale log n, not as a bound) and 9593; Zhai et al. (2023), arXiv:2303.06296 (lowest entropy at a
given norm of the logits).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import xlog1py, xlogy, zeta

from acutance.theory.arguments import Array, checked, require, result
from acutance.theory.cosine import cosine_entropy_lower_bound
from acutance.theory.noise import noisy_row, one_number

__all__ = [
    "EntropyBounds",
    "certificate",
    "entropy_bounds",
    "entropy_floor_from_spectral_norm",
    "entropy_lower_bound",
    "jacobian_fro2",
    "jacobian_trace",
    "jensen_gap",
    "max_gap",
    "mean_field_entropy",
    "onehot_entropy",
    "set_bound",
    "softmax_entropy",
    "tv_bound",
    "uniform_entropy_drop",
]

_LARGE = float(np.finfo(np.float64).max)


#: (e^x - 1 - x) / x² = 1/2 + x/6 + ..., 16 terms: to the last bit for abs(x) <= 0.5.
_EXP_REST = [1 / math.factorial(k) for k in range(2, 18)]


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


_TOLERANCE = 1e-6  # of what is given, relative: room for float32


@dataclass(frozen=True)
class EntropyBounds:
    """Bounds on a row's entropy, in nats; see :func:`entropy_bounds`.

    Attributes:
        lower: Smallest entropy consistent with what is known of the row.
        upper: Largest entropy consistent with what is known of the row.
    """

    lower: float | Array
    upper: float | Array


def entropy_bounds(
    n: ArrayLike,
    s_max: ArrayLike,
    mean: ArrayLike,
    spread: ArrayLike,
    p_max: ArrayLike | None = None,
    scale: ArrayLike = 1.0,
) -> EntropyBounds:
    r"""Rigorous bounds on the entropy of a softmax row of which only a few numbers are known.

    .. math::

        \max\bigl(\log n - \lambda (s_{max} - \bar s),\; H_{min}(n, \lambda R)\bigr) \le H \le
        \min\bigl(\log n,\; h(p_{max}) + (1 - p_{max}) \log(n - 1)\bigr)

    The first lower bound is the mean-field entropy. The second, :math:`H_{min}`, is the lowest
    entropy of n logits in an interval of length lambda R; it is positive and never below
    log n - (lambda R)²/8. The upper bound spreads the weight that is not on the top key evenly;
    h(p) = -p log p - (1 - p) log(1 - p).

    Args:
        n: Number of keys, a whole number n >= 2.
        s_max: Largest logit.
        mean: Plain mean of the logits, between s_max - spread and s_max.
        spread: Range R of the logits, s_max - s_min >= 0.
        p_max: Largest weight at that scale, between 1/n and 1; without it the upper bound is log n.
        scale: Factor lambda >= 0 of the logits. All arguments broadcast.

    Returns:
        ``EntropyBounds`` with fields ``lower`` and ``upper``, in nats, float64 of the broadcast
        shape; floats for scalars. Numbers that no row has can give ``lower`` above ``upper``.

    Raises:
        ValueError: If an argument is outside its domain or not finite.

    Example:
        >>> row = np.array([2.0, 1.0, 0.5, -0.25, -3.0])
        >>> entropy_bounds(5, row.max(), row.mean(), np.ptp(row), p_max=0.5619)
        EntropyBounds(lower=0.1578, upper=1.2928)
        >>> from acutance.theory import softmax_entropy
        >>> softmax_entropy(row)
        1.1040153

    Source:
        Su Jianlin, kexue.fm/archives/9034 (as an approximation) and 9593, for the lower bounds;
        Fano's inequality for the upper one.
    """
    keys = checked("n", n, "the number of keys must be finite and at least 2", 2.0)
    top = checked("s_max", s_max, "the largest logit must be finite")
    average = checked("mean", mean, "the mean of the logits must be finite")
    length = checked("spread", spread, "the range of the logits must be finite and at least 0", 0.0)
    factor = checked("scale", scale, "the scale of the logits must be finite and at least 0", 0.0)
    with np.errstate(over="ignore"):
        below = top - average
        slack = _TOLERANCE * (np.abs(top) + length)
        rule = "the mean of the logits must be between s_max - spread and s_max"
        require("mean", average, (below >= -slack) & (below <= length + slack), rule)
        log_n = np.log(keys)
        mean_field = log_n - factor * np.maximum(below, 0)
        width = np.clip(factor * length, 1e-300, 1e300)

    box = np.where(width > 1e-300, cosine_entropy_lower_bound(keys, 2 / width), log_n)
    lower = np.minimum(np.maximum(mean_field, box), log_n)
    upper = log_n
    if p_max is not None:
        rule = "the largest weight must be between 1/n and 1"
        share = checked("p_max", p_max, rule, 0.0, 1 + _TOLERANCE)
        require("p_max", share, share * keys >= 1 - _TOLERANCE, rule)
        share = np.clip(share, 1 / keys, 1)
        others = (1 - share) * np.log(keys - 1)
        upper = np.minimum(others - xlogy(share, share) - xlog1py(1 - share, -share), log_n)
    lower, upper = np.broadcast_arrays(lower, upper)
    return EntropyBounds(result(lower.copy()), result(upper.copy()))


def entropy_lower_bound(n: ArrayLike, logit_norm: ArrayLike) -> float | Array:
    r"""Lowest entropy of a softmax row of n logits with a given Euclidean norm.

    .. math:: H \ge \log(1 + (n-1) b) + \frac{s \sqrt{n(n-1)}\, b}{1 + (n-1) b}, \qquad
              b = e^{-s \sqrt{n/(n-1)}}

    with s the norm. It is attained by one logit above n - 1 equal ones. Softmax does not change
    when all logits are shifted, so subtract their mean first: the smaller norm gives the better
    bound.

    Args:
        n: Number of keys, n >= 2; it need not be an integer.
        logit_norm: Euclidean norm s of the row of scaled logits (or an upper bound of it), s >= 0.

    Returns:
        The bound in nats, float64 of the broadcast shape; a float for scalars. It is log n at
        norm 0 and vanishes like n s exp(-s).

    Raises:
        ValueError: If some n is below 2, some logit_norm negative, or either is not finite.

    Example:
        >>> entropy_lower_bound(16, [0.0, 1.0, 3.0, 6.0, 10.0])
        array([2.77258872, 2.71680121, 1.76752591, 0.21372292, 0.00555476])

    Source:
        Zhai et al. (2023), arXiv:2303.06296, theorem 3.1.
    """
    keys = checked("n", n, "the number of keys must be finite and at least 2", 2.0)
    norm = checked(
        "logit_norm", logit_norm, "the norm of the logits must be finite and at least 0", 0
    )
    return result(onehot_entropy_of_gap(keys, norm * np.sqrt(keys / (keys - 1))))


def entropy_floor_from_spectral_norm(
    n: ArrayLike, spectral_norm: ArrayLike, gram_norm: ArrayLike = 1.0, scale: ArrayLike = 1.0
) -> float | Array:
    r"""Lowest entropy that the weights of one attention head allow, from their spectral norm.

    For inputs X of shape (n, d_model) a head's scaled logits are
    :math:`\lambda X W_Q W_K^\top X^\top` (W_Q and W_K map an input to query and key). One row
    has a Euclidean norm of at most the spectral norm of this matrix, so

    .. math:: s \le \lambda \lVert W_Q W_K^\top \rVert_2 \, \lVert X X^\top \rVert_2,

    and the row's entropy is at least ``entropy_lower_bound(n, s)`` with that s.

    Args:
        n: Number of keys, n >= 2.
        spectral_norm: Largest singular value of the product of one head's query and key
            projections, d_model by d_model; at most the product of their spectral norms.
        gram_norm: Largest eigenvalue of X X^T, the squared spectral norm of the inputs; at
            most n r² for inputs of norm r (r² = d_model after a layer norm without weights).
        scale: Factor of the dot products, usually 1/sqrt(head dimension).

    Returns:
        The bound in nats, float64 of the broadcast shape; a float for scalars. It is usually
        far below the entropy of real rows: the norm of the inputs is that of their worst direction.

    Raises:
        ValueError: If some n is below 2, another argument negative, or any not finite.

    Example:
        >>> entropy_floor_from_spectral_norm(16, 0.75, gram_norm=32.0, scale=0.125)
        1.76752591

    Source:
        Zhai et al. (2023), arXiv:2303.06296, theorem 3.1, who take scale = 1.
    """
    size = checked(
        "spectral_norm", spectral_norm, "a spectral norm must be finite and at least 0", 0.0
    )
    gram = checked("gram_norm", gram_norm, "a spectral norm must be finite and at least 0", 0.0)
    factor = checked("scale", scale, "the scale of the logits must be finite and at least 0", 0.0)
    return entropy_lower_bound(n, factor * size * gram)


_PAIRWISE_KEYS = 4096  # up to here the diameter of the values is taken over all pairs


def tv_bound(oscillation: ArrayLike) -> float | Array:
    r"""Largest change of any softmax row under logit changes of a given oscillation.

    .. math:: \mathrm{TV}(p, \tilde p) = \tfrac{1}{2} \sum_j |\tilde p_j - p_j| \le
              \tanh \frac{\max \varepsilon - \min \varepsilon}{4}

    Here p are the weights, and :math:`\tilde p` those after noise :math:`\varepsilon_j` was added
    to the logits. It holds for any noise and any row, and some rows of two keys attain it. The
    output changes by at most this times the largest distance between two values;
    :func:`certificate` gives a smaller bound from the row's weights.

    Args:
        oscillation: max ε - min ε over the row's keys, in nats, >= 0; inf is allowed.

    Returns:
        The bound on the total variation, in [0, 1], shape of ``oscillation``; a float for a scalar.

    Raises:
        ValueError: If some oscillation is negative or NaN.

    Example:
        >>> tv_bound([0.5, 10.0])
        array([0.124353  , 0.9866143])

    Source:
        The largest over p(A) of :func:`set_bound`.
    """
    return result(np.tanh(_oscillation(oscillation) / 4))


def set_bound(mass: ArrayLike, oscillation: ArrayLike) -> float | Array:
    r"""Largest gain of weight of a set of keys under logit changes of a given oscillation ω.

    .. math:: \tilde p(A) - p(A) \le \frac{a e^\omega}{a e^\omega + 1 - a} - a, \qquad a = p(A)

    Here :math:`p(A)` is the weight of the set A, and :math:`\tilde p(A)` its weight after the
    change. It is attained when all logits of A are raised by ω. Its maximum over a, at :math:`a = 1
    / (1 + e^{\omega / 2})`, is :func:`tv_bound`.

    Args:
        mass: a, the weight of the set, in [0, 1].
        oscillation: max ε - min ε over the row's keys, in nats, >= 0; inf is allowed.

    Returns:
        The largest gain, in [0, 1], float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some mass is outside [0, 1], or some oscillation is negative or NaN.

    Example:
        A key of weight 1/1000 is safe from small noise, half the weight is not:

        >>> set_bound([0.001, 0.5], 1.0)
        array([0.00171362, 0.23105858])

    Source:
        Monotonicity of softmax in its logits.
    """
    a = checked("mass", mass, "a weight must be in [0, 1]", 0.0, 1.0)
    return result(_gain(a, 1 - a, _oscillation(oscillation)))


def certificate(p: ArrayLike, v: ArrayLike, oscillation: float) -> float:
    r"""Bound on the change of a row's output that holds for any logit noise.

    .. math:: \|\tilde o - o\| \le \max_A [\tilde p(A) - p(A)] \, \max_{ij} \|v_i - v_j\|

    Here :math:`o = \sum_j p_j v_j` is the output and :math:`\tilde o` the output with noise. The
    first factor is :func:`set_bound` at the worst weight p(A) that a set A of this row's keys can
    have: at least the smallest weight, and never between 1 - max p and max p. So a peaked row has a
    smaller bound than tanh(ω/4). For two keys it is attained. Keys of weight 0 are left out. With
    more than 4096 keys, the largest distance between values is replaced by twice the largest
    distance from the output, which is at most twice as large.

    Args:
        p: Weights of the row, shape (n,): non-negative, with sum 1 within 1e-9.
        v: Values, shape (n, dim).
        oscillation: max ε - min ε over the row's keys, in nats, >= 0; inf is allowed.

    Returns:
        The bound, in units of v.

    Raises:
        ValueError: If p is not a distribution, the shapes disagree, or the oscillation is negative
            or NaN.

    Example:
        >>> certificate([0.5, 0.5], [[1.0], [0.0]], 1.0), certificate([0.99, 0.01], [[1], [0]], 1.0)
        (0.2310586, 0.0167236)

    Source:
        :func:`set_bound`, and the dual form of the total variation.
    """
    row = noisy_row(p, v)
    omega = float(_oscillation(one_number(oscillation, "oscillation")))
    if row.p.size < 2:
        return 0.0
    worst = math.exp(-omega / 2) / (1 + math.exp(-omega / 2))
    top = int(row.p.argmax())
    others = float(np.delete(row.p, top).sum())
    mass = max(min(worst, others), float(row.p.min()))
    # a set of weight `others` has the top key for its complement, exactly
    rest = float(row.p[top]) if mass == others else 1 - mass
    gain = _gain(np.asarray(mass), np.asarray(rest), np.asarray(omega))
    return float(gain) * _diameter(row.u)


def _gain(mass: Array, rest: Array, omega: Array) -> Array:
    """:func:`set_bound` of a set of weight ``mass``; the other keys have ``rest``. No checks."""
    fall = np.exp(-omega)
    below = mass + rest * fall
    gain: Array = np.where(mass > 0, mass * rest * -np.expm1(-omega) / np.where(below, below, 1), 0)
    return gain


def _diameter(points: Array) -> float:
    """Largest distance between two of the points, whose weighted mean is 0.

    With more than _PAIRWISE_KEYS points it is an upper bound, at most twice as large.
    """
    if points.shape[1] == 1:
        return float(np.ptp(points))
    if points.shape[0] > _PAIRWISE_KEYS:
        return 2 * float(np.sqrt((points**2).sum(axis=1).max()))
    blocks = np.array_split(points, math.ceil(points.shape[0] / 256))
    from scipy.spatial.distance import cdist  # takes its time to load

    return max(float(cdist(block, points).max()) for block in blocks)


def _oscillation(oscillation: ArrayLike) -> Array:
    """Check the range (max − min) of the noise: at least 0."""
    omega = np.asarray(oscillation, dtype=np.float64)
    require("oscillation", omega, omega >= 0, "max - min of the noise must be at least 0")
    return omega
