r"""Bounds on a row's entropy and on the effect of noise that hold for any scores.

The entropy is bounded from a few numbers of the logits (:func:`entropy_bounds`), from their norm or
from the spectral norm of a head's projections. The change of weights and output under any logit
noise, dependent or adversarial, is bounded from its oscillation
:math:`\max \varepsilon - \min \varepsilon` over the row's keys.

Sources: Su Jianlin, kexue.fm/archives/9034 (which has the mean-field entropy as an approximation,
not as a bound) and 9593; Zhai et al. (2023), arXiv:2303.06296.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import xlog1py, xlogy

from acutance.theory.arguments import Array, checked, require, result
from acutance.theory.entropy import onehot_entropy_of_gap
from acutance.theory.noise import noisy_row, one_number

__all__ = [
    "EntropyBounds",
    "certificate",
    "entropy_bounds",
    "entropy_floor_from_spectral_norm",
    "entropy_lower_bound",
    "set_bound",
    "tv_bound",
]

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
    from acutance.theory.cosine import cosine_entropy_lower_bound

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
