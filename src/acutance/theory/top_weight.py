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

from acutance.theory.families import Family, Gaussian, Gumbel, Logistic, as_family
from acutance.theory.gaussian import _broadcast
from acutance.theory.grid import NODES, WEIGHTS, grid

__all__ = ["expected_top_weight"]

Array = NDArray[np.float64]

_STEP = 0.35  # of log t: the trapezoid rule is then right to exp(-pi²/0.35) = 6e-13
_TOP_STEP = 0.35  # of the log-odds of the maximum, for laws that are smooth in them
_MANY = 1 << 15  # keys up to which n rounding errors of 1 are nothing
_NEGLIGIBLE = 1e-17  # of the probability of a maximum
_LEFT_OUT = 1e-13  # of the result: what rarer maxima could add
_REACH = 42.0  # log-odds beyond those of 1/n, where maxima are negligible
_SMOOTH = (Gaussian, Gumbel, Logistic)  # without an end or a kink
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
    edges = _edges(cells.log_odds)
    if isinstance(family, _SMOOTH):
        v = np.arange(-_REACH, log_n + _REACH, _TOP_STEP)
        density, scores = n * _TOP_STEP * expit(v) * expit(-v), family.offset(v)
    else:
        v, density, scores = (
            part.ravel() for part in (cells.log_odds, n * cells.weights, cells.scores)
        )
    chance = density * np.exp((n - 1) * log_expit(v))
    order = np.argsort(-chance)
    order = order[chance[order] > _NEGLIGIBLE * chance.max()]
    rest = np.cumsum(chance[order][::-1])[::-1]
    log_t = np.arange(-log_n - 30, 4.0, _STEP)
    t = np.exp(log_t)
    measure = _STEP * t * np.exp(-t)
    total, scratch = 0.0, Scratch()
    for index, left in zip(order, rest, strict=True):
        if left < _LEFT_OUT * total:
            break
        at, top = v[index], gamma * scores[index]
        nodes, mass = _nodes_below(at, gamma, family, edges)
        gaps = top - gamma * family.offset(nodes)
        factors = np.exp(-np.maximum(gaps, 0.0))
        kept, lost = lost_below(n, t, factors, mass, scratch)
        lost += expit(-at)
        near = np.log1p(-np.minimum(lost, 0.5))
        log_others = np.where(lost < 0.5, near, np.log(np.maximum(kept, 1e-300)))
        total += density[index] * float(measure @ np.exp((n - 1) * log_others))
    return total


class Scratch:
    """Memory for a matrix that is filled again and again: new pages cost more than exponentials."""

    def __init__(self) -> None:
        self._memory = np.empty(0)

    def matrix(self, rows: int, columns: int) -> Array:
        """A matrix of any numbers; what it held before is lost."""
        if self._memory.size < rows * columns:
            self._memory = np.empty(rows * columns)
        return self._memory[: rows * columns].reshape(rows, columns)


def lost_below(
    n: float, t: Array, factors: Array, mass: Array, scratch: Scratch
) -> tuple[Array, Array]:
    """Sums of mass · exp(-t factor) and of mass · (1 - exp(-t factor)), for each t.

    Args:
        n: Keys, to the power of which the sums are raised: so sharp they must be.
        t: Not negative, shape (rows,).
        factors: Not negative, shape (nodes,).
        mass: Probabilities of the nodes.
        scratch: Memory.
    """
    matrix = scratch.matrix(t.size, factors.size)
    np.multiply(-t[:, None], factors, out=matrix)
    if n > _MANY:
        lost = -np.expm1(matrix, out=matrix) @ mass
        return np.asarray(mass.sum() - lost), lost
    kept = np.exp(matrix, out=matrix) @ mass
    return kept, np.asarray(mass.sum() - kept)


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
