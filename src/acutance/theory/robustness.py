r"""What noise on the logits does to an attention row's output.

A row has weights p, values v and output :math:`o = \sum_j p_j v_j`. Independent noise
:math:`\varepsilon_j` on the logits turns it into

.. math::

    \tilde o = \sum_j \tilde p_j v_j, \qquad
    \tilde p_j = \frac{p_j w_j}{\sum_k p_k w_k}, \quad w_j = e^{\varepsilon_j}.

With :math:`u_j = v_j - o`, the mean square error :math:`E \|\tilde o - o\|^2` is given here four
ways: to the first order in :math:`\nu`, the relative variance of w; to the second order; exactly;
and by sampling. The exact one writes :math:`1 / W^2 = \int_0^\infty t e^{-t W} dt` for
:math:`W = \sum_j p_j w_j`, after which the keys are independent:

.. math::

    E \|\tilde o - o\|^2 = \int_0^\infty \Big[ \sum_j \mathrm{Var}_t(p_j w_j) \|u_j\|^2 +
    \Big\| \sum_j E_t(p_j w_j) u_j \Big\|^2 \Big] \prod_j L(t p_j) \; t \, dt,
    \qquad L(s) = E e^{-s w},

where :math:`E_t` and :math:`\mathrm{Var}_t` weight :math:`w_j` by :math:`e^{-t p_j w_j}`. Nothing
cancels, no moment of w need exist, and with :math:`t = e^y` the integrand is analytic for
:math:`|\mathrm{Im}\, y| < \pi / 2` and bounded there by a multiple of the result, whatever p, v and
the noise: the trapezoid rule in steps of 1/4 is off by less than 2e-14, relatively.

Bounds that hold for any noise, dependent or adversarial, need only its oscillation
:math:`\max \varepsilon - \min \varepsilon`.

Sources: Su (2023), https://kexue.fm/archives/9593 (the first order); Trefethen & Weideman (2014),
SIAM Review 56, 385 (the trapezoid rule); the rest follows from the formulas above.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array
from scipy.spatial.distance import cdist
from scipy.special import softmax

from acutance.theory.noise_laws import (
    NoiseKind,
    check_scale,
    noise_central_moment,
    noise_quantiles,
    noise_variance_ratio,
    sample_noise,
    tilted_table,
)

__all__ = [
    "NoiseSample",
    "QuantizationNoise",
    "certificate",
    "exact_noise_mse",
    "first_order_bias",
    "first_order_mse",
    "monte_carlo_mse",
    "quantization_noise",
    "second_order_mse",
    "set_bound",
    "tv_bound",
]

Array = NDArray[np.float64]

_SUM_TOLERANCE = 1e-9  # how far from 1 the weights of a row may sum
_PAIRWISE_KEYS = 4096  # up to here the diameter of the values is taken over all pairs
_NODES_PER_UNIT = 4  # of log t
_STEPS = 4  # grid points per node
_GRID = 1 / (_NODES_PER_UNIT * _STEPS)  # spacing of the tabulated log s
_STENCIL = 16  # points of the interpolation on it
_KEY_BLOCK = 65_536  # keys interpolated at a time
_WINDOW = 4_000_000  # grid values summed at a time
_DRAWS = 1_000_000  # noise values drawn at a time
_DEPTH = 45.0  # log of the smallest share of the integral that counts


def first_order_mse(p: ArrayLike, v: ArrayLike, kind: NoiseKind, scale: float) -> float:
    r"""Mean square error of a row's output under logit noise, to the first order in ν.

    .. math:: E \|\tilde o - o\|^2 \approx \nu \sum_j p_j^2 \|v_j - o\|^2

    It holds for rows that spread over many keys. It overestimates when :math:`\nu \sum p_j^2` is
    not small, and underestimates near one-hot rows, where the error is a rare large one; there,
    and where ν is infinite, use :func:`exact_noise_mse`.

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
    row = _centred(p, v)
    return float(_ratio(kind, scale) * _power_sum(row, 2))


def first_order_bias(p: ArrayLike, v: ArrayLike, kind: NoiseKind, scale: float) -> Array:
    r"""Mean error of a row's output under logit noise, to the first order in ν.

    .. math:: E [\tilde o - o] \approx -\nu \sum_j p_j^2 (v_j - o)

    Noise pulls the output towards the plain average of the values.

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
    row = _centred(p, v)
    bias: Array = -_ratio(kind, scale) * (row.p**2 @ row.u)
    return bias


def second_order_mse(p: ArrayLike, v: ArrayLike, kind: NoiseKind, scale: float) -> float:
    r"""Mean square error of a row's output under logit noise, to the second order in ν.

    .. math::

        E \|\tilde o - o\|^2 \approx \nu A_2 - 2 \mu_3 A_3 +
        3 [\nu^2 (A_2 Y + 2 \|b\|^2) + (\mu_4 - 3 \nu^2) A_4]

    with :math:`u_j = v_j - o, A_k = \sum p_j^k \|u_j\|^2, Y = \sum p_j^2, b = \sum p_j^2 u_j` and
    :math:`\mu_k` the :func:`noise_central_moment`. The series is asymptotic: this improves on the
    first order for ν up to about 0.3, and is worse than useless beyond, where it may be negative.

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
    row = _centred(p, v)
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

    with :math:`L_j = E e^{-t p_j w}`, :math:`A_j = E p_j w e^{-t p_j w}`,
    :math:`B_j = E (p_j w)^2 e^{-t p_j w}` and :math:`u_j = v_j - o`. It is finite for every law and
    scale, also where ν is not. As the scale tends to 0 it tends to :func:`first_order_mse`; as the
    scale grows, to the error of attending one key drawn evenly.

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
    row = _centred(p, v)
    width = float(check_scale(kind, _scalar(scale)))
    size = float(np.sqrt((row.u**2).sum(axis=1).max(initial=0.0)))
    if width == 0 or size == 0:
        return 0.0
    row = _Row(row.p, row.u / size)
    return size**2 * _integrate(row, kind, width)


def tv_bound(oscillation: ArrayLike) -> float | Array:
    r"""Largest change of any softmax row under logit changes of a given oscillation.

    .. math:: \mathrm{TV}(p, \tilde p) = \tfrac{1}{2} \sum_j |\tilde p_j - p_j| \le
              \tanh \frac{\max \varepsilon - \min \varepsilon}{4}

    It holds for any noise and any row, and two keys attain it. The change of the output is at most
    this times the largest distance of two values; :func:`certificate` also uses the row.

    Args:
        oscillation: max ε - min ε over the row's keys, in nats, >= 0; inf is allowed.

    Returns:
        The bound on the total variation, in [0, 1], shape of ``oscillation``; a float for a scalar.

    Raises:
        ValueError: If some oscillation is negative or NaN.

    Example:
        >>> tv_bound([0.5, 10.0])
        array([0.124353  , 0.9866143])

    Source:
        The largest over p(A) of :func:`set_bound`.
    """
    bound = np.tanh(_oscillation(oscillation) / 4)
    return bound if bound.ndim else float(bound)


def set_bound(mass: ArrayLike, oscillation: ArrayLike) -> float | Array:
    r"""Largest gain of weight of a set of keys under logit changes of a given oscillation ω.

    .. math:: \tilde p(A) - p(A) \le \frac{a e^\omega}{a e^\omega + 1 - a} - a, \qquad a = p(A)

    It is attained when all of A is raised by ω. The largest over a is :func:`tv_bound`, at
    :math:`a = 1 / (1 + e^{\omega / 2})`.

    Args:
        mass: a, the weight of the set, in [0, 1].
        oscillation: max ε - min ε over the row's keys, in nats, >= 0; inf is allowed.

    Returns:
        The largest gain, in [0, 1], float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If some mass is outside [0, 1], or some oscillation is negative or NaN.

    Example:
        A key of weight 1/1000 is safe from small noise, half the weight is not:

        >>> set_bound([0.001, 0.5], 1.0)
        array([0.00171362, 0.23105858])

    Source:
        Monotonicity of softmax in its logits.
    """
    a = np.asarray(mass, dtype=np.float64)
    wrong = a[~((a >= 0) & (a <= 1))]
    if wrong.size:
        raise ValueError(f"mass: a weight lies in [0, 1], got mass={wrong[0]:g}")
    gain = np.asarray(_gain(a, 1 - a, _oscillation(oscillation)))
    return gain if gain.ndim else float(gain)


def certificate(p: ArrayLike, v: ArrayLike, oscillation: float) -> float:
    r"""Bound on the change of a row's output that holds for any logit noise.

    .. math:: \|\tilde o - o\| \le \max_A [\tilde p(A) - p(A)] \, \max_{ij} \|v_i - v_j\|

    The first factor is :func:`set_bound` at the worst weight p(A) that a set of this row's keys can
    have: at least the smallest weight, and never between 1 - max p and max p. So a peaked row has a
    smaller bound than tanh(ω/4). For two keys it is attained. Only keys with weight count; above
    4096 of them twice the largest distance from the output stands in for the largest distance, at
    most a factor 2 up.

    Args:
        p: Weights of the row, shape (n,): non-negative, with sum 1 within 1e-9.
        v: Values, shape (n, dim).
        oscillation: max ε - min ε over the row's keys, in nats, >= 0; inf is allowed.

    Returns:
        The bound, in units of v.

    Raises:
        ValueError: If p is not a distribution, the shapes disagree, or the oscillation is negative
            or NaN.

    Example:
        >>> certificate([0.5, 0.5], [[1.0], [0.0]], 1.0), certificate([0.99, 0.01], [[1], [0]], 1.0)
        (0.2310586, 0.0167237)

    Source:
        :func:`set_bound`, and the dual form of the total variation.
    """
    row = _centred(p, v)
    omega = float(_oscillation(_scalar(oscillation, "oscillation")))
    if row.p.size < 2:
        return 0.0
    worst = math.exp(-omega / 2) / (1 + math.exp(-omega / 2))
    top = int(row.p.argmax())
    others = float(np.delete(row.p, top).sum())
    mass = max(min(worst, others), float(row.p.min()))
    # a set of weight `others` has the top key for its complement, exactly
    rest = float(row.p[top]) if mass == others else 1 - mass
    gain = _gain(np.asarray(mass), np.asarray(rest), np.asarray(omega))
    return float(gain) * _diameter(row.u)


@dataclass(frozen=True)
class NoiseSample:
    """Mean square error of a row's output, estimated from sampled noise.

    Attributes:
        estimate: Mean over the samples, in squared units of v.
        standard_error: Of the estimate, by the samples' standard deviation.
        samples: How many noisy rows were drawn.
    """

    estimate: float
    standard_error: float
    samples: int


def monte_carlo_mse(
    p: ArrayLike, v: ArrayLike, kind: NoiseKind, scale: float, samples: int, seed: int
) -> NoiseSample:
    r"""Mean square error of a row's output under logit noise, by sampling.

    .. math:: \frac{1}{S} \sum_{s=1}^S \|\tilde o^{(s)} - o\|^2

    Near one-hot rows and under heavy-tailed noise few samples carry the error, and the standard
    error is then itself uncertain.

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
    row = _centred(p, v)
    width = float(check_scale(kind, _scalar(scale)))
    if samples < 2:
        raise ValueError(f"samples: a standard error needs at least 2, got samples={samples}")
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
    r"""Logit noise of b-bit queries and keys, and the output error it should and does cause.

    Each is rounded to multiples of a step, symmetrically about 0 and without a zero point:

    .. math::

        \hat x = \Delta \, \mathrm{round}(x / \Delta), \qquad
        \Delta = \frac{\max |x|}{2^{\mathrm{bits} - 1} - 1},

    with one step per row (per query, per key) or one per tensor. Rounding errors independent and
    uniform within a step would give logit (i, j) the variance

    .. math::

        \mathrm{scale}^2 \Big( \frac{\Delta_j^2}{12} \|q_i\|^2 + \frac{\Delta_i^2}{12} \|k_j\|^2 +
        d \, \frac{\Delta_i^2 \Delta_j^2}{144} \Big).

    Of the logit errors, those of one query are shared by all keys and so not independent: the
    prediction is an approximation, good when keys point in many directions. Only weights are
    taken at low precision; values and outputs are not.

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
    q, k, values = (
        _finite(name, x, 2) for name, x in (("query", query), ("key", key), ("value", value))
    )
    shapes = f"(query {q.shape}, key {k.shape}, value {values.shape})"
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"query and key share the dimension d: {q.shape[1]}, {k.shape[1]} {shapes}"
        )
    if k.shape[0] != values.shape[0]:
        rule = "key and value share the number of keys n"
        raise ValueError(f"{rule}: {k.shape[0]}, {values.shape[0]} {shapes}")
    if min(q.shape + k.shape + values.shape) == 0:
        raise ValueError(f"query, key and value: no dimension may be empty {shapes}")
    if not 2 <= bits <= 32:
        raise ValueError(f"bits: symmetric integers have 2 to 32 bits, got bits={bits}")
    if per not in ("row", "tensor"):
        raise ValueError(f"per: a step is shared per 'row' or per 'tensor', got per={per!r}")
    factor = 1 / math.sqrt(q.shape[1]) if scale is None else float(_scalar(scale))

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


class _Row(NamedTuple):
    """A row's keys of positive weight."""

    p: Array  # weights, summing to 1
    u: Array  # values less the output


def _centred(p: ArrayLike, v: ArrayLike) -> _Row:
    """Check a row, and take its values about its output.

    Values are first taken about that of the largest weight: a near one-hot row's output differs
    from it by little, and that difference must not cancel.
    """
    weights, values = _finite("p", p, 1), _finite("v", v, 2)
    shapes = f"(p {weights.shape}, v {values.shape})"
    if weights.size != values.shape[0]:
        raise ValueError(
            f"p and v share the number of keys n: {weights.size}, {values.shape[0]} {shapes}"
        )
    if weights.size == 0:
        raise ValueError(f"p: a row has at least one key {shapes}")
    if (weights < 0).any():
        raise ValueError(f"p: weights are at least 0, got {weights.min():g} {shapes}")
    total = float(weights.sum())
    if abs(total - 1) > _SUM_TOLERANCE:
        raise ValueError(f"p: weights sum to 1 within {_SUM_TOLERANCE:g}, got {total!r} {shapes}")
    live = weights > 0
    weights, values = weights[live] / total, values[live]
    values = values - values[weights.argmax()]
    return _Row(weights, values - weights @ values)


def _power_sum(row: _Row, k: int) -> float:
    """A_k = Σ p^k ‖u‖²."""
    return float(row.p**k @ (row.u**2).sum(axis=1))


def _ratio(kind: NoiseKind, scale: float) -> float:
    return float(noise_variance_ratio(kind, _scalar(scale)))


def _gain(mass: Array, rest: Array, omega: Array) -> Array:
    """Gain of a set at ω, without overflow; 0 for an empty set, also at ω = inf."""
    fall = np.exp(-omega)
    below = mass + rest * fall
    gain: Array = np.where(mass > 0, mass * rest * -np.expm1(-omega) / np.where(below, below, 1), 0)
    return gain


def _diameter(points: Array) -> float:
    """Largest distance of two points, of which 0 is an average.

    Above _PAIRWISE_KEYS points an upper bound, at most twice as large.
    """
    if points.shape[1] == 1:
        return float(np.ptp(points))
    if points.shape[0] > _PAIRWISE_KEYS:
        return 2 * float(np.sqrt((points**2).sum(axis=1).max()))
    blocks = np.array_split(points, math.ceil(points.shape[0] / 256))
    return max(float(cdist(block, points).max()) for block in blocks)


def _integrate(row: _Row, kind: NoiseKind, scale: float) -> float:
    """Trapezoid rule in y = log t for a row with max ‖u‖ = 1."""
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
    count, square, vector = _onto_grid(log_p, squares, row.u, spread)

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


def _onto_grid(log_p: Array, squares: Array, u: Array, size: int) -> tuple[Array, Array, Array]:
    """Sum 1, ‖u_j‖² and u_j over the keys onto the grid points they are interpolated from.

    Interpolation is linear in the tabulated values, so a sum over keys of interpolated values is
    a sum over the grid with these coefficients, the same ones at every node.
    """
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
    """Weights of the values at ``offsets`` in the interpolating polynomial's value, (n, points)."""
    weights = np.ones((at.size, offsets.size))
    for column, offset in enumerate(offsets.tolist()):
        for other in offsets.tolist():
            if other != offset:
                weights[:, column] *= (at - other) / (offset - other)
    return weights


def _quantized(x: Array, bits: int, per: str) -> tuple[Array, Array]:
    """Round to the integers of a width; also the step of each row, as a column."""
    largest = np.abs(x).max(axis=1 if per == "row" else None, keepdims=True)
    step = np.broadcast_to(largest / (2 ** (bits - 1) - 1), (x.shape[0], 1))
    return np.round(x / np.where(step > 0, step, 1.0)) * step, step


def _oscillation(oscillation: ArrayLike) -> Array:
    omega = np.asarray(oscillation, dtype=np.float64)
    wrong = omega[~(omega >= 0)]
    if wrong.size:
        rule = "max - min of the noise is at least 0"
        raise ValueError(f"oscillation: {rule}, got oscillation={wrong[0]:g}")
    return omega


def _scalar(value: ArrayLike, name: str = "scale") -> Array:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim:
        raise ValueError(f"{name}: one row takes one number, got shape {array.shape}")
    return array


def _finite(name: str, x: ArrayLike, ndim: int) -> Array:
    array = np.asarray(x, dtype=np.float64)
    if array.ndim != ndim:
        form = {1: "(n,)", 2: "(n, dim)"}[ndim]
        raise ValueError(f"{name} has shape {form}: got {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: every entry is finite, got {name} with NaN or inf {array.shape}")
    return array
