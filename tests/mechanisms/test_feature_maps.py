"""Feature maps: named, non-negative where they say so, finite far out."""

from __future__ import annotations

import pytest
import torch

from acutance.mechanisms import (
    FEATURE_MAPS,
    CallableMap,
    CosFormer,
    decay_attention,
    feature_map,
    linear_attention,
    linear_state,
    linear_step,
)


@pytest.mark.parametrize("name", sorted(FEATURE_MAPS))
def test_weights_are_not_negative_where_the_map_says_so(name: str) -> None:
    chosen = feature_map(name)
    assert chosen.name == name
    assert chosen.source
    x, places = torch.randn(200, 6, dtype=torch.float64), torch.arange(200)
    a = chosen(x, places) @ chosen(torch.randn_like(x), places).mT
    assert bool((a >= -1e-12).all()) == chosen.nonnegative


def test_elu1_keeps_small_features_where_elu_plus_one_rounds_to_zero() -> None:
    x = torch.tensor([[-30.0, -80.0, 0.0, 2.0]])
    found = feature_map("elu1")(x, torch.arange(1))
    torch.testing.assert_close(found, torch.tensor([[-30.0, -80.0, 0.0, 1.0986123]]).exp())
    assert (torch.nn.functional.elu(x)[0, 1] + 1) == 0


def test_cosformer_weighs_distance_by_its_cosine() -> None:
    chosen, x = CosFormer(length=8), torch.ones(9, 1, dtype=torch.float64)
    a = chosen(x, torch.arange(9)) @ chosen(x, torch.arange(9)).mT
    distance = (torch.arange(9)[:, None] - torch.arange(9)).double()
    torch.testing.assert_close(a, torch.cos(torch.pi / 16 * distance))
    with pytest.raises(ValueError, match="length must be a finite number above 0"):
        CosFormer(length=0)


def test_a_map_of_ones_own_is_taken_as_it_is() -> None:
    chosen = CosFormer(length=3)
    assert feature_map(chosen) is chosen


def test_a_plain_function_is_a_feature_map() -> None:
    query, key, value = torch.randn(3, 1, 2, 300, 4, dtype=torch.float64).unbind(0)

    def features(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.elu(x) + 1

    for options in ({}, {"is_causal": True}):
        want, exact = linear_attention(query, key, value, return_stats=True, **options)
        out, stats = linear_attention(
            query, key, value, feature_map=features, return_stats=True, **options
        )
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(stats.effective_keys, exact.effective_keys)
    state = linear_state(key[:, :, :200], value[:, :, :200], feature_map=features)
    rest = [part[:, :, 200:] for part in (query, key, value)]
    torch.testing.assert_close(linear_step(state, *rest, feature_map=features)[0], want[:, :, 200:])


def test_a_module_learns_through_every_form() -> None:
    query, key, value = torch.randn(3, 1, 1, 70, 3, dtype=torch.float64).unbind(0)
    layer = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Softplus()).double()
    for options in ({}, {"is_causal": True}):
        out = linear_attention(query, key, value, feature_map=layer, chunk=16, **options)
        found = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
        q, k = layer(query), layer(key)
        a = q @ k.mT
        a = a.tril() if options else a
        dense = (a / a.sum(-1, keepdim=True)) @ value
        torch.testing.assert_close(out, dense)
        wanted = torch.autograd.grad(dense.square().sum(), list(layer.parameters()))
        for one, two in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, two)


def test_a_signed_function_says_so() -> None:
    x = torch.randn(1, 1, 9, 4)
    with pytest.raises(
        ValueError, match=r"must not have negative features, got -.*nonnegative=False"
    ):
        linear_attention(x, x, x, feature_map=torch.sin)
    signed = CallableMap(torch.sin, nonnegative=False)
    out, stats = decay_attention(x, x, x, decay=0.9, feature_map=signed, return_stats=True)
    assert out.shape == x.shape
    assert stats.sparsity.isnan().all()


def test_what_a_function_gives_is_checked() -> None:
    x = torch.ones(1, 1, 9, 4)
    with pytest.raises(ValueError, match=r"map \(..., length, E\) to \(..., length, F\), got"):
        linear_attention(x, x, x, feature_map=lambda x: x.sum(-2))
    with pytest.raises(TypeError, match="a feature map must return a Tensor, got list"):
        linear_attention(x, x, x, feature_map=lambda x: x.tolist())
    with pytest.raises(TypeError, match="or a function of a tensor, got CosFormer"):
        linear_attention(x, x, x, feature_map=CosFormer)
    with pytest.raises(TypeError, match="function must be callable, got str"):
        CallableMap("relu")  # type: ignore[arg-type]
