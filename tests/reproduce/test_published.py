"""Records against figures computed elsewhere: published tables, other formulas, plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from acutance import theory
from acutance_lab.experiments.many_keys import (
    closed_form,
    limit_constant,
    one_above_rest,
    outputs_cosine,
)
from acutance_lab.experiments.scores import power_entropy
from acutance_lab.experiments.sparsity import printed


@pytest.mark.parametrize(
    ("norm", "H"), [(1.0, 2.7168), (3.0, 1.7675), (6.0, 0.2137), (10.0, 0.0056)]
)
def test_the_entropy_floor_is_that_of_its_paper(norm: float, H: float) -> None:
    logits = one_above_rest(16, norm)[0].numpy()
    assert np.linalg.norm(logits) == pytest.approx(norm)
    assert stats.entropy(np.exp(logits)) == pytest.approx(H, abs=5e-5)


def test_the_simplex_meets_at_0_8() -> None:
    assert outputs_cosine(1024, 0.5, 2.0) == pytest.approx(0.8, abs=1e-3)
    assert closed_form(10**9, 0.5, 2.0) == pytest.approx(0.8, abs=1e-6)
    assert closed_form(10**9, 0.5, 1.0) == pytest.approx(1.0, abs=1e-6)
    assert closed_form(10**9, 0.5, 4.0) == pytest.approx(0.5, abs=1e-6)


def test_the_constant_of_the_gaps_is_that_of_simulated_exponential_rows() -> None:
    # below an exponential tail the gaps of n keys are sums of e_i / i (Rényi): no sorting, no tail
    generator = np.random.default_rng(5)
    steps = generator.exponential(size=(4000, 499)) / np.arange(1, 500)
    best = (np.log(np.arange(2, 501)) / steps.cumsum(axis=1)).max(axis=1)
    constant = limit_constant("exponential tail", 4000, 0)
    spread = 1.6 * best.std() / math.sqrt(len(best)) if best.std() < 1 else 0.05
    assert np.median(best) == pytest.approx(constant.value, abs=4 * constant.error + spread)


@pytest.mark.parametrize(("beta", "gamma"), [(-1.0, 0.7), (0.0, 2.0), (1.5, 1.0)])
def test_equation_6_is_a_ratio_of_integrals(beta: float, gamma: float) -> None:
    def moment(power: int) -> float:
        found = integrate.quad(
            lambda s: s**power * stats.norm.pdf(s, beta, gamma), 0, 12 * gamma + beta, limit=200
        )
        return float(found[0])

    assert printed(beta, gamma) == pytest.approx(moment(2) / math.sqrt(moment(4)), rel=1e-8)


def test_entropy_of_powers_is_that_of_many_draws() -> None:
    z = np.random.default_rng(1).standard_normal(2_000_000)
    for k in (1.0, 2.0, 3.0):
        weights = np.abs(z) ** k
        H = stats.entropy(weights)
        assert power_entropy(len(z), k, 1.0) == pytest.approx(H, abs=5e-3)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_finite_n_agrees_with_other_quadrature(gamma: float) -> None:
    # E H of two keys is a plain integral over their difference, N(0, 2γ²)
    spread = math.sqrt(2) * gamma

    def entropy(gap: float) -> float:
        p = 1 / (1 + math.exp(-gap))
        return float(stats.entropy([p, 1 - p])) * float(stats.norm.pdf(gap, 0, spread))

    exact = integrate.quad(entropy, -12 * spread, 12 * spread, limit=200)[0]
    assert theory.expected_entropy_gauss(2, gamma) == pytest.approx(exact, rel=1e-6)
