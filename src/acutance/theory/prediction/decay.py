r"""Predictions of rows whose weights decay with the distance of the key.

The weights :math:`\lambda^{n-1}, \dots, \lambda, 1` are the softmax of the logits
:math:`-\theta k`, :math:`\theta = -\log\lambda`, k = 0 … n - 1. With Langevin's function
:math:`\mathcal L(x) = \coth x - 1/x` and :math:`x = \theta / 2`, the attended position has

.. math::

    \langle k \rangle = \frac{n - 1}{2} - \frac{n \mathcal L(nx) - \mathcal L(x)}{2}, \qquad
    \operatorname{Var}_p k = \frac{n^2 \mathcal L'(nx) - \mathcal L'(x)}{4},

and everything else follows, the same for every row.

Source: Su Jianlin, kexue.fm/archives/9889.
"""

import math

from acutance.theory.finite_n.gaussian import (
    expected_entropy_gauss,
)
from acutance.theory.prediction.softmax import ONE_KEY, Formulas
from acutance.theory.prediction.weighted import constant
from acutance.theory.sparsity import effective_keys_decay, sparsity_decay

_SERIES_TO = 0.3  # of n x, below which Langevin's function is summed as a series


def decay_formulas(n: float, lam: float, value_variance: float) -> Formulas:
    """For each metric, its formula for a row of n weights that decay by ``lam`` per key.

    ``value_variance`` is the variance of a value, summed over its components.
    """
    theta = -math.log(lam)
    x, log_n = theta / 2, math.log(n)
    keys = float(effective_keys_decay(lam, n))
    collision = 1 / keys
    mean, spread = _position(n, x)
    variance = theta * theta * spread
    log_sum = _log_sum(theta, n)
    entropy = log_sum + theta * mean
    plain, deviation = -theta * (n - 1) / 2, theta * math.sqrt((n * n - 1) / 12)
    top = math.exp(-log_sum)
    cubes = n if theta == 0 else math.expm1(-3 * n * theta) / math.expm1(-3 * theta)
    noise = collision - 2 * cubes * top**3 + collision**2
    values = {
        "n_keys": n,
        "entropy": entropy,
        "information": log_n - entropy,
        "effective_keys": keys,
        "sparsity": float(sparsity_decay(lam, n)),
        "collision": collision,
        "top_weight": top,
        "first_weight": math.exp(-theta * (n - 1) - log_sum),
        "sink_mass": 0.0,
        "max_logit": 0.0,
        "lse": log_sum,
        "logit_mean": plain,
        "logit_std": deviation,
        "varentropy": variance,
        "entropy_slope": 0.0 - variance,
        "mean_field_entropy": log_n + plain,
        "jensen_gap": log_sum - log_n - plain,
        "max_gap": theta * mean,
        "gaussian_entropy": float(expected_entropy_gauss(n, deviation)),
        "jacobian_trace": 1 - collision,
        "noise_gain": value_variance * noise,
    }
    if n > 1:
        values["normalized_entropy"] = entropy / log_n
    if n >= 2:
        others = _log_sum(theta, n - 1)
        values["first_gap"] = -theta * (n - 1) - others
        values["rest_logit_std"] = theta * math.sqrt(n * (n - 2) / 12)
        values["rest_jensen_gap"] = max(others - math.log(n - 1) + theta * (n - 2) / 2, 0.0)
    formulas: Formulas = {name: ("fixed", constant(value)) for name, value in values.items()}
    names = ("normalized_entropy", "first_gap", "rest_logit_std", "rest_jensen_gap")
    return dict.fromkeys(names, ONE_KEY) | formulas


def _log_sum(theta: float, n: float) -> float:
    """Logarithm of 1 + λ + … + λ^(n-1), λ = e^-θ."""
    return math.log(n if theta == 0 else math.expm1(-n * theta) / math.expm1(-theta))


def _position(n: float, x: float) -> tuple[float, float]:
    """Mean and variance of j = 0 … n − 1 under weights proportional to e^(−θj), with θ = 2x.

    j is the distance of a key from the query; θ = −log λ is the decay per key.
    """
    if n * x > _SERIES_TO:
        mean = _one_over_expm1(2 * x) - n * _one_over_expm1(2 * n * x)
        return mean, (_one_over_sinh2(x) - n * n * _one_over_sinh2(n * x)) / 4
    mean = (n - 1) / 2 - (n * _langevin(n * x) - _langevin(x)) / 2
    return mean, (n * n * _langevin_slope(n * x) - _langevin_slope(x)) / 4


def _one_over_expm1(x: float) -> float:
    """1 / (e^x − 1) without overflow."""
    return math.exp(-x) / -math.expm1(-x)


def _one_over_sinh2(x: float) -> float:
    """1 / sinh²(x) without overflow."""
    return 4 * math.exp(-2 * x) / math.expm1(-2 * x) ** 2


def _langevin(x: float) -> float:
    """L(x) = coth x - 1/x for x <= 0.3."""
    y = x * x
    return x * (1 / 3 - y * (1 / 45 - y * (2 / 945 - y * (1 / 4725 - y * 2 / 93555))))


def _langevin_slope(x: float) -> float:
    """Derivative of L, 1/x² - 1/sinh² x, for x <= 0.3."""
    y = x * x
    return 1 / 3 - y * (1 / 15 - y * (2 / 189 - y * (1 / 675 - y * 2 / 10395)))
