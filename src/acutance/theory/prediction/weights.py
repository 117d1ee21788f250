r"""Rows of n Gaussian scores weighted by relu² or by their own size: exact means at finite n.

The scores are :math:`s_j = \beta + \gamma z_j`, the weights :math:`a_j = \max(s_j, 0)^2` or
:math:`|s_j|`, and :math:`p_j = a_j / \sum_k a_k`; only :math:`u = \beta / \gamma` matters. Ratios
of sums over independent keys are integrals of products over keys, as in
``acutance.theory.row_means``: with :math:`L(t) = E e^{-ta}` and :math:`M(t) = E e^{-ta^2}`,

.. math::

    E \frac{(\sum a)^2}{\sum a^2} &= 1 + n(n-1) \int_0^\infty (E[a e^{-ta^2}])^2 M^{n-2} \, dt, \\
    E S &= \sqrt{\frac n \pi} \int_0^\infty E[a e^{-ta^2}] \, M^{n-1} \frac{dt}{\sqrt t}, \\
    E \sum p^2 &= n \int_0^\infty t \, E[a^2 e^{-ta}] \, L^{n-1} dt, \\
    E H &= \int_0^\infty \bigl( (1 - L_\infty^n) e^{-t} - (L^n - L_\infty^n) \bigr) \frac{dt}{t}
           - n \int_0^\infty E[a \log a \, e^{-ta}] \, L^{n-1} dt.

A relu² row without a positive score has no weights at all (0/0); that happens with probability
:math:`L_\infty^n = \Phi(-u)^n`, and every mean is over the other rows.

Source: Su Jianlin, kexue.fm/archives/9889, for the sparsity of these weights with many keys.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_ndtr, ndtr, ndtri_exp

from acutance.theory.grid import NODES, WEIGHTS
from acutance.theory.top_weight import Scratch, lost_below

__all__ = ["WeightedRow", "relu2_top_weight", "size_top_weight"]

Array = NDArray[np.float64]

_STEP = 0.3  # of log t: the trapezoid rule is then right to exp(-pi²/0.3) = 5e-15
_TOP_STEP = 0.35  # of the log-odds of the largest score, where its density is smooth
_BELOW, _ABOVE = 75.0, 160.0  # log t on both sides of where the sums are of order 1
_FEWEST = 1e-9  # expected active keys below which a mean over active rows says nothing


@dataclass(frozen=True)
class WeightedRow:
    """The law of one weight, at unit gamma.

    Attributes:
        n: Number of keys.
        weights: Nodes of the positive weights.
        mass: Their probabilities.
        idle: Probability of a weight of 0.
        log_idle: Its logarithm.
    """

    n: float
    weights: Array
    mass: Array
    idle: float
    log_idle: float

    @classmethod
    def relu2(cls, n: float, u: float) -> "WeightedRow":
        """Squares of the positive scores of mean u and deviation 1."""
        scores, mass = _positive(u)
        return cls(n, scores * scores, mass, float(ndtr(-u)), float(log_ndtr(-u)))

    @classmethod
    def size(cls, n: float, u: float) -> "WeightedRow":
        """Sizes of scores of mean u and deviation 1."""
        parts = [_positive(u), _positive(-u)]
        weights, mass = (np.concatenate(column) for column in zip(*parts, strict=True))
        return cls(n, weights, mass, 0.0, -math.inf)

    @property
    def active(self) -> float:
        """Probability of a row with some weight."""
        return -math.expm1(self.n * self.log_idle)

    @property
    def has_rows(self) -> bool:
        """Whether rows with some weight are common enough to have a mean."""
        return self.active > _FEWEST

    def effective_keys(self) -> float:
        """E (Σa)²/Σa²."""
        if self.n == 1:
            return 1.0
        t, moment, rest = self._transforms(2.0, [self.weights])
        pairs = self.n * (self.n - 1) * (t * moment[0] ** 2 * np.exp((self.n - 2) * rest)).sum()
        return 1 + _STEP * float(pairs) / self.active

    def sparsity(self) -> float:
        """E Σa / sqrt(n Σa²)."""
        t, moment, rest = self._transforms(2.0, [self.weights])
        total = (np.sqrt(t) * moment[0] * np.exp((self.n - 1) * rest)).sum()
        return math.sqrt(self.n / math.pi) * _STEP * float(total) / self.active

    def collision(self) -> float:
        """E Σp²."""
        t, moment, rest = self._transforms(1.0, [self.weights**2])
        total = (t * t * moment[0] * np.exp((self.n - 1) * rest)).sum()
        return self.n * _STEP * float(total) / self.active

    def entropy(self) -> float:
        """E -Σ p log p."""
        t, moment, rest = self._transforms(1.0, [self.weights * np.log(self.weights)])
        idle = math.exp(self.n * self.log_idle)
        log_sum = (self.active * np.exp(-t) - (np.exp(self.n * rest) - idle)).sum()
        mean_log = self.n * (t * moment[0] * np.exp((self.n - 1) * rest)).sum()
        return max(_STEP * float(log_sum - mean_log) / self.active, 0.0)

    def _transforms(self, power: float, factors: list[Array]) -> tuple[Array, list[Array], Array]:
        """Points t, the means of factor · exp(-t a^power) there, and log E exp(-t a^power)."""
        raised = self.weights**power
        scale = -math.log(self.n * float(raised @ self.mass) + 1e-300)
        t = np.exp(np.arange(scale - _BELOW, scale + _ABOVE + 4 * math.log(self.n), _STEP))
        exponents = -t[:, None] * raised
        decay = np.exp(exponents)
        moments = [decay @ (factor * self.mass) for factor in factors]
        lost = -np.expm1(exponents, out=exponents) @ self.mass  # 1 - E exp
        near = np.log1p(-np.minimum(lost, 0.5))
        rest = np.where(lost < 0.5, near, np.log(self.idle + decay @ self.mass + 1e-300))
        return t, moments, rest


def relu2_top_weight(n: float, u: float) -> float:
    """E max a / Σa of relu² weights, over rows that have some.

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
    t = np.exp(np.arange(-math.log(n) - 35, 4.0, _STEP))
    outer = _STEP * t * np.exp(-t)
    total, scratch = 0.0, Scratch()
    for at, factor in zip(v[live], chance[live], strict=True):
        below, mass = _panels(lowest, float(at))
        mass = mass * expit(below) * expit(-below)
        scores, top = _score(below, u), _score(np.array([at]), u)[0]
        factors = np.clip(scores / top, 0.0, 1.0) ** 2
        kept, lost = lost_below(n, t, factors, mass, scratch)
        kept, lost = kept + row.idle, lost + expit(-at)
        near = np.log1p(-np.minimum(lost, 0.5))
        log_kept = np.where(lost < 0.5, near, np.log(np.maximum(kept, 1e-300)))
        total += factor * float(outer @ np.exp((n - 1) * log_kept))
    return total / row.active


def _largest(n: float, v: Array) -> Array:
    """Density of the log-odds of the largest of n."""
    others = (n - 1) * np.logaddexp(0, -v)
    return np.exp(math.log(n) - np.logaddexp(0, -v) - np.logaddexp(0, v) - others)


def size_top_weight(n: float, u: float) -> float:
    """E max |s| / Σ|s| of scores of mean u and deviation 1."""
    u = abs(u)
    edges = np.concatenate([[0.0], np.geomspace(1e-6, 0.5, 20), np.arange(1.0, u + 13.5, 0.5)])
    if n == 1:
        return 1.0

    def nodes(ends: Array) -> tuple[Array, Array]:
        half = 0.5 * np.diff(ends)[:, None]
        sizes = (0.5 * (ends[1:] + ends[:-1])[:, None] + half * NODES).ravel()
        density = np.exp(-0.5 * (sizes - u) ** 2) + np.exp(-0.5 * (sizes + u) ** 2)
        return sizes, (half * WEIGHTS).ravel() * density / math.sqrt(2 * math.pi)

    tops, mass = nodes(edges)
    above = ndtr(u - tops) + ndtr(-u - tops)
    chance = n * mass * np.exp((n - 1) * np.log1p(-np.minimum(above, 1 - 1e-16)))
    live = chance > 1e-18
    t = np.exp(np.arange(-math.log(n) - 35, 4.0, _STEP))
    outer = _STEP * t * np.exp(-t)
    total, scratch = 0.0, Scratch()
    for top, factor, beyond in zip(tops[live], n * mass[live], above[live], strict=True):
        sizes, part = nodes(np.append(edges[edges < top], top))
        kept, lost = lost_below(n, t, sizes / top, part, scratch)
        lost += beyond
        near = np.log1p(-np.minimum(lost, 0.5))
        far = np.log(np.maximum(kept, 1e-300))
        total += factor * float(outer @ np.exp((n - 1) * np.where(lost < 0.5, near, far)))
    return total


def _score(v: Array, u: float) -> Array:
    """The score u + z below which lies a probability of log-odds v."""
    z = np.copysign(ndtri_exp(-np.logaddexp(0, np.abs(v))), v)
    return np.asarray(np.maximum(u + z, 0.0))


def _panels(low: float, high: float) -> tuple[Array, Array]:
    """Gauss nodes and weights on [low, high], in panels of 1 and finer towards both ends."""
    fine = 2.0 ** -np.arange(0.0, 12.0)
    inner = np.concatenate([np.arange(low, high, 1.0), low + fine, high - fine, [high]])
    edges = np.unique(np.clip(inner, low, high))
    half = 0.5 * np.diff(edges)[:, None]
    nodes = 0.5 * (edges[1:] + edges[:-1])[:, None] + half * NODES
    return nodes.ravel(), (half * WEIGHTS).ravel()


def _positive(u: float) -> tuple[Array, Array]:
    """Nodes on the positive scores of mean u and deviation 1, and their probabilities."""
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
    edges = np.unique(edges[edges <= top])
    half = 0.5 * np.diff(edges)[:, None]
    scores = (0.5 * (edges[1:] + edges[:-1])[:, None] + half * NODES).ravel()
    density = np.exp(-0.5 * (scores - u) ** 2) / math.sqrt(2 * math.pi)
    return scores, (half * WEIGHTS).ravel() * density
