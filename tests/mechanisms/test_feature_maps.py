"""Feature maps: non-negative but for the identity, and finite far out."""

from __future__ import annotations

import pytest
import torch

from acutance.mechanisms import FEATURE_MAPS
from acutance.mechanisms.features import cosformer


@pytest.mark.parametrize("name", sorted(FEATURE_MAPS))
def test_features_are_not_negative_but_for_the_identity(name: str) -> None:
    features = FEATURE_MAPS[name](torch.randn(200, 6, dtype=torch.float64))
    assert features.shape == (200, 12 if name == "hedgehog" else 6)
    assert bool((features >= 0).all()) == (name != "identity")


def test_elu1_keeps_small_features_where_elu_plus_one_rounds_to_zero() -> None:
    x = torch.tensor([[-30.0, -80.0, 0.0, 2.0]])
    found = FEATURE_MAPS["elu1"](x)
    torch.testing.assert_close(found, torch.tensor([[-30.0, -80.0, 0.0, 1.0986123]]).exp())
    assert (torch.nn.functional.elu(x)[0, 1] + 1) == 0


def test_cosformer_weighs_distance_by_its_cosine() -> None:
    features = cosformer(torch.ones(9, 1, dtype=torch.float64), torch.arange(9), 8)
    distance = (torch.arange(9)[:, None] - torch.arange(9)).double()
    torch.testing.assert_close(features @ features.mT, torch.cos(torch.pi / 16 * distance))
