"""Predictions of a softmax row of independent logits, metric by metric."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv, ndtr, poch

from acutance.theory.extremes import expected_max
from acutance.theory.families import Family, Gaussian
from acutance.theory.gaussian import (
    expected_collision_gauss,
    expected_entropy_gauss,
    expected_logsumexp_gauss,
    expected_max_gauss,
)
from acutance.theory.grid import grid
from acutance.theory.iid import (
    expected_collision,
    expected_entropy,
    expected_logsumexp,
    expected_weighted_mean,
)
from acutance.theory.prediction.record import Kind
from acutance.theory.row_means import (
    expected_effective_keys,
    expected_jacobian_fro2,
    expected_sparsity,
    expected_varentropy,
)
from acutance.theory.top_weight import expected_top_weight

__all__ = ["Formulas", "gaussian_deviation", "score_moments", "softmax_formulas"]

#: For each metric, what kind of number it is and how to compute it; or why there is none.
Formulas = dict[str, tuple[Kind, Callable[[], float]] | str]

_NO_MEAN = "The scores' law has no mean within float64, so neither has this."
_ONE_KEY = "With one key both the entropy and log n are 0."


def softmax_formulas(
    n: float, gamma: float, family: Family, shift: float, value_variance: float
) -> Formulas:
    """How to compute each metric of a row with logits shift + gamma s, s independent.

    Args:
        n: Number of keys, n >= 1.
        gamma: Scale of the logits, gamma >= 0.
        family: Law of a score s.
        shift: Added to every logit.
        value_variance: Variance of the values, summed over components.

    Returns:
        For each metric its kind and a function of no arguments, or a sentence.
    """
    log_n, normal = math.log(n), isinstance(family, Gaussian)
    mean, variance = score_moments(family)

    def entropy() -> float:
        return float(
            expected_entropy_gauss(n, gamma) if normal else expected_entropy(n, gamma, family)
        )

    def collision() -> float:
        exact = (
            expected_collision_gauss(n, gamma) if normal else expected_collision(n, gamma, family)
        )
        return min(float(exact), 1.0)

    def log_sum() -> float:
        if normal:
            return float(expected_logsumexp_gauss(n, gamma))
        if n == 1:
            return gamma * mean
        return float(expected_logsumexp(n, gamma, family))

    def top() -> float:
        return gamma * float(expected_max_gauss(n) if normal else expected_max(n, family))

    def attended() -> float:
        if normal:
            return gamma * gamma * (1 - collision())
        return gamma * float(expected_weighted_mean(n, gamma, family))

    def deviation() -> float:
        if normal:
            return gaussian_deviation(n, gamma)
        return gamma * math.sqrt(variance * (n - 1) / n)

    def varentropy() -> float:
        return float(expected_varentropy(n, gamma, family))

    def gaussian_entropy() -> float:
        if normal:
            return _mean_gaussian_entropy(n, gamma)
        return float(expected_entropy_gauss(n, deviation()))

    # What cancels at its end is kept from rounding below it.
    formulas: Formulas = {
        "n_keys": ("fixed", lambda: n),
        "entropy": ("mean", entropy),
        "normalized_entropy": ("mean", lambda: entropy() / log_n) if n > 1 else _ONE_KEY,
        "information": ("mean", lambda: max(log_n - entropy(), 0.0)),
        "effective_keys": ("mean", lambda: float(expected_effective_keys(n, gamma, family))),
        "sparsity": ("mean", lambda: float(expected_sparsity(n, gamma, family))),
        "collision": ("mean", collision),
        "top_weight": ("mean", lambda: float(expected_top_weight(n, gamma, family))),
        "first_weight": ("mean", lambda: 1 / n),
        "sink_mass": ("fixed", lambda: 0.0),
        "max_logit": ("mean", lambda: shift + top()),
        "lse": ("mean", lambda: shift + log_sum()),
        "logit_mean": ("mean", lambda: shift + gamma * mean),
        "logit_std": ("mean" if normal else "plug-in", deviation),
        "varentropy": ("mean", varentropy),
        "entropy_slope": ("mean", lambda: 0.0 - varentropy()),
        "mean_field_entropy": ("mean", lambda: log_n - (top() - gamma * mean)),
        "jensen_gap": ("mean", lambda: max(log_sum() - log_n - gamma * mean, 0.0)),
        "max_gap": ("mean", lambda: max(top() - attended(), 0.0)),
        "gaussian_entropy": ("mean" if normal else "plug-in", gaussian_entropy),
        "jacobian_trace": ("mean", lambda: max(1 - collision(), 0.0)),
        "noise_gain": (
            "mean",
            lambda: value_variance * float(expected_jacobian_fro2(n, gamma, family)),
        ),
    }
    if math.isnan(mean):
        lacking = ("max_logit", "lse", "logit_mean", "mean_field_entropy", "jensen_gap", "max_gap")
        formulas.update(dict.fromkeys(lacking, _NO_MEAN))
    if math.isnan(variance):
        reason = "The scores' law has no variance within float64."
        formulas.update(dict.fromkeys(("logit_std", "gaussian_entropy"), reason))
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
    r"""Mean of the plain standard deviation of n normal logits (dividing by n, not n - 1).

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
    """The mean of E H(n, g) over the deviation g that n normal logits happen to have."""
    if n == 1 or gamma == 0:
        return math.log(n)
    order = 60 if n < 8 else 24 if n < 64 else 8 if n < 1024 else 4
    z, weights = np.polynomial.hermite_e.hermegauss(order)
    kept = weights > 1e-14 * weights.sum()
    z, weights = z[kept], weights[kept] / weights[kept].sum()
    deviations = gamma * np.sqrt(2 * _chi_half(n, z) / n)
    return float(np.dot(weights, expected_entropy_gauss(n, deviations)))


def _chi_half(n: float, z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Half a chi-square variable of n - 1 degrees of freedom, at the normal quantile z."""
    half = (n - 1) / 2
    if half > 1e6:  # Wilson & Hilferty (1931); the inverse below loses digits there
        cube = 1 - 1 / (9 * half) + z / (3 * math.sqrt(half))
        return np.asarray(half * cube**3)
    return np.asarray(gammaincinv(half, ndtr(z)))
