r"""Logit noise that is drawn, or that rounding queries and keys to a few bits makes.

What is measured so stands beside the exact mean square error of
:func:`~acutance.theory.robustness.exact_noise_mse`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import softmax

from acutance.theory.arguments import Array
from acutance.theory.noise_laws import NoiseKind, check_scale, sample_noise
from acutance.theory.noisy_row import finite, noisy_row, one_number
from acutance.theory.robustness import exact_noise_mse

__all__ = [
    "NoiseSample",
    "QuantizationNoise",
    "monte_carlo_mse",
    "quantization_noise",
]

_DRAWS = 1_000_000  # noise values drawn at a time


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
    row = noisy_row(p, v)
    width = float(check_scale(kind, one_number(scale)))
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
        finite(name, x, 2) for name, x in (("query", query), ("key", key), ("value", value))
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
    """Round to the integers of a width; also the step of each row, as a column."""
    largest = np.abs(x).max(axis=1 if per == "row" else None, keepdims=True)
    step = np.broadcast_to(largest / (2 ** (bits - 1) - 1), (x.shape[0], 1))
    return np.round(x / np.where(step > 0, step, 1.0)) * step, step
