r"""The error that noise on the logits causes in a row's output.

A row has weights p, values v and output :math:`o = \sum_j p_j v_j`. Independent noise
:math:`\varepsilon_j` on the logits turns it into

.. math::

    \tilde o = \sum_j \tilde p_j v_j, \qquad
    \tilde p_j = \frac{p_j w_j}{\sum_k p_k w_k}, \quad w_j = e^{\varepsilon_j}.

With :math:`u_j = v_j - o`, the mean square error :math:`E \|\tilde o - o\|^2` is given to the first
and second order in :math:`\nu`, the relative variance of w, and exactly. The exact form writes
:math:`1 / W^2 = \int_0^\infty t e^{-t W} dt` for :math:`W = \sum_j p_j w_j`, after which the keys
are independent:

.. math::

    E \|\tilde o - o\|^2 = \int_0^\infty \Big[ \sum_j \mathrm{Var}_t(p_j w_j) \|u_j\|^2 +
    \Big\| \sum_j E_t(p_j w_j) u_j \Big\|^2 \Big] \prod_j L(t p_j) \; t \, dt,
    \qquad L(s) = E e^{-s w},

where :math:`E_t` and :math:`\mathrm{Var}_t` weight :math:`w_j` by :math:`e^{-t p_j w_j}`. Nothing
cancels, no moment of w need exist, and with :math:`t = e^y` the integrand is analytic for
:math:`|\mathrm{Im}\, y| < \pi / 2` and bounded there by a multiple of the result: the trapezoid
rule in steps of 1/4 has a relative error below 2e-14.

How fast attention to many keys averages noise away depends on its right tail
:math:`P(\varepsilon > x) \sim C e^{-r x}` alone. Over n keys of equal weight and values of unit
variance the mean square error falls as 1/n for r above 2, :math:`\log n / n` at 2,
:math:`n^{-(r - 1)}` between 1 and 2, :math:`1 / \log n` at 1, and not at all below 1. The
documentation derives all five, on "Noise that is not averaged".

*Kinds of noise*: ``"gaussian"`` (standard deviation b), ``"laplace"`` and ``"gumbel"`` (scale b),
``"uniform"`` (on [-b, b]). A constant added to all logits changes no weight, so the mean of the
noise is irrelevant and only :math:`w / E w` counts. The right tails of Laplace and Gumbel noise
fall like :math:`e^{-x/b}`, so their :math:`E w^k` is finite for k b < 1 only; the Laplace transform
L is finite always.

*Rounding* to few bits is such noise. A key rounded with the step :math:`\Delta_c` in channel c has
an error of variance :math:`\Delta_c^2 / 12` there, if it is spread evenly within a step. The logit
of a query q then has noise of variance

.. math:: \nu_j = \mathrm{scale}^2 \sum_c q_c^2 \, \Delta_{jc}^2 / 12,

and the output moves as in :func:`~acutance.theory.first_order_mse`, with a variance for each key. A
rounded value moves the output by its weight times its error.

Sources: Su (2023), https://kexue.fm/archives/9593 (that the output hardly changes); Trefethen &
Weideman (2014), SIAM Review 56, 385 (the trapezoid rule); Pitman & Yor (1997), Ann. Probab. 25, 855
(rates below 1); Bennett (1948), Bell System Technical Journal 27, 446 (rounding as uniform noise);
Liu et al. (2024), arXiv:2402.02750 (keys by channel, values by token); NIST DLMF,
sections 4.19 and 5.7 (series of the hyperbolic and of the log-gamma function); the
rest follows from the formulas above.
"""

import math
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bernoulli, ndtr, softmax, zeta, zetac
from scipy.special import gamma as gamma_function

from acutance.theory.arguments import Array, checked, checked_keys, log_probability, result
from acutance.theory.families import as_family

__all__ = [
    "noise_central_moment",
    "noise_variance_ratio",
    "NoiseSample",
    "QuantizationNoise",
    "RoundingError",
    "asymptotic_noise_mse",
    "exact_noise_mse",
    "first_order_bias",
    "first_order_mse",
    "monte_carlo_mse",
    "noise_tail_rate",
    "quantization_noise",
    "rounding_error",
    "second_order_mse",
]

NoiseKind = Literal["gaussian", "laplace", "gumbel", "uniform"]

_KINDS = ("gaussian", "laplace", "gumbel", "uniform")
_HEAVY = ("laplace", "gumbel")
_EVEN_BERNOULLI = [float(x) for x in bernoulli(40)[2::2]]  # B_2, B_4, ..., B_40
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
    return noise_central_moment(kind, 2, scale)


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
    if kind == "uniform" and order == 2:  # the hyperbolic cotangent keeps every digit
        direct = wide / np.tanh(wide) - 1
    return result(np.where(b < bound, series, direct))


def _log_moment_ratio(kind: NoiseKind, k: int, b: Array) -> Array:
    """Logarithm of the k-th moment of w = e^ε divided by the k-th power of its mean."""
    if kind == "gaussian":
        ratio = k * (k - 1) / 2 * b * b
    elif kind == "laplace":
        ratio = k * np.log1p(-b * b) - np.log1p(-k * b) - np.log1p(k * b)
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


_SUM_TOLERANCE = 1e-9  # how far from 1 the weights of a row may sum


class NoisyRow(NamedTuple):
    """The keys of a row that have weight: their weights, and their values less the output."""

    p: Array  # weights, summing to 1
    u: Array  # values less the output


def noisy_row(p: ArrayLike, v: ArrayLike) -> NoisyRow:
    """Check weights (n,) and values (n, dim), drop keys without weight, and subtract the output.

    The value of the largest weight is subtracted first: the output of a nearly one-hot row differs
    from it by little, and that difference must not be lost to rounding.
    """
    weights, values = finite("p", p, 1), finite("v", v, 2)
    shapes = f"(p {weights.shape}, v {values.shape})"
    if weights.size != values.shape[0]:
        raise ValueError(
            f"p and v must have the same number of keys n: {weights.size}, {values.shape[0]} "
            f"{shapes}"
        )
    if weights.size == 0:
        raise ValueError(f"p: a row must have at least one key {shapes}")
    if (weights < 0).any():
        raise ValueError(f"p: weights must be at least 0, got {weights.min():g} {shapes}")
    total = float(weights.sum())
    if abs(total - 1) > _SUM_TOLERANCE:
        raise ValueError(
            f"p: weights must sum to 1 within {_SUM_TOLERANCE:g}, got {total!r} {shapes}"
        )
    live = weights > 0
    weights, values = weights[live] / total, values[live]
    values = values - values[weights.argmax()]
    return NoisyRow(weights, values - weights @ values)


def one_number(value: ArrayLike, name: str = "scale") -> Array:
    """Convert to a 0-d array; ValueError unless it is one number."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim:
        raise ValueError(f"{name}: must be one number for one row, got shape {array.shape}")
    return array


def finite(name: str, x: ArrayLike, ndim: int) -> Array:
    """Convert to float64; ValueError for a wrong number of dimensions, NaN or infinity."""
    array = np.asarray(x, dtype=np.float64)
    if array.ndim != ndim:
        form = {1: "(n,)", 2: "(n, dim)"}[ndim]
        raise ValueError(f"{name} must have shape {form}, got {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(
            f"{name}: every entry must be finite, got {name} with NaN or inf {array.shape}"
        )
    return array


_NODES_PER_UNIT = 4  # of log t


_STEPS = 4  # grid points per node


_GRID = 1 / (_NODES_PER_UNIT * _STEPS)  # spacing of the tabulated log s


_STENCIL = 16  # points of the interpolation on it


_KEY_BLOCK = 65_536  # keys interpolated at a time


_WINDOW = 4_000_000  # grid values summed at a time


_DEPTH = 45.0  # log of the smallest share of the integral that counts


def first_order_mse(p: ArrayLike, v: ArrayLike, kind: NoiseKind, scale: float) -> float:
    r"""Mean square error of a row's output under logit noise, to the first order in ν.

    .. math:: E \|\tilde o - o\|^2 \approx \nu \sum_j p_j^2 \|v_j - o\|^2

    Here :math:`o = \sum_j p_j v_j` is the output, :math:`\tilde o` the output with noise, and ν the
    :func:`noise_variance_ratio`. It holds for rows that spread over many keys. It is too large when
    :math:`\nu \sum p_j^2` is not small, and too small for nearly one-hot rows, whose error is
    rarely large; there, and where ν is infinite, use :func:`exact_noise_mse`.

    Args:
        p: Weights of the row, shape (n,): non-negative, with sum 1 within 1e-9.
        v: Values, shape (n, dim).
        kind: "gaussian", "laplace", "gumbel" or "uniform".
        scale: Scale b of the noise in nats, b >= 0; below 1/2 for Laplace and Gumbel noise.

    Returns:
        The approximate mean square error, in squared units of v.

    Raises:
        ValueError: If p is not a distribution, the shapes disagree, the kind is unknown, or the
            scale is negative, not finite or without a second moment.

    Example:
        >>> first_order_mse([0.75, 0.25], [[1.0], [0.0]], "gaussian", 0.1)
        0.000706652373

    Source:
        Su (2023), https://kexue.fm/archives/9593.
    """
    row = noisy_row(p, v)
    return float(_ratio(kind, scale) * _power_sum(row, 2))


def first_order_bias(p: ArrayLike, v: ArrayLike, kind: NoiseKind, scale: float) -> Array:
    r"""Mean error of a row's output under logit noise, to the first order in ν.

    .. math:: E [\tilde o - o] \approx -\nu \sum_j p_j^2 (v_j - o)

    Here :math:`o = \sum_j p_j v_j` is the output, :math:`\tilde o` the output with noise, and ν the
    :func:`noise_variance_ratio`. Noise pulls the output towards the plain average of the values.

    Args:
        p: Weights of the row, shape (n,): non-negative, with sum 1 within 1e-9.
        v: Values, shape (n, dim).
        kind: "gaussian", "laplace", "gumbel" or "uniform".
        scale: Scale b of the noise in nats, b >= 0; below 1/2 for Laplace and Gumbel noise.

    Returns:
        The approximate mean error, shape (dim,), in units of v.

    Raises:
        ValueError: As :func:`first_order_mse`.

    Example:
        >>> first_order_bias([0.75, 0.25], [[1.0], [0.0]], "gaussian", 0.1)
        array([-0.0009422])

    Source:
        Su (2023), https://kexue.fm/archives/9593.
    """
    row = noisy_row(p, v)
    bias: Array = -_ratio(kind, scale) * (row.p**2 @ row.u)
    return bias


def second_order_mse(p: ArrayLike, v: ArrayLike, kind: NoiseKind, scale: float) -> float:
    r"""Mean square error of a row's output under logit noise, to the second order in ν.

    .. math::

        E \|\tilde o - o\|^2 \approx \nu A_2 - 2 \mu_3 A_3 +
        3 [\nu^2 (A_2 Y + 2 \|b\|^2) + (\mu_4 - 3 \nu^2) A_4]

    with the output :math:`o = \sum_j p_j v_j`, :math:`\tilde o` that with noise, :math:`u_j = v_j -
    o, A_k = \sum p_j^k \|u_j\|^2, Y = \sum p_j^2, b = \sum p_j^2 u_j`, :math:`\nu = \mu_2` and
    :math:`\mu_k` the :func:`noise_central_moment`. The series is asymptotic: it improves on the
    first order for ν up to about 0.3; beyond, it is worse and may be negative.

    Args:
        p: Weights of the row, shape (n,): non-negative, with sum 1 within 1e-9.
        v: Values, shape (n, dim).
        kind: "gaussian", "laplace", "gumbel" or "uniform".
        scale: Scale b of the noise in nats, b >= 0; below 1/4 for Laplace and Gumbel noise.

    Returns:
        The approximate mean square error, in squared units of v.

    Raises:
        ValueError: As :func:`first_order_mse`, and if the fourth moment is infinite.

    Example:
        >>> p, v = [0.75, 0.25], [[1.0], [0.0]]
        >>> first_order_mse(p, v, "gaussian", 0.1), second_order_mse(p, v, "gaussian", 0.1)
        (0.00070665, 0.000704999)
        >>> exact_noise_mse(p, v, "gaussian", 0.1)
        0.000703924

    Source:
        Expansion of 1 / W² to the fourth order of w / E w - 1.
    """
    row = noisy_row(p, v)
    ratio = _ratio(kind, scale)
    third, fourth = (float(noise_central_moment(kind, k, scale)) for k in (3, 4))
    pull = row.p**2 @ row.u
    square = _power_sum(row, 2) * float(row.p @ row.p) + 2 * float(pull @ pull)
    excess = (fourth - 3 * ratio**2) * _power_sum(row, 4)
    return float(
        ratio * _power_sum(row, 2)
        - 2 * third * _power_sum(row, 3)
        + 3 * (ratio**2 * square + excess)
    )


def exact_noise_mse(p: ArrayLike, v: ArrayLike, kind: NoiseKind, scale: float) -> float:
    r"""Mean square error of a row's output under independent logit noise, exactly.

    .. math::

        E \|\tilde o - o\|^2 = \int_0^\infty t \prod_l L_l \Big[ \sum_j \frac{B_j}{L_j} \|u_j\|^2 +
        \Big\| \sum_j \frac{A_j}{L_j} u_j \Big\|^2 - \sum_j \frac{A_j^2}{L_j^2} \|u_j\|^2 \Big] dt

    with the output :math:`o = \sum_j p_j v_j`, :math:`\tilde o` that with noise, :math:`u_j = v_j -
    o` and, for the factor :math:`w = e^\varepsilon` of the noise ε, :math:`L_j = E e^{-t p_j w}`,
    :math:`A_j = E p_j w e^{-t p_j w}`, :math:`B_j = E (p_j w)^2 e^{-t p_j w}`. It is finite for
    every kind and scale of noise, also where the variance of w is infinite. As the scale tends to 0
    it tends to :func:`first_order_mse`; as the scale grows, to the error of attending to one key
    chosen at random.

    The relative accuracy is about 1e-12; results under 1e-300 underflow. The noise is integrated
    once per point of a grid of log s, s = t p_j, and every key is interpolated on that grid: the
    cost grows like n dim, with the scale from about 1 on, and with the logarithm of the smallest
    weight.

    Args:
        p: Weights of the row, shape (n,): non-negative, with sum 1 within 1e-9.
        v: Values, shape (n, dim).
        kind: "gaussian", "laplace", "gumbel" or "uniform".
        scale: Scale b of the noise in nats, b >= 0.

    Returns:
        The mean square error, in squared units of v; 0 for a one-hot row, whose output no noise
        changes.

    Raises:
        ValueError: If p is not a distribution, the shapes disagree, the kind is unknown, or the
            scale is negative or not finite.

    Example:
        >>> exact_noise_mse([0.5, 0.5], [[1.0], [0.0]], "gaussian", 0.5)
        0.02537663200636
        >>> exact_noise_mse([0.5, 0.5], [[1.0], [0.0]], "laplace", 2.0)  # though ν is infinite
        0.146008601456

    Source:
        See the derivation at the top of this file.
    """
    row = noisy_row(p, v)
    width = float(check_scale(kind, one_number(scale)))
    size = float(np.sqrt((row.u**2).sum(axis=1).max(initial=0.0)))
    if width == 0 or size == 0:
        return 0.0
    row = NoisyRow(row.p, row.u / size)
    return size**2 * _integrate(row, kind, width)


def _power_sum(row: NoisyRow, k: int) -> float:
    """Σ p^k ‖u‖² over the keys, u their values less the output."""
    return float(row.p**k @ (row.u**2).sum(axis=1))


def _ratio(kind: NoiseKind, scale: float) -> float:
    """Relative variance of the exponential of this noise."""
    return float(noise_variance_ratio(kind, one_number(scale)))


def _integrate(row: NoisyRow, kind: NoiseKind, scale: float) -> float:
    """The integral of :func:`exact_noise_mse` for a row with max ‖u‖ = 1, by the trapezoid rule."""
    log_p = np.log(row.p)
    squares = (row.u**2).sum(axis=1)
    first_order = float(row.p**2 @ squares)
    # the mean square error is no smaller than about e^-rare, relative to the largest
    rare = -math.log(max(first_order, 1e-300))
    depth = min(_DEPTH + rare, 650.0)
    low, high = noise_quantiles(kind, scale, depth)
    start = -(max(high, 0.0) + depth / 2)  # there t W is below e^(-depth/2)
    stop = -(min(low, 0.0) + float(log_p.max())) + math.log(depth + 20)  # e^-tW is negligible
    nodes = math.ceil(_NODES_PER_UNIT * (stop - start)) + 1

    spread = math.floor((log_p.max() - log_p.min()) / _GRID) + _STENCIL
    before = _STENCIL // 2 - 1
    origin = start + float(log_p.min()) - before * _GRID
    grid = origin + _GRID * np.arange(_STEPS * (nodes - 1) + spread)
    table = tilted_table(kind, scale, grid)
    count, square, vector = _grid_coefficients(log_p, squares, row.u, spread)

    total = 0.0
    rows = max(1, _WINDOW // spread)
    for first in range(0, nodes, rows):
        # row i holds the grid around the keys at node i
        part = slice(_STEPS * first, _STEPS * (first + rows - 1) + spread)
        log_transform, mean, variance = (
            np.lib.stride_tricks.sliding_window_view(column[part], spread)[::_STEPS]
            for column in table
        )
        error = variance @ square + ((mean @ vector) ** 2).sum(axis=1)
        total += float(np.exp(log_transform @ count) @ error)
    return total / _NODES_PER_UNIT


def _grid_coefficients(
    log_p: Array, squares: Array, u: Array, size: int
) -> tuple[Array, Array, Array]:
    """Coefficients that turn sums over keys into sums over an interpolation grid.

    For each w_j = 1, ‖u_j‖² and u_j they are the c_i in Σ_j w_j f(log p_j) ≈ Σ_i c_i f_i, with f_i
    the values of f on the grid. Interpolation is linear in the f_i, so the coefficients do not
    depend on f and serve all quadrature nodes.
    """
    from scipy.sparse import csr_array  # takes its time to load

    count, square, vector = np.zeros(size), np.zeros(size), np.zeros((size, u.shape[1]))
    offsets = np.arange(_STENCIL) - (_STENCIL // 2 - 1)
    position = (log_p - log_p.min()) / _GRID
    for first in range(0, log_p.size, _KEY_BLOCK):
        block = slice(first, first + _KEY_BLOCK)
        cell = np.floor(position[block])
        weights = _lagrange(position[block] - cell, offsets)
        columns = cell.astype(np.int64)[:, None] + np.arange(_STENCIL)
        starts = np.arange(0, columns.size + 1, _STENCIL)
        shape = (columns.shape[0], size)
        onto = csr_array((weights.ravel(), columns.ravel(), starts), shape=shape).T
        count += onto @ np.ones(columns.shape[0])
        square += onto @ squares[block]
        vector += onto @ u[block]
    return count, square, vector


def _lagrange(at: Array, offsets: NDArray[np.int64]) -> Array:
    """Lagrange interpolation weights of the values at ``offsets``, (n, points)."""
    weights = np.ones((at.size, offsets.size))
    for column, offset in enumerate(offsets.tolist()):
        for other in offsets.tolist():
            if other != offset:
                weights[:, column] *= (at - other) / (offset - other)
    return weights


_DRAWS = 1_000_000  # noise values drawn at a time


@dataclass(frozen=True)
class NoiseSample:
    """Monte Carlo estimate of the mean squared error of a row's output under noise.

    Attributes:
        estimate: Mean over the samples, in the units of v squared.
        standard_error: Of the estimate, from the standard deviation of the samples.
        samples: Number of noisy rows drawn.
    """

    estimate: float
    standard_error: float
    samples: int


def monte_carlo_mse(
    p: ArrayLike, v: ArrayLike, kind: NoiseKind, scale: float, samples: int, seed: int
) -> NoiseSample:
    r"""Mean square error of a row's output under logit noise, by sampling.

    .. math:: \frac{1}{S} \sum_{s=1}^S \|\tilde o^{(s)} - o\|^2

    with the output o and its S noisy samples. For nearly one-hot rows and heavy-tailed noise a few
    samples make up most of the error, and the standard error is then itself uncertain.

    Args:
        p: Weights of the row, shape (n,): non-negative, with sum 1 within 1e-9.
        v: Values, shape (n, dim).
        kind: "gaussian", "laplace", "gumbel" or "uniform".
        scale: Scale b of the noise in nats, b >= 0.
        samples: Number S of noisy rows, at least 2.
        seed: Seed of the generator; the result depends on nothing else.

    Returns:
        The estimate with its standard error.

    Raises:
        ValueError: If p is not a distribution, the shapes disagree, the kind is unknown, the scale
            is negative or not finite, or there are fewer than 2 samples.

    Example:
        >>> p, v = [0.5, 0.5], [[1.0], [0.0]]
        >>> sample = monte_carlo_mse(p, v, "gaussian", 0.5, samples=100_000, seed=0)
        >>> abs(
        ...     sample.estimate - exact_noise_mse(p, v, "gaussian", 0.5)
        ... ) < 4 * sample.standard_error
        True

    Source:
        The definition.
    """
    row = noisy_row(p, v)
    width = float(check_scale(kind, one_number(scale)))
    if samples < 2:
        raise ValueError(
            f"samples: must be at least 2, for a standard error, got samples={samples}"
        )
    generator = np.random.default_rng(seed)
    rows = max(1, _DRAWS // row.p.size)
    log_p = np.log(row.p)
    errors = []
    for start in range(0, samples, rows):
        shape = (min(rows, samples - start), row.p.size)
        noise = sample_noise(kind, width, shape, generator)
        change = softmax(log_p + noise, axis=1) @ row.u
        errors.append((change**2).sum(axis=1))
    error = np.concatenate(errors)
    spread = float(error.std(ddof=1)) / math.sqrt(samples)
    return NoiseSample(float(error.mean()), spread, samples)


@dataclass(frozen=True)
class QuantizationNoise:
    """What rounding queries and keys to a few bits does to logits and outputs.

    Attributes:
        bits: Width of the integers.
        expected_std: Standard deviation of the logit error that independent uniform rounding
            errors would have, root mean square over the rows; from step sizes and norms alone.
        logit_std: Measured standard deviation of the logit error within a row, root mean square
            over the rows; a constant shift of a row does not count. It is the scale of the
            Gaussian noise of the same variance.
        uniform_scale: Half width of the uniform noise of the same variance, sqrt(3) logit_std.
        oscillation: Largest max - min of the logit error within a row; for :func:`certificate`.
        predicted_mse: Mean over the rows of :func:`exact_noise_mse` with Gaussian noise of the
            row's own standard deviation.
        measured_mse: Mean over the rows of the squared change of the output.
    """

    bits: int
    expected_std: float
    logit_std: float
    uniform_scale: float
    oscillation: float
    predicted_mse: float
    measured_mse: float


def quantization_noise(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bits: int,
    *,
    scale: float | None = None,
    per: Literal["row", "tensor"] = "row",
) -> QuantizationNoise:
    r"""Logit noise of b-bit queries and keys, and the output error predicted and measured.

    Each is rounded to multiples of a step, symmetrically about 0 and without a zero point:

    .. math::

        \hat x = \Delta \, \mathrm{round}(x / \Delta), \qquad
        \Delta = \frac{\max |x|}{2^{\mathrm{bits} - 1} - 1},

    with one step per row (per query, per key) or one per tensor. Rounding errors independent and
    uniform within a step would give logit (i, j) the variance

    .. math::

        \mathrm{scale}^2 \Big( \frac{\Delta_j^2}{12} \|q_i\|^2 + \frac{\Delta_i^2}{12} \|k_j\|^2 +
        d \, \frac{\Delta_i^2 \Delta_j^2}{144} \Big).

    The rounding error of a query enters the logits of all its keys, so these errors are not
    independent: the prediction is an approximation, good when keys point in many directions. Only
    queries and keys are rounded; values and outputs are not.

    Args:
        query: Queries, shape (rows, d).
        key: Keys, shape (n, d).
        value: Values, shape (n, dim).
        bits: Width of the integers, 2 to 32.
        scale: Factor of the logits; 1 / sqrt(d) by default.
        per: Whether each row or each tensor has its own step.

    Returns:
        The noise, with the mean square error predicted and measured, in squared units of value.

    Raises:
        ValueError: If the shapes disagree, some number is not finite, or bits or per is not one of
            those above.

    Example:
        >>> draw = np.random.default_rng(0).standard_normal
        >>> q, k, v = draw((8, 64)), draw((256, 64)), draw((256, 16))
        >>> noise = quantization_noise(q, k, v, bits=4)
        >>> noise.expected_std, noise.logit_std
        (0.16256, 0.16063)
        >>> noise.measured_mse / noise.predicted_mse
        0.82

    Source:
        Bennett (1948), Bell System Technical Journal 27, 446 (rounding as uniform noise).
    """
    q, k, values = _matrices(query, key, value, "dimension", "share the number of keys n")
    if not 2 <= bits <= 32:
        raise ValueError(f"bits: must be 2 to 32, got bits={bits}")
    if per not in ("row", "tensor"):
        raise ValueError(f"per: must be 'row' or 'tensor', got per={per!r}")
    factor = 1 / math.sqrt(q.shape[1]) if scale is None else float(one_number(scale))

    (q_low, q_step), (k_low, k_step) = (_quantized(x, bits, per) for x in (q, k))
    logits, noisy = factor * (q @ k.T), factor * (q_low @ k_low.T)
    error = noisy - logits
    q_noise, k_noise = q_step**2 / 12, k_step**2 / 12  # columns, one per row
    expected = (q**2).sum(axis=1, keepdims=True) * k_noise.T
    expected += q_noise * (k**2).sum(axis=1) + q.shape[1] * q_noise * k_noise.T
    expected_std = abs(factor) * math.sqrt(expected.mean())
    stds = error.std(axis=1)
    p = softmax(logits, axis=1)
    change = (softmax(noisy, axis=1) - p) @ values
    predicted = [
        exact_noise_mse(row, values, "gaussian", std)
        for row, std in zip(p, stds.tolist(), strict=True)
    ]
    logit_std = math.sqrt(np.mean(stds**2))
    return QuantizationNoise(
        bits=bits,
        expected_std=expected_std,
        logit_std=logit_std,
        uniform_scale=math.sqrt(3) * logit_std,
        oscillation=float(np.ptp(error, axis=1).max()),
        predicted_mse=float(np.mean(predicted)),
        measured_mse=float((change**2).sum(axis=1).mean()),
    )


def _matrices(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, width: str, rule: str
) -> tuple[Array, Array, Array]:
    """Queries (rows, d), keys (n, d) and values (n, dim), checked.

    ``width`` is a word for d, and ``rule`` what the message says of keys and values.
    """
    q, k, v = finite("query", query, 2), finite("key", key, 2), finite("value", value, 2)
    shapes = f"(query {q.shape}, key {k.shape}, value {v.shape})"
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"query and key must have the same {width} d: {q.shape[1]}, {k.shape[1]} {shapes}"
        )
    if len(k) != len(v):
        raise ValueError(f"key and value {rule}: {len(k)}, {len(v)} {shapes}")
    if min(q.shape + k.shape + v.shape) == 0:
        raise ValueError(f"query, key and value: no dimension may be empty {shapes}")
    return q, k, v


def _quantized(x: Array, bits: int, per: str) -> tuple[Array, Array]:
    """Round to multiples of a step; return the rounded x (rows, d) and the steps (rows, 1)."""
    largest = np.abs(x).max(axis=1 if per == "row" else None, keepdims=True)
    step = np.broadcast_to(largest / (2 ** (bits - 1) - 1), (x.shape[0], 1))
    return np.round(x / np.where(step > 0, step, 1.0)) * step, step


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

    with V the variance of the values, o and :math:`\tilde o` the outputs without and with noise, r
    and C from the right tail of the noise, :math:`P(\varepsilon > x) \sim C e^{-rx}`, :math:`w =
    e^\varepsilon` and ν the :func:`noise_variance_ratio`. The result also has the next term where
    it is known: the constant added to the logarithms at r = 2 and r = 1, and -1/n for all r up to
    2. It is within 2 % of :func:`exact_noise_mse` at 4096 keys for r of 1, 1.5, 2 and 5. It
    converges more slowly for r near 1 and 2, where two powers of n are of similar size.

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
    """1 / E[Σp²] of an evenly weighted row under noise with tail rate r = 1, for many keys n.

    The tail is P(ε > x) ~ C exp(−r x), as in :func:`noise_tail_rate`. The value is log n + log log
    n and a constant, to leading orders.
    """
    start = 1.5 - np.euler_gamma - math.log(2) if kind == "laplace" else 1 - 2 * np.euler_gamma
    depth = np.log(keys) + start
    return np.asarray(depth + np.log(depth) - 1 + np.euler_gamma)


_BLOCK = 256  # rows computed at a time

Along = Literal["tokens", "channels"]


@dataclass(frozen=True)
class RoundingError:
    """Predicted mean squared error of a head's output with rounded keys and values.

    Attributes:
        keys: share of the keys, a mean over rows, in squared units of the values.
        values: share of the values.
        logit_variance: variance ν of the logit noise, a mean over rows and over keys by weight. The
            prediction is of first order in it: it holds while ν is well below 1.
    """

    keys: float
    values: float
    logit_variance: float

    @property
    def total(self) -> float:
        """Error of both: they are independent."""
        return self.keys + self.values


def rounding_error(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    key_bits: int = 16,
    value_bits: int = 16,
    keys_along: Along = "tokens",
    group: int = 32,
    scale: float | None = None,
    positions: ArrayLike | None = None,
) -> RoundingError:
    r"""Mean squared error of a head's output with rounded keys and values, to first order.

    .. math::

        E \|\tilde o - o\|^2 \approx \sum_j p_j^2 \, \nu_j \|v_j - o\|^2 +
        \sum_j p_j^2 \sum_c \frac{\Delta_{jc}'^2}{12}, \qquad
        \nu_j = \mathrm{scale}^2 \sum_c q_c^2 \frac{\Delta_{jc}^2}{12}

    with the steps Δ of the keys and Δ' of the values: a group of numbers is rounded to
    :math:`2^b` evenly spaced levels between its least and its largest. Values are rounded along
    channels, as caches do.

    The first order ends where ν comes near 1, as it does at 2 bits. Then weights change by factors,
    and the prediction is too large. It also assumes many levels: with 4 of them a rounding error is
    not spread evenly within a step.

    Args:
        query: Queries of one head, shape (rows, d).
        key: Keys, shape (n, d).
        value: Values, shape (n, dim).
        key_bits: Bits b of the keys, 1 to 16; 16 does not round.
        value_bits: Bits of the values.
        keys_along: ``"tokens"``: ``group`` tokens share a step, one for each channel (keys by
            channel). ``"channels"``: ``group`` channels of one token do (keys by token).
        group: Numbers that share a step; the last group may be smaller.
        scale: Factor of the logits; 1 / sqrt(d) by default.
        positions: (rows,), index of the last key that each query sees. None: they see all keys.

    Returns:
        The prediction, a mean over rows.

    Raises:
        ValueError: If shapes disagree, a number is not finite, or an argument is out of range.

    Example:
        >>> draw = np.random.default_rng(0).standard_normal
        >>> q, k, v = draw((8, 64)), draw((256, 64)), draw((256, 64))
        >>> [rounding_error(q, k, v, key_bits=bits).keys for bits in (8, 4, 2)]
        [0.0000146, 0.00421, 0.105]

    Source:
        See the top of this file.
    """
    q, k, v = _matrices(query, key, value, "width", "must have the same number of keys")
    last = _last(positions, len(q), len(k))
    factor = 1 / math.sqrt(q.shape[1]) if scale is None else float(scale)
    if keys_along not in ("tokens", "channels"):
        raise ValueError(f"keys_along must be 'tokens' or 'channels', got {keys_along!r}")
    variance = _variance("key_bits", k, key_bits, keys_along, group)
    of_values = _variance("value_bits", v, value_bits, "channels", group).sum(1)
    squares = (v**2).sum(1)
    sums = np.zeros(3)
    for start in range(0, len(q), _BLOCK):
        part, seen = q[start : start + _BLOCK], last[start : start + _BLOCK, None]
        hidden = np.arange(len(k)) > seen
        p = softmax(np.where(hidden, -np.inf, factor * (part @ k.T)), axis=1)
        nu = factor**2 * (part**2 @ variance.T)
        output = p @ v
        away = squares - 2 * output @ v.T + (output**2).sum(1, keepdims=True)
        p2 = p**2
        sums += (p2 * nu * away.clip(0)).sum(), (p2 @ of_values).sum(), (p * nu).sum()
    return RoundingError(*(sums / len(q)).tolist())


def _last(positions: ArrayLike | None, rows: int, n: int) -> Array:
    """Index of the last key that each row sees."""
    if positions is None:
        return np.full(rows, n - 1)
    last = np.asarray(positions)
    if last.shape != (rows,) or last.min() < 0 or last.max() >= n:
        raise ValueError(
            f"positions must be {rows} indices of keys, 0 to {n - 1}, got shape {last.shape}"
        )
    return last


def _variance(name: str, x: Array, bits: int, along: Along, group: int) -> Array:
    """Variance of the rounding error of every number, Δ² / 12."""
    if not 1 <= bits <= 16:
        raise ValueError(f"{name}: must be 1 to 16, got {bits}")
    if group < 1:
        raise ValueError(f"group: must be at least 1, got {group}")
    if bits == 16:
        return np.zeros_like(x)
    axis = 0 if along == "tokens" else 1
    starts = np.arange(0, x.shape[axis], group)
    least, most = (f.reduceat(x, starts, axis) for f in (np.minimum, np.maximum))
    sizes = np.diff(np.append(starts, x.shape[axis]))
    step: Array = np.repeat((most - least) / (2**bits - 1), sizes, axis)
    return step**2 / 12
