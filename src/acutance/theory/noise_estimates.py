r"""Logit noise sampled, from rounding to few bits, and in the limit of many keys.

These are compared with the exact :func:`~acutance.theory.noise_error.exact_noise_mse`.

How fast attention to many keys averages noise away depends on its right tail
:math:`P(\varepsilon > x) \sim C e^{-r x}` alone. Over n keys of equal weight and values of unit
variance the mean square error falls as 1/n for r above 2, :math:`\log n / n` at 2,
:math:`n^{-(r - 1)}` between 1 and 2, :math:`1 / \log n` at 1, and not at all below 1. The
documentation derives all five, on "Noise that is not averaged".

Sources: derived here; Pitman & Yor (1997), Ann. Probab. 25, 855, for rates below 1.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gamma as gamma_function
from scipy.special import softmax

from acutance.theory.arguments import Array, checked_keys, result
from acutance.theory.noise_error import exact_noise_mse, finite, noisy_row, one_number
from acutance.theory.noise_laws import NoiseKind, check_scale, noise_variance_ratio, sample_noise

__all__ = [
    "NoiseSample",
    "QuantizationNoise",
    "asymptotic_noise_mse",
    "monte_carlo_mse",
    "noise_tail_rate",
    "quantization_noise",
]

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
    q, k, values = (
        finite(name, x, 2) for name, x in (("query", query), ("key", key), ("value", value))
    )
    shapes = f"(query {q.shape}, key {k.shape}, value {values.shape})"
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"query and key must have the same dimension d: {q.shape[1]}, {k.shape[1]} {shapes}"
        )
    if k.shape[0] != values.shape[0]:
        rule = "key and value share the number of keys n"
        raise ValueError(f"{rule}: {k.shape[0]}, {values.shape[0]} {shapes}")
    if min(q.shape + k.shape + values.shape) == 0:
        raise ValueError(f"query, key and value: no dimension may be empty {shapes}")
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
