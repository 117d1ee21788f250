r"""Scales at which a row of independent logits has a given entropy or number of effective keys.

With the scores of n keys independent and of a common law, the expected entropy of
:math:`\mathrm{softmax}(\gamma s)` falls strictly with :math:`\gamma`, from log n to 0, and the
expected collision probability rises from 1/n to 1: row by row the derivatives are
:math:`-\gamma \mathrm{Var}_p(s)` and :math:`2 \mathrm{Cov}_p(p, s)`. So each target has one scale.
It is found by bracketing and Brent's method on the exact finite-n expectations of
``acutance.theory.finite_n.expected``; the laws of ``acutance.theory.laws`` are what it tends to.

Sources: Derrida (1981), Phys. Rev. B 24, 2613 (entropy along the scale); Brent (1973), Algorithms
for Minimization without Derivatives, chapter 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from acutance.theory.arguments import Array, checked, pointwise
from acutance.theory.families import Family, FamilyParameter, as_family
from acutance.theory.finite_n.expected import expected_collision, expected_entropy
from acutance.theory.finite_n.grid import grid

if TYPE_CHECKING:
    from typing_extensions import Unpack

_STEP = 1.5  # of the logarithm of the scale, to find a bracket, at first
_REACH = 400.0  # its distance from that of one over the quartiles' distance that is tried
_LOG_MOST = 700.0  # for float64 to hold the scale
_EPS = float(np.finfo(np.float64).eps)


def scale_for_entropy(
    n: ArrayLike, entropy: ArrayLike, family: Any = "gaussian", **parameter: Unpack[FamilyParameter]
) -> float | Array:
    r"""Scale of the logits at which a row of n keys has a given expected entropy.

    .. math:: E H(n, \gamma) = H

    For Gaussian scores it is near sqrt(2 (log n - H)) while that is well under sqrt(2 log n).

    Args:
        n: Number of keys, n >= 2; it need not be an integer.
        entropy: The entropy H in nats, 0 < entropy < log n.
        family: Distribution of the scores; see :func:`~acutance.theory.expected_entropy`.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        γ in one over the unit of the scores, float64 of the broadcast shape; a float for scalars.
        The entropy there is right to 1e-10.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If n is below 2, or no scale gives the entropy: it is 0 or less, log n or more.

    Example:
        >>> scale_for_entropy(4096, 2.0)
        5.185714204618
        >>> scale_for_entropy([1024, 4096], 2.0, "uniform")  # proportional to n
        array([191.50958334, 765.78233789])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    return _solve(_entropy_scale, n, entropy, family, parameter)


def scale_for_effective_keys(
    n: ArrayLike,
    effective_keys: ArrayLike,
    family: Any = "gaussian",
    **parameter: Unpack[FamilyParameter],
) -> float | Array:
    r"""Scale of the logits at which a row of n keys has a given number of effective keys.

    .. math:: \frac{1}{E \sum_j p_j^2} = N_{\mathrm{eff}}

    Args:
        n: Number of keys, n >= 2; it need not be an integer.
        effective_keys: One over the expected collision probability, 1 < effective_keys < n.
        family: Distribution of the scores; see :func:`~acutance.theory.expected_entropy`.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        γ in one over the unit of the scores, float64 of the broadcast shape; a float for scalars.
        The collision probability there is right to 1e-10 of its value.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If n is below 2, or no scale gives the number: it is 1 or less, n or more.

    Example:
        >>> scale_for_effective_keys([16, 4096], 2.0)
        array([3.18024289, 7.04946158])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    return _solve(_effective_scale, n, effective_keys, family, parameter)


def scale_for_information(
    n: ArrayLike,
    fraction: ArrayLike,
    family: Any = "gaussian",
    **parameter: Unpack[FamilyParameter],
) -> float | Array:
    r"""Scale of the logits at which the information of a row is a given fraction of log n.

    .. math:: \log n - E H(n, \gamma) = f \log n

    The temperature is one over it. ``tau_for_information`` gives the temperature at which cosine
    logits of chosen keys, not random ones, can carry that information.

    Args:
        n: Number of keys, n >= 2; it need not be an integer.
        fraction: The share f, 0 < fraction < 1.
        family: Distribution of the scores; see :func:`~acutance.theory.expected_entropy`.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        γ in one over the unit of the scores, float64 of the broadcast shape; a float for scalars.
        The information there is right to 1e-10 nats.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If n is below 2, or a fraction is not between 0 and 1.

    Example:
        >>> scale_for_information(65536, [0.1, 0.5])
        array([1.48948555, 3.50024163])

    Source:
        Su (2023), https://kexue.fm/archives/9593, for the information of a row.
    """
    return _solve(_information_scale, n, fraction, family, parameter)


def _entropy_scale(n: float, entropy: float, family: Family) -> float:
    """Scale at which a row of n logits from the family has this expected entropy.

    Raises:
        ValueError: if no scale gives this entropy.
    """
    if not 0 < entropy < math.log(n):
        raise ValueError(
            "entropy: must be strictly between 0 (one key has all the weight) and log n = "
            f"{math.log(n):.6g} (uniform weights), got entropy={entropy:g}"
        )
    return _root(lambda scale: float(expected_entropy(n, scale, family)) / entropy, family)


def _effective_scale(n: float, effective_keys: float, family: Family) -> float:
    """The scale at which 1 / (expected collision probability) is ``effective_keys``."""
    if not 1 < effective_keys < n:
        raise ValueError(
            "effective_keys: must be strictly between 1 (one key has all the weight) and n = "
            f"{n:g} (uniform weights), got effective_keys={effective_keys:g}"
        )

    def ratio(scale: float) -> float:
        return 1 / (effective_keys * float(expected_collision(n, scale, family)))

    return _root(ratio, family)


def _information_scale(n: float, fraction: float, family: Family) -> float:
    """The scale at which the expected information is a fraction of log n."""
    if not 0 < fraction < 1:
        raise ValueError(
            "fraction: must be strictly between 0 (uniform weights) and 1 (one key has all "
            f"the weight), got fraction={fraction:g}"
        )
    log_n = math.log(n)
    rest = (1 - fraction) * log_n
    return _root(lambda scale: float(expected_entropy(n, scale, family)) / rest, family)


def _root(ratio: Callable[[float], float], family: Family) -> float:
    """Scale at which the function ``ratio`` of the scale is 1; it falls from above 1 to 0."""

    def value(log_scale: float) -> float:
        return math.log(max(ratio(math.exp(log_scale)), 1e-300))

    low = high = start = -math.log(grid(family).unit)
    step, most = _STEP, min(start + _REACH, _LOG_MOST)
    while value(high) > 0:
        if high == most:
            raise ValueError(
                f"family: with scores of {family} the target needs a scale above "
                f"{math.exp(most):g}; choose a less sharp one"
            )
        low, high, step = high, min(high + step, most), 2 * step
    while low == high or value(low) <= 0:
        low, high, step = low - step, low, 2 * step
        if low < start - _REACH:
            return 0.0  # the target is within rounding of what scale 0 gives
    from scipy.optimize import brentq  # takes its time to load

    return math.exp(brentq(value, low, high, xtol=1e-14, rtol=4 * _EPS))


def _solve(
    point: Callable[[float, float, Family], float],
    n: ArrayLike,
    target: ArrayLike,
    family: Any,
    parameter: FamilyParameter,
) -> float | Array:
    """Check n, then evaluate ``point(n, target, family)`` at each pair of n and target.

    Returns:
        float64 of the broadcast shape; a float for scalars.
    """
    law = as_family(family, **parameter)
    keys = checked("n", n, "the number of keys must be finite and at least 2", 2.0)
    return pointwise(
        lambda count, aim: point(count, aim, law),
        *np.broadcast_arrays(keys, np.asarray(target, dtype=np.float64)),
    )
