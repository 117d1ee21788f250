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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from scipy.special import log_ndtr, ndtr

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


def normal_formulas(n: float, mean: float, deviation: float, *, squared: bool) -> Formulas:
    """Formulas for a row whose weights come from normal scores s.

    The weights are max(s, 0)² if ``squared``, with means over rows with weight; else s itself, of
    which metrics use the absolute value.
    """
    row, log_n = WeightedRow(n, mean / deviation, squared), math.log(n)
    entropy = cache(row.entropy)
    formulas: Formulas = {
        "entropy": ("mean", entropy),
        "normalized_entropy": ("mean", lambda: entropy() / log_n) if n > 1 else ONE_KEY,
        "information": ("mean", lambda: log_n - entropy()),
        "effective_keys": ("mean", row.effective_keys),
        "sparsity": ("mean", row.sparsity),
        "collision": ("mean", row.collision),
        "top_weight": ("mean", row.top_weight),
        "first_weight": ("mean", 1 / n),
    }
    if not squared:
        formulas |= dict.fromkeys(("entropy", "normalized_entropy", "information"), _SIGNED)
    elif not row.active > _FEWEST:
        reason = f"Practically no row has a positive score: P = {row.active:.1g}."
        formulas = dict.fromkeys(formulas, reason)
    return _without_softmax() | {
        **formulas,
        "n_keys": ("fixed", n),
        "sink_mass": ("fixed", 0.0),
        "max_logit": ("mean", lambda: mean + deviation * float(expected_max_gauss(n))),
        "logit_mean": ("mean", mean),
        "logit_std": ("mean", lambda: gaussian_deviation(n, deviation)),
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


def _without_softmax() -> Formulas:
    """The reason, by name, for each metric that only softmax weights have."""
    names = (
        *("lse", "varentropy", "entropy_slope", "mean_field_entropy", "jensen_gap", "max_gap"),
        *("gaussian_entropy", "first_gap", "rest_logit_std", "rest_jensen_gap"),
    )
    formulas: Formulas = dict.fromkeys(names, _NO_SOFTMAX)
    return {**formulas, "jacobian_trace": _MEASURED, "noise_gain": _MEASURED}


_STEP = 0.3  # of log t: the trapezoid rule is then right to exp(-pi²/0.3) = 5e-15


_BELOW, _ABOVE = 75.0, 160.0  # log t on both sides of where the sums are of order 1


_FEWEST = 1e-9  # expected active keys below which a mean over active rows says nothing


@dataclass(frozen=True)
class WeightedRow:
    """Quadrature for a row of n keys whose weights come from normal scores of deviation 1.

    Attributes:
        n: Number of keys.
        u: Mean of the scores s.
        squared: Whether the weights are max(s, 0)² instead of abs(s).
    """

    n: float
    u: float
    squared: bool

    @property
    def log_idle(self) -> float:
        """Logarithm of the probability that a weight is 0."""
        return float(log_ndtr(-self.u)) if self.squared else -math.inf

    @property
    def active(self) -> float:
        """Probability that a row has any weight."""
        return -math.expm1(self.n * self.log_idle)

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

    @property
    def _idle(self) -> float:
        """Probability that a weight is 0."""
        return math.exp(self.log_idle)

    @cached_property
    def _weights(self) -> tuple[Array, Array]:
        """Nodes of the positive weights, and their probabilities."""
        scores, mass = _positive_nodes(self.u)
        if self.squared:
            return scores * scores, mass
        below, mass_below = _positive_nodes(-self.u)
        return np.concatenate([scores, below]), np.concatenate([mass, mass_below])

    @cached_property
    def _of_weights(self) -> tuple[Array, Array, Array]:
        """:meth:`_transforms` of a² and a log a with exp(-ta), a the weight."""
        weights, _ = self._weights
        return self._transforms(1.0, [weights**2, weights * np.log(weights)])

    @cached_property
    def _of_squares(self) -> tuple[Array, Array, Array]:
        """:meth:`_transforms` of a with exp(-ta²), a the weight."""
        return self._transforms(2.0, [self._weights[0]])

    def _transforms(self, power: float, factors: list[Array]) -> tuple[Array, Array, Array]:
        """Means over one weight a, at quadrature points t.

        Returns:
            The points t; E factor · exp(-t a^power) for each factor; and log E exp(-t a^power).
        """
        weights, mass = self._weights
        raised = weights**power
        scale = -math.log(self.n * float(raised @ mass) + 1e-300)
        t = np.exp(np.arange(scale - _BELOW, scale + _ABOVE + 4 * math.log(self.n), _STEP))
        exponents = -t[:, None] * raised
        decay = np.exp(exponents)
        *moments, present = (decay @ (np.stack([*factors, np.ones_like(raised)]) * mass).T).T
        missing = -np.expm1(exponents, out=exponents) @ mass
        return t, np.stack(moments), log_probability(self._idle + present, missing)

    def top_weight(self) -> float:
        """Mean of the largest weight over the sum of all, over rows with weight.

        Given the largest weight the others are independent, cut off there.
        """
        if self.n == 1:
            return 1.0
        u = self.u if self.squared else abs(self.u)
        spread = _spread(u)
        fine, wide = np.geomspace(1e-6, 0.5, 20), np.arange(1.0, (max(u, 0) + 13.5) / spread, 0.5)
        edges = spread * np.concatenate([[0.0], fine, wide])

        def nodes(ends: Array) -> tuple[Array, Array]:
            sizes, widths = gauss(ends)
            mirrored = 0.0 if self.squared else normal_density(sizes + u)
            return sizes, widths * (normal_density(sizes - u) + mirrored)

        tops, mass = nodes(edges)
        above = ndtr(u - tops) + (0.0 if self.squared else ndtr(-u - tops))
        chance = self.n * mass * np.exp((self.n - 1) * np.log1p(-np.minimum(above, 1 - 1e-16)))
        live = chance > 1e-18 * self.active

        def maxima() -> Iterator[Maximum]:
            for top, factor, beyond in zip(
                tops[live], self.n * mass[live], above[live], strict=True
            ):
                sizes, weights = nodes(np.append(edges[edges < top], top))
                factors = (sizes / top) ** (2 if self.squared else 1)
                yield Maximum(factor, factors, weights, beyond)

        total = mean_top_weight(self.n, maxima(), _STEP, reach=35.0, zero=self._idle)
        return total / self.active


def _spread(u: float) -> float:
    """How far a normal score of mean u typically is above 0, where 0 is in its tail; else 1."""
    return 1 / max(1.0, -u)


def _positive_nodes(u: float) -> tuple[Array, Array]:
    """Quadrature over the part above 0 of a normal score of mean u and standard deviation 1.

    The weights include the density: they sum to the probability of that part.
    """
    spread = _spread(u)
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
