r"""Information of cosine logits over many random directions: the von Mises-Fisher distribution.

Uniform directions in :math:`R^d`, weighted by :math:`e^{\kappa \cos\theta}`, have that law, and
the row's information tends to its relative entropy to the uniform one. Bessel functions are scaled
by their growth, and what grows cancels by hand.

Sources: Mardia & Jupp (2000), Directional Statistics, section 9.3; NIST DLMF, sections 10.40 and
10.41 (expansions of Bessel functions).
"""

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import bernoulli

from acutance.theory.arguments import Array, checked, checked_dimension, pointwise

#: log Γ(v + 1) less Stirling's formula, times v, in powers of 1/v², for v >= 30.
_STIRLING = [bernoulli(12)[2 * j] / (2 * j * (2 * j - 1)) for j in range(1, 7)]
_DEBYE_FROM = 30.0  # the order of the Bessel function, and its argument, for Debye's expansion
_DEBYE_TERMS = 12


def vmf_entropy_drop(d: ArrayLike, kappa: ArrayLike) -> float | Array:
    r"""Information of a row of cosine logits at scale kappa over many random directions.

    .. math:: D = \kappa A_d(\kappa) - \log {}_0F_1(; d/2; \kappa^2/4), \qquad
              A_d = \frac{I_{d/2}(\kappa)}{I_{d/2-1}(\kappa)}

    the relative entropy of the von Mises-Fisher law to the uniform one. log n - H tends to D for
    many keys, while D < log n.

    It is κ²/(2d) for κ ≪ d, is 0.2406 d at κ = d ≫ 1, and grows as (d-1)/2 log κ for κ ≫ d.

    Args:
        d: Dimension of queries and keys, d >= 2; it need not be an integer.
        kappa: Scale of the cosines, one over the temperature, kappa >= 0.

    Returns:
        D in nats, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some d is below 2, some kappa is negative, or either is not finite.

    Example:
        >>> vmf_entropy_drop(64, 64.0)
        15.473400160234
        >>> vmf_entropy_drop([2, 768], [1.0, 30.0])
        array([0.21047561, 0.58460437])

    Source:
        Mardia & Jupp (2000), Directional Statistics, section 9.3.
    """
    dimension = checked_dimension(d)
    scale = checked("kappa", kappa, "the scale must be finite and at least 0", 0.0)
    return pointwise(
        lambda dim, k: von_mises_fisher(dim, k)[2], *np.broadcast_arrays(dimension, scale)
    )


def von_mises_fisher(d: float, kappa: float) -> tuple[float, float, float]:
    """κ - log F, κ - κA and D = κA - log F, with log F = log 0F1(; d/2; κ²/4).

    κ is the scale and A the mean cosine, as in :func:`vmf_entropy_drop`. Each of the three would
    lose digits in some range if computed as a difference of Bessel functions.
    """
    order = d / 2 - 1
    if kappa >= 20 + order * order / 2:
        return _large_kappa(order, kappa)
    if order >= _DEBYE_FROM and kappa >= _DEBYE_FROM:
        return _large_order(order, kappa)
    term = tail = slope = 0.0
    quarter = kappa * kappa / 4
    term, k = 1.0, 0
    while term > 1e-18 * slope or k == 0:  # positive terms; past the peak they fall geometrically
        k += 1
        term *= quarter / (k * (order + k))
        tail += term
        slope += 2 * k * term
    log_f, product = math.log1p(tail), slope / (1 + tail)
    return kappa - log_f, kappa - product, product - log_f


def _large_kappa(order: float, kappa: float) -> tuple[float, float, float]:
    """κ − log F, κ − κA and D = κA − log F for κ ≫ order², from Hankel's expansion.

    The same three numbers as :func:`von_mises_fisher`; ``order`` is d/2 − 1.
    """
    term, total, moment = 1.0, 0.0, 0.0
    for k in range(200):
        total += term
        moment += k * term
        factor = ((k + 0.5) - order) * ((k + 0.5) + order) / (2 * kappa * (k + 1))
        if abs(factor * term) > abs(term) and k > order:
            break  # the expansion is asymptotic
        term *= factor
        if abs(term) < 1e-19 * abs(total):
            break
    lift = order * math.log(kappa / 2) + 0.5 * math.log(2 * math.pi * kappa)
    lift -= math.lgamma(order + 1) + math.log(total)
    below = order + 0.5 + moment / total
    return lift, below, lift - below


def _large_order(order: float, kappa: float) -> tuple[float, float, float]:
    """κ − log F, κ − κA and D = κA − log F for a large order d/2 − 1, from Debye's expansion."""
    z = kappa / order
    s = math.hypot(1.0, z)
    p = 1 / s
    u = w = 0.0
    for value, slope in reversed(_debye_polynomials()):
        first = horner(value, p)
        u = u / order + first
        w = w / order + 0.5 * first + p * horner(slope, p)
    correction = (z / s) ** 2 * w / u
    stirling = horner(_STIRLING, 1 / (order * order)) / order
    rise = order * math.log1p(z * (z / (1 + s)) / 2) + 0.5 * math.log(s) - math.log(u) - stirling
    slack = order * (z + z * (z / (1 + s))) / (s + z)  # κ - order (s - 1)
    return slack + rise, slack + correction, rise - correction


@lru_cache(maxsize=1)
def _debye_polynomials() -> list[tuple[list[float], list[float]]]:
    """Coefficients of u_0, u_1, ... of DLMF 10.41.10, and of their derivatives."""
    u, table = [Fraction(1)], []
    for _ in range(_DEBYE_TERMS):
        slope = [k * c for k, c in enumerate(u)][1:] or [Fraction(0)]
        table.append(([float(c) for c in u], [float(c) for c in slope]))
        after = [Fraction(0)] * (len(u) + 3)
        for k, c in enumerate(u):
            after[k + 1] += c * (Fraction(k, 2) + Fraction(1, 8 * (k + 1)))
            after[k + 3] -= c * (Fraction(k, 2) + Fraction(5, 8 * (k + 3)))
        u = after
    return table


def horner(coefficients: list[float], x: float) -> float:
    """A polynomial of one number, its coefficients in ascending order."""
    total = 0.0
    for c in reversed(coefficients):
        total = total * x + c
    return total
