r"""What every metric of an attention row should be, for a mechanism and a number of keys.

The prediction has the shape of what is measured, one field for each metric of ``acutance.METRICS``,
so that comparing is a subtraction. Softmax, cosine, relu² and identity rows are exact means at
finite n; formulas for infinitely many keys are in ``Prediction.population``.

Sources: Su Jianlin, kexue.fm/archives/9889, 9593, 9034; Derrida (1981), Phys. Rev. B 24, 2613.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike

from acutance.theory.arguments import one_number
from acutance.theory.prediction.cases import (
    Case,
    cosine_case,
    decay_case,
    dot_case,
    linear_case,
    normal_scores_case,
    softmax_case,
    trained_head_case,
)
from acutance.theory.prediction.record import NAMES, Kind, Prediction, wanted_names
from acutance.theory.prediction.weighted import HEAD_NUMBERS

__all__ = ["PREDICTED_MECHANISMS", "predict"]


@dataclass(frozen=True)
class _Mechanism:
    """Names of a mechanism's parameters, and the function that reads them."""

    takes: tuple[str, ...]
    build: Callable[..., Case]


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


#: Every mechanism that can be predicted, with the parameters it takes.
PREDICTED_MECHANISMS: dict[str, _Mechanism] = {
    "softmax": _Mechanism(
        ("logit_std", "logit_mean", "scale", "family", "d", "rho", "a"), softmax_case
    ),
    "scaled_dot": _Mechanism(("d", "scale", "query_norm"), dot_case),
    "dot": _Mechanism(("d", "scale", "query_norm"), dot_case),
    "cosine": _Mechanism(("tau", "d"), cosine_case),
    "relu2": _Mechanism(("logit_std", "logit_mean"), normal_scores_case),
    "identity": _Mechanism(("logit_std", "logit_mean"), normal_scores_case),
    "linear": _Mechanism(("q", "mu", "Sigma", "sigma"), linear_case),
    "decay": _Mechanism(("lam",), decay_case),
    "trained_head": _Mechanism(HEAD_NUMBERS, trained_head_case),
}
