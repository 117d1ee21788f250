"""Compare mechanisms on the same queries and keys: rows measured, and predicted if possible.

For Gaussian keys and a dot-product score, a row's scores are normal with mean β and deviation γ
that follow from its query. For other scores, and for queries and keys of a model, β and γ are
measured, and the prediction is marked ``plug-in``. Linear attention is predicted from the mean and
covariance of its key features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from torch import Tensor

from acutance import scaling, theory
from acutance.comparison.record import COMPARED, Comparison, Reading, Result
from acutance.comparison.timing import Seconds, timed
from acutance.mechanisms import MECHANISMS, Mechanism, mechanism
from acutance.mechanisms.table import Decay, FeatureMap, Gated, Linear, Recurrence, Rows, Statistics
from acutance.probing.query_key_sample import QueryKeySample
from acutance.rowstats import WeightStatistics
from acutance.scores import Cosine, Dot, GeneralScore, ScaledDot, get
from acutance.shapes import check_count, check_flag, check_number

Array = NDArray[np.float64]

#: A call shorter than this is taken three times, seconds, and the quickest counts.
QUICK = 0.1
DEFAULT_LENGTHS = (256, 1024, 4096)
#: One of each kind: what concentrates, what cannot, and what does so by place alone.
DEFAULT_MECHANISMS = (
    "scaled_dot", "dot", "cosine", "cosine_tau", "log_n", "sigmoid", "relu2", "identity",
    "linear_elu1", "linear_exp", "decay", "lru",
)  # fmt: skip
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
#: Feature maps that take each component by itself.
_COMPONENTWISE = ("elu1", "relu", "relu2", "exp")
_DRAWS = 1 << 15
_GRID = 20_001


class Step(NamedTuple):
    """Progress of a comparison: finished steps, total steps, and the next mechanism and length."""

    done: int
    total: int
    mechanism: str
    n: int


def compare(
    mechanisms: str | Mechanism | Sequence[str | Mechanism] | None = None,
    *,
    n: int | Sequence[int] = DEFAULT_LENGTHS,
    d: int = 64,
    heads: int = 16,
    batch: int = 1,
    samples: int = 16,
    mean: float | tuple[float, float] = 0.0,
    std: float | tuple[float, float] = 1.0,
    is_causal: bool = False,
    seed: int = 0,
    source: QueryKeySample | None = None,
    costs: bool = True,
    progress: Callable[[Step], None] | None = None,
) -> Comparison:
    r"""Run mechanisms on the same queries and keys; compare measured with predicted metrics.

    Rows are sampled: ``samples`` queries of each head, the last of their sequence, against all n
    keys of the head. Queries and keys are random normal, or those of a model (``source``).

    Args:
        mechanisms: names of :data:`acutance.MECHANISMS` or entries; ``"all"`` for all of them, None
            for :data:`DEFAULT_MECHANISMS`.
        n: numbers of keys, each at least 2.
        d: width of queries, keys and values.
        heads: number of heads, each with its own keys; with a source, the largest number.
        batch: number of sequences.
        samples: number of rows per head.
        mean: mean of the components, or a pair for queries and keys. Scaled dot products then have
            the mean :math:`\sqrt d \, \mu_q \mu_k`.
        std: their standard deviation, or a pair.
        is_causal: rows see only the keys up to their own position; recurrent mechanisms always do.
        seed: random seed.
        source: queries and keys of a model (:meth:`acutance.probing.Probe.queries_keys`); ``d``,
            ``batch``, ``mean`` and ``std`` are then ignored.
        costs: also measure the time of one head with n rows.
        progress: called before each step.

    Returns:
        The :class:`Comparison`. If interrupted (KeyboardInterrupt) after the first result, it holds
        the finished results, and ``complete`` is False.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a mechanism is unknown (the message names the nearest) or a number is out of
            range.
        ImportError: if a mechanism needs a library that is not installed; raised before anything is
            measured.

    Example:
        >>> found = compare(["cosine", "decay"], n=64, d=16, heads=2, costs=False)
        >>> found["decay", 64]["effective_keys"].predicted
        18.8...
        >>> reading = found["cosine", 64]["entropy"]
        >>> reading.measured > 4.1589 - 0.4745
        True

    Source:
        Su Jianlin, kexue.fm/archives/9889 and 9593.
    """
    chosen = pick(mechanisms)
    lengths = _lengths(n)
    check_count("d", d, 2)
    for name, value in (("heads", heads), ("batch", batch), ("samples", samples)):
        check_count(name, value, 1)
    check_count("seed", seed, 0)
    means, stds = _pair("mean", mean), _pair("std", std, above=0.0)
    law = Gaussian(means[0], stds[0], means[1], stds[1])
    causal = check_flag("is_causal", is_causal) or bool(source is not None and source.is_causal)

    def inputs(count: int, rows: int, of: int, sequences: int) -> Inputs:
        if source is not None:
            return captured(source, count, heads=of, samples=rows, is_causal=causal)
        return law.draw(
            count, d, heads=of, batch=sequences, samples=rows, seed=seed, is_causal=causal
        )

    two = torch.zeros(1, 1, 2, 16)
    with torch.no_grad():  # a missing library is reported before any work
        for entry in chosen:
            entry.run(two, two, two)
    results: dict[str, dict[int, Result]] = {entry.name: {} for entry in chosen}
    done, total = 0, len(chosen) * len(lengths)
    try:
        for count in lengths:
            sampled = inputs(count, samples, heads, batch)
            whole = inputs(count, count, 1, 1) if costs else None
            for entry in chosen:
                if progress is not None:
                    progress(Step(done, total, entry.name, count))
                results[entry.name][count] = _result(entry, sampled, whole, seed)
                done += 1
    except KeyboardInterrupt:
        if not done:
            raise
    settings: dict[str, Any] = {
        "n": list(lengths), "d": sampled.key.shape[3], "heads": sampled.query.shape[1],
        "batch": sampled.query.shape[0], "samples": samples, "is_causal": causal, "seed": seed,
        **(asdict(law) if source is None else dict.fromkeys(asdict(law))),
        "heads_of_the_model": list(sampled.names),
        "threads": torch.get_num_threads(), "torch": torch.__version__,
    }  # fmt: skip
    ordered = [result for by_length in results.values() for result in by_length.values()]
    return Comparison(tuple(ordered), settings, done == total)


def pick(mechanisms: str | Mechanism | Sequence[str | Mechanism] | None) -> tuple[Mechanism, ...]:
    """The requested entries of the table, without duplicates; see :func:`compare`.

    Raises:
        ValueError: if one is unknown (the nearest is named), or none is given.

    Example:
        >>> [entry.name for entry in pick("relu2")]
        ['relu2']
        >>> len(pick("all")) == len(MECHANISMS)
        True
    """
    if mechanisms is None:
        mechanisms = DEFAULT_MECHANISMS
    if isinstance(mechanisms, str | Mechanism):
        mechanisms = [mechanisms]
    chosen: dict[str, Mechanism] = {}
    for mechanism_or_name in mechanisms:
        if mechanism_or_name == "all":
            chosen.update(MECHANISMS)
        else:
            entry = mechanism(mechanism_or_name)
            chosen[entry.name] = entry
    if not chosen:
        raise ValueError("mechanisms must name at least one mechanism, got none")
    return tuple(chosen.values())


def _result(entry: Mechanism, sampled: Inputs, whole: Inputs | None, seed: int) -> Result:
    """Measure and predict one mechanism at one n."""
    measured = measure(entry, sampled, seed)
    predicted = predict_rows(entry, sampled, measured)
    fixed = isinstance(entry.form, Decay | Recurrence)  # weights depend only on distance
    alike = not (isinstance(entry.form, Linear) and entry.form.decays is not None)
    readings = {}
    for name in COMPARED:
        reading: dict[str, Any] = {}
        rows, theory = measured.values.get(name), predicted.values.get(name)
        if rows is not None:
            if name == "query_gradient":
                rows = rows.nanmedian(1, keepdim=True).values
            reading["measured"], reading["error"] = mean_and_error(rows, fixed=fixed, alike=alike)
        if theory is not None:
            kind = predicted.kinds[name]
            reading |= {"predicted": float(theory.nanmean()), "kind": kind}
            if rows is not None and kind == "mean":
                apart, error = mean_and_error(rows - theory)
                reading["z"] = apart / error if error > 0 else math.nan
        why = measured.why.get(name) or predicted.why.get(name, "")
        readings[name] = Reading(**reading, why=why)
    spent = Seconds(math.nan, math.nan) if whole is None else _cost(entry, whole)
    count = next(iter(measured.values.values())).numel()
    return Result(entry.name, sampled.n, count, readings, *spent, parameters=predicted.parameters)


def _cost(mechanism: Mechanism, inputs: Inputs) -> Seconds:
    """Time of a mechanism, statistics included, after a warm-up over 64 rows."""

    def run(tensors: Iterable[Tensor]) -> None:
        mechanism.run(*tensors, is_causal=inputs.is_causal)

    tensors = inputs.query, inputs.key, inputs.value
    with torch.no_grad():
        run(tensor[:, :, :64] for tensor in tensors)
        timings = [timed(lambda: run(tensors))]
        if timings[0].wall < QUICK:
            timings += [timed(lambda: run(tensors)) for _ in range(2)]
    return min(timings, key=lambda seconds: seconds.wall)


def _lengths(n: int | Sequence[int]) -> tuple[int, ...]:
    """Check the numbers of keys; ascending, without duplicates."""
    lengths = (n,) if isinstance(n, int) else tuple(n)
    if not lengths:
        raise ValueError("n must contain at least one number of keys, got none")
    return tuple(sorted({check_count("n", count, 2) for count in lengths}))


def _pair(
    name: str, value: float | tuple[float, float], above: float = -math.inf
) -> tuple[float, float]:
    """Split one or two numbers into one for queries and one for keys."""
    both = value if isinstance(value, tuple | list) else (value, value)
    if len(both) != 2:
        raise ValueError(
            f"{name} must be one number, or one for queries and one for keys, got {value}"
        )
    query, key = (check_number(name, number, above=above) for number in both)
    return query, key


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
