"""Predictions of rows that are not a softmax of random logits, against rows that are drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from acutance import theory
from acutance.rowstats import RowStatistics, WeightStatistics, observe, observe_weights

SCORES = ("max_logit", "logit_mean", "logit_std")


def agrees(row: theory.Prediction, measured: WeightStatistics) -> None:
    """Every mean that both have is within four standard errors, over rows with some weight."""
    for name in measured.available:
        values = measured[name].to(torch.float64)
        values = values[values.isfinite() & (measured.sums.A > 0)]
        if row.kinds.get(name) == "mean" and name not in SCORES:
            error = max(float(values.std()) / len(values) ** 0.5, 1e-12)
            assert abs(float(values.mean()) - row[name]) < 4 * error, name
    checked = {name for name in measured.available if row.kinds.get(name) == "mean"}
    assert checked >= {"effective_keys", "sparsity", "collision", "top_weight", "first_weight"}
    found = measured.sparsity[measured.sums.A > 0]
    assert float(found.std()) / len(found) ** 0.5 < 0.0125 * row.sparsity  # 5 % off is found


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rows", "n", "mean", "deviation"),
    [(20000, 64, 0.5, 2.0), (60000, 4, -1.0, 0.7), (8000, 512, -2.0, 1.0)],
)
def test_relu2_rows(rows: int, n: int, mean: float, deviation: float) -> None:
    scores = mean + deviation * torch.randn(rows, n, dtype=torch.float64)
    row = theory.predict("relu2", n, logit_mean=mean, logit_std=deviation)
    weights = observe_weights(scores.clamp(min=0).square(), distribution=True)
    agrees(row, WeightStatistics(weights, observe(scores)))
    assert {"entropy", "normalized_entropy", "information"} <= set(row.kinds)
    for name in SCORES:
        values = RowStatistics(observe(scores))[name]
        assert abs(float(values.mean()) - row[name]) < 4 * float(values.std()) / rows**0.5, name


def test_relu2_rows_without_a_positive_score_have_no_weights() -> None:
    row = theory.predict("relu2", 64, logit_mean=-12.0, logit_std=1.0)
    assert row.why["sparsity"].startswith("Practically no row has a positive score")
    assert row.logit_mean == -12.0


@pytest.mark.parametrize(("n", "u"), [(32, 0.0), (200, -1.5), (3, 0.3)])
def test_identity_rows(n: int, u: float) -> None:
    scores = u + torch.randn(20000, n, dtype=torch.float64)
    row = theory.predict("identity", n, logit_mean=3 * u, logit_std=3.0)
    agrees(row, WeightStatistics(observe_weights(scores), observe(scores)))
    assert row.population.sparsity == theory.sparsity_identity(u, 1.0)
    away = row - WeightStatistics(observe_weights(scores))
    assert away.sparsity.shape == (20000,)


@pytest.mark.parametrize(("n", "lam"), [(1, 0.5), (7, 0.9), (300, 0.99), (2000, 0.999999), (9, 1)])
def test_decay_is_a_row_whose_logits_fall_evenly(n: int, lam: float) -> None:
    scores = math.log(lam) * torch.arange(n - 1, -1, -1, dtype=torch.float64)
    row = theory.predict("decay", n, lam=lam)
    measured = RowStatistics(observe(scores[None]))
    assert len(measured.available) >= 20
    for name in measured.available:
        expected = float(measured[name])
        tolerance = 2e-6 if name == "gaussian_entropy" else 1e-9  # the metric's table is that good
        assert row[name] == pytest.approx(expected, rel=tolerance, abs=1e-9, nan_ok=True), name
        assert row.kinds.get(name, "fixed") == "fixed"


@pytest.mark.parametrize(("n", "lam"), [(10**12, 0.5), (10**12, 1 - 1e-12), (10**6, 1e-200)])
def test_decay_at_lengths_that_no_row_has(n: int, lam: float) -> None:
    row = theory.predict("decay", n, lam=lam)
    if lam == 0.5:  # geometric: mean 1 and variance 2 of the position
        assert row.entropy == pytest.approx(2 * math.log(2), rel=1e-12)
        assert row.varentropy == pytest.approx(2 * math.log(2) ** 2, rel=1e-12)
    elif lam < 0.5:
        assert 0 < row.varentropy < 1e-190
        assert row.effective_keys == 1.0
    else:  # exponential weights on [0, 1] with rate 1
        density = (1 - math.exp(-1.0), 1 - 2 * math.exp(-1.0))
        entropy = math.log(n) + math.log(density[0]) + density[1] / density[0]
        assert row.entropy == pytest.approx(entropy, rel=1e-5)


def test_linear_attention_with_the_keys_own_moments_is_exact() -> None:
    generator = np.random.default_rng(3)
    keys, query = generator.gamma(2.0, size=(50, 4)), generator.random(4)
    weights = keys @ query
    row = theory.predict(
        "linear", 50, q=query, mu=keys.mean(axis=0), Sigma=np.cov(keys.T, bias=True)
    )
    effective = weights.sum() ** 2 / (weights**2).sum()
    assert row.effective_keys == pytest.approx(effective, rel=1e-12)
    assert row.logit_mean == pytest.approx(weights.mean(), rel=1e-12)
    iid = theory.predict("linear", 50, q=query, mu=2.0, sigma=1.5)
    spread = theory.predict("linear", 50, q=query, mu=[2.0] * 4, Sigma=1.5**2 * np.eye(4))
    assert iid.sparsity == pytest.approx(spread.sparsity, rel=1e-12)
    assert iid.logit_mean == pytest.approx(spread.logit_mean, rel=1e-12)
