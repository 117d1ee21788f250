"""A module whose number of heads changes between passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import acutance


class Changing(torch.nn.Module):
    def forward(self, x: Tensor, heads: int) -> Tensor:
        split = x.unflatten(-1, (heads, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(split, split, split)


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (2, 4), (1, 4)])
def test_examples_of_other_heads_are_refused_with_both_numbers(heads: tuple[int, int]) -> None:
    model = Changing()
    with acutance.probe(model, examples=1, structure=True) as probe:
        for number in heads:
            model(torch.randn(2, 5, 16), number)
    (why,) = probe.summary().unread
    assert "only records of the same layer can be merged" in why
    assert f"with {heads[0]} head" in why
    assert f"with {heads[1]}" in why
