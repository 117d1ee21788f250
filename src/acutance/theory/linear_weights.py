r"""Sparsity of linear attention with random keys, from the mean and covariance of their features.

The weights are q·k, non-negative. For the sparsity S see :mod:`acutance.theory.sparsity`; with
empirical moments the values here are those of the row itself.

Sources: Su Jianlin, kexue.fm/archives/9889, the unnumbered equations for linear attention. Public
copies of that page print a form that depends on the unit of q; what is here agrees with simulation.
"""

import numpy as np
from numpy.typing import ArrayLike

from acutance.theory.arguments import Array, checked, require, result

__all__ = [
    "log_sparsity_linear",
    "log_sparsity_linear_iid",
    "sparsity_linear",
    "sparsity_linear_iid",
]


def sparsity_linear(q: ArrayLike, mu: ArrayLike, Sigma: ArrayLike) -> float | Array:
    r"""Sparsity of non-negative linear attention, a = q·k >= 0, from the moments of the keys.

    .. math:: S = \left( 1 + \frac{q^\top \Sigma q}{(q \cdot \mu)^2} \right)^{-1/2}

    The distribution of the keys does not matter beyond mean and covariance. With the empirical
    ones of n keys (covariance divided by n, not n - 1) the formula is exact for that row.

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
    r"""Sparsity of non-negative linear attention with independent, alike key components.

    .. math:: S = \left( 1 + \frac{\sigma^2}{\mu^2}
              \frac{\lVert q \rVert_2^2}{\lVert q \rVert_1^2} \right)^{-1/2}

    The ratio of the norms of q lies between d^(-1/2), its *minimum*, when all components are
    equal, and 1 when one is alone. So for such keys and a dense q, a larger d makes the row less
    sparse, not more.

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
    """Standard deviation of q·k over its mean, each factor scaled so that nothing overflows."""
    query = checked("q", q, "query features are finite")
    mean = checked("mu", mu, "means of key features are finite")
    cov = checked("Sigma", Sigma, "covariances of key features are finite")
    d = query.shape[-1] if query.ndim else 0
    if d == 0 or mean.shape[-1:] != (d,) or cov.shape[-2:] != (d, d):
        raise ValueError(
            "q, mu and Sigma share the number of features d >= 1 in the shapes (..., d), (..., d) "
            f"and (..., d, d), got q {query.shape}, mu {mean.shape}, Sigma {cov.shape}"
        )
    size_q, size_mu = _largest(query, -1), _largest(mean, -1)
    size_cov = _largest(cov, (-2, -1))
    query, mean = query / size_q[..., None], mean / size_mu[..., None]
    cov = cov / size_cov[..., None, None]
    if (np.abs(cov - np.swapaxes(cov, -2, -1)) > 1e-9).any():
        raise ValueError("Sigma: a covariance matrix is symmetric, got a matrix that is not")
    centre = np.einsum("...i,...i->...", query, mean)
    variance = np.einsum("...i,...ij,...j->...", query, cov, query)
    rounding = 1e-12 * np.einsum("...i,...ij,...j->...", abs(query), abs(cov), abs(query))
    with np.errstate(over="ignore"):
        score, square = centre * size_mu * size_q, variance * size_cov * size_q * size_q
        require("mu", score, centre > 0, "the mean score q·mu is positive", "q·mu")
        rule = "a covariance matrix is positive semidefinite"
        require("Sigma", square, variance >= -rounding, rule, "q'Sigma q")
        deviation = np.sqrt(np.maximum(variance, 0))
        return np.asarray(deviation / centre * (np.sqrt(size_cov) / size_mu))


def _spread_iid(q: ArrayLike, mu: ArrayLike, sigma: ArrayLike) -> Array:
    query = checked("q", q, "query features are finite and at least 0", 0.0)
    if query.ndim == 0 or not query.any(axis=-1).all():
        raise ValueError(
            f"q: query features, of shape (..., d), are not all 0, got q of shape {query.shape}"
        )
    mean = checked("mu", mu, "the mean of the key components is finite and positive", 0.0)
    require("mu", mean, mean > 0, "the mean of the key components is finite and positive")
    rule = "the standard deviation of the key components is finite and at least 0"
    deviation = checked("sigma", sigma, rule, 0.0)
    query = query / _largest(query, -1)[..., None]
    shape = np.sqrt((query * query).sum(axis=-1)) / query.sum(axis=-1)
    with np.errstate(over="ignore"):
        return np.asarray(deviation / mean * shape)


def _log_of_spread(ratio: Array) -> Array:
    """Give -log(1 + ratio²)/2 for every ratio >= 0."""
    small, large = np.minimum(ratio, 1), np.maximum(ratio, 1)
    return np.where(ratio < 1, -np.log1p(small * small) / 2, -np.log(np.hypot(1, large)))


def _largest(values: Array, axis: int | tuple[int, int]) -> Array:
    """Largest size along the axis, or 1 if all are 0."""
    size = np.abs(values).max(axis=axis)
    return np.where(size > 0, size, 1.0)
