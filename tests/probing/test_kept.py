"""Queries and keys of a model: what is kept of them, and that the file gives them back."""

from __future__ import annotations

import torch

from acutance.probing.query_key_sample import HEADS_PER_LAYER, TOKENS
from tests.contract.probing.test_kept import Attend, Twice, kept, tensors


def test_four_heads_of_each_layer_are_kept_with_the_keys_of_their_group() -> None:
    query, key = tensors()
    found = kept(Twice(), query, key)
    assert found.heads == tuple(
        f"{layer}/{head}" for layer in ("first", "second") for head in (0, 2, 4, 6)
    )
    assert len(found.heads) == 2 * HEADS_PER_LAYER
    assert torch.equal(found.query[:4], query[0, [0, 2, 4, 6]])
    assert torch.equal(found.key[:4], key[0, [0, 0, 1, 1]])
    assert torch.equal(found.value[4:], key[0, [0, 0, 1, 1]])
    assert not found.is_causal  # not every layer is


def test_a_scale_is_in_the_query_and_a_long_sequence_is_cut() -> None:
    query, key = tensors(heads=2, n=TOKENS + 5)
    found = kept(Attend(), query, key, scale=2.0, causal=True)
    assert found.length == TOKENS
    assert found.is_causal
    torch.testing.assert_close(found.query, query[0, :, :TOKENS] * 4)  # 2 = 4/√E
