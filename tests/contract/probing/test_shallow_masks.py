"""Masks of −1e4 and the like: one number everywhere is a mask, and a probe always warns."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance

BATCH, HEADS, LENGTH, WIDTH, PADDED = 2, 3, 37, 8, 18


class Masked(nn.Module):
    """Attention with an additive mask, by SDPA or by hand."""

    def __init__(self, mask: Tensor, how: str) -> None:
        super().__init__()
        self.mask, self.how, self.num_heads = mask, how, HEADS

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.how == "sdpa":
            return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)
        scores = query @ key.mT * WIDTH**-0.5
        if self.how == "filled":
            scores = scores.masked_fill(self.mask < 0, float(self.mask.min()))
        else:
            scores = scores + self.mask
        return torch.softmax(scores, -1) @ value


def additive(number: float) -> Tensor:
    """Hides keys after the row, and the last keys from all rows: 1 to 19 keys are seen."""
    mask = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(
        torch.ones(LENGTH, LENGTH).triu(1).bool(), number
    )
    mask[..., LENGTH - PADDED :] = number
    return mask


def probed(mask: Tensor, how: str, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    qkv = [2 * torch.randn(BATCH, HEADS, LENGTH, WIDTH, generator=generator) for _ in range(3)]
    model = Masked(mask, how)
    plain = model(*qkv)
    with acutance.probe(model, verify=True, **options) as probe:
        assert torch.equal(model(*qkv), plain)
        model(*qkv)
    assert probe.unread == []
    return probe.summary()


@pytest.mark.parametrize("number", [-1e4, -30000.0, -65504.0])
@pytest.mark.parametrize("how", ["sdpa", "filled"])
def test_one_number_everywhere_is_read_as_a_mask(number: float, how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = probed(additive(-torch.inf), how)
    with pytest.warns(
        UserWarning, match=f"hides keys with {number:g}, which the probe reads as"
    ) as seen:
        summary = probed(additive(number), how)
    assert len(seen) == 1
    assert [layer.status for layer in summary.layers] == [layer.status for layer in expected.layers]
    for name in ("n_keys", "logit_std", "entropy", "top_weight"):
        assert torch.equal(summary.mean(name), expected.mean(name))


@pytest.mark.parametrize("how", ["sdpa", "added"])
def test_several_numbers_are_counted_as_keys_with_a_warning(how: str) -> None:
    mask = additive(-1e4)
    mask[..., LENGTH - PADDED :] = -2e4
    with pytest.warns(UserWarning, match="which the probe counts as visible keys") as seen:
        summary = probed(mask, how)
    assert len(seen) == 1
    assert summary.mean("n_keys").tolist() == [LENGTH] * HEADS


def test_provided_attention_leaves_such_a_call_to_the_model() -> None:
    with pytest.warns(UserWarning, match="reads as a mask"):
        summary = probed(additive(-1e4), "sdpa", provide=True)
    (line,) = summary.not_provided
    assert line == "Masked: its mask hides keys with a number above -1e9"
    assert float(summary.mean("n_keys").max()) < 19


def test_large_scores_and_biases_that_fall_with_distance_are_no_masks() -> None:
    steps = torch.arange(LENGTH).float()
    distance = 500.0 * (steps - steps[:, None]).abs()
    generator = torch.Generator().manual_seed(1)
    exploded = 2e5 * torch.randn(1, HEADS, LENGTH, LENGTH, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for bias, how in ((-distance[None, None], "sdpa"), (exploded, "added")):
            assert probed(bias, how).mean("n_keys").tolist() == [LENGTH] * HEADS
