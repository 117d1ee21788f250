"""Structure through the probe: what calls are made of, positions, tokens, states."""

from __future__ import annotations

import torch
from torch import nn

from acutance.probing.tokens import Tokens, special_ids
from tests.contract.probing.test_structure import llama


def test_special_tokens_of_a_configuration() -> None:
    assert special_ids(llama()) == (0, 1, 2)
    assert special_ids(nn.Linear(2, 2)) == ()


def test_tokens_that_do_not_fit_are_not_used() -> None:
    table, seen = nn.Embedding(9, 4), Tokens()
    with seen.follow(table):
        assert seen.keys(1, 3, 3, 2) is None
        table(torch.tensor([[1, 2, 3]]))
        assert seen.keys(2, 3, 3, 2).tolist() == [[1, 2, 3]] * 2  # type: ignore[union-attr]
        assert seen.keys(1, 4, 4, 3) is None
        assert seen.keys(1, 3, 5, 4).tolist() == [[-1, -1, 1, 2, 3]]  # type: ignore[union-attr]
        table(torch.tensor([4]))
        assert seen.keys(1, 1, 6, 3).tolist() == [[1, 2, 3, 4, -1, -1]]  # type: ignore[union-attr]
