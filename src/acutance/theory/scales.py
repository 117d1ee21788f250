r"""Scales of the logits that give a row what is wanted: a match its weight, a row its entropy.

A match above a narrow bulk needs a scale that grows as log n; Gaussian logits keep the entropy of
the population formula with one that grows as the root of log n. For measured scores, with N(t) the
number of keys within t of the row's maximum, :math:`\Lambda = \sup_t \log N(t) / t` is the scale
above which the maximum stands alone.

For independent scores the expected entropy of :math:`\mathrm{softmax}(\gamma s)` falls strictly
with :math:`\gamma`, from log n to 0, and the expected collision probability rises from 1/n to 1:
row by row the derivatives are :math:`-\gamma \mathrm{Var}_p(s)` and :math:`2 \mathrm{Cov}_p(p, s)`.
So each target has one scale. It is found by bracketing and Brent's method on the exact finite-n
expectations; the laws of ``acutance.theory.laws`` are what it tends to.

Sources: Derrida (1981), Phys. Rev. B 24, 2613 (planted match, entropy along the scale); Su (2021),
https://kexue.fm/archives/8823 (why a scale that grows with n); Hayase & Karakida (2026),
arXiv:2605.12697 (the critical scale); Brent (1973), Algorithms for Minimization without
Derivatives, chapter 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import entr, expit

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
from acutance.theory.families import Family, FamilyParameter, as_family
from acutance.theory.quadrature import grid

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "critical_scale",
    "gap_count",
    "gauss_invariant_scale",
    "match_dimension",
    "needle_scale",
    "needle_scale_for_entropy",
    "retrieval_capacity",
    "scale_for_effective_keys",
    "scale_for_entropy",
    "scale_for_information",
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
    return _scale_for("entropy", n, entropy, family, parameter)


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
    return _scale_for("effective_keys", n, effective_keys, family, parameter)


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
    return _scale_for("fraction", n, fraction, family, parameter)


def _scale_for(
    name: str, n: ArrayLike, target: ArrayLike, family: Any, parameter: FamilyParameter
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
