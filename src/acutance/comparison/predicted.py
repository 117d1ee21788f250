"""Predictions for the rows of a comparison, from their queries alone if possible.

For Gaussian keys and a dot-product score, a row's scores are normal with mean β and deviation γ
that follow from its query. For other scores, and for queries and keys of a model, β and γ are
measured, and the prediction is marked ``plug-in``. Linear attention is predicted from the mean and
covariance of its key features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from torch import Tensor

from acutance import scaling, theory
from acutance.comparison.measured import Rows as MeasuredRows
from acutance.comparison.record import Gaussian, Inputs
from acutance.mechanisms import Mechanism
from acutance.mechanisms.entry import Call, Decay, FeatureMap, Linear, Recurrence, Rows, Sizes
from acutance.rowstats import WeightStatistics
from acutance.scores import Cosine, Dot, GeneralScore, ScaledDot, get

Array = NDArray[np.float64]

_PREDICTED = ("entropy", "sparsity", "effective_keys", "noise_gain", "jacobian_trace")
#: Scores that are normal, given the query, if the keys are.
_NORMAL = (ScaledDot, Dot, GeneralScore)
#: Points at which theory is computed: so many, and more per doubling of what varies over rows.
_POINTS, _PER_DOUBLING, _MOST_POINTS = 4, 3, 25
_NO_GRADIENT = "There is no theory for it."
_ONLY_SOFTMAX = "Theory covers softmax weights only."


@dataclass(frozen=True)
class Predicted:
    """Predictions for every row of one mechanism.

    Attributes:
        values: each predicted quantity, (heads, rows) float64.
        kinds: for each, the kind of prediction.
        why: for each quantity without a prediction, the reason.
        parameters: parameters of the prediction, means over rows.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)


def predict_rows(mechanism: Mechanism, inputs: Inputs, measured: MeasuredRows) -> Predicted:
    """Predict every compared quantity for every row.

    Args:
        mechanism: an entry of the table.
        inputs: the queries, keys and values.
        measured: the measured rows, for scores without a known distribution.
    """
    law, form = mechanism.theory.law, mechanism.form
    if law is None:
        return Predicted(why=dict.fromkeys((*_PREDICTED, "query_gradient"), mechanism.theory.how))
    n = float(measured.statistics.n_keys.double().mean())
    if isinstance(form, Decay | Recurrence):
        predicted = _decays(form, inputs, n)
    elif law == "linear":
        assert isinstance(form, Linear | Rows)
        predicted = _linear(form, inputs, n)
    else:
        predicted = _scored(mechanism, inputs, measured, n)
    predicted.why["query_gradient"] = _NO_GRADIENT
    if isinstance(measured.statistics, WeightStatistics):  # theory knows these by size alone
        for name in ("noise_gain", "jacobian_trace"):
            predicted.values.pop(name, None)
            predicted.why[name] = _ONLY_SOFTMAX
        if "entropy" not in measured.values and predicted.values.pop("entropy", None) is not None:
            predicted.why["entropy"] = measured.why["entropy"]
    return predicted


def _scored(mechanism: Mechanism, inputs: Inputs, measured: MeasuredRows, n: float) -> Predicted:
    """Predictions for mechanisms that compute weights from scores."""
    law = str(mechanism.theory.law)
    distribution, form = inputs.law, mechanism.form
    variance = inputs.value_variance
    if isinstance(form, Rows) and distribution is not None:
        tensors = inputs.query, inputs.key, inputs.value
        options = form.options_for(Call(*tensors, inputs.is_causal, inputs.offset, False))
        score = get(options.get("score", "scaled_dot"))
        if isinstance(score, Cosine) and distribution.key_mean == 0:
            parameters = {"tau": score.temperature, "d": float(inputs.key.shape[3])}
            row = _predict(law, n, variance, **parameters)
            one = torch.ones_like(inputs.query[..., 0], dtype=torch.float64).flatten(0, 1)
            values = {name: float(row[name]) * one for name in _PREDICTED if name in row.kinds}
            return Predicted(
                values, {name: row.kinds[name] for name in values}, _why([row]), parameters
            )
        if isinstance(score, _NORMAL):
            query, _, scale = score.transform(inputs.query, inputs.key)
            factor = scaling.get(options.get("scaling")).factor(torch.tensor([round(n)]))
            scale *= float(factor.flatten()[0])
            return _normal(law, n, *_of_query(query, scale, distribution), variance)
    if isinstance(form, Linear) and distribution is not None:  # the identity: scores q·k
        return _normal(law, n, *_of_query(inputs.query, 1.0, distribution), variance)
    stats = measured.statistics
    if isinstance(form, Linear):
        mean, std = _sampled_scores(inputs)
    else:
        mean, std = (stats[name].double().flatten(0, 1) for name in ("logit_mean", "logit_std"))
    return _normal("softmax" if law == "cosine" else law, n, mean, std, variance, plug_in=True)


def _of_query(query: Tensor, scale: float, law: Gaussian) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the scores of each row, (heads, rows)."""
    q = query.detach().double().flatten(0, 1)
    return scale * law.key_mean * q.sum(-1), abs(scale * law.key_std) * q.norm(dim=-1)


def _sampled_scores(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Mean and deviation of q·k over the keys, (heads, rows)."""
    group = inputs.query.shape[1] // inputs.key.shape[1]
    key = inputs.key.double().repeat_interleave(group, 1)
    scores = (inputs.query.double() @ key.mT).flatten(0, 1)
    return scores.mean(-1), scores.std(-1, correction=0)


def _normal(
    law: str, n: float, mean: Tensor, std: Tensor, variance: float, *, plug_in: bool = False
) -> Predicted:
    """Predict rows of Gaussian scores with given means and deviations, (heads, rows).

    Computed exactly at a few deviations, and by a spline between them.
    """
    ratio = law != "softmax"  # of weights that have no scale only β/γ matters
    std = std.clamp(min=1e-12)
    where = (mean / std if ratio else std.log()).numpy()
    parameters = {"logit_mean": float(mean.mean()), "logit_std": float(std.mean())}
    low, high = float(where.min()), float(where.max())
    doublings = (high - low) / math.log(2.0)
    count = min(_MOST_POINTS, math.ceil(_POINTS + _PER_DOUBLING * max(0.0, doublings - 1)))
    if high - low < 1e-9 * (1 + abs(low)):
        count = 1
    angles = np.pi * (np.arange(count) + 0.5) / count
    points = (low + high) / 2 - (high - low) / 2 * np.cos(angles) / np.cos(angles[0])
    if ratio:
        at = [{"logit_mean": round(float(point), 12), "logit_std": 1.0} for point in points]
    else:
        at = [{"logit_std": round(math.exp(point), 12)} for point in points]
    rows = [_predict(law, n, variance, **arguments) for arguments in at]
    kinds, why = rows[0].kinds, _why(rows)
    values = {}
    for name in _PREDICTED:
        if name in kinds and name not in why:
            heights = np.array([float(row[name]) for row in rows])
            flat = heights[0] * np.ones_like(where)
            values[name] = torch.from_numpy(flat if count == 1 else _curve(points, heights, where))
    return Predicted(
        values, {name: "plug-in" if plug_in else kinds[name] for name in values}, why, parameters
    )


def _curve(points: Array, heights: Array, where: Array) -> Array:
    """A cubic spline through the points, in logarithms if all values are positive."""
    if (heights > 0).all():
        return np.asarray(np.exp(CubicSpline(points, np.log(heights))(where)), np.float64)
    return np.asarray(CubicSpline(points, heights)(where), np.float64)


@lru_cache(maxsize=4096)
def _predict(
    law: str,
    n: float,
    variance: float,
    *,
    metrics: tuple[str, ...] = _PREDICTED,
    **parameters: float,
) -> theory.Prediction:
    """One prediction of :mod:`acutance.theory`."""
    return theory.predict(law, n, value_variance=variance, metrics=metrics, **parameters)


def _why(rows: list[theory.Prediction]) -> dict[str, str]:
    """The reason for each quantity that one of these rows does not have."""
    return {name: row.why[name] for row in rows for name in _PREDICTED if name in row.why}


def _decays(form: Decay | Recurrence, inputs: Inputs, n: float) -> Predicted:
    """Predict rows of geometric decay, with one factor for each head or state."""
    if isinstance(form, Recurrence):
        factors = form.decays(inputs.value)
    else:
        factors = form.decays(inputs.query.shape[1]).repeat(inputs.query.shape[0])
    lam = np.asarray(factors.double().clamp(max=1.0))
    counts = np.arange(inputs.offset, inputs.n, dtype=np.float64) + 1
    rows = [_predict("decay", n, 1.0, metrics=("entropy",), lam=float(value)) for value in lam]
    arrays = {
        "sparsity": theory.sparsity_decay(lam[:, None], counts),
        "effective_keys": theory.effective_keys_decay(lam[:, None], counts),
        "entropy": np.array([float(row.entropy) for row in rows])[:, None] * np.ones_like(counts),
    }
    values = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
    why = dict.fromkeys(("noise_gain", "jacobian_trace"), _ONLY_SOFTMAX)
    return Predicted(values, dict.fromkeys(values, "fixed"), why, {"lam": float(lam.mean())})


def _linear(form: Linear | Rows, inputs: Inputs, n: float) -> Predicted:
    """Predict linear attention from the mean and covariance of key features."""
    q, mean, covariance, exact = feature_moments(form, inputs)
    sparsity = torch.full(q.shape[:2], math.nan, dtype=torch.float64)
    for head, rows in enumerate(q):
        has_weight = rows @ mean[head] > 0  # a query without features gives no key any weight
        if bool(has_weight.any()):
            exact_values = theory.sparsity_linear(
                rows[has_weight].numpy(), mean[head].numpy(), covariance[head].numpy()
            )
            sparsity[head, has_weight] = torch.from_numpy(np.asarray(exact_values, np.float64))
    values = {"sparsity": sparsity, "effective_keys": n * sparsity.square()}
    why = dict.fromkeys(("noise_gain", "jacobian_trace"), _ONLY_SOFTMAX)
    why["entropy"] = "Not determined by the mean and covariance of key features."
    kind = "fixed" if exact else "plug-in"
    return Predicted(values, dict.fromkeys(values, kind), why)


#: Feature maps that take each component by itself.
_COMPONENTWISE = ("elu1", "relu", "relu2", "exp")
_DRAWS = 1 << 15
_GRID = 20_001


def feature_moments(form: Linear | Rows, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Query features, and mean and covariance of key features, for each head.

    For Gaussian keys the moments are those of the distribution: by quadrature for componentwise
    maps, from further random keys for others. For features that depend on positions, and for keys
    of a model, they are moments of the keys themselves; predicted sparsity is then an identity.

    Returns:
        (heads, rows, F), (heads, F), (heads, F, F), float64; and whether the moments are those of
        the keys themselves.
    """
    heads, group = inputs.query.shape[1], inputs.query.shape[1] // inputs.key.shape[1]
    sizes = Sizes(heads, inputs.key.shape[1], inputs.n, inputs.key.shape[3])
    if isinstance(form, Rows):
        score = form.options(sizes)["score"]
        query_map, key_map, name = score.query_map, score.key_map, ""
    else:
        query_map, key_map = form.maps(inputs.n, inputs.offset)
        name = form.feature_map
    q = query_map(inputs.query.double()).flatten(0, 1)
    if inputs.law is not None and name != "cosformer":
        mean, covariance = _of_law(key_map, name, inputs.law, inputs.key.shape[3])
        count = q.shape[0]
        return q, mean.expand(count, -1), covariance.expand(count, -1, -1), False
    key = inputs.key.double().repeat_interleave(group, 1).flatten(0, 1)
    mean, covariance = _key_moments(key_map(key))
    return q, mean, covariance, True


def _of_law(key_map: FeatureMap, name: str, law: Gaussian, width: int) -> tuple[Tensor, Tensor]:
    """Mean (width,) and covariance (width, width) of the features of Gaussian keys."""
    if name in _COMPONENTWISE:
        z = torch.linspace(-12, 12, _GRID, dtype=torch.float64)
        mass = torch.exp(-z.square() / 2) * ((z[1] - z[0]) / math.sqrt(2 * math.pi))
        x = key_map((law.key_mean + law.key_std * z)[:, None, None])[:, 0, 0]
        mean = (mass * x).sum()
        variance = (mass * (x - mean).square()).sum()
        return mean.expand(width), variance * torch.eye(width, dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(_DRAWS, width, generator=draw, dtype=torch.float64)
    return _key_moments(key_map(law.key_mean + law.key_std * z))


def _key_moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance (divided by the number of keys) of features (..., keys, F)."""
    mean = features.mean(-2)
    away = features - mean.unsqueeze(-2)
    return mean, away.mT @ away / features.shape[-2]
