r"""Temperatures at which softmax rows over cosines have a given information.

Cosines of uniform directions in :math:`R^d` give the entropy drop of the von Mises-Fisher law, at
:math:`\kappa = 1/\tau` (:mod:`~acutance.theory.von_mises_fisher`).

Sources: Su (2023), https://kexue.fm/archives/9593; Mardia & Jupp (2000), Directional Statistics,
section 9.3 (von Mises-Fisher); NIST DLMF, sections 10.40 and 10.41 (Bessel functions).
"""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from acutance.theory.arguments import Array, checked_dimension, pointwise, require
from acutance.theory.cosine import ATANH_TAIL, best_count, whole_keys
from acutance.theory.von_mises_fisher import horner, von_mises_fisher

__all__ = ["tau_for_information"]

Setting = Literal["free", "simplex", "random_keys"]
_EPS = float(np.finfo(np.float64).eps)


def tau_for_information(
    n: ArrayLike,
    fraction: ArrayLike,
    *,
    setting: Setting = "free",
    d: ArrayLike | None = None,
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
    keys, share = whole_keys(n), np.asarray(fraction, np.float64)
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
            best, _ = best_count(np.asarray(count), np.asarray(span))
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
        frozen_from = _root(lambda kappa: von_mises_fisher(d, kappa)[2] / log_others - 1)
        slope = von_mises_fisher(d, frozen_from)[1] / frozen_from

    def at(kappa: float) -> tuple[float, float]:
        if kappa < frozen_from:
            lift, below, drop = von_mises_fisher(d, kappa)
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
    return 2 * t * t * (1 + (1 + t) * t * horner(ATANH_TAIL, t * t)) / (1 - t)
