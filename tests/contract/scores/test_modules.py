"""Trained scores start as the field starts them, and give what their functions give."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from acutance.scores import (
    Additive,
    AdditiveScore,
    General,
    GeneralScore,
    Location,
    LocationScore,
    additive,
    dot_tile,
    general,
    location,
)


def bounded(weight: Tensor, bound: float) -> None:
    """Uniform in ±bound: nothing beyond, the deviation within five standard errors."""
    assert weight.abs().max() <= bound
    # the variance of a uniform sample's square is 4/45 bound⁴
    error = 5 * math.sqrt(4 / 45 / weight.numel()) * bound**2
    assert weight.square().mean().item() == pytest.approx(bound**2 / 3, abs=error)


@pytest.mark.parametrize("heads", [None, 4])
def test_xavier_starts_head_by_head(heads: int | None) -> None:
    bound = math.sqrt(6 / (48 + 80))
    bounded(GeneralScore(48, 80, num_heads=heads).weight, bound)
    bounded(LocationScore(48, 80, num_kv_heads=heads).weight, bound)
    module = AdditiveScore(48, 80, 64, num_heads=heads, bias=True)
    bounded(module.query_weight, math.sqrt(6 / (48 + 64)))
    bounded(module.key_weight, math.sqrt(6 / (80 + 64)))
    bounded(module.vector, math.sqrt(6 / 65))
    assert module.bias is not None
    assert (module.bias == 0).all()


def test_xavier_is_torchs_own() -> None:
    torch.manual_seed(3)
    weight = GeneralScore(6, 9).weight
    torch.manual_seed(3)
    assert torch.equal(weight, nn.init.xavier_uniform_(torch.empty(6, 9)))


def test_the_articles_start() -> None:
    bounded(GeneralScore(64, init="paper").weight, 0.1)
    bounded(LocationScore(64, 50, init="paper").weight, 0.1)
    module = AdditiveScore(64, hidden=100, init="paper", bias=True)
    for weight in (module.query_weight, module.key_weight):
        # 6400 normal numbers: five standard errors of the deviation are 4.4 %
        assert weight.std().item() == pytest.approx(0.001, rel=0.045)
    assert (module.vector == 0).all()
    assert module.bias is not None
    assert (module.bias == 0).all()


def test_bahdanaus_start_is_uniform_and_can_leave() -> None:
    """v = 0 scores everything 0, but its gradient is not 0: the first step moves it."""
    module = AdditiveScore(8, init="paper")
    scores = module.tile(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8))
    assert (scores == 0).all()
    (scores * torch.randn_like(scores)).sum().backward()
    assert module.vector.grad is not None
    assert (module.vector.grad != 0).all()
    assert (module.query_weight.grad == 0).all()


def test_modules_are_their_functions() -> None:
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 6)
    module = GeneralScore(8, 6, num_heads=4)
    want = general(query, key, module.weight)
    torch.testing.assert_close(dot_tile(module, query, key), want)
    torch.testing.assert_close(dot_tile(General(module.weight), query, key), want)

    place = LocationScore(8, 9, num_kv_heads=2)
    want = location(query, place.weight, 5)
    torch.testing.assert_close(place.tile(query, key), want)
    torch.testing.assert_close(dot_tile(place, query, key), want)
    torch.testing.assert_close(Location(place.weight).tile(query, key), want)
    torch.testing.assert_close(place.tile(query, key[:, :, 3:], 3), want[..., 3:])

    net = AdditiveScore(8, 6, 16, num_heads=4, num_kv_heads=2, bias=True)
    want = additive(query, key, net.query_weight, net.key_weight, net.vector, net.bias)
    torch.testing.assert_close(net.tile(query, key), want)
    prepared, q, k = net.prepare(query, key)
    torch.testing.assert_close(prepared.tile(q, k), want)
    assert q.shape == (2, 4, 3, 16)
    assert k.shape == (2, 2, 5, 16)
    assert isinstance(net._score(), Additive)


def test_modules_train() -> None:
    """Ten steps towards scores that point one key ahead lower the loss by half."""
    torch.manual_seed(1)
    query = torch.randn(1, 1, 16, 8)
    key, want = query.roll(1, 2), torch.arange(16).roll(-1)
    for module in (GeneralScore(8), AdditiveScore(8, hidden=32), LocationScore(8, 16)):
        optimiser = torch.optim.Adam(module.parameters(), lr=0.1)
        losses = []
        for _ in range(30):
            if isinstance(module, AdditiveScore):
                s = module.tile(query, key)
            else:
                s = dot_tile(module, query, key)
            loss = nn.functional.cross_entropy(s[0, 0], want)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2, (module, losses[0], losses[-1])


def test_state_dicts_and_shapes_in_print() -> None:
    module = AdditiveScore(8, 6, 16, num_heads=4, num_kv_heads=2)
    assert set(module.state_dict()) == {"query_weight", "key_weight", "vector"}
    assert repr(module) == "AdditiveScore(4 × 16 × 8, 2 × 16 × 6)"
    assert repr(GeneralScore(3, 4)) == "GeneralScore(3 × 4)"
    assert repr(LocationScore(3, 4)) == "LocationScore(4 × 3)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GeneralScore(0), "query_width must be at least 1, got 0"),
        (lambda: GeneralScore(4, num_heads=0), "num_heads must be at least 1, got 0"),
        (lambda: GeneralScore(4, init="he"), "init must be one of xavier, paper, got 'he'"),
        (lambda: AdditiveScore(4, hidden=0), "hidden must be at least 1, got 0"),
        (lambda: AdditiveScore(4, num_kv_heads=2), "num_kv_heads=2 needs num_heads, got None"),
        (lambda: LocationScore(4, 0), "max_keys must be at least 1, got 0"),
    ],
)
def test_bad_parameters_are_named(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()
