r"""Distributions of a single score, by name or from SciPy.

A family gives the density and the quantiles of one score at unit scale. Quantiles take the
log-odds :math:`v = \log(F / (1 - F))`, which tell the two tails apart to the last bit: in v every
law has tails of the same exponential shape, a singular edge of the density is smooth, and a heavy
tail is one exponential.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from scipy.special import betaincinv, betaln, expit, log_expit, ndtri_exp

from acutance.theory.arguments import Array, normal_density

_LOG_2 = float(np.log(2.0))


@dataclass(frozen=True)
class Family(ABC):
    """Distribution of one score, at unit scale."""

    @abstractmethod
    def pdf(self, x: Array) -> Array:
        """Probability density of a score at x, shape of x."""

    @abstractmethod
    def quantile(self, logit: Array) -> Array:
        """Quantile at a probability F, given as its log-odds log(F / (1 - F))."""

    def origin(self) -> float:
        """The score that offsets are measured from: the median.

        Families of scores on [−1, 1] return the upper end 1 instead: the scores that matter lie
        close to it, where float64 must resolve differences.
        """
        return float(self.quantile(np.zeros(())))

    def offset(self, logit: Array) -> Array:
        """Quantile less :meth:`origin`, at a probability F given as log-odds log(F / (1 - F)).

        Nothing cancels where the origin is an end of the support.
        """
        return np.asarray(self.quantile(logit) - self.origin())

    def density(self, offset: Array) -> Array:
        """Density at the score ``origin() + offset``."""
        return self.pdf(self.origin() + offset)

    def rounding(self) -> float:
        """Absolute rounding error of :meth:`offset`, caused by subtracting the origin."""
        return abs(self.origin()) * float(np.finfo(np.float64).eps)


class _Symmetric(Family):
    """A distribution symmetric about 0: the lower half follows from the upper one."""

    def quantile(self, logit: Array) -> Array:
        log_upper_tail = log_expit(-np.abs(logit))  # at most log(1/2)
        return np.asarray(np.copysign(self._upper(log_upper_tail), logit))

    @abstractmethod
    def _upper(self, log_sf: Array) -> Array:
        """The score >= 0 that is exceeded with probability e^``log_sf``, at most 1/2."""


class Gaussian(_Symmetric):
    """Standard normal."""

    def pdf(self, x: Array) -> Array:
        """Density exp(-x²/2) / sqrt(2 pi)."""
        return normal_density(x)

    def _upper(self, log_sf: Array) -> Array:
        return np.asarray(-ndtri_exp(log_sf))


class _Interval(Family):
    """A symmetric distribution on [-1, 1], with exact distances from the ends."""

    def origin(self) -> float:
        """The upper end of the interval."""
        return 1.0

    def rounding(self) -> float:
        """Scores are exact at the upper end."""
        return 0.0

    def quantile(self, logit: Array) -> Array:
        return np.asarray(np.copysign(1 - self._from_end(log_expit(-np.abs(logit))), logit))

    def offset(self, logit: Array) -> Array:
        nearer = self._from_end(log_expit(-np.abs(logit)))
        return np.asarray(np.where(np.asarray(logit) < 0, nearer - 2, -nearer))

    def pdf(self, x: Array) -> Array:
        return self.density(np.asarray(x) - 1)

    @abstractmethod
    def _from_end(self, log_sf: Array) -> Array:
        """1 - x for the score x that is exceeded with probability e^``log_sf``."""


class Uniform(_Interval):
    """Uniform on [-1, 1]."""

    def density(self, offset: Array) -> Array:
        """Density 1/2 for offsets from the upper end in [-2, 0], and 0 elsewhere."""
        return np.where((offset <= 0) & (offset >= -2), 0.5, 0.0)

    def _from_end(self, log_sf: Array) -> Array:
        return np.asarray(2 * np.exp(log_sf))


@dataclass(frozen=True)
class Cosine(_Interval):
    """Cosine between a fixed direction and a uniform one in R^d."""

    d: float

    def density(self, offset: Array) -> Array:
        """Density at the cosine x = 1 + offset: (1 - x²)^((d - 3)/2), normalised."""
        a = (self.d - 1) / 2
        inside = np.maximum(-offset * (2 + offset), 1e-300)
        log_density = (a - 1) * np.log(inside) - (2 * a - 1) * _LOG_2 - betaln(a, a)
        return np.where((offset <= 0) & (offset >= -2), np.exp(log_density), 0.0)

    def _from_end(self, log_sf: Array) -> Array:
        a = (self.d - 1) / 2
        return np.asarray(2 * betaincinv(a, a, np.exp(log_sf)))


class Laplace(_Symmetric):
    """Density exp(-abs(x)) / 2."""

    def pdf(self, x: Array) -> Array:
        """Density exp(-abs(x)) / 2."""
        return np.asarray(0.5 * np.exp(-np.abs(x)))

    def _upper(self, log_sf: Array) -> Array:
        return -(log_sf + _LOG_2)


class Logistic(Family):
    """Distribution function 1 / (1 + exp(-x))."""

    def pdf(self, x: Array) -> Array:
        """Density F (1 - F), where F = 1 / (1 + exp(-x))."""
        return np.asarray(expit(x) * expit(-x))

    def quantile(self, logit: Array) -> Array:
        """Quantile at log-odds log(F / (1 - F)) of a probability F: the log-odds themselves."""
        return np.asarray(logit, dtype=np.float64)


class Gumbel(Family):
    """Distribution function exp(-exp(-x))."""

    def pdf(self, x: Array) -> Array:
        """Density exp(-x - exp(-x))."""
        height = np.exp(-np.maximum(x, -7.0))  # the density is 0 in float64 below -7
        return np.asarray(height * np.exp(-height))

    def quantile(self, logit: Array) -> Array:
        """Quantile -log(-log F) at log-odds log(F / (1 - F)) of a probability F."""
        return np.asarray(-np.log(-log_expit(logit)))


class Exponential(Family):
    """Upper tail exp(-x) on x >= 0."""

    def pdf(self, x: Array) -> Array:
        """Density exp(-x) for x >= 0."""
        return np.where(x >= 0, np.exp(-np.maximum(x, 0.0)), 0.0)

    def quantile(self, logit: Array) -> Array:
        """Quantile -log(1 - F) at log-odds log(F / (1 - F)) of a probability F."""
        return np.asarray(-log_expit(-logit))


@dataclass(frozen=True)
class Stretched(Family):
    """Upper tail exp(-x^rho) on x >= 0."""

    rho: float

    def pdf(self, x: Array) -> Array:
        """Density rho x^(rho - 1) exp(-x^rho) for x >= 0."""
        inside = np.maximum(x, 1e-300)
        power = inside**self.rho
        return np.where(x >= 0, self.rho * power / inside * np.exp(-power), 0.0)

    def quantile(self, logit: Array) -> Array:
        """Quantile (-log(1 - F))^(1/rho) at log-odds log(F / (1 - F)) of a probability F."""
        return np.asarray((-log_expit(-logit)) ** (1 / self.rho))


@dataclass(frozen=True)
class Pareto(Family):
    """Upper tail x^(-a) on x >= 1."""

    a: float

    def pdf(self, x: Array) -> Array:
        """Density a x^(-a - 1) for x >= 1."""
        return np.where(x >= 1, self.a * np.maximum(x, 1.0) ** (-self.a - 1), 0.0)

    def quantile(self, logit: Array) -> Array:
        """Quantile (1 - F)^(-1/a) at log-odds log(F / (1 - F)) of a probability F."""
        return np.asarray(np.exp(-log_expit(-logit) / self.a))


@dataclass(frozen=True, repr=False)
class Scipy(Family):
    """A frozen continuous distribution of ``scipy.stats``."""

    law: Any

    def __repr__(self) -> str:
        return f"scipy.stats.{_distribution_name(self.law)}"

    def pdf(self, x: Array) -> Array:
        """Density of the SciPy distribution at x, as float64."""
        return np.asarray(self.law.pdf(x), dtype=np.float64)

    def quantile(self, logit: Array) -> Array:
        """Quantile at log-odds log(F / (1 - F)) of a probability F, from the smaller tail."""
        below, above = ("ppf", "isf") if hasattr(self.law, "isf") else ("icdf", "iccdf")
        tail = np.exp(log_expit(-np.abs(logit)))
        lower = np.asarray(logit) < 0
        values = np.empty(tail.shape)
        values[lower] = getattr(self.law, below)(tail[lower])
        values[~lower] = getattr(self.law, above)(tail[~lower])
        return values


#: Every family by name, with the name of the parameter it needs and the least value of it.
FAMILIES: dict[str, tuple[type[Family], str | None, float]] = {
    "gaussian": (Gaussian, None, 0.0),
    "uniform": (Uniform, None, 0.0),
    "exponential": (Exponential, None, 0.0),
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
    """Convert a name with its parameter, or a frozen SciPy distribution, to a ``Family``.

    Args:
        family: A name of ``FAMILIES``, a frozen continuous distribution of ``scipy.stats``, or a
            ``Family``.
        d: Dimension for ``"cosine"``, d >= 2; it need not be an integer.
        rho: Exponent for ``"stretched"``, rho >= 0.05.
        a: Tail index for ``"pareto"``, a >= 0.05.

    Returns:
        The family; equal for equal arguments, so that it can be the key of a cache.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If the name is unknown, its parameter is missing or outside its domain, or a
            parameter is given that the family does not have.

    Example:
        >>> as_family("cosine", d=64)
        Cosine(d=64.0)
    """
    parameters = {"d": d, "rho": rho, "a": a}
    kind, parameter, least = _look_up(family)
    for name, value in parameters.items():
        if value is not None and name != parameter:
            raise ValueError(f"{name}: the family {family!r} has no {name}, got {name}={value!r}")
    if not isinstance(kind, type):
        return kind
    if parameter is None:
        return kind()
    value_given: Any = parameters[parameter]
    if value_given is None:
        raise ValueError(f'{parameter}: the family "{family}" needs {parameter}, got None')
    if not (isinstance(value_given, Real) and least <= float(value_given) < np.inf):
        raise ValueError(
            f'{parameter}: the family "{family}" needs a finite number of at least {least:g}, '
            f"got {parameter}={value_given}"
        )
    return kind(**{parameter: float(value_given)})


def _look_up(family: Any) -> tuple[Family | type[Family], str | None, float]:
    """Look up a name or distribution.

    Returns:
        The family (its class, if it needs a parameter); the name of the parameter, or None; and the
        least value of the parameter.
    """
    if isinstance(family, str):
        if family not in FAMILIES:
            known = ", ".join(f'"{name}"' for name in FAMILIES)
            raise ValueError(f'family: must be one of {known}, got "{family}"')
        return FAMILIES[family]
    if isinstance(family, Family):
        return family, None, 0.0
    if not _is_continuous_law(family):
        raise TypeError(
            "family: must be a name or a frozen continuous distribution of scipy.stats, such "
            f"as scipy.stats.norm(0, 2), got {type(family).__name__} "
            f"{_distribution_name(family)}"
        )
    median = np.asarray(family.median())
    if median.ndim or not np.isfinite(median):
        raise ValueError(
            "family: a frozen distribution must have scalar parameters inside its domain, got "
            f"{type(family).__name__} {_distribution_name(family)} with median {median}"
        )
    return Scipy(family), None, 0.0


def _is_continuous_law(family: Any) -> bool:
    """Whether an object is a continuous scipy distribution."""
    if any(kind.__name__ == "ContinuousDistribution" for kind in type(family).__mro__):
        return hasattr(family, "iccdf")  # SciPy's newer kind, such as scipy.stats.Normal(mu=1)
    if not hasattr(family, "isf"):
        return False
    from scipy.stats import rv_continuous  # takes a second, unless the caller has loaded it

    return isinstance(getattr(family, "dist", None), rv_continuous)


def _distribution_name(law: Any) -> str:
    name = getattr(getattr(law, "dist", law), "name", None)
    return name if isinstance(name, str) else repr(law)[:80]


def name_and_parameter(family: Family) -> tuple[str, float] | None:
    """Name and parameter of a family (0 if it has none); None for a SciPy distribution.

    Example:
        >>> name_and_parameter(Cosine(64.0))
        ('cosine', 64.0)
        >>> name_and_parameter(Laplace())
        ('laplace', 0.0)
    """
    for name, (kind, parameter, _) in FAMILIES.items():
        if type(family) is kind:
            return name, float(getattr(family, parameter)) if parameter else 0.0
    return None
