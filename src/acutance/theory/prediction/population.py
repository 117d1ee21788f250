r"""The formulas for infinitely many keys, at a number of keys n: what exact values are set beside.

With the cumulants' generating function :math:`K(\gamma) = \log E e^{\gamma s}` of a score, a row
that averages over so many keys that sums equal their means has

.. math::

    \log Z = \log n + K, \quad \log n - H = \gamma K' - K, \quad \operatorname{Var}_p = \gamma^2
    K'', \quad \sum_j p_j^2 = \frac{e^{K(2 \gamma) - 2 K(\gamma)}}{n}.

For Gaussian scores K is :math:`\gamma^2/2`, which gives :math:`H = \log n - \gamma^2/2` and
:math:`S = e^{-\gamma^2/2}`. At a finite n they hold while the sum behind them is carried by many
keys: entropy up to :math:`\sqrt{2 \log n}`, everything made of :math:`\sum p^2` up to half that.

Sources: Derrida (1981), Phys. Rev. B 24, 2613; Su Jianlin, kexue.fm/archives/9889.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_expit

from acutance.theory.families import Family, Gaussian
from acutance.theory.grid import NODES, WEIGHTS, grid
from acutance.theory.prediction.record import MetricRecord
from acutance.theory.prediction.softmax import score_moments

__all__ = ["gaussian_break_points", "softmax_population", "sparse_population"]

Array = NDArray[np.float64]

_FURTHER = 600.0  # log-odds beyond the cells, where an exponential tail may still be tilted up
_END = 16  # nodes at either end ...
_REACH = 1e-9  # ... whose share of a tilted law tells whether more of it lies beyond
_LARGEST = 1e150
_MARGIN = (1 - NODES[-1]) / (2 * NODES[-1])  # beyond the outermost nodes of a cell, in their range


def gaussian_break_points(n: float) -> tuple[float, float]:
    """Deviations of Gaussian logits up to which sparsity and entropy follow their formulas.

    Example:
        >>> gaussian_break_points(4096)  # sqrt(log(n) / 2) and sqrt(2 log n)
        (2.0393339..., 4.0786679...)
    """
    return math.sqrt(math.log(n) / 2), math.sqrt(2 * math.log(n))


def softmax_population(
    n: float, gamma: float, family: Family, shift: float, value_variance: float
) -> MetricRecord:
    """Every metric of a softmax row of independent logits shift + gamma s, for many keys.

    NaN throughout the weights where the mean of exp(gamma s) is infinite, or not within reach.

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
        jacobian_trace=1 - collision,
        noise_gain=value_variance * collision,
    )


def sparse_population(n: float, sparsity: float, **others: float) -> MetricRecord:
    """The metrics that follow from a population's sparsity.

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
    return math.exp(min(exponent, 700.0)) if not math.isnan(exponent) else math.nan


def _largest(n: float, family: Family) -> float:
    """The score that one key in n exceeds; sqrt(2 log n) for Gaussian ones."""
    if isinstance(family, Gaussian):
        return math.sqrt(2 * math.log(n))
    odds = math.log(n - 1) if n > 1 else -math.inf
    return float(family.quantile(np.array([odds]))[0]) if n > 1 else math.nan


@lru_cache(maxsize=1024)
def _tilted(family: Family, gamma: float) -> tuple[float, float, float]:
    """K, K' and K'' at gamma, NaN where the tilted law reaches beyond float64's quantiles."""
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
    """Scores less the origin, ascending, and the logarithms of their probabilities."""
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
