r"""Laws of a single logit, and the grid on which any of them is averaged.

A family gives density, distribution function and quantiles of one logit at unit scale. Quantiles
take the log-odds :math:`v = \log(F / (1 - F))`, which tell the two tails apart to the last bit: in
v every law has tails of the same exponential shape, a singular edge of the density is smooth, and
a heavy tail is one exponential.

The grid cuts the line of v into cells on which the quantile function is a polynomial to rounding.
Kinks of the law are found by bisection, so that a distribution need not announce them.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaincinv, betaln, expit, log_expit, ndtr, ndtri_exp
from scipy.stats import rv_continuous
from scipy.stats.distributions import rv_frozen

__all__ = ["FAMILIES", "Family", "Grid", "as_family", "grid"]

Array = NDArray[np.float64]

_EPS = float(np.finfo(np.float64).eps)
_LOG_2 = float(np.log(2.0))
_ORDER = 16  # Gauss points in a cell
NODES, WEIGHTS = np.polynomial.legendre.leggauss(_ORDER)
#: Values at the nodes to Legendre coefficients.
LEGENDRE: Array = (
    np.polynomial.legendre.legvander(NODES, _ORDER - 1)
    * WEIGHTS[:, None]
    * (np.arange(_ORDER) + 0.5)
)

_CELL = 2.0  # width of a cell in log-odds, before bisection ...
_FINEST = 2.0**-17  # ... and after: then a kink costs nothing
_REACH = 80.0  # log-odds that are covered, e^-80 = 2e-35 of the mass ...
_FAR_REACH = 700.0  # ... or up to here, as far as the mean asks for
_MOST_CELLS = 4096
_LARGEST = 1e150  # quantiles beyond are cut off


@dataclass(frozen=True)
class Family:
    """Law of one logit; its subclasses are the families of this module."""

    def pdf(self, x: Array) -> Array:
        """Give the density at x."""
        raise NotImplementedError

    def cdf(self, x: Array) -> Array:
        """Give the probability of at most x, to relative accuracy."""
        raise NotImplementedError

    def sf(self, x: Array) -> Array:
        """Give the probability of more than x, to relative accuracy."""
        raise NotImplementedError

    def quantile(self, logit: Array) -> Array:
        """Give the x at which log(cdf / sf) is ``logit``."""
        raise NotImplementedError


class _Symmetric(Family):
    """A law that is the same for -x: the lower half follows from the upper one."""

    def cdf(self, x: Array) -> Array:
        return self.sf(-x)

    def quantile(self, logit: Array) -> Array:
        # The log of the upper tail, at most log(1/2).
        return np.copysign(self._upper(log_expit(-np.abs(logit))), logit)

    def _upper(self, log_sf: Array) -> Array:
        raise NotImplementedError


@dataclass(frozen=True)
class Gaussian(_Symmetric):
    """Standard normal."""

    def pdf(self, x: Array) -> Array:
        density: Array = np.exp(-0.5 * x * x) / np.sqrt(2 * np.pi)
        return density

    def sf(self, x: Array) -> Array:
        return np.asarray(ndtr(-x))

    def _upper(self, log_sf: Array) -> Array:
        return np.asarray(-ndtri_exp(log_sf))


@dataclass(frozen=True)
class Uniform(_Symmetric):
    """Uniform on [-1, 1]."""

    def pdf(self, x: Array) -> Array:
        return np.where(np.abs(x) <= 1, 0.5, 0.0)

    def sf(self, x: Array) -> Array:
        return 0.5 * (1 - np.clip(x, -1.0, 1.0))

    def _upper(self, log_sf: Array) -> Array:
        return 1 - 2 * np.exp(log_sf)


@dataclass(frozen=True)
class Laplace(_Symmetric):
    """Density exp(-abs(x)) / 2."""

    def pdf(self, x: Array) -> Array:
        return np.asarray(0.5 * np.exp(-np.abs(x)))

    def sf(self, x: Array) -> Array:
        tail = 0.5 * np.exp(-np.abs(x))
        return np.where(x > 0, tail, 1 - tail)

    def _upper(self, log_sf: Array) -> Array:
        return -(log_sf + _LOG_2)


@dataclass(frozen=True)
class Logistic(_Symmetric):
    """Distribution function 1 / (1 + exp(-x))."""

    def pdf(self, x: Array) -> Array:
        return np.asarray(expit(x) * expit(-x))

    def sf(self, x: Array) -> Array:
        return np.asarray(expit(-x))

    def quantile(self, logit: Array) -> Array:
        return np.asarray(logit, dtype=np.float64)


@dataclass(frozen=True)
class Cosine(_Symmetric):
    """Cosine between a fixed direction and a uniform one in R^d."""

    d: float

    def pdf(self, x: Array) -> Array:
        a = (self.d - 1) / 2
        inside = np.maximum((1 - x) * (1 + x), 1e-300)
        log_density = (a - 1) * np.log(inside) - (2 * a - 1) * _LOG_2 - betaln(a, a)
        return np.where(np.abs(x) <= 1, np.exp(log_density), 0.0)

    def sf(self, x: Array) -> Array:
        a = (self.d - 1) / 2
        return np.asarray(betainc(a, a, 0.5 * (1 - np.clip(x, -1.0, 1.0))))

    def _upper(self, log_sf: Array) -> Array:
        a = (self.d - 1) / 2
        return np.asarray(1 - 2 * betaincinv(a, a, np.exp(log_sf)))


@dataclass(frozen=True)
class Gumbel(Family):
    """Distribution function exp(-exp(-x))."""

    def pdf(self, x: Array) -> Array:
        height = np.exp(-np.maximum(x, -7.0))  # the density is 0 in float64 below -7
        return np.asarray(height * np.exp(-height))

    def cdf(self, x: Array) -> Array:
        return np.asarray(np.exp(-np.exp(-np.maximum(x, -7.0))))

    def sf(self, x: Array) -> Array:
        return np.asarray(-np.expm1(-np.exp(-np.maximum(x, -7.0))))

    def quantile(self, logit: Array) -> Array:
        return np.asarray(-np.log(-log_expit(logit)))


@dataclass(frozen=True)
class Stretched(Family):
    """Upper tail exp(-x^rho) on x >= 0; exponential for rho = 1."""

    rho: float = 1.0

    def pdf(self, x: Array) -> Array:
        inside = np.maximum(x, 1e-300)
        power = inside**self.rho
        return np.where(x >= 0, self.rho * power / inside * np.exp(-power), 0.0)

    def cdf(self, x: Array) -> Array:
        return np.asarray(-np.expm1(-(np.maximum(x, 0.0) ** self.rho)))

    def sf(self, x: Array) -> Array:
        return np.asarray(np.exp(-(np.maximum(x, 0.0) ** self.rho)))

    def quantile(self, logit: Array) -> Array:
        return np.asarray((-log_expit(-logit)) ** (1 / self.rho))


@dataclass(frozen=True)
class Pareto(Family):
    """Upper tail x^(-a) on x >= 1."""

    a: float

    def pdf(self, x: Array) -> Array:
        return np.where(x >= 1, self.a * np.maximum(x, 1.0) ** (-self.a - 1), 0.0)

    def cdf(self, x: Array) -> Array:
        return np.asarray(-np.expm1(-self.a * np.log(np.maximum(x, 1.0))))

    def sf(self, x: Array) -> Array:
        return np.asarray(np.maximum(x, 1.0) ** -self.a)

    def quantile(self, logit: Array) -> Array:
        return np.asarray(np.exp(-log_expit(-logit) / self.a))


@dataclass(frozen=True)
class Scipy(Family):
    """A frozen continuous distribution of ``scipy.stats``."""

    law: Any

    def pdf(self, x: Array) -> Array:
        return np.asarray(self.law.pdf(x), dtype=np.float64)

    def cdf(self, x: Array) -> Array:
        return np.asarray(self.law.cdf(x), dtype=np.float64)

    def sf(self, x: Array) -> Array:
        return np.asarray(self.law.sf(x), dtype=np.float64)

    def quantile(self, logit: Array) -> Array:
        tail = np.exp(log_expit(-np.abs(logit)))
        lower = np.asarray(logit) < 0
        values = np.empty(tail.shape)
        values[lower] = self.law.ppf(tail[lower])
        values[~lower] = self.law.isf(tail[~lower])
        return values


#: Every family by name, with the name of the parameter it needs and the least value of it.
FAMILIES: dict[str, tuple[type[Family], str | None, float]] = {
    "gaussian": (Gaussian, None, 0.0),
    "uniform": (Uniform, None, 0.0),
    "exponential": (Stretched, None, 0.0),
    "laplace": (Laplace, None, 0.0),
    "gumbel": (Gumbel, None, 0.0),
    "logistic": (Logistic, None, 0.0),
    "cosine": (Cosine, "d", 2.0),
    "stretched": (Stretched, "rho", 0.05),
    "pareto": (Pareto, "a", 0.05),
}


def as_family(
    family: Any, *, d: float | None = None, rho: float | None = None, a: float | None = None
) -> Family:
    """Family of a name and its parameter, of a frozen SciPy distribution, or itself.

    Args:
        family: A name of ``FAMILIES``, a frozen continuous distribution of ``scipy.stats``, or a
            ``Family``.
        d: Dimension for ``"cosine"``, d >= 2; not only integers.
        rho: Exponent for ``"stretched"``, rho >= 0.05.
        a: Tail index for ``"pareto"``, a >= 0.05.

    Returns:
        The family; equal for equal arguments, so that what is computed once for it is kept.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If the name is unknown, its parameter is missing or outside its domain, or a
            parameter is given that the family does not have.

    Example:
        >>> as_family("cosine", d=64)
        Cosine(d=64.0)
    """
    given = {"d": d, "rho": rho, "a": a}
    kind, parameter, least = _look_up(family)
    for name, value in given.items():
        if value is not None and name != parameter:
            raise ValueError(f"{name}: the family {family!r} has no {name}, got {name}={value!r}")
    if not isinstance(kind, type):
        return kind
    if parameter is None:
        return kind()
    value = given[parameter]
    if value is None:
        raise ValueError(f'{parameter}: the family "{family}" needs {parameter}, got None')
    if not (np.ndim(value) == 0 and least <= value < np.inf):
        raise ValueError(
            f'{parameter}: the {parameter} of the family "{family}" is one finite number of at'
            f" least {least:g}, got {parameter}={value}"
        )
    return kind(**{parameter: float(value)})


def _look_up(family: Any) -> tuple[Family | type[Family], str | None, float]:
    if isinstance(family, str):
        if family not in FAMILIES:
            known = ", ".join(f'"{name}"' for name in FAMILIES)
            raise ValueError(f'family: one of {known}, got "{family}"')
        return FAMILIES[family]
    if isinstance(family, Family):
        return family, None, 0.0
    if not isinstance(family, rv_frozen) or not isinstance(family.dist, rv_continuous):
        raise TypeError(
            "family: a name or a frozen continuous distribution of scipy.stats, such as"
            f" scipy.stats.norm(0, 2), got {_describe(family)}"
        )
    median = np.asarray(family.median())
    if median.ndim or not np.isfinite(median):
        raise ValueError(
            "family: a frozen distribution has scalar parameters inside its domain,"
            f" got {_describe(family)} with median {median}"
        )
    return Scipy(family), None, 0.0


def _describe(family: Any) -> str:
    inner = getattr(family, "dist", family)
    name = getattr(inner, "name", None)
    kind = type(family).__name__
    return f"{kind} {name}" if isinstance(name, str) else f"{kind} {family!r}"[:80]


@dataclass(frozen=True)
class Grid:
    """Cells of a law, from its lower to its upper tail; distances are from its median.

    Attributes:
        centre: The median, which every other score is relative to.
        unit: Distance of the quantiles at a quarter and three quarters.
        low: Lower end of each cell, shape (cells,).
        high: Upper end of each cell.
        mass: Probability of each cell.
        scores: Gauss nodes in each cell, shape (cells, 16).
        weights: Their probabilities.
        has_mean: Whether the tails hold no part of the mean beyond the cells.
    """

    centre: float
    unit: float
    low: Array
    high: Array
    mass: Array
    scores: Array
    weights: Array
    has_mean: bool


@lru_cache(maxsize=64)
def grid(family: Family) -> Grid:
    """Cells of ``family``, computed once and kept.

    Args:
        family: Any continuous law.

    Returns:
        The cells, ascending.

    Example:
        >>> cells = grid(Laplace())
        >>> (cells.weights * cells.scores**2).sum()  # variance
        2.0
    """
    with np.errstate(all="ignore"):
        return _grid(family)


def _grid(family: Family) -> Grid:
    centre, lower, upper = family.quantile(np.array([0.0, -1.1, 1.1]))
    unit = max(upper - lower, _EPS * abs(centre), 1e-290)
    ends, resolved = zip(
        *(_reach(family, side, float(centre), float(unit)) for side in (-1, 1)), strict=True
    )
    below, above = np.arange(ends[0], 0.0, _CELL), np.arange(0.0, ends[1] + 1, _CELL)
    edges = np.concatenate([below, above])
    start, stop = edges[:-1], edges[1:]
    done: list[tuple[Array, Array]] = []
    count = 0
    while start.size:
        split = _unresolved(family, start, stop)
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
    scores = _ascending(family.quantile(log_odds) - centre)
    return Grid(
        float(centre),
        float(unit),
        scores[:, 0],
        scores[:, -1],
        weights.sum(axis=1),
        scores[:, 1:-1],
        weights,
        all(resolved),
    )


def _ascending(scores: Array) -> Array:
    """Undo the noise of quantiles that a distribution does not know so far out."""
    flat = scores.ravel()
    above = np.maximum.accumulate(np.maximum(flat, 0.0))
    below = np.minimum.accumulate(np.minimum(flat, 0.0)[::-1])[::-1]
    return np.asarray(above + below).reshape(scores.shape)


def _reach(family: Family, side: int, centre: float, unit: float) -> tuple[float, bool]:
    """Log-odds at which the cells end, and whether they hold the mean of that tail."""
    end, step, beyond = 0.0, _REACH, 1.0
    while end < _FAR_REACH and beyond > 1e-20:
        inside = np.arange(end, min(end + step, _FAR_REACH) + 1, _CELL)
        distance = np.abs(family.quantile(side * inside) - centre)
        finite = distance < _LARGEST  # SciPy's quantiles end where 1 - F rounds to 1
        known = int(np.argmin(finite)) - 1 if not finite.all() else inside.size - 1
        end = float(inside[known])
        beyond = float(np.exp(-end) * distance[known] / unit)  # about the mean's part
        if known < inside.size - 1:
            break
    return side * end, beyond < 1e-12


def _unresolved(family: Family, start: Array, stop: Array) -> NDArray[np.bool_]:
    """Which cells to bisect: the quantile function is no polynomial there, or the law is uneven."""
    half = 0.5 * (stop - start)
    nodes = 0.5 * (start + stop)[:, None] + half[:, None] * NODES
    values = family.quantile(nodes)
    coefficients = np.abs((values - values[:, :1]) @ LEGENDRE)
    spread = values[:, -1] - values[:, 0]
    # A distribution may know its tails only as 1 - F, to rounding.
    blur = 1e-12 + 32 * _EPS * np.exp(np.minimum(np.maximum(np.abs(start), np.abs(stop)), 40.0))
    noise = 64 * _EPS * np.abs(values).max(axis=1)
    rough = coefficients[:, -3:].max(axis=1) > blur * np.abs(spread) / half + noise
    rough &= np.minimum(np.abs(start), np.abs(stop)) < 30
    inward, outward = values[:, 1] - values[:, 0], values[:, -1] - values[:, -2]
    inward, outward = (
        np.where(start < 0, outward, inward),
        np.where(start < 0, inward, outward),
    )
    known = (spread > 1e4 * noise) & (inward > 0) & (outward > 0)
    uneven = (outward > 4 * inward) | (inward > 12 * outward)
    return (rough | (uneven & known)) & (half > _FINEST)
