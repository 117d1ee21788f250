"""Sparsity of linear attention, from moments of the keys, and of geometrically decaying weights.

For the sparsity S see :mod:`acutance.theory.sparsity`. Linear weights are q·k, non-negative; with
empirical moments the values are those of the row itself. Decay is exact for n keys.

Sources: Su Jianlin, kexue.fm/archives/9889, the unnumbered equations for linear attention and
decay. Public copies of that page print a form of the first that depends on the unit of q, and a
polynomial for decay; what is here agrees with simulation and with direct summation.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import zeta

from acutance.theory.arguments import Array, checked, require, result

__all__ = [
    "effective_keys_decay",
    "log_sparsity_decay",
    "log_sparsity_linear",
    "log_sparsity_linear_iid",
    "sparsity_decay",
    "sparsity_linear",
    "sparsity_linear_iid",
]


def sparsity_linear(q: ArrayLike, mu: ArrayLike, Sigma: ArrayLike) -> float | Array:
    r"""Sparsity of non-negative linear attention, a = q·k >= 0, from the moments of the keys.

    .. math:: S = \left( 1 + \frac{q^\top \Sigma q}{(q \cdot \mu)^2} \right)^{-1/2}

    Here S = E a / sqrt(E a²), 1 for equal weights and small for sparse ones, with μ and Σ the mean
    and covariance of the keys. Nothing else of their distribution matters. With the empirical mean
    and covariance of n keys (divided by n, not n - 1) the formula is exact for that row.

    Args:
        q: Query features, shape (..., d).
        mu: Mean of the key features, shape (..., d).
        Sigma: Covariance of the key features, symmetric, shape (..., d, d). Leading dimensions
            broadcast.

    Returns:
        S, between 0 and 1, float64 of the broadcast leading shape; a float for single vectors.

    Raises:
        ValueError: If the shapes do not fit, a value is not finite, q·mu is not positive,
            Sigma is not symmetric, or q'Sigma q is negative.

    Example:
        >>> sparsity_linear([1.0, 2.0], [1.0, 0.5], [[1.0, 0.25], [0.25, 2.0]])
        0.534522483825

    Source:
        Su Jianlin, kexue.fm/archives/9889 (copies print 1/(1 + q'Sigma q)·(q·mu)², which
        depends on the unit of q and can exceed 1).
    """
    return result(1 / np.hypot(1, _spread_linear(q, mu, Sigma)))


def log_sparsity_linear(q: ArrayLike, mu: ArrayLike, Sigma: ArrayLike) -> float | Array:
    r"""Logarithm of ``sparsity_linear``, -log(1 + q'Sigma q / (q·mu)²)/2.

    Args:
        q: Query features, shape (..., d).
        mu: Mean of the key features, shape (..., d).
        Sigma: Covariance of the key features, symmetric, shape (..., d, d).

    Returns:
        log S <= 0, float64 of the broadcast leading shape; a float for single vectors.

    Raises:
        ValueError: If the shapes do not fit, a value is not finite, q·mu is not positive,
            Sigma is not symmetric, or q'Sigma q is negative.

    Example:
        >>> log_sparsity_linear([1.0, 1.0], [1e8, 1e8], [[1.0, 0.0], [0.0, 1.0]])
        -2.5e-17

    Source:
        Su Jianlin, kexue.fm/archives/9889.
    """
    return result(_log_of_spread(_spread_linear(q, mu, Sigma)))


def sparsity_linear_iid(q: ArrayLike, mu: ArrayLike, sigma: ArrayLike) -> float | Array:
    r"""Sparsity of linear attention, a = q·k >= 0, with independent key components of one law.

    .. math:: S = \left( 1 + \frac{\sigma^2}{\mu^2}
              \frac{\lVert q \rVert_2^2}{\lVert q \rVert_1^2} \right)^{-1/2}

    The ratio of the norms of q is between d^(-1/2), if all components are equal, and 1, if only one
    is not 0. So for such keys and a q of similar components, a larger d makes the row less sparse,
    not more.

    Args:
        q: Query features, non-negative, not all 0, shape (..., d).
        mu: Mean of every key component, mu > 0, broadcasts against the leading shape of ``q``.
        sigma: Standard deviation of every key component, sigma >= 0, broadcasts likewise.

    Returns:
        S, between 0 and 1, float64 of the broadcast leading shape; a float for a single query.

    Raises:
        ValueError: If q has a negative component or only zeros, mu is not positive, sigma
            is negative, or a value is not finite.

    Example:
        >>> sparsity_linear_iid([1.0, 0.0, 0.0, 0.0], 1.0, 1.0)
        0.707106781187
        >>> sparsity_linear_iid([1.0, 1.0, 1.0, 1.0], 1.0, 1.0)
        0.894427191

    Source:
        Su Jianlin, kexue.fm/archives/9889 (copies print sigma·mu for sigma/mu, lose one square,
        and call d^(-1/2) the maximum).
    """
    return result(1 / np.hypot(1, _spread_iid(q, mu, sigma)))


def log_sparsity_linear_iid(q: ArrayLike, mu: ArrayLike, sigma: ArrayLike) -> float | Array:
    r"""Logarithm of ``sparsity_linear_iid``.

    Args:
        q: Query features, non-negative, not all 0, shape (..., d).
        mu: Mean of every key component, mu > 0, broadcasts against the leading shape of ``q``.
        sigma: Standard deviation of every key component, sigma >= 0, broadcasts likewise.

    Returns:
        log S <= 0, float64 of the broadcast leading shape; a float for a single query.

    Raises:
        ValueError: If q has a negative component or only zeros, mu is not positive, sigma
            is negative, or a value is not finite.

    Example:
        >>> log_sparsity_linear_iid([1.0, 1.0], 1.0, [0.0, 1e-6, 1e300])
        array([ 0.00000000e+00, -2.50000000e-13, -6.90428954e+02])

    Source:
        Su Jianlin, kexue.fm/archives/9889.
    """
    return result(_log_of_spread(_spread_iid(q, mu, sigma)))


def _spread_linear(q: ArrayLike, mu: ArrayLike, Sigma: ArrayLike) -> Array:
    """sqrt(q'Sigma q) / (q·mu), checked, and computed so that nothing overflows."""
    query = checked("q", q, "query features must be finite")
    mean = checked("mu", mu, "means of key features must be finite")
    cov = checked("Sigma", Sigma, "covariances of key features must be finite")
    d = query.shape[-1] if query.ndim else 0
    if d == 0 or mean.shape[-1:] != (d,) or cov.shape[-2:] != (d, d):
        raise ValueError(
            "q, mu and Sigma must have the same number of features d >= 1, with shapes (..., "
            f"d), (..., d) and (..., d, d), got q {query.shape}, mu {mean.shape}, Sigma "
            f"{cov.shape}"
        )
    size_q, size_mu = _largest(query, -1), _largest(mean, -1)
    size_cov = _largest(cov, (-2, -1))
    query, mean = query / size_q[..., None], mean / size_mu[..., None]
    cov = cov / size_cov[..., None, None]
    if (np.abs(cov - np.swapaxes(cov, -2, -1)) > 1e-9).any():
        raise ValueError("Sigma: must be a symmetric matrix")
    centre = np.einsum("...i,...i->...", query, mean)
    variance = np.einsum("...i,...ij,...j->...", query, cov, query)
    rounding = 1e-12 * np.einsum("...i,...ij,...j->...", abs(query), abs(cov), abs(query))
    with np.errstate(over="ignore"):
        score, square = centre * size_mu * size_q, variance * size_cov * size_q * size_q
        require("mu", score, centre > 0, "the mean score q·mu must be positive", "q·mu")
        rule = "a covariance matrix must be positive semidefinite"
        require("Sigma", square, variance >= -rounding, rule, "q'Sigma q")
        deviation = np.sqrt(np.maximum(variance, 0))
        return np.asarray(deviation / centre * (np.sqrt(size_cov) / size_mu))


def _spread_iid(q: ArrayLike, mu: ArrayLike, sigma: ArrayLike) -> Array:
    """Standard deviation of q·k over its mean, for independent key components; checked."""
    query = checked("q", q, "query features must be finite and at least 0", 0.0)
    if query.ndim == 0 or not query.any(axis=-1).all():
        raise ValueError(f"q: query features must not all be 0, got q of shape {query.shape}")
    mean = checked("mu", mu, "the mean of the key components must be finite and positive", 0.0)
    require("mu", mean, mean > 0, "the mean of the key components must be finite and positive")
    rule = "the standard deviation of the key components must be finite and at least 0"
    deviation = checked("sigma", sigma, rule, 0.0)
    query = query / _largest(query, -1)[..., None]
    shape = np.sqrt((query * query).sum(axis=-1)) / query.sum(axis=-1)
    with np.errstate(over="ignore"):
        return np.asarray(deviation / mean * shape)


def _log_of_spread(ratio: Array) -> Array:
    """Compute -log(1 + ratio²)/2 for ratio >= 0 without overflow."""
    small, large = np.minimum(ratio, 1), np.maximum(ratio, 1)
    return np.where(ratio < 1, -np.log1p(small * small) / 2, -np.log(np.hypot(1, large)))


def _largest(values: Array, axis: int | tuple[int, int]) -> Array:
    """Largest absolute value along an axis; 1 if all are 0."""
    size = np.abs(values).max(axis=axis)
    return np.where(size > 0, size, 1.0)


#: log(tanh(y) / y) = -y²/3 + 7 y⁴/90 - ..., 16 terms: to the last bit for y <= 0.3.
_K = np.arange(1, 17)


_LOG_TANHC = (-1.0) ** _K * (1 - 2 * 4.0**-_K) * zeta(2 * _K) / _K * (4 / np.pi**2) ** _K


def sparsity_decay(lam: ArrayLike, n: ArrayLike) -> float | Array:
    r"""Sparsity of n weights that decay geometrically, a = (lam^(n-1), ..., lam, 1).

    .. math:: S = \frac{1 - \lambda^n}{\sqrt n (1 - \lambda)}
              \sqrt{\frac{1 - \lambda^2}{1 - \lambda^{2n}}}
              = \sqrt{\frac{\tanh(n\theta/2)}{n \tanh(\theta/2)}}, \qquad \theta = -\log\lambda

    Exact for every n. It is 1 at lam = 1 and tends to n^(-1/2) as lam tends to 0. For many keys
    it falls to 0 as sqrt((1 + lam)/((1 - lam) n)), because ever more keys have almost no weight;
    the number of effective keys (``effective_keys_decay``) tends to a constant.

    Args:
        lam: Decay per key, 0 < lam <= 1. It broadcasts against ``n``.
        n: Number of keys, n >= 1; it need not be an integer.

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
        n: Number of keys, n >= 1; it need not be an integer.

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
        n: Number of keys, n >= 1; it need not be an integer.

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
    """Check the decay (above 0, at most 1) and the number of keys."""
    decay = checked("lam", lam, "a decay must be above 0 and at most 1", 0.0, 1.0)
    require("lam", decay, decay > 0, "a decay must be above 0 and at most 1")
    keys = checked("n", n, "the number of keys must be finite and at least 1", 1.0)
    theta, keys = np.broadcast_arrays(-np.log(decay), keys)
    return theta, keys


def _log_tanhc(y: Array) -> Array:
    """Compute log(tanh(y) / y) for y >= 0; 0 at y = 0."""
    low, high = np.minimum(y, 0.3), np.maximum(y, 0.3)
    series = low * low * np.polynomial.polynomial.polyval(low * low, _LOG_TANHC)
    return np.where(y < 0.3, series, np.log(np.tanh(high) / high))
