r"""How fast attention to many keys averages noise away, by the right tail of the noise.

With the tail :math:`P(\varepsilon > x) \sim C e^{-r x}` the factors :math:`w = e^\varepsilon` have
the tail :math:`C y^{-r}`. Over n keys of equal weight and values of unit variance the mean square
error of the output is :math:`E \sum \tilde p^2 - 1/n`. Its rate in n depends on r alone: 1/n above
2, :math:`\log n / n` at 2, :math:`n^{-(r - 1)}` between 1 and 2, :math:`1 / \log n` at 1, and below
1 it does not fall. The documentation derives all five, on "Noise that is not averaged".

Sources: derived here; Pitman & Yor (1997), Ann. Probab. 25, 855, for rates below 1.
"""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gamma as gamma_function

from acutance.theory.arguments import Array, checked_keys, result
from acutance.theory.noise_laws import NoiseKind, check_scale, noise_variance_ratio
from acutance.theory.noisy_row import one_number

__all__ = ["asymptotic_noise_mse", "noise_tail_rate"]

_CONSTANT = {"laplace": 0.5, "gumbel": 1.0}  # C of the tail


def noise_tail_rate(kind: NoiseKind, scale: float) -> float:
    r"""Rate r of the right tail of logit noise, :math:`P(\varepsilon > x) \sim e^{-rx}`.

    Args:
        kind: "gaussian", "laplace", "gumbel" or "uniform".
        scale: Scale b of the noise in nats, b >= 0.

    Returns:
        1/b for Laplace and Gumbel noise; infinite for Gaussian and uniform noise, which fall
        faster than any exponential, and for no noise.

    Raises:
        ValueError: If the kind is unknown, or the scale is negative or not finite.

    Example:
        >>> noise_tail_rate("gumbel", 1.0), noise_tail_rate("gaussian", 1.0)
        (1.0, inf)
    """
    width = float(check_scale(kind, one_number(scale)))
    return 1 / width if kind in _CONSTANT and width > 0 else math.inf


def asymptotic_noise_mse(n: ArrayLike, kind: NoiseKind, scale: float) -> float | Array:
    r"""Mean square error of an evenly weighted row under logit noise, for many keys.

    .. math::

        \frac{E \lVert \tilde o - o \rVert^2}{V} \approx \begin{cases}
            \nu / n & r > 2, \\
            2 C \log n / ((E w)^2 n) & r = 2, \\
            C \, \Gamma(r + 1) \, \Gamma(2 - r) \, (E w)^{-r} \, n^{-(r - 1)} & 1 < r < 2, \\
            1 / \log n & r = 1, \\
            1 - r & r < 1,
        \end{cases}

    with r and C of the right tail :math:`P(\varepsilon > x) \sim C e^{-rx}` and the mean of
    :math:`w = e^\varepsilon`. What is returned has the next order where it is known: the constant
    beside the logarithms at r = 2 and r = 1, and -1/n for all r up to 2. It is within 2 % of
    :func:`exact_noise_mse` at 4096 keys for r of 1, 1.5, 2 and 5, and slower to converge between
    these: near 1 and 2 two powers of n compete.

    Args:
        n: Number of keys, n >= 2.
        kind: "gaussian", "laplace", "gumbel" or "uniform".
        scale: Scale b of the noise in nats, b >= 0. The rate r is 1/b for Laplace and Gumbel noise.

    Returns:
        The error in units of the variance V of the values, float64 of the shape of ``n``; a float
        for a scalar.

    Raises:
        ValueError: If some n is below 2 or not finite, the kind is unknown, or the scale is
            negative or not finite.

    Example:
        >>> asymptotic_noise_mse([256, 65536], "gaussian", 0.5)  # falls as 1/n
        array([1.10947428e-03, 4.33388392e-06])
        >>> asymptotic_noise_mse([256, 65536], "laplace", 2 / 3)  # as n^(-1/2)
        array([0.0265834 , 0.00189034])
        >>> asymptotic_noise_mse([256, 65536], "gumbel", 1.0)  # as 1 / log n
        array([0.14640989, 0.07747293])
        >>> asymptotic_noise_mse([256, 65536], "laplace", 2.0)  # not at all
        array([0.49609375, 0.49998474])

    Source:
        Derived in the documentation's mathematics; Pitman & Yor (1997), Ann. Probab. 25, 855, for
        r < 1.
    """
    keys = checked_keys("n", n)
    rate, width = noise_tail_rate(kind, scale), one_number(scale)
    if rate > 2:
        return result(np.asarray(noise_variance_ratio(kind, width) / keys))
    if rate < 1:
        return result(1 - rate - 1 / keys)
    if rate == 1:
        return result(1 / _border(keys, kind) - 1 / keys)
    laplace = kind == "laplace"
    mean = 1 / (1 - width**2) if laplace else float(gamma_function(1 - width))
    if rate == 2:
        logs = (
            np.log(keys * mean) - 0.75 if laplace else 2 * np.log(keys * mean) - 2 - np.euler_gamma
        )
        return result((logs / mean**2 - 1) / keys)
    factor = _CONSTANT[kind] * gamma_function(rate + 1) * gamma_function(2 - rate) / mean**rate
    return result(factor * keys ** (1 - rate) - 1 / keys)


def _border(keys: Array, kind: NoiseKind) -> Array:
    """One over the mean collision probability at r = 1: log n and what follows it."""
    start = 1.5 - np.euler_gamma - math.log(2) if kind == "laplace" else 1 - 2 * np.euler_gamma
    depth = np.log(keys) + start
    return np.asarray(depth + np.log(depth) - 1 + np.euler_gamma)
