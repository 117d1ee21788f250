r"""Distributions of logit noise: moments, samples and Laplace transforms.

Noise :math:`\varepsilon` added to a logit multiplies the key's weight by
:math:`w = e^\varepsilon`. A law has a kind and a scale b: ``"gaussian"`` (standard deviation b),
``"laplace"`` and ``"gumbel"`` (scale b), ``"uniform"`` (on [-b, b]). A constant added to all logits
changes no weight, so the mean of the noise is irrelevant and only :math:`w / E w` counts.

The right tails of Laplace and Gumbel noise fall like :math:`e^{-x/b}`, so their
:math:`E w^k` is finite for k b < 1 only. The Laplace transform :math:`L(s) = E e^{-s w}` is
finite always; this file tabulates what :mod:`acutance.theory.noise` integrates.

Sources: Su (2023), https://kexue.fm/archives/9593 (softmax under noise); NIST DLMF, sections 4.19
and 5.7 (the series of the hyperbolic cotangent and of the log-gamma function).
"""

import math
from difflib import get_close_matches
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import bernoulli, ndtr, zeta, zetac

from acutance.theory.arguments import Array, checked, log_probability, result
from acutance.theory.families import as_family

__all__ = ["noise_central_moment", "noise_variance_ratio"]

NoiseKind = Literal["gaussian", "laplace", "gumbel", "uniform"]

_KINDS = ("gaussian", "laplace", "gumbel", "uniform")
_HEAVY = ("laplace", "gumbel")
_EVEN_BERNOULLI = [float(x) for x in bernoulli(40)[2::2]]  # B_2, B_4, ..., B_40
#: b coth b - 1 = b²/3 - b⁴/45 + ..., in powers of b², enough terms for b <= 1.
_COTH = [0.0] + [4.0**j * b / math.factorial(2 * j) for j, b in enumerate(_EVEN_BERNOULLI, 1)]
#: log Γ(1 - x) = -log(1 - x) + Σ (ζ(m) - 1) x^m / m and a linear term, enough terms for x < 1.
_LOG_GAMMA = [0.0, 0.0] + [float(zetac(m)) / m for m in range(2, 56)]
_ORDERS = 40  # of the power series in b of a central moment,
_SERIES_BELOW = {"gaussian": 0.3, "laplace": 0.1, "gumbel": 0.1, "uniform": 0.3}  # used below these


def noise_variance_ratio(kind: NoiseKind, scale: ArrayLike) -> float | Array:
    r"""Relative variance of e^ε, the factor by which noise ε on a logit multiplies its weight.

    .. math::

        \nu = \frac{\mathrm{Var}\, e^\varepsilon}{(E e^\varepsilon)^2} =
        \begin{cases}
            e^{b^2} - 1 & \text{Gaussian} \\
            b^2 (2 + b^2) / (1 - 4 b^2) & \text{Laplace, } b < 1/2 \\
            \Gamma(1 - 2b) / \Gamma(1 - b)^2 - 1 & \text{Gumbel, } b < 1/2 \\
            b \coth b - 1 & \text{uniform on } [-b, b]
        \end{cases}

    As b tends to 0 it is the variance of the noise: b², 2b², π²b²/6 and b²/3.

    Args:
        kind: "gaussian", "laplace", "gumbel" or "uniform".
        scale: Scale b of the noise in nats, b >= 0; standard deviation, scale, or half width.

    Returns:
        ν, a pure number, shape of ``scale``; a float for a scalar. For Gaussian noise it exceeds
        the largest float, and is inf, from b = 26.7.

    Raises:
        ValueError: If the kind is unknown, some scale is negative or not finite, or b >= 1/2 for
            Laplace or Gumbel noise: the second moment is infinite.

    Example:
        >>> noise_variance_ratio("gaussian", 1.0)
        1.718281828459
        >>> noise_variance_ratio("uniform", [1e-8, 0.01, 3.0])
        array([3.33333333e-17, 3.33331111e-05, 2.01490947e+00])

    Source:
        Su (2023), https://kexue.fm/archives/9593.
    """
    b = check_scale(kind, scale, moment=2)
    if kind == "gaussian":
        with np.errstate(over="ignore"):
            ratio = np.expm1(b * b)
    elif kind == "laplace":
        ratio = b * b * (2 + b * b) / ((1 - 2 * b) * (1 + 2 * b))
    elif kind == "gumbel":
        ratio = np.expm1(_log_moment_ratio(kind, 2, b))
    else:
        series = np.polynomial.polynomial.polyval(np.minimum(b, 1.0) ** 2, _COTH)
        ratio = np.where(b < 1, series, b / np.tanh(np.maximum(b, 1.0)) - 1)
    return result(ratio)


def noise_central_moment(kind: NoiseKind, order: int, scale: ArrayLike) -> float | Array:
    r"""Central moment of e^ε / E e^ε, where ε is noise on a logit.

    .. math:: \mu_k = E \Big( \frac{e^\varepsilon}{E e^\varepsilon} - 1 \Big)^k
              = \sum_{j=2}^k \binom{k}{j} (-1)^{k-j} (R_j - 1), \qquad
              R_j = \frac{E e^{j \varepsilon}}{(E e^\varepsilon)^j}

    :math:`\mu_2` is :func:`noise_variance_ratio`. As b tends to 0, where the sum cancels, the
    power series in b is used.

    Args:
        kind: "gaussian", "laplace", "gumbel" or "uniform".
        order: k = 2, 3 or 4.
        scale: Scale b of the noise in nats, b >= 0.

    Returns:
        The moment, a pure number, shape of ``scale``; a float for a scalar. Above the largest
        float it is inf.

    Raises:
        ValueError: If the kind is unknown, the order is not 2, 3 or 4, some scale is negative or
            not finite, or b >= 1/k for Laplace or Gumbel noise, whose k-th moment is infinite.

    Example:
        For Gaussian noise the third moment is ν²(3 + ν):

        >>> noise_central_moment("gaussian", 3, 0.5)
        0.264923767
        >>> noise_central_moment("laplace", 4, [1e-4, 0.1])
        array([2.40000133e-15, 4.14112912e-03])

    Source:
        Su (2023), https://kexue.fm/archives/9593, for the second moment.
    """
    if order not in (2, 3, 4):
        raise ValueError(f"order: must be 2, 3 or 4, got {order}")
    b = check_scale(kind, scale, moment=order)
    if order == 2:
        return noise_variance_ratio(kind, scale)
    bound = _SERIES_BELOW[kind]
    series = np.polynomial.polynomial.polyval(np.minimum(b, bound), _moment_series(kind, order))
    wide = np.maximum(b, bound)
    with np.errstate(over="ignore", invalid="ignore"):
        top = np.expm1(_log_moment_ratio(kind, order, wide))
        direct = top + sum(
            (-1) ** (order - j) * math.comb(order, j) * np.expm1(_log_moment_ratio(kind, j, wide))
            for j in range(2, order)
        )
    direct = np.where(np.isinf(top), np.inf, direct)
    return result(np.where(b < bound, series, direct))


def _log_moment_ratio(kind: NoiseKind, k: int, b: Array) -> Array:
    """Logarithm of the k-th moment of w = e^ε divided by the k-th power of its mean."""
    if kind == "gaussian":
        ratio = k * (k - 1) / 2 * b * b
    elif kind == "laplace":
        ratio = k * np.log1p(-b * b) - np.log1p(-k * k * b * b)
    elif kind == "gumbel":
        powers = [c * (float(k) ** m - k) for m, c in enumerate(_LOG_GAMMA)]
        # k log(1 - b) - log(1 - k b), less its linear terms, which cancel
        closed = np.log1p(b * b / (1 - 2 * b)) if k == 2 else k * np.log1p(-b) - np.log1p(-k * b)
        ratio = closed + np.polynomial.polynomial.polyval(b, powers)
    else:
        damped = np.log(-np.expm1(-2 * k * b)) - k * np.log(-np.expm1(-2 * b))
        ratio = damped + (k - 1) * np.log(2 * b) - math.log(k)
    return np.asarray(ratio, dtype=np.float64)


@lru_cache
def _moment_series(kind: NoiseKind, order: int) -> list[float]:
    """Taylor coefficients of :func:`noise_central_moment` in the scale b; 0 below b^order."""
    cumulants = _log_moment_series(kind)
    total = np.zeros(_ORDERS + 1)
    for k in range(2, order + 1):
        log_ratio = [c * (float(k) ** m - k) for m, c in enumerate(cumulants)]
        power = np.zeros(_ORDERS + 1)  # of exp, by its differential equation
        power[0] = 1.0
        for m in range(1, _ORDERS + 1):
            power[m] = sum(j * log_ratio[j] * power[m - j] for j in range(1, m + 1)) / m
        total += (-1) ** (order - k) * math.comb(order, k) * power
    return [0.0] * order + [float(x) for x in total[order:]]


def _log_moment_series(kind: NoiseKind) -> list[float]:
    """Taylor coefficients of log E exp(x ε / b) in x, from x² on, for noise ε of scale b."""
    series = [0.0] * (_ORDERS + 1)
    for m in range(2, _ORDERS + 1):
        if kind == "gumbel":
            series[m] = float(zeta(m)) / m
        elif kind == "laplace" and m % 2 == 0:
            series[m] = 2.0 / m
        elif kind == "gaussian" and m == 2:
            series[m] = 0.5
        elif kind == "uniform" and m % 2 == 0:
            series[m] = 2.0**m * _EVEN_BERNOULLI[m // 2 - 1] / (m * math.factorial(m))
    return series


def check_scale(kind: str, scale: ArrayLike, moment: int = 0) -> Array:
    """Return the scale as float64; ValueError if it or the kind is invalid.

    Also if E exp(ε)^``moment`` is infinite for noise ε of that kind and scale; 0 does not check.
    """
    if kind not in _KINDS:
        near = get_close_matches(str(kind).lower(), _KINDS, n=1, cutoff=0.7)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"kind: must be one of {', '.join(_KINDS)}, got {kind!r}{hint}")
    b = checked("scale", scale, "the scale of the noise must be finite and at least 0", 0.0)
    wide = b[(moment * b >= 1) & (kind in _HEAVY)]
    if wide.size:
        name = {2: "second", 3: "third", 4: "fourth"}[moment]
        raise ValueError(
            f"scale: the {name} moment of exp({kind} noise) is infinite for "
            f"scale >= 1/{moment}, got scale={wide[0]:.17g}"
        )
    return b


def sample_noise(
    kind: NoiseKind, scale: float, shape: tuple[int, ...], generator: np.random.Generator
) -> Array:
    """Draw independent noise of a kind and scale, in nats, of the given shape."""
    draw = getattr(generator, "normal" if kind == "gaussian" else kind)
    return np.asarray(draw(-scale if kind == "uniform" else 0.0, scale, shape))


class TiltedTable(NamedTuple):
    """Laplace transform of w = e^ε, for noise ε, and moments of s w weighted by e^-sw, at some s.

    "Tilted" means under the distribution of w with its density multiplied by e^-sw.
    """

    log_transform: Array  # log E e^-sw
    mean: Array  # E s w, less s for narrow laws, under the tilted law
    variance: Array  # of s w under the tilted law


_NARROW = 0.5  # scales up to here have their tilted mean taken about w = 1
_GAUSS_X, _GAUSS_W = np.polynomial.legendre.leggauss(16)
_UNDERFLOW = 6.6  # e^-sw is 0 for log(s w) above it,
_LINEAR = -45.0  # and 1 - s w below
_NEGLIGIBLE = 85.0  # -log of a density that no sum notices, also about a mean 1e-8 away
_ROWS = 128  # values of s integrated at a time


def tilted_table(kind: NoiseKind, scale: float, x: Array) -> TiltedTable:
    """Compute a :class:`TiltedTable` by quadrature over the noise.

    Every sum has terms of one sign, so all three columns keep their relative accuracy: as s tends
    to 0, where log L and the tilted moments vanish, and as the scale does.

    Args:
        kind: Law of the noise.
        scale: Its scale, positive.
        x: Increasing values of log s.
    """
    parts = [
        _tilted_rows(kind, scale, x[start : start + _ROWS]) for start in range(0, x.size, _ROWS)
    ]
    return TiltedTable(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _tilted_rows(kind: NoiseKind, scale: float, x: Array) -> TiltedTable:
    """Tilted moments of the noise at each x, by quadrature over fixed and moving panels."""
    fixed, moving = _bulk_edges(kind, scale, float(x[0]), float(x[-1])), np.empty(0)
    if np.diff(fixed).max() > 1:  # wider than the step of e^-sw, which moves with s
        coarse, fine = np.arange(_LINEAR, -6.0, 3.0), np.arange(-6.0, _UNDERFLOW, 1.0)
        moving = np.concatenate([coarse, fine])
    column = x[:, None]
    end = np.minimum(fixed[-1], _UNDERFLOW - column)
    edges = np.concatenate([np.broadcast_to(fixed, (x.size, fixed.size)), moving - column], axis=1)
    edges = np.sort(np.clip(edges, fixed[0], np.maximum(end, fixed[0])), axis=1)
    half = np.diff(edges)[:, :, None] / 2
    noise = (edges[:, :-1, None] + half + half * _GAUSS_X).reshape(x.size, -1)
    mass = (half * _GAUSS_W).reshape(x.size, -1) * as_family(kind).pdf(noise / scale) / scale

    product = np.exp(column + noise)  # s w
    tilted = mass * np.exp(-product)
    remaining = tilted.sum(axis=1)
    missing = (mass * -np.expm1(-product)).sum(axis=1) + _survival(kind, scale, end[:, 0])
    log_transform = log_probability(remaining, missing)

    tilted /= np.maximum(remaining, 1e-300)[:, None]
    offset = product
    if scale <= _NARROW:
        s = np.exp(column)
        offset = np.where(noise < 1, s * np.expm1(np.minimum(noise, 1.0)), product - s)
    mean = (tilted * offset).sum(axis=1)
    variance = (tilted * (offset - mean[:, None]) ** 2).sum(axis=1)
    return TiltedTable(log_transform, mean, variance)


def _bulk_edges(kind: NoiseKind, scale: float, lowest: float, highest: float) -> Array:
    """Ascending edges of quadrature panels over the noise ε, for integrals with e^-sw, w = e^ε.

    ``lowest`` and ``highest`` bound log s. The panels resolve the density and its product with w².
    On the left they reach to where the density is negligible against E e^-sw, which is at least
    about P(s w < 1) / e and P(w < 1) e^-s; on the right, to where it is against E w².
    """
    reach = _UNDERFLOW - lowest  # of the noise, before e^-sw cuts it off
    far = max(highest, 0.0) / scale
    shrunk = math.exp(min(highest, _UNDERFLOW))  # -log e^-s, as far as it is needed
    if kind == "uniform":
        return np.linspace(-scale, scale, 9)
    if kind == "gaussian":
        right = math.sqrt(2 * _NEGLIGIBLE)
        left = -math.sqrt(2 * (_NEGLIGIBLE + min(far * far / 2, shrunk)))
        right = min(right + 2 * scale, max(reach / scale, right))
        return scale * np.arange(math.floor(left), math.ceil(right) + 1.0)
    right = _NEGLIGIBLE / (1 - 2 * scale) if 2 * scale < 1 else math.inf
    tail = np.arange(4.0, min(right, max(reach / scale, 4.0)) + 4.0, 4.0)
    if kind == "laplace":
        lower = -np.arange(0.0, _NEGLIGIBLE + min(far, shrunk) + 4.0, 4.0)[::-1]
        return scale * np.concatenate([lower, tail])
    left = -math.log(_NEGLIGIBLE + min(math.exp(min(far, _UNDERFLOW)), shrunk)) - 0.5
    lower = np.arange(math.floor(2 * left), 4.0) / 2  # the double exponential is steep
    return scale * np.concatenate([lower, [2.0, 3.0], tail])


def noise_quantiles(kind: NoiseKind, scale: float, depth: float) -> tuple[float, float]:
    """Bounds beyond which the noise has a density below e^-depth times its maximum."""
    if kind == "uniform":
        return -scale, scale
    if kind == "gaussian":
        return -scale * math.sqrt(2 * depth), scale * math.sqrt(2 * depth)
    left = -depth if kind == "laplace" else -math.log(depth + 10)
    return scale * left, scale * depth


def _survival(kind: NoiseKind, scale: float, noise: Array) -> Array:
    """Probability that noise of a kind and scale exceeds each value of ``noise``."""
    z = noise / scale
    if kind == "gaussian":
        return np.asarray(ndtr(-z))
    if kind == "uniform":
        return np.clip((1 - z) / 2, 0.0, 1.0)
    if kind == "gumbel":
        return -np.expm1(-np.exp(np.minimum(-z, 700.0)))
    beyond = 0.5 * np.exp(-np.abs(z))
    return np.where(z > 0, beyond, 1 - beyond)
