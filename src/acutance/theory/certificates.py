r"""Bounds on what logit noise does to a row that hold for any noise, dependent or adversarial.

They need only its oscillation, :math:`\max \varepsilon - \min \varepsilon` over the row's keys.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from acutance.theory.arguments import Array
from acutance.theory.noisy_row import noisy_row, one_number

__all__ = [
    "certificate",
    "set_bound",
    "tv_bound",
]

_PAIRWISE_KEYS = 4096  # up to here the diameter of the values is taken over all pairs


def tv_bound(oscillation: ArrayLike) -> float | Array:
    r"""Largest change of any softmax row under logit changes of a given oscillation.

    .. math:: \mathrm{TV}(p, \tilde p) = \tfrac{1}{2} \sum_j |\tilde p_j - p_j| \le
              \tanh \frac{\max \varepsilon - \min \varepsilon}{4}

    It holds for any noise and any row, and two keys attain it. The change of the output is at most
    this times the largest distance of two values; :func:`certificate` also uses the row.

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
    bound = np.tanh(_oscillation(oscillation) / 4)
    return bound if bound.ndim else float(bound)


def set_bound(mass: ArrayLike, oscillation: ArrayLike) -> float | Array:
    r"""Largest gain of weight of a set of keys under logit changes of a given oscillation ω.

    .. math:: \tilde p(A) - p(A) \le \frac{a e^\omega}{a e^\omega + 1 - a} - a, \qquad a = p(A)

    It is attained when all of A is raised by ω. The largest over a is :func:`tv_bound`, at
    :math:`a = 1 / (1 + e^{\omega / 2})`.

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
    a = np.asarray(mass, dtype=np.float64)
    wrong = a[~((a >= 0) & (a <= 1))]
    if wrong.size:
        raise ValueError(f"mass: a weight lies in [0, 1], got mass={wrong[0]:g}")
    gain = np.asarray(_gain(a, 1 - a, _oscillation(oscillation)))
    return gain if gain.ndim else float(gain)


def certificate(p: ArrayLike, v: ArrayLike, oscillation: float) -> float:
    r"""Bound on the change of a row's output that holds for any logit noise.

    .. math:: \|\tilde o - o\| \le \max_A [\tilde p(A) - p(A)] \, \max_{ij} \|v_i - v_j\|

    The first factor is :func:`set_bound` at the worst weight p(A) that a set of this row's keys can
    have: at least the smallest weight, and never between 1 - max p and max p. So a peaked row has a
    smaller bound than tanh(ω/4). For two keys it is attained. Only keys with weight count; above
    4096 of them twice the largest distance from the output stands in for the largest distance, at
    most a factor 2 up.

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
        (0.2310586, 0.0167237)

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
    """Gain of a set at ω, without overflow; 0 for an empty set, also at ω = inf."""
    fall = np.exp(-omega)
    below = mass + rest * fall
    gain: Array = np.where(mass > 0, mass * rest * -np.expm1(-omega) / np.where(below, below, 1), 0)
    return gain


def _diameter(points: Array) -> float:
    """Largest distance of two points, of which 0 is an average.

    Above _PAIRWISE_KEYS points an upper bound, at most twice as large.
    """
    if points.shape[1] == 1:
        return float(np.ptp(points))
    if points.shape[0] > _PAIRWISE_KEYS:
        return 2 * float(np.sqrt((points**2).sum(axis=1).max()))
    blocks = np.array_split(points, math.ceil(points.shape[0] / 256))
    from scipy.spatial.distance import cdist  # takes its time to load

    return max(float(cdist(block, points).max()) for block in blocks)


def _oscillation(oscillation: ArrayLike) -> Array:
    omega = np.asarray(oscillation, dtype=np.float64)
    wrong = omega[~(omega >= 0)]
    if wrong.size:
        rule = "max - min of the noise is at least 0"
        raise ValueError(f"oscillation: {rule}, got oscillation={wrong[0]:g}")
    return omega
