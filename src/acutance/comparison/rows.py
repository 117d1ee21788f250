"""The rows of a mechanism, measured, and predicted from their queries alone if possible.

For Gaussian keys and a dot-product score, a row's scores are normal with mean β and deviation γ
that follow from its query. For other scores, and for queries and keys of a model, β and γ are
measured, and the prediction is marked ``plug-in``. Linear attention is predicted from the mean and
covariance of its key features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from torch import Tensor

from acutance import scaling, theory
from acutance.comparison.record import COMPARED
from acutance.mechanisms import Mechanism
from acutance.mechanisms.table import Decay, FeatureMap, Gated, Linear, Recurrence, Rows, Statistics
from acutance.probing.query_key_sample import QueryKeySample
from acutance.rowstats import WeightStatistics
from acutance.scores import Cosine, Dot, GeneralScore, ScaledDot, get

Array = NDArray[np.float64]

_MISSING = {
    "entropy": "The weights are not a distribution.",
    "jacobian_trace": "Not defined for these weights.",
    "noise_gain": "Not defined for these weights.",
}
_PREDICTED = ("entropy", "sparsity", "effective_keys", "noise_gain", "jacobian_trace")
#: Scores that are normal, given the query, if the keys are.
_NORMAL = (ScaledDot, Dot, GeneralScore)
#: Points at which theory is computed: so many, and more per doubling of what varies over rows.
_POINTS, _PER_DOUBLING, _MOST_POINTS = 4, 3, 25


@dataclass(frozen=True)
class Gaussian:
    """Means and standard deviations of Gaussian queries and keys.

    Attributes:
        query_mean, query_std: of the queries.
        key_mean, key_std: of the keys.
    """

    query_mean: float
    query_std: float
    key_mean: float
    key_std: float

    def draw(
        self, n: int, d: int, *, heads: int, batch: int, samples: int, seed: int, is_causal: bool
    ) -> Inputs:
        """Draw independent queries, keys and standard normal values; each head has its own keys.

        Args:
            n: number of keys.
            d: width of queries, keys and values.
            heads: number of heads.
            batch: number of sequences.
            samples: number of rows per head, at most n.
            seed: seed of the random numbers, which differ for each n.
            is_causal: whether rows see only the keys up to their own position.
        """
        draw = torch.Generator().manual_seed(seed * 1_000_003 + n)
        key = torch.randn(batch, heads, n, d, generator=draw)
        value = torch.randn(batch, heads, n, d, generator=draw)
        query = torch.randn(batch, heads, min(samples, n), d, generator=draw)
        query = self.query_mean + self.query_std * query
        return Inputs(query, self.key_mean + self.key_std * key, value, is_causal, self)


@dataclass(frozen=True)
class Inputs:
    """A few query rows of every head, with all keys and values.

    The queries are the last rows of their sequence, so that even under a causal mask each sees
    (nearly) all n keys.

    Attributes:
        query: (B, H, rows, E).
        key: (B, H, n, E).
        value: (B, H, n, Ev).
        is_causal: whether a row sees only the keys up to its own position.
        law: distribution of random queries and keys; None for those of a model.
        names: names of the heads; may be empty.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    law: Gaussian | None = None
    names: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        """Number of keys."""
        return self.key.shape[2]

    @property
    def offset(self) -> int:
        """Position of the first query row."""
        return self.n - self.query.shape[2]

    @property
    def value_variance(self) -> float:
        """Variance over keys, summed over a value's components, averaged over batch and heads.

        For drawn inputs it is that of their distribution, the width of a value.
        """
        if self.law is not None:
            return float(self.value.shape[3])
        return float(self.value.double().var(2, correction=0).sum(-1).mean())


def captured(
    sample: QueryKeySample, n: int, *, heads: int, samples: int, is_causal: bool
) -> Inputs:
    """Inputs from a model's queries, keys and values: the last rows of its first n tokens.

    Args:
        sample: a sample from :func:`acutance.probing.load_queries_keys`.
        n: number of keys.
        heads: largest number of heads, evenly spaced over the model.
        samples: number of rows per head.
        is_causal: whether rows see only the keys up to their own position.

    Raises:
        ValueError: if the sample is shorter than n.
    """
    if n > sample.length:
        raise ValueError(
            f"n must be at most the {sample.length} tokens whose queries and keys were "
            f"recorded, got {n}"
        )
    chosen = sample.spread(heads)
    query = chosen.query[:, max(0, n - samples) : n]
    return Inputs(
        query[None], chosen.key[None, :, :n], chosen.value[None, :, :n], is_causal,
        names=chosen.heads,
    )  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Metrics of every row of one mechanism.

    Attributes:
        values: each quantity, (heads, rows) float64; heads of different batch items count
            separately.
        why: the reason for each missing quantity.
        statistics: the statistics of all rows.
    """

    values: dict[str, Tensor]
    why: dict[str, str]
    statistics: Statistics


def measure(mechanism: Mechanism, inputs: Inputs, seed: int = 0) -> Measured:
    """Run a mechanism and compute the metrics of its rows.

    Args:
        mechanism: an entry of the table.
        inputs: the queries, keys and values.
        seed: seed of the random direction for the gradient.
    """
    with torch.no_grad():
        statistics = mechanism.run(
            inputs.query, inputs.key, inputs.value, is_causal=inputs.is_causal,
            query_offset=inputs.offset, noise=True,
        )[1]  # fmt: skip
    recorded = [name for name in COMPARED if name in statistics.available]
    values = {name: _heads_rows(statistics[name]) for name in recorded}
    why = {name: reason for name, reason in _MISSING.items() if name not in values}
    if isinstance(mechanism.form, Gated):
        why["query_gradient"] = "Its queries and keys come from one sequence."
    else:
        values["query_gradient"] = query_gradient(mechanism, inputs, seed)
    return Measured(values, why, statistics)


def query_gradient(mechanism: Mechanism, inputs: Inputs, seed: int = 0) -> Tensor:
    r"""Relative change of each output with its query, (heads, rows).

    .. math:: \frac{\lVert J^\top u \rVert \, \lVert q \rVert}{\sqrt d \, \lVert o \rVert},
        \qquad J = \partial o / \partial q, \quad u \sim N(0, I)

    The root mean square of :math:`\lVert J^\top u \rVert` is the Frobenius norm of J. The result is
    about 1 for an output that is linear in the query, and nearly 0 if the row is saturated on one
    key or averages all keys.

    Args:
        mechanism: an entry of the table.
        inputs: the queries, keys and values.
        seed: seed of u.
    """
    query = inputs.query.detach().clone().requires_grad_()
    out, _ = mechanism.run(
        query, inputs.key, inputs.value, is_causal=inputs.is_causal, query_offset=inputs.offset,
    )  # fmt: skip
    u = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
    if not out.requires_grad:
        return torch.zeros_like(_heads_rows(query[..., 0]))
    (gradient,) = torch.autograd.grad(
        (out * u).sum(), query, allow_unused=True, materialize_grads=True
    )
    size = out.detach().norm(dim=-1).double() * math.sqrt(query.shape[3])
    ratio = gradient.norm(dim=-1).double() * query.detach().norm(dim=-1).double() / size
    return _heads_rows(torch.where(size > 0, ratio, torch.nan))


def mean_and_error(
    values: Tensor, *, fixed: bool = False, alike: bool = True
) -> tuple[float, float]:
    """Mean over rows and its standard error; heads are treated as independent.

    Args:
        values: (heads, rows); NaN is ignored.
        fixed: rows are not random, so the error is 0.
        alike: heads have the same distribution; otherwise the error is unknown.

    Example:
        >>> mean_and_error(torch.tensor([[1.0, 3.0], [4.0, 4.0]], dtype=torch.float64))
        (3.0, 1.0)
    """
    heads = values.nanmean(1)
    heads = heads[~heads.isnan()]
    error = math.nan
    if fixed and len(heads):
        error = 0.0
    elif len(heads) > 1 and alike:
        error = float(heads.std()) / math.sqrt(len(heads))
    return float(heads.mean()), error


def _heads_rows(values: Tensor) -> Tensor:
    """Reshape (B, H, rows) to (B · H, rows) in float64."""
    return values.detach().double().flatten(0, 1)


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


def predict_rows(mechanism: Mechanism, inputs: Inputs, measured: Measured) -> Predicted:
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
    predicted.why["query_gradient"] = "There is no theory for it."
    if isinstance(measured.statistics, WeightStatistics):  # theory knows these by size alone
        for name in ("noise_gain", "jacobian_trace"):
            predicted.values.pop(name, None)
            predicted.why[name] = "Theory covers softmax weights only."
        if "entropy" not in measured.values and predicted.values.pop("entropy", None) is not None:
            predicted.why["entropy"] = measured.why["entropy"]
    return predicted


def _scored(mechanism: Mechanism, inputs: Inputs, measured: Measured, n: float) -> Predicted:
    """Predictions for mechanisms that compute weights from scores."""
    law = str(mechanism.theory.law)
    distribution, form = inputs.law, mechanism.form
    variance = inputs.value_variance
    if isinstance(form, Rows) and distribution is not None:
        options = form.options(inputs.query, inputs.key)
        score = get(options.get("score", "scaled_dot"))
        if isinstance(score, Cosine) and distribution.key_mean == 0:
            parameters = {"tau": score.temperature, "d": float(inputs.key.shape[3])}
            row = _predict(law, n, variance, **parameters)
            rows = np.zeros(inputs.query.flatten(0, 1).shape[:2])
            return _between([row], np.zeros(1), rows, parameters)
        if isinstance(score, _NORMAL):
            query, _, scale = score.transform(inputs.query, inputs.key)
            factor = scaling.get(options.get("scaling")).factor(torch.tensor([round(n)]))
            scale *= float(factor.flatten()[0])
            return _normal(law, n, *_of_query(query, scale, distribution), variance)
    if isinstance(form, Linear) and distribution is not None:  # the identity: scores q·k
        return _normal(law, n, *_of_query(inputs.query, 1.0, distribution), variance)
    if isinstance(form, Linear):
        group = inputs.query.shape[1] // inputs.key.shape[1]
        key = inputs.key.double().repeat_interleave(group, 1)
        scores = (inputs.query.double() @ key.mT).flatten(0, 1)
        mean, std = scores.mean(-1), scores.std(-1, correction=0)
    else:
        stats = measured.statistics
        mean, std = (stats[name].double().flatten(0, 1) for name in ("logit_mean", "logit_std"))
    predicted = _normal("softmax" if law == "cosine" else law, n, mean, std, variance)
    return replace(predicted, kinds=dict.fromkeys(predicted.kinds, "plug-in"))


def _of_query(query: Tensor, scale: float, law: Gaussian) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the scores of each row, (heads, rows)."""
    q = query.detach().double().flatten(0, 1)
    return scale * law.key_mean * q.sum(-1), abs(scale * law.key_std) * q.norm(dim=-1)


def _normal(law: str, n: float, mean: Tensor, std: Tensor, variance: float) -> Predicted:
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
    predictions = [_predict(law, n, variance, **arguments) for arguments in at]
    return _between(predictions, points, where, parameters)


def _between(
    predictions: list[theory.Prediction], points: Array, where: Array, parameters: dict[str, float]
) -> Predicted:
    """Predictions for rows that lie at ``where`` between the points, (heads, rows).

    By a cubic spline, in logarithms if all values are positive; one point counts for all rows.
    """
    kinds = predictions[0].kinds
    why = {name: row.why[name] for row in predictions for name in _PREDICTED if name in row.why}
    values = {}
    for name in kinds.keys() & set(_PREDICTED) - why.keys():
        heights = np.array([float(row[name]) for row in predictions])
        if len(points) == 1:
            curve = np.full_like(where, heights[0])
        elif (heights > 0).all():
            curve = np.exp(CubicSpline(points, np.log(heights))(where))
        else:
            curve = CubicSpline(points, heights)(where)
        values[name] = torch.from_numpy(curve)
    return Predicted(values, {name: kinds[name] for name in values}, why, parameters)


@lru_cache(maxsize=4096)
def _predict(law: str, n: float, variance: float, **parameters: float) -> theory.Prediction:
    """One prediction of :mod:`acutance.theory`."""
    return theory.predict(law, n, value_variance=variance, metrics=_PREDICTED, **parameters)


def _decays(form: Decay | Recurrence, inputs: Inputs, n: float) -> Predicted:
    """Predict rows of geometric decay, with one factor for each head or state."""
    if isinstance(form, Recurrence):
        factors = form.decays(inputs.value)
    else:
        factors = form.decays(inputs.query.shape[1]).repeat(inputs.query.shape[0])
    lam = np.asarray(factors.double().clamp(max=1.0))
    counts = np.arange(inputs.offset, inputs.n, dtype=np.float64) + 1
    rows = [_predict("decay", n, 1.0, lam=float(value)) for value in lam]
    arrays = {
        "sparsity": theory.sparsity_decay(lam[:, None], counts),
        "effective_keys": theory.effective_keys_decay(lam[:, None], counts),
        "entropy": np.array([float(row.entropy) for row in rows])[:, None] * np.ones_like(counts),
    }
    values = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
    parameters = {"lam": float(lam.mean())}
    return Predicted(values, dict.fromkeys(values, "fixed"), parameters=parameters)


def _linear(form: Linear | Rows, inputs: Inputs, n: float) -> Predicted:
    """Predict linear attention from the mean and covariance of key features."""
    q, mean, covariance, exact = feature_moments(form, inputs)
    sparsity = torch.full(q.shape[:2], math.nan, dtype=torch.float64)
    for head, rows in enumerate(q):
        has_weight = rows @ mean[head] > 0  # a query without features gives no key any weight
        if has_weight.any():
            sparsity[head, has_weight] = torch.as_tensor(
                theory.sparsity_linear(
                    rows[has_weight].numpy(), mean[head].numpy(), covariance[head].numpy()
                )
            )
    values = {"sparsity": sparsity, "effective_keys": n * sparsity.square()}
    why = {"entropy": "Not determined by the mean and covariance of key features."}
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
    group = inputs.query.shape[1] // inputs.key.shape[1]
    if isinstance(form, Rows):
        score = form.options(inputs.query, inputs.key)["score"]
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
