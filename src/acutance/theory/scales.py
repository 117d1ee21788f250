r"""Scales in closed form: for one match above the other keys, and along Gaussian rows.

A match above a narrow bulk needs a scale that grows as log n; Gaussian logits keep the entropy of
the population formula with one that grows as the root of log n.

Sources: Derrida (1981), Phys. Rev. B 24, 2613 (planted match, entropy along the scale); Su (2021),
https://kexue.fm/archives/8823 (why a scale that grows with n).
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import entr, expit

from acutance.theory.arguments import Array, checked_keys, pointwise, require, result

__all__ = ["gauss_invariant_scale", "needle_scale", "needle_scale_for_entropy"]

_EPS = float(np.finfo(np.float64).eps)


def needle_scale(
    n: ArrayLike, gap: ArrayLike, sigma: ArrayLike = 0.0, mass: ArrayLike = 0.5
) -> float | Array:
    r"""Scale at which one key, ``gap`` above the mean of the others, holds a given weight.

    .. math:: \lambda = \frac{2c}{\Delta + \sqrt{\Delta^2 - 2 \sigma^2 c}}, \qquad
              c = \log(n - 1) + \log\frac{p}{1 - p}

    The other n - 1 logits are N(0, σ²) and enter by their average exponential exp(λ²σ²/2). For
    equal ones, σ = 0, the weight is exact and the law is log n. Of the two scales that solve it
    with σ > 0, the smaller.

    Args:
        n: Number of keys, n >= 2. Values between the integers continue the formula.
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
    keys, top = checked_keys("n", n), np.asarray(gap, np.float64)
    spread, weight = np.asarray(sigma, np.float64), np.asarray(mass, np.float64)
    require("gap", top, (top > 0) & np.isfinite(top), "the gap is finite and greater than 0")
    require(
        "sigma",
        spread,
        (spread >= 0) & np.isfinite(spread),
        "the standard deviation is finite and at least 0",
    )
    keys, top, spread, weight = np.broadcast_arrays(keys, top, spread, weight)
    require("mass", weight, (weight * keys >= 1 - _EPS) & (weight < 1), "the mass lies in [1/n, 1)")
    c = np.log1p(np.maximum(keys * weight - 1, 0.0) / (1 - weight))
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

    with h(p) = -p log p - (1 - p) log(1 - p). The top key holds the weight p and shares the rest
    evenly, so an entropy that stays as n grows needs a weight that rises towards 1: the scale grows
    faster than log n, by log log n in the end.

    Args:
        n: Number of keys, n >= 2. Values between the integers continue the formula.
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
    keys, nats, top = checked_keys("n", n), np.asarray(entropy, np.float64), np.asarray(gap, float)
    keys, nats, top = np.broadcast_arrays(keys, nats, top)
    require("gap", top, (top > 0) & np.isfinite(top), "the gap is finite and greater than 0")
    from scipy.optimize import brentq  # takes its time to load

    most = np.log(keys)
    require("entropy", nats, (nats > 0) & (nats <= most * (1 + _EPS)), "it lies in (0, log n]")

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
        n: Number of keys, n >= 2. Values between the integers continue the formula.
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
    first = np.asarray(gamma0, np.float64)
    require(
        "gamma0",
        first,
        (first >= 0) & np.isfinite(first),
        "the standard deviation is finite and at least 0",
    )
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
        "log n is at least the entropy to keep, n >= n0 exp(-gamma0²/2)",
    )
    shrunk = np.sqrt(np.maximum(first - step, 0.0)) * np.sqrt(first + step)
    return result(np.where(log_ratio >= 0, np.hypot(first, step), shrunk))
