r"""Sparsity of a row of geometrically decaying weights, exact for n keys.

For the sparsity S see :mod:`acutance.theory.sparsity`.

Sources: Su Jianlin, kexue.fm/archives/9889, the unnumbered equation for decay. Public copies of
that page print a polynomial; what is here agrees with direct summation.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import zeta

from acutance.theory.arguments import Array, checked, require, result

__all__ = [
    "effective_keys_decay",
    "log_sparsity_decay",
    "sparsity_decay",
]

#: log(tanh(y) / y) = -y²/3 + 7 y⁴/90 - ..., 16 terms: to the last bit for y <= 0.3.
_K = np.arange(1, 17)
_LOG_TANHC = (-1.0) ** _K * (1 - 2 * 4.0**-_K) * zeta(2 * _K) / _K * (4 / np.pi**2) ** _K


def sparsity_decay(lam: ArrayLike, n: ArrayLike) -> float | Array:
    r"""Sparsity of n weights that decay geometrically, a = (lam^(n-1), ..., lam, 1).

    .. math:: S = \frac{1 - \lambda^n}{\sqrt n (1 - \lambda)}
              \sqrt{\frac{1 - \lambda^2}{1 - \lambda^{2n}}}
              = \sqrt{\frac{\tanh(n\theta/2)}{n \tanh(\theta/2)}}, \qquad \theta = -\log\lambda

    Exact for every n. It is 1 at lam = 1 and tends to n^(-1/2) as lam tends to 0. For many keys
    it goes to 0 as sqrt((1 + lam)/((1 - lam) n)), only because zeros are appended:
    ``effective_keys_decay`` stays finite.

    Args:
        lam: Decay per key, 0 < lam <= 1. It broadcasts against ``n``.
        n: Number of keys, n >= 1. Values between the integers continue the formula.

    Returns:
        S, between n^(-1/2) and 1, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some lam is outside (0, 1], or some n below 1 or not finite.

    Example:
        >>> sparsity_decay([0.5, 0.9, 1.0], 1000)
        array([0.05477226, 0.13784049, 1.        ])

    Source:
        Su Jianlin, kexue.fm/archives/9889 (copies print another expression).
    """
    theta, keys = _decay_arguments(lam, n)
    with np.errstate(invalid="ignore"):
        square = np.tanh(keys * theta / 2) / (keys * np.tanh(theta / 2))
    return result(np.sqrt(np.where(theta == 0, 1.0, square)))


def log_sparsity_decay(lam: ArrayLike, n: ArrayLike) -> float | Array:
    r"""Logarithm of ``sparsity_decay``; about -(n² - 1) theta²/24 for small theta = -log(lam).

    Args:
        lam: Decay per key, 0 < lam <= 1. It broadcasts against ``n``.
        n: Number of keys, n >= 1. Values between the integers continue the formula.

    Returns:
        log S, between -log(n)/2 and 0, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some lam is outside (0, 1], or some n below 1 or not finite.

    Example:
        >>> log_sparsity_decay(0.999999999, 1000)
        -4.16666227e-14

    Source:
        Su Jianlin, kexue.fm/archives/9889.
    """
    theta, keys = _decay_arguments(lam, n)
    return result((_log_tanhc(keys * theta / 2) - _log_tanhc(theta / 2)) / 2)


def effective_keys_decay(lam: ArrayLike, n: ArrayLike) -> float | Array:
    r"""Effective number of keys under geometric decay, the inverse of the sum of squared weights.

    .. math:: N_\mathrm{eff} = n S^2 = \frac{\tanh(n\theta/2)}{\tanh(\theta/2)}
              \to \frac{1 + \lambda}{1 - \lambda}, \qquad \theta = -\log\lambda

    Args:
        lam: Decay per key, 0 < lam <= 1. It broadcasts against ``n``.
        n: Number of keys, n >= 1. Values between the integers continue the formula.

    Returns:
        Effective number of keys, between 1 and n, float64 of the broadcast shape; a float for
        scalars. It is n for lam = 1.

    Raises:
        ValueError: If some lam is outside (0, 1], or some n below 1 or not finite.

    Example:
        >>> effective_keys_decay(0.9, [1, 10, 1000, 1e12])
        array([ 1. ,  9.17573031, 19. , 19. ])

    Source:
        Su Jianlin, kexue.fm/archives/9889, for S; n S² is the inverse collision probability.
    """
    theta, keys = _decay_arguments(lam, n)
    with np.errstate(invalid="ignore"):
        ratio = np.tanh(keys * theta / 2) / np.tanh(theta / 2)
    return result(np.where(theta == 0, keys, ratio))


def _decay_arguments(lam: ArrayLike, n: ArrayLike) -> tuple[Array, Array]:
    decay = checked("lam", lam, "a decay is above 0 and at most 1", 0.0, 1.0)
    require("lam", decay, decay > 0, "a decay is above 0 and at most 1")
    keys = checked("n", n, "the number of keys is finite and at least 1", 1.0)
    theta, keys = np.broadcast_arrays(-np.log(decay), keys)
    return theta, keys


def _log_tanhc(y: Array) -> Array:
    """Give log(tanh(y) / y) for y >= 0, 0 at y = 0."""
    low, high = np.minimum(y, 0.3), np.maximum(y, 0.3)
    series = low * low * np.polynomial.polynomial.polyval(low * low, _LOG_TANHC)
    return np.where(y < 0.3, series, np.log(np.tanh(high) / high))
