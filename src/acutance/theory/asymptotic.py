r"""Limits for very many Gaussian logits: to understand a formula, not to compute with.

The ``asymptotic_*_gauss`` functions are textbook limits of what
``acutance.theory.expected`` computes exactly. Corrections fall off only with log n, so at
any n in use they are wrong by whole nats around :math:`\gamma_c = \sqrt{2 \log n}`.

The ``frozen_*`` functions are means over rows whose deviation gamma is above that, where few keys
hold all the weight (Poisson–Dirichlet distribution with parameter :math:`m = \gamma_c / \gamma`).
At finite n they are closer with :math:`m = M_n / \gamma`, M_n the expected maximum, yet the entropy
is still 10 % high at n = 65536 and gamma = 2 M_n.

Sources: Derrida (1981), Phys. Rev. B 24, 2613; Pitman & Yor (1997), Ann. Probab. 25, 855;
Su Jianlin, kexue.fm/archives/9812.
"""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import lambertw, zetac

from acutance.theory.arguments import Array, checked, pointwise_rows, result
from acutance.theory.expected import expected_max_gauss

__all__ = [
    "asymptotic_collision_gauss",
    "asymptotic_entropy_gauss",
    "asymptotic_logsumexp_gauss",
    "frozen_collision",
    "frozen_entropy",
    "frozen_jacobian_fro2",
    "scale_gradmax_annealed",
]


def asymptotic_entropy_gauss(n: ArrayLike, gamma: ArrayLike) -> float | Array:
    r"""Asymptotic entropy of a softmax row with n Gaussian logits: for orientation, not for use.

    With :math:`\gamma_c = \sqrt{2 \log n}` and :math:`M_n` the expected maximum of n scores,

    .. math::

        E H \approx \begin{cases}
            \log n - \gamma^2/2 + [(\gamma^2 - \tfrac12) e^{\gamma^2} + \tfrac12] / n
            & \gamma \le \gamma_c / 2, \\
            \log n - \gamma^2/2 & \gamma_c / 2 < \gamma < \gamma_c, \\
            \psi(1) - \psi(1 - M_n / \gamma) & \gamma \ge \gamma_c,
        \end{cases}

    where :math:`\psi` is the digamma function. The last piece is the mean entropy of the
    Poisson-Dirichlet distribution, about :math:`\pi^2 M_n / (6 \gamma)`.

    The pieces do not meet. At n = 65536 and gamma = gamma_c the exact value is 3.4 nats, the limit
    from below 0 and that from above 11. The last piece is 10 % too high at gamma = 2 M_n and 2 % at
    4 M_n.
    ``expected_entropy_gauss`` is exact.

    Args:
        n: Number of keys, n >= 2.
        gamma: Standard deviation of the logits, gamma >= 0.

    Returns:
        The asymptotic form in nats, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some n is below 2, some gamma is negative, or either is not finite.

    Example:
        >>> asymptotic_entropy_gauss(65536, [1.0, 4.0, 20.0])
        array([10.59038326,  3.09035489,  0.42174251])
        >>> from acutance.theory import expected_entropy_gauss
        >>> expected_entropy_gauss(65536, [1.0, 4.0, 20.0])
        array([10.59038325,  4.51089175,  0.41516912])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613; Pitman & Yor (1997), Ann. Probab. 25, 855 (the
        Poisson-Dirichlet law).
    """
    return pointwise_rows(_entropy, n, gamma, 2.0)


def asymptotic_collision_gauss(n: ArrayLike, gamma: ArrayLike) -> float | Array:
    r"""Asymptotic Σp² of a softmax row with n Gaussian logits: for orientation, not for use.

    .. math::

        E Y \approx \begin{cases}
            e^{\gamma^2} / n & \gamma \le \sqrt{2 \log n / 3}, \\
            e^{-(\log n / \gamma - \gamma / 2)^2 / 2} & \text{up to } \sqrt{2 \log n}, \\
            1 - M_n / \gamma & \text{above.}
        \end{cases}

    with :math:`M_n` the expected maximum of n standard normal values. The first piece is 1/(n S²)
    with the sparsity S = exp(-gamma²/2) of many keys. The middle one has the right exponent but not
    the factor in front of it. ``expected_collision_gauss`` is exact.

    Args:
        n: Number of keys, n >= 2.
        gamma: Standard deviation of the logits, gamma >= 0.

    Returns:
        The asymptotic form, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some n is below 2, some gamma is negative, or either is not finite.

    Example:
        >>> asymptotic_collision_gauss(65536, [1.0, 3.0, 20.0])
        array([4.14776890e-05, 8.95523340e-02, 7.85443534e-01])
        >>> from acutance.theory import expected_collision_gauss
        >>> expected_collision_gauss(65536, [1.0, 3.0, 20.0])
        array([4.14728667e-05, 2.01832318e-02, 7.85990618e-01])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613; Pitman & Yor (1997), Ann. Probab. 25, 855.
    """
    return pointwise_rows(_collision, n, gamma, 2.0)


def asymptotic_logsumexp_gauss(n: ArrayLike, gamma: ArrayLike) -> float | Array:
    r"""Asymptotic log-normaliser of a row of n Gaussian logits: for orientation, not for use.

    .. math::

        E \log Z \approx \begin{cases}
            \log n + \gamma^2/2 & \gamma < \sqrt{2 \log n}, \\
            \gamma M_n & \text{above.}
        \end{cases}

    with Z the sum of the n exponentials and :math:`M_n` the expected maximum of n standard normal
    values. ``expected_logsumexp_gauss`` is exact.

    Args:
        n: Number of keys, n >= 2.
        gamma: Standard deviation of the logits, gamma >= 0.

    Returns:
        The asymptotic form in nats, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some n is below 2, some gamma is negative, or either is not finite.

    Example:
        >>> asymptotic_logsumexp_gauss(65536, [1.0, 4.0, 20.0])
        array([11.59035489, 19.09035489, 85.82258632])
        >>> from acutance.theory import expected_logsumexp_gauss
        >>> expected_logsumexp_gauss(65536, [1.0, 4.0, 20.0])
        array([11.59034178, 18.86773844, 86.01892178])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    return pointwise_rows(_logsumexp, n, gamma, 2.0)


def _entropy(n: float, gamma: float) -> float:
    """Entropy of a row of n Gaussian logits of deviation gamma, in nats, for many keys."""
    log_n, square = math.log(n), gamma * gamma
    if square >= 2 * log_n:
        return float(frozen_entropy(expected_max_gauss(n) / gamma))
    correction = ((square - 0.5) * math.exp(square) + 0.5) / n if square <= log_n / 2 else 0.0
    return log_n - square / 2 + correction


def _collision(n: float, gamma: float) -> float:
    """Σp² of a row of n Gaussian logits of deviation gamma, for many keys."""
    log_n, square = math.log(n), gamma * gamma
    if square >= 2 * log_n:
        return float(frozen_collision(expected_max_gauss(n) / gamma))
    if square > 2 * log_n / 3:
        return math.exp(-0.5 * (log_n / gamma - gamma / 2) ** 2)
    return math.exp(square - log_n)


def _logsumexp(n: float, gamma: float) -> float:
    """Logsumexp of a row of n Gaussian logits of deviation gamma, for many keys."""
    if gamma * gamma >= 2 * math.log(n):
        return gamma * float(expected_max_gauss(n))
    return math.log(n) + gamma * gamma / 2


#: (zeta(k) - 1) for k = 2, 3, ...: enough for powers of any m < 1.
_ZETA_LESS_ONE = [0.0, *zetac(np.arange(2, 64)).tolist()]


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
        n: Number of keys, n >= 1; it need not be an integer.

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
    keys = checked("n", n, "the number of keys must be finite and at least 1", 1.0)
    excess = lambertw(keys * (np.exp(0.5) / 2)).real - 0.5
    # one Newton step for x = lambda²: (1 + 2x) e^x = n
    excess = np.maximum(excess, 0.0)
    slope = 1 + 2 / (1 + 2 * excess)
    excess = excess + (np.log(keys) - excess - np.log1p(2 * excess)) / slope
    return result(np.sqrt(np.maximum(excess, 0.0)))


def frozen_entropy(m: ArrayLike) -> float | Array:
    r"""Mean entropy of frozen rows, for infinitely many Gaussian logits.

    A row is frozen when its logits are so wide that a few keys hold the weight, however many there
    are: their standard deviation is above the critical one, sqrt(2 log n).

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
    r"""Mean collision probability Σp² of frozen rows, for infinitely many Gaussian logits.

    .. math:: E \sum_j p_j^2 = 1 - m

    Args:
        m: Freezing parameter, critical over actual deviation of the logits, 0 <= m < 1.

    Returns:
        E Σp², shape of ``m``; a float for a scalar.

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
    r"""Mean squared norm of the softmax Jacobian in the frozen phase, for infinitely many logits.

    .. math:: E \lVert \operatorname{diag} p - p p^\top \rVert_F^2 = \frac{m (1 - m)}{3}

    The largest value, 1/12, is at m = 1/2: logits twice as wide as where freezing sets in. The mean
    trace is m.

    Args:
        m: Freezing parameter, 0 <= m < 1: the critical standard deviation of the logits divided
            by the actual one.

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


def _freezing(m: ArrayLike) -> Array:
    """Check the freezing parameter: at least 0 and below 1."""
    rule = "the freezing parameter must be at least 0 and below 1"
    return checked("m", m, rule, 0.0, np.nextafter(1.0, 0.0))
