r"""Exact means at finite n for softmax rows of independent scores of any distribution.

A row of n keys has logits :math:`\gamma s_j`, the scores s_j independent with a common continuous
law, weights :math:`p = \mathrm{softmax}(\gamma s)` and normaliser
:math:`Z = \sum_j e^{\gamma s_j}`.

Let :math:`G_j` be independent standard Gumbel variables: the largest :math:`\gamma s_j + G_j` is
distributed as :math:`\log Z + G`, and its index is a draw from p. With
:math:`a = e^{\gamma s - y}` and

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

In the same way :math:`1/Z^k = \frac{1}{\Gamma(k)} \int t^{k-1} e^{-tZ} dt` at :math:`t = e^{-y}`
makes every ratio of sums over independent keys an integral of products over keys:

.. math::

    E \operatorname{Var}_p(\gamma s) &= n(n-1) \int F^{n-2} (k_0 k_2 - k_1^2) \, dy, \quad
        k_i = E[(y - \gamma s)^i \, a e^{-a}], \\
    E \sum_{i \ne j} p_i^2 p_j^2 &= \frac{n(n-1)}{\Gamma(4)} \int F^{n-2} (E[a^2 e^{-a}])^2 \, dy.

The effective keys are :math:`Z^2 / Q` and the sparsity :math:`Z / \sqrt{n Q}` with
:math:`Q = \sum_j e^{2 \gamma s_j}`, so the powers of 1/Q are unfolded instead; with everything
taken at twice the scale and :math:`h = E[\sqrt a e^{-a}]`,

.. math::

    E \frac{1}{\sum_j p_j^2} = 1 + n(n-1) \int F^{n-2} h^2 \, dy, \qquad
    E S = \sqrt{\frac n \pi} \int F^{n-1} h \, dy.

The top weight is :math:`1 / (1 + R)`, R the sum of :math:`e^{\gamma(s_j - m)}` over the other keys,
which are independent given the maximum m:

.. math:: E \max_j p_j = \int dm \, n f(m) \int_0^\infty dt \, e^{-t}
          \Bigl( \int_{-\infty}^m f(s) \exp(-t e^{\gamma(s - m)}) ds \Bigr)^{n-1}.

Its integrals over scores are Gauss sums over the log-odds of F, in which quantiles are smooth.

Other averages over s and integrals over y are those of ``acutance.theory.quadrature``, for laws
of ``acutance.theory.families``. Against long-double sums of other formulas the families given by
name keep a relative accuracy of 3e-13, over n = 2 to 1e7 and gamma = 0.001 to 10.

For Gaussian scores, Stein's identity :math:`E \log Z = E H + \gamma^2 (1 - E \sum_j p_j^2)` and
:math:`1 - E \sum_j p_j^2 = n(n-1) \int F^{n-2} f^2 \, dy` leave only positive integrands, so
nothing cancels: not as :math:`\gamma \to 0`, where E H tends to log n, nor as
:math:`\gamma \to \infty`, where it tends to :math:`\pi^2 M_n / (6 \gamma)` with M_n the expected
maximum. They are analytic and fall off at least exponentially, so the trapezoid rule converges
geometrically: the ``_gauss`` functions keep a relative accuracy of 1e-11 for every gamma and up to
n = 1e100, at some 10 ms a point.

*Limits for very many keys* are there to understand a formula, not to compute with. The
``asymptotic_*_gauss`` functions are textbook limits; corrections fall off only with log n, so at
any n in use they are wrong by whole nats around :math:`\gamma_c = \sqrt{2 \log n}`. The
``frozen_*`` functions are means over rows whose deviation gamma is above that, where few keys hold
all the weight (Poisson–Dirichlet distribution with parameter :math:`m = \gamma_c / \gamma`). At
finite n they are closer with :math:`m = M_n / \gamma`, M_n the expected maximum, yet the entropy is
still 10 % high at n = 65536 and gamma = 2 M_n.

Sources: Derrida (1981), Phys. Rev. B 24, 2613 (the random energy model, whose partition function
is Z); Pitman & Yor (1997), Ann. Probab. 25, 855, and Su Jianlin, kexue.fm/archives/9812 (limits);
Maddison, Tarlow & Minka (2014), arXiv:1411.0030 (the Gumbel representation); Trefethen & Weideman
(2014), SIAM Review 56, 385 (the trapezoid rule).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, gammaln, lambertw, log_expit, log_ndtr, ndtr, zetac

from acutance.theory.arguments import (
    Array,
    checked,
    log_probability,
    normal_density,
    pointwise_rows,
    result,
)
from acutance.theory.families import Family, Gaussian, Gumbel, Logistic, as_family
from acutance.theory.quadrature import (
    NODES,
    RowQuadrature,
    gauss,
    grid,
    gumbel_tail_mean,
    kernel_panels,
    power_kernel,
    small_power,
)

__all__ = [
    "asymptotic_collision_gauss",
    "asymptotic_entropy_gauss",
    "asymptotic_logsumexp_gauss",
    "expected_collision",
    "expected_collision_gauss",
    "expected_effective_keys",
    "expected_entropy",
    "expected_entropy_gauss",
    "expected_jacobian_fro2",
    "expected_logsumexp",
    "expected_logsumexp_gauss",
    "expected_max",
    "expected_max_gauss",
    "expected_power_sum",
    "expected_sparsity",
    "expected_top_weight",
    "expected_varentropy",
    "expected_weighted_mean",
    "frozen_collision",
    "frozen_entropy",
    "frozen_jacobian_fro2",
    "scale_gradmax_annealed",
]

_RARE = 1e-10  # part of a sum of powers that may come from beyond the cells


class OverRows(Protocol):
    """A mean over rows of n scores of a family, at each pair of n and gamma."""

    def __call__(
        self, n: ArrayLike, gamma: ArrayLike, family: Any = "gaussian", **parameter: float
    ) -> float | Array: ...


def _for_arrays(mean: Callable[[float, float, Family], float]) -> OverRows:
    """Make of a mean at one n and gamma, without checks, the public function of arrays."""
    remembered = lru_cache(maxsize=1024)(mean)

    @wraps(mean, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def over_rows(
        n: ArrayLike, gamma: ArrayLike, family: Any = "gaussian", **parameter: float
    ) -> float | Array:
        law = as_family(family, **parameter)
        return pointwise_rows(lambda keys, scale: remembered(keys, scale, law), n, gamma)

    del over_rows.__wrapped__  # the signature is its own
    return over_rows


@_for_arrays
def expected_logsumexp(n: float, gamma: float, family: Family) -> float:
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
    if gamma == 0:
        return math.log(n)
    entropy = expected_entropy(n, gamma, family)
    return float(entropy + gamma * expected_weighted_mean(n, gamma, family))


@_for_arrays
def expected_entropy(n: float, gamma: float, family: Family) -> float:
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
    if gamma == 0 or n == 1:
        return math.log(n)
    scale = max(gamma, 1.0)  # two densities carry 1 / scale each

    def pairs(density: Array, tail: Array) -> Array:
        return (n * scale * density) * ((n - 1) * tail)

    row = RowQuadrature.for_kernels(n, gamma, family)
    value = row.mean([power_kernel(1.0), gumbel_tail_mean], pairs, chosen=2) / scale
    return _within(value, 0.0, math.log(n), gamma, family)


def expected_power_sum(
    n: ArrayLike, gamma: ArrayLike, family: Any = "gaussian", k: float = 2.0, **parameter: float
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
    law, power = as_family(family, **parameter), float(k)
    return pointwise_rows(lambda keys, scale: _power_sum(keys, scale, law, power), n, gamma)


@_for_arrays
def expected_collision(n: float, gamma: float, family: Family) -> float:
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
    return _power_sum(n, gamma, family, 2.0)


@_for_arrays
def expected_weighted_mean(n: float, gamma: float, family: Family) -> float:
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
    cells = grid(family)
    cells.require_mean("the weighted mean and log Z")
    if gamma == 0 or n == 1:
        return cells.origin + float((cells.weights * cells.scores).sum())
    row = RowQuadrature.for_kernels(n, gamma, family, moment=True)
    return cells.origin + row.mean([power_kernel(1.0)], lambda moment: n * moment, moment=True)


@_for_arrays
def expected_effective_keys(n: float, gamma: float, family: Family) -> float:
    r"""Expected number of effective keys of a softmax row with n independent logits.

    .. math:: E N_{\mathrm{eff}} = E \Bigl[ 1 \Big/ \sum_{j=1}^n p_j^2 \Bigr]

    This is the mean over rows of 1/Σp². ``1 / expected_collision``, one over the mean of Σp², is
    never larger, and much smaller where a few rows have most of the collision probability.

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        gamma: Scale of the logits, gamma >= 0.
        family: Distribution of the scores; see :func:`~acutance.theory.expected_entropy`.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        The mean, between 1 and n, float64 of the broadcast shape; a float for scalars.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the family's parameter is missing.

    Example:
        >>> expected_effective_keys(4096, [0.0, 2.0, 6.0])  # 1 / expected_collision: 103.2, 2.37
        array([4.09600000e+03, 1.55728014e+02, 3.72968653e+00])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    if n == 1 or gamma == 0:
        return n
    row = _doubled(n, gamma, family)
    return 1 + row.mean([power_kernel(0.5)], lambda root: n * (n - 1) * root**2, chosen=2)


@_for_arrays
def expected_sparsity(n: float, gamma: float, family: Family) -> float:
    r"""Expected l1/l2 sparsity of a softmax row with n independent logits.

    .. math:: E S = E \Bigl[ 1 \Big/ \sqrt{n \textstyle\sum_j p_j^2} \Bigr]

    For Gaussian logits and many keys it tends to ``sparsity_exp``, exp(-gamma²/2), which holds up
    to about gamma = sqrt(log(n) / 2).

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        gamma: Scale of the logits, gamma >= 0.
        family: Distribution of the scores; see :func:`~acutance.theory.expected_entropy`.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        The mean, between n^(-1/2) and 1, float64 of the broadcast shape; a float for scalars.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the family's parameter is missing.

    Example:
        >>> expected_sparsity(65536, [1.0, 2.0, 4.0])  # exp(-gamma²/2): 0.6065, 0.1353, 0.0003
        array([0.60668263, 0.15450607, 0.01774807])

    Source:
        Su Jianlin, kexue.fm/archives/9889, for S and its limit.
    """
    if n == 1 or gamma == 0:
        return 1.0
    row = _doubled(n, gamma, family)
    return math.sqrt(n / math.pi) * row.mean([power_kernel(0.5)], lambda root: root)


@_for_arrays
def expected_varentropy(n: float, gamma: float, family: Family) -> float:
    r"""Expected variance of the logits under the weights of a row with n independent logits.

    .. math:: E \operatorname{Var}_p(\gamma s) = -\frac{d \, E H}{d \log \gamma}

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        gamma: Scale of the logits, gamma >= 0.
        family: Distribution of the scores; see :func:`~acutance.theory.expected_entropy`.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        The mean in nat², float64 of the broadcast shape; a float for scalars. It is 0 for n = 1.
        Its error is some 1e-13, absolute.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the family's parameter is missing.

    Example:
        >>> expected_varentropy(4096, [1.0, 3.0])  # gamma² for many keys
        array([0.99801956, 5.3512444 ])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    if n == 1 or gamma == 0:
        return 0.0

    def spread(zeroth: Array, first: Array, second: Array) -> Array:
        return n * (n - 1) * (zeroth * second - first * first)

    row = RowQuadrature.for_kernels(n, gamma, family)
    return row.mean([power_kernel(1.0, degree) for degree in range(3)], spread, chosen=2)


@_for_arrays
def expected_jacobian_fro2(n: float, gamma: float, family: Family) -> float:
    r"""Expected squared Frobenius norm of the softmax Jacobian, for n independent logits.

    .. math:: E \lVert \operatorname{diag} p - p p^\top \rVert_F^2
              = E \Bigl[ \sum_j p_j^2 - 2 \sum_j p_j^3 + \bigl( \sum_j p_j^2 \bigr)^2 \Bigr]

    Times the variance of independent values it is the expected ``noise_gain`` of a row.

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        gamma: Scale of the logits, gamma >= 0; it is not a factor of the Jacobian.
        family: Distribution of the scores; see :func:`~acutance.theory.expected_entropy`.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        The mean, float64 of the broadcast shape; a float for scalars. It is (n - 1)/n² at
        gamma = 0, and 0 for n = 1.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the family's parameter is missing.

    Example:
        >>> expected_jacobian_fro2(16, [0.0, 3.0, 12.0])
        array([0.05859375, 0.10982131, 0.04339395])

    Source:
        Su Jianlin, kexue.fm/archives/9593 and 9812, treat other norms of the same matrix.
    """
    if n == 1:
        return 0.0
    if gamma == 0:
        return (n - 1) / (n * n)
    fourth = _power_sum(n, gamma, family, 4.0)  # checks that no unknown score decides
    wide, row = (RowQuadrature.for_kernels(n, gamma, family, power=k) for k in (2.0, 3.0))
    row = replace(row, edges=wide.edges)  # squares matter farther up

    def integrand(y: Array) -> Array:  # second moment, less twice the third, and pairs of keys
        below, above, second, third = row.average(y, [power_kernel(2.0), power_kernel(3.0)])
        alone = row.others(below, above, 1) * (second - third)
        pairs = row.others(below, above, 2) * ((n - 1) / 6 * second * second)
        return np.asarray(n * (alone + pairs))

    return row.integrate(integrand) + fourth


def expected_max(n: ArrayLike, family: Any = "gaussian", **parameter: float) -> float | Array:
    r"""Expected maximum of n independent scores.

    .. math:: M_n = E \max_{j \le n} s_j = \int x \, n F^{n-1} f \, dx

    with F and f the distribution function and density of a score. The mean score under softmax
    weights tends to it as the scale of the logits grows.

    Args:
        n: Number of scores, n >= 1; it need not be an integer.
        family: Distribution of a score; see :func:`~acutance.theory.expected_entropy`.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        M_n in the unit of the scores, shape of ``n``; a float for a scalar. M_1 is the mean.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the scores have no mean.

    Example:
        >>> expected_max([1, 2, 3], "exponential")  # 1 + 1/2 + 1/3
        array([1.        , 1.5       , 1.83333333])
        >>> expected_max(4096, "cosine", d=64)
        0.435040404790

    Source:
        de Haan & Ferreira (2006), Extreme Value Theory, chapter 1.
    """
    cells = grid(as_family(family, **parameter))
    cells.require_mean("the expected maximum")
    keys = checked("n", n, "the number of scores must be at least 1", 1.0)
    for count in keys.ravel():
        cells.require_tail(float(count))
    rest = np.exp((keys[..., None, None] - 1) * log_expit(cells.log_odds))
    moments = keys * (rest * cells.weights * cells.scores).sum(axis=(-2, -1))
    return result(cells.origin + moments)


@lru_cache(maxsize=1024)
def _power_sum(n: float, gamma: float, family: Family, k: float) -> float:
    """:func:`expected_power_sum` for one n and gamma, without checks."""
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

    value = row.mean([density], lambda power: n * power)
    value = _within(value, float(n ** (1 - k)), 1.0, gamma, family)
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


def _doubled(n: float, gamma: float, family: Family) -> RowQuadrature:
    """The quadrature of a row with scale 2 gamma, over a range of y twice as long."""
    row = RowQuadrature.for_kernels(n, 2 * gamma, family, power=0.5)
    reach = float(row.panels[-1])
    edges = np.concatenate([row.edges, row.edges[-1] + np.arange(4.0, reach + 4, 4.0)])
    return replace(row, panels=kernel_panels(0.5, 2 * reach), edges=edges)


_STEP = 0.35  # of log t: the trapezoid rule is then right to exp(-pi²/0.35) = 6e-13


_TOP_STEP = 0.35  # of the log-odds of the maximum, for laws that are smooth in them


_MANY = 1 << 15  # keys up to which n rounding errors of 1 are nothing


_NEGLIGIBLE_MAXIMUM = 1e-17  # of the probability of a maximum


_LEFT_OUT = 1e-13  # of the result: what rarer maxima could add


_REACH = 42.0  # log-odds beyond those of 1/n, where maxima are negligible


_SMOOTH = (Gaussian, Gumbel, Logistic)  # without an end or a kink


_LOWEST = -46.0  # log-odds below which nothing is counted


_GEOMETRIC = 2.0 ** -np.arange(1.0, 61.0)


@_for_arrays
def expected_top_weight(n: float, gamma: float, family: Family) -> float:
    r"""Expected largest weight of a softmax row with n independent logits.

    .. math:: E \max_j p_j

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        gamma: Scale of the logits, gamma >= 0.
        family: Distribution of the scores; see :func:`~acutance.theory.expected_entropy`.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        The mean, between 1/n and 1, float64 of the broadcast shape; a float for scalars.
        Accurate to 1e-9, or to 1e-7 for heavy-tailed families whose logits exceed 1e4.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the family's parameter is missing.

    Example:
        >>> expected_top_weight(2, 1.0)
        0.725213454
        >>> expected_top_weight(4096, [1.0, 4.0])
        array([0.00587586, 0.35399323])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    if n == 1 or gamma == 0:
        return 1 / n
    cells = grid(family)
    cells.require_tail(n)
    log_n = math.log(n)
    edges = _edges(cells.log_odds)
    if isinstance(family, _SMOOTH):
        v = np.arange(-_REACH, log_n + _REACH, _TOP_STEP)
        density, scores = n * _TOP_STEP * expit(v) * expit(-v), family.offset(v)
    else:
        v, density, scores = (
            part.ravel() for part in (cells.log_odds, n * cells.weights, cells.scores)
        )
    chance = density * np.exp((n - 1) * log_expit(v))
    order = np.argsort(-chance)
    order = order[chance[order] > _NEGLIGIBLE_MAXIMUM * chance.max()]
    rest = np.cumsum(chance[order][::-1])[::-1]

    def maxima() -> Iterator[Maximum]:
        for index, left in zip(order, rest, strict=True):
            at = v[index]
            nodes, mass = _nodes_below(at, gamma, family, edges)
            gaps = gamma * scores[index] - gamma * family.offset(nodes)
            factors = np.exp(-np.maximum(gaps, 0.0))
            yield Maximum(density[index], factors, mass, float(expit(-at)), left)

    return mean_top_weight(n, maxima(), _STEP, reach=30.0)


class Maximum(NamedTuple):
    """One value of the largest weight, by quadrature.

    Attributes:
        chance: Its density times the quadrature's weight.
        factors: Weights of another key, relative to the largest, shape (nodes,).
        mass: Probabilities of these.
        above: Probability of a weight above the largest.
        left: Probability of this and all values that come later.
    """

    chance: float
    factors: Array
    mass: Array
    above: float
    left: float = math.inf


def mean_top_weight(
    n: float, maxima: Iterable[Maximum], step: float, reach: float, zero: float = 0.0
) -> float:
    """Mean of the largest weight over its values, until what is left of them is negligible.

    Args:
        n: Number of keys.
        maxima: Values of the largest weight.
        step: Step of log t.
        reach: How far below 1/n the quadrature over t begins, in log t.
        zero: Probability of a weight of 0.
    """
    t = np.exp(np.arange(-math.log(n) - reach, 4.0, step))
    measure = step * t * np.exp(-t)
    total, memory = 0.0, np.empty(0)
    for maximum in maxima:
        if maximum.left < _LEFT_OUT * total:
            break
        size = t.size * maximum.factors.size
        if memory.size < size:  # kept: allocating new pages costs more than exponentials
            memory = np.empty(size)
        matrix = memory[:size].reshape(t.size, -1)
        total += maximum.chance * float(measure @ _others(n, t, maximum, matrix, zero))
    return total


def _others(n: float, t: Array, maximum: Maximum, matrix: Array, zero: float) -> Array:
    """Laplace transforms at each t of the sum of the n - 1 other keys' weights.

    ``matrix`` is memory for a value of each t and node.
    """
    mass = maximum.mass
    np.multiply(-t[:, None], maximum.factors, out=matrix)
    if n > _MANY:
        missing = -np.expm1(matrix, out=matrix) @ mass
        transform = mass.sum() - missing
    else:
        transform = np.exp(matrix, out=matrix) @ mass
        missing = mass.sum() - transform
    return np.asarray(np.exp((n - 1) * log_probability(transform + zero, missing + maximum.above)))


def _nodes_below(at: float, gamma: float, family: Family, edges: Array) -> tuple[Array, Array]:
    """Quadrature nodes in log-odds below ``at`` and their probabilities, denser near ``at``."""
    closest = family.offset(np.array([at - 1e-3, at]))
    slope = max(gamma * float(closest[1] - closest[0]) * 1e3, 1e-300)
    halvings = min(max(math.ceil(math.log2(slope)) + 1, 1), _GEOMETRIC.size)
    near = at - 2 * _GEOMETRIC[:halvings]
    edges = np.unique(np.concatenate([edges[edges < at], near, [at]]))
    edges = edges[edges >= _LOWEST] if at > _LOWEST else edges
    nodes, weights = gauss(edges)
    return nodes, weights * expit(nodes) * expit(-nodes)


def _edges(log_odds: Array) -> Array:
    """Edges of the cells with these Gauss nodes, so that no panel contains a kink."""
    middle = 0.5 * (log_odds[:, 0] + log_odds[:, -1])
    half = 0.5 * (log_odds[:, -1] - log_odds[:, 0]) / NODES[-1]
    return np.append(middle - half, middle[-1] + half[-1])


_SCAN_POINTS = 120  # to find where the integrand lives


_RULE_POINTS = 400  # to integrate there


_NEGLIGIBLE_SHARE = 1e-20  # of the integrand's maximum


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

    def point(n: float, _: float) -> float:
        def integrand(x: Array) -> Array:
            density = normal_density(x)
            rest: Array = np.exp((n - 2) * log_ndtr(x))
            return rest * (n * density) * ((n - 1) * density)

        return _integrate(integrand, -12.0, np.sqrt(2 * (np.log(n) + 42)))

    return pointwise_rows(point, n, 0.0)


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
    return _over_rows(lambda at: at.rest * at.first * (at.kernel + at.second), n, gamma)


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
    return _over_rows(lambda at: at.rest * at.first * at.kernel, n, gamma)


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
    return _over_rows(lambda at: at.others * at.square, n, gamma)


class _Factors(NamedTuple):
    """F, 1 - F, f, k and q of the module's formulas at points y, as factors of the integrands."""

    others: Array  # F^(n-1), no other key above y
    rest: Array  # F^(n-2), none of the keys but two
    first: Array  # scale * n f
    second: Array  # gamma² (n - 1) f
    kernel: Array  # (n - 1) k
    square: Array  # scale * n q


def _over_rows(
    integrand: Callable[[_Factors], Array], n: ArrayLike, gamma: ArrayLike
) -> float | Array:
    """Integrate a function of :class:`_Factors` over y, at each pair of n and gamma.

    In units of max(1, gamma) every integrand has a width near 1.
    """

    def point(n: float, gamma: float) -> float:
        scale, log_n = max(1.0, gamma), float(np.log(n))
        lowest = -4.5 - 10 * gamma
        highest = log_n + 42 + gamma * min(gamma / 2, float(np.sqrt(2 * (log_n + 42))))

        def at(x: Array) -> Array:
            return integrand(_factors(n, gamma, highest, float(x[0]), float(x[-1]), x.size))

        return _integrate(at, lowest / scale, highest / scale)

    return pointwise_rows(point, n, gamma)


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
    second = gamma * min(gamma, 1.0) * ((n - 1) * per_unit)
    return _Factors(others, rest, n * per_unit, second, (n - 1) * kernel, n * (scale * square))


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
    live = np.flatnonzero(values > _NEGLIGIBLE_SHARE * values.max())
    if live.size == 0:  # n = 1, where the factor n - 1 is 0
        return 0.0
    first, last = max(live[0] - 1, 0), min(live[-1] + 1, x.size - 1)
    x = np.linspace(x[first], x[last], _RULE_POINTS)
    return float(integrand(x).sum() * (x[1] - x[0]))


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
    return pointwise_rows(_asymptotic_entropy, n, gamma, 2.0)


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
    return pointwise_rows(_asymptotic_collision, n, gamma, 2.0)


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
    return pointwise_rows(_asymptotic_logsumexp, n, gamma, 2.0)


def _asymptotic_entropy(n: float, gamma: float) -> float:
    """Entropy of a row of n Gaussian logits of deviation gamma, in nats, for many keys."""
    log_n, square = math.log(n), gamma * gamma
    if square >= 2 * log_n:
        return float(frozen_entropy(expected_max_gauss(n) / gamma))
    correction = ((square - 0.5) * math.exp(square) + 0.5) / n if square <= log_n / 2 else 0.0
    return log_n - square / 2 + correction


def _asymptotic_collision(n: float, gamma: float) -> float:
    """Σp² of a row of n Gaussian logits of deviation gamma, for many keys."""
    log_n, square = math.log(n), gamma * gamma
    if square >= 2 * log_n:
        return float(frozen_collision(expected_max_gauss(n) / gamma))
    if square > 2 * log_n / 3:
        return math.exp(-0.5 * (log_n / gamma - gamma / 2) ** 2)
    return math.exp(square - log_n)


def _asymptotic_logsumexp(n: float, gamma: float) -> float:
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
