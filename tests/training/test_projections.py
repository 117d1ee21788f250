"""Where queries and keys are made: layouts told from a forward, and what is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from acutance import training
from acutance.training.across_ranks import multiply
from acutance.training.qk_clip import HeadSlices, find_layouts
from tests.contract.training.test_projections import HEADS, WIDTH, Attend, attending


def test_weights_that_are_made_from_others_are_refused() -> None:
    model, x = attending(Attend, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.q_proj)
    clip = training.QKClip(model, 1.0)
    with clip:
        model(x)
    with pytest.raises(ValueError, match="no floating-point weight matrix that could be scaled"):
        clip.step()
    model, x = attending(Attend, 1)
    model.clip_qkv = 8.0
    with pytest.raises(ValueError, match=r"clamps queries and keys at clip_qkv=8\.0"):
        find_layouts(model, HEADS, WIDTH)
    model.clip_qkv = None
    model.query_layernorm = nn.LayerNorm(8)
    with pytest.raises(ValueError, match="query_layernorm normalises"):
        find_layouts(model, HEADS, WIDTH)


def test_slices_of_grouped_heads() -> None:
    rows = torch.arange(16)  # two key heads, each with two queries, a key and a value of width 2
    query, key = HeadSlices(rows, 0, 0, 8, 2, 2), HeadSlices(rows, 0, 4, 8, 2)
    assert [query[head].tolist() for head in range(4)] == [[0, 1], [2, 3], [8, 9], [10, 11]]
    assert [key[head].tolist() for head in range(2)] == [[4, 5], [12, 13]]


def test_a_scaled_slice_is_rounded_once() -> None:
    weight = torch.full((4, 2), 3.0, dtype=torch.bfloat16)
    multiply(weight, 0, 1, 2, 1 / 3)
    assert weight[:, 0].tolist() == [3.0, 1.0, 1.0, 3.0]  # the factor alone would be 0.33398
