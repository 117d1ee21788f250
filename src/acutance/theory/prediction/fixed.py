r"""Predictions of rows that are not a softmax of random logits: decay, relu², identity, linear.

*Decay.* The weights :math:`\lambda^{n-1}, \dots, \lambda, 1` are the softmax of the logits
:math:`-\theta k`, :math:`\theta = -\log\lambda`, k = 0 … n - 1: a linear bias with no content. With
Langevin's function :math:`\mathcal L(x) = \coth x - 1/x` and :math:`x = \theta / 2`, the attended
position has mean and variance

.. math::

    \langle k \rangle = \frac{n - 1}{2} - \frac{n \mathcal L(nx) - \mathcal L(x)}{2}, \qquad
    \operatorname{Var}_p k = \frac{n^2 \mathcal L'(nx) - \mathcal L'(x)}{4},

and everything else follows, the same for every row.

Source: Su Jianlin, kexue.fm/archives/9889.
"""

import math
from collections.abc import Callable
from functools import cache

from acutance.theory.decay_weights import effective_keys_decay, sparsity_decay
from acutance.theory.gaussian import expected_entropy_gauss, expected_max_gauss
from acutance.theory.prediction.softmax import Formulas, gaussian_deviation
from acutance.theory.prediction.weights import WeightedRow, relu2_top_weight, size_top_weight

__all__ = ["decay_formulas", "linear_formulas", "relu2_formulas", "size_formulas"]

_NO_SOFTMAX = "Only softmax weights have it."
_MEASURED = "It is measured for these weights; no function predicts it."
_SIGNED = "The weights have both signs, so they are no distribution."
_ONE_KEY = "With one key both the entropy and log n are 0."
_SERIES_TO = 0.3  # of n x, below which Langevin's function is summed as a series
_NO_LAW = "Mean and covariance of the keys do not determine it."


def decay_formulas(n: float, lam: float, value_variance: float) -> Formulas:
    """Each metric of a row whose weights decay by the factor lam per key."""
    theta = -math.log(lam)
    x, log_n = theta / 2, math.log(n)
    keys = float(effective_keys_decay(lam, n))
    collision = 1 / keys
    mean, spread = _position(n, x)
    variance = theta * theta * spread
    log_sum = log_n if theta == 0 else math.log(math.expm1(-n * theta) / math.expm1(-theta))
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
    formulas: Formulas = {name: ("fixed", _constant(value)) for name, value in values.items()}
    return {"normalized_entropy": _ONE_KEY, **formulas}


def relu2_formulas(n: float, mean: float, deviation: float) -> Formulas:
    """Each metric of a row with weights max(s, 0)², s normal; means are over rows with some."""
    row, log_n = WeightedRow.relu2(n, mean / deviation), math.log(n)
    entropy = cache(row.entropy)
    formulas = _score_formulas(n, mean, deviation)
    formulas |= {
        "entropy": ("mean", entropy),
        "normalized_entropy": ("mean", lambda: entropy() / log_n) if n > 1 else _ONE_KEY,
        "information": ("mean", lambda: log_n - entropy()),
        "effective_keys": ("mean", row.effective_keys),
        "sparsity": ("mean", row.sparsity),
        "collision": ("mean", row.collision),
        "top_weight": ("mean", lambda: relu2_top_weight(n, mean / deviation)),
        "first_weight": ("mean", lambda: 1 / n),
    }
    if not row.has_rows:
        reason = f"Practically no row has a positive score: P = {row.active:.1g}."
        names = ("entropy", "normalized_entropy", "information", "effective_keys", "sparsity")
        formulas.update(dict.fromkeys((*names, "collision", "top_weight", "first_weight"), reason))
    return formulas


def size_formulas(n: float, mean: float, deviation: float) -> Formulas:
    """Each metric of a row whose weights are the normal scores themselves, measured by size."""
    row = WeightedRow.size(n, mean / deviation)
    names = ("entropy", "normalized_entropy", "information")
    return _score_formulas(n, mean, deviation) | {
        **dict.fromkeys(names, _SIGNED),
        "effective_keys": ("mean", row.effective_keys),
        "sparsity": ("mean", row.sparsity),
        "collision": ("mean", row.collision),
        "top_weight": ("mean", lambda: size_top_weight(n, mean / deviation)),
        "first_weight": ("mean", lambda: 1 / n),
    }


def linear_formulas(n: float, mean: float, sparsity: float) -> Formulas:
    """Each metric of non-negative linear attention with this population mean and sparsity."""
    keys = n * sparsity * sparsity
    spread = mean * math.sqrt(max(1 / sparsity**2 - 1, 0.0))
    names = ("entropy", "normalized_entropy", "information", "top_weight", "max_logit")
    return _without_softmax() | {
        **dict.fromkeys(names, _NO_LAW),
        "n_keys": ("fixed", lambda: n),
        "effective_keys": ("plug-in", lambda: keys),
        "sparsity": ("plug-in", lambda: sparsity),
        "collision": ("plug-in", lambda: 1 / keys),
        "first_weight": ("mean", lambda: 1 / n),
        "sink_mass": ("fixed", lambda: 0.0),
        "logit_mean": ("mean", lambda: mean),
        "logit_std": ("plug-in", lambda: spread * math.sqrt((n - 1) / n)),
    }


def _score_formulas(n: float, mean: float, deviation: float) -> Formulas:
    """What is of the normal scores alone."""
    return _without_softmax() | {
        "n_keys": ("fixed", lambda: n),
        "sink_mass": ("fixed", lambda: 0.0),
        "max_logit": ("mean", lambda: mean + deviation * float(expected_max_gauss(n))),
        "logit_mean": ("mean", lambda: mean),
        "logit_std": ("mean", lambda: gaussian_deviation(n, deviation)),
    }


def _without_softmax() -> Formulas:
    names = ("lse", "varentropy", "entropy_slope", "mean_field_entropy", "jensen_gap", "max_gap")
    formulas: Formulas = dict.fromkeys((*names, "gaussian_entropy"), _NO_SOFTMAX)
    return {**formulas, "jacobian_trace": _MEASURED, "noise_gain": _MEASURED}


def _constant(value: float) -> Callable[[], float]:
    return lambda: value


def _position(n: float, x: float) -> tuple[float, float]:
    """Mean and variance of the attended position, each in the form that does not cancel."""
    if n * x > _SERIES_TO:
        mean = _one_over_expm1(2 * x) - n * _one_over_expm1(2 * n * x)
        return mean, (_one_over_sinh2(x) - n * n * _one_over_sinh2(n * x)) / 4
    mean = (n - 1) / 2 - (n * _langevin(n * x) - _langevin(x)) / 2
    return mean, (n * n * _langevin_slope(n * x) - _langevin_slope(x)) / 4


def _one_over_expm1(x: float) -> float:
    return math.exp(-x) / -math.expm1(-x)


def _one_over_sinh2(x: float) -> float:
    return 4 * math.exp(-2 * x) / math.expm1(-2 * x) ** 2


def _langevin(x: float) -> float:
    """L(x) = coth x - 1/x for x <= 0.3."""
    y = x * x
    return x * (1 / 3 - y * (1 / 45 - y * (2 / 945 - y * (1 / 4725 - y * 2 / 93555))))


def _langevin_slope(x: float) -> float:
    """Derivative of L, 1/x² - 1/sinh² x, for x <= 0.3."""
    y = x * x
    return 1 / 3 - y * (1 / 15 - y * (2 / 189 - y * (1 / 675 - y * 2 / 10395)))
