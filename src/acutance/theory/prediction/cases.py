"""The formulas of each mechanism that can be predicted, from its parameters."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from acutance.theory.arguments import needed_number, one_number
from acutance.theory.families import Family, Gaussian, as_family
from acutance.theory.linear_and_decay import sparsity_decay, sparsity_linear, sparsity_linear_iid
from acutance.theory.prediction.decay import decay_formulas
from acutance.theory.prediction.record import MetricRecord
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

__all__ = [
    "Case",
    "cosine_case",
    "decay_case",
    "dot_case",
    "linear_case",
    "normal_scores_case",
    "softmax_case",
    "trained_head_case",
]


class Case(NamedTuple):
    """Formulas of one prediction, their limits for many keys, and the parameters."""

    formulas: Formulas
    population: MetricRecord
    parameters: dict[str, Any]


def softmax_case(
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
) -> Case:
    """The case ``"softmax"``: softmax of independent logits."""
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


def dot_case(
    mechanism: str,
    n: float,
    value_variance: float,
    *,
    d: float | None = None,
    scale: float | None = None,
    query_norm: float | None = None,
) -> Case:
    """The cases ``"dot"`` and ``"scaled_dot"``: Gaussian keys."""
    dimension = needed_number(mechanism, "d", d, 1.0, "the dimension must be finite and at least 1")
    usual = 1.0 if mechanism == "dot" else dimension**-0.5
    factor = one_number(
        "scale", usual if scale is None else scale, 0.0, "a scale must be at least 0"
    )
    norm = math.sqrt(dimension) if query_norm is None else query_norm
    norm = one_number("query_norm", norm, 0.0, "a length must be finite and at least 0")
    parameters = {"d": dimension, "scale": factor, "query_norm": norm}
    return _row(n, factor * norm, as_family("gaussian"), 0.0, value_variance, parameters)


def cosine_case(
    mechanism: str,
    n: float,
    value_variance: float,
    *,
    tau: float | None = None,
    d: float | None = None,
) -> Case:
    """The case ``"cosine"``: a softmax of cosines."""
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
) -> Case:
    """Formulas of a softmax row with logits shift + gamma s, s drawn from ``law``."""
    return Case(
        softmax_formulas(n, gamma, law, shift, value_variance),
        softmax_population(n, gamma, law, shift, value_variance),
        parameters,
    )


def normal_scores_case(
    mechanism: str,
    n: float,
    value_variance: float,
    *,
    logit_std: float | None = None,
    logit_mean: float | None = None,
) -> Case:
    """The cases ``"relu2"`` and ``"identity"``: weights of normal scores."""
    rule = "the deviation of the scores must be finite and greater than 0"
    deviation = needed_number(mechanism, "logit_std", logit_std, 1e-300, rule)
    mean = _mean(0.0 if logit_mean is None else logit_mean)
    if mechanism == "relu2":
        formulas, population = relu2_formulas, sparsity_relu2
    else:
        formulas, population = size_formulas, sparsity_identity
    return Case(
        formulas(n, mean, deviation),
        sparse_population(
            n, float(population(mean, deviation)), logit_mean=mean, logit_std=deviation
        ),
        {"logit_mean": mean, "logit_std": deviation},
    )


def linear_case(
    mechanism: str,
    n: float,
    value_variance: float,
    *,
    q: ArrayLike | None = None,
    mu: ArrayLike | None = None,
    Sigma: ArrayLike | None = None,
    sigma: float | None = None,
) -> Case:
    """The case ``"linear"``, from mean and covariance of the key features."""
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
    return Case(linear_formulas(n, mean, value), population, parameters)


def decay_case(
    mechanism: str, n: float, value_variance: float, *, lam: float | None = None
) -> Case:
    """The case ``"decay"``: weights that fall by a factor from key to key."""
    rule = "a decay must be above 0 and at most 1"
    factor = needed_number(mechanism, "lam", lam, 1e-300, rule, 1.0)
    return Case(
        decay_formulas(n, factor, value_variance),
        sparse_population(n, float(sparsity_decay(factor, n))),
        {"lam": factor},
    )


def trained_head_case(
    mechanism: str, n: float, value_variance: float, **numbers: float | None
) -> Case:
    """The case ``"trained_head"``, for n ≥ 3 keys.

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
    return Case(head_formulas(keys, given), MetricRecord(), {**given})


def _mean(value: Any) -> float:
    return one_number("logit_mean", value, -math.inf, "the mean of the logits must be finite")
