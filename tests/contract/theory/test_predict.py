"""Predictions against rows that are drawn and measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from scipy.stats import uniform as uniform_law
from torch import Tensor

import acutance
from acutance import theory
from acutance.rowstats import RowStatistics, observe
from tests.contract.names import metric_names

NAMES = metric_names(noise=True)
#: Metrics whose relative standard error must be under 1.25 %: then 4 of them find a 5 % mistake.
SHARP = ("entropy", "effective_keys", "sparsity", "collision", "lse", "max_logit", "logit_std")


def measure(scores: Tensor, features: int = 3) -> RowStatistics:
    """Rows of scores (rows, n), with unit-variance values, as row_statistics reads them."""
    rows, n = scores.shape
    query = torch.ones(rows, 1, 1, 1, dtype=torch.float64)
    value = torch.randn(rows, 1, n, features, dtype=torch.float64) / features**0.5
    return acutance.row_statistics(query, scores[:, None, :, None], value, scale=1.0, noise=True)


def deviations(prediction: theory.Prediction, measured: Any) -> dict[str, tuple[float, float]]:
    """For each predicted metric the distance in standard errors, and the relative error."""
    found = {}
    for name in prediction.kinds:
        values = measured[name].to(torch.float64).flatten()
        error = max(float(values.std()) / math.sqrt(len(values)), 1e-12)
        away = float(values.mean()) - prediction[name]
        found[name] = away / error, error / max(abs(prediction[name]), 1e-300)
    return found


def uniform(rows: int, n: int) -> Tensor:
    return 2 * torch.rand(rows, n, dtype=torch.float64) - 1


def laplace(rows: int, n: int) -> Tensor:
    sign = torch.randint(2, (rows, n)) * 2 - 1
    return sign * torch.empty(rows, n, dtype=torch.float64).exponential_()


def normal(rows: int, n: int) -> Tensor:
    return torch.randn(rows, n, dtype=torch.float64)


CASES: list[tuple[int, int, Callable[[int, int], Tensor], dict[str, Any]]] = [
    (20000, 64, normal, {"logit_std": 1.5, "logit_mean": 2.0}),
    (6000, 512, normal, {"logit_std": 4.0}),
    (40000, 3, normal, {"logit_std": 1.0}),
    (16000, 256, laplace, {"scale": 0.9, "family": "laplace"}),
    (8000, 128, uniform, {"scale": 6.0, "family": "uniform"}),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("rows", "n", "draw", "given"), CASES)
def test_every_expectation_is_within_four_standard_errors(
    rows: int, n: int, draw: Callable[[int, int], Tensor], given: dict[str, Any]
) -> None:
    prediction = theory.predict("softmax", n, **given)
    scale = given.get("scale", given.get("logit_std"))
    found = deviations(prediction, measure(scale * draw(rows, n) + given.get("logit_mean", 0.0)))
    assert set(found) == set(NAMES)
    for name, (away, _) in found.items():
        if prediction.kinds[name] == "mean":
            assert abs(away) < 4, (name, away)
        elif prediction.kinds[name] == "fixed":
            assert abs(away) == 0, name
    loose = {name: found[name][1] for name in SHARP if found[name][1] > 0.0125}
    assert not loose


def test_plug_in_values_are_as_near_as_one_over_n() -> None:
    prediction = theory.predict("softmax", 128, scale=6.0, family="uniform")
    plugged = [name for name, kind in prediction.kinds.items() if kind == "plug-in"]
    assert plugged == ["logit_std", "gaussian_entropy", "rest_logit_std"]
    measured = measure(6.0 * uniform(8000, 128))
    for name in plugged:
        assert float(measured[name].mean()) == pytest.approx(prediction[name], rel=2 / 128)


def test_cosine_and_dot_products_of_vectors() -> None:
    rows, n, d = 6000, 96, 16
    query, key = torch.randn(rows, 1, 1, d).double(), torch.randn(rows, 1, n, d).double()
    direction = query / query.norm(dim=-1, keepdim=True)
    unit = key / key.norm(dim=-1, keepdim=True)
    cases = {
        ("cosine", "tau", 0.1): acutance.row_statistics(direction, unit, scale=10.0),
        ("scaled_dot", "scale", None): acutance.row_statistics(direction * d**0.5, key),
        ("dot", "query_norm", 3.0): acutance.row_statistics(3.0 * direction, key, scale=1.0),
    }
    for (mechanism, name, value), measured in cases.items():
        prediction = theory.predict(mechanism, n, d=d, **{name: value})
        for metric in ("entropy", "effective_keys", "sparsity", "top_weight", "lse", "max_logit"):
            values = measured[metric]
            error = float(values.std()) / rows**0.5
            assert abs(float(values.mean()) - prediction[metric]) < 4 * error, (mechanism, metric)


def of_two(gamma: float, f: Callable[[float, float], float]) -> float:
    """The mean of f(larger weight, gap) of two normal logits, by quadrature over their gap."""
    law = norm(scale=math.sqrt(2) * gamma)
    value, _ = quad(
        lambda gap: 2 * law.pdf(gap) * f(1 / (1 + math.exp(-gap)), gap),
        0, min(40 * gamma, 700), points=[gamma, 3.0, 10.0], epsabs=1e-14, epsrel=1e-12, limit=400,
    )  # fmt: skip
    return float(value)


@pytest.mark.few(1)
@pytest.mark.parametrize("gamma", [1e-3, 1.0, 8.0])
def test_two_keys_are_one_integral(gamma: float) -> None:
    row = theory.predict("softmax", 2, logit_std=gamma)
    expected = {
        "entropy": lambda p, gap: math.log1p(math.exp(-gap)) + gap * (1 - p),
        "effective_keys": lambda p, gap: 1 / (p * p + (1 - p) ** 2),
        "sparsity": lambda p, gap: 1 / math.sqrt(2 * (p * p + (1 - p) ** 2)),
        "collision": lambda p, gap: p * p + (1 - p) ** 2,
        "top_weight": lambda p, gap: p,
        "varentropy": lambda p, gap: p * p * math.exp(-gap) * gap * gap,
        "noise_gain": lambda p, gap: 4 * (p * p * math.exp(-gap)) ** 2,
        "max_logit": lambda p, gap: gap / 2,
        "logit_std": lambda p, gap: gap / 2,
        "jensen_gap": lambda p, gap: math.log1p(math.exp(-gap)) - math.log(2) + gap / 2,
        "max_gap": lambda p, gap: gap * (1 - p),
    }
    if gamma == 1.0:  # it takes long, and is as good as the metric's table, 1e-6
        expected["gaussian_entropy"] = lambda p, gap: float(
            theory.expected_entropy_gauss(2, gap / 2)
        )
    for name, f in expected.items():
        tolerance = 2e-6 if name == "gaussian_entropy" else 1e-8  # the metric is no better
        assert row[name] == pytest.approx(of_two(gamma, f), rel=tolerance, abs=1e-12), name


@pytest.mark.parametrize("law", ["uniform", uniform_law(-1.0, 2.0)])
def test_the_top_weight_of_a_law_with_edges(law: Any) -> None:
    expected, _ = quad(lambda gap: (1 - gap / 2) / (1 + math.exp(-3.0 * gap)), 0, 2, epsabs=1e-13)
    assert theory.expected_top_weight(2, 3.0, law) == pytest.approx(expected, rel=1e-9)


def test_the_record_is_the_table_of_metrics() -> None:
    assert tuple(theory.MetricRecord().as_dict()) == NAMES
    rows = [
        theory.predict("softmax", 8, logit_std=1.0),
        theory.predict("relu2", 8, logit_std=1.0),
        theory.predict("identity", 8, logit_std=1.0),
        theory.predict("decay", 8, lam=0.5),
        theory.predict("linear", 8, q=[1.0, 2.0], mu=1.0, sigma=0.5),
        theory.predict("softmax", 8, scale=1.0, family="pareto", a=0.8),
    ]
    for row in rows:
        assert set(row.kinds) | set(row.why) == set(NAMES)
        assert not set(row.kinds) & set(row.why)
        for name in NAMES:
            assert math.isnan(row[name]) == (name in row.why), (row.mechanism, name)
        assert all(reason.endswith(".") and len(reason) > 20 for reason in row.why.values())
        assert set(row.kinds.values()) <= set(theory.KINDS)
    assert "mean" in rows[-1].why["lse"]


def test_predicted_less_measured_is_a_subtraction() -> None:
    row = theory.predict("softmax", 16, logit_std=1.0)
    scores = torch.randn(5, 16, dtype=torch.float64)
    measured = RowStatistics(observe(scores))
    ahead, behind = row - measured, measured - row
    assert ahead.entropy.shape == (5,)
    torch.testing.assert_close(ahead.entropy, row.entropy - measured.entropy)
    torch.testing.assert_close(behind.top_weight, -ahead.top_weight)
    assert ahead.n_keys.tolist() == [0.0] * 5
    assert math.isnan(ahead.noise_gain)  # no values were given
    assert (row - row).lse == 0.0
    assert (row - {"lse": 1.0}).lse == row.lse - 1.0
    assert ({"lse": 1.0} - row).lse == 1.0 - row.lse
    with pytest.raises(TypeError, match="unsupported operand"):
        row - 3.0
    with pytest.raises(TypeError, match="unsupported operand"):
        3.0 - row


def test_a_summary_is_subtracted_head_by_head() -> None:
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    tokens = torch.randn(1, 12, 16)
    with acutance.probe(layer) as probe, torch.no_grad():
        layer(tokens, tokens, tokens)
    summary = probe.summary()
    spread = float(summary.mean("logit_std").mean())
    away = theory.predict("softmax", 12, logit_std=spread) - summary
    assert away.entropy.shape == (4,)
    torch.testing.assert_close(
        away.entropy, theory.predict("softmax", 12, logit_std=spread).entropy
        - summary.mean("entropy"),
    )  # fmt: skip


def test_a_scipy_law_is_its_named_family() -> None:
    named = theory.predict("softmax", 40, logit_std=1.5, logit_mean=1.0)
    other = theory.predict("softmax", 40, scale=0.5, family=norm(2.0, 3.0))
    for name in NAMES:
        if named.kinds[name] == other.kinds[name] == "mean":
            assert other[name] == pytest.approx(named[name], rel=1e-8, abs=1e-9), name


def test_the_population_is_what_many_keys_tend_to() -> None:
    for given in ({}, {"family": "cosine", "d": 4}):
        many = theory.predict("softmax", 10**9, scale=0.25, **given)
        for name in ("entropy", "sparsity", "lse", "varentropy", "logit_std"):
            assert many[name] == pytest.approx(many.population[name], rel=1e-4), (name, given)
        assert many.effective_keys == pytest.approx(many.population.effective_keys, rel=0.01)
    row = theory.predict("softmax", 4096, logit_std=2.0).population
    assert row.sparsity == pytest.approx(math.exp(-2.0), rel=1e-15)
    assert row.entropy == pytest.approx(math.log(4096) - 2.0, rel=1e-14)
    heavy = theory.predict("softmax", 100, scale=2.0, family="laplace")
    assert math.isnan(heavy.population.entropy)
    assert 0 < heavy.entropy < math.log(100)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gaussian", "laplace", "uniform", "exponential"])
def test_known_orders_and_limits(family: str) -> None:
    n = 500
    rows = [theory.predict("softmax", n, scale=scale, family=family) for scale in (0.0, 1.0, 30.0)]
    for row in rows:
        assert row.effective_keys >= 1 / row.collision * (1 - 1e-9)  # Jensen
        assert row.sparsity <= math.sqrt(row.effective_keys / n) * (1 + 1e-9)  # and again
        assert row.collision <= row.top_weight * (1 + 1e-9)
        assert row.top_weight <= math.sqrt(row.collision) * (1 + 1e-9)
        assert row.entropy == pytest.approx(row.mean_field_entropy + row.jensen_gap + row.max_gap)
        assert row.noise_gain <= row.collision * (1 + 1e-9)
    even, some, sharp = rows
    assert even.entropy == pytest.approx(math.log(n))
    assert even.effective_keys == n
    assert even.noise_gain == pytest.approx((n - 1) / n**2)
    assert sharp.top_weight > some.top_weight > even.top_weight
    faint = theory.predict("softmax", n, scale=1e-7, family=family)
    for name in NAMES:
        assert faint[name] == pytest.approx(even[name], rel=1e-4, abs=1e-4), name
    one = theory.predict("softmax", 1, scale=2.0, family=family)
    assert (one.entropy, one.top_weight, one.varentropy, one.logit_std) == (0.0, 1.0, 0.0, 0.0)
    assert math.isnan(one.normalized_entropy)


def test_varentropy_is_the_slope_of_the_entropy() -> None:
    def entropy(log_scale: float) -> float:
        return float(theory.expected_entropy_gauss(300, math.exp(log_scale)))

    middle, h = math.log(2.5), 1e-4
    slope = (entropy(middle + h) - entropy(middle - h)) / (2 * h)
    assert -theory.expected_varentropy(300, 2.5) == pytest.approx(slope, rel=1e-6)


def test_only_what_is_asked_for_is_computed() -> None:
    row = theory.predict("softmax", 64, logit_std=2.0, metrics=["entropy", "lse"])
    assert list(row.kinds) == ["entropy", "lse"]
    assert row.why["sparsity"] == "It was not requested."
    assert math.isnan(row.sparsity)


@pytest.mark.parametrize(
    ("mechanism", "n", "given", "message"),
    [
        ("softmin", 8, {}, 'mechanism: must be one of "softmax"'),
        ("softmax", 0.5, {"logit_std": 1.0}, "n: the number of keys must be finite and at least 1"),
        ("softmax", 8, {}, "logit_std, scale: .* needs exactly one"),
        ("softmax", 8, {"logit_std": 1.0, "scale": 1.0}, "logit_std, scale: .* needs exactly one"),
        ("softmax", 8, {"logit_std": -1.0}, "logit_std: the deviation .* got logit_std=-1.0"),
        ("softmax", 8, {"logit_std": [1.0, 2.0]}, "logit_std: the deviation"),
        ("softmax", 8, {"logit_std": 1.0, "tau": 1.0}, 'tau: "softmax" takes logit_std'),
        ("softmax", 8, {"logit_std": 1.0, "family": "cosine"}, "needs d"),
        (
            "softmax", 8, {"logit_std": 1.0, "family": "pareto", "a": 1.5},
            "logit_std: the variance .* is infinite.* give scale",
        ),
        (
            "softmax", 8, {"scale": 1.0, "logit_mean": 1.0, "family": "pareto", "a": 0.5},
            "logit_mean: the mean .* is infinite",
        ),
        ("softmax", 8, {"logit_std": 1.0, "metrics": ["entropie"]}, "metrics: .*no metric"),
        ("softmax", 8, {"logit_std": 1.0, "metrics": "entropy"}, "metrics: must be a list"),
        ("softmax", 8, {"logit_std": 1.0, "value_variance": -1.0}, "value_variance: a variance"),
        ("cosine", 8, {"d": 4}, 'tau: "cosine" needs tau'),
        ("cosine", 8, {"d": 1, "tau": 1.0}, "d: the dimension must be finite and at least 2"),
        ("cosine", 8, {"d": 4, "tau": 0.0}, "tau: the temperature .* got tau=0.0"),
        ("dot", 8, {}, 'd: "dot" needs d'),
        ("relu2", 8, {"logit_std": 0.0}, "logit_std: the deviation of the scores"),
        ("decay", 8, {"lam": 1.5}, "lam: a decay must be above 0 and at most 1"),
        ("decay", 8, {"lam": 0.0}, "lam: a decay must be above 0 and at most 1"),
        ("linear", 8, {"mu": 1.0}, 'q: "linear" needs q, mu and one of Sigma and sigma'),
        ("linear", 8, {"q": [1.0], "mu": 1.0}, 'Sigma, sigma: "linear" (needs|accepts)'),
        ("linear", 8, {"q": 1.0, "mu": 1.0, "sigma": 1.0}, "q: the features of one query"),
        ("trained_head", 2, {"first_gap": 1.0}, "n: a trained head has a first key and"),
        ("trained_head", 8, {}, 'first_gap: "trained_head" needs first_gap, got None'),
        (
            "trained_head", 8, {"first_gap": 0.0, "rest_logit_std": -1.0},
            "rest_logit_std: .* at least 0, got rest_logit_std=-1.0",
        ),
    ],
)  # fmt: skip
def test_misuse_is_one_sentence(
    mechanism: str, n: float, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        theory.predict(mechanism, n, **given)
    assert "\n" not in str(caught.value)


def test_a_trained_head_has_the_metrics_of_its_four_numbers() -> None:
    numbers = {"first_gap": 0.8, "rest_logit_std": 2.0, "rest_jensen_gap": 2.4}
    row = theory.predict("trained_head", 512, first_gap_std=1.0, **numbers)
    head = theory.expected_head_metrics(512, first_gap_std=1.0, **numbers)
    for name in ("entropy", "effective_keys", "top_weight", "first_weight"):
        assert row[name] == getattr(head, name)
    assert row.information == math.log(512) - row.entropy
    assert {name: row[name] for name in numbers} == numbers
    assert "lse" in row.why
    assert math.isnan(row.lse)
    still = theory.predict("trained_head", 512, **numbers)
    assert still.first_weight == pytest.approx(1 / (1 + math.exp(-0.8)))


def test_an_unknown_metric_is_not_in_the_record() -> None:
    with pytest.raises(ValueError, match="there is no metric named 'entropie': choose from n_keys"):
        theory.MetricRecord()["entropie"]


@pytest.mark.parametrize("name", ["effective_keys", "sparsity", "varentropy", "top_weight"])
def test_expected_functions_broadcast_and_check(name: str) -> None:
    function = getattr(theory, f"expected_{name}")
    table = function([[2.0], [30.0]], [0.0, 1.0, 3.0])
    assert table.shape == (2, 3)
    assert table[1, 2] == function(30, 3.0)
    with pytest.raises(ValueError, match="n: the number of keys"):
        function(0.5, 1.0)
    with pytest.raises(ValueError, match=r"gamma: .* at least 0"):
        function(2, -1.0)
    with pytest.raises(ValueError, match=r"d: the family .* needs d"):
        function(2, 1.0, "cosine")
    with pytest.raises(
        TypeError, match="family: must be a name or a frozen continuous distribution"
    ):
        function(2, 1.0, 3)
