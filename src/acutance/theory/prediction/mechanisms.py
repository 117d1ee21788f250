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

from acutance.theory.arguments import one_number
from acutance.theory.families import Family, Gaussian, as_family
from acutance.theory.prediction.record import NAMES, Kind, MetricRecord, Prediction, wanted_names
from acutance.theory.prediction.softmax import (
    Formulas,
    score_moments,
    softmax_formulas,
    softmax_population,
    sparse_population,
)
from acutance.theory.prediction.weighted import (
    decay_formulas,
    head_formulas,
    linear_formulas,
    normal_formulas,
)
from acutance.theory.sparsity import (
    sparsity_decay,
    sparsity_identity,
    sparsity_linear,
    sparsity_linear_iid,
    sparsity_relu2,
)
from acutance.theory.trained_heads import HEAD_NUMBERS

__all__ = ["PREDICTED_MECHANISMS", "predict"]


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


class _Case(NamedTuple):
    """Formulas of one prediction, their limits for many keys, and the parameters."""

    formulas: Formulas
    population: MetricRecord
    parameters: dict[str, Any]


@dataclass(frozen=True)
class _Mechanism:
    """How one mechanism is predicted.

    Attributes:
        takes: Its parameters.
        build: Makes its case from a request.
    """

    takes: tuple[str, ...]
    build: Callable[[_Request], _Case]


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
    given = {name: value for name, value in parameters.items() if value is not None}
    if mechanism not in PREDICTED_MECHANISMS:
        known = ", ".join(f'"{name}"' for name in PREDICTED_MECHANISMS)
        raise ValueError(f"mechanism: must be one of {known}, got {mechanism!r}")
    entry = PREDICTED_MECHANISMS[mechanism]
    keys = one_number("n", n, 1.0, "the number of keys must be finite and at least 1")
    variance = one_number(
        "value_variance", value_variance, 0.0, "a variance must be finite and at least 0"
    )
    for name, value in given.items():
        if name not in entry.takes:
            raise ValueError(
                f'{name}: "{mechanism}" takes {", ".join(entry.takes)}, got {name}={value!r}'
            )
    requested = wanted_names(metrics)
    case = entry.build(_Request(mechanism, keys, variance, given))
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
            kinds[name], number = formula
            values[name] = float(number() if callable(number) else number)
    return Prediction(
        **values,
        mechanism=mechanism,
        parameters={"n": keys, **case.parameters, "value_variance": variance},
        kinds=kinds,
        why=why,
        population=case.population,
    )


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
    request: _Request, gamma: float, law: Family, parameters: dict[str, Any], shift: float = 0.0
) -> _Case:
    """A softmax row with logits shift + gamma s, s drawn from ``law``."""
    row = request.n, gamma, law, shift, request.value_variance
    return _Case(softmax_formulas(*row), softmax_population(*row), parameters)


def _normal_scores(request: _Request) -> _Case:
    """Weights relu² and identity of normal scores."""
    rule = "the deviation of the scores must be finite and greater than 0"
    deviation = request.number("logit_std", 1e-300, rule)
    mean = request.logit_mean()
    squared = request.mechanism == "relu2"
    parameters = {"logit_mean": mean, "logit_std": deviation}
    sparsity = float((sparsity_relu2 if squared else sparsity_identity)(mean, deviation))
    return _Case(
        normal_formulas(request.n, mean, deviation, squared=squared),
        sparse_population(request.n, sparsity, **parameters),
        parameters,
    )


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
    population = sparse_population(request.n, sparsity, logit_mean=mean)
    return _Case(linear_formulas(request.n, mean, sparsity), population, dict(given))


def _decay(request: _Request) -> _Case:
    """Weights that fall by a factor from key to key."""
    lam = request.number("lam", 1e-300, "a decay must be above 0 and at most 1", most=1.0)
    return _Case(
        decay_formulas(request.n, lam, request.value_variance),
        sparse_population(request.n, float(sparsity_decay(lam, request.n))),
        {"lam": lam},
    )


def _trained_head(request: _Request) -> _Case:
    """A head of a trained model, for n >= 3 keys.

    Its parameters are those of :func:`~acutance.theory.expected_head_metrics`.
    """
    keys = one_number("n", request.n, 3.0, "a trained head has a first key and at least two others")
    rule = "a deviation or a Jensen gap must be finite and at least 0"
    numbers = {
        "first_gap": request.number("first_gap", -math.inf, "the log-odds must be finite"),
        "first_gap_std": request.number("first_gap_std", 0.0, rule, 0.0),
        "rest_logit_std": request.number("rest_logit_std", 0.0, rule),
        "rest_jensen_gap": request.number("rest_jensen_gap", 0.0, rule),
    }
    return _Case(head_formulas(keys, numbers), MetricRecord(), dict(numbers))


#: Every mechanism that :func:`predict` takes.
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
