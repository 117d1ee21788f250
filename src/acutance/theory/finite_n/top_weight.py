r"""Mean of the largest weight of a softmax row of n independent logits.

The top weight is :math:`1 / (1 + R)`, R the sum of :math:`e^{\gamma(s_j - m)}` over the other keys,
which are independent given the maximum m:

.. math:: E \max_j p_j = \int dm \, n f(m) \int_0^\infty dt \, e^{-t}
          \Bigl( \int_{-\infty}^m f(s) \exp(-t e^{\gamma(s - m)}) ds \Bigr)^{n-1}.

The integrals over scores are Gauss sums over the log-odds of F, in which quantiles are smooth.

Source: Derrida (1981), Phys. Rev. B 24, 2613 (the random energy model, whose weights these are).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, log_expit

from acutance.theory.arguments import Array, log_probability
from acutance.theory.families import Family, FamilyParameter, Gaussian, Gumbel, Logistic
from acutance.theory.finite_n.grid import NODES, gauss, grid
from acutance.theory.finite_n.row import expectation

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
    n: ArrayLike, gamma: ArrayLike, family: Any = "gaussian", **parameter: Unpack[FamilyParameter]
) -> float | Array:
    r"""Expected largest weight of a softmax row with n independent logits.

    .. math:: E \max_j p_j

    Args:
        n: Number of keys, n >= 1; it need not be an integer.
        gamma: Scale of the logits, gamma >= 0.
        family: Distribution of the scores; see :func:`~acutance.theory.expected_entropy`.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        The mean, between 1/n and 1, float64 of the broadcast shape; a float for scalars.
        Accurate to 1e-9, or to 1e-7 for heavy-tailed families whose logits exceed 1e4.

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
    return expectation(_top_weight, n, gamma, family, parameter)


@lru_cache(maxsize=1024)
def _top_weight(n: float, gamma: float, family: Family) -> float:
    """:func:`expected_top_weight` for one n and gamma, without checks."""
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
        transform = laplace_power(n, t, factors, mass, scratch, above=float(expit(-at)))
        total += density[index] * float(measure @ transform)
    return total


class Scratch:
    """Reusable memory for a matrix; allocating new pages costs more than computing exponentials."""

    def __init__(self) -> None:
        self._memory = np.empty(0)

    def matrix(self, rows: int, columns: int) -> Array:
        """An uninitialised matrix in the reused memory."""
        if self._memory.size < rows * columns:
            self._memory = np.empty(rows * columns)
        return self._memory[: rows * columns].reshape(rows, columns)


def laplace_power(
    n: float,
    t: Array,
    factors: Array,
    mass: Array,
    scratch: Scratch,
    above: float,
    zero: float = 0.0,
) -> Array:
    """Laplace transforms of the sum of the n - 1 other keys' weights, at each t.

    Args:
        n: Number of keys.
        t: Arguments of the transform, not negative, shape (rows,).
        factors: Weights of one key, relative to the largest, shape (nodes,).
        mass: Probabilities of these.
        scratch: Memory for the matrix of rows and nodes.
        above: Probability of a weight above the largest.
        zero: Probability of a weight of 0.
    """
    matrix = scratch.matrix(t.size, factors.size)
    np.multiply(-t[:, None], factors, out=matrix)
    if n > _MANY:
        missing = -np.expm1(matrix, out=matrix) @ mass
        transform = mass.sum() - missing
    else:
        transform = np.exp(matrix, out=matrix) @ mass
        missing = mass.sum() - transform
    log_transform = log_probability(transform + zero, missing + above)
    return np.asarray(np.exp((n - 1) * log_transform))


def _nodes_below(at: float, gamma: float, family: Family, edges: Array) -> tuple[Array, Array]:
    """Quadrature nodes in log-odds below ``at`` and their probabilities, denser near ``at``."""
    closest = family.offset(np.array([at - 1e-3, at]))
    slope = max(gamma * float(closest[1] - closest[0]) * 1e3, 1e-300)
    halvings = min(max(math.ceil(math.log2(slope)) + 1, 1), _GEOMETRIC.size)
    near = at - 2 * _GEOMETRIC[:halvings]
    edges = np.unique(np.concatenate([edges[edges < at], near, [at]]))
    edges = edges[edges >= _LOWEST] if at > _LOWEST else edges
    nodes, weights = gauss(edges)
    return nodes, weights * expit(nodes) * expit(-nodes)


def _edges(log_odds: Array) -> Array:
    """Edges of the cells with these Gauss nodes, so that no panel contains a kink."""
    middle = 0.5 * (log_odds[:, 0] + log_odds[:, -1])
    half = 0.5 * (log_odds[:, -1] - log_odds[:, 0]) / NODES[-1]
    return np.append(middle - half, middle[-1] + half[-1])
