r"""Quadrature cells of a distribution, over which functions of one score are averaged.

The cells cut the line of log-odds :math:`v = \log(F / (1 - F))` where the quantile function is a
polynomial to rounding. Kinks, holes and singular edges of the law are found by bisection, so that
a distribution need not announce them.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from acutance.theory.arguments import Array
from acutance.theory.families import Family

_EPS = float(np.finfo(np.float64).eps)


_ORDER = 16  # Gauss points in a cell


NODES, WEIGHTS = np.polynomial.legendre.leggauss(_ORDER)


#: Values at the nodes to Legendre coefficients.
LEGENDRE: Array = (
    np.polynomial.legendre.legvander(NODES, _ORDER - 1)
    * WEIGHTS[:, None]
    * (np.arange(_ORDER) + 0.5)
)


#: Legendre coefficients to values at both ends.
_ENDS: Array = np.polynomial.legendre.legvander(np.array([-1.0, 1.0]), _ORDER - 1).T


_CELL = 2.0  # width of a cell in log-odds, before bisection ...


_FINEST = 2.0**-17  # ... and after: then a kink costs nothing ...


_FINEST_GAP = 2.0**-40  # ... nor does a hole in the law


_REACH = 160.0  # log-odds that are covered, e^-160 = 3e-70 of the mass ...


_FAR_REACH = 700.0  # ... or up to here, as far as the mean asks for


_MOST_CELLS = 4096


_MISSED = 1e-8  # expected number of keys above the cells


_LARGEST = 1e150  # quantiles beyond are cut off


@dataclass(frozen=True)
class Grid:
    """Quadrature cells of a score's distribution, ascending; scores are measured from ``origin``.

    Attributes:
        origin: The family's :meth:`~acutance.theory.families.Family.origin`.
        unit: Difference of the quantiles at 3/4 and 1/4.
        low: Lower end of each cell, shape (cells,).
        high: Upper end of each cell.
        mass: Probability of each cell.
        end: Log-odds of the probability at which the last cell ends.
        log_odds: Gauss nodes in each cell, shape (cells, 16).
        scores: The quantiles there.
        weights: Their probabilities.
        has_mean: Whether the scores beyond the cells contribute nothing to the mean.
        name: The family's name in error messages.
    """

    origin: float
    unit: float
    low: Array
    high: Array
    mass: Array
    end: float
    log_odds: Array
    scores: Array
    weights: Array
    has_mean: bool
    name: str

    def require_mean(self, what: str) -> None:
        """Raise ValueError, naming ``what`` needs it, if the scores have no mean in float64."""
        if not self.has_mean:
            raise ValueError(
                f"family: the mean of {self.name} is infinite, or dominated by scores beyond "
                f"float64, so {what} cannot be computed"
            )

    def require_tail(self, n: float) -> None:
        """Raise ValueError if the largest of n scores may lie beyond the cells."""
        if not n * expit(-self.end) < _MISSED:
            raise ValueError(
                f"n: the upper tail of {self.name} is known far enough only for n below "
                f"{_MISSED / expit(-self.end):.2g}, got n={n:g}"
            )


def gauss(edges: Array) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights of the panels between ascending edges, 16 a panel.

    Example:
        >>> nodes, weights = gauss(np.array([0.0, 1.0, 3.0]))
        >>> float(weights @ nodes**2)  # the integral of x² from 0 to 3
        9.0
    """
    half = 0.5 * np.diff(edges)[:, None]
    nodes = 0.5 * (edges[1:] + edges[:-1])[:, None] + half * NODES
    return nodes.ravel(), (half * WEIGHTS).ravel()


@lru_cache(maxsize=64)
def grid(family: Family) -> Grid:
    """The cells of a family, cached.

    Args:
        family: Any continuous law.

    Returns:
        The cells, ascending.

    Example:
        >>> from acutance.theory.families import Laplace
        >>> cells = grid(Laplace())
        >>> float((cells.weights * cells.scores**2).sum())  # variance
        2.0
    """
    with np.errstate(all="ignore"):
        return _grid(family)


def _grid(family: Family) -> Grid:
    """The quadrature grid of a family, refined until each cell is resolved."""
    lower, upper = family.offset(np.array([-1.1, 1.1]))
    unit = max(float(upper - lower), family.rounding(), 1e-290)
    ends, resolved = zip(*(_reach(family, side, unit) for side in (-1, 1)), strict=True)
    if min(-ends[0], ends[1]) < _CELL:
        raise ValueError(
            f"family: scores must stay below {_LARGEST:g} in absolute value; lower the scale of "
            f"{family}"
        )
    below, above = np.arange(ends[0], 0.0, _CELL), np.arange(0.0, ends[1] + 1, _CELL)
    edges = np.concatenate([below, above])
    start, stop = edges[:-1], edges[1:]
    done: list[tuple[Array, Array]] = []
    count = 0
    while start.size:
        split = _unresolved(family, unit, start, stop)
        if count + 2 * start.size > _MOST_CELLS:
            split[:] = False
        done.append((start[~split], stop[~split]))
        count += int((~split).sum())
        middle = 0.5 * (start + stop)
        start, stop = (
            np.concatenate([start[split], middle[split]]),
            np.concatenate([middle[split], stop[split]]),
        )
    start, stop = (np.concatenate(part) for part in zip(*done, strict=True))
    order = np.argsort(start)
    start, stop = start[order], stop[order]
    half = 0.5 * (stop - start)[:, None]
    nodes = 0.5 * (start + stop)[:, None] + half * NODES
    weights = half * WEIGHTS * expit(nodes) * expit(-nodes)
    log_odds = np.concatenate([start[:, None], nodes, stop[:, None]], axis=1)
    scores = _ascending(family.offset(log_odds))
    return Grid(
        family.origin(),
        unit,
        scores[:, 0],
        scores[:, -1],
        weights.sum(axis=1),
        float(edges[-1]),
        nodes,
        scores[:, 1:-1],
        weights,
        all(resolved),
        repr(family),
    )


def _ascending(scores: Array) -> Array:
    """Replace quantiles that fall, from rounding errors of the distribution, by the one before."""
    flat = scores.ravel()
    above = np.maximum.accumulate(np.maximum(flat, 0.0))
    below = np.minimum.accumulate(np.minimum(flat, 0.0)[::-1])[::-1]
    return np.asarray(above + below).reshape(scores.shape)


def _reach(family: Family, side: int, unit: float) -> tuple[float, bool]:
    """Log-odds at which the grid of one tail ends, and whether the mean score may ignore the rest.

    Args:
        family: distribution of the scores.
        side: 1 for the upper tail, -1 for the lower.
        unit: a typical difference of scores, with which the rest of the tail is compared.
    """
    end, step, beyond = 0.0, _REACH, 1.0
    middle = family.offset(np.zeros(()))
    while end < _FAR_REACH and beyond > 1e-20:
        inside = np.arange(end, min(end + step, _FAR_REACH) + 1, _CELL)
        distance = side * (family.offset(side * inside) - middle)
        # SciPy's quantiles may end, or turn round, where 1 - F rounds to 1.
        sound = (distance < _LARGEST) & (distance >= np.maximum.accumulate(distance))
        known = int(np.argmin(sound)) - 1 if not sound.all() else inside.size - 1
        end = float(inside[known])
        beyond = float(np.exp(-end) * distance[known] / unit)  # about the mean's part
        if known < inside.size - 1:
            break
    return side * end, beyond < 1e-12


def _unresolved(family: Family, unit: float, start: Array, stop: Array) -> NDArray[np.bool_]:
    """Mask of cells to bisect, where the quantile function is not yet polynomial to rounding."""
    half = 0.5 * (stop - start)
    nodes = 0.5 * (start + stop)[:, None] + half[:, None] * NODES
    values = family.offset(nodes)
    coefficients = (values - values[:, :1]) @ LEGENDRE
    # A kink beyond the outermost node shows at the end of the cell only.
    ends = family.offset(np.stack([start, stop], axis=1)) - values[:, :1]
    missed = np.abs(ends - coefficients @ _ENDS).max(axis=1)
    missed = np.maximum(missed, np.abs(coefficients[:, -3:]).max(axis=1))
    spread = np.abs(values[:, -1] - values[:, 0])
    # A distribution may know its tails only as 1 - F, to rounding.
    blur = 1e-12 + 32 * _EPS * np.exp(np.minimum(np.maximum(np.abs(start), np.abs(stop)), 40.0))
    noise = 64 * (_EPS * np.abs(values).max(axis=1) + family.rounding())
    rough = missed > 8 * blur * spread / half + noise
    rough &= np.minimum(np.abs(start), np.abs(stop)) < 30
    inward, outward = values[:, 1] - values[:, 0], values[:, -1] - values[:, -2]
    inward, outward = (np.where(start < 0, outward, inward), np.where(start < 0, inward, outward))
    known = (spread > 1e4 * noise) & (inward > 0) & (outward > 0)
    uneven = (outward > 4 * inward) | (inward > 12 * outward)
    finest = np.where(spread > 1e-3 * unit, _FINEST_GAP, _FINEST)
    return np.asarray((rough | (uneven & known)) & (half > finest))
