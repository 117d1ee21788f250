"""Feature maps: named, non-negative where they say so, finite far out."""

from __future__ import annotations

import pytest
import torch

from acutance.mechanisms import FEATURE_MAPS, CosFormer, feature_map


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
    with pytest.raises(ValueError, match="length is a finite number above 0"):
        CosFormer(length=0)


def test_a_map_of_ones_own_is_taken_as_it_is() -> None:
    chosen = CosFormer(length=3)
    assert feature_map(chosen) is chosen
