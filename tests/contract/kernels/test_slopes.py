"""Gradient health and noise gain of every weighting, against autograd's Jacobian in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance import weights as w
from acutance.rowstats import RowStatistics, WeightStatistics
from acutance.weights import Weighting

HEADS, GROUP, L, S, E, V = 2, 2, 3, 6, 4, 3
BIAS = torch.tensor([0.5, -1.0, 0.0, 1.0], dtype=torch.float64)
CASES: dict[str, Weighting] = {
    name: kind() for name, kind in w.WEIGHTS.items() if name != "sink"
} | {
    "sink": w.Sink(BIAS),
    "warm": w.Softmax(temperature=2.0),
    "top 3": w.TopKSoftmax(3),
    "exp l2": w.Exp(normalize="l2"),
    "sigmoid head": w.Sigmoid(bias=BIAS),
    "relu sum": w.ReLU(normalize="sum"),
    "relu none": w.ReLU(normalize="none"),
    "relu2 sum": w.ReLU2(normalize="sum"),
    "power 3": w.Power(k=3.0),
    "power n": w.Power(k=1.5, normalize="n"),
    "identity none": w.Identity(normalize="none"),
    "entmax 1.3": w.Entmax(alpha=1.3),
}  # fmt: skip


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


QUERY, KEY = draw(1, 1, HEADS * GROUP, L, E), draw(2, 1, HEADS, S, E)
VALUE = draw(3, 1, HEADS, S, V) + 4.0
COLUMN, ROW = torch.arange(S), torch.arange(L)[:, None]
MASKS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "full": ({}, torch.ones(L, S, dtype=torch.bool)),
    "causal": ({"is_causal": True, "query_offset": 1}, COLUMN <= ROW + 1),
}


def jacobians(weighting: Weighting, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Trace and noise gain of each row from the whole Jacobians, (1, Hq, L)."""
    s = QUERY @ KEY.repeat_interleave(GROUP, 1).mT * E**-0.5
    v = VALUE.repeat_interleave(GROUP, 1)

    def both(s: Tensor) -> tuple[Tensor, Tensor]:
        a = weighting(s, seen)
        return a, a @ v

    by_weight, by_out = torch.autograd.functional.jacobian(both, s)  # type: ignore[no-untyped-call]
    trace, gain = torch.zeros(2, 1, HEADS * GROUP, L, dtype=s.dtype)
    for h in range(HEADS * GROUP):
        for i in range(L):
            trace[0, h, i] = by_weight[0, h, i, :, 0, h, i, :].trace()
            gain[0, h, i] = by_out[0, h, i, :, 0, h, i, :].square().sum()
    return trace, gain


@pytest.mark.grid(2)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CASES)
def test_both_are_read_from_the_jacobian(name: str, mask: str) -> None:
    options, seen = MASKS[mask]
    seen = seen.expand(1, HEADS * GROUP, L, S)
    trace, gain = jacobians(CASES[name], seen)
    if name == "warm":  # its logits are the scores over the temperature
        trace, gain = trace * 2.0, gain * 4.0
    stats = acutance.row_statistics(
        QUERY, KEY, VALUE, enable_gqa=True, noise=True, weights=CASES[name], **options
    )
    assert {"jacobian_trace", "noise_gain"} <= set(stats.available)
    assert gain.max() > 0
    torch.testing.assert_close(stats.noise_gain, gain, rtol=1e-6, atol=1e-8)
    if name not in ("softmax_one", "sink"):  # there the sink is an outcome of its own
        torch.testing.assert_close(stats.jacobian_trace, trace, rtol=1e-6, atol=1e-8)


def test_every_weighting_is_here() -> None:
    assert {type(weighting) for weighting in CASES.values()} == set(w.WEIGHTS.values())
    assert len(CASES) == 26


@pytest.mark.parametrize("weights", ["softmax", "softmax_one", "relu2"])
def test_scores_that_are_no_product_have_a_noise_gain_too(weights: str) -> None:
    """The same scores as a product and as a function: by tiles or by rows."""

    def product(q: Tensor, k: Tensor, start: int) -> Tensor:
        return q @ k.repeat_interleave(GROUP, 1).mT

    found = [
        acutance.row_statistics(
            QUERY, KEY, VALUE, enable_gqa=True, is_causal=True, noise=True, weights=weights,
            score=score,
        )
        for score in ("dot", product)
    ]  # fmt: skip
    assert isinstance(found[1], WeightStatistics if weights == "relu2" else RowStatistics)
    torch.testing.assert_close(found[0].noise_gain, found[1].noise_gain)


def test_what_was_not_asked_for_is_not_there() -> None:
    stats = acutance.row_statistics(QUERY, KEY, enable_gqa=True, weights="relu2")
    assert "noise_gain" not in stats.available
    assert stats.noise_gain.isnan().all()
    merged = stats.merge(stats)  # type: ignore[arg-type]
    assert "jacobian_trace" in stats.available
    assert "jacobian_trace" not in merged.available


def test_small_noise_moves_the_output_by_the_gain() -> None:
    """Sampled: the mean of 4000 squares has a standard error of at most √(2/4000) = 2.2 %."""
    generator = torch.Generator().manual_seed(5)
    s, v = draw(7, 1, 1, 1, 50), draw(8, 50, 6)
    sd = 1e-3
    for name in ("relu2 sum", "l1", "sparsemax", "sigmoid"):
        weighting = CASES[name]
        noise = torch.randn(4000, 1, 1, 50, generator=generator, dtype=torch.float64) * sd
        moved = (weighting(s + noise) - weighting(s)) @ v
        measured = moved.square().sum(-1).mean() / sd**2
        jacobian = weighting.jacobian(s, weighting(s), None)
        assert jacobian is not None
        g, left, right = jacobian
        whole = torch.diag(g.flatten())
        if left is not None and right is not None:
            whole = whole - torch.outer(left.flatten(), right.flatten())
        want = (v.T @ whole).square().sum()
        assert float(measured / want) == pytest.approx(1.0, abs=0.1), name
