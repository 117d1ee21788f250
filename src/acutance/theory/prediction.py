r"""What every metric of an attention row should be, for a mechanism and a number of keys.

The prediction has the shape of what is measured, one field for each metric of ``acutance.METRICS``,
so that comparing is a subtraction. Softmax, cosine, relu² and identity rows are exact means at
finite n; formulas for infinitely many keys are in ``Prediction.population``.

Theory imports nothing of what measures, so the names of the metrics stand here once more; a test
holds them to ``acutance.METRICS``, name by name and in order.

For infinitely many keys, with the cumulant generating function
:math:`K(\gamma) = \log E e^{\gamma s}` of a score,

.. math::

    \log Z = \log n + K, \quad \log n - H = \gamma K' - K, \quad \operatorname{Var}_p = \gamma^2
    K'', \quad \sum_j p_j^2 = \frac{e^{K(2 \gamma) - 2 K(\gamma)}}{n}.

For Gaussian scores K is :math:`\gamma^2/2`, which gives :math:`H = \log n - \gamma^2/2` and
:math:`S = e^{-\gamma^2/2}`. At a finite n these hold while many keys carry the sum behind them:
entropy up to :math:`\sqrt{2 \log n}`, everything made of :math:`\sum p^2` up to half that.

The weights of a decay, :math:`\lambda^{n-1}, \dots, \lambda, 1`, are the softmax of the logits
:math:`-\theta k`, :math:`\theta = -\log\lambda`, k = 0 … n - 1. With Langevin's function
:math:`\mathcal L(x) = \coth x - 1/x` and :math:`x = \theta / 2`, the attended position has

.. math::

    \langle k \rangle = \frac{n - 1}{2} - \frac{n \mathcal L(nx) - \mathcal L(x)}{2}, \qquad
    \operatorname{Var}_p k = \frac{n^2 \mathcal L'(nx) - \mathcal L'(x)}{4},

and everything else follows, the same for every row.

Sources: Su Jianlin, kexue.fm/archives/9889, 9593, 9034; Derrida (1981), Phys. Rev. B 24, 2613.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property, lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.special import gammaincinv, log_expit, log_ndtr, ndtr, poch

from acutance.theory.arguments import Array, log_probability, normal_density, one_number
from acutance.theory.expected import (
    Maximum,
    OverRows,
    expected_collision,
    expected_effective_keys,
    expected_entropy,
    expected_entropy_gauss,
    expected_jacobian_fro2,
    expected_logsumexp,
    expected_max,
    expected_max_gauss,
    expected_sparsity,
    expected_top_weight,
    expected_varentropy,
    expected_weighted_mean,
    mean_top_weight,
)
from acutance.theory.families import Family, Gaussian, as_family
from acutance.theory.quadrature import NODES, WEIGHTS, gauss, grid
from acutance.theory.sparsity import (
    effective_keys_decay,
    sparsity_decay,
    sparsity_identity,
    sparsity_linear,
    sparsity_linear_iid,
    sparsity_relu2,
)
from acutance.theory.trained_heads import HEAD_NUMBERS, expected_head_metrics

__all__ = ["KINDS", "MetricRecord", "Prediction", "PREDICTED_MECHANISMS", "predict"]

Kind = Literal["fixed", "mean", "plug-in"]

#: What kind of number a predicted metric is.
KINDS: dict[Kind, str] = {
    "fixed": "the same for every row",
    "mean": "the expectation of the metric over rows, exact at this n",
    "plug-in": "the metric's formula at expected values; it is not the expectation of the metric",
}


@dataclass(frozen=True)
class MetricRecord:
    """A number, tensor or array for each metric of ``acutance.METRICS``; NaN where there is none.

    Subtraction works metric by metric, on either side, with another record, with ``RowStatistics``
    (the result has a tensor with one value per row), with a ``HeadSummary`` (its means, one per
    head), or with a mapping from names to values.

    Example:
        >>> MetricRecord(entropy=2.0) - {"entropy": 1.5, "lse": 3.0}
        MetricRecord(entropy=0.5)
    """

    n_keys: Any = math.nan
    entropy: Any = math.nan
    normalized_entropy: Any = math.nan
    information: Any = math.nan
    effective_keys: Any = math.nan
    sparsity: Any = math.nan
    collision: Any = math.nan
    top_weight: Any = math.nan
    first_weight: Any = math.nan
    sink_mass: Any = math.nan
    max_logit: Any = math.nan
    lse: Any = math.nan
    logit_mean: Any = math.nan
    logit_std: Any = math.nan
    varentropy: Any = math.nan
    entropy_slope: Any = math.nan
    mean_field_entropy: Any = math.nan
    jensen_gap: Any = math.nan
    max_gap: Any = math.nan
    gaussian_entropy: Any = math.nan
    first_gap: Any = math.nan
    rest_logit_std: Any = math.nan
    rest_jensen_gap: Any = math.nan
    jacobian_trace: Any = math.nan
    noise_gain: Any = math.nan

    def __getitem__(self, name: str) -> Any:
        if name not in NAMES:
            raise ValueError(f"there is no metric named {name!r}: choose from {', '.join(NAMES)}")
        return getattr(self, name)

    def as_dict(self) -> dict[str, Any]:
        """Every metric by name, NaN included."""
        return {name: getattr(self, name) for name in NAMES}

    def __sub__(self, other: Any) -> MetricRecord:
        theirs = _values(other)
        return NotImplemented if theirs is None else _difference(self.as_dict(), theirs)

    def __rsub__(self, other: Any) -> MetricRecord:
        theirs = _values(other)
        return NotImplemented if theirs is None else _difference(theirs, self.as_dict())

    def __repr__(self) -> str:
        known = [f"{name}={value!r}" for name, value in self.as_dict().items() if not _nan(value)]
        return f"MetricRecord({', '.join(known)})"


NAMES: tuple[str, ...] = tuple(entry.name for entry in fields(MetricRecord))


@dataclass(frozen=True, repr=False)
class Prediction(MetricRecord):
    """Expected metrics of an attention row, with the kind of each number.

    Attributes:
        mechanism: name of the mechanism.
        parameters: what was given, with defaults filled in.
        kinds: for each metric that has a value, a key of ``KINDS`` that says how it was computed.
        why: for each metric without a value, the reason in a sentence.
        population: the values for infinitely many keys; NaN where there is no formula.
    """

    mechanism: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    population: MetricRecord = field(default_factory=MetricRecord)

    def __repr__(self) -> str:
        known = [f"{name}={getattr(self, name):.6g}" for name in self.kinds]
        return f"Prediction({self.mechanism!r}: {', '.join(known)})"


def _difference(left: dict[str, Any], right: dict[str, Any]) -> MetricRecord:
    return MetricRecord(**{name: left[name] - right[name] for name in NAMES})


def _values(other: Any) -> dict[str, Any] | None:
    """Metrics of a record, statistics, summary or mapping, NaN if missing; None for other types."""
    if isinstance(other, MetricRecord):
        return other.as_dict()
    if isinstance(other, Mapping):
        return {name: other.get(name, math.nan) for name in NAMES}
    if hasattr(other, "metrics") and hasattr(other, "mean"):  # a summary over rows
        return {n: other.mean(n) if n in other.metrics else math.nan for n in NAMES}
    if hasattr(other, "available"):  # statistics of rows
        return {n: getattr(other, n) if n in other.available else math.nan for n in NAMES}
    return None


def _nan(value: Any) -> bool:
    """Whether a value is NaN."""
    return isinstance(value, float) and math.isnan(value)


def wanted_names(metrics: Iterable[str] | None) -> set[str]:
    """The requested metric names, all if None; raises for an unknown one."""
    if metrics is None:
        return set(NAMES)
    if isinstance(metrics, str):
        raise ValueError(f"metrics: must be a list or tuple of names, got {metrics!r}")
    requested = set(metrics)
    if unknown := requested - set(NAMES):
        raise ValueError(f"metrics: there is no metric named {min(unknown)!r}")
    return requested


#: For each metric, what kind of number it is, and the number or how to compute it; or why there is
#: none.
Formulas: TypeAlias = dict[str, tuple[Kind, float | Callable[[], float]] | str]
#: Formulas of one prediction, their limits for many keys, and the parameters.
_Case: TypeAlias = tuple[Formulas, MetricRecord, dict[str, Any]]


class _Request(NamedTuple):
    """What is to be predicted: the mechanism, its number of keys, and the parameters given."""

    mechanism: str
    n: float
    value_variance: float
    given: dict[str, Any]

    def number(
        self,
        name: str,
        least: float,
        rule: str,
        default: float | None = None,
        most: float = math.inf,
    ) -> float:
        """One parameter; ValueError unless it is given, or has a default, and is in its range."""
        value = self.given.get(name, default)
        if value is None:
            raise ValueError(f'{name}: "{self.mechanism}" needs {name}, got None')
        return one_number(name, value, least, rule, most)

    def logit_mean(self) -> float:
        """The parameter of that name, 0 by default."""
        return self.number("logit_mean", -math.inf, "the mean of the logits must be finite", 0.0)


def predict(
    mechanism: str,
    n: float,
    *,
    value_variance: float = 1.0,
    metrics: Iterable[str] | None = None,
    **parameters: Any,
) -> Prediction:
    """Predict the metrics of an attention row of n keys with random scores.

    ==================  ====================================================================
    mechanism           the row, and the parameters it takes
    ==================  ====================================================================
    ``"softmax"``       independent logits of deviation ``logit_std`` (or ``scale`` times a
                        score of the ``family``, Gaussian if left out), shifted to
                        ``logit_mean``; ``d``, ``rho`` or ``a`` as the family needs
    ``"scaled_dot"``    q·k · ``scale`` (d^-1/2 if left out), keys N(0, I) in ``d`` dimensions
                        and a query of length ``query_norm`` (sqrt(d) if left out)
    ``"dot"``           the same with ``scale`` 1
    ``"cosine"``        cos(q, k) / ``tau``, keys in uniform directions of R^``d``
    ``"relu2"``         max(s, 0)² over its sum, s normal of ``logit_mean`` and ``logit_std``
    ``"identity"``      s itself, of both signs, measured by size
    ``"linear"``        q·k >= 0, from ``q`` and the keys' mean ``mu`` and covariance
                        ``Sigma``, or ``sigma`` for independent components
    ``"decay"``         weights ``lam``^(n-1), ..., ``lam``, 1
    ``"trained_head"``  a first key of its own and skewed logits, from the four numbers of
                        :func:`~acutance.theory.expected_head_metrics`, n >= 3
    ==================  ====================================================================

    The predictions are means over random keys, for a query of fixed norm.

    Args:
        mechanism: A name from the table.
        n: Number of visible keys, n >= 1.
        value_variance: Variance of a value, summed over its components, for ``noise_gain``;
            values are assumed independent of each other and of the weights.
        metrics: Names of the metrics to compute; all if left out.
        **parameters: Parameters of the mechanism.

            * ``logit_std``: Standard deviation of the logits.
            * ``logit_mean``: Their mean; 0 if left out, or what the family and scale make it.
            * ``scale``: Factor of the scores.
            * ``family``: Distribution of a score; see :func:`~acutance.theory.expected_entropy`.
            * ``d``: Dimension of queries and keys.
            * ``rho``: Exponent of the family ``"stretched"``.
            * ``a``: Tail index of the family ``"pareto"``.
            * ``query_norm``: Length of the query.
            * ``tau``: Temperature.
            * ``lam``: Decay per key, 0 < lam <= 1.
            * ``q``: Query features, shape (d,).
            * ``mu``: Mean of the key features, shape (d,), or of each component beside ``sigma``.
            * ``Sigma``: Covariance of the key features, shape (d, d).
            * ``sigma``: Standard deviation of independent, alike key components.
            * ``first_gap``: Mean log-odds of the first key's weight against all others.
            * ``first_gap_std``: Standard deviation of it over rows; 0 if left out.
            * ``rest_logit_std``: Standard deviation of the other keys' logits.
            * ``rest_jensen_gap``: Mean of their logsumexp − log(n − 1) − mean.

    Returns:
        A :class:`Prediction`. Its ``kinds`` say which numbers are exact expectations, its ``why``
        for which metrics there is no prediction. For relu², means are over rows with some weight.

    Raises:
        TypeError: If ``family`` is neither a name nor a continuous distribution.
        ValueError: If the mechanism or a metric is unknown, or a parameter is missing, outside its
            domain, or not one the mechanism takes.

    Example:
        >>> row = predict("softmax", 4096, logit_std=2.0)
        >>> row.entropy, row.population.entropy
        (6.3508791, 6.3177662)
        >>> row.kinds["effective_keys"], row.effective_keys
        ('mean', 155.728014)
        >>> row - {"entropy": 6.0}
        MetricRecord(entropy=0.350879...)
        >>> predict("decay", 4096, lam=0.9).effective_keys
        19.0

    Source:
        Su Jianlin, kexue.fm/archives/9889, 9593, 9034; Derrida (1981), Phys. Rev. B 24, 2613.
    """
    if mechanism not in PREDICTED_MECHANISMS:
        known = ", ".join(f'"{name}"' for name in PREDICTED_MECHANISMS)
        raise ValueError(f"mechanism: must be one of {known}, got {mechanism!r}")
    takes, build = PREDICTED_MECHANISMS[mechanism]
    keys = one_number("n", n, 1.0, "the number of keys must be finite and at least 1")
    variance = one_number(
        "value_variance", value_variance, 0.0, "a variance must be finite and at least 0"
    )
    others = {name for names, _ in PREDICTED_MECHANISMS.values() for name in names}
    for name, value in parameters.items():
        left_out = value is None and name in others
        if name not in takes and not left_out:
            raise ValueError(
                f'{name}: "{mechanism}" takes {", ".join(takes)}, got {name}={value!r}'
            )
    given = {name: value for name, value in parameters.items() if value is not None}
    requested = wanted_names(metrics)
    formulas, population, shown = build(_Request(mechanism, keys, variance, given))
    formulas |= {"n_keys": ("fixed", keys), "sink_mass": ("fixed", 0.0)}
    values: dict[str, float] = {}
    kinds: dict[str, Kind] = {}
    why: dict[str, str] = {}
    for name in NAMES:
        formula = formulas[name]
        if isinstance(formula, str):
            why[name] = formula
        elif name not in requested:
            why[name] = "It was not requested."
        else:
            kinds[name], number = formula
            values[name] = float(number() if callable(number) else number)
    return Prediction(
        **values,
        mechanism=mechanism,
        parameters={"n": keys, **shown, "value_variance": variance},
        kinds=kinds,
        why=why,
        population=population,
    )


_NO_MEAN = "The scores' law has no mean within float64, so neither has this."


ONE_KEY = "With one key both the entropy and log n are 0."


def _softmax(request: _Request) -> _Case:
    """Softmax of independent logits."""
    given = request.given
    family = given.get("family", "gaussian")
    law = as_family(family, d=given.get("d"), rho=given.get("rho"), a=given.get("a"))
    mean, variance = score_moments(law)
    if ("logit_std" in given) == ("scale" in given):
        raise ValueError(
            f'logit_std, scale: "{request.mechanism}" needs exactly one of the two, got '
            f"logit_std={given.get('logit_std')!r} and scale={given.get('scale')!r}"
        )
    if "logit_std" in given:
        rule = "the deviation of the logits must be finite and at least 0"
        deviation = request.number("logit_std", 0.0, rule)
        if math.isnan(variance):
            raise ValueError(
                f"logit_std: the variance of the scores' distribution {law} is infinite, or "
                "dominated by scores beyond float64; give scale"
            )
        gamma = deviation / math.sqrt(variance)
    else:
        gamma = request.number(
            "scale", 0.0, "the scale of the logits must be finite and at least 0"
        )
    shift = 0.0
    if "logit_mean" in given:
        if math.isnan(mean):
            raise ValueError(
                f"logit_mean: the mean of the scores' distribution {law} is infinite, or dominated "
                "by scores beyond float64; omit logit_mean"
            )
        shift = request.logit_mean() - gamma * mean
    parameters = {"family": family, "logit_std" if isinstance(law, Gaussian) else "scale": gamma}
    shown = ("d", "rho", "a", "logit_mean")
    parameters |= {name: given[name] for name in shown if name in given}
    return _independent_logits(request, gamma, law, parameters, shift)


def _dot(request: _Request) -> _Case:
    """Scaled and plain dot products with Gaussian keys."""
    d = request.number("d", 1.0, "the dimension must be finite and at least 1")
    usual = 1.0 if request.mechanism == "dot" else d**-0.5
    scale = request.number("scale", 0.0, "a scale must be at least 0", usual)
    rule = "a length must be finite and at least 0"
    norm = request.number("query_norm", 0.0, rule, math.sqrt(d))
    parameters = {"d": d, "scale": scale, "query_norm": norm}
    return _independent_logits(request, scale * norm, Gaussian(), parameters)


def _cosine(request: _Request) -> _Case:
    """A softmax of cosines."""
    d = request.number("d", 2.0, "the dimension must be finite and at least 2")
    tau = request.number("tau", 1e-300, "the temperature must be finite and greater than 0")
    law = as_family("cosine", d=d)
    return _independent_logits(request, 1 / tau, law, {"tau": tau, "d": d})


def _independent_logits(
    request: _Request, gamma: float, family: Family, parameters: dict[str, Any], shift: float = 0.0
) -> _Case:
    """A softmax row with logits shift + gamma s, s drawn from ``family``."""
    n, value_variance = request.n, request.value_variance
    log_n, normal = math.log(n), isinstance(family, Gaussian)
    mean, variance = score_moments(family)

    def expect(mean_of: OverRows, n: float = n) -> float:
        return float(mean_of(n, gamma, family))

    def entropy() -> float:
        return expect(expected_entropy)

    def collision() -> float:
        return min(expect(expected_collision), 1.0)

    def log_sum(n: float = n) -> float:
        return gamma * mean if n == 1 else expect(expected_logsumexp, n)

    def top() -> float:
        return gamma * float(expected_max(n, family))

    def deviation(n: float = n) -> float:
        if normal:
            return gaussian_deviation(n, gamma)
        return gamma * math.sqrt(variance * (n - 1) / n)

    def gaussian_entropy() -> float:
        if normal:
            return _mean_gaussian_entropy(n, gamma)
        return float(expected_entropy_gauss(n, deviation()))

    def rest_jensen_gap() -> float:
        return max(log_sum(n - 1) - math.log(n - 1) - gamma * mean, 0.0)

    # What cancels at its end is kept from rounding below it.
    formulas: Formulas = {
        "entropy": ("mean", entropy),
        "normalized_entropy": ("mean", lambda: entropy() / log_n) if n > 1 else ONE_KEY,
        "information": ("mean", lambda: max(log_n - entropy(), 0.0)),
        "effective_keys": ("mean", lambda: expect(expected_effective_keys)),
        "sparsity": ("mean", lambda: expect(expected_sparsity)),
        "collision": ("mean", collision),
        "top_weight": ("mean", lambda: expect(expected_top_weight)),
        "first_weight": ("mean", 1 / n),
        "max_logit": ("mean", lambda: shift + top()),
        "lse": ("mean", lambda: shift + log_sum()),
        "logit_mean": ("mean", shift + gamma * mean),
        "logit_std": ("mean" if normal else "plug-in", deviation),
        "varentropy": ("mean", lambda: expect(expected_varentropy)),
        "entropy_slope": ("mean", lambda: 0.0 - expect(expected_varentropy)),
        "mean_field_entropy": ("mean", lambda: log_n - (top() - gamma * mean)),
        "jensen_gap": ("mean", lambda: max(log_sum() - log_n - gamma * mean, 0.0)),
        "max_gap": ("mean", lambda: max(top() - gamma * expect(expected_weighted_mean), 0.0)),
        "gaussian_entropy": ("mean" if normal else "plug-in", gaussian_entropy),
        "first_gap": ("mean", lambda: gamma * mean - log_sum(n - 1)),
        "rest_logit_std": ("mean" if normal else "plug-in", lambda: deviation(n - 1)),
        "rest_jensen_gap": ("mean", rest_jensen_gap),
        "jacobian_trace": ("mean", lambda: max(1 - collision(), 0.0)),
        "noise_gain": ("mean", lambda: value_variance * expect(expected_jacobian_fro2)),
    }
    if n < 2:
        formulas.update(dict.fromkeys(("first_gap", "rest_logit_std", "rest_jensen_gap"), ONE_KEY))
    if math.isnan(mean):
        gaps = ("mean_field_entropy", "jensen_gap", "max_gap", "first_gap", "rest_jensen_gap")
        lacking = ("max_logit", "lse", "logit_mean", *gaps)
        formulas.update(dict.fromkeys(lacking, _NO_MEAN))
    if math.isnan(variance):
        reason = "The scores' law has no variance within float64."
        formulas.update(dict.fromkeys(("logit_std", "rest_logit_std", "gaussian_entropy"), reason))
    population = softmax_population(n, gamma, family, shift, value_variance)
    return formulas, population, parameters


def score_moments(family: Family) -> tuple[float, float]:
    """Mean and variance of one score; NaN where it has none within float64.

    Example:
        >>> from acutance.theory.families import as_family
        >>> score_moments(as_family("exponential"))
        (1.0, 1.0)
        >>> score_moments(as_family("pareto", a=1.5))
        (3.0, nan)
    """
    if isinstance(family, Gaussian):
        return 0.0, 1.0
    cells = grid(family)
    if not cells.has_mean:
        return math.nan, math.nan
    mean = float((cells.weights * cells.scores).sum())
    parts = (cells.weights * (cells.scores - mean) ** 2).sum(axis=1)
    settled = max(parts[0], parts[-1]) < 1e-9 * parts.sum()
    centre = cells.origin + mean
    if abs(centre) < 1e-13 * cells.unit:
        centre = 0.0  # a symmetric law, to rounding
    return centre, float(parts.sum()) if settled else math.nan


def gaussian_deviation(n: float, gamma: float) -> float:
    r"""Mean of the standard deviation (dividing by n) of n normal logits.

    .. math:: E \sqrt{M_2 / n} = \gamma \sqrt{2/n}\, \Gamma(n/2) / \Gamma((n-1)/2)

    Example:
        >>> gaussian_deviation(2, 1.0)  # E |z1 - z2| / 2 = 1 / sqrt(pi)
        0.564189583548
        >>> gaussian_deviation(1e12, 3.0)
        3.0
    """
    if n == 1:
        return 0.0
    if n > 1e6:
        return gamma * (1 - 3 / (4 * n))
    return gamma * math.sqrt(2 / n) * float(poch((n - 1) / 2, 0.5))


def _mean_gaussian_entropy(n: float, gamma: float) -> float:
    """Mean of ``expected_entropy_gauss(n, g)``, g the sample deviation of n normal logits.

    The logits have standard deviation gamma. It predicts the metric ``gaussian_entropy``.
    """
    if n == 1 or gamma == 0:
        return math.log(n)
    order = 60 if n < 8 else 24 if n < 64 else 8 if n < 1024 else 4
    z, weights = np.polynomial.hermite_e.hermegauss(order)
    significant = weights > 1e-14 * weights.sum()
    z, weights = z[significant], weights[significant] / weights[significant].sum()
    deviations = gamma * np.sqrt(2 * _chi_half(n, z) / n)
    return float(np.dot(weights, expected_entropy_gauss(n, deviations)))


def _chi_half(n: float, z: Array) -> Array:
    """Half a chi-square variable of n - 1 degrees of freedom, at the normal quantile z."""
    half = (n - 1) / 2
    if half > 1e6:  # Wilson & Hilferty (1931); the inverse below loses digits there
        cube = 1 - 1 / (9 * half) + z / (3 * math.sqrt(half))
        return np.asarray(half * cube**3)
    return np.asarray(gammaincinv(half, ndtr(z)))


_FURTHER = 600.0  # log-odds beyond the cells, where an exponential tail may still be tilted up


_END = 16  # nodes at either end ...


_END_SHARE = 1e-9  # ... whose share of a tilted law tells whether more of it lies beyond


_LARGEST = 1e150


_MARGIN = (1 - NODES[-1]) / (2 * NODES[-1])  # beyond the outermost nodes of a cell, in their range


def gaussian_break_points(n: float) -> tuple[float, float]:
    """Deviations of n Gaussian logits up to which the formulas for many keys hold.

    The first is for sparsity, the second for entropy.

    Example:
        >>> gaussian_break_points(4096)  # sqrt(log(n) / 2) and sqrt(2 log n)
        (2.0393339..., 4.0786679...)
    """
    return math.sqrt(math.log(n) / 2), math.sqrt(2 * math.log(n))


def softmax_population(
    n: float, gamma: float, family: Family, shift: float, value_variance: float
) -> MetricRecord:
    """Large-n value of every metric of a softmax row with independent logits shift + gamma s.

    Metrics of the weights are NaN where the mean of exp(gamma s) is infinite or not computable.

    Example:
        >>> row = softmax_population(4096, 2.0, Gaussian(), 0.0, 1.0)
        >>> row.entropy, row.sparsity, row.effective_keys
        (6.3177661..., 0.1353352..., 75.02...)
    """
    log_n = math.log(n)
    mean, deviation = score_moments(family)[0], math.sqrt(score_moments(family)[1])
    log_mean, tilted_mean, tilted_variance = _tilted(family, gamma)
    double = _tilted(family, 2 * gamma)[0]
    with np.errstate(over="ignore"):
        collision = float(np.exp(double - 2 * log_mean - log_n))
    information = gamma * tilted_mean - log_mean
    variance = gamma * gamma * tilted_variance
    top = gamma * _usual_largest(n, family)
    return MetricRecord(
        n_keys=n,
        entropy=log_n - information,
        normalized_entropy=1 - information / log_n if n > 1 else math.nan,
        information=information,
        effective_keys=1 / collision if collision else math.inf,
        sparsity=float(np.exp(log_mean - double / 2)),
        collision=collision,
        top_weight=_bounded_exp(top - log_mean - log_n),
        first_weight=1 / n,
        sink_mass=0.0,
        max_logit=shift + top,
        lse=shift + log_n + log_mean,
        logit_mean=shift + gamma * mean,
        logit_std=gamma * deviation,
        varentropy=variance,
        entropy_slope=-variance,
        mean_field_entropy=log_n - (top - gamma * mean),
        jensen_gap=log_mean - gamma * mean,
        max_gap=top - gamma * tilted_mean,
        gaussian_entropy=log_n - (gamma * deviation) ** 2 / 2,
        first_gap=gamma * mean - log_n - log_mean,
        rest_logit_std=gamma * deviation,
        rest_jensen_gap=log_mean - gamma * mean,
        jacobian_trace=1 - collision,
        noise_gain=value_variance * collision,
    )


def sparse_population(n: float, sparsity: float, **others: float) -> MetricRecord:
    """The metrics of a row that follow from its sparsity in the limit of many keys.

    Example:
        >>> sparse_population(100, 0.5).effective_keys
        25.0
    """
    effective = n * sparsity * sparsity
    return MetricRecord(
        n_keys=n,
        sparsity=sparsity,
        effective_keys=effective,
        collision=1 / effective if effective else math.inf,
        **others,
    )


def _bounded_exp(exponent: float) -> float:
    """Exp that does not overflow; NaN for NaN."""
    return math.exp(min(exponent, 700.0)) if not math.isnan(exponent) else math.nan


def _usual_largest(n: float, family: Family) -> float:
    """The score that one key in n exceeds on average; about sqrt(2 log n) for Gaussian scores."""
    if isinstance(family, Gaussian):
        return math.sqrt(2 * math.log(n))
    odds = math.log(n - 1) if n > 1 else -math.inf
    return float(family.quantile(np.array([odds]))[0]) if n > 1 else math.nan


@lru_cache(maxsize=1024)
def _tilted(family: Family, gamma: float) -> tuple[float, float, float]:
    """K(gamma) = log E e^(gamma s) of one score s, K' and K''; NaN beyond float64's quantiles."""
    if isinstance(family, Gaussian):
        return gamma * gamma / 2, gamma, 1.0
    scores, log_weights = _scores(family)
    exponents = gamma * scores + log_weights
    largest = float(exponents.max())
    weights = np.exp(exponents - largest)
    total = float(weights.sum())
    ends = max(weights[:_END].sum(), weights[-_END:].sum()) / total
    if not grid(family).has_mean or ends > _END_SHARE:
        return math.nan, math.nan, math.nan
    mean = float((weights * scores).sum()) / total
    variance = float((weights * (scores - mean) ** 2).sum()) / total
    origin = family.origin()
    return largest + math.log(total) + gamma * origin, origin + mean, variance


@lru_cache(maxsize=64)
def _scores(family: Family) -> tuple[Array, Array]:
    """Scores minus the origin, ascending, and logarithms of their probabilities."""
    cells = grid(family)
    first, last = cells.log_odds[0], cells.log_odds[-1]  # which end short of their cells
    low = first[0] - np.ptp(first) * _MARGIN - np.arange(0.0, _FURTHER, 2.0)[::-1]
    high = last[-1] + np.ptp(last) * _MARGIN + np.arange(0.0, _FURTHER, 2.0)
    sides = []
    for edges in (low, high):
        nodes = (0.5 * (edges[1:] + edges[:-1])[:, None] + NODES).ravel()
        with np.errstate(all="ignore"):
            offsets = family.offset(nodes)
        known = np.isfinite(offsets) & (np.abs(offsets) < _LARGEST)
        log_mass = np.tile(np.log(WEIGHTS), edges.size - 1) + log_expit(nodes) + log_expit(-nodes)
        sides.append((offsets[known], log_mass[known]))
    inside = (cells.scores.ravel(), np.log(cells.weights.ravel()))
    scores, log_weights = zip(sides[0], inside, sides[1], strict=True)
    return np.concatenate(scores), np.concatenate(log_weights)


_NO_SOFTMAX = "Only softmax weights have it."


_MEASURED = "It is measured for these weights; no function predicts it."


_SIGNED = "The weights have both signs, so they are not a distribution."


_NO_LAW = "Mean and covariance of the keys do not determine it."


def _normal_scores(request: _Request) -> _Case:
    """A row whose weights come from normal scores s.

    The weights of ``"relu2"`` are max(s, 0)², with means over rows with weight; those of
    ``"identity"`` are s itself, of which metrics use the absolute value.
    """
    rule = "the deviation of the scores must be finite and greater than 0"
    deviation = request.number("logit_std", 1e-300, rule)
    mean = request.logit_mean()
    n, squared = request.n, request.mechanism == "relu2"
    row, log_n = WeightedRow(n, mean / deviation, squared), math.log(n)
    entropy = cache(row.entropy)
    formulas: Formulas = {
        "entropy": ("mean", entropy),
        "normalized_entropy": ("mean", lambda: entropy() / log_n) if n > 1 else ONE_KEY,
        "information": ("mean", lambda: log_n - entropy()),
        "effective_keys": ("mean", row.effective_keys),
        "sparsity": ("mean", row.sparsity),
        "collision": ("mean", row.collision),
        "top_weight": ("mean", row.top_weight),
        "first_weight": ("mean", 1 / n),
    }
    if not squared:
        formulas |= dict.fromkeys(("entropy", "normalized_entropy", "information"), _SIGNED)
    elif not row.active > _FEWEST:
        reason = f"Practically no row has a positive score: P = {row.active:.1g}."
        formulas = dict.fromkeys(formulas, reason)
    formulas = _without_softmax() | formulas
    formulas |= {
        "max_logit": ("mean", lambda: mean + deviation * float(expected_max_gauss(n))),
        "logit_mean": ("mean", mean),
        "logit_std": ("mean", lambda: gaussian_deviation(n, deviation)),
    }
    parameters = {"logit_mean": mean, "logit_std": deviation}
    sparsity = float((sparsity_relu2 if squared else sparsity_identity)(mean, deviation))
    return formulas, sparse_population(n, sparsity, **parameters), parameters


def _linear(request: _Request) -> _Case:
    """Linear attention, from mean and covariance of the key features."""
    given = request.given
    missing = [name for name in ("q", "mu") if name not in given]
    if missing or ("Sigma" in given) == ("sigma" in given):
        named = ", ".join(missing) or "Sigma, sigma"
        raise ValueError(f'{named}: "{request.mechanism}" needs q, mu and one of Sigma and sigma')
    query = np.asarray(given["q"], np.float64)
    if query.ndim != 1:
        raise ValueError(f"q: the features of one query must have shape (d,), got {query.shape}")
    if "Sigma" in given:
        sparsity = float(sparsity_linear(query, given["mu"], given["Sigma"]))
        mean = float(query @ np.asarray(given["mu"], np.float64))
    else:
        rule = "beside sigma it must be one number, the mean of every key component"
        component = request.number("mu", -math.inf, rule)
        sparsity = float(sparsity_linear_iid(query, component, given["sigma"]))
        mean = float(query.sum()) * component
    n = request.n
    keys = n * sparsity * sparsity
    spread = mean * math.sqrt(max(1 / sparsity**2 - 1, 0.0))
    names = ("entropy", "normalized_entropy", "information", "top_weight", "max_logit")
    formulas = _without_softmax() | {
        **dict.fromkeys(names, _NO_LAW),
        "effective_keys": ("plug-in", keys),
        "sparsity": ("plug-in", sparsity),
        "collision": ("plug-in", 1 / keys),
        "first_weight": ("mean", 1 / n),
        "logit_mean": ("mean", mean),
        "logit_std": ("plug-in", spread * math.sqrt((n - 1) / n)),
    }
    return formulas, sparse_population(n, sparsity, logit_mean=mean), dict(given)


def _without_softmax() -> Formulas:
    """The reason, by name, for each metric that only softmax weights have."""
    names = (
        *("lse", "varentropy", "entropy_slope", "mean_field_entropy", "jensen_gap", "max_gap"),
        *("gaussian_entropy", "first_gap", "rest_logit_std", "rest_jensen_gap"),
    )
    formulas: Formulas = dict.fromkeys(names, _NO_SOFTMAX)
    return {**formulas, "jacobian_trace": _MEASURED, "noise_gain": _MEASURED}


_STEP = 0.3  # of log t: the trapezoid rule is then right to exp(-pi²/0.3) = 5e-15


_BELOW, _ABOVE = 75.0, 160.0  # log t on both sides of where the sums are of order 1


_FEWEST = 1e-9  # expected active keys below which a mean over active rows says nothing


@dataclass(frozen=True)
class WeightedRow:
    """Quadrature for a row of n keys whose weights come from normal scores of deviation 1.

    Attributes:
        n: Number of keys.
        u: Mean of the scores s.
        squared: Whether the weights are max(s, 0)² instead of abs(s).
    """

    n: float
    u: float
    squared: bool

    @property
    def log_idle(self) -> float:
        """Logarithm of the probability that a weight is 0."""
        return float(log_ndtr(-self.u)) if self.squared else -math.inf

    @property
    def active(self) -> float:
        """Probability that a row has any weight."""
        return -math.expm1(self.n * self.log_idle)

    def effective_keys(self) -> float:
        """Mean number of effective keys, E (Σa)²/Σa²."""
        if self.n == 1:
            return 1.0
        t, (mean,), rest = self._of_squares
        pairs = self.n * (self.n - 1) * (t * mean**2 * np.exp((self.n - 2) * rest)).sum()
        return 1 + _STEP * float(pairs) / self.active

    def sparsity(self) -> float:
        """Mean sparsity, E Σa / sqrt(n Σa²)."""
        t, (mean,), rest = self._of_squares
        total = (np.sqrt(t) * mean * np.exp((self.n - 1) * rest)).sum()
        return math.sqrt(self.n / math.pi) * _STEP * float(total) / self.active

    def collision(self) -> float:
        """Mean collision probability, E Σp²."""
        t, (square, _), rest = self._of_weights
        total = (t * t * square * np.exp((self.n - 1) * rest)).sum()
        return self.n * _STEP * float(total) / self.active

    def entropy(self) -> float:
        """Mean entropy, E -Σ p log p, in nats."""
        t, (_, log), rest = self._of_weights
        idle = math.exp(self.n * self.log_idle)
        log_sum = (self.active * np.exp(-t) - (np.exp(self.n * rest) - idle)).sum()
        mean_log = self.n * (t * log * np.exp((self.n - 1) * rest)).sum()
        return max(_STEP * float(log_sum - mean_log) / self.active, 0.0)

    @property
    def _idle(self) -> float:
        """Probability that a weight is 0."""
        return math.exp(self.log_idle)

    @cached_property
    def _weights(self) -> tuple[Array, Array]:
        """Nodes of the positive weights, and their probabilities."""
        scores, mass = _positive_nodes(self.u)
        if self.squared:
            return scores * scores, mass
        below, mass_below = _positive_nodes(-self.u)
        return np.concatenate([scores, below]), np.concatenate([mass, mass_below])

    @cached_property
    def _of_weights(self) -> tuple[Array, Array, Array]:
        """:meth:`_transforms` of a² and a log a with exp(-ta), a the weight."""
        weights, _ = self._weights
        return self._transforms(1.0, [weights**2, weights * np.log(weights)])

    @cached_property
    def _of_squares(self) -> tuple[Array, Array, Array]:
        """:meth:`_transforms` of a with exp(-ta²), a the weight."""
        return self._transforms(2.0, [self._weights[0]])

    def _transforms(self, power: float, factors: list[Array]) -> tuple[Array, Array, Array]:
        """Means over one weight a, at quadrature points t.

        Returns:
            The points t; E factor · exp(-t a^power) for each factor; and log E exp(-t a^power).
        """
        weights, mass = self._weights
        raised = weights**power
        scale = -math.log(self.n * float(raised @ mass) + 1e-300)
        t = np.exp(np.arange(scale - _BELOW, scale + _ABOVE + 4 * math.log(self.n), _STEP))
        exponents = -t[:, None] * raised
        decay = np.exp(exponents)
        *moments, present = (decay @ (np.stack([*factors, np.ones_like(raised)]) * mass).T).T
        missing = -np.expm1(exponents, out=exponents) @ mass
        return t, np.stack(moments), log_probability(self._idle + present, missing)

    def top_weight(self) -> float:
        """Mean of the largest weight over the sum of all, over rows with weight.

        Given the largest weight the others are independent, cut off there.
        """
        if self.n == 1:
            return 1.0
        u = self.u if self.squared else abs(self.u)
        spread = _spread(u)
        fine, wide = np.geomspace(1e-6, 0.5, 20), np.arange(1.0, (max(u, 0) + 13.5) / spread, 0.5)
        edges = spread * np.concatenate([[0.0], fine, wide])

        def nodes(ends: Array) -> tuple[Array, Array]:
            sizes, widths = gauss(ends)
            mirrored = 0.0 if self.squared else normal_density(sizes + u)
            return sizes, widths * (normal_density(sizes - u) + mirrored)

        tops, mass = nodes(edges)
        above = ndtr(u - tops) + (0.0 if self.squared else ndtr(-u - tops))
        chance = self.n * mass * np.exp((self.n - 1) * np.log1p(-np.minimum(above, 1 - 1e-16)))
        live = chance > 1e-18 * self.active

        def maxima() -> Iterator[Maximum]:
            for top, factor, beyond in zip(
                tops[live], self.n * mass[live], above[live], strict=True
            ):
                sizes, weights = nodes(np.append(edges[edges < top], top))
                factors = (sizes / top) ** (2 if self.squared else 1)
                yield Maximum(factor, factors, weights, beyond)

        total = mean_top_weight(self.n, maxima(), _STEP, reach=35.0, zero=self._idle)
        return total / self.active


def _spread(u: float) -> float:
    """How far a normal score of mean u typically is above 0, where 0 is in its tail; else 1."""
    return 1 / max(1.0, -u)


def _positive_nodes(u: float) -> tuple[Array, Array]:
    """Quadrature over the part above 0 of a normal score of mean u and standard deviation 1.

    The weights include the density: they sum to the probability of that part.
    """
    spread = _spread(u)
    top = max(u, 0.0) + 13.0
    edges = np.concatenate(
        [
            spread * np.geomspace(1e-22, 1.0, 100),
            np.arange(0.5, 80.0, 0.5) * spread,
            np.arange(max(u - 13.0, spread), top, 0.5),
            [top],
        ]
    )
    scores, widths = gauss(np.unique(edges[edges <= top]))
    return scores, widths * normal_density(scores - u)


_REASON = "The four numbers of a trained head do not determine it."
_IMPOSSIBLE = (
    "No independent logits with a skewness within ±1.62 have this Jensen gap at this deviation: a "
    "few keys beyond the first dominate."
)


def _trained_head(request: _Request) -> _Case:
    """A head of a trained model, for n >= 3 keys.

    Its parameters are those of :func:`~acutance.theory.expected_head_metrics`.
    """
    n = one_number("n", request.n, 3.0, "a trained head has a first key and at least two others")
    rule = "a deviation or a Jensen gap must be finite and at least 0"
    numbers = {
        "first_gap": request.number("first_gap", -math.inf, "the log-odds must be finite"),
        "first_gap_std": request.number("first_gap_std", 0.0, rule, 0.0),
        "rest_logit_std": request.number("rest_logit_std", 0.0, rule),
        "rest_jensen_gap": request.number("rest_jensen_gap", 0.0, rule),
    }
    head = expected_head_metrics(n, **numbers)
    log_n, entropy = math.log(n), float(head.entropy)
    values: dict[str, tuple[Kind, float]] = {
        "entropy": ("mean", entropy),
        "normalized_entropy": ("mean", entropy / log_n),
        "information": ("mean", log_n - entropy),
        "effective_keys": ("plug-in", float(head.effective_keys)),
        "top_weight": ("plug-in", float(head.top_weight)),
        "first_weight": ("mean", float(head.first_weight)),
        "first_gap": ("mean", numbers["first_gap"]),
        "rest_logit_std": ("mean", numbers["rest_logit_std"]),
        "rest_jensen_gap": ("mean", numbers["rest_jensen_gap"]),
    }
    formulas: Formulas = dict.fromkeys(NAMES, _REASON)
    for name, (kind, value) in values.items():
        formulas[name] = _IMPOSSIBLE if math.isnan(value) else (kind, value)
    return formulas, MetricRecord(), dict(numbers)


_SERIES_TO = 0.3  # of n x, below which Langevin's function is summed as a series


def _decay(request: _Request) -> _Case:
    """Weights that fall by a factor from key to key."""
    lam = request.number("lam", 1e-300, "a decay must be above 0 and at most 1", most=1.0)
    n, theta = request.n, -math.log(lam)
    x, log_n = theta / 2, math.log(n)
    keys = float(effective_keys_decay(lam, n))
    sparsity, collision = float(sparsity_decay(lam, n)), 1 / keys
    mean, spread = _position(n, x)
    variance = theta * theta * spread
    log_sum = _log_sum(theta, n)
    entropy = log_sum + theta * mean
    plain, deviation = -theta * (n - 1) / 2, theta * math.sqrt((n * n - 1) / 12)
    top = math.exp(-log_sum)
    cubes = n if theta == 0 else math.expm1(-3 * n * theta) / math.expm1(-3 * theta)
    noise = collision - 2 * cubes * top**3 + collision**2
    values = {
        "entropy": entropy,
        "information": log_n - entropy,
        "effective_keys": keys,
        "sparsity": sparsity,
        "collision": collision,
        "top_weight": top,
        "first_weight": math.exp(-theta * (n - 1) - log_sum),
        "max_logit": 0.0,
        "lse": log_sum,
        "logit_mean": plain,
        "logit_std": deviation,
        "varentropy": variance,
        "entropy_slope": 0.0 - variance,
        "mean_field_entropy": log_n + plain,
        "jensen_gap": log_sum - log_n - plain,
        "max_gap": theta * mean,
        "gaussian_entropy": float(expected_entropy_gauss(n, deviation)),
        "jacobian_trace": 1 - collision,
        "noise_gain": request.value_variance * noise,
    }
    if n > 1:
        values["normalized_entropy"] = entropy / log_n
    if n >= 2:
        others = _log_sum(theta, n - 1)
        values["first_gap"] = -theta * (n - 1) - others
        values["rest_logit_std"] = theta * math.sqrt(n * (n - 2) / 12)
        values["rest_jensen_gap"] = max(others - math.log(n - 1) + theta * (n - 2) / 2, 0.0)
    names = ("normalized_entropy", "first_gap", "rest_logit_std", "rest_jensen_gap")
    formulas: Formulas = dict.fromkeys(names, ONE_KEY)
    formulas |= {name: ("fixed", value) for name, value in values.items()}
    return formulas, sparse_population(n, sparsity), {"lam": lam}


def _log_sum(theta: float, n: float) -> float:
    """Logarithm of 1 + λ + … + λ^(n-1), λ = e^-θ."""
    return math.log(n if theta == 0 else math.expm1(-n * theta) / math.expm1(-theta))


def _position(n: float, x: float) -> tuple[float, float]:
    """Mean and variance of j = 0 … n − 1 under weights proportional to e^(−θj), with θ = 2x.

    j is the distance of a key from the query; θ = −log λ is the decay per key.
    """
    if n * x > _SERIES_TO:
        mean = _one_over_expm1(2 * x) - n * _one_over_expm1(2 * n * x)
        return mean, (_one_over_sinh2(x) - n * n * _one_over_sinh2(n * x)) / 4
    mean = (n - 1) / 2 - (n * _langevin(n * x) - _langevin(x)) / 2
    return mean, (n * n * _langevin_slope(n * x) - _langevin_slope(x)) / 4


def _one_over_expm1(x: float) -> float:
    """1 / (e^x − 1) without overflow."""
    return math.exp(-x) / -math.expm1(-x)


def _one_over_sinh2(x: float) -> float:
    """1 / sinh²(x) without overflow."""
    return 4 * math.exp(-2 * x) / math.expm1(-2 * x) ** 2


def _langevin(x: float) -> float:
    """L(x) = coth x - 1/x for x <= 0.3."""
    y = x * x
    return x * (1 / 3 - y * (1 / 45 - y * (2 / 945 - y * (1 / 4725 - y * 2 / 93555))))


def _langevin_slope(x: float) -> float:
    """Derivative of L, 1/x² - 1/sinh² x, for x <= 0.3."""
    y = x * x
    return 1 / 3 - y * (1 / 15 - y * (2 / 189 - y * (1 / 675 - y * 2 / 10395)))


#: Every mechanism that :func:`predict` takes: the names of its parameters, and what makes its
#: formulas of them.
PREDICTED_MECHANISMS: dict[str, tuple[tuple[str, ...], Callable[[_Request], _Case]]] = {
    "softmax": (("logit_std", "logit_mean", "scale", "family", "d", "rho", "a"), _softmax),
    "scaled_dot": (("d", "scale", "query_norm"), _dot),
    "dot": (("d", "scale", "query_norm"), _dot),
    "cosine": (("tau", "d"), _cosine),
    "relu2": (("logit_std", "logit_mean"), _normal_scores),
    "identity": (("logit_std", "logit_mean"), _normal_scores),
    "linear": (("q", "mu", "Sigma", "sigma"), _linear),
    "decay": (("lam",), _decay),
    "trained_head": (HEAD_NUMBERS, _trained_head),
}
