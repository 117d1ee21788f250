r"""Exact means of effective keys, sparsity, varentropy and Jacobian norm, for independent logits.

With :math:`a = e^{\gamma s - y}` and :math:`F = E e^{-a}` as in ``acutance.theory.finite_n.iid``,
:math:`1/Z^k = \frac{1}{\Gamma(k)} \int t^{k-1} e^{-tZ} dt` at :math:`t = e^{-y}` makes every ratio
of sums over independent keys an integral of products over keys. For the varentropy and the
Jacobian's norm that is

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

Source: Derrida (1981), Phys. Rev. B 24, 2613 (the random energy model, whose weights these are).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from acutance.theory.arguments import Array
from acutance.theory.families import Family, FamilyParameter
from acutance.theory.finite_n.iid import expected_power
from acutance.theory.finite_n.row import (
    Kernel,
    RowQuadrature,
    expectation,
    kernel_panels,
    small_power,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "expected_effective_keys",
    "expected_jacobian_fro2",
    "expected_sparsity",
    "expected_varentropy",
]


def expected_effective_keys(
    n: ArrayLike, gamma: ArrayLike, family: Any = "gaussian", **parameter: Unpack[FamilyParameter]
) -> float | Array:
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
    return expectation(_effective_keys, n, gamma, family, parameter)


def expected_sparsity(
    n: ArrayLike, gamma: ArrayLike, family: Any = "gaussian", **parameter: Unpack[FamilyParameter]
) -> float | Array:
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
    return expectation(_sparsity, n, gamma, family, parameter)


def expected_varentropy(
    n: ArrayLike, gamma: ArrayLike, family: Any = "gaussian", **parameter: Unpack[FamilyParameter]
) -> float | Array:
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
    return expectation(_varentropy, n, gamma, family, parameter)


def expected_jacobian_fro2(
    n: ArrayLike, gamma: ArrayLike, family: Any = "gaussian", **parameter: Unpack[FamilyParameter]
) -> float | Array:
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
    return expectation(_jacobian_fro2, n, gamma, family, parameter)


def _pairs(row: RowQuadrature, product: Callable[..., Array], kernels: list[Kernel]) -> float:
    """Integral of n (n - 1) F^(n-2) times a product of kernel means."""

    def integrand(y: Array) -> Array:
        below, above, *means = row.average(y, kernels)
        return np.asarray(row.others(below, above, 2) * (row.n * (row.n - 1)) * product(*means))

    return row.integrate(integrand)


def _doubled(n: float, gamma: float, family: Family) -> RowQuadrature:
    """The quadrature of a row with scale 2 gamma, over a range of y twice as long."""
    row = RowQuadrature.for_kernels(n, 2 * gamma, family, power=0.5)
    reach = float(row.panels[-1])
    edges = np.concatenate([row.edges, row.edges[-1] + np.arange(4.0, reach + 4, 4.0)])
    return replace(row, panels=kernel_panels(0.5, 2 * reach), edges=edges)


def _kernel(power: float, degree: int = 0) -> Kernel:
    """The function (a, g) -> g^degree a^power e^-a, where g = -log a."""

    def values(g: Array, a: Array, below: Array) -> Array:
        kernel = small_power(a, power) * below
        return kernel * g**degree if degree else kernel

    return values


@lru_cache(maxsize=1024)
def _effective_keys(n: float, gamma: float, family: Family) -> float:
    """Expected effective keys of a row of n logits gamma · s, s from the family."""
    if n == 1 or gamma == 0:
        return n
    row = _doubled(n, gamma, family)
    return 1 + _pairs(row, np.square, [_kernel(0.5)])


@lru_cache(maxsize=1024)
def _sparsity(n: float, gamma: float, family: Family) -> float:
    """:func:`expected_sparsity` for one n and gamma, without checks."""
    if n == 1 or gamma == 0:
        return 1.0
    row = _doubled(n, gamma, family)

    def integrand(y: Array) -> Array:
        below, above, mean = row.average(y, [_kernel(0.5)])
        return np.asarray(row.others(below, above, 1) * mean)

    return math.sqrt(n / math.pi) * row.integrate(integrand)


@lru_cache(maxsize=1024)
def _varentropy(n: float, gamma: float, family: Family) -> float:
    """:func:`expected_varentropy` for one n and gamma, without checks."""
    if n == 1 or gamma == 0:
        return 0.0

    def spread(zeroth: Array, first: Array, second: Array) -> Array:
        return zeroth * second - first * first

    return _pairs(
        RowQuadrature.for_kernels(n, gamma, family), spread, [_kernel(1.0, i) for i in range(3)]
    )


@lru_cache(maxsize=1024)
def _jacobian_fro2(n: float, gamma: float, family: Family) -> float:
    """:func:`expected_jacobian_fro2` for one n and gamma, without checks."""
    if n == 1:
        return 0.0
    if gamma == 0:
        return (n - 1) / (n * n)
    fourth = expected_power(n, gamma, family, 4.0)  # checks that no unknown score decides
    wide, row = (RowQuadrature.for_kernels(n, gamma, family, power=k) for k in (2.0, 3.0))
    row = replace(row, edges=wide.edges)  # squares matter farther up

    def integrand(y: Array) -> Array:  # second moment, less twice the third, and pairs of keys
        below, above, second, third = row.average(y, [_kernel(2.0), _kernel(3.0)])
        alone = row.others(below, above, 1) * (second - third)
        pairs = row.others(below, above, 2) * ((n - 1) / 6 * second * second)
        return np.asarray(n * (alone + pairs))

    return row.integrate(integrand) + fourth
