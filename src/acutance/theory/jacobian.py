r"""Jacobian of softmax: how much a row can learn, and the scale that a surrogate of it asks for.

For weights p = softmax(lambda s) the derivative of p by the scaled logits is
:math:`\mathcal J = \operatorname{diag} p - p p^\top`, and by the logits lambda times that. With
:math:`Y = \sum p^2` and :math:`T = \sum p^3`,

.. math::

    \operatorname{tr} \mathcal J = 1 - Y, \qquad
    \lVert \mathcal J \rVert_F^2 = Y - 2T + Y^2, \qquad
    \lVert \mathcal J \rVert_2 \le \min(\tfrac12, \max p),

and 1 - Y <= 1 - exp(-H) <= H: low entropy forces a small Jacobian. The converse fails, uniform
weights have a small one too.

The ``frozen`` functions are *asymptotic*: means over rows of very many Gaussian logits whose
deviation gamma is above sqrt(2 log n), where few keys hold all the weight (Poisson–Dirichlet
distribution with parameter m = sqrt(2 log n)/gamma). At finite n they are closer with
m = M_n/gamma, M_n the expected maximum, yet the entropy is still 10 % high at n = 65536 and
gamma = 2 M_n. The ``expected_*_gauss`` functions are exact.

Sources: Su Jianlin, kexue.fm/archives/9593 and 9812; Derrida (1981), Phys. Rev. B 24, 2613;
Pitman & Yor (1997), Annals of Probability 25, 855.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import lambertw, zetac

from acutance.theory.arguments import Array, checked, require, result
from acutance.theory.mean_field import _gaps, _weights

__all__ = [
    "frozen_collision",
    "frozen_entropy",
    "frozen_jacobian_fro2",
    "jacobian_fro2",
    "jacobian_trace",
    "scale_gradmax_annealed",
]

#: (zeta(k) - 1) for k = 2, 3, ...: enough for powers of any m < 1.
_ZETA_LESS_ONE = [0.0, *zetac(np.arange(2, 64)).tolist()]


def jacobian_trace(logits: ArrayLike, scale: ArrayLike = 1.0) -> float | Array:
    r"""Trace of the softmax Jacobian diag p - p p^T, p = softmax(scale · logits).

    .. math:: \operatorname{tr} \mathcal J = \sum_j p_j (1 - p_j) = 1 - Y

    Also its nuclear norm, and half the sum of the sizes of its entries. The factor lambda of the
    derivative by the logits is not included.

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
              = \sum_i p_i^2 (1 - p_i)^2 + \sum_{i \ne j} p_i^2 p_j^2

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


def scale_gradmax_annealed(n: ArrayLike) -> float | Array:
    r"""Scale that maximises the annealed surrogate of the softmax gradient, for Gaussian logits.

    .. math:: \lambda^* = \sqrt{W(n \sqrt e / 2) - \tfrac12} = \operatorname{argmax}_\lambda\,
              \lambda \left( 1 - \frac{e^{\lambda^2}}{n} \right)

    with W the Lambert function, and logits of unit variance before the scale. The surrogate puts
    exp(lambda²)/n for the collision probability Y. The *exact* mean of lambda (1 - Y) over rows
    has no maximum: by Stein's identity it is the mean attended logit, which increases to M_n, the
    expected maximum of the logits (see ``expected_collision_gauss``). So this is a scale up to
    which the approximation can be trusted rather than one that maximises anything.

    Args:
        n: Number of keys, n >= 1. Values between the integers continue the formula.

    Returns:
        The scale, shape of ``n``; a float for a scalar. It is 0 for n = 1, and near
        0.84 sqrt(log n) for usual lengths (4 % below at n = 512, 1 % above at 20000).

    Raises:
        ValueError: If some n is below 1 or not finite.

    Example:
        >>> scale_gradmax_annealed([512, 4096])
        array([2.0083949, 2.4054633])

    Source:
        Su Jianlin, kexue.fm/archives/9812.
    """
    keys = checked("n", n, "the number of keys is finite and at least 1", 1.0)
    excess = lambertw(keys * (np.exp(0.5) / 2)).real - 0.5
    # one Newton step for x = lambda²: (1 + 2x) e^x = n
    excess = np.maximum(excess, 0.0)
    slope = 1 + 2 / (1 + 2 * excess)
    excess = excess + (np.log(keys) - excess - np.log1p(2 * excess)) / slope
    return result(np.sqrt(np.maximum(excess, 0.0)))


def frozen_entropy(m: ArrayLike) -> float | Array:
    r"""Mean entropy of frozen rows (asymptotic: infinitely many Gaussian logits).

    .. math:: E H = \psi(1) - \psi(1 - m) = \frac{m}{1 - m}
              + \sum_{k \ge 2} (\zeta(k) - 1)\, m^{k-1}

    with the digamma function psi and Riemann's zeta. It is about pi² m / 6 for small m and
    1/(1 - m) near 1, where the frozen phase ends.

    Args:
        m: Freezing parameter, critical over actual deviation of the logits, 0 <= m < 1.

    Returns:
        E H in nats, shape of ``m``; a float for a scalar.

    Raises:
        ValueError: If some m is outside [0, 1).

    Example:
        >>> frozen_entropy([0.0, 1e-6, 0.5])
        array([0.00000000e+00, 1.64493527e-06, 1.38629436e+00])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613; Pitman & Yor (1997), Annals of Probability 25, 855.
    """
    freezing = _freezing(m)
    series = np.polynomial.polynomial.polyval(freezing, _ZETA_LESS_ONE)
    return result(freezing / (1 - freezing) + series)


def frozen_collision(m: ArrayLike) -> float | Array:
    r"""Mean collision probability of frozen rows (asymptotic: infinitely many Gaussian logits).

    .. math:: E \sum_j p_j^2 = 1 - m

    Args:
        m: Freezing parameter, critical over actual deviation of the logits, 0 <= m < 1.

    Returns:
        E Y, shape of ``m``; a float for a scalar.

    Raises:
        ValueError: If some m is outside [0, 1).

    Example:
        >>> frozen_collision(0.25)
        0.75

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613; Pitman & Yor (1997), Annals of Probability 25, 855.
    """
    return result(1 - _freezing(m))


def frozen_jacobian_fro2(m: ArrayLike) -> float | Array:
    r"""Mean squared norm of the Jacobian of frozen rows (asymptotic: infinitely many logits).

    .. math:: E \lVert \operatorname{diag} p - p p^\top \rVert_F^2 = \frac{m (1 - m)}{3}

    Largest, 1/12, at m = 1/2: logits twice as wide as where freezing sets in. The mean trace is m.

    Args:
        m: Freezing parameter, critical over actual deviation of the logits, 0 <= m < 1.

    Returns:
        The mean squared Frobenius norm, shape of ``m``; a float for a scalar.

    Raises:
        ValueError: If some m is outside [0, 1).

    Example:
        >>> frozen_jacobian_fro2([0.0, 0.5])
        array([0. , 0.08333333])

    Source:
        Moments of the Poisson–Dirichlet distribution: Pitman & Yor (1997), Annals of Probability
        25, 855.
    """
    freezing = _freezing(m)
    return result(freezing * (1 - freezing) / 3)


def _probabilities(logits: ArrayLike, scale: ArrayLike) -> tuple[Array, Array, Array]:
    """Weights of all keys but one top key (0 in its place), its weight p, and 1 - p."""
    others, rest = _weights(_gaps(logits, scale))
    total = 1 + rest
    return others / total[..., None], 1 / total, rest / total


def _freezing(m: ArrayLike) -> Array:
    rule = "the freezing parameter is at least 0 and below 1"
    freezing = checked("m", m, rule, 0.0)
    require("m", freezing, freezing < 1, rule)
    return freezing
