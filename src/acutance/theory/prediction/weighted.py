r"""Rows other than a softmax of iid logits, predicted: relu², identity, linear, decay, heads.

The weights of a decay, :math:`\lambda^{n-1}, \dots, \lambda, 1`, are the softmax of the logits
:math:`-\theta k`, :math:`\theta = -\log\lambda`, k = 0 … n - 1. With Langevin's function
:math:`\mathcal L(x) = \coth x - 1/x` and :math:`x = \theta / 2`, the attended position has

.. math::

    \langle k \rangle = \frac{n - 1}{2} - \frac{n \mathcal L(nx) - \mathcal L(x)}{2}, \qquad
    \operatorname{Var}_p k = \frac{n^2 \mathcal L'(nx) - \mathcal L'(x)}{4},

and everything else follows, the same for every row.

Source: Su Jianlin, kexue.fm/archives/9889.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from scipy.special import expit, log_ndtr, ndtr, ndtri_exp

from acutance.theory.arguments import Array, log_probability, normal_density
from acutance.theory.finite_n.expected import Maximum, mean_top_weight
from acutance.theory.finite_n.gaussian import expected_entropy_gauss, expected_max_gauss
from acutance.theory.finite_n.grid import gauss
from acutance.theory.prediction.record import NAMES, Kind
from acutance.theory.prediction.softmax import ONE_KEY, Formulas, gaussian_deviation
from acutance.theory.sparsity import effective_keys_decay, sparsity_decay
from acutance.theory.trained_heads import expected_head_metrics

_NO_SOFTMAX = "Only softmax weights have it."


_MEASURED = "It is measured for these weights; no function predicts it."


_SIGNED = "The weights have both signs, so they are not a distribution."


_NO_LAW = "Mean and covariance of the keys do not determine it."


def relu2_formulas(n: float, mean: float, deviation: float) -> Formulas:
    """Formulas for a row with weights max(s, 0)², s normal; means are over rows with weight."""
    u, log_n = mean / deviation, math.log(n)
    row = WeightedRow.relu2(n, u)
    entropy = cache(row.entropy)
    formulas: Formulas = {
        "entropy": ("mean", entropy),
        "normalized_entropy": ("mean", lambda: entropy() / log_n) if n > 1 else ONE_KEY,
        "information": ("mean", lambda: log_n - entropy()),
        **_weight_formulas(row, lambda: relu2_top_weight(n, u)),
    }
    if not row.has_rows:
        reason = f"Practically no row has a positive score: P = {row.active:.1g}."
        formulas = dict.fromkeys(formulas, reason)
    return _score_formulas(n, mean, deviation) | formulas


def size_formulas(n: float, mean: float, deviation: float) -> Formulas:
    """Formulas for a row whose weights are normal scores; metrics use their absolute values."""
    u = mean / deviation
    names = ("entropy", "normalized_entropy", "information")
    return {
        **_score_formulas(n, mean, deviation),
        **dict.fromkeys(names, _SIGNED),
        **_weight_formulas(WeightedRow.size(n, u), lambda: size_top_weight(n, u)),
    }


def _weight_formulas(row: WeightedRow, top_weight: Callable[[], float]) -> Formulas:
    """Formulas of the metrics of independent weights that are not their entropy."""
    return {
        "effective_keys": ("mean", row.effective_keys),
        "sparsity": ("mean", row.sparsity),
        "collision": ("mean", row.collision),
        "top_weight": ("mean", top_weight),
        "first_weight": ("mean", 1 / row.n),
    }


def linear_formulas(n: float, mean: float, sparsity: float) -> Formulas:
    """Formulas for non-negative linear attention, from the mean and sparsity of its weights."""
    keys = n * sparsity * sparsity
    spread = mean * math.sqrt(max(1 / sparsity**2 - 1, 0.0))
    names = ("entropy", "normalized_entropy", "information", "top_weight", "max_logit")
    return _without_softmax() | {
        **dict.fromkeys(names, _NO_LAW),
        "n_keys": ("fixed", n),
        "effective_keys": ("plug-in", keys),
        "sparsity": ("plug-in", sparsity),
        "collision": ("plug-in", 1 / keys),
        "first_weight": ("mean", 1 / n),
        "sink_mass": ("fixed", 0.0),
        "logit_mean": ("mean", mean),
        "logit_std": ("plug-in", spread * math.sqrt((n - 1) / n)),
    }


def _score_formulas(n: float, mean: float, deviation: float) -> Formulas:
    """Formulas for the metrics that depend on the scores alone."""
    return _without_softmax() | {
        "n_keys": ("fixed", n),
        "sink_mass": ("fixed", 0.0),
        "max_logit": ("mean", lambda: mean + deviation * float(expected_max_gauss(n))),
        "logit_mean": ("mean", mean),
        "logit_std": ("mean", lambda: gaussian_deviation(n, deviation)),
    }


def _without_softmax() -> Formulas:
    """The reason, by name, for each metric that only softmax weights have."""
    names = (
        *("lse", "varentropy", "entropy_slope", "mean_field_entropy", "jensen_gap", "max_gap"),
        *("gaussian_entropy", "first_gap", "rest_logit_std", "rest_jensen_gap"),
    )
    formulas: Formulas = dict.fromkeys(names, _NO_SOFTMAX)
    return {**formulas, "jacobian_trace": _MEASURED, "noise_gain": _MEASURED}


_STEP = 0.3  # of log t: the trapezoid rule is then right to exp(-pi²/0.3) = 5e-15


_TOP_STEP = 0.35  # of the log-odds of the largest score, where its density is smooth


_BELOW, _ABOVE = 75.0, 160.0  # log t on both sides of where the sums are of order 1


_FEWEST = 1e-9  # expected active keys below which a mean over active rows says nothing


@dataclass(frozen=True)
class WeightedRow:
    """Quadrature for a row of n keys with one distribution of weights.

    Attributes:
        n: Number of keys.
        weights: Nodes of the positive weights.
        mass: Their probabilities.
        idle: Probability that a weight is 0.
        log_idle: Logarithm of that probability.
    """

    n: float
    weights: Array
    mass: Array
    idle: float
    log_idle: float

    @classmethod
    def relu2(cls, n: float, u: float) -> WeightedRow:
        """The row with weights max(s, 0)², s normal with mean u and deviation 1."""
        scores, mass = _positive_nodes(u)
        return cls(n, scores * scores, mass, float(ndtr(-u)), float(log_ndtr(-u)))

    @classmethod
    def size(cls, n: float, u: float) -> WeightedRow:
        """The row with weights abs(s), s normal with mean u and deviation 1."""
        parts = [_positive_nodes(u), _positive_nodes(-u)]
        weights, mass = (np.concatenate(column) for column in zip(*parts, strict=True))
        return cls(n, weights, mass, 0.0, -math.inf)

    @property
    def active(self) -> float:
        """Probability that a row has any weight."""
        return -math.expm1(self.n * self.log_idle)

    @property
    def has_rows(self) -> bool:
        """Whether rows with weight are common enough for a mean over them."""
        return self.active > _FEWEST

    def effective_keys(self) -> float:
        """Mean number of effective keys, E (Σa)²/Σa²."""
        if self.n == 1:
            return 1.0
        t, (mean,), rest = self._of_squares
        pairs = self.n * (self.n - 1) * (t * mean**2 * np.exp((self.n - 2) * rest)).sum()
        return 1 + _STEP * float(pairs) / self.active

    def sparsity(self) -> float:
        """Mean sparsity, E Σa / sqrt(n Σa²)."""
        t, (mean,), rest = self._of_squares
        total = (np.sqrt(t) * mean * np.exp((self.n - 1) * rest)).sum()
        return math.sqrt(self.n / math.pi) * _STEP * float(total) / self.active

    def collision(self) -> float:
        """Mean collision probability, E Σp²."""
        t, (square, _), rest = self._of_weights
        total = (t * t * square * np.exp((self.n - 1) * rest)).sum()
        return self.n * _STEP * float(total) / self.active

    def entropy(self) -> float:
        """Mean entropy, E -Σ p log p, in nats."""
        t, (_, log), rest = self._of_weights
        idle = math.exp(self.n * self.log_idle)
        log_sum = (self.active * np.exp(-t) - (np.exp(self.n * rest) - idle)).sum()
        mean_log = self.n * (t * log * np.exp((self.n - 1) * rest)).sum()
        return max(_STEP * float(log_sum - mean_log) / self.active, 0.0)

    @cached_property
    def _of_weights(self) -> tuple[Array, Array, Array]:
        """:meth:`_transforms` of a² and a log a with exp(-ta), a the weight."""
        return self._transforms(1.0, [self.weights**2, self.weights * np.log(self.weights)])

    @cached_property
    def _of_squares(self) -> tuple[Array, Array, Array]:
        """:meth:`_transforms` of a with exp(-ta²), a the weight."""
        return self._transforms(2.0, [self.weights])

    def _transforms(self, power: float, factors: list[Array]) -> tuple[Array, Array, Array]:
        """Means over one weight a, at quadrature points t.

        Returns:
            The points t; E factor · exp(-t a^power) for each factor; and log E exp(-t a^power).
        """
        raised = self.weights**power
        scale = -math.log(self.n * float(raised @ self.mass) + 1e-300)
        t = np.exp(np.arange(scale - _BELOW, scale + _ABOVE + 4 * math.log(self.n), _STEP))
        exponents = -t[:, None] * raised
        decay = np.exp(exponents)
        *moments, present = (decay @ (np.stack([*factors, np.ones_like(raised)]) * self.mass).T).T
        missing = -np.expm1(exponents, out=exponents) @ self.mass
        return t, np.stack(moments), log_probability(self.idle + present, missing)


def relu2_top_weight(n: float, u: float) -> float:
    """Mean of the largest relu² weight, E max a / Σa, over rows with weight.

    Given the largest weight the others are independent, cut off there.
    """
    row = WeightedRow.relu2(n, u)
    if n == 1:
        return 1.0
    start = float(log_ndtr(u) - log_ndtr(-u))  # log-odds of P(s > 0), so of P(s < 0) reversed
    lowest = max(-start, -45.0)  # below it there is nothing to count
    highest = math.log(n) + max(0.0, -start) + 42
    v, measure = _panels(lowest, highest)
    if float(_largest(n, np.array([lowest]))[0]) < 1e-15 * row.active:  # smooth, 0 at both ends
        v = np.arange(lowest, highest, _TOP_STEP)
        measure = np.full(v.shape, _TOP_STEP)
    chance = measure * np.exp(math.log(n) - np.logaddexp(0, -v) - np.logaddexp(0, v))
    live = measure * _largest(n, v) > 1e-18 * row.active

    def maxima() -> Iterator[Maximum]:
        for at, factor in zip(v[live], chance[live], strict=True):
            below, mass = _panels(lowest, float(at))
            scores, top = _score(below, u), _score(np.array([at]), u)[0]
            factors = np.clip(scores / top, 0.0, 1.0) ** 2
            yield Maximum(factor, factors, mass * expit(below) * expit(-below), float(expit(-at)))

    return mean_top_weight(n, maxima(), _STEP, reach=35.0, zero=row.idle) / row.active


def _largest(n: float, v: Array) -> Array:
    """Density of the largest of n scores, as a function of the log-odds v of its probability."""
    others = (n - 1) * np.logaddexp(0, -v)
    return np.exp(math.log(n) - np.logaddexp(0, -v) - np.logaddexp(0, v) - others)


def size_top_weight(n: float, u: float) -> float:
    """Mean of the largest weight E max |s| / Σ|s|, for scores of mean u and deviation 1."""
    u = abs(u)
    edges = np.concatenate([[0.0], np.geomspace(1e-6, 0.5, 20), np.arange(1.0, u + 13.5, 0.5)])
    if n == 1:
        return 1.0

    def nodes(ends: Array) -> tuple[Array, Array]:
        sizes, widths = gauss(ends)
        return sizes, widths * (normal_density(sizes - u) + normal_density(sizes + u))

    tops, mass = nodes(edges)
    above = ndtr(u - tops) + ndtr(-u - tops)
    chance = n * mass * np.exp((n - 1) * np.log1p(-np.minimum(above, 1 - 1e-16)))
    live = chance > 1e-18

    def maxima() -> Iterator[Maximum]:
        for top, factor, beyond in zip(tops[live], n * mass[live], above[live], strict=True):
            sizes, weights = nodes(np.append(edges[edges < top], top))
            yield Maximum(factor, sizes / top, weights, beyond)

    return mean_top_weight(n, maxima(), _STEP, reach=35.0)


def _score(v: Array, u: float) -> Array:
    """Quantile of a score u + z at a probability given by its log-odds v."""
    z = np.copysign(ndtri_exp(-np.logaddexp(0, np.abs(v))), v)
    return np.asarray(np.maximum(u + z, 0.0))


def _panels(low: float, high: float) -> tuple[Array, Array]:
    """Gauss nodes and weights on [low, high], on panels of width 1, finer towards both ends."""
    fine = 2.0 ** -np.arange(0.0, 12.0)
    inner = np.concatenate([np.arange(low, high, 1.0), low + fine, high - fine, [high]])
    return gauss(np.unique(np.clip(inner, low, high)))


def _positive_nodes(u: float) -> tuple[Array, Array]:
    """Quadrature over the part above 0 of a normal score of mean u and standard deviation 1.

    The weights include the density: they sum to the probability of that part.
    """
    spread = 1 / max(1.0, -u)  # how far a score above 0 typically is, where 0 is in the tail
    top = max(u, 0.0) + 13.0
    edges = np.concatenate(
        [
            spread * np.geomspace(1e-22, 1.0, 100),
            np.arange(0.5, 80.0, 0.5) * spread,
            np.arange(max(u - 13.0, spread), top, 0.5),
            [top],
        ]
    )
    scores, widths = gauss(np.unique(edges[edges <= top]))
    return scores, widths * normal_density(scores - u)


_REASON = "The four numbers of a trained head do not determine it."
_IMPOSSIBLE = (
    "No independent logits with a skewness within ±1.62 have this Jensen gap at this deviation: a "
    "few keys beyond the first dominate."
)


def head_formulas(n: float, numbers: dict[str, float]) -> Formulas:
    """Formulas for a row of n >= 3 keys of a trained head.

    ``numbers`` are the keyword arguments of :func:`~acutance.theory.expected_head_metrics`.
    """
    head = expected_head_metrics(n, **numbers)
    log_n, entropy = math.log(n), float(head.entropy)
    values: dict[str, tuple[Kind, float]] = {
        "n_keys": ("fixed", n),
        "entropy": ("mean", entropy),
        "normalized_entropy": ("mean", entropy / log_n),
        "information": ("mean", log_n - entropy),
        "effective_keys": ("plug-in", float(head.effective_keys)),
        "top_weight": ("plug-in", float(head.top_weight)),
        "first_weight": ("mean", float(head.first_weight)),
        "sink_mass": ("fixed", 0.0),
        "first_gap": ("mean", numbers["first_gap"]),
        "rest_logit_std": ("mean", numbers["rest_logit_std"]),
        "rest_jensen_gap": ("mean", numbers["rest_jensen_gap"]),
    }
    formulas: Formulas = dict.fromkeys(NAMES, _REASON)
    return formulas | {
        name: _IMPOSSIBLE if math.isnan(value) else (kind, value)
        for name, (kind, value) in values.items()
    }


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
    formulas: Formulas = {name: ("fixed", value) for name, value in values.items()}
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
