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

*The temperature for a given information* is solved for over such rows, over a simplex, and over
random keys: cosines of uniform directions in :math:`R^d` give the entropy drop of the von
Mises-Fisher law, at :math:`\kappa = 1/\tau`: the law of such directions weighted by
:math:`e^{\kappa \cos\theta}`. Bessel functions are scaled by their growth, and what grows cancels
by hand.

Each formula is evaluated in a form that keeps its relative accuracy: differences that vanish with
A are series.

Sources: Su (2023), https://kexue.fm/archives/9593; Mardia & Jupp (2000), Directional Statistics,
section 9.3 (von Mises-Fisher); NIST DLMF, sections 10.40 and 10.41 (Bessel functions).
"""

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bernoulli

from acutance.theory.arguments import Array, checked, checked_dimension, pointwise, require, result

__all__ = [
    "cosine_best_count",
    "cosine_entropy_lower_bound",
    "information_range_limit",
    "tau_for_information",
    "vmf_entropy_drop",
]

_EPS = float(np.finfo(np.float64).eps)
#: A / (1 - e^-A) - 1 = A/2 + A²/12 - A⁴/720 + ..., enough terms for A <= 1.
_ODD_HALF = [0.0, 0.5] + [bernoulli(20)[k] / math.factorial(k) for k in range(2, 21)]
#: (atanh t - t) / t³ = 1/3 + t²/5 + ..., in powers of t², enough terms for |t| <= 0.21.
_ATANH_TAIL = [1 / (2 * j + 3) for j in range(13)]
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
    span, keys = _span(tau, width), _whole_keys(n)
    tau, width = np.asarray(tau, np.float64), np.asarray(width, np.float64)
    keys, span, tau, width = np.broadcast_arrays(keys, span, tau, width)
    best, uncertain = _best_count(keys, span)
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
    span, keys = _span(tau, width), _whole_keys(n)
    keys, span = np.broadcast_arrays(keys, span)
    count, _ = _best_count(keys, span)  # where that is unsure, both counts give the same entropy
    rest = (keys - count) * np.exp(-span)
    entropy = np.where(count > 1, np.log(count + rest), np.log1p(rest))
    entropy += span * (rest / (count + rest))
    return result(entropy)


def _best_count(keys: Array, span: Array) -> tuple[Array, NDArray[np.bool_]]:
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
    near = 2 * t * t * (1 / (1 - t) - t * _series(_ATANH_TAIL, t * t))
    return np.where(b < 0.5, near, b - np.log1p(b))


def _span(temperature: ArrayLike, extent: ArrayLike) -> Array:
    must = "must be finite and greater than 0"
    tau = checked("tau", temperature, f"the temperature {must}", above=0.0)
    width = checked("width", extent, f"the width {must}", above=0.0)
    with np.errstate(over="ignore"):
        return np.clip(np.asarray(width / tau, np.float64), 1e-300, 1e300)


def _whole_keys(n: ArrayLike) -> Array:
    """Numbers of keys as float64; ValueError unless they are integers of at least 2."""
    keys = np.asarray(n, np.float64)
    whole = np.isfinite(keys) & (keys >= 2) & (keys == np.floor(keys))
    require("n", keys, whole, "the number of keys is an integer of at least 2")
    return keys


Setting = Literal["free", "simplex", "random_keys"]


def tau_for_information(
    n: ArrayLike, fraction: ArrayLike, *, setting: Setting = "free", d: ArrayLike | None = None
) -> float | Array:
    r"""Temperature at which a row of cosine logits can carry a fraction of log n.

    .. math:: \frac{\log n - H(\tau)}{\log n} = \mathrm{fraction}

    What H is depends on the keys:

    * ``"free"``: the least entropy over all cosines in [-1, 1], with the best count of keys at
      the top (``cosine_best_count``; several at moderate fractions). One row can have it.
    * ``"simplex"``: one key at cosine 1, the others at -1/(n - 1). That is the most that every
      row of n queries aligned with their own keys can have at once, and needs d >= n - 1.
    * ``"random_keys"``: one key at cosine 1, the others in uniform directions of :math:`R^d`. The
      others enter by their average, :math:`Z = e^\kappa + (n-1)\, {}_0F_1(;d/2;\kappa^2/4)` with
      :math:`\kappa = 1/\tau`, and by their largest typical cosine once that average is carried
      by fewer than one key. An estimate, fit for many keys; the two others are exact.

    Args:
        n: Number of keys, an integer n >= 2.
        fraction: Information as a fraction of log n, 0 < fraction < 1.
        setting: ``"free"``, ``"simplex"`` or ``"random_keys"``.
        d: Dimension of queries and keys, d >= 2, for ``"random_keys"`` and only there.

    Returns:
        tau, float64 of the broadcast shape; a float for scalars. It tends to infinity as
        fraction tends to 0, and to 0 as fraction tends to 1.

    Raises:
        ValueError: If an argument is outside its domain, d is missing or d is not used.

    Example:
        >>> tau_for_information(256, 0.9)
        0.24086598760663
        >>> tau_for_information(256, [0.5, 0.9], setting="simplex")
        array([0.16652068, 0.12090528])
        >>> tau_for_information(65536, 0.9, setting="random_keys", d=128)
        0.069818793231

    Source:
        Su (2023), https://kexue.fm/archives/9593, for the free setting.
    """
    keys, share = _whole_keys(n), np.asarray(fraction, np.float64)
    require(
        "fraction", share, (share > 0) & (share < 1), "the fraction must be above 0 and below 1"
    )
    if setting not in ("free", "simplex", "random_keys"):
        raise ValueError(
            f'setting: must be one of "free", "simplex" and "random_keys", got setting={setting!r}'
        )
    if (d is not None) != (setting == "random_keys"):
        raise ValueError(
            f'd: can be used only with setting="random_keys", got d={d!r} and setting="{setting}"'
        )
    dimension = checked_dimension(2.0 if d is None else d)
    keys, share, dimension = np.broadcast_arrays(keys, share, dimension)

    def point(count: float, part: float, dim: float) -> float:
        if setting == "random_keys":
            return 1 / _solve(_match_among_random(count, dim), count, part)
        if setting == "simplex":
            span = _solve(lambda span: _two_level(count, 1, span), count, part)
            return count / (count - 1) / span

        def free(span: float) -> tuple[float, float]:
            best, _ = _best_count(np.asarray(count), np.asarray(span))
            return _two_level(count, float(best), span)

        return 2 / _solve(free, count, part)

    return pointwise(point, keys, share, dimension)


def _two_level(n: float, count: float, span: float) -> tuple[float, float]:
    """Information log n - H and entropy H, in nats, of a row with two values of the logits.

    ``count`` logits are ``span`` above the other n - count.
    """
    rest = (n - count) * math.exp(-min(span, 800.0))
    logarithm = math.log1p(rest) if count == 1 else math.log(count + rest)
    information = _bernoulli_information(count / n, span)[0]
    return information, logarithm + span * (rest / (count + rest))


def _bernoulli_information(share: float, lift: float) -> tuple[float, float]:
    """Relative entropy of two coins, in nats: probability P of one side, against x = ``share``.

    The odds of P are e^lift times those of x. Also returns 1 - P. The relative entropy is computed
    as x h(P/x - 1) + (1-x) h((1-P)/(1-x) - 1), h(u) = (1 + u) log(1 + u) - u: nothing cancels.
    """
    small = math.exp(-min(lift, 800.0))
    total = share + (1 - share) * small
    rise = -math.expm1(-lift) / total
    parts = share * _entropy_excess((1 - share) * rise)
    parts += (1 - share) * _entropy_excess(max(-share * rise, -1.0))
    return parts, (1 - share) * small / total


def _match_among_random(n: float, d: float) -> Callable[[float], tuple[float, float]]:
    """A function of the scale kappa: information and entropy of a row with one perfect match.

    The match has cosine 1, the other n - 1 keys random directions of R^d. Their part of the
    normaliser is its average while their entropy log(n-1) - D is positive; at higher kappa its
    logarithm grows linearly, as in the random energy model.
    """
    log_others = math.log(n - 1)
    frozen_from, slope = 0.0, 1.0  # with one other key
    if n > 2:
        frozen_from = _root(lambda kappa: _von_mises_fisher(d, kappa)[2] / log_others - 1)
        slope = _von_mises_fisher(d, frozen_from)[1] / frozen_from

    def at(kappa: float) -> tuple[float, float]:
        if kappa < frozen_from:
            lift, below, drop = _von_mises_fisher(d, kappa)
        else:
            lift, below, drop = log_others + slope * kappa, slope * kappa, log_others
        information, rest = _bernoulli_information(1 / n, lift)
        odds = log_others - lift
        logarithm = odds + math.log1p(math.exp(-odds)) if odds > 0 else math.log1p(math.exp(odds))
        return information + rest * drop, logarithm + rest * below

    return at


def _solve(row: Callable[[float], tuple[float, float]], n: float, fraction: float) -> float:
    """Scale at which a row's information log n − H is ``fraction`` of log n.

    ``row`` returns information and entropy at a scale.
    """
    log_n = math.log(n)
    if fraction <= 0.5:
        return _root(lambda scale: row(scale)[0] / (fraction * log_n) - 1)
    return _root(lambda scale: 1 - row(scale)[1] / ((1 - fraction) * log_n))


def _root(rising: Callable[[float], float]) -> float:
    """Positive root of an increasing function.

    By bisection: SciPy's optimisers take longer to import than fifty evaluations.
    """
    low = high = 1.0
    while rising(high) < 0:
        low, high = high, 8 * high
    while rising(low) > 0:
        low, high = low / 8, low
    while high - low > 4 * _EPS * low:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return 0.5 * (low + high)


def _entropy_excess(u: float) -> float:
    """(1 + u) log(1 + u) - u for u >= -1, with t = u / (2 + u) where it would cancel."""
    if u <= -1:
        return 1.0
    t = u / (2 + u)
    if abs(t) > 0.2:
        return (1 + u) * math.log1p(u) - u
    return 2 * t * t * (1 + (1 + t) * t * _horner(_ATANH_TAIL, t * t)) / (1 - t)


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
        lambda dim, k: _von_mises_fisher(dim, k)[2], *np.broadcast_arrays(dimension, scale)
    )


def _von_mises_fisher(d: float, kappa: float) -> tuple[float, float, float]:
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

    The same three numbers as ``_von_mises_fisher``; ``order`` is d/2 − 1.
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
        first = _horner(value, p)
        u = u / order + first
        w = w / order + 0.5 * first + p * _horner(slope, p)
    correction = (z / s) ** 2 * w / u
    stirling = _horner(_STIRLING, 1 / (order * order)) / order
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


def _horner(coefficients: list[float], x: float) -> float:
    """A polynomial of one number, its coefficients in ascending order."""
    total = 0.0
    for c in reversed(coefficients):
        total = total * x + c
    return total
