r"""The weight that the largest of n independent logits takes, on average.

The top weight is :math:`1 / (1 + R)`, R the sum of :math:`e^{\gamma(s_j - m)}` over the other keys,
which are independent given the maximum m:

.. math:: E \max_j p_j = \int dm \, n f(m) \int_0^\infty dt \, e^{-t}
          \Bigl( \int_{-\infty}^m f(s) \exp(-t e^{\gamma(s - m)}) ds \Bigr)^{n-1}.

The integrals over scores are Gauss sums over the log-odds of F, in which quantiles are smooth.

Source: Derrida (1981), Phys. Rev. B 24, 2613 (the random energy model, whose weights these are).
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, log_expit

from acutance.theory.families import Family, as_family
from acutance.theory.gaussian import _broadcast
from acutance.theory.grid import NODES, WEIGHTS, grid

__all__ = ["expected_top_weight"]

Array = NDArray[np.float64]

_STEP = 0.35  # of log t: the trapezoid rule is then right to exp(-pi²/0.35) = 6e-13
_NEGLIGIBLE = 1e-17  # of the probability of a maximum
_MANY = 1 << 15  # keys up to which n rounding errors of 1 are nothing
_LOWEST = -46.0  # log-odds below which nothing is counted
_GEOMETRIC = 2.0 ** -np.arange(1.0, 61.0)


def expected_top_weight(
    n: ArrayLike,
    gamma: ArrayLike,
    family: Any = "gaussian",
    *,
    d: float | None = None,
    rho: float | None = None,
    a: float | None = None,
) -> float | Array:
    r"""Expected largest weight of a softmax row with n independent logits.

    .. math:: E \max_j p_j

    Args:
        n: Number of keys, n >= 1. Values between the integers continue the formula.
        gamma: Scale of the logits, gamma >= 0.
        family: Law of the scores; see :func:`~acutance.theory.iid.expected_entropy`.
        d: Dimension for ``"cosine"``.
        rho: Exponent for ``"stretched"``.
        a: Tail index for ``"pareto"``.

    Returns:
        The mean, between 1/n and 1, float64 of the broadcast shape; a float for scalars. Right to
        1e-9, or 1e-7 where a heavy tail puts logits beyond 1e4.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the family's parameter is missing.

    Example:
        >>> expected_top_weight(2, 1.0)
        0.725213454
        >>> expected_top_weight(4096, [1.0, 4.0])
        array([0.00587586, 0.35399323])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613.
    """
    law = as_family(family, d=d, rho=rho, a=a)
    return _broadcast(lambda keys, scale: _top_weight(keys, scale, law), n, gamma)


@lru_cache(maxsize=1024)
def _top_weight(n: float, gamma: float, family: Family) -> float:
    if n == 1 or gamma == 0:
        return 1 / n
    cells = grid(family)
    cells.require_tail(n)
    log_n = math.log(n)
    v, density = cells.log_odds.ravel(), n * cells.weights.ravel()  # less F^(n-1)
    chance = density * np.exp((n - 1) * log_expit(v))
    live = chance > _NEGLIGIBLE * chance.max()
    edges = _edges(cells.log_odds)
    log_t = np.arange(-log_n - 30, 4.0, _STEP)
    t = np.exp(log_t)
    measure = _STEP * t * np.exp(-t)
    total = 0.0
    tops = gamma * cells.scores.ravel()
    for at, top, factor in zip(v[live], tops[live], density[live], strict=True):
        nodes, mass = _nodes_below(at, gamma, family, edges)
        gaps = top - gamma * family.offset(nodes)
        exponents = -t[:, None] * np.exp(-np.maximum(gaps, 0.0))
        if n > _MANY:
            lost = expit(-at) - np.expm1(exponents) @ mass
            log_others = np.log1p(-np.minimum(lost, 0.5))  # (1 - lost)^n is 0 beyond
        else:
            each = np.exp(exponents)
            kept, lost = each @ mass, expit(-at) + (1 - each) @ mass
            near = np.log1p(-np.minimum(lost, 0.5))
            log_others = np.where(lost < 0.5, near, np.log(np.maximum(kept, 1e-300)))
        total += factor * float(measure @ np.exp((n - 1) * log_others))
    return total


def _nodes_below(at: float, gamma: float, family: Family, edges: Array) -> tuple[Array, Array]:
    """Nodes in log-odds below ``at`` and their probabilities, dense where a logit is close."""
    closest = family.offset(np.array([at - 1e-3, at]))
    slope = max(gamma * float(closest[1] - closest[0]) * 1e3, 1e-300)
    halvings = min(max(math.ceil(math.log2(slope)) + 1, 1), _GEOMETRIC.size)
    near = at - 2 * _GEOMETRIC[:halvings]
    edges = np.unique(np.concatenate([edges[edges < at], near, [at]]))
    edges = edges[edges >= _LOWEST] if at > _LOWEST else edges
    half = 0.5 * np.diff(edges)[:, None]
    nodes = (0.5 * (edges[1:] + edges[:-1])[:, None] + half * NODES).ravel()
    weights = (half * WEIGHTS).ravel()
    return nodes, weights * expit(nodes) * expit(-nodes)


def _edges(log_odds: Array) -> Array:
    """Ends of cells whose Gauss nodes are given, so that kinks of the law stay between panels."""
    middle = 0.5 * (log_odds[:, 0] + log_odds[:, -1])
    half = 0.5 * (log_odds[:, -1] - log_odds[:, 0]) / NODES[-1]
    return np.append(middle - half, middle[-1] + half[-1])
