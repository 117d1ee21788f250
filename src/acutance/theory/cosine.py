r"""Information of softmax rows over cosine logits, as a function of the temperature.

A row of n keys has logits :math:`\cos\theta_j / \tau` and weights :math:`p = \mathrm{softmax}`.
Its information is :math:`\log n - H` nats, H the Shannon entropy of p. Only the span
:math:`A = \mathrm{width} / \tau` of the logits matters; cosines in [-1, 1] have width 2.

*The least entropy.* Along any one logit H has no interior minimum, so the minimum over the box
puts k keys at the top and the other n - k at the bottom. With :math:`r = (n - k) e^{-A}`

.. math::

    H_k = \log(k + r) + \frac{A r}{k + r}, \qquad
    \log n - \min_k H_k \to D(A) = B - 1 - \log B, \quad B = \frac{A}{1 - e^{-A}},

the limit for many keys, reached at :math:`k / n = (B - 1) / (e^A - 1)`.

Each formula is evaluated in a form that keeps its relative accuracy: differences that vanish with
A are series.

Source: Su (2023), https://kexue.fm/archives/9593.
"""

import math
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bernoulli

from acutance.theory.arguments import Array, checked, require, result

__all__ = [
    "ATANH_TAIL",
    "best_count",
    "cosine_best_count",
    "cosine_entropy_lower_bound",
    "information_range_limit",
    "whole_keys",
]

_EPS = float(np.finfo(np.float64).eps)
#: A / (1 - e^-A) - 1 = A/2 + A²/12 - A⁴/720 + ..., enough terms for A <= 1.
_ODD_HALF = [0.0, 0.5] + [bernoulli(20)[k] / math.factorial(k) for k in range(2, 21)]
#: (atanh t - t) / t³ = 1/3 + t²/5 + ..., in powers of t², enough terms for |t| <= 0.21.
ATANH_TAIL = [1 / (2 * j + 3) for j in range(13)]
#: (1 - φ) / y², φ = (1 - y²) atanh(y) / y, in powers of y², enough terms for y <= 1/3.
_MIDPOINT = [2 / ((2 * j + 1) * (2 * j + 3)) for j in range(17)]


def information_range_limit(tau: ArrayLike, *, width: ArrayLike = 2.0) -> float | Array:
    r"""Most information a row of cosine logits can carry at temperature tau, for many keys.

    .. math:: D = B - 1 - \log B, \qquad B = \frac{A}{1 - e^{-A}}, \quad A = \mathrm{width} / \tau

    The information of a row is log n - H. D is about A²/8 for small A (Hoeffding's bound) and
    A - 1 - log A for large A. With finitely many keys the largest log n - H is slightly below D.

    Args:
        tau: Temperature, tau > 0.
        width: Range of the cosines, width > 0: 2 for [-1, 1].

    Returns:
        D in nats, float64 of the broadcast shape; a float for scalars. It does not depend on n:
        where it exceeds log n, a row can have any information from 0 to log n.

    Raises:
        ValueError: If some tau or width is not finite and positive.

    Example:
        >>> information_range_limit(1.0)
        0.474474647070527
        >>> information_range_limit([1000.0, 0.1])
        array([4.99999972e-07, 1.60042678e+01])

    Source:
        Su (2023), https://kexue.fm/archives/9593, which prints 0.4745 for tau = 1.
    """
    span = _span(tau, width)
    return result(_excess(_bulge(span)))


def cosine_best_count(n: ArrayLike, tau: ArrayLike, *, width: ArrayLike = 2.0) -> float | Array:
    r"""Number of keys with the highest cosine in the row of cosines with the least entropy.

    In that row k keys have the highest cosine and the other n - k the lowest.

    .. math:: k^* \in \{\lfloor n x^* \rfloor, \lceil n x^* \rceil\} \cap [1, n - 1], \qquad
              x^* = \frac{B - 1}{e^A - 1}, \quad B = \frac{A}{1 - e^{-A}}, \quad
              A = \mathrm{width} / \tau

    The better of the two is found from the sign of :math:`H_{k+1} - H_k`, in exact arithmetic
    where float64 cannot tell. It is n/2 for high temperatures and 1 for low ones.

    Args:
        n: Number of keys, an integer n >= 2.
        tau: Temperature, tau > 0.
        width: Range of the cosines, width > 0: 2 for [-1, 1].

    Returns:
        k* as float64 of the broadcast shape; a float for scalars. Of two equally good counts, the
        smaller.

    Raises:
        ValueError: If some n is not an integer of at least 2, or some tau or width is not finite
            and positive.

    Example:
        >>> cosine_best_count(256, 1.0)
        53.0
        >>> cosine_best_count(65536, [1e6, 0.2, 0.05])
        array([3.2768e+04, 2.7000e+01, 1.0000e+00])

    Source:
        Su (2023), https://kexue.fm/archives/9593, for the limit x*.
    """
    span, keys = _span(tau, width), whole_keys(n)
    tau, width = np.asarray(tau, np.float64), np.asarray(width, np.float64)
    keys, span, tau, width = np.broadcast_arrays(keys, span, tau, width)
    best, uncertain = best_count(keys, span)
    count = np.array(best)
    for index in np.argwhere(uncertain):
        at = tuple(index)
        count[at] = _best_count_exactly(count[at], keys[at], tau[at], width[at])
    return result(count)


def cosine_entropy_lower_bound(
    n: ArrayLike, tau: ArrayLike, *, width: ArrayLike = 2.0
) -> float | Array:
    r"""Least entropy of a softmax over n cosines divided by tau.

    .. math:: H_{\min} = \min_k \left[ \log(k + r) + \frac{A r}{k + r} \right], \qquad
              r = (n - k) e^{-A}, \quad A = \mathrm{width} / \tau

    It is attained: for one query, any n cosines occur in two dimensions or more. It is also the
    sharp lower bound for any n logits that span A.

    Args:
        n: Number of keys, an integer n >= 2.
        tau: Temperature, tau > 0.
        width: Range of the cosines, width > 0: 2 for [-1, 1]. For a row with one aligned key
            and the others spread as evenly as all rows at once allow it is 1 + 1/(n - 1).

    Returns:
        H in nats, between 0 and log n, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some n is not an integer above 1, or some tau or width not finite and > 0.

    Example:
        >>> cosine_entropy_lower_bound(16, 1.0)  # 0.4731 below log 16
        2.29943887538679
        >>> cosine_entropy_lower_bound(65536, [1.0, 0.1])
        array([1.06158802e+01, 2.83625776e-03])

    Source:
        Su (2023), https://kexue.fm/archives/9593.
    """
    span, keys = _span(tau, width), whole_keys(n)
    keys, span = np.broadcast_arrays(keys, span)
    count, _ = best_count(keys, span)  # where that is unsure, both counts give the same entropy
    rest = (keys - count) * np.exp(-span)
    entropy = np.where(count > 1, np.log(count + rest), np.log1p(rest))
    entropy += span * (rest / (count + rest))
    return result(entropy)


def best_count(keys: Array, span: Array) -> tuple[Array, NDArray[np.bool_]]:
    """:func:`cosine_best_count` in float64, and a mask of where rounding leaves it uncertain.

    H_{k+1} - H_k has the sign of m - n x* - c(m) at the midpoint m = k + 1/2, with a small c >= 0.
    """
    small = np.exp(-span)
    lift = -np.expm1(-span)  # 1 - e^-A
    best = keys * (_bulge(span) * (small / lift))
    low = np.clip(np.floor(best), 1.0, keys - 1)
    total = keys * small + (low + 0.5) * lift
    square = (lift / (2 * total)) ** 2
    gap = square * _series(_MIDPOINT, square)
    shift = span * small * keys / (2 * total) / (2 * total)
    side = low + 0.5 - best - shift * _series(_MIDPOINT, square) / (1 - gap)
    count = np.minimum(low + (side < 0), keys - 1)
    doubt = (16 + 4 * np.minimum(span, 1e3)) * _EPS * (best + 1)
    return count, (np.abs(side) < doubt) & (keys > 2)


def _best_count_exactly(near: float, n: float, tau: float, width: float) -> float:
    """The count next to ``near`` with the least entropy, computed in decimal arithmetic."""
    digits = max(0, math.ceil(math.log10(tau) - math.log10(width)))
    with localcontext() as context:
        context.prec = 80 + 3 * digits
        keys, span = Decimal(int(n)), Decimal(width) / Decimal(tau)
        small = (-span).exp()

        def step(count: Decimal) -> Decimal:  # H_{k+1} - H_k
            here = count + (keys - count) * small
            after = here + 1 - small
            return (after / here).ln() - span * keys * small / (here * after)

        lowest = max(1, int(near) - 1)
        counts = range(lowest, min(int(n) - 1, int(near) + 2))
        return float(
            next((k for k in counts if step(Decimal(k)) >= 0), min(int(n) - 1, counts.stop))
        )


def _series(coefficients: list[float], x: Array) -> Array:
    return np.asarray(np.polynomial.polynomial.polyval(x, coefficients), np.float64)


def _bulge(span: Array) -> Array:
    """A / (1 - e^-A) - 1 for A = ``span``, which is B - 1 in :func:`information_range_limit`."""
    far = np.maximum(span, 1.0)
    return np.where(span < 1, _series(_ODD_HALF, np.minimum(span, 1.0)), far / -np.expm1(-far) - 1)


def _excess(b: Array) -> Array:
    """B - 1 - log B for b = B - 1 >= 0, with t = b / (2 + b) where it would cancel."""
    t = np.minimum(b, 0.5) / (2 + np.minimum(b, 0.5))
    near = 2 * t * t * (1 / (1 - t) - t * _series(ATANH_TAIL, t * t))
    return np.where(b < 0.5, near, b - np.log1p(b))


def _span(temperature: ArrayLike, extent: ArrayLike) -> Array:
    must = "must be finite and greater than 0"
    tau = checked("tau", temperature, f"the temperature {must}", above=0.0)
    width = checked("width", extent, f"the width {must}", above=0.0)
    with np.errstate(over="ignore"):
        return np.clip(np.asarray(width / tau, np.float64), 1e-300, 1e300)


def whole_keys(n: ArrayLike) -> Array:
    """Numbers of keys as float64; ValueError unless they are integers of at least 2."""
    keys = np.asarray(n, np.float64)
    whole = np.isfinite(keys) & (keys >= 2) & (keys == np.floor(keys))
    require("n", keys, whole, "the number of keys is an integer of at least 2")
    return keys
