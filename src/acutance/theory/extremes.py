r"""The largest of n independent scores: its expectation, and the scale set by the gaps below it.

Let F be the distribution function of a score and :math:`b_n = F^{-1}(1 - 1/n)`, about where the
largest of n lies. The gaps between the largest scores are about one over the hazard rate
:math:`h = f / (1 - F)` at :math:`b_n`, so :math:`\lambda^*(n) = c \, h(b_n)` keeps the number of
keys that share the weight.

Source: de Haan & Ferreira (2006), Extreme Value Theory, section 1.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaincinv, betaln, erfcx, log_expit, ndtri

from acutance.theory.arguments import Array, checked, checked_keys, require, result
from acutance.theory.families import FamilyParameter, as_family, name_and_parameter
from acutance.theory.finite_n.grid import grid

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["expected_max", "gauss_hazard_scale", "hazard_scale"]


def expected_max(
    n: ArrayLike, family: Any = "gaussian", **parameter: Unpack[FamilyParameter]
) -> float | Array:
    r"""Expected maximum of n independent scores.

    .. math:: M_n = E \max_{j \le n} s_j = \int x \, n F^{n-1} f \, dx

    with F and f the distribution function and density of a score. The mean score under softmax
    weights tends to it as the scale of the logits grows.

    Args:
        n: Number of scores, n >= 1; it need not be an integer.
        family: Distribution of a score; see :func:`~acutance.theory.expected_entropy`.
        **parameter: ``d``, ``rho`` or ``a``, the parameter of the family if it has one.

    Returns:
        M_n in the unit of the scores, shape of ``n``; a float for a scalar. M_1 is the mean.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If an argument is outside its domain, or the scores have no mean.

    Example:
        >>> expected_max([1, 2, 3], "exponential")  # 1 + 1/2 + 1/3
        array([1.        , 1.5       , 1.83333333])
        >>> expected_max(4096, "cosine", d=64)
        0.435040404790

    Source:
        de Haan & Ferreira (2006), Extreme Value Theory, chapter 1.
    """
    cells = grid(as_family(family, **parameter))
    cells.require_mean("the expected maximum")
    keys = checked("n", n, "the number of scores must be at least 1", 1.0)
    for count in keys.ravel():
        cells.require_tail(float(count))
    rest = np.exp((keys[..., None, None] - 1) * log_expit(cells.log_odds))
    moments = keys * (rest * cells.weights * cells.scores).sum(axis=(-2, -1))
    return result(cells.origin + moments)


def gauss_hazard_scale(n: ArrayLike) -> float | Array:
    r"""Hazard rate of the standard normal law where the largest of n logits lies.

    .. math:: h(b_n) = n \varphi(b_n), \qquad b_n = \Phi^{-1}(1 - 1/n), \qquad
              h(b_n) \approx \sqrt{2 \log n}

    with the normal density φ and distribution function Φ. Scaling Gaussian logits in proportion to
    it keeps the number of effective keys as n grows: two effective keys need 1.75 times it for
    n = 64 and 1.93 times it for a million.

    Args:
        n: Number of keys, n >= 2; it need not be an integer.

    Returns:
        h(b_n) in one over the standard deviation of the logits, shape of ``n``; a float for a
        scalar.

    Raises:
        ValueError: If some n is below 2 or not finite.

    Example:
        >>> gauss_hazard_scale(64)
        2.510184989178
        >>> gauss_hazard_scale([2, 65536])
        array([0.79788456, 4.38751139])

    Source:
        de Haan & Ferreira (2006), Extreme Value Theory, section 1.1, for 1/h as the scale of the
        largest values.
    """
    keys = checked_keys("n", n)
    return result(math.sqrt(2 / math.pi) / erfcx(-ndtri(1 / keys) / math.sqrt(2)))


def hazard_scale(
    family: Any,
    n: ArrayLike,
    *,
    c: ArrayLike = 1.0,
    d: ArrayLike | None = None,
    rho: ArrayLike | None = None,
    a: ArrayLike | None = None,
) -> float | Array:
    r"""Scale that keeps the number of effective keys as n grows, from the tail of the logits.

    .. math:: \lambda^* = c \, h(b_n), \qquad h = \frac{f}{1 - F}, \quad b_n = F^{-1}(1 - 1/n)

    with F and f the distribution function and density of a logit.

    ========================== ============================================== ==================
    family                     logits                                         h(b_n)
    ========================== ============================================== ==================
    ``"gaussian"``             N(0, 1)                                        ``gauss_hazard_scale``
    ``"uniform"``              uniform on [-1, 1]                             n/2
    ``"exponential"``          P(s > x) = exp(-x)                             1
    ``"laplace"``              density exp(-abs(x))/2                         1
    ``"gumbel"``               F = exp(-exp(-x))                              -(n-1) log(1 - 1/n)
    ``"logistic"``             F = 1/(1 + exp(-x))                            1 - 1/n
    ``"cosine"``, d            cosine of uniform directions of R^d            n f(b_n)
    ``"stretched"``, rho       P(s > x) = exp(-x^ρ), x >= 0                   ρ (log n)^(1 - 1/ρ)
    ``"pareto"``, a            P(s > x) = x^(-a), x >= 1                      a n^(-1/a)
    a frozen SciPy law         its own                                        n f(b_n)
    ========================== ============================================== ==================

    The constant c says how many keys. For tails with an exponential limit (all but uniform, Pareto
    and cosine with log n ≫ d) the collision probability tends to 1 - 1/c, so c = 2 for two
    effective keys; for uniform logits that takes 1.233. For Pareto no constant works: rows are
    either one-hot or flat.

    Args:
        family: A name from the table, a frozen continuous distribution of ``scipy.stats``, or a
            ``Family`` of ``acutance.theory.families``.
        n: Number of keys, n >= 2; it need not be an integer.
        c: Factor, c > 0.
        d: Dimension for ``"cosine"``, d >= 2.
        rho: Exponent for ``"stretched"``, rho > 0.
        a: Tail index for ``"pareto"``, a > 0.

    Returns:
        λ* in one over the unit of the logits, float64 of the broadcast shape; a float for scalars.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If the family is unknown, its parameter is missing or another one is given, or
            an argument is outside its domain.

    Example:
        >>> hazard_scale("uniform", 4096)
        2048.0
        >>> hazard_scale("cosine", [64, 65536], d=64)
        array([20.9850495 , 42.81239142])
        >>> from scipy.stats import norm
        >>> hazard_scale(norm(0, 2), 64)  # twice the deviation, half the scale
        1.255092494589

    Source:
        de Haan & Ferreira (2006), Extreme Value Theory, section 1.1, for 1/h as the scale of the
        largest values.
    """
    keys = checked_keys("n", n)
    factor = checked("c", c, "the factor must be finite and greater than 0", above=0.0)
    name, parameter = _family_parameter(family, _HAZARDS, {"d": d, "rho": rho, "a": a})
    if name is None:
        law = _scipy_law(family)
        top = law.isf(1 / keys) if hasattr(law, "isf") else law.iccdf(1 / keys)
        rate = np.exp(law.logpdf(top) + np.log(keys))
    else:
        rate = _HAZARDS[name](keys, parameter)
    return result(factor * rate)


_Hazard = Callable[[Array, Array], Array]


def _cosine_hazard(n: Array, d: Array) -> Array:
    """Hazard n f(b_n) of the cosine of random directions in R^d, as in :func:`hazard_scale`.

    (1 + cos) / 2 has the distribution Beta(a, a), a = (d - 1)/2.
    """
    half = (d - 1) / 2
    below = betaincinv(half, half, 1 / n)  # (1 - b_n) / 2
    log_density = (half - 1) * (np.log(below) + np.log1p(-below)) - betaln(half, half)
    rate: Array = np.exp(np.log(n) + log_density - math.log(2))
    return rate


#: n f(b_n) by family, from n and the family's parameter.
_HAZARDS: dict[str, _Hazard] = {
    "gaussian": lambda n, _: np.asarray(gauss_hazard_scale(n)),
    "uniform": lambda n, _: n / 2,
    "exponential": lambda n, _: np.ones_like(n),
    "laplace": lambda n, _: np.ones_like(n),
    "gumbel": lambda n, _: -(n - 1) * np.log1p(-1 / n),
    "logistic": lambda n, _: 1 - 1 / n,
    "cosine": _cosine_hazard,
    "stretched": lambda n, rho: rho * np.log(n) ** (1 - 1 / rho),
    "pareto": lambda n, a: a * n ** (-1 / a),
}

#: The parameter that a family needs, and its least value, itself allowed or not.
_PARAMETERS = {
    "cosine": ("d", 2.0, True),
    "stretched": ("rho", 0.0, False),
    "pareto": ("a", 0.0, False),
}


def _scipy_law(family: Any) -> Any:
    """The scipy distribution of a family."""
    wrapped: Any = as_family(family)
    return wrapped.law


def _family_parameter(
    family: Any, table: Collection[str], parameters: dict[str, Any]
) -> tuple[str | None, Array]:
    """Name of a family (None for SciPy's) and its checked parameter (0 if it has none)."""
    name = parameter = None
    if isinstance(family, str):
        if family not in table:
            known = ", ".join(f'"{known}"' for known in table)
            raise ValueError(f'family: must be one of {known}, got family="{family}"')
        name, (parameter, least, closed) = family, _PARAMETERS.get(family, (None, 0.0, False))
    for other, value in parameters.items():
        if other != parameter and value is not None:
            raise ValueError(
                f"{other}: family={family!r} has no such parameter, got {other}={value}"
            )
    if name is None:
        name, value = name_and_parameter(as_family(family)) or (None, 0.0)
        return name, np.asarray(value)
    if parameter is None:
        return name, np.zeros(())
    if parameters[parameter] is None:
        raise ValueError(f'{parameter}: family="{family}" needs it, got {parameter}=None')
    values = np.asarray(parameters[parameter], np.float64)
    require(
        parameter,
        values,
        np.isfinite(values) & ((values >= least) if closed else (values > least)),
        f"the parameter must be finite and {'at least' if closed else 'greater than'} {least:g}",
    )
    return name, values
