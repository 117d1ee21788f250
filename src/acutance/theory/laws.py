r"""Growth laws: how the scale of the logits must grow with n for attention to stay as focused.

*Which scale keeps a few keys in front?* Let F be the distribution function of independent logits
and :math:`b_n = F^{-1}(1 - 1/n)`, about where the largest of n lies. The gaps between the largest
logits are about one over the hazard rate :math:`h = f / (1 - F)` at :math:`b_n`, so

.. math:: \lambda^*(n) = c \, h(b_n)

keeps the number of keys that share the weight. How fast that grows is a matter of the tail alone:
not at all (exponential), as a power of log n (lighter tails) or as a power of n (logits with an
upper end). A row with one match above a narrow bulk has log n.

Sources: Derrida (1981), Phys. Rev. B 24, 2613 (the random energy model: Gaussian logits, planted
match, entropy along the scale); Su (2021), https://kexue.fm/archives/8823 (why a scale that grows
with n).
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaincinv, betaln, erfcx, expit, ndtri

from acutance.theory.arguments import Array, checked, checked_keys, require, result
from acutance.theory.families import Family, as_family, name_and_parameter

__all__ = ["ScalingLaw", "gauss_hazard_scale", "hazard_scale", "scaling_exponent"]

Target = Literal["effective_keys", "entropy_fraction"]


@dataclass(frozen=True)
class ScalingLaw:
    """Growth of the logit scale with the number of keys n.

    Attributes:
        law: The growth as text, such as ``"(log n)^{1/2}"``.
        exponent: The power of ``variable``; 0 where the scale does not grow.
        variable: ``"log n"`` or ``"n"``.
        constant: What multiplies the law, for n large, in one over the unit of the logits.
        condition: For which logits, and what it assumes.
    """

    law: str
    exponent: float
    variable: Literal["log n", "n"]
    constant: float
    condition: str


def scaling_exponent(
    family: str | Family,
    target: Target = "effective_keys",
    *,
    n: float | None = None,
    gap: float = 1.0,
    sigma: float = 0.0,
    d: float | None = None,
    rho: float | None = None,
    a: float | None = None,
    effective_keys: float = 2.0,
    fraction: float = 0.5,
) -> ScalingLaw:
    r"""Growth law of the scale that keeps attention as focused when n grows.

    ================== ============================== ==================================
    family             ``"effective_keys"``           ``"entropy_fraction"``, H = c log n
    ================== ============================== ==================================
    two_level, planted log n / Δ                      log n / Δ
    gaussian           sqrt(2 log n) / m              sqrt(2 (1-c) log n)
    stretched, ρ >= 1  (ρ/m) (log n)^(1 - 1/ρ)        ρ ((1-c) log n)^(1 - 1/ρ)
    cosine, log n ≪ d  sqrt(2 d log n) / m            sqrt(2 (1-c) d log n)
    cosine, log n ≫ d  n^(1/a), a = (d-1)/2           n^((1-c)/a)
    uniform on [-1, 1] n                              (e/2) n^(1-c)
    exponential tail   1/m                            1
    pareto, a          n^(-1/a) log n                 n^(-1/a) log n
    ================== ============================== ==================================

    Here m = 1 - 1/``effective_keys`` and c = ``fraction``. The exponential tail is that of
    ``"exponential"``, ``"laplace"``, ``"gumbel"`` and ``"logistic"``. Laws are for n large, and
    measured exponents approach the asymptotic ones slowly: for Gaussian logits between 2^10 and
    2^20 keys the power of log n is 0.61, not 1/2.

    Args:
        family: A family of the table, by name or as a ``Family`` of ``acutance.theory.families``.
        target: ``"effective_keys"`` keeps E Σp² at 1/``effective_keys``, so O(1) keys share the
            weight; ``"entropy_fraction"`` keeps the entropy at ``fraction`` of log n.
        n: For ``"cosine"``, the number of keys about which the law is wanted: log n < d/2 takes the
            law for log n ≪ d. None means n to infinity at fixed d.
        gap: Δ of ``"two_level"`` and ``"planted"``, gap > 0.
        sigma: Standard deviation of the other logits of ``"planted"``, sigma >= 0.
        d: Dimension for ``"cosine"``, d >= 2.
        rho: Exponent for ``"stretched"``, rho >= 1.
        a: Tail index for ``"pareto"``, a > 0.
        effective_keys: 1/E Σp² to keep, above 1.
        fraction: H / log n to keep, 0 < fraction < 1.

    Returns:
        The law, its exponent, variable, constant and condition.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If the family or target is unknown, its parameter is missing or another one is
            given, or an argument is outside its domain.

    Example:
        >>> law = scaling_exponent("gaussian")
        >>> law.law, law.exponent, law.variable, law.constant
        ('(log n)^{1/2}', 0.5, 'log n', 2.82842712)
        >>> scaling_exponent("cosine", "entropy_fraction", d=8).law
        'n^{1/7}'

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613 (Gaussian); Resnick (1987), Extreme Values, Regular
        Variation and Point Processes, chapter 4 (the largest logits as a Poisson process, from
        which the constants of bounded logits are computed).
    """
    if target not in ("effective_keys", "entropy_fraction"):
        raise ValueError(
            f'target: must be one of "effective_keys" and "entropy_fraction", got target={target!r}'
        )
    name, values = _family_parameter(family, _LAWS, {"d": d, "rho": rho, "a": a})
    if name is None:
        raise ValueError(
            f"family: no closed form is known for the SciPy distribution {as_family(family)!r}; "
            "compute the scale at each n with hazard_scale(family, n)"
        )
    parameter = float(values)
    heavy_tail = name == "stretched" and parameter < 1
    for argument, value, holds, rule in (
        ("gap", gap, 0 < gap < np.inf, "the gap must be finite and greater than 0"),
        ("sigma", sigma, 0 <= sigma < np.inf, "the standard deviation must be finite, at least 0"),
        ("rho", parameter, not heavy_tail, "the exponent must be at least 1"),
        ("effective_keys", effective_keys, 1 < effective_keys < np.inf, "the number exceeds 1"),
        ("fraction", fraction, 0 < fraction < 1, "the fraction must be above 0 and below 1"),
        ("n", n, n is None or 2 <= n < np.inf, "the number of keys must be at least 2"),
    ):
        if not holds:
            raise ValueError(f"{argument}: {rule}, got {argument}={value}")
    few = target == "effective_keys"
    aim = _Aim(few, effective_keys if few else fraction, n, gap, sigma)
    return _LAWS[name](aim, parameter)


@dataclass(frozen=True)
class _Aim:
    """What a growth law holds constant: the effective keys, or entropy as a share of log n."""

    few: bool  # a number of effective keys, rather than a fraction of log n
    value: float
    n: float | None
    gap: float
    sigma: float

    @property
    def inverse_m(self) -> float:
        """1/(1 - E Σp²) for the target: the law's constant if the tail falls exponentially."""
        return self.value / (self.value - 1)


def _two_level_law(aim: _Aim, _: float) -> ScalingLaw:
    """The law for one key a fixed gap above n − 1 equal ones."""
    weight = "its weight" if aim.few else "its weight at 1 - c"
    condition = (
        f"One key a fixed gap above n - 1 equal ones: log n / gap keeps {weight}, and the entropy"
        " is then (1 - weight) log n."
    )
    return _law(1.0, "log n", 1 / aim.gap, condition)


def _planted_law(aim: _Aim, _: float) -> ScalingLaw:
    """The law for one key a fixed gap above a Gaussian bulk."""
    condition = (
        "One key a fixed gap above a bulk N(0, sigma²): log n / gap while the gap is far above"
        " sigma sqrt(2 log n), below which no scale works; needle_scale has the exact scale"
    )
    if aim.sigma > 0:
        condition += f" (sigma = {aim.sigma:g}: up to log n of {(aim.gap / aim.sigma) ** 2 / 2:g})"
    return _law(1.0, "log n", 1 / aim.gap, condition + ".")


def _gaussian_law(aim: _Aim, _: float) -> ScalingLaw:
    """The law for independent Gaussian logits."""
    factor = aim.inverse_m if aim.few else math.sqrt(1 - aim.value)
    condition = "Independent Gaussian logits of standard deviation 1."
    return _law(0.5, "log n", math.sqrt(2) * factor, condition)


def _stretched_law(aim: _Aim, rho: float) -> ScalingLaw:
    """The law for independent logits with a stretched-exponential tail."""
    power = 1 - 1 / rho
    factor = aim.inverse_m if aim.few else (1 - aim.value) ** power
    return _law(
        power, "log n", rho * factor, f"Independent logits with upper tail exp(-x^{rho:g})."
    )


def _exponential_law(aim: _Aim, _: float) -> ScalingLaw:
    """The law for independent logits with an exponential upper tail."""
    condition = "Independent logits with upper tail exp(-x): "
    if aim.few:
        condition += "a constant scale keeps the same few keys in front."
    else:
        condition += "the scale falls towards this constant, where the row freezes."
    return _law(0.0, "log n", aim.inverse_m if aim.few else 1.0, condition)


def _uniform_law(aim: _Aim, _: float) -> ScalingLaw:
    """The law for independent uniform logits."""
    condition = "Independent logits, uniform on [-1, 1]: bounded, and yet not log n."
    return _edge_law(aim, 1.0, math.log(0.5), condition)


def _cosine_law(aim: _Aim, d: float) -> ScalingLaw:
    """The scaling law for cosines of random directions in d dimensions."""
    if aim.n is not None and math.log(aim.n) < d / 2:
        factor = aim.inverse_m if aim.few else math.sqrt(1 - aim.value)
        condition = (
            f"Cosines of random directions while log n is far below d = {d:g}, as for Gaussian"
            " logits of deviation 1/sqrt(d); closer to d the power is between 1/2 and 1."
        )
        return _law(0.5, "log n", math.sqrt(2 * d) * factor, condition)
    a = (d - 1) / 2
    log_density = (a - 1) * math.log(2) + math.lgamma(d / 2) - math.lgamma(a)
    condition = (
        f"Cosines of random directions once log n is far above d = {d:g}, with a density as"
        " (1 - cos)^((d - 3)/2) at the upper end."
    )
    return _edge_law(aim, a, log_density - math.log(math.pi) / 2, condition)


def _edge_law(aim: _Aim, a: float, log_density: float, condition: str) -> ScalingLaw:
    """Law for logits whose density is K gap^(a-1) at their upper end, log K = ``log_density``."""
    if aim.few:  # c(a) a / g_n, with n K g_n^a / a = 1
        rate = math.exp((log_density - math.log(a)) / a)
        return _law(1 / a, "n", _edge_constant(a, aim.value) * a * rate, condition)
    constant = math.exp((log_density + math.lgamma(a) + a) / a)
    return _law((1 - aim.value) / a, "n", constant, condition)


def _pareto_law(aim: _Aim, a: float) -> ScalingLaw:
    """The scaling law for logits with a power-law tail."""
    rare = -math.log1p(-1 / aim.value) if aim.few else -math.log(aim.value)
    exponent = -1 / a
    return ScalingLaw(
        f"{_power('n', exponent)} log n",
        exponent,
        "n",
        rare**-exponent,
        f"Independent logits with upper tail x^(-{a:g}): rows are either one-hot or flat and only"
        " the share of each is kept, so no scale makes every row alike.",
    )


_LAWS: dict[str, Callable[[_Aim, float], ScalingLaw]] = {
    "two_level": _two_level_law,
    "planted": _planted_law,
    "gaussian": _gaussian_law,
    "stretched": _stretched_law,
    "cosine": _cosine_law,
    "uniform": _uniform_law,
    "exponential": _exponential_law,
    "laplace": _exponential_law,
    "gumbel": _exponential_law,
    "logistic": _exponential_law,
    "pareto": _pareto_law,
}


@lru_cache(maxsize=64)
def _edge_constant(a: float, effective_keys: float) -> float:
    r"""λ / h(b_n) at which E Σp² = 1/effective_keys, for infinitely many logits of bounded support.

    λ is the scale, h(b_n) the hazard rate of :func:`~acutance.theory.hazard_scale`, and the density
    of the logits falls like (distance to the upper end)^(a - 1).

    In units of a / h the gaps to the upper end are a Poisson process with x^a points below x. At
    λ = c h, each with its own Gumbel variable g, on average G(s) = E (s + g)_+^a / (c a)^a of them
    have c a x - g below s, and 1 - E Σp² = ∫ G'(s)² exp(-G(s)) ds.
    """
    depth = np.arange(-40 / min(a, 1.0), 52.0, 0.15)
    step = 0.15 * expit(depth)  # of y = low + log(1 + e^depth)

    def spread(c: float) -> float:
        eta = c * a
        lowest, highest = eta * math.exp(-40 / a) - 25, eta * math.exp(math.log(60) / a) + 12
        x, width = np.linspace(np.arcsinh(lowest), np.arcsinh(highest), 600, retstep=True)
        s = np.sinh(x)[:, None]
        y = np.maximum(s - 6, 0.0) + np.logaddexp(0.0, depth)
        gumbel = np.exp(s - y)
        points = np.exp(a * (np.log(y) - math.log(eta))) * gumbel * np.exp(-gumbel) * step
        inside, slope = points.sum(axis=1), (points / y).sum(axis=1) * a
        return float((slope * slope * np.exp(-inside) * np.cosh(x)).sum() * width)

    low = high = 1.0
    while spread(high) > 1 - 1 / effective_keys:
        low, high = high, 2 * high
    while spread(low) < 1 - 1 / effective_keys:
        low, high = low / 2, low
    from scipy.optimize import brentq  # takes its time to load

    return float(brentq(lambda c: spread(c) - (1 - 1 / effective_keys), low, high, rtol=1e-10))


def _law(
    exponent: float, variable: Literal["log n", "n"], constant: float, condition: str
) -> ScalingLaw:
    """A scaling law: constant · variable^exponent, with the condition under which it holds."""
    return ScalingLaw(_power(variable, exponent), exponent, variable, constant, condition)


def _power(variable: str, exponent: float) -> str:
    """A power as text, such as ``(log n)^{1/2}``."""
    if exponent == 0:
        return "constant"
    if exponent == 1:
        return variable
    ratio = Fraction(exponent).limit_denominator(1000)
    text = str(ratio) if abs(float(ratio) - exponent) < 1e-12 else f"{exponent:.6g}"
    return f"({variable})^{{{text}}}" if " " in variable else f"{variable}^{{{text}}}"


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
        wrapped: Any = as_family(family)
        law = wrapped.law
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
