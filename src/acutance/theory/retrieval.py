r"""How many random keys one perfect match can stand out from, and in how many dimensions.

Both conditions are those of the planted row of the random energy model: the match's logit against
the logarithm of the other keys' average exponential.

Source: Derrida (1981), Phys. Rev. B 24, 2613.
"""

import numpy as np
from numpy.typing import ArrayLike

from acutance.theory.arguments import Array, checked_dimension, require, result

__all__ = [
    "match_dimension",
    "retrieval_capacity",
]

_EPS = float(np.finfo(np.float64).eps)


def match_dimension(n: ArrayLike, mass: ArrayLike = 0.5) -> float | Array:
    r"""Dimension from which a perfect match can hold a given weight among n random keys.

    .. math:: d \ge 2 \left( \log(n - 1) + \log \frac{p}{1 - p} \right)

    The match has cosine 1, the other n - 1 keys cosines N(0, 1/d). Their average exponential at
    scale λ is exp(λ²/2d), so the match has weight p where λ - λ²/2d = log(n-1) + logit p. The left
    side is at most d/2, at λ = d. ``needle_scale`` with gap 1 and sigma d^(-1/2) gives the scale.

    Args:
        n: Number of keys, n >= 2. Values between the integers continue the formula.
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
    keys, weight = np.asarray(n, np.float64), np.asarray(mass, np.float64)
    require("n", keys, (keys >= 2) & np.isfinite(keys), "the number of keys is at least 2")
    keys, weight = np.broadcast_arrays(keys, weight)
    require("mass", weight, (weight * keys >= 1 - _EPS) & (weight < 1), "the mass lies in [1/n, 1)")
    return result(2 * np.log1p(np.maximum(keys * weight - 1, 0.0) / (1 - weight)))


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
        5389699.47

    Source:
        The planted row of the random energy model, Derrida (1981), Phys. Rev. B 24, 2613.
    """
    dimension, weight = checked_dimension(d), np.asarray(mass, np.float64)
    require("mass", weight, (weight > 0) & (weight < 1), "the mass lies between 0 and 1")
    with np.errstate(over="ignore"):
        others = np.exp(np.sqrt(dimension) - 0.5) * ((1 - weight) / weight)
    return result(1 + others)
