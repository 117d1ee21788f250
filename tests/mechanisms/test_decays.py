"""Decays by name, and the closed forms of what they leave."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from acutance import row_statistics, theory
from acutance.mechanisms import alibi_decays, decay_statistics, retnet_decays
from acutance.rowstats import WeightStatistics, observe_weights
from acutance.scores import Features
from acutance.weights import ReLU

LAMBDAS = [1.0, 1 - 1e-12, 0.999999, 0.9995, 0.99, 0.5, 1e-3, 1e-30]


def test_retnet_decays_are_the_published_ones() -> None:
    found = retnet_decays(8, dtype=torch.float64).tolist()
    assert found == [1 - 2.0 ** (-5 - h) for h in range(8)]


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 20])
def test_alibi_decays_are_the_published_slopes(heads: int) -> None:
    def published(n: int) -> list[float]:  # as in the article's code
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        whole = 2 ** math.floor(math.log2(n))
        return published(whole) + published(2 * whole)[0::2][: n - whole]

    want = torch.tensor([math.exp(-slope) for slope in published(heads)], dtype=torch.float64)
    torch.testing.assert_close(alibi_decays(heads, dtype=torch.float64), want)


@pytest.mark.parametrize("lam", LAMBDAS)
def test_closed_forms_are_the_sums(lam: float) -> None:
    n = torch.tensor([0, 1, 2, 3, 50, 3000])
    decay = torch.tensor(lam, dtype=torch.float64)
    stats = decay_statistics(n, decay)
    for place, count in enumerate(n.tolist()):
        if count == 0:
            assert stats.n_keys[0] == 0
            assert stats.entropy[0].isnan()
            continue
        row = torch.exp(math.log(lam) * torch.arange(count - 1, -1, -1, dtype=torch.float64))
        exact = WeightStatistics(observe_weights(row, distribution=True))
        assert stats.available == exact.available
        assert {"entropy", "effective_keys", "sparsity"} <= set(exact.available)
        for name in exact.available:
            torch.testing.assert_close(
                stats[name][place], exact[name], rtol=1e-11, atol=1e-12, equal_nan=True
            )


@pytest.mark.parametrize("lam", [0.9, 0.999, 1.0])
def test_theory_predicts_what_is_measured(lam: float) -> None:
    stats = decay_statistics(4096, torch.tensor(lam, dtype=torch.float64))
    row = theory.predict("decay", 4096, lam=lam)
    for name in ("entropy", "effective_keys", "sparsity", "top_weight", "first_weight"):
        assert stats[name].item() == pytest.approx(getattr(row, name), rel=1e-10), name


def test_a_measurement_less_its_prediction_is_their_difference() -> None:
    stats = decay_statistics(torch.tensor([4096, 4096]), torch.tensor(0.9, dtype=torch.float64))
    away = stats - theory.predict("decay", 4096, lam=0.9)
    assert away.effective_keys.abs().max() < 1e-9
    assert away.sparsity.shape == (2,)


def test_effective_keys_stay_where_sparsity_vanishes() -> None:
    stats = decay_statistics(torch.tensor([10**4, 10**6, 10**9]), 0.99)
    torch.testing.assert_close(stats.effective_keys, torch.full((3,), 199.0), rtol=1e-5, atol=0)
    assert stats.sparsity[-1] < 5e-4


@pytest.mark.parametrize("lam", [1.0, 0.97, 0.2])
def test_the_gradient_in_the_decay_is_the_sums(lam: float) -> None:
    decay = torch.tensor(lam, dtype=torch.float64, requires_grad=True)
    ages = torch.arange(39, -1, -1, dtype=torch.float64)

    def gradient(stats: WeightStatistics) -> Tensor:
        total = stats.entropy + stats.effective_keys.log() + stats.sparsity
        return torch.autograd.grad(total, decay)[0]

    found = gradient(decay_statistics(40, decay))
    exact = gradient(WeightStatistics(observe_weights(decay**ages, distribution=True)))
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-9)


def test_attention_without_content_has_these_statistics() -> None:
    ones = torch.ones(1, 4, 500, 1, dtype=torch.float64)
    decay = alibi_decays(4, dtype=torch.float64)
    score = Features(torch.relu, torch.relu, lambda k: decay.log()[:, None].expand(k.shape[:3]))
    stats = row_statistics(ones, ones, is_causal=True, score=score, weights=ReLU(normalize="sum"))
    want = decay_statistics(torch.arange(1, 501), decay[:, None])
    assert {"entropy", "effective_keys", "sparsity"} <= set(want.available)
    for name in want.available:
        torch.testing.assert_close(
            stats[name][0], want[name], rtol=1e-11, atol=1e-12, equal_nan=True
        )


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"decay must be in \(0, 1\], got 1.5"):
        decay_statistics(3, 1.5)
    with pytest.raises(ValueError, match=r"decay must be in \(0, 1\], got 0"):
        decay_statistics(3, torch.tensor([0.5, 0.0]))
    with pytest.raises(ValueError, match="n must be at least 0, got -1"):
        decay_statistics(-1, 0.5)
    with pytest.raises(
        TypeError, match=r"n must contain whole numbers of keys, got torch\.float32"
    ):
        decay_statistics(torch.ones(2), 0.5)
    with pytest.raises(
        TypeError, match="decay must be a number or a floating-point tensor, got str"
    ):
        decay_statistics(3, "half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="heads must be at least 1, got 0"):
        retnet_decays(0)
