r"""Scales of the logits that give a row what is wanted: a match its weight, a row its entropy.

A match above a narrow bulk needs a scale that grows as log n; Gaussian logits keep the entropy of
the population formula with one that grows as the root of log n. For measured scores, with N(t) the
number of keys within t of the row's maximum, :math:`\Lambda = \sup_t \log N(t) / t` is the scale
above which the maximum stands alone.

For independent scores the expected entropy of :math:`\mathrm{softmax}(\gamma s)` falls strictly
with :math:`\gamma`, from log n to 0, and the expected collision probability rises from 1/n to 1:
row by row the derivatives are :math:`-\gamma \mathrm{Var}_p(s)` and :math:`2 \mathrm{Cov}_p(p, s)`.
So each target has one scale. It is found by bracketing and Brent's method on the exact finite-n
expectations; the growth laws are what it tends to.

*Which scale keeps a few keys in front?* Let F be the distribution function of independent logits
and :math:`b_n = F^{-1}(1 - 1/n)`, about where the largest of n lies. The gaps between the largest
logits are about one over the hazard rate :math:`h = f / (1 - F)` at :math:`b_n`, so

.. math:: \lambda^*(n) = c \, h(b_n)

keeps the number of keys that share the weight. How fast that grows is a matter of the tail alone:
not at all (exponential), as a power of log n (lighter tails) or as a power of n (logits with an
upper end). A row with one match above a narrow bulk has log n.

Sources: Derrida (1981), Phys. Rev. B 24, 2613 (planted match, entropy along the scale); Su (2021),
https://kexue.fm/archives/8823 (why a scale that grows with n); Hayase & Karakida (2026),
arXiv:2605.12697 (the critical scale); Brent (1973), Algorithms for Minimization without
Derivatives, chapter 4.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, betaln, entr, erfcx, expit, ndtri

from acutance.theory.arguments import (
    Array,
    checked,
    checked_dimension,
    checked_keys,
    pointwise,
    require,
    result,
)
from acutance.theory.expected import expected_collision, expected_entropy
from acutance.theory.families import Family, as_family, name_and_parameter
from acutance.theory.quadrature import grid

__all__ = [
    "ScalingLaw",
    "critical_scale",
    "gap_count",
    "gauss_hazard_scale",
    "gauss_invariant_scale",
    "hazard_scale",
    "match_dimension",
    "needle_scale",
    "needle_scale_for_entropy",
    "retrieval_capacity",
    "scale_for_effective_keys",
    "scale_for_entropy",
    "scale_for_information",
    "scaling_exponent",
]

_EPS = float(np.finfo(np.float64).eps)


def needle_scale(
    n: ArrayLike, gap: ArrayLike, sigma: ArrayLike = 0.0, mass: ArrayLike = 0.5
) -> float | Array:
    r"""Scale at which one key, ``gap`` above the mean of the others, holds a given weight.

    .. math:: \lambda = \frac{2c}{\Delta + \sqrt{\Delta^2 - 2 \sigma^2 c}}, \qquad
              c = \log(n - 1) + \log\frac{p}{1 - p}

    with Δ = ``gap`` and p = ``mass``. The other n - 1 logits are N(0, σ²); their sum of
    exponentials is replaced by its mean, (n - 1) exp(λ²σ²/2). For σ = 0 the weight is exact, and λ
    grows like log n. For σ > 0 two scales solve the equation; the smaller is returned.

    Args:
        n: Number of keys, n >= 2; it need not be an integer.
        gap: Δ, the match's logit less the mean of the others, gap > 0.
        sigma: Standard deviation of the other logits, sigma >= 0.
        mass: Weight p of the match, 1/n <= mass < 1; 1/n is what it has at scale 0.

    Returns:
        λ, in one over the unit of ``gap``; float64 of the broadcast shape, a float for scalars.

    Raises:
        ValueError: If an argument is outside its domain, or the bulk is too wide:
            gap < sigma sqrt(2 c), where no scale gives the match that weight.

    Example:
        >>> needle_scale(256, 1.0)  # log 255
        5.54126354516
        >>> needle_scale(4096, 8.0, [0.0, 1.0], 0.9)
        array([1.31434332, 1.44481069])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613, with a planted level.
    """
    keys, weight = checked_keys("n", n), np.asarray(mass, np.float64)
    top = checked("gap", gap, "the gap must be finite and greater than 0", above=0.0)
    spread = checked("sigma", sigma, "the standard deviation must be finite and at least 0", 0.0)
    keys, top, spread, weight = np.broadcast_arrays(keys, top, spread, weight)
    c = _match_logit(keys, weight)
    room = 1 - 2 * c * (spread / top) ** 2
    require(
        "gap",
        top,
        room >= -8 * _EPS,
        "no scale gives the match its mass: the gap is at least sigma"
        " sqrt(2 (log(n - 1) + logit mass))",
    )
    return result(2 * c / (top * (1 + np.sqrt(np.maximum(room, 0.0)))))


def needle_scale_for_entropy(
    n: ArrayLike, entropy: ArrayLike, gap: ArrayLike = 1.0
) -> float | Array:
    r"""Scale at which a row with one key above equal others has a given entropy.

    .. math:: \lambda = \frac{1}{\Delta} \left( \log(n - 1) + \log\frac{p}{1 - p} \right),
              \qquad H = h(p) + (1 - p) \log(n - 1)

    with Δ = ``gap`` and h(p) = -p log p - (1 - p) log(1 - p). The top key has weight p, the others
    share the rest evenly. So a constant entropy needs a p that rises towards 1 as n grows: for
    large n the scale exceeds log n by about log log n.

    Args:
        n: Number of keys, n >= 2; it need not be an integer.
        entropy: H in nats, 0 < H <= log n.
        gap: Δ, the top logit less that of the others, gap > 0.

    Returns:
        λ, in one over the unit of ``gap``; float64 of the broadcast shape, a float for scalars.

    Raises:
        ValueError: If an argument is outside its domain.

    Example:
        The entropy of half of the weight on one of 512 keys, and what keeps it at 65,536; a factor
        of log n alone would let it rise to 6.25 nat:

        >>> needle_scale_for_entropy([512, 65536], 3.81133197566)
        array([ 6.23636959, 11.98856888])

    Source:
        The entropy of a two-level row; the law it is compared with is
        https://kexue.fm/archives/8823.
    """
    keys, nats = checked_keys("n", n), np.asarray(entropy, np.float64)
    top = checked("gap", gap, "the gap must be finite and greater than 0", above=0.0)
    keys, nats, top = np.broadcast_arrays(keys, nats, top)
    from scipy.optimize import brentq  # takes its time to load

    most = np.log(keys)
    require("entropy", nats, (nats > 0) & (nats <= most * (1 + _EPS)), "it must be in (0, log n]")

    def logit(count: float, target: float) -> float:
        others = np.log(count - 1)

        def excess(x: float) -> float:  # x is the logit of p
            p, q = expit(x), expit(-x)
            return float(entr(p) + entr(q) + q * others - target)

        if excess(-others) <= 0.0:
            return -float(others)  # even weights
        return float(brentq(excess, -others, 745.0, xtol=1e-13, rtol=4 * _EPS))

    return result(np.asarray(pointwise(logit, keys, nats) + np.log(keys - 1)) / top)


def gauss_invariant_scale(n: ArrayLike, n0: ArrayLike, gamma0: ArrayLike = 1.0) -> float | Array:
    r"""Scale that keeps the entropy of Gaussian logits at n keys what it was at n0.

    .. math:: \gamma = \sqrt{\gamma_0^2 + 2 \log(n / n_0)}

    which keeps the population formula H = log n - γ²/2. At a finite n the exact scale is a few
    per cent above, once γ is past half of sqrt(2 log n).

    Args:
        n: Number of keys, n >= 2; it need not be an integer.
        n0: Number of keys at which gamma0 is right, n0 >= 2.
        gamma0: Standard deviation of the logits there, gamma0 >= 0.

    Returns:
        γ, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If an argument is outside its domain, or n is so small that log n is below
            the entropy to keep: n < n0 exp(-gamma0²/2).

    Example:
        >>> gauss_invariant_scale(2048, 512, 1.0)
        1.942315299389
        >>> gauss_invariant_scale([512, 8192, 65536], 512, 1.0)
        array([1.        , 2.55835444, 3.27170606])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613, for the entropy.
    """
    keys, start = checked_keys("n", n), checked_keys("n0", n0)
    first = checked("gamma0", gamma0, "the standard deviation must be finite and at least 0", 0.0)
    keys, start, first = np.broadcast_arrays(keys, start, first)
    near = np.abs(keys - start) < 0.5 * start
    log_ratio = np.where(
        near, np.log1p(np.where(near, keys - start, 0.0) / start), np.log(keys) - np.log(start)
    )
    step = np.sqrt(2 * np.abs(log_ratio))
    require(
        "n",
        keys,
        (log_ratio >= 0) | (first >= step),
        "log n must be at least the entropy to keep, n >= n0 exp(-gamma0²/2)",
    )
    shrunk = np.sqrt(np.maximum(first - step, 0.0)) * np.sqrt(first + step)
    return result(np.where(log_ratio >= 0, np.hypot(first, step), shrunk))


def match_dimension(n: ArrayLike, mass: ArrayLike = 0.5) -> float | Array:
    r"""Dimension from which a perfect match can hold a given weight among n random keys.

    .. math:: d \ge 2 \left( \log(n - 1) + \log \frac{p}{1 - p} \right)

    The match has cosine 1, the other n - 1 keys cosines N(0, 1/d). Their average exponential at
    scale λ is exp(λ²/2d), so the match has weight p where λ - λ²/2d = log(n-1) + logit p. The left
    side is at most d/2, at λ = d. ``needle_scale`` with gap 1 and sigma d^(-1/2) gives the scale.

    Args:
        n: Number of keys, n >= 2; it need not be an integer.
        mass: Weight p of the match, 1/n <= mass < 1; 1/n is what it has at scale 0.

    Returns:
        The least d, not rounded, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some n is below 2 or not finite, or some mass is outside [1/n, 1).

    Example:
        >>> match_dimension(512)
        12.4727
        >>> match_dimension([4096, 65536], 0.9)
        array([21.02949315, 26.57512841])

    Source:
        The planted row of the random energy model, Derrida (1981), Phys. Rev. B 24, 2613; the
        growth with log n is that of Johnson & Lindenstrauss, see https://kexue.fm/archives/9588.
    """
    keys, weight = checked_keys("n", n), np.asarray(mass, np.float64)
    return result(2 * _match_logit(*np.broadcast_arrays(keys, weight)))


def _match_logit(keys: Array, weight: Array) -> Array:
    """log(n - 1) + log(p / (1 - p)), for a match of the weight p among n keys; checks p."""
    require(
        "mass", weight, (weight * keys >= 1 - _EPS) & (weight < 1), "the mass must be in [1/n, 1)"
    )
    return np.asarray(np.log1p(np.maximum(keys * weight - 1, 0.0) / (1 - weight)))


def retrieval_capacity(d: ArrayLike, mass: ArrayLike = 0.5) -> float | Array:
    r"""Number of keys among which scaled dot products still give a perfect match its weight.

    .. math:: \log(n - 1) \le \sqrt{d} - \tfrac12 - \log \frac{p}{1 - p}

    Query and match are the same vector of squared length d, so the match's logit is sqrt(d) at
    the usual scale 1/sqrt(d); the other keys are N(0, I), so their logits are N(0, 1), with average
    exponential sqrt(e).

    Args:
        d: Dimension of queries and keys, d >= 2.
        mass: Weight p of the match, 0 < mass < 1.

    Returns:
        The largest n, the match included, not rounded; float64 of the broadcast shape, a float
        for scalars. Infinite above 1e308.

    Raises:
        ValueError: If some d is below 2 or not finite, or some mass is outside (0, 1).

    Example:
        The match and 1808 others:

        >>> retrieval_capacity(64)
        1809.04
        >>> retrieval_capacity(256)
        5389699.48

    Source:
        The planted row of the random energy model, Derrida (1981), Phys. Rev. B 24, 2613.
    """
    dimension, weight = checked_dimension(d), np.asarray(mass, np.float64)
    require("mass", weight, (weight > 0) & (weight < 1), "the mass must be between 0 and 1")
    with np.errstate(over="ignore"):
        others = np.exp(np.sqrt(dimension) - 0.5) * ((1 - weight) / weight)
    return result(1 + others)


_BLOCK = 1 << 20  # scores that are in memory as float64 at a time, or one row


def gap_count(scores: ArrayLike, t: ArrayLike) -> float | Array:
    r"""Number of keys within t of the row's maximum.

    .. math:: N(t) = \#\{j : \max_i s_i - s_j \le t\}

    The maximum counts, so N(0) is the number of keys tied for it. The difference is taken in
    float64, whatever the scores' own precision.

    Args:
        scores: Rows of scores, shape (..., n); -inf where a key is masked, which never counts.
        t: Gaps t >= 0 in the unit of the scores, any shape; infinity counts the visible keys.

    Returns:
        N(t) as float64, of the shape of the rows followed by that of ``t``; a float for one row
        and one t. It is 0 for a row without a visible key.

    Raises:
        ValueError: If some t is negative or NaN, some score is NaN or +inf, or rows have no keys.

    Example:
        >>> gap_count([3.0, 2.5, 0.0, -float("inf")], [0.0, 0.5, 10.0])
        array([1., 2., 3.])

    Source:
        Hayase & Karakida (2026), arXiv:2605.12697.
    """
    rows, reach = np.asarray(scores), np.asarray(t, np.float64)
    require("t", reach, reach >= 0, "the gap must be at least 0")
    counts = np.empty((math.prod(rows.shape[:-1]), reach.size))
    for block, gaps in _sorted_gaps(rows):
        counts[block] = [
            np.searchsorted(row[row < np.inf], reach.ravel(), side="right") for row in gaps
        ]
    return result(counts.reshape(rows.shape[:-1] + reach.shape))


def critical_scale(scores: ArrayLike) -> float | Array:
    r"""Smallest scale λ at which at most exp(λt) keys lie within any gap t of the row's maximum.

    .. math:: \Lambda = \sup_{t > 0} \frac{\log N(t)}{t} = \max_{j \ge 2} \frac{\log j}{g_{(j)}}

    with N the ``gap_count`` and :math:`g_{(1)} = 0 \le g_{(2)} \le \dots` the gaps to the maximum,
    sorted. Between gaps N is constant and t grows, so the supremum is attained at a gap. At a scale
    λ of at least Λ every count is bounded, :math:`N(t) \le e^{\lambda t}`; below Λ some N(t) keys
    together outweigh the maximum: each has at least exp(-λt) times its weight.

    Args:
        scores: Rows of scores, shape (..., n); -inf for masked keys, which are ignored.

    Returns:
        Λ in one over the unit of the scores, shape (...); a float for one row. It is infinity if
        two keys share the maximum, N(0) > 1, since no scale separates them; scores in 16 bits
        often tie. It is 0 for a row with one visible key and NaN for a row with none.

    Raises:
        ValueError: If some score is NaN or +inf, or rows have no keys.

    Example:
        One key 2 above seven equal ones needs log 8 / 2; a second key close to it needs more:

        >>> critical_scale([2.0, 0, 0, 0, 0, 0, 0, 0])
        1.03972077
        >>> critical_scale([[3.0, 2.5, 0.0], [3.0, 3.0, 0.0]])
        array([1.38629436,        inf])

    Source:
        Hayase & Karakida (2026), arXiv:2605.12697.
    """
    rows = np.asarray(scores)
    scale = np.empty(math.prod(rows.shape[:-1]))
    for block, gaps in _sorted_gaps(rows):
        ranks = np.log(np.arange(1.0, gaps.shape[-1] + 1))
        with np.errstate(divide="ignore"):
            ratio = ranks[1:] / gaps[:, 1:]
        best = ratio.max(axis=-1, initial=0.0)
        scale[block] = np.where(np.isinf(gaps[:, 0]), np.nan, best)
    return result(scale.reshape(rows.shape[:-1]))


def _sorted_gaps(rows: NDArray[Any]) -> Iterator[tuple[slice, Array]]:
    """Yield, for blocks of the flattened rows, their slice and gaps to the maximum, ascending.

    A masked key has gap infinity; so have all keys of a row without a visible one.
    """
    if rows.ndim == 0 or rows.shape[-1] == 0:
        raise ValueError(
            f"scores: must be rows of at least one key, shape (..., n), got {rows.shape}"
        )
    rows = rows[None] if rows.ndim == 1 else rows
    lead = rows.shape[:-1]
    count, step = math.prod(lead), max(1, _BLOCK // rows.shape[-1])
    for first in range(0, count, step):
        block = slice(first, min(first + step, count))
        gaps = rows[np.unravel_index(np.arange(block.start, block.stop), lead)].astype(np.float64)
        top = gaps.max(axis=-1, keepdims=True)
        if np.isnan(top).any() or (top == np.inf).any():
            raise ValueError(
                "scores: must be finite, or -inf where a key is masked, got NaN or +inf"
            )
        np.subtract(np.where(np.isinf(top), 0.0, top), gaps, out=gaps)
        gaps.sort(axis=-1)
        yield block, gaps


_STEP = 1.5  # of the logarithm of the scale, to find a bracket, at first
_REACH = 400.0  # its distance from that of one over the quartiles' distance that is tried
_LOG_MOST = 700.0  # for float64 to hold the scale


def scale_for_entropy(
    n: ArrayLike, entropy: ArrayLike, family: Any = "gaussian", **parameter: float
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
    return _scale_for("entropy", n, entropy, family, parameter)


def scale_for_effective_keys(
    n: ArrayLike, effective_keys: ArrayLike, family: Any = "gaussian", **parameter: float
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
    return _scale_for("effective_keys", n, effective_keys, family, parameter)


def scale_for_information(
    n: ArrayLike, fraction: ArrayLike, family: Any = "gaussian", **parameter: float
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
    return _scale_for("fraction", n, fraction, family, parameter)


def _scale_for(
    name: str, n: ArrayLike, target: ArrayLike, family: Any, parameter: dict[str, float]
) -> float | Array:
    """Scale at which rows reach a target, named as the argument of the public function is."""
    law = as_family(family, **parameter)
    keys = checked("n", n, "the number of keys must be finite and at least 2", 2.0)

    def point(count: float, aim: float) -> float:
        log_n = math.log(count)
        sharp, even = "(one key has all the weight)", "(uniform weights)"
        least, most, rule = {
            "entropy": (0.0, log_n, f"0 {sharp} and log n = {log_n:.6g} {even}"),
            "effective_keys": (1.0, count, f"1 {sharp} and n = {count:g} {even}"),
            "fraction": (0.0, 1.0, f"0 {even} and 1 {sharp}"),
        }[name]
        if not least < aim < most:
            raise ValueError(f"{name}: must be strictly between {rule}, got {name}={aim:g}")
        if name == "effective_keys":
            return _root(lambda at: 1 / (aim * float(expected_collision(count, at, law))), law)
        nats = aim if name == "entropy" else (1 - aim) * log_n
        return _root(lambda at: float(expected_entropy(count, at, law)) / nats, law)

    return pointwise(point, *np.broadcast_arrays(keys, np.asarray(target, np.float64)))


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


Target = Literal["effective_keys", "entropy_fraction"]


@dataclass(frozen=True)
class ScalingLaw:
    """Growth of the logit scale with the number of keys n.

    Attributes:
        law: The growth as text, such as ``"(log n)^{1/2}"``.
        exponent: The power of ``variable``; 0 where the scale does not grow.
        variable: ``"log n"`` or ``"n"``.
        constant: What multiplies the law, for n large, in one over the unit of the logits.
        condition: For which logits, and what it assumes.
    """

    law: str
    exponent: float
    variable: Literal["log n", "n"]
    constant: float
    condition: str


def scaling_exponent(
    family: str | Family,
    target: Target = "effective_keys",
    *,
    n: float | None = None,
    gap: float = 1.0,
    sigma: float = 0.0,
    d: float | None = None,
    rho: float | None = None,
    a: float | None = None,
    effective_keys: float = 2.0,
    fraction: float = 0.5,
) -> ScalingLaw:
    r"""Growth law of the scale that keeps attention as focused when n grows.

    ================== ============================== ==================================
    family             ``"effective_keys"``           ``"entropy_fraction"``, H = c log n
    ================== ============================== ==================================
    two_level, planted log n / Δ                      log n / Δ
    gaussian           sqrt(2 log n) / m              sqrt(2 (1-c) log n)
    stretched, ρ >= 1  (ρ/m) (log n)^(1 - 1/ρ)        ρ ((1-c) log n)^(1 - 1/ρ)
    cosine, log n ≪ d  sqrt(2 d log n) / m            sqrt(2 (1-c) d log n)
    cosine, log n ≫ d  n^(1/a), a = (d-1)/2           n^((1-c)/a)
    uniform on [-1, 1] n                              (e/2) n^(1-c)
    exponential tail   1/m                            1
    pareto, a          n^(-1/a) log n                 n^(-1/a) log n
    ================== ============================== ==================================

    Here m = 1 - 1/``effective_keys`` and c = ``fraction``. The exponential tail is that of
    ``"exponential"``, ``"laplace"``, ``"gumbel"`` and ``"logistic"``. Laws are for n large, and
    measured exponents approach the asymptotic ones slowly: for Gaussian logits between 2^10 and
    2^20 keys the power of log n is 0.61, not 1/2.

    Args:
        family: A family of the table, by name or as a ``Family`` of ``acutance.theory.families``.
        target: ``"effective_keys"`` keeps E Σp² at 1/``effective_keys``, so O(1) keys share the
            weight; ``"entropy_fraction"`` keeps the entropy at ``fraction`` of log n.
        n: For ``"cosine"``, the number of keys about which the law is wanted: log n < d/2 takes the
            law for log n ≪ d. None means n to infinity at fixed d.
        gap: Δ of ``"two_level"`` and ``"planted"``, gap > 0.
        sigma: Standard deviation of the other logits of ``"planted"``, sigma >= 0.
        d: Dimension for ``"cosine"``, d >= 2.
        rho: Exponent for ``"stretched"``, rho >= 1.
        a: Tail index for ``"pareto"``, a > 0.
        effective_keys: 1/E Σp² to keep, above 1.
        fraction: H / log n to keep, 0 < fraction < 1.

    Returns:
        The law, its exponent, variable, constant and condition.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If the family or target is unknown, its parameter is missing or another one is
            given, or an argument is outside its domain.

    Example:
        >>> law = scaling_exponent("gaussian")
        >>> law.law, law.exponent, law.variable, law.constant
        ('(log n)^{1/2}', 0.5, 'log n', 2.82842712)
        >>> scaling_exponent("cosine", "entropy_fraction", d=8).law
        'n^{1/7}'

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613 (Gaussian); Resnick (1987), Extreme Values, Regular
        Variation and Point Processes, chapter 4 (the largest logits as a Poisson process, from
        which the constants of bounded logits are computed).
    """
    if target not in ("effective_keys", "entropy_fraction"):
        raise ValueError(
            f'target: must be one of "effective_keys" and "entropy_fraction", got target={target!r}'
        )
    name, values = _family_parameter(family, _WITH_LAWS, {"d": d, "rho": rho, "a": a})
    if name is None:
        raise ValueError(
            f"family: no closed form is known for the SciPy distribution {as_family(family)!r}; "
            "compute the scale at each n with hazard_scale(family, n)"
        )
    parameter = float(values)
    heavy_tail = name == "stretched" and parameter < 1
    for argument, value, holds, rule in (
        ("gap", gap, 0 < gap < np.inf, "the gap must be finite and greater than 0"),
        ("sigma", sigma, 0 <= sigma < np.inf, "the standard deviation must be finite, at least 0"),
        ("rho", parameter, not heavy_tail, "the exponent must be at least 1"),
        ("effective_keys", effective_keys, 1 < effective_keys < np.inf, "the number exceeds 1"),
        ("fraction", fraction, 0 < fraction < 1, "the fraction must be above 0 and below 1"),
        ("n", n, n is None or 2 <= n < np.inf, "the number of keys must be at least 2"),
    ):
        if not holds:
            raise ValueError(f"{argument}: {rule}, got {argument}={value}")
    few = target == "effective_keys"  # rather than a fraction of log n
    inverse_m, root = effective_keys / (effective_keys - 1), math.sqrt(1 - fraction)
    if name == "two_level":
        weight = "its weight" if few else "its weight at 1 - c"
        condition = (
            f"One key a fixed gap above n - 1 equal ones: log n / gap keeps {weight}, and the "
            "entropy is then (1 - weight) log n."
        )
        return _law(1.0, "log n", 1 / gap, condition)
    if name == "planted":
        condition = (
            "One key a fixed gap above a bulk N(0, sigma²): log n / gap while the gap is far above"
            " sigma sqrt(2 log n), below which no scale works; needle_scale has the exact scale"
        )
        if sigma > 0:
            condition += f" (sigma = {sigma:g}: up to log n of {(gap / sigma) ** 2 / 2:g})"
        return _law(1.0, "log n", 1 / gap, condition + ".")
    if name == "gaussian":
        condition = "Independent Gaussian logits of standard deviation 1."
        return _law(0.5, "log n", math.sqrt(2) * (inverse_m if few else root), condition)
    if name == "stretched":
        power = 1 - 1 / parameter
        constant = parameter * (inverse_m if few else (1 - fraction) ** power)
        condition = f"Independent logits with upper tail exp(-x^{parameter:g})."
        return _law(power, "log n", constant, condition)
    if name == "pareto":
        rare = -math.log1p(-1 / effective_keys) if few else -math.log(fraction)
        power = -1 / parameter
        return ScalingLaw(
            f"{_power('n', power)} log n",
            power,
            "n",
            rare**-power,
            f"Independent logits with upper tail x^(-{parameter:g}): rows are either one-hot or "
            "flat and only the share of each is kept, so no scale makes every row alike.",
        )
    if name in _EXPONENTIAL:
        condition = "Independent logits with upper tail exp(-x): "
        if few:
            condition += "a constant scale keeps the same few keys in front."
        else:
            condition += "the scale falls towards this constant, where the row freezes."
        return _law(0.0, "log n", inverse_m if few else 1.0, condition)
    if name == "cosine" and n is not None and math.log(n) < parameter / 2:
        condition = (
            f"Cosines of random directions while log n is far below d = {parameter:g}, as for "
            "Gaussian logits of deviation 1/sqrt(d); closer to d the power is between 1/2 and 1."
        )
        constant = math.sqrt(2 * parameter) * (inverse_m if few else root)
        return _law(0.5, "log n", constant, condition)
    # An upper end, with a density about it of K gap^(edge - 1), K given by its logarithm.
    edge, log_density = 1.0, math.log(0.5)
    condition = "Independent logits, uniform on [-1, 1]: bounded, and yet not log n."
    if name == "cosine":
        edge = (parameter - 1) / 2
        log_density = (edge - 1) * math.log(2) + math.lgamma(parameter / 2) - math.lgamma(edge)
        log_density -= math.log(math.pi) / 2
        condition = (
            f"Cosines of random directions once log n is far above d = {parameter:g}, with a "
            "density as (1 - cos)^((d - 3)/2) at the upper end."
        )
    if few:  # c(edge) edge / g_n, with n K g_n^edge / edge = 1
        rate = math.exp((log_density - math.log(edge)) / edge)
        return _law(1 / edge, "n", _edge_constant(edge, effective_keys) * edge * rate, condition)
    constant = math.exp((log_density + math.lgamma(edge) + edge) / edge)
    return _law((1 - fraction) / edge, "n", constant, condition)


_EXPONENTIAL = ("exponential", "laplace", "gumbel", "logistic")
#: Names with a growth law: rows with a match, and independent logits.
_WITH_LAWS = (
    *("two_level", "planted", "gaussian", "stretched", "cosine", "uniform", "pareto"),
    *_EXPONENTIAL,
)


@lru_cache(maxsize=64)
def _edge_constant(a: float, effective_keys: float) -> float:
    r"""λ / h(b_n) at which E Σp² = 1/effective_keys, for infinitely many logits of bounded support.

    λ is the scale, h(b_n) the hazard rate of :func:`~acutance.theory.hazard_scale`, and the density
    of the logits falls like (distance to the upper end)^(a - 1).

    In units of a / h the gaps to the upper end are a Poisson process with x^a points below x. At
    λ = c h, each with its own Gumbel variable g, on average G(s) = E (s + g)_+^a / (c a)^a of them
    have c a x - g below s, and 1 - E Σp² = ∫ G'(s)² exp(-G(s)) ds.
    """
    depth = np.arange(-40 / min(a, 1.0), 52.0, 0.15)
    step = 0.15 * expit(depth)  # of y = low + log(1 + e^depth)

    def spread(c: float) -> float:
        eta = c * a
        lowest, highest = eta * math.exp(-40 / a) - 25, eta * math.exp(math.log(60) / a) + 12
        x, width = np.linspace(np.arcsinh(lowest), np.arcsinh(highest), 600, retstep=True)
        s = np.sinh(x)[:, None]
        y = np.maximum(s - 6, 0.0) + np.logaddexp(0.0, depth)
        gumbel = np.exp(s - y)
        points = np.exp(a * (np.log(y) - math.log(eta))) * gumbel * np.exp(-gumbel) * step
        inside, slope = points.sum(axis=1), (points / y).sum(axis=1) * a
        return float((slope * slope * np.exp(-inside) * np.cosh(x)).sum() * width)

    low = high = 1.0
    while spread(high) > 1 - 1 / effective_keys:
        low, high = high, 2 * high
    while spread(low) < 1 - 1 / effective_keys:
        low, high = low / 2, low
    from scipy.optimize import brentq  # takes its time to load

    return float(brentq(lambda c: spread(c) - (1 - 1 / effective_keys), low, high, rtol=1e-10))


def _law(
    exponent: float, variable: Literal["log n", "n"], constant: float, condition: str
) -> ScalingLaw:
    """A scaling law: constant · variable^exponent, with the condition under which it holds."""
    return ScalingLaw(_power(variable, exponent), exponent, variable, constant, condition)


def _power(variable: str, exponent: float) -> str:
    """A power as text, such as ``(log n)^{1/2}``."""
    if exponent == 0:
        return "constant"
    if exponent == 1:
        return variable
    ratio = Fraction(exponent).limit_denominator(1000)
    text = str(ratio) if abs(float(ratio) - exponent) < 1e-12 else f"{exponent:.6g}"
    return f"({variable})^{{{text}}}" if " " in variable else f"{variable}^{{{text}}}"


def gauss_hazard_scale(n: ArrayLike) -> float | Array:
    r"""Hazard rate of the standard normal law where the largest of n logits lies.

    .. math:: h(b_n) = n \varphi(b_n), \qquad b_n = \Phi^{-1}(1 - 1/n), \qquad
              h(b_n) \approx \sqrt{2 \log n}

    with the normal density φ and distribution function Φ. Scaling Gaussian logits in proportion to
    it keeps the number of effective keys as n grows: two effective keys need 1.75 times it for
    n = 64 and 1.93 times it for a million.

    Args:
        n: Number of keys, n >= 2; it need not be an integer.

    Returns:
        h(b_n) in one over the standard deviation of the logits, shape of ``n``; a float for a
        scalar.

    Raises:
        ValueError: If some n is below 2 or not finite.

    Example:
        >>> gauss_hazard_scale(64)
        2.510184989178
        >>> gauss_hazard_scale([2, 65536])
        array([0.79788456, 4.38751139])

    Source:
        de Haan & Ferreira (2006), Extreme Value Theory, section 1.1, for 1/h as the scale of the
        largest values.
    """
    keys = checked_keys("n", n)
    return result(math.sqrt(2 / math.pi) / erfcx(-ndtri(1 / keys) / math.sqrt(2)))


def hazard_scale(
    family: Any,
    n: ArrayLike,
    *,
    c: ArrayLike = 1.0,
    d: ArrayLike | None = None,
    rho: ArrayLike | None = None,
    a: ArrayLike | None = None,
) -> float | Array:
    r"""Scale that keeps the number of effective keys as n grows, from the tail of the logits.

    .. math:: \lambda^* = c \, h(b_n), \qquad h = \frac{f}{1 - F}, \quad b_n = F^{-1}(1 - 1/n)

    with F and f the distribution function and density of a logit.

    ========================== ============================================== ==================
    family                     logits                                         h(b_n)
    ========================== ============================================== ==================
    ``"gaussian"``             N(0, 1)                                        ``gauss_hazard_scale``
    ``"uniform"``              uniform on [-1, 1]                             n/2
    ``"exponential"``          P(s > x) = exp(-x)                             1
    ``"laplace"``              density exp(-abs(x))/2                         1
    ``"gumbel"``               F = exp(-exp(-x))                              -(n-1) log(1 - 1/n)
    ``"logistic"``             F = 1/(1 + exp(-x))                            1 - 1/n
    ``"cosine"``, d            cosine of uniform directions of R^d            n f(b_n)
    ``"stretched"``, rho       P(s > x) = exp(-x^ρ), x >= 0                   ρ (log n)^(1 - 1/ρ)
    ``"pareto"``, a            P(s > x) = x^(-a), x >= 1                      a n^(-1/a)
    a frozen SciPy law         its own                                        n f(b_n)
    ========================== ============================================== ==================

    The constant c says how many keys. For tails with an exponential limit (all but uniform, Pareto
    and cosine with log n ≫ d) the collision probability tends to 1 - 1/c, so c = 2 for two
    effective keys; for uniform logits that takes 1.233. For Pareto no constant works: rows are
    either one-hot or flat.

    Args:
        family: A name from the table, a frozen continuous distribution of ``scipy.stats``, or a
            ``Family`` of ``acutance.theory.families``.
        n: Number of keys, n >= 2; it need not be an integer.
        c: Factor, c > 0.
        d: Dimension for ``"cosine"``, d >= 2.
        rho: Exponent for ``"stretched"``, rho > 0.
        a: Tail index for ``"pareto"``, a > 0.

    Returns:
        λ* in one over the unit of the logits, float64 of the broadcast shape; a float for scalars.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If the family is unknown, its parameter is missing or another one is given, or
            an argument is outside its domain.

    Example:
        >>> hazard_scale("uniform", 4096)
        2048.0
        >>> hazard_scale("cosine", [64, 65536], d=64)
        array([20.9850495 , 42.81239142])
        >>> from scipy.stats import norm
        >>> hazard_scale(norm(0, 2), 64)  # twice the deviation, half the scale
        1.255092494589

    Source:
        de Haan & Ferreira (2006), Extreme Value Theory, section 1.1, for 1/h as the scale of the
        largest values.
    """
    keys = checked_keys("n", n)
    factor = checked("c", c, "the factor must be finite and greater than 0", above=0.0)
    name, parameter = _family_parameter(family, _HAZARDS, {"d": d, "rho": rho, "a": a})
    if name is None:
        wrapped: Any = as_family(family)
        law = wrapped.law
        top = law.isf(1 / keys) if hasattr(law, "isf") else law.iccdf(1 / keys)
        rate = np.exp(law.logpdf(top) + np.log(keys))
    else:
        rate = _HAZARDS[name](keys, parameter)
    return result(factor * rate)


_Hazard = Callable[[Array, Array], Array]


def _cosine_hazard(n: Array, d: Array) -> Array:
    """Hazard n f(b_n) of the cosine of random directions in R^d, as in :func:`hazard_scale`.

    (1 + cos) / 2 has the distribution Beta(a, a), a = (d - 1)/2.
    """
    half = (d - 1) / 2
    below = betaincinv(half, half, 1 / n)  # (1 - b_n) / 2
    log_density = (half - 1) * (np.log(below) + np.log1p(-below)) - betaln(half, half)
    rate: Array = np.exp(np.log(n) + log_density - math.log(2))
    return rate


#: n f(b_n) by family, from n and the family's parameter.
_HAZARDS: dict[str, _Hazard] = {
    "gaussian": lambda n, _: np.asarray(gauss_hazard_scale(n)),
    "uniform": lambda n, _: n / 2,
    "exponential": lambda n, _: np.ones_like(n),
    "laplace": lambda n, _: np.ones_like(n),
    "gumbel": lambda n, _: -(n - 1) * np.log1p(-1 / n),
    "logistic": lambda n, _: 1 - 1 / n,
    "cosine": _cosine_hazard,
    "stretched": lambda n, rho: rho * np.log(n) ** (1 - 1 / rho),
    "pareto": lambda n, a: a * n ** (-1 / a),
}

#: The parameter that a family needs, and its least value, itself allowed or not.
_PARAMETERS = {
    "cosine": ("d", 2.0, True),
    "stretched": ("rho", 0.0, False),
    "pareto": ("a", 0.0, False),
}


def _family_parameter(
    family: Any, table: Collection[str], parameters: dict[str, Any]
) -> tuple[str | None, Array]:
    """Name of a family (None for SciPy's) and its checked parameter (0 if it has none)."""
    name = parameter = None
    if isinstance(family, str):
        if family not in table:
            known = ", ".join(f'"{known}"' for known in table)
            raise ValueError(f'family: must be one of {known}, got family="{family}"')
        name, (parameter, least, closed) = family, _PARAMETERS.get(family, (None, 0.0, False))
    for other, value in parameters.items():
        if other != parameter and value is not None:
            raise ValueError(
                f"{other}: family={family!r} has no such parameter, got {other}={value}"
            )
    if name is None:
        name, value = name_and_parameter(as_family(family)) or (None, 0.0)
        return name, np.asarray(value)
    if parameter is None:
        return name, np.zeros(())
    if parameters[parameter] is None:
        raise ValueError(f'{parameter}: family="{family}" needs it, got {parameter}=None')
    values = np.asarray(parameters[parameter], np.float64)
    require(
        parameter,
        values,
        np.isfinite(values) & ((values >= least) if closed else (values > least)),
        f"the parameter must be finite and {'at least' if closed else 'greater than'} {least:g}",
    )
    return name, values
