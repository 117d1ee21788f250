r"""Sampled sparsity at n = 65536 against the closed forms, through the public calls: within 1 %.

For independent keys the sparsity :math:`S = E|a| / \sqrt{E a^2}` of a sample of n has, by the delta
method, a relative standard error of :math:`\sqrt{\kappa / n}` with
:math:`\kappa = \mathrm{Var}(|a|/E|a| - a^2 / (2 E a^2))`. Eight rows of independent keys are
averaged; the errors stated below are those of the mean. Exponential weights need a moderate γ:
their :math:`\kappa = e^{\gamma^2} - e^{2\gamma^2} + (e^{4\gamma^2} - 1)/4` makes the error 1.2 % a
row at γ = 1, and at γ = 2 a sample is biased besides; the closed form is of the population.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import acutance
from acutance import theory
from acutance.mechanisms import decay_statistics
from acutance.scores import Features
from acutance.weights import Exp, Identity, ReLU, ReLU2

N, ROWS = 65536, 8


def scores_of(beta: float, gamma: float, seed: int) -> tuple[Tensor, Tensor]:
    """Queries and keys whose dot products are N(β, γ²), one query to each of 8 heads."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.tensor([gamma, beta], dtype=torch.float64).expand(1, ROWS, 1, 2)
    key = torch.ones(1, ROWS, N, 2, dtype=torch.float64)
    key[..., 0] = torch.randn(1, ROWS, N, generator=generator, dtype=torch.float64)
    return query, key


def measured(weights: object, beta: float, gamma: float, seed: int) -> float:
    query, key = scores_of(beta, gamma, seed)
    stats = acutance.row_statistics(query, key, score="dot", weights=weights)  # type: ignore[call-overload]
    assert stats.n_keys.eq(N).all()
    return float(stats.sparsity.mean())


@pytest.mark.parametrize("gamma", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("weights", ["softmax", Exp()], ids=["softmax", "exp"])
def test_exp(weights: object, gamma: float) -> None:
    """Standard error of the mean of 8 rows: 0.01 %, 0.04 % and 0.12 %."""
    want = math.exp(-(gamma**2) / 2)
    assert float(theory.sparsity_exp(gamma)) == pytest.approx(want)
    assert measured(weights, 0.4, gamma, seed=1) == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize(("beta", "gamma"), [(0.0, 1.0), (1.0, 1.0), (-1.0, 1.0), (2.0, 0.5)])
def test_relu2(beta: float, gamma: float) -> None:
    """Standard error of the mean: 0.17 %, 0.09 %, 0.42 % and 0.02 %."""
    want = float(theory.sparsity_relu2(beta, gamma))
    assert measured(ReLU2(), beta, gamma, seed=2) == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize(("beta", "gamma"), [(0.0, 1.0), (1.0, 1.0), (-0.5, 2.0)])
def test_identity(beta: float, gamma: float) -> None:
    """Standard error of the mean: 0.04 %."""
    want = float(theory.sparsity_identity(beta, gamma))
    assert measured(Identity(), beta, gamma, seed=3) == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("d", [1, 8])
def test_nonnegative_linear(d: int, is_causal: bool) -> None:
    """Features |z| of normal keys: σ/μ = √(π/2 − 1) of each; standard error below 0.1 %."""
    generator = torch.Generator().manual_seed(4)
    key = torch.randn(1, ROWS, N, d, generator=generator, dtype=torch.float64)
    query = torch.rand(1, ROWS, 1, d, generator=generator, dtype=torch.float64) + 0.1
    stats = acutance.row_statistics(
        query, key, is_causal=is_causal, query_offset=N - 1,
        score=Features(torch.abs, torch.abs), weights=ReLU(normalize="sum"),
    )  # fmt: skip
    ratio = math.sqrt(math.pi / 2 - 1)
    spread = query.norm(dim=-1) / query.abs().sum(-1)
    want = (1 + (ratio * spread) ** 2).rsqrt()
    assert float((stats.sparsity / want).mean()) == pytest.approx(1.0, abs=0.01)
    assert float((stats.sparsity / want - 1).abs().max()) < 0.01


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999, 0.99999])
def test_decay(decay: float) -> None:
    """No sample: the closed form and rows over 65536 ones agree with it to rounding."""
    theta = -math.log(decay)
    want = math.sqrt(math.tanh(N * theta / 2) / (N * math.tanh(theta / 2)))
    stats = decay_statistics(N, torch.tensor(decay, dtype=torch.float64))
    assert float(stats.sparsity) == pytest.approx(want, rel=1e-9)
    ones = torch.ones(1, 1, N, 1, dtype=torch.float64)
    score = Features(torch.relu, torch.relu, lambda k: torch.full_like(k[..., 0], decay).log())
    found = acutance.row_statistics(
        ones[:, :, :1], ones, is_causal=True, query_offset=N - 1, score=score,
        weights=ReLU(normalize="sum"),
    )  # fmt: skip
    assert float(found.sparsity[0, 0, -1]) == pytest.approx(want, rel=1e-9)
