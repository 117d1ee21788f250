r"""Exact means at finite n for softmax rows of independent scores of any distribution.

A row of n keys has logits :math:`\gamma s_j`, the scores s_j independent with a common continuous
law, weights :math:`p = \mathrm{softmax}(\gamma s)` and normaliser
:math:`Z = \sum_j e^{\gamma s_j}`.

As for Gaussian scores (``acutance.theory.finite_n.gaussian``), let :math:`G_j` be independent
standard Gumbel variables: the largest :math:`\gamma s_j + G_j` is distributed as
:math:`\log Z + G`, and its index is a draw from p. With :math:`a = e^{\gamma s - y}` and

.. math::

    F(y) = E e^{-a}, \quad f(y) = E a e^{-a}, \quad k(y) = E K(y - \gamma s), \quad
    K(g) = \int_g^\infty (x - c) e^{-x - e^{-x}} dx,

c Euler's constant,

.. math::

    E H &= n(n-1) \int F^{n-2} f k \, dy, \\
    E \sum_j p_j^\kappa &= \frac{n}{\Gamma(\kappa)} \int F^{n-1} E[a^\kappa e^{-a}] \, dy, \\
    E \sum_j p_j s_j &= n \int F^{n-1} E[s \, a e^{-a}] \, dy, \\
    E \log Z &= E H + \gamma \, E \textstyle\sum_j p_j s_j.

The first is :math:`E[G_I] - c` at the index I of the maximum, by parts: it needs no moment of the
scores, so heavy tails with an infinite :math:`E e^{\gamma s}`, or no mean at all, have their
entropy too. Integrands of entropy and powers are positive, so nothing cancels.

Averages over s and integrals over y are those of ``acutance.theory.finite_n.row``, for laws of
``acutance.theory.families``. Against long-double sums of other formulas the families given by name
keep a relative accuracy of 3e-13, over n = 2 to 1e7 and gamma = 0.001 to 10.

Sources: Derrida (1981), Phys. Rev. B 24, 2613 (the random energy model, whose partition function
is Z); Maddison, Tarlow & Minka (2014), arXiv:1411.0030 (the Gumbel representation).
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import exp1, expit, gammaln

from acutance.theory.arguments import Array
from acutance.theory.families import Family, FamilyParameter
from acutance.theory.finite_n.gaussian import EIN
from acutance.theory.finite_n.grid import grid
from acutance.theory.finite_n.row import RowQuadrature, expectation, small_power

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "expected_collision",
    "expected_entropy",
    "expected_logsumexp",
    "expected_power",
    "expected_power_sum",
    "expected_weighted_mean",
]


_RARE = 1e-10  # part of a sum of powers that may come from beyond the cells


def expected_logsumexp(
    n: ArrayLike, gamma: ArrayLike, family: Any = "gaussian", **parameter: Unpack[FamilyParameter]
) -> float | Array:
    r"""Expected log-normaliser of a softmax row with n independent logits.

    .. math:: E \log \sum_{j=1}^n e^{\gamma s_j} = E H + \gamma E \textstyle\sum_j p_j s_j

    with p the weights and H their entropy.
    It is log n at gamma = 0, log n + log E exp(gamma s) while that is finite and n large, and
    tends to gamma E max s.

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        gamma: Scale of the logits, gamma >= 0.
        family: Distribution of the scores s; see :func:`expected_entropy`.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        E log Z in nats, float64 of the broadcast shape; a float for scalars. It is gamma E s for
        n = 1.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the scores have no mean.

    Example:
        >>> expected_logsumexp(256, [0.0, 1.0], "uniform")  # log 256; about log sinh(1) more
        array([5.54517744, 5.70600489])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    return expectation(_expected_logsumexp, n, gamma, family, parameter)


def expected_entropy(
    n: ArrayLike, gamma: ArrayLike, family: Any = "gaussian", **parameter: Unpack[FamilyParameter]
) -> float | Array:
    r"""Expected Shannon entropy of a softmax row with n independent logits.

    .. math:: E H = -E \sum_{j=1}^n p_j \log p_j, \qquad p = \mathrm{softmax}(\gamma s)

    ======================== ==================================================
    family                   distribution of s at unit scale
    ======================== ==================================================
    ``"gaussian"``           standard normal
    ``"uniform"``            uniform on [-1, 1]
    ``"exponential"``        P(s > x) = exp(-x) on x >= 0
    ``"laplace"``            density exp(-abs(x)) / 2
    ``"gumbel"``             distribution function exp(-exp(-x))
    ``"logistic"``           distribution function 1 / (1 + exp(-x))
    ``"cosine"``, d          cosine of two uniform directions of R^d, d >= 2
    ``"stretched"``, rho     P(s > x) = exp(-x^rho) on x >= 0
    ``"pareto"``, a          P(s > x) = x^(-a) on x >= 1
    a SciPy distribution     its own: frozen and continuous, such as ``norm(0, 2)``
    ======================== ==================================================

    The entropy falls with gamma, from log n to 0. It needs no moment of the scores: heavy tails
    are welcome. A SciPy distribution is as exact as its own quantiles; if SciPy finds these by
    search, the first call takes a few seconds.

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        gamma: Scale of the logits, gamma >= 0.
        family: Distribution of the scores s, from the table.
        **parameter: What the family needs: ``d`` (at least 2; need not be an integer), ``rho`` or
            ``a`` (at least 0.05).

    Returns:
        E H in nats, float64 of the broadcast shape; a float for scalars. It is 0 for n = 1.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the family's parameter is missing.

    Example:
        >>> expected_entropy(2, 1.0)
        0.539500061688
        >>> expected_entropy(65536, [8.0, 16.0], "cosine", d=128)
        array([10.84179248, 10.11282535])
        >>> from scipy.stats import norm
        >>> expected_entropy(2, 0.5, norm(3, 2))  # a shift changes nothing, a width is a scale
        0.539500061688

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    return expectation(_expected_entropy, n, gamma, family, parameter)


def expected_power_sum(
    n: ArrayLike,
    gamma: ArrayLike,
    family: Any = "gaussian",
    k: float = 2.0,
    **parameter: Unpack[FamilyParameter],
) -> float | Array:
    r"""Expected sum of the k-th powers of the weights of a softmax row with n independent logits.

    .. math:: E \sum_{j=1}^n p_j^k = \frac{n}{\Gamma(k)} \int F^{n-1} E[a^k e^{-a}] \, dy,
              \qquad a = e^{\gamma s - y}

    with :math:`F(y) = E e^{-a}`. It rises with gamma from n^(1-k) to 1.

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        gamma: Scale of the logits, gamma >= 0.
        family: Distribution of the scores s; see :func:`expected_entropy`.
        k: The power, 1 <= k <= 1000; it need not be an integer.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        E Σ p^k, float64 of the broadcast shape; a float for scalars. It is 1 for k = 1 or n = 1.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, the family's parameter is missing, or the
            power is so high that only rows with scores beyond float64's quantiles count.

    Example:
        >>> expected_power_sum(64, 2.0, "laplace", k=3)
        0.380097088341

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    if np.ndim(k) != 0 or not 1 <= k <= 1000:
        raise ValueError(f"k: the power must be one number between 1 and 1000, got k={k}")
    power = float(k)
    return expectation(partial(expected_power, k=power), n, gamma, family, parameter)


def expected_collision(
    n: ArrayLike, gamma: ArrayLike, family: Any = "gaussian", **parameter: Unpack[FamilyParameter]
) -> float | Array:
    r"""Expected collision probability Y of a softmax row with n independent logits.

    .. math:: E Y = E \sum_{j=1}^n p_j^2

    E Y rises with gamma, from 1/n to 1; 1 / E Y is about the number of keys that share the weight.

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        gamma: Scale of the logits, gamma >= 0.
        family: Distribution of the scores s; see :func:`expected_entropy`.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        E Y, between 1/n and 1, float64 of the broadcast shape; a float for scalars. It is 1 for
        n = 1.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the family's parameter is missing.

    Example:
        >>> expected_collision(2, 1.0)
        0.636838153968
        >>> expected_collision(4096, [1.0, 2.0], "exponential")  # E e^(gamma s) is infinite
        array([0.09421799, 0.50007773])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    return expected_power_sum(n, gamma, family, 2.0, **parameter)


def expected_weighted_mean(
    n: ArrayLike, gamma: ArrayLike, family: Any = "gaussian", **parameter: Unpack[FamilyParameter]
) -> float | Array:
    r"""Expected mean score under the weights of a softmax row with n independent logits.

    .. math:: E \langle s \rangle = E \sum_{j=1}^n p_j s_j = \frac{d}{d\gamma} E \log Z

    It rises with gamma, from the mean of a score to the expected maximum of n.

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        gamma: Scale of the logits, gamma >= 0.
        family: Distribution of the scores s; see :func:`expected_entropy`.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        E⟨s⟩ in the unit of the scores (gamma is not in it), float64 of the broadcast shape; a
        float for scalars. It is the mean of a score for n = 1.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the scores have no mean.

    Example:
        >>> expected_weighted_mean(2, 1.0)  # gamma (1 - E Y) for Gaussian scores
        0.363161846032
        >>> expected_weighted_mean(64, [0.0, 4.0], "exponential")
        array([1.        , 4.67574332])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    return expectation(_expected_mean, n, gamma, family, parameter)


@lru_cache(maxsize=1024)
def _expected_entropy(n: float, gamma: float, family: Family) -> float:
    """Expected entropy of n independent logits, as one quadrature."""
    if gamma == 0 or n == 1:
        return math.log(n)
    row, scale = (
        RowQuadrature.for_kernels(n, gamma, family),
        max(gamma, 1.0),
    )  # two densities carry 1 / scale each

    def integrand(y: Array) -> Array:
        below, above, density, tail = row.average(y, [_density, _tail_mean])
        pairs = row.others(below, above, 2) * (n * scale * density) * ((n - 1) * tail)
        return np.asarray(pairs)

    return _within(row.integrate(integrand) / scale, 0.0, math.log(n), gamma, family)


def _expected_logsumexp(n: float, gamma: float, family: Family) -> float:
    """Expected logsumexp of a row of n logits gamma · s, s from the family."""
    if gamma == 0:
        return math.log(n)
    return _expected_entropy(n, gamma, family) + gamma * _expected_mean(n, gamma, family)


def _expected_mean(n: float, gamma: float, family: Family) -> float:
    """Expected weighted mean of n independent logits."""
    cells = grid(family)
    cells.require_mean("the weighted mean and log Z")
    if gamma == 0 or n == 1:
        return cells.origin + float((cells.weights * cells.scores).sum())
    row = RowQuadrature.for_kernels(n, gamma, family, moment=True)

    def integrand(y: Array) -> Array:
        below, above, moment = row.average(y, [_density], moment=True)
        return np.asarray(row.others(below, above, 1) * (n * moment))

    return cells.origin + row.integrate(integrand)


@lru_cache(maxsize=1024)
def expected_power(n: float, gamma: float, family: Family, k: float) -> float:
    """Expected sum of the k-th powers of the weights, for checked arguments."""
    if n == 1 or k == 1:
        return 1.0
    if gamma == 0:
        return float(n ** (1 - k))
    row = RowQuadrature.for_kernels(n, gamma, family, power=k)
    shift = float(gammaln(k))

    def density(g: Array, a: Array, below: Array) -> Array:
        if k in (2.0, 3.0, 4.0):
            return small_power(a, k) * (below / math.gamma(k))
        return np.asarray(np.exp(-k * g - a - shift))

    def integrand(y: Array) -> Array:
        below, above, square = row.average(y, [density])
        return np.asarray(row.others(below, above, 1) * (n * square))

    value = _within(row.integrate(integrand), float(n ** (1 - k)), 1.0, gamma, family)
    cells = grid(family)
    mean = (cells.weights * cells.scores).sum() if cells.has_mean else family.offset(np.zeros(()))
    gap = gamma * float(cells.high[-1] - mean)
    rare = n * expit(-cells.end) * expit(gap - math.log(n - 1)) ** k if n > 2 else 0.0
    if rare > _RARE * value:
        raise ValueError(
            f"k: the sum of weights**k at n={n:g} and gamma={gamma:g} depends on scores beyond the "
            f"known quantiles of {family}; lower k or gamma, got k={k:g}"
        )
    return value


def _within(value: float, least: float, most: float, gamma: float, family: Family) -> float:
    """Clip ``value`` to [least, most]; ValueError if it is outside by more than rounding errors."""
    if not least * (1 - 1e-8) <= value <= most * (1 + 1e-8):
        raise ValueError(
            "gamma: at this scale the relevant gaps are below the float64 resolution of the "
            f"scores of {family}, got gamma={gamma:g}"
        )
    return min(max(value, least), most)


def _tail_mean(g: Array, a: Array, below: Array) -> Array:
    """K(g) = E (G - c) over G > g, for a standard Gumbel variable G with mean c.

    By a power series for g >= 0 and with the exponential integral below. ``a`` is e^-g.
    """
    small = np.minimum(a, 1.0)
    values = np.zeros_like(a)  # Ein(small)
    for coefficient in reversed(EIN):
        values *= small
        values += coefficient
    values += np.expm1(-small) * (np.euler_gamma - g)
    near = g < 0
    if near.any():
        values[near] = below[near] * (np.euler_gamma - g[near]) + exp1(a[near])
    return values


def _density(g: Array, a: Array, below: Array) -> Array:
    return a * below
