r"""Quadrature for softmax rows: over the distribution of one score, and over rows.

Every expectation of ``acutance.theory.expected`` is
:math:`\int \Psi(F(y), E\,\kappa(y - \gamma s)) dy` with kernels κ that live near 0,
:math:`F(y) = E \exp(-e^{\gamma s - y})` and a smooth Ψ. Averages over s are Gauss sums on cells,
which cut the line of log-odds :math:`v = \log(F / (1 - F))` where the quantile function is a
polynomial to rounding. Kinks, holes and singular edges of the law are found by bisection, so that
a distribution need not announce them. Where a cell is wide for the kernels, it is cut again around
each y. Integrals over y are Gauss sums on panels that are bisected until their Legendre
coefficients fall off.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import exp1, expit

from acutance.theory.arguments import Array, log_probability
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
@np.errstate(all="ignore")
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


Integrand = Callable[[Array], Array]


#: A function of g, a = e^-g and e^-a.
Kernel = Callable[[Array, Array, Array], Array]


_TOLERANCE = 1e-13  # of the integral over y


_NEGLIGIBLE = 1e-20  # of the result: expected number of keys in a tail that is left out


_RESOLVED = 3.0  # logits across a cell, up to which its own nodes are enough


_EMPTY = 42.0  # beyond this g + log n, all keys together have a = e^-g = 0


#: Coefficients of Ein(a) = a - a²/4 + a³/18 - ..., to the last bit for a <= 1.
_EIN = [0.0] + [-((-1.0) ** k) / (k * math.factorial(k)) for k in range(1, 19)]


_MOST_PANELS = 1 << 13  # in all; more are requested only by rounding


_MOST_PAIRS = 1 << 13  # (y, score) at a time, for a processor's cache


@dataclass(frozen=True)
class RowQuadrature:
    """Quadrature rule for means over softmax rows of n independent scores of one family.

    Logits are gamma times the scores. Scores are measured from ``family.origin()``.
    """

    n: float
    gamma: float
    family: Family
    scores: Array  # nodes of the cells that are narrow for the kernels, ascending
    weights: Array
    wide: Array  # (cells, 2): lower and upper logit of the others
    masses: Array  # their probabilities
    panels: Array  # g between which a kernel is a polynomial
    edges: Array  # y from which to start
    sharpness: float  # width of the kernels in y

    @classmethod
    def for_kernels(
        cls, n: float, gamma: float, family: Family, power: float = 1.0, moment: bool = False
    ) -> "RowQuadrature":
        """Choose nodes for means of kernels up to a^power e^-a, a = e^(gamma s - y).

        With ``moment``, also for means of these times the score s.
        """
        cells = grid(family)
        cells.require_tail(n)
        keys = n * cells.mass  # expected number in a cell
        if moment:
            keys = keys * (1 + np.abs(cells.scores).max(axis=1) / cells.unit)
        # A sum of powers is at least n^(1 - power).
        live = np.flatnonzero(keys > _NEGLIGIBLE * n ** (1 - max(power, 1.0)))
        keep = slice(live[0], live[-1] + 1)
        low, high = gamma * cells.low[keep], gamma * cells.high[keep]
        sharpness = min(1.0, 2 / math.sqrt(power))
        narrow = high - low <= _RESOLVED * sharpness
        panels = kernel_panels(power, math.log(n) + _EMPTY)
        return cls(
            n,
            gamma,
            family,
            cells.scores[keep][narrow].ravel(),
            cells.weights[keep][narrow].ravel(),
            np.stack([low[~narrow], high[~narrow]], axis=1),
            cells.mass[keep][~narrow],
            panels,
            _first_edges(np.concatenate([low, high[-1:]]), panels, power, 2 * sharpness),
            sharpness,
        )

    def others(self, below: Array, above: Array, chosen: int) -> Array:
        """F^(n - chosen) from F = ``below`` and 1 - F = ``above``: the keys not ``chosen``."""
        return np.asarray(np.exp((self.n - chosen) * log_probability(below, above)))

    def average(self, y: Array, kernels: list[Kernel], moment: bool = False) -> Array:
        """F(y), 1 - F(y) and the mean of each kernel over a score, at ascending y.

        With ``moment``, each kernel is multiplied by the score s. Shape (2 + kernels, len(y)).
        """
        sums = np.zeros((2 + len(kernels), y.size))

        def values(g: Array, a: Array, scores: Array) -> list[Array]:
            below = np.exp(-a)
            means = [kernel(g, a, below) for kernel in kernels]
            if moment:
                means = [value * scores for value in means]
            return [below, -np.expm1(-a), *means]

        if self.scores.size:
            self._add_narrow(y, sums, values)
        if self.wide.size:
            block = max(1, _MOST_PAIRS // (8 * len(self.wide)))
            for begin in range(0, y.size, block):
                rows = slice(begin, begin + block)
                self._add_wide(y[rows], sums[:, rows], values)
        return sums

    def mean(
        self,
        kernels: list[Kernel],
        product: Callable[..., Array],
        chosen: int = 1,
        moment: bool = False,
    ) -> float:
        """Integral over y of F^(n - chosen) times a ``product`` of the means of the kernels."""

        def integrand(y: Array) -> Array:
            below, above, *means = self.average(y, kernels, moment)
            return np.asarray(self.others(below, above, chosen) * product(*means))

        return self.integrate(integrand)

    def _add_narrow(
        self, y: Array, sums: Array, values: Callable[[Array, Array, Array], list[Array]]
    ) -> None:
        """Add to ``sums`` the cells that are narrow enough for their own Gauss nodes."""
        logits = self.gamma * self.scores
        mass = np.concatenate([[0.0], np.cumsum(self.weights)])
        mass_above = np.concatenate([np.cumsum(self.weights[::-1])[::-1], [0.0]])
        firsts = np.searchsorted(logits, y - self.panels[-1]).tolist()
        lasts = np.searchsorted(logits, y - self.panels[0]).tolist()
        reaches = np.searchsorted(y, y + 12, side="right").tolist()
        begin = 0
        while begin < y.size:
            first, end = firsts[begin], begin + 1
            while end < reaches[begin]:  # as many y as share most of their nodes
                if (lasts[end] - first) * (end + 1 - begin) > _MOST_PAIRS:
                    break
                end += 1
            last = lasts[end - 1]
            rows, near = slice(begin, end), slice(first, last)
            g = y[rows, None] - logits[near]
            a = np.exp(y[begin] - y[rows, None]) * np.exp(logits[near] - y[begin])
            sums_near = values(g, a, self.scores[near])
            for total, value in zip(sums, sums_near, strict=True):
                total[rows] += value @ self.weights[near]
            sums[0, rows] += mass[first]
            sums[1, rows] += mass_above[last]
            begin = end

    def _add_wide(
        self, y: Array, sums: Array, values: Callable[[Array, Array, Array], list[Array]]
    ) -> None:
        """Add to ``sums`` the cells that are wider than the kernels, on nodes around these."""
        low, high = self.wide.T
        # Scores out of the kernels' reach from each y: whole cells, and a part of one.
        end = y - self.panels[-1]
        cell = np.searchsorted(high, end, side="right")
        part = np.minimum(cell, high.size - 1)
        sums[0] += np.concatenate([[0.0], np.cumsum(self.masses)])[cell]
        sums[0] += self._mass(low[part], np.clip(end, low[part], high[part])) * (cell == part)
        end = y - self.panels[0]
        cell = np.searchsorted(low, end)
        part = np.maximum(cell - 1, 0)
        sums[1] += np.concatenate([np.cumsum(self.masses[::-1])[::-1], [0.0]])[cell]
        sums[1] += self._mass(np.clip(end, low[part], high[part]), high[part]) * (cell > part)
        cell_low, cell_high = y[:, None] - high, y[:, None] - low
        # Scores within it, by cell of the law and panel of the kernels.
        at, cell = np.nonzero((cell_low < self.panels[-1]) & (cell_high > self.panels[0]))
        left = np.maximum(cell_low[at, cell][:, None], self.panels[:-1])
        right = np.minimum(cell_high[at, cell][:, None], self.panels[1:])
        pair, panel = np.nonzero(right > left)
        if not pair.size:
            return
        half = 0.5 * (right - left)[pair, panel][:, None]
        g = 0.5 * (right + left)[pair, panel][:, None] + half * NODES
        logits = y[at[pair], None] - g
        weights = half * WEIGHTS * self._density(logits)
        for total, value in zip(sums, values(g, np.exp(-g), logits / self.gamma), strict=True):
            total += np.bincount(at[pair], weights=(value * weights).sum(axis=1), minlength=y.size)

    def _mass(self, left: Array, right: Array) -> Array:
        """Probability of a logit between ``left`` and ``right``, which lie in one cell."""
        half = 0.5 * (right - left)
        logits = 0.5 * (right + left)[:, None] + half[:, None] * NODES
        return half * (self._density(logits) @ WEIGHTS)

    def _density(self, logits: Array) -> Array:
        """Density of a logit."""
        return self.family.density(logits / self.gamma) / self.gamma

    def integrate(self, integrand: Integrand) -> float:
        """Integrate over y on panels that are bisected until each is polynomial to rounding."""
        left, right = self.edges[:-1], self.edges[1:]
        total = size = 0.0
        count = 0
        with np.errstate(all="ignore"):
            while left.size:
                half = 0.5 * (right - left)
                y = 0.5 * (right + left)[:, None] + half[:, None] * NODES
                values = integrand(y.ravel()).reshape(y.shape)
                area = half * (values @ WEIGHTS)
                sizes = half * (np.abs(values) @ WEIGHTS)
                top = np.abs(values).max(axis=1)
                rough = np.abs(values @ LEGENDRE)[:, -3:].max(axis=1) / np.maximum(top, 1e-300)
                # Coefficients up to degree 15 are seen, errors begin with degree 32.
                error = half * top * rough**1.7
                split = error > _TOLERANCE * (size + sizes.sum())
                # Nothing is sharper than the kernels; what looks so is rounding.
                split &= (rough > 1e-12) & (half > 0.1 * self.sharpness)
                count += left.size
                if count > _MOST_PANELS:
                    split[:] = False
                total += area[~split].sum()
                size += sizes[~split].sum()
                middle = 0.5 * (left + right)[split]
                left, right = (
                    np.stack([left[split], middle], axis=1).ravel(),
                    np.stack([middle, right[split]], axis=1).ravel(),
                )
        return float(total)


def small_power(a: Array, power: float) -> Array:
    """a^power by products and a root, for powers of 1/2, 1, 2, 3 and 4."""
    if power <= 1:
        return np.asarray(np.sqrt(a)) if power == 0.5 else a
    square = a * a
    if power == 2:
        return square
    return square * (a if power == 3 else square)


def power_kernel(power: float, degree: int = 0) -> Kernel:
    """The kernel g^degree a^power e^-a."""

    def values(g: Array, a: Array, below: Array) -> Array:
        kernel = small_power(a, power) * below
        return kernel * g**degree if degree else kernel

    return values


def gumbel_tail_mean(g: Array, a: Array, below: Array) -> Array:
    """K(g) = E (G - c) over G > g, for a standard Gumbel variable G with mean c.

    By a power series for g >= 0 and with the exponential integral below.
    """
    small = np.minimum(a, 1.0)
    values = np.zeros_like(a)  # Ein(small)
    for coefficient in reversed(_EIN):
        values *= small
        values += coefficient
    values += np.expm1(-small) * (np.euler_gamma - g)
    near = g < 0
    if near.any():
        values[near] = below[near] * (np.euler_gamma - g[near]) + exp1(a[near])
    return values


def kernel_panels(power: float, reach: float) -> Array:
    """Edges of panels in g = -log a on which a^power e^-a is a polynomial up to rounding."""
    lowest = -math.log(power + 44 + 10 * math.sqrt(power))  # e^-a is 0 below it
    width = 1 / math.sqrt(power)
    near = -math.log(power) + width * np.arange(-1.5, 9.0, 2.5)
    far = near[-1] + width * 3.5 * (2.0 ** np.arange(1, 24) - 1)
    panels = np.concatenate([near, far])
    inside = (panels > lowest) & (panels < reach)
    return np.concatenate([[lowest], panels[inside], [reach]])


def _first_edges(logits: Array, panels: Array, power: float, step: float) -> Array:
    """Initial panels of y, finer near ends of the distribution and peaks of the kernels."""
    lowest, reach = float(panels[0]), float(panels[-1])
    start, stop = logits[0] + lowest, logits[-1] + min(reach, reach / power + 12)
    around = np.array([lowest, 0.5 * lowest, 0, 3, 6, 10, 15, 22, 30, 40, reach])
    edges = np.concatenate(
        [
            [start, stop],
            logits,
            logits[0] + around,
            logits[-1] + around,
            np.arange(logits[-1], stop, 3 * step),
            np.arange(-8, 8) * step - math.log(power),
        ]
    )
    return _thinned(np.unique(np.clip(edges, start, stop)), step)


def _thinned(edges: Array, step: float) -> Array:
    """Drop edges closer than ``step`` to the one before; both ends stay."""
    chosen = [edges[0]]
    for edge in edges[1:-1]:
        if edge >= chosen[-1] + step:
            chosen.append(edge)
    if edges[-1] < chosen[-1] + step and len(chosen) > 1:
        chosen.pop()
    return np.array([*chosen, edges[-1]])
