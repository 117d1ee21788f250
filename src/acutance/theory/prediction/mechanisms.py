r"""What every metric of an attention row should be, for a mechanism and a number of keys.

The prediction has the shape of what is measured, one field for each metric of ``acutance.METRICS``,
so that comparing is a subtraction. Softmax, cosine, relu² and identity rows are exact means at
finite n; formulas for infinitely many keys are in ``Prediction.population``.

Sources: Su Jianlin, kexue.fm/archives/9889, 9593, 9034; Derrida (1981), Phys. Rev. B 24, 2613.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from acutance.theory.arguments import needed_number, one_number
from acutance.theory.families import Family, Gaussian, as_family
from acutance.theory.linear_and_decay import sparsity_decay, sparsity_linear, sparsity_linear_iid
from acutance.theory.prediction.decay import decay_formulas
from acutance.theory.prediction.record import NAMES, Kind, MetricRecord, Prediction, wanted_names
from acutance.theory.prediction.softmax import (
    Formulas,
    score_moments,
    softmax_formulas,
    softmax_population,
    sparse_population,
)
from acutance.theory.prediction.weighted import (
    HEAD_NUMBERS,
    head_formulas,
    linear_formulas,
    relu2_formulas,
    size_formulas,
)
from acutance.theory.sparsity import sparsity_identity, sparsity_relu2

__all__ = ["PREDICTED_MECHANISMS", "predict"]


class _Case(NamedTuple):
    """Formulas of one prediction, their limits for many keys, and the parameters."""

    formulas: Formulas
    population: MetricRecord
    parameters: dict[str, Any]


@dataclass(frozen=True)
class _Mechanism:
    """Names of a mechanism's parameters, and the function that reads them."""

    takes: tuple[str, ...]
    build: Callable[..., _Case]


def predict(
    mechanism: str,
    n: float,
    *,
    logit_std: float | None = None,
    logit_mean: float | None = None,
    scale: float | None = None,
    family: Any = None,
    d: float | None = None,
    rho: float | None = None,
    a: float | None = None,
    query_norm: float | None = None,
    tau: float | None = None,
    lam: float | None = None,
    q: ArrayLike | None = None,
    mu: ArrayLike | None = None,
    Sigma: ArrayLike | None = None,
    sigma: float | None = None,
    first_gap: float | None = None,
    first_gap_std: float | None = None,
    rest_logit_std: float | None = None,
    rest_jensen_gap: float | None = None,
    value_variance: float = 1.0,
    metrics: Iterable[str] | None = None,
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
        logit_std: Standard deviation of the logits.
        logit_mean: Their mean; 0 if left out, or what the family and scale make it.
        scale: Factor of the scores.
        family: Distribution of a score; see :func:`~acutance.theory.expected_entropy`.
        d: Dimension of queries and keys.
        rho: Exponent of the family ``"stretched"``.
        a: Tail index of the family ``"pareto"``.
        query_norm: Length of the query.
        tau: Temperature.
        lam: Decay per key, 0 < lam <= 1.
        q: Query features, shape (d,).
        mu: Mean of the key features, shape (d,), or of each component beside ``sigma``.
        Sigma: Covariance of the key features, shape (d, d).
        sigma: Standard deviation of independent, alike key components.
        first_gap: Mean log-odds of the first key's weight against all others.
        first_gap_std: Standard deviation of it over rows; 0 if left out.
        rest_logit_std: Standard deviation of the other keys' logits.
        rest_jensen_gap: Mean of their logsumexp − log(n − 1) − mean.
        value_variance: Variance of a value, summed over its components, for ``noise_gain``;
            values are assumed independent of each other and of the weights.
        metrics: Names of the metrics to compute; all if left out.

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
    arguments = {
        "logit_std": logit_std, "logit_mean": logit_mean, "scale": scale, "family": family, "d": d,
        "rho": rho, "a": a, "query_norm": query_norm, "tau": tau, "lam": lam, "q": q, "mu": mu,
        "Sigma": Sigma, "sigma": sigma, "first_gap": first_gap, "first_gap_std": first_gap_std,
        "rest_logit_std": rest_logit_std, "rest_jensen_gap": rest_jensen_gap,
    }  # fmt: skip
    if mechanism not in PREDICTED_MECHANISMS:
        known = ", ".join(f'"{name}"' for name in PREDICTED_MECHANISMS)
        raise ValueError(f"mechanism: must be one of {known}, got {mechanism!r}")
    entry = PREDICTED_MECHANISMS[mechanism]
    keys = one_number("n", n, 1.0, "the number of keys must be finite and at least 1")
    variance = one_number(
        "value_variance", value_variance, 0.0, "a variance must be finite and at least 0"
    )
    for name, value in arguments.items():
        if value is not None and name not in entry.takes:
            raise ValueError(
                f'{name}: "{mechanism}" takes {", ".join(entry.takes)}, got {name}={value!r}'
            )
    requested = wanted_names(metrics)
    chosen = {name: value for name, value in arguments.items() if value is not None}
    case = entry.build(mechanism, keys, variance, **chosen)
    values: dict[str, float] = {}
    kinds: dict[str, Kind] = {}
    why: dict[str, str] = {}
    for name in NAMES:
        formula = case.formulas[name]
        if isinstance(formula, str):
            why[name] = formula
        elif name not in requested:
            why[name] = "It was not requested."
        else:
            kinds[name], compute = formula
            values[name] = float(compute())
    return Prediction(
        **values,
        mechanism=mechanism,
        parameters={"n": keys, **case.parameters, "value_variance": variance},
        kinds=kinds,
        why=why,
        population=case.population,
    )


def _softmax(
    mechanism: str,
    n: float,
    value_variance: float,
    *,
    logit_std: float | None = None,
    logit_mean: float | None = None,
    scale: float | None = None,
    family: Any = "gaussian",
    d: float | None = None,
    rho: float | None = None,
    a: float | None = None,
) -> _Case:
    """The case ``"softmax"`` of :func:`predict`: softmax of independent logits."""
    law = as_family(family, d=d, rho=rho, a=a)
    mean, variance = score_moments(law)
    if (logit_std is None) == (scale is None):
        raise ValueError(
            f'logit_std, scale: "{mechanism}" needs exactly one of the two, got '
            f"logit_std={logit_std!r} and scale={scale!r}"
        )
    if logit_std is not None:
        rule = "the deviation of the logits must be finite and at least 0"
        deviation = one_number("logit_std", logit_std, 0.0, rule)
        if math.isnan(variance):
            raise ValueError(
                f"logit_std: the variance of the scores' distribution {law} is infinite, or "
                "dominated by scores beyond float64; give scale"
            )
        gamma = deviation / math.sqrt(variance)
    else:
        gamma = one_number(
            "scale", scale, 0.0, "the scale of the logits must be finite and at least 0"
        )
    shift = 0.0
    if logit_mean is not None:
        if math.isnan(mean):
            raise ValueError(
                f"logit_mean: the mean of the scores' distribution {law} is infinite, or dominated "
                "by scores beyond float64; omit logit_mean"
            )
        shift = _mean(logit_mean) - gamma * mean
    arguments = {"d": d, "rho": rho, "a": a, "logit_mean": logit_mean}
    parameters = {"family": family, "logit_std" if isinstance(law, Gaussian) else "scale": gamma}
    parameters |= {name: value for name, value in arguments.items() if value is not None}
    return _row(n, gamma, law, shift, value_variance, parameters)


def _dot(
    mechanism: str,
    n: float,
    value_variance: float,
    *,
    d: float | None = None,
    scale: float | None = None,
    query_norm: float | None = None,
) -> _Case:
    """The cases ``"dot"`` and ``"scaled_dot"`` of :func:`predict`: Gaussian keys."""
    dimension = needed_number(mechanism, "d", d, 1.0, "the dimension must be finite and at least 1")
    usual = 1.0 if mechanism == "dot" else dimension**-0.5
    factor = one_number(
        "scale", usual if scale is None else scale, 0.0, "a scale must be at least 0"
    )
    norm = math.sqrt(dimension) if query_norm is None else query_norm
    norm = one_number("query_norm", norm, 0.0, "a length must be finite and at least 0")
    parameters = {"d": dimension, "scale": factor, "query_norm": norm}
    return _row(n, factor * norm, as_family("gaussian"), 0.0, value_variance, parameters)


def _cosine(
    mechanism: str,
    n: float,
    value_variance: float,
    *,
    tau: float | None = None,
    d: float | None = None,
) -> _Case:
    """The case ``"cosine"`` of :func:`predict`: a softmax of cosines."""
    dimension = needed_number(mechanism, "d", d, 2.0, "the dimension must be finite and at least 2")
    rule = "the temperature must be finite and greater than 0"
    temperature = needed_number(mechanism, "tau", tau, 1e-300, rule)
    law = as_family("cosine", d=dimension)
    parameters = {"tau": temperature, "d": dimension}
    return _row(n, 1 / temperature, law, 0.0, value_variance, parameters)


def _row(
    n: float,
    gamma: float,
    law: Family,
    shift: float,
    value_variance: float,
    parameters: dict[str, Any],
) -> _Case:
    """Formulas of a softmax row with logits shift + gamma s, s drawn from ``law``."""
    return _Case(
        softmax_formulas(n, gamma, law, shift, value_variance),
        softmax_population(n, gamma, law, shift, value_variance),
        parameters,
    )


def _normal_scores(
    mechanism: str,
    n: float,
    value_variance: float,
    *,
    logit_std: float | None = None,
    logit_mean: float | None = None,
) -> _Case:
    """The cases ``"relu2"`` and ``"identity"`` of :func:`predict`: weights of normal scores."""
    rule = "the deviation of the scores must be finite and greater than 0"
    deviation = needed_number(mechanism, "logit_std", logit_std, 1e-300, rule)
    mean = _mean(0.0 if logit_mean is None else logit_mean)
    if mechanism == "relu2":
        formulas, population = relu2_formulas, sparsity_relu2
    else:
        formulas, population = size_formulas, sparsity_identity
    return _Case(
        formulas(n, mean, deviation),
        sparse_population(
            n, float(population(mean, deviation)), logit_mean=mean, logit_std=deviation
        ),
        {"logit_mean": mean, "logit_std": deviation},
    )


def _linear(
    mechanism: str,
    n: float,
    value_variance: float,
    *,
    q: ArrayLike | None = None,
    mu: ArrayLike | None = None,
    Sigma: ArrayLike | None = None,
    sigma: float | None = None,
) -> _Case:
    """The case ``"linear"`` of :func:`predict`, from mean and covariance of the key features."""
    if q is None or mu is None or (Sigma is None) == (sigma is None):
        missing = [name for name, value in (("q", q), ("mu", mu)) if value is None]
        named = ", ".join(missing) or "Sigma, sigma"
        raise ValueError(f'{named}: "{mechanism}" needs q, mu and one of Sigma and sigma')
    query = np.asarray(q, np.float64)
    if query.ndim != 1:
        raise ValueError(f"q: the features of one query must have shape (d,), got {query.shape}")
    if sigma is None:
        assert Sigma is not None
        value = float(sparsity_linear(query, mu, Sigma))
        mean = float(query @ np.asarray(mu, np.float64))
    else:
        rule = "beside sigma it must be one number, the mean of every key component"
        component = one_number("mu", mu, -math.inf, rule)
        value = float(sparsity_linear_iid(query, component, sigma))
        mean = float(query.sum()) * component
    arguments = {"q": q, "mu": mu, "Sigma": Sigma, "sigma": sigma}
    parameters = {name: part for name, part in arguments.items() if part is not None}
    population = sparse_population(n, value, logit_mean=mean)
    return _Case(linear_formulas(n, mean, value), population, parameters)


def _decay(mechanism: str, n: float, value_variance: float, *, lam: float | None = None) -> _Case:
    rule = "a decay must be above 0 and at most 1"
    factor = needed_number(mechanism, "lam", lam, 1e-300, rule, 1.0)
    return _Case(
        decay_formulas(n, factor, value_variance),
        sparse_population(n, float(sparsity_decay(factor, n))),
        {"lam": factor},
    )


def _trained_head(
    mechanism: str, n: float, value_variance: float, **numbers: float | None
) -> _Case:
    """The case ``"trained_head"`` of :func:`predict`, for n ≥ 3 keys.

    ``numbers`` are ``first_gap``, ``first_gap_std`` (0 if not given), ``rest_logit_std`` and
    ``rest_jensen_gap``, as in :func:`~acutance.theory.expected_head_metrics`.
    """
    keys = one_number("n", n, 3.0, "a trained head has a first key and at least two others")
    numbers.setdefault("first_gap_std", 0.0)
    rule = "a deviation or a Jensen gap must be finite and at least 0"
    given = {
        name: needed_number(mechanism, name, numbers.get(name), *(
            (-math.inf, "the log-odds must be finite") if name == "first_gap" else (0.0, rule)
        ))
        for name in HEAD_NUMBERS
    }  # fmt: skip
    return _Case(head_formulas(keys, given), MetricRecord(), {**given})


#: Every mechanism that can be predicted, with the parameters it takes.
PREDICTED_MECHANISMS: dict[str, _Mechanism] = {
    "softmax": _Mechanism(
        ("logit_std", "logit_mean", "scale", "family", "d", "rho", "a"), _softmax
    ),
    "scaled_dot": _Mechanism(("d", "scale", "query_norm"), _dot),
    "dot": _Mechanism(("d", "scale", "query_norm"), _dot),
    "cosine": _Mechanism(("tau", "d"), _cosine),
    "relu2": _Mechanism(("logit_std", "logit_mean"), _normal_scores),
    "identity": _Mechanism(("logit_std", "logit_mean"), _normal_scores),
    "linear": _Mechanism(("q", "mu", "Sigma", "sigma"), _linear),
    "decay": _Mechanism(("lam",), _decay),
    "trained_head": _Mechanism(HEAD_NUMBERS, _trained_head),
}


def _mean(value: Any) -> float:
    return one_number("logit_mean", value, -math.inf, "the mean of the logits must be finite")
