r"""Softmax rows with independent Gaussian logits: exact expectations at finite n.

A row of n keys has logits :math:`\gamma z_j`, :math:`z_j \sim N(0, 1)` independent, weights
:math:`p = \mathrm{softmax}(\gamma z)` and normaliser :math:`Z = \sum_j e^{\gamma z_j}`.

Everything here is one smooth integral. With independent standard Gumbel variables
:math:`G_j`, the largest :math:`\gamma z_j + G_j` is distributed as :math:`\log Z + G` and its
index is a draw from p. Let F and f be the distribution function and density of
:math:`\gamma z + G` (:math:`F(y) = E \exp(-t e^{\gamma z})` at :math:`t = e^{-y}`, the Laplace
transform of one term of Z). Then

.. math::

    1 - E \sum_j p_j^2 &= n(n-1) \int F^{n-2} f^2 \, dy, \\
    E H &= n(n-1) \int F^{n-2} f k \, dy, \qquad k(y) = E K(y - \gamma z), \\
    E \log Z &= E H + \gamma^2 (1 - E \textstyle\sum_j p_j^2),

where :math:`K(g) = \int_g^\infty (x - c) e^{-x - e^{-x}} dx` and c is Euler's constant (the mean
of G); the last line is Stein's identity. Every integrand is positive, so nothing cancels: not
as :math:`\gamma \to 0`, where E H tends to log n, nor as :math:`\gamma \to \infty`, where it tends
to :math:`\pi^2 M_n / (6 \gamma)` with :math:`M_n` the expected maximum. The integrands are analytic
and fall off at least exponentially, so the trapezoid rule converges geometrically: results keep
a relative accuracy of 1e-11 for every gamma and up to n = 1e100, at some 10 ms a point.

Sources: Derrida (1981), Phys. Rev. B 24, 2613 (the random energy model, whose partition function
is Z); Maddison, Tarlow & Minka (2014), arXiv:1411.0030 (the Gumbel representation);
Trefethen & Weideman (2014), SIAM Review 56, 385 (the trapezoid rule).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_ndtr, ndtr

from acutance.theory.arguments import Array, log_probability, normal_density, pointwise_rows
from acutance.theory.finite_n.row import gumbel_tail_mean

__all__ = [
    "expected_collision_gauss",
    "expected_entropy_gauss",
    "expected_logsumexp_gauss",
    "expected_max_gauss",
]

_SCAN_POINTS = 120  # to find where the integrand lives


_RULE_POINTS = 400  # to integrate there


_NEGLIGIBLE = 1e-20  # of the integrand's maximum


_SMALL_GAMMA = 0.5  # below it the Gaussian is the narrower factor of the inner integral


_NODE_STEP = 0.2  # inner trapezoid steps: in the Gumbel variable ...


_NORMAL_STEP = 0.4  # ... and in the Gaussian one


def expected_max_gauss(n: ArrayLike) -> float | Array:
    r"""Expected maximum of n independent standard normal variables.

    .. math:: M_n = n(n-1) \int \varphi(x)^2 \Phi(x)^{n-2} \, dx \approx \sqrt{2 \log n}

    Args:
        n: Number of variables, n >= 1; it need not be an integer.

    Returns:
        M_n in standard deviations, shape of ``n``; a float for a scalar. M_1 is 0.

    Raises:
        ValueError: If some n is below 1 or not finite.

    Example:
        >>> expected_max_gauss(2)  # 1 / sqrt(pi)
        0.564189583548
        >>> expected_max_gauss([16, 4096])
        array([1.76599139, 3.62608218])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613; the form with the squared density is
        one integration by parts away from the textbook one.
    """
    return pointwise_rows(lambda keys, _: _expected_max(keys), n, 0.0)


def expected_logsumexp_gauss(n: ArrayLike, gamma: ArrayLike) -> float | Array:
    r"""Expected log-normaliser of a softmax row with n Gaussian logits of deviation gamma.

    .. math:: E \log \sum_{j=1}^n e^{\gamma z_j} = E H + \gamma^2 (1 - E \sum_j p_j^2)

    with z_j standard normal, p the weights and H their entropy. It is about log n + gamma²/2 while
    gamma is well below sqrt(2 log n), and tends to gamma M_n above, with M_n the
    :func:`expected_max_gauss`.

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        gamma: Standard deviation of the logits, gamma >= 0.

    Returns:
        E log Z in nats, float64 of the broadcast shape; a float for scalars. It is 0 for n = 1.

    Raises:
        ValueError: If some n is below 1, some gamma is negative, or either is not finite.

    Example:
        >>> expected_logsumexp_gauss(2, 1.0)
        0.90266190772
        >>> expected_logsumexp_gauss(65536, [0.0, 1.0])  # log n, about log n + 1/2
        array([11.09035489, 11.59034178])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    return pointwise_rows(_expected_logsumexp, n, gamma)


def expected_entropy_gauss(n: ArrayLike, gamma: ArrayLike) -> float | Array:
    r"""Expected Shannon entropy of a softmax row with n Gaussian logits of deviation gamma.

    .. math:: E H = -E \sum_{j=1}^n p_j \log p_j, \qquad p = \mathrm{softmax}(\gamma z), \qquad
              z_j \sim N(0, 1) \text{ independent}

    It is about log n - gamma²/2 while gamma is well below sqrt(2 log n). Far above, it tends to
    pi² M_n / (6 gamma), where M_n is the expected maximum of the n values z_j
    (:func:`expected_max_gauss`). The integral is exact to a relative error of 1e-11.

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        gamma: Standard deviation of the logits, gamma >= 0.

    Returns:
        E H in nats, float64 of the broadcast shape; a float for scalars. It is 0 for n = 1.

    Raises:
        ValueError: If some n is below 1, some gamma is negative, or either is not finite.

    Example:
        >>> expected_entropy_gauss(2, 1.0)
        0.539500061688
        >>> expected_entropy_gauss(4096, [0.0, 2.0, 6.0])  # from log n = 8.3178 downwards
        array([8.31776617, 6.3508791 , 1.60377911])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    return pointwise_rows(_expected_entropy, n, gamma)


def expected_collision_gauss(n: ArrayLike, gamma: ArrayLike) -> float | Array:
    r"""Expected collision probability of a softmax row with n Gaussian logits of deviation gamma.

    .. math:: E Y = E \sum_{j=1}^n p_j^2 = n \int F^{n-1} q \, dy, \qquad q(y) = E a^2 e^{-a},
              \quad a = e^{\gamma z - y}

    with F the distribution function of gamma z plus a standard Gumbel variable, z standard normal.
    It is about exp(gamma²)/n while gamma is well below sqrt(2 log n)/2. Far above, it tends to 1 -
    M_n / gamma, with M_n the :func:`expected_max_gauss`. One over it measures the number of keys
    that share the weight.

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        gamma: Standard deviation of the logits, gamma >= 0.

    Returns:
        E Y, between 1/n and 1, float64 of the broadcast shape; a float for scalars. It is 1 for
        n = 1.

    Raises:
        ValueError: If some n is below 1, some gamma is negative, or either is not finite.

    Example:
        >>> expected_collision_gauss(2, 1.0)
        0.636838153968
        >>> expected_collision_gauss([16, 65536], 3.0)
        array([0.47690645, 0.02018323])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    return pointwise_rows(_expected_collision, n, gamma)


def _expected_max(n: float) -> float:
    """Expected maximum of n standard normal variables."""

    def integrand(x: Array) -> Array:
        density = normal_density(x)
        rest: Array = np.exp((n - 2) * log_ndtr(x))
        return rest * (n * density) * ((n - 1) * density)

    return _integrate(integrand, -12.0, np.sqrt(2 * (np.log(n) + 42)))


def _expected_entropy(n: float, gamma: float) -> float:
    """Expected entropy of a row of n Gaussian logits of deviation gamma, in nats."""
    return _over_rows(lambda at: at.rest * at.first * at.kernel, n, gamma)


def _expected_logsumexp(n: float, gamma: float) -> float:
    """Expected logsumexp of a row of n Gaussian logits of deviation gamma."""
    ratio = gamma * min(gamma, 1.0)  # gamma², less the scale that densities carry
    return _over_rows(lambda at: at.rest * at.first * (at.kernel + ratio * at.second), n, gamma)


def _expected_collision(n: float, gamma: float) -> float:
    """Expected Σp² of a row of n Gaussian logits of deviation gamma."""
    return _over_rows(lambda at: at.others * at.square, n, gamma)


class _Factors(NamedTuple):
    """F, 1 - F, f, k and q of the module's formulas at points y, as factors of the integrands."""

    others: Array  # F^(n-1), no other key above y
    rest: Array  # F^(n-2), none of the keys but two
    first: Array  # scale * n f
    second: Array  # scale * (n - 1) f
    kernel: Array  # (n - 1) k
    square: Array  # scale * n q


def _over_rows(integrand: Callable[[_Factors], Array], n: float, gamma: float) -> float:
    """Integrate a function of :class:`_Factors` over y, in units of max(1, gamma).

    In these units every integrand has a width near 1.
    """
    scale, log_n = max(1.0, gamma), float(np.log(n))
    lowest = -4.5 - 10 * gamma
    highest = log_n + 42 + gamma * min(gamma / 2, float(np.sqrt(2 * (log_n + 42))))

    def at(x: Array) -> Array:
        return integrand(_factors(n, gamma, highest, float(x[0]), float(x[-1]), x.size))

    return _integrate(at, lowest / scale, highest / scale)


@lru_cache(maxsize=8)
def _factors(
    n: float, gamma: float, highest: float, first: float, last: float, points: int
) -> _Factors:
    """The factors at ``points`` evenly spaced y; cached, as several integrals share them."""
    scale = max(1.0, gamma)
    y = scale * np.linspace(first, last, points)[:, None]
    below, above, density, kernel, square = _single_key(highest, gamma)(y)
    log_below = log_probability(below, above)
    others, rest = np.exp((n - 1) * log_below), np.exp((n - 2) * log_below)
    per_unit = scale * density
    return _Factors(
        others, rest, n * per_unit, (n - 1) * per_unit, (n - 1) * kernel, n * (scale * square)
    )


def _single_key(highest: float, gamma: float) -> Callable[[Array], tuple[Array, ...]]:
    """Function of y: F, 1 - F, f, k and q, as sums over nodes valid up to ``highest``."""
    if gamma < _SMALL_GAMMA:
        z = np.arange(-10.0, 12.0, _NORMAL_STEP)
        weight = _NORMAL_STEP * normal_density(z)

        def over_normal(y: Array) -> tuple[Array, ...]:
            g = y - gamma * z
            a = np.exp(-g)
            below = np.exp(-a)
            tail = gumbel_tail_mean(g, a, below)
            factors = (below, -np.expm1(-a), a * below, tail, a * a * below)
            return tuple(factor @ weight for factor in factors)

        return over_normal

    g = np.arange(-4.5, max(45.0, highest - gamma * (gamma - 10)), _NODE_STEP)
    a = np.exp(-g)
    below = np.exp(-a)
    gumbel = _NODE_STEP * a * below
    kernel = _NODE_STEP * gumbel_tail_mean(g, a, below)

    def over_gumbel(y: Array) -> tuple[Array, ...]:
        z = (y - g) / gamma
        bell = normal_density(z) / gamma
        return (
            ndtr(z) @ gumbel,
            ndtr(-z) @ gumbel,
            bell @ gumbel,
            bell @ kernel,
            bell @ (a * gumbel),
        )

    return over_gumbel


def _integrate(integrand: Callable[[Array], Array], lowest: float, highest: float) -> float:
    """Trapezoid rule over the part of [lowest, highest] where the integrand is not negligible."""
    x = np.linspace(lowest, highest, _SCAN_POINTS)
    values = integrand(x)
    live = np.flatnonzero(values > _NEGLIGIBLE * values.max())
    if live.size == 0:  # n = 1, where the factor n - 1 is 0
        return 0.0
    first, last = max(live[0] - 1, 0), min(live[-1] + 1, x.size - 1)
    x = np.linspace(x[first], x[last], _RULE_POINTS)
    return float(integrand(x).sum() * (x[1] - x[0]))
