r"""Sparsity of attention with random keys: closed forms for each way to turn scores into weights.

The sparsity of unnormalised weights a is :math:`S = E|a| / \sqrt{E a^2}`: 1 when all weights are
equal, small when few keys carry the row. For a row of n non-negative weights the sample value is
:math:`S = \lVert a \rVert_1 / (\sqrt n \lVert a \rVert_2)`, and :math:`n S^2 = 1 / \sum p^2` with
:math:`p = a / \sum a` is the effective number of keys. Except for ``decay``, and for ``linear``
with empirical moments, the functions give the population value, the limit of many keys. A row of
n keys cannot go below :math:`n^{-1/2}`, and the limit fails some way before that.

Keys are Gaussian with mean mu and variance sigma² in each component, so that a score q·k has mean
``beta`` = q·mu and standard deviation ``gamma`` = sigma |q|. Only their ratio matters except to
``exp``. Each function has a logarithm that keeps 12 digits where S rounds to 0 or to 1.

Weights of linear attention are q·k, non-negative; with empirical moments the values are those of
the row itself. Decay is exact for n keys.

Sources: Su Jianlin, kexue.fm/archives/9889 (equations 5, 6 and 7, and the unnumbered ones for
linear attention and decay). Public copies of that page print equation 5 with exp(-12 sigma² |q|²),
linear attention in a form that depends on the unit of q, and a polynomial for decay;
what is here agrees with quadrature and simulation.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erf, ndtr, zeta

from acutance.theory.arguments import Array, checked, normal_density, require, result

__all__ = [
    "effective_keys",
    "effective_keys_decay",
    "log_sparsity_decay",
    "log_sparsity_exp",
    "log_sparsity_identity",
    "log_sparsity_linear",
    "log_sparsity_linear_iid",
    "log_sparsity_relu2",
    "sparsity_decay",
    "sparsity_exp",
    "sparsity_identity",
    "sparsity_linear",
    "sparsity_linear_iid",
    "sparsity_relu2",
]

_TAIL_STEPS = 450  # of the continued fraction: to the last bit for every u <= -1
_FAR = 1e200  # beyond it exp(-u²) and 1/u² are 0


def sparsity_exp(gamma: ArrayLike) -> float | Array:
    r"""Sparsity of softmax attention, a = exp(score), with Gaussian scores.

    .. math:: S = \frac{E e^{s}}{\sqrt{E e^{2s}}} = e^{-\gamma^2/2}

    It falls from 1 at gamma = 0 towards 0, whatever the mean of the scores. With n keys it
    holds for gamma well below sqrt(log n / 2), half of where log n - gamma²/2 fails for entropy.

    Args:
        gamma: Standard deviation of the scores, gamma >= 0.

    Returns:
        S, between 0 and 1, shape of ``gamma``; a float for a scalar. It rounds to 0 above 38.6,
        where ``log_sparsity_exp`` continues.

    Raises:
        ValueError: If some gamma is negative or not finite.

    Example:
        >>> sparsity_exp([0.0, 1.0, 2.0])
        array([1. , 0.60653066, 0.13533528])

    Source:
        Su Jianlin, kexue.fm/archives/9889, equation 5 (some copies print -12 for -1/2).
    """
    return result(np.exp(log_sparsity_exp(gamma)))


def log_sparsity_exp(gamma: ArrayLike) -> float | Array:
    r"""Logarithm of ``sparsity_exp``, -gamma²/2.

    Args:
        gamma: Standard deviation of the scores, gamma >= 0.

    Returns:
        log S <= 0, shape of ``gamma``; a float for a scalar.

    Raises:
        ValueError: If some gamma is negative or not finite.

    Example:
        >>> log_sparsity_exp(1000.0)
        -500000.0

    Source:
        Su Jianlin, kexue.fm/archives/9889, equation 5.
    """
    deviation = _deviation(gamma)
    with np.errstate(over="ignore"):
        return result(-deviation * deviation / 2)


def sparsity_relu2(beta: ArrayLike, gamma: ArrayLike) -> float | Array:
    r"""Sparsity of squared-ReLU attention, a = max(score, 0)², with Gaussian scores.

    .. math::

        S = \frac{M_2}{\sqrt{M_4}}, \quad u = \frac{\beta}{\gamma}, \quad
        M_2 = (u^2 + 1) \Phi(u) + u \varphi(u), \quad
        M_4 = (u^4 + 6 u^2 + 3) \Phi(u) + u (u^2 + 5) \varphi(u)

    It rises strictly with u: from 0 at minus infinity through 1/sqrt(6) at u = 0 to 1. So a
    negative mean makes the row sparse, and the more so the *smaller* gamma is, contrary to
    softmax. The two terms of each moment cancel for negative u: there the ratio comes from
    the repeated integrals of the normal tail, by a continued fraction of positive terms.

    Args:
        beta: Mean of the scores, finite. It broadcasts against ``gamma``.
        gamma: Standard deviation of the scores, gamma >= 0. At gamma = 0 the value is the limit:
            1 for beta > 0, 0 for beta < 0.

    Returns:
        S, between 0 and 1, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If beta is not finite, gamma is negative or not finite, or both are 0,
            where S has no limit.

    Example:
        >>> sparsity_relu2([0.0, 3.0, -3.0], 1.0)
        array([0.40824829, 0.85123967, 0.01670562])

    Source:
        Su Jianlin, kexue.fm/archives/9889, equation 6 (there written with exp and erf, which
        loses all digits at u = -7); for few keys, about n Phi(u) of them are active at all.
    """
    return result(np.exp(log_sparsity_relu2(beta, gamma)))


def log_sparsity_relu2(beta: ArrayLike, gamma: ArrayLike) -> float | Array:
    r"""Logarithm of ``sparsity_relu2``.

    It is about -2/u² for u = beta/gamma far above 0, and for t = -u far above 0

    .. math:: \log S = -\tfrac{t^2}{4} - \tfrac14 \log 2\pi - \tfrac12 \log 6t
              + \tfrac{3}{2t^2} + \dots

    Args:
        beta: Mean of the scores, finite. It broadcasts against ``gamma``.
        gamma: Standard deviation of the scores, gamma >= 0. At gamma = 0 the value is the limit:
            0 for beta > 0, minus infinity for beta < 0.

    Returns:
        log S <= 0, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If beta is not finite, gamma is negative or not finite, or both are 0.

    Example:
        >>> log_sparsity_relu2([30.0, -100.0], 1.0)
        array([-2.21361666e-03, -2.50365778e+03])

    Source:
        Su Jianlin, kexue.fm/archives/9889, equation 6.
    """
    u = _ratio(beta, gamma)
    tails = _log_relu2_high(u), _log_relu2_low(u)
    return result(np.select([u > 1, u < -1], tails, default=np.log(_relu2_middle(u))))


def sparsity_identity(beta: ArrayLike, gamma: ArrayLike) -> float | Array:
    r"""Sparsity of linear attention that may be negative, a = score, with Gaussian scores.

    .. math::

        S = \frac{\sqrt{2/\pi}\, e^{-u^2/2} + u \operatorname{erf}(u/\sqrt 2)}{\sqrt{1 + u^2}},
        \qquad u = \frac{\beta}{\gamma}

    It is even in u and rises strictly with abs(u), so S >= sqrt(2/pi) = 0.7979, attained
    exactly where beta = 0: Gaussian keys cannot make linear attention sparse. (Keys of another
    distribution can.)

    Args:
        beta: Mean of the scores, finite. It broadcasts against ``gamma``.
        gamma: Standard deviation of the scores, gamma >= 0. At gamma = 0 the value is the limit 1.

    Returns:
        S, between sqrt(2/pi) and 1, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If beta is not finite, gamma is negative or not finite, or both are 0,
            where S has no limit.

    Example:
        >>> sparsity_identity([0.0, 1.0, -1.0], 1.0)
        array([0.79788456, 0.82493265, 0.82493265])

    Source:
        Su Jianlin, kexue.fm/archives/9889, equation 7.
    """
    sparsity = np.exp(log_sparsity_identity(beta, gamma))
    return result(np.maximum(sparsity, np.sqrt(2 / np.pi)))  # rounding must not go below it


def log_sparsity_identity(beta: ArrayLike, gamma: ArrayLike) -> float | Array:
    r"""Logarithm of ``sparsity_identity``, S = E|a| / √E[a²] of weights a that are normal scores.

    S is 1 if all weights are equal. The logarithm is accurate where S rounds to 1; it is about
    -1/(2u²) for u = beta/gamma far from 0.

    Args:
        beta: Mean of the scores, finite. It broadcasts against ``gamma``.
        gamma: Standard deviation of the scores, gamma >= 0. At gamma = 0 the value is the limit 0.

    Returns:
        log S, between log(2/pi)/2 and 0, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If beta is not finite, gamma is negative or not finite, or both are 0.

    Example:
        >>> log_sparsity_identity(1e5, 1.0)
        -4.99999999975e-11

    Source:
        Su Jianlin, kexue.fm/archives/9889, equation 7.
    """
    u = np.abs(_ratio(beta, gamma))
    return result(np.where(u > 1, _log_identity_high(u), np.log(_identity_low(u))))


def effective_keys(sparsity: ArrayLike, n: ArrayLike) -> float | Array:
    r"""Effective number of keys of a row of n non-negative weights with a given sparsity.

    .. math:: N_\mathrm{eff} = n S^2 = \frac{(\sum a)^2}{\sum a^2} = \frac{1}{\sum p^2}

    Here a are the weights and p = a / Σa. A result near or below 1 means that a sparsity for
    infinitely many keys was used where a row of n keys cannot be that sparse.

    Args:
        sparsity: S, between 0 and 1. It broadcasts against ``n``.
        n: Number of keys, n >= 1.

    Returns:
        Effective number of keys, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some sparsity is outside [0, 1], or some n below 1 or not finite.

    Example:
        >>> effective_keys(sparsity_exp(1.0), 4096)  # n exp(-gamma²)
        1506.83419104

    Source:
        Hoyer (2004), JMLR 5, 1457, for the ratio of norms as a measure of sparsity.
    """
    value = checked("sparsity", sparsity, "a sparsity must be between 0 and 1", 0.0, 1.0)
    keys = checked("n", n, "the number of keys must be finite and at least 1", 1.0)
    return result(keys * value * value)


def _ratio(beta: ArrayLike, gamma: ArrayLike) -> Array:
    """Check the arguments; return u = beta / gamma, clipped to ±1e200."""
    mean = checked("beta", beta, "the mean of the scores must be finite")
    deviation = _deviation(gamma)
    if ((mean == 0) & (deviation == 0)).any():
        raise ValueError("beta, gamma: must not both be 0, got beta=0, gamma=0")
    with np.errstate(over="ignore", divide="ignore"):
        u: Array = np.clip(mean / deviation, -_FAR, _FAR)
    return u


def _relu2_middle(u: Array) -> Array:
    """Sparsity E[a] / sqrt(E[a²]) of a = max(z + u, 0)², z standard normal, for -1 <= u <= 1."""
    u = np.clip(u, -1, 1)
    cdf, density, square = ndtr(u), normal_density(u), u * u
    second = (square + 1) * cdf + u * density
    fourth = ((square + 6) * square + 3) * cdf + u * (square + 5) * density
    return np.asarray(second / np.sqrt(fourth))


def _log_relu2_high(u: Array) -> Array:
    """Logarithm of the sparsity M2 / sqrt(M4) of :func:`sparsity_relu2`, for u >= 1.

    Computed as log(1 - V / M4) / 2, with V = M4 - M2² simplified by hand.
    """
    u = np.maximum(u, 1)
    cdf, tail, density = ndtr(u), ndtr(-u), normal_density(u)
    w = (1 / u) ** 2
    lost = cdf * (w * (4 + 2 * w) + (1 + w) ** 2 * tail)
    lost += density * ((3 * w - 1) / u + 2 * (1 + w) * tail / u - w * density)
    fourth = (1 + w * (6 + 3 * w)) * cdf + (1 + 5 * w) * density / u
    return np.asarray(np.log1p(-lost / fourth) / 2)


def _log_relu2_low(u: Array) -> Array:
    """Logarithm of the sparsity of :func:`sparsity_relu2` for t = -u >= 1.

    It follows from ratios r_m of repeated integrals of the normal density.

    r_m = J_m / J_(m-1), where J_m = int_0^inf y^m e^(-ty - y²/2) dy / m!, J_(-1) = 1; they obey
    r_m = 1 / (t + (m+1) r_(m+1)), stable downwards.
    """
    t = np.maximum(-u, 1)
    tail = 2 / (t + np.hypot(t, 2 * np.sqrt(_TAIL_STEPS + 1)))
    ratios = [tail] * 5
    for m in range(_TAIL_STEPS - 1, -1, -1):
        tail = 1 / (t + (m + 1) * tail)
        if m < 5:
            ratios[m] = tail
    r0, r1, r2, r3, r4 = (np.log(ratio) for ratio in ratios)
    with np.errstate(over="ignore"):
        exponent = -(t * t) / 2
    rest = r0 + r1 + r2 - r3 - r4 - np.log(6 * np.sqrt(2 * np.pi))
    return np.asarray((exponent + rest) / 2)


def _identity_low(u: Array) -> Array:
    """Sparsity of signed Gaussian weights for u at most 1."""
    u = np.minimum(u, 1)
    mean_size = np.sqrt(2 / np.pi) * np.exp(-u * u / 2) + u * erf(u / np.sqrt(2))
    lowest = np.sqrt(2 / np.pi)  # rounding must not go below it
    return np.asarray(np.maximum(mean_size / np.sqrt(1 + u * u), lowest))


def _log_identity_high(u: Array) -> Array:
    """Log of the sparsity of signed Gaussian weights for u at least 1."""
    u = np.maximum(u, 1)
    gain = 2 * (normal_density(u) / u - ndtr(-u))
    return np.asarray(np.log1p(gain) - np.log1p((1 / u) ** 2) / 2)


def _deviation(gamma: ArrayLike) -> Array:
    """Check a standard deviation: finite and at least 0."""
    rule = "the standard deviation of the scores must be finite and at least 0"
    return checked("gamma", gamma, rule, 0.0)


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
    rule = "the mean of the key components must be finite and positive"
    mean = checked("mu", mu, rule, above=0.0)
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
    decay = checked("lam", lam, "a decay must be above 0 and at most 1", most=1.0, above=0.0)
    keys = checked("n", n, "the number of keys must be finite and at least 1", 1.0)
    theta, keys = np.broadcast_arrays(-np.log(decay), keys)
    return theta, keys


def _log_tanhc(y: Array) -> Array:
    """Compute log(tanh(y) / y) for y >= 0; 0 at y = 0."""
    low, high = np.minimum(y, 0.3), np.maximum(y, 0.3)
    series = low * low * np.polynomial.polynomial.polyval(low * low, _LOG_TANHC)
    return np.where(y < 0.3, series, np.log(np.tanh(high) / high))
