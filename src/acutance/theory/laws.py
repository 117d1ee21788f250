r"""Scale laws: what must multiply the logits, as n grows, for attention to stay as focused.

*Which scale keeps a few keys in front?* Let F be the distribution function of independent logits
and :math:`b_n = F^{-1}(1 - 1/n)`, about where the largest of n lies. The gaps between the largest
logits are about one over the hazard rate :math:`h = f / (1 - F)` at :math:`b_n`, so

.. math:: \lambda^*(n) = c \, h(b_n)

keeps the number of keys that share the weight. How fast that grows is a matter of the tail alone:
not at all (exponential), as a power of log n (lighter tails) or as a power of n (logits with an
upper end). A row with one match above a narrow bulk has log n.

*What do measured scores need?* With N(t) the number of keys within t of the row's maximum,
:math:`\Lambda = \sup_t \log N(t) / t` is the scale above which the maximum stands alone.

Sources: Derrida (1981), Phys. Rev. B 24, 2613 (the random energy model: Gaussian logits, planted
match, entropy along the scale); Hayase & Karakida (2026), arXiv:2605.12697 (gap counts); Su (2021),
https://kexue.fm/archives/8823 (why a scale that grows with n).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import betaincinv, betaln, erfcx, expit, ndtri

__all__ = [
    "ScalingLaw",
    "critical_scale",
    "gap_count",
    "gauss_hazard_scale",
    "gauss_invariant_scale",
    "hazard_scale",
    "needle_scale",
    "scaling_exponent",
]

Array = NDArray[np.float64]
Target = Literal["effective_keys", "entropy_fraction"]

_BLOCK = 1 << 20  # scores that are in memory as float64 at a time, or one row
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class ScalingLaw:
    """How the scale of the logits must grow with the number of keys n.

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


def needle_scale(
    n: ArrayLike, gap: ArrayLike, sigma: ArrayLike = 0.0, mass: ArrayLike = 0.5
) -> float | Array:
    r"""Scale at which one key, ``gap`` above the mean of the others, holds a given weight.

    .. math:: \lambda = \frac{2c}{\Delta + \sqrt{\Delta^2 - 2 \sigma^2 c}}, \qquad
              c = \log(n - 1) + \log\frac{p}{1 - p}

    The other n - 1 logits are N(0, σ²) and enter by their average exponential exp(λ²σ²/2). For
    equal ones, σ = 0, the weight is exact and the law is log n. Of the two scales that solve it
    with σ > 0, the smaller.

    Args:
        n: Number of keys, n >= 2. Values between the integers continue the formula.
        gap: Δ, the match's logit less the mean of the others, gap > 0.
        sigma: Standard deviation of the other logits, sigma >= 0.
        mass: Weight p of the match, 1/n <= mass < 1; 1/n is what it has at scale 0.

    Returns:
        λ, in one over the unit of ``gap``; float64 of the broadcast shape, a float for scalars.

    Raises:
        ValueError: If an argument is outside its domain, or the bulk is too wide:
            gap < sigma sqrt(2 c), where no scale gives the match that weight.

    Example:
        >>> needle_scale(256, 1.0)  # log 255
        5.54126354516
        >>> needle_scale(4096, 8.0, [0.0, 1.0], 0.9)
        array([1.31434332, 1.44481069])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613, with a planted level.
    """
    keys, top = np.asarray(n, np.float64), np.asarray(gap, np.float64)
    spread, weight = np.asarray(sigma, np.float64), np.asarray(mass, np.float64)
    _check_keys("n", keys)
    _require("gap", top, (top > 0) & np.isfinite(top), "the gap is finite and greater than 0")
    _require(
        "sigma",
        spread,
        (spread >= 0) & np.isfinite(spread),
        "the standard deviation is finite and at least 0",
    )
    keys, top, spread, weight = np.broadcast_arrays(keys, top, spread, weight)
    _require(
        "mass", weight, (weight * keys >= 1 - _EPS) & (weight < 1), "the mass lies in [1/n, 1)"
    )
    c = np.log1p(np.maximum(keys * weight - 1, 0.0) / (1 - weight))
    room = 1 - 2 * c * (spread / top) ** 2
    _require(
        "gap",
        top,
        room >= -8 * _EPS,
        "no scale gives the match its mass: the gap is at least sigma"
        " sqrt(2 (log(n - 1) + logit mass))",
    )
    return _result(2 * c / (top * (1 + np.sqrt(np.maximum(room, 0.0)))))


def gauss_invariant_scale(n: ArrayLike, n0: ArrayLike, gamma0: ArrayLike = 1.0) -> float | Array:
    r"""Scale that keeps the entropy of Gaussian logits at n keys what it was at n0.

    .. math:: \gamma = \sqrt{\gamma_0^2 + 2 \log(n / n_0)}

    which keeps the population formula H = log n - γ²/2. At a finite n the exact scale is a few
    per cent above, once γ is past half of sqrt(2 log n).

    Args:
        n: Number of keys, n >= 2. Values between the integers continue the formula.
        n0: Number of keys at which gamma0 is right, n0 >= 2.
        gamma0: Standard deviation of the logits there, gamma0 >= 0.

    Returns:
        γ, float64 of the broadcast shape; a float for scalars.

    Raises:
        ValueError: If an argument is outside its domain, or n is so small that log n is below
            the entropy to keep: n < n0 exp(-gamma0²/2).

    Example:
        >>> gauss_invariant_scale(2048, 512, 1.0)
        1.942315299389
        >>> gauss_invariant_scale([512, 8192, 65536], 512, 1.0)
        array([1.        , 2.55835444, 3.27170606])

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613, for the entropy.
    """
    keys, start = np.asarray(n, np.float64), np.asarray(n0, np.float64)
    first = np.asarray(gamma0, np.float64)
    _check_keys("n", keys)
    _check_keys("n0", start)
    _require(
        "gamma0",
        first,
        (first >= 0) & np.isfinite(first),
        "the standard deviation is finite and at least 0",
    )
    keys, start, first = np.broadcast_arrays(keys, start, first)
    near = np.abs(keys - start) < 0.5 * start
    log_ratio = np.where(
        near, np.log1p(np.where(near, keys - start, 0.0) / start), np.log(keys) - np.log(start)
    )
    step = np.sqrt(2 * np.abs(log_ratio))
    _require(
        "n",
        keys,
        (log_ratio >= 0) | (first >= step),
        "log n is at least the entropy to keep, n >= n0 exp(-gamma0²/2)",
    )
    shrunk = np.sqrt(np.maximum(first - step, 0.0)) * np.sqrt(first + step)
    return _result(np.where(log_ratio >= 0, np.hypot(first, step), shrunk))


def gauss_hazard_scale(n: ArrayLike) -> float | Array:
    r"""Hazard rate of the standard normal law where the largest of n logits lies.

    .. math:: h(b_n) = n \varphi(b_n), \qquad b_n = \Phi^{-1}(1 - 1/n), \qquad
              h(b_n) \approx \sqrt{2 \log n}

    Scales proportional to it keep the number of effective keys of Gaussian logits: half of the
    collision probability is reached at 1.75 times it for n = 64, 1.93 for a million.

    Args:
        n: Number of keys, n >= 2. Values between the integers continue the formula.

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
    keys = np.asarray(n, np.float64)
    _check_keys("n", keys)
    return _result(math.sqrt(2 / math.pi) / erfcx(-ndtri(1 / keys) / math.sqrt(2)))


def hazard_scale(
    family: Any,
    n: ArrayLike,
    *,
    c: ArrayLike = 1.0,
    d: ArrayLike | None = None,
    rho: ArrayLike | None = None,
    a: ArrayLike | None = None,
) -> float | Array:
    r"""Scale that keeps the number of effective keys, from the tail of the logits.

    .. math:: \lambda^* = c \, h(b_n), \qquad h = \frac{f}{1 - F}, \quad b_n = F^{-1}(1 - 1/n)

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
        family: A name from the table, or a frozen continuous distribution of ``scipy.stats``.
        n: Number of keys, n >= 2. Values between the integers continue the formula.
        c: Factor, c > 0.
        d: Dimension for ``"cosine"``, d >= 2.
        rho: Exponent for ``"stretched"``, rho > 0.
        a: Tail index for ``"pareto"``, a > 0.

    Returns:
        λ* in one over the unit of the logits, float64 of the broadcast shape; a float for scalars.

    Raises:
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
    keys, factor = np.asarray(n, np.float64), np.asarray(c, np.float64)
    _check_keys("n", keys)
    _require(
        "c", factor, (factor > 0) & np.isfinite(factor), "the factor is finite and greater than 0"
    )
    parameter = _family_parameter(family, _HAZARDS, {"d": d, "rho": rho, "a": a})
    if not isinstance(family, str):
        rate = np.exp(family.logpdf(family.isf(1 / keys)) + np.log(keys))
    else:
        rate = _HAZARDS[family](keys, parameter)
    return _result(factor * rate)


def scaling_exponent(
    family: str,
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
    r"""Law of the scale that keeps attention as focused when the number of keys grows.

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
        family: A family of the table.
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
            f'target: one of "effective_keys" and "entropy_fraction", got target={target!r}'
        )
    given = {"d": d, "rho": rho, "a": a}
    parameter = float(_family_parameter(family, _LAWS, given))
    for name, value, holds, rule in (
        ("gap", gap, 0 < gap < math.inf, "the gap is finite and greater than 0"),
        ("sigma", sigma, 0 <= sigma < math.inf, "the standard deviation is finite, at least 0"),
        ("rho", parameter, family != "stretched" or parameter >= 1, "the exponent is at least 1"),
        ("effective_keys", effective_keys, 1 < effective_keys < math.inf, "the number exceeds 1"),
        ("fraction", fraction, 0 < fraction < 1, "the fraction lies between 0 and 1"),
        ("n", n, n is None or 2 <= n < math.inf, "the number of keys is at least 2"),
    ):
        if not holds:
            raise ValueError(f"{name}: {rule}, got {name}={value}")
    few = target == "effective_keys"
    aim = _Aim(few, effective_keys if few else fraction, n, gap, sigma)
    return _LAWS[family](aim, parameter)


def gap_count(scores: ArrayLike, t: ArrayLike) -> float | Array:
    r"""Number of keys within t of the row's maximum.

    .. math:: N(t) = \#\{j : \max_i s_i - s_j \le t\}

    The maximum counts, so N(0) is the number of keys tied for it. The difference is taken in
    float64, whatever the scores' own precision.

    Args:
        scores: Rows of scores, shape (..., n); -inf where a key is masked, which never counts.
        t: Gaps t >= 0 in the unit of the scores, any shape; infinity counts the visible keys.

    Returns:
        N(t) as float64, of the shape of the rows followed by that of ``t``; a float for one row
        and one t. It is 0 for a row without a visible key.

    Raises:
        ValueError: If some t is negative or NaN, some score is NaN or +inf, or rows have no keys.

    Example:
        >>> gap_count([3.0, 2.5, 0.0, -float("inf")], [0.0, 0.5, 10.0])
        array([1., 2., 3.])

    Source:
        Hayase & Karakida (2026), arXiv:2605.12697.
    """
    rows, reach = np.asarray(scores), np.asarray(t, np.float64)
    _require("t", reach, reach >= 0, "the gap is at least 0")
    counts = np.empty((math.prod(rows.shape[:-1]), reach.size))
    for block, gaps in _sorted_gaps(rows):
        counts[block] = [
            np.searchsorted(row[row < np.inf], reach.ravel(), side="right") for row in gaps
        ]
    return _result(counts.reshape(rows.shape[:-1] + reach.shape))


def critical_scale(scores: ArrayLike) -> float | Array:
    r"""Scale above which a row's maximum stands out from all its competitors.

    .. math:: \Lambda = \sup_{t > 0} \frac{\log N(t)}{t} = \max_{j \ge 2} \frac{\log j}{g_{(j)}}

    with N the ``gap_count`` and :math:`g_{(1)} = 0 \le g_{(2)} \le \dots` the gaps to the maximum,
    sorted. Between gaps N stays and t grows, so one of the gaps attains the supremum. At a scale
    λ of at least Λ every count is bounded, :math:`N(t) \le e^{\lambda t}`; below Λ some N(t) keys
    outweigh the maximum even if each had only the least weight among them, exp(-λt) times its.

    Args:
        scores: Rows of scores, shape (..., n); -inf where a key is masked, which never counts.

    Returns:
        Λ in one over the unit of the scores, shape (...); a float for one row. It is infinity if
        two keys share the maximum, N(0) > 1: no scale separates them (and scores kept in 16 bits
        do tie). It is 0 for a row with one visible key and NaN for a row with none.

    Raises:
        ValueError: If some score is NaN or +inf, or rows have no keys.

    Example:
        One key 2 above seven equal ones needs log 8 / 2; a nearby second one needs more:

        >>> critical_scale([2.0, 0, 0, 0, 0, 0, 0, 0])
        1.03972077
        >>> critical_scale([[3.0, 2.5, 0.0], [3.0, 3.0, 0.0]])
        array([1.38629436,        inf])

    Source:
        Hayase & Karakida (2026), arXiv:2605.12697.
    """
    rows = np.asarray(scores)
    scale = np.empty(math.prod(rows.shape[:-1]))
    for block, gaps in _sorted_gaps(rows):
        ranks = np.log(np.arange(1.0, gaps.shape[-1] + 1))
        with np.errstate(divide="ignore"):
            ratio = ranks[1:] / gaps[:, 1:]
        best = ratio.max(axis=-1, initial=0.0)
        scale[block] = np.where(np.isinf(gaps[:, 0]), np.nan, best)
    return _result(scale.reshape(rows.shape[:-1]))


def _sorted_gaps(rows: NDArray[Any]) -> Iterator[tuple[slice, Array]]:
    """Blocks of rows, in the order of the flattened ones, as gaps to their maximum, rising.

    A masked key has gap infinity, and in a row without a visible key all have.
    """
    if rows.ndim == 0 or rows.shape[-1] == 0:
        raise ValueError(f"scores: rows of at least one key, shape (..., n), got {rows.shape}")
    rows = rows[None] if rows.ndim == 1 else rows
    lead = rows.shape[:-1]
    count, step = math.prod(lead), max(1, _BLOCK // rows.shape[-1])
    for first in range(0, count, step):
        block = slice(first, min(first + step, count))
        gaps = rows[np.unravel_index(np.arange(block.start, block.stop), lead)].astype(np.float64)
        top = gaps.max(axis=-1, keepdims=True)
        if np.isnan(top).any() or (top == np.inf).any():
            raise ValueError("scores: finite, or -inf where a key is masked, got NaN or +inf")
        np.subtract(np.where(np.isinf(top), 0.0, top), gaps, out=gaps)
        gaps.sort(axis=-1)
        yield block, gaps


_Hazard = Callable[[Array, Array], Array]


def _cosine_hazard(n: Array, d: Array) -> Array:
    """Hazard n f(b_n), with (1 + cos) / 2 ~ Beta(a, a), a = (d - 1)/2."""
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


@dataclass(frozen=True)
class _Aim:
    """What the scale is to keep, and of which row."""

    few: bool  # a number of effective keys, rather than a fraction of log n
    value: float
    n: float | None
    gap: float
    sigma: float

    @property
    def inverse_m(self) -> float:
        """1/m = 1/(1 - E Σp²), the constant for tails with an exponential limit."""
        return self.value / (self.value - 1)


def _two_level_law(aim: _Aim, _: float) -> ScalingLaw:
    weight = "its weight" if aim.few else "its weight at 1 - c"
    condition = (
        f"One key a fixed gap above n - 1 equal ones: log n / gap keeps {weight}, and the entropy"
        " is then (1 - weight) log n."
    )
    return _law(1.0, "log n", 1 / aim.gap, condition)


def _planted_law(aim: _Aim, _: float) -> ScalingLaw:
    condition = (
        "One key a fixed gap above a bulk N(0, sigma²): log n / gap while the gap is far above"
        " sigma sqrt(2 log n), below which no scale works; needle_scale has the exact scale"
    )
    if aim.sigma > 0:
        condition += f" (sigma = {aim.sigma:g}: up to log n of {(aim.gap / aim.sigma) ** 2 / 2:g})"
    return _law(1.0, "log n", 1 / aim.gap, condition + ".")


def _gaussian_law(aim: _Aim, _: float) -> ScalingLaw:
    factor = aim.inverse_m if aim.few else math.sqrt(1 - aim.value)
    condition = "Independent Gaussian logits of standard deviation 1."
    return _law(0.5, "log n", math.sqrt(2) * factor, condition)


def _stretched_law(aim: _Aim, rho: float) -> ScalingLaw:
    power = 1 - 1 / rho
    factor = aim.inverse_m if aim.few else (1 - aim.value) ** power
    return _law(
        power, "log n", rho * factor, f"Independent logits with upper tail exp(-x^{rho:g})."
    )


def _exponential_law(aim: _Aim, _: float) -> ScalingLaw:
    condition = "Independent logits with upper tail exp(-x): "
    if aim.few:
        condition += "a constant scale keeps the same few keys in front."
    else:
        condition += "the scale falls towards this constant, where the row freezes."
    return _law(0.0, "log n", aim.inverse_m if aim.few else 1.0, condition)


def _uniform_law(aim: _Aim, _: float) -> ScalingLaw:
    condition = "Independent logits, uniform on [-1, 1]: bounded, and yet not log n."
    return _edge_law(aim, 1.0, math.log(0.5), condition)


def _cosine_law(aim: _Aim, d: float) -> ScalingLaw:
    if aim.n is not None and math.log(aim.n) < d / 2:
        factor = aim.inverse_m if aim.few else math.sqrt(1 - aim.value)
        condition = (
            f"Cosines of random directions while log n is far below d = {d:g}, as for Gaussian"
            " logits of deviation 1/sqrt(d); nearer to d the power lies between 1/2 and 1."
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
    r"""λ / h(b_n) at which E Σp² = 1/effective_keys, for the Poisson limit of bounded logits.

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
    return float(brentq(lambda c: spread(c) - (1 - 1 / effective_keys), low, high, rtol=1e-10))


def _law(
    exponent: float, variable: Literal["log n", "n"], constant: float, condition: str
) -> ScalingLaw:
    return ScalingLaw(_power(variable, exponent), exponent, variable, constant, condition)


def _power(variable: str, exponent: float) -> str:
    if exponent == 0:
        return "constant"
    if exponent == 1:
        return variable
    ratio = Fraction(exponent).limit_denominator(1000)
    text = str(ratio) if abs(float(ratio) - exponent) < 1e-12 else f"{exponent:.6g}"
    return f"({variable})^{{{text}}}" if " " in variable else f"{variable}^{{{text}}}"


def _family_parameter(family: Any, table: dict[str, Any], given: dict[str, Any]) -> Array:
    """The one parameter the family needs, checked; 0 for a family without."""
    name = None
    if isinstance(family, str):
        if family not in table:
            known = ", ".join(f'"{known}"' for known in table)
            raise ValueError(f'family: one of {known}, got family="{family}"')
        name, least, closed = _PARAMETERS.get(family, (None, 0.0, False))
    elif table is not _HAZARDS or not (hasattr(family, "isf") and hasattr(family, "logpdf")):
        raise ValueError(
            "family: a name, or where tails are given by quantiles a frozen continuous"
            f" distribution of scipy.stats, got {family!r}"
        )
    for other, value in given.items():
        if other != name and value is not None:
            raise ValueError(
                f"{other}: family={family!r} has no such parameter, got {other}={value}"
            )
    if name is None:
        return np.zeros(())
    if given[name] is None:
        raise ValueError(f'{name}: family="{family}" needs it, got {name}=None')
    values = np.asarray(given[name], np.float64)
    _require(
        name,
        values,
        np.isfinite(values) & ((values >= least) if closed else (values > least)),
        f"the parameter is finite and {'at least' if closed else 'greater than'} {least:g}",
    )
    return values


def _check_keys(name: str, keys: Array) -> None:
    _require(name, keys, (keys >= 2) & np.isfinite(keys), "the number of keys is at least 2")


def _require(name: str, values: Array, holds: NDArray[np.bool_], rule: str) -> None:
    wrong = values[~np.asarray(holds)]
    if wrong.size:
        raise ValueError(f"{name}: {rule}, got {name}={wrong[0]:g}")


def _result(values: Array) -> float | Array:
    values = np.asarray(values, np.float64)
    return values if values.ndim else float(values)
