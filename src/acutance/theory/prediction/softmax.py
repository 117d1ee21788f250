r"""Predictions of a softmax row of independent logits: exact at n keys, and for infinitely many.

For infinitely many keys, with the cumulant generating function
:math:`K(\gamma) = \log E e^{\gamma s}` of a score,

.. math::

    \log Z = \log n + K, \quad \log n - H = \gamma K' - K, \quad \operatorname{Var}_p = \gamma^2
    K'', \quad \sum_j p_j^2 = \frac{e^{K(2 \gamma) - 2 K(\gamma)}}{n}.

For Gaussian scores K is :math:`\gamma^2/2`, which gives :math:`H = \log n - \gamma^2/2` and
:math:`S = e^{-\gamma^2/2}`. At a finite n these hold while many keys carry the sum behind them:
entropy up to :math:`\sqrt{2 \log n}`, everything made of :math:`\sum p^2` up to half that.

Sources: Derrida (1981), Phys. Rev. B 24, 2613; Su Jianlin, kexue.fm/archives/9889.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy.special import gammaincinv, log_expit, ndtr, poch

from acutance.theory.arguments import Array
from acutance.theory.families import Family, Gaussian
from acutance.theory.finite_n.expected import (
    expected_collision,
    expected_effective_keys,
    expected_entropy,
    expected_jacobian_fro2,
    expected_logsumexp,
    expected_max,
    expected_sparsity,
    expected_top_weight,
    expected_varentropy,
    expected_weighted_mean,
)
from acutance.theory.finite_n.gaussian import expected_entropy_gauss
from acutance.theory.finite_n.grid import NODES, WEIGHTS, grid
from acutance.theory.prediction.record import Kind, MetricRecord

#: For each metric, what kind of number it is, and the number or how to compute it; or why there is
#: none.
Formulas = dict[str, tuple[Kind, float | Callable[[], float]] | str]


_NO_MEAN = "The scores' law has no mean within float64, so neither has this."


ONE_KEY = "With one key both the entropy and log n are 0."


def softmax_formulas(
    n: float, gamma: float, family: Family, shift: float, value_variance: float
) -> Formulas:
    """Formulas for each metric of a row with independent logits shift + gamma s.

    Args:
        n: Number of keys, n >= 1.
        gamma: Scale of the logits, gamma >= 0.
        family: Distribution of a score s.
        shift: Added to every logit.
        value_variance: Variance of the values, summed over components.

    Returns:
        For each metric its kind and a function without arguments that evaluates it, or a sentence
        that says why there is no formula.
    """
    log_n, normal = math.log(n), isinstance(family, Gaussian)
    mean, variance = score_moments(family)

    def entropy() -> float:
        return float(expected_entropy(n, gamma, family))

    def collision() -> float:
        return min(float(expected_collision(n, gamma, family)), 1.0)

    def log_sum(n: float = n) -> float:
        return gamma * mean if n == 1 else float(expected_logsumexp(n, gamma, family))

    def top() -> float:
        return gamma * float(expected_max(n, family))

    def attended() -> float:
        return gamma * float(expected_weighted_mean(n, gamma, family))

    def deviation(n: float = n) -> float:
        if normal:
            return gaussian_deviation(n, gamma)
        return gamma * math.sqrt(variance * (n - 1) / n)

    def varentropy() -> float:
        return float(expected_varentropy(n, gamma, family))

    def gaussian_entropy() -> float:
        if normal:
            return _mean_gaussian_entropy(n, gamma)
        return float(expected_entropy_gauss(n, deviation()))

    def rest_jensen_gap() -> float:
        return max(log_sum(n - 1) - math.log(n - 1) - gamma * mean, 0.0)

    def noise_gain() -> float:
        return value_variance * float(expected_jacobian_fro2(n, gamma, family))

    # What cancels at its end is kept from rounding below it.
    formulas: Formulas = {
        "n_keys": ("fixed", n),
        "entropy": ("mean", entropy),
        "normalized_entropy": ("mean", lambda: entropy() / log_n) if n > 1 else ONE_KEY,
        "information": ("mean", lambda: max(log_n - entropy(), 0.0)),
        "effective_keys": ("mean", lambda: float(expected_effective_keys(n, gamma, family))),
        "sparsity": ("mean", lambda: float(expected_sparsity(n, gamma, family))),
        "collision": ("mean", collision),
        "top_weight": ("mean", lambda: float(expected_top_weight(n, gamma, family))),
        "first_weight": ("mean", 1 / n),
        "sink_mass": ("fixed", 0.0),
        "max_logit": ("mean", lambda: shift + top()),
        "lse": ("mean", lambda: shift + log_sum()),
        "logit_mean": ("mean", shift + gamma * mean),
        "logit_std": ("mean" if normal else "plug-in", deviation),
        "varentropy": ("mean", varentropy),
        "entropy_slope": ("mean", lambda: 0.0 - varentropy()),
        "mean_field_entropy": ("mean", lambda: log_n - (top() - gamma * mean)),
        "jensen_gap": ("mean", lambda: max(log_sum() - log_n - gamma * mean, 0.0)),
        "max_gap": ("mean", lambda: max(top() - attended(), 0.0)),
        "gaussian_entropy": ("mean" if normal else "plug-in", gaussian_entropy),
        "first_gap": ("mean", lambda: gamma * mean - log_sum(n - 1)),
        "rest_logit_std": ("mean" if normal else "plug-in", lambda: deviation(n - 1)),
        "rest_jensen_gap": ("mean", rest_jensen_gap),
        "jacobian_trace": ("mean", lambda: max(1 - collision(), 0.0)),
        "noise_gain": ("mean", noise_gain),
    }
    if n < 2:
        formulas.update(dict.fromkeys(("first_gap", "rest_logit_std", "rest_jensen_gap"), ONE_KEY))
    if math.isnan(mean):
        gaps = ("mean_field_entropy", "jensen_gap", "max_gap", "first_gap", "rest_jensen_gap")
        lacking = ("max_logit", "lse", "logit_mean", *gaps)
        formulas.update(dict.fromkeys(lacking, _NO_MEAN))
    if math.isnan(variance):
        reason = "The scores' law has no variance within float64."
        formulas.update(dict.fromkeys(("logit_std", "rest_logit_std", "gaussian_entropy"), reason))
    return formulas


def score_moments(family: Family) -> tuple[float, float]:
    """Mean and variance of one score; NaN where it has none within float64.

    Example:
        >>> from acutance.theory.families import as_family
        >>> score_moments(as_family("exponential"))
        (1.0, 1.0)
        >>> score_moments(as_family("pareto", a=1.5))
        (3.0, nan)
    """
    if isinstance(family, Gaussian):
        return 0.0, 1.0
    cells = grid(family)
    if not cells.has_mean:
        return math.nan, math.nan
    mean = float((cells.weights * cells.scores).sum())
    parts = (cells.weights * (cells.scores - mean) ** 2).sum(axis=1)
    settled = max(parts[0], parts[-1]) < 1e-9 * parts.sum()
    centre = cells.origin + mean
    if abs(centre) < 1e-13 * cells.unit:
        centre = 0.0  # a symmetric law, to rounding
    return centre, float(parts.sum()) if settled else math.nan


def gaussian_deviation(n: float, gamma: float) -> float:
    r"""Mean of the standard deviation (dividing by n) of n normal logits.

    .. math:: E \sqrt{M_2 / n} = \gamma \sqrt{2/n}\, \Gamma(n/2) / \Gamma((n-1)/2)

    Example:
        >>> gaussian_deviation(2, 1.0)  # E |z1 - z2| / 2 = 1 / sqrt(pi)
        0.564189583548
        >>> gaussian_deviation(1e12, 3.0)
        3.0
    """
    if n == 1:
        return 0.0
    if n > 1e6:
        return gamma * (1 - 3 / (4 * n))
    return gamma * math.sqrt(2 / n) * float(poch((n - 1) / 2, 0.5))


def _mean_gaussian_entropy(n: float, gamma: float) -> float:
    """Mean of ``expected_entropy_gauss(n, g)``, g the sample deviation of n normal logits.

    The logits have standard deviation gamma. It predicts the metric ``gaussian_entropy``.
    """
    if n == 1 or gamma == 0:
        return math.log(n)
    order = 60 if n < 8 else 24 if n < 64 else 8 if n < 1024 else 4
    z, weights = np.polynomial.hermite_e.hermegauss(order)
    significant = weights > 1e-14 * weights.sum()
    z, weights = z[significant], weights[significant] / weights[significant].sum()
    deviations = gamma * np.sqrt(2 * _chi_half(n, z) / n)
    return float(np.dot(weights, expected_entropy_gauss(n, deviations)))


def _chi_half(n: float, z: Array) -> Array:
    """Half a chi-square variable of n - 1 degrees of freedom, at the normal quantile z."""
    half = (n - 1) / 2
    if half > 1e6:  # Wilson & Hilferty (1931); the inverse below loses digits there
        cube = 1 - 1 / (9 * half) + z / (3 * math.sqrt(half))
        return np.asarray(half * cube**3)
    return np.asarray(gammaincinv(half, ndtr(z)))


_FURTHER = 600.0  # log-odds beyond the cells, where an exponential tail may still be tilted up


_END = 16  # nodes at either end ...


_REACH = 1e-9  # ... whose share of a tilted law tells whether more of it lies beyond


_LARGEST = 1e150


_MARGIN = (1 - NODES[-1]) / (2 * NODES[-1])  # beyond the outermost nodes of a cell, in their range


def gaussian_break_points(n: float) -> tuple[float, float]:
    """Deviations of n Gaussian logits up to which the formulas for many keys hold.

    The first is for sparsity, the second for entropy.

    Example:
        >>> gaussian_break_points(4096)  # sqrt(log(n) / 2) and sqrt(2 log n)
        (2.0393339..., 4.0786679...)
    """
    return math.sqrt(math.log(n) / 2), math.sqrt(2 * math.log(n))


def softmax_population(
    n: float, gamma: float, family: Family, shift: float, value_variance: float
) -> MetricRecord:
    """Large-n value of every metric of a softmax row with independent logits shift + gamma s.

    Metrics of the weights are NaN where the mean of exp(gamma s) is infinite or not computable.

    Example:
        >>> row = softmax_population(4096, 2.0, Gaussian(), 0.0, 1.0)
        >>> row.entropy, row.sparsity, row.effective_keys
        (6.3177661..., 0.1353352..., 75.02...)
    """
    log_n = math.log(n)
    mean, deviation = score_moments(family)[0], math.sqrt(score_moments(family)[1])
    log_mean, tilted_mean, tilted_variance = _tilted(family, gamma)
    double = _tilted(family, 2 * gamma)[0]
    with np.errstate(over="ignore"):
        collision = float(np.exp(double - 2 * log_mean - log_n))
    information = gamma * tilted_mean - log_mean
    variance = gamma * gamma * tilted_variance
    top = gamma * _largest(n, family)
    return MetricRecord(
        n_keys=n,
        entropy=log_n - information,
        normalized_entropy=1 - information / log_n if n > 1 else math.nan,
        information=information,
        effective_keys=1 / collision if collision else math.inf,
        sparsity=float(np.exp(log_mean - double / 2)),
        collision=collision,
        top_weight=_bounded_exp(top - log_mean - log_n),
        first_weight=1 / n,
        sink_mass=0.0,
        max_logit=shift + top,
        lse=shift + log_n + log_mean,
        logit_mean=shift + gamma * mean,
        logit_std=gamma * deviation,
        varentropy=variance,
        entropy_slope=-variance,
        mean_field_entropy=log_n - (top - gamma * mean),
        jensen_gap=log_mean - gamma * mean,
        max_gap=top - gamma * tilted_mean,
        gaussian_entropy=log_n - (gamma * deviation) ** 2 / 2,
        first_gap=gamma * mean - log_n - log_mean,
        rest_logit_std=gamma * deviation,
        rest_jensen_gap=log_mean - gamma * mean,
        jacobian_trace=1 - collision,
        noise_gain=value_variance * collision,
    )


def sparse_population(n: float, sparsity: float, **others: float) -> MetricRecord:
    """The metrics of a row that follow from its sparsity in the limit of many keys.

    Example:
        >>> sparse_population(100, 0.5).effective_keys
        25.0
    """
    effective = n * sparsity * sparsity
    return MetricRecord(
        n_keys=n,
        sparsity=sparsity,
        effective_keys=effective,
        collision=1 / effective if effective else math.inf,
        **others,
    )


def _bounded_exp(exponent: float) -> float:
    """Exp that does not overflow; NaN for NaN."""
    return math.exp(min(exponent, 700.0)) if not math.isnan(exponent) else math.nan


def _largest(n: float, family: Family) -> float:
    """The score that one key in n exceeds on average; about sqrt(2 log n) for Gaussian scores."""
    if isinstance(family, Gaussian):
        return math.sqrt(2 * math.log(n))
    odds = math.log(n - 1) if n > 1 else -math.inf
    return float(family.quantile(np.array([odds]))[0]) if n > 1 else math.nan


@lru_cache(maxsize=1024)
def _tilted(family: Family, gamma: float) -> tuple[float, float, float]:
    """K(gamma) = log E e^(gamma s) of one score s, K' and K''; NaN beyond float64's quantiles."""
    if isinstance(family, Gaussian):
        return gamma * gamma / 2, gamma, 1.0
    scores, log_weights = _scores(family)
    exponents = gamma * scores + log_weights
    largest = float(exponents.max())
    weights = np.exp(exponents - largest)
    total = float(weights.sum())
    ends = max(weights[:_END].sum(), weights[-_END:].sum()) / total
    if not grid(family).has_mean or ends > _REACH:
        return math.nan, math.nan, math.nan
    mean = float((weights * scores).sum()) / total
    variance = float((weights * (scores - mean) ** 2).sum()) / total
    origin = family.origin()
    return largest + math.log(total) + gamma * origin, origin + mean, variance


@lru_cache(maxsize=64)
def _scores(family: Family) -> tuple[Array, Array]:
    """Scores minus the origin, ascending, and logarithms of their probabilities."""
    cells = grid(family)
    first, last = cells.log_odds[0], cells.log_odds[-1]  # which end short of their cells
    low = first[0] - np.ptp(first) * _MARGIN - np.arange(0.0, _FURTHER, 2.0)[::-1]
    high = last[-1] + np.ptp(last) * _MARGIN + np.arange(0.0, _FURTHER, 2.0)
    sides = []
    for edges in (low, high):
        nodes = (0.5 * (edges[1:] + edges[:-1])[:, None] + NODES).ravel()
        with np.errstate(all="ignore"):
            offsets = family.offset(nodes)
        known = np.isfinite(offsets) & (np.abs(offsets) < _LARGEST)
        log_mass = np.tile(np.log(WEIGHTS), edges.size - 1) + log_expit(nodes) + log_expit(-nodes)
        sides.append((offsets[known], log_mass[known]))
    inside = (cells.scores.ravel(), np.log(cells.weights.ravel()))
    scores, log_weights = zip(sides[0], inside, sides[1], strict=True)
    return np.concatenate(scores), np.concatenate(log_weights)
