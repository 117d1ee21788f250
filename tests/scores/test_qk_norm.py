"""Normalised queries and keys: formulas, starts, gradients, which side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from acutance.scores import (
    QKNorm,
    SwinGain,
    dot_tile,
)
from acutance.scores.modules import Kind, Sides
from tests.contract.scores.test_qk_norm import E, plain, rand


@pytest.mark.parametrize("sides", ["both", "query", "key"])
@pytest.mark.parametrize("kind", ["l2", "rms", "layer"])
def test_scores_are_those_of_the_normalised_vectors(kind: Kind, sides: Sides) -> None:
    query, key = rand(2, 4, 5, E) + 1, rand(2, 2, 7, E) - 2
    norm = QKNorm(E, kind, sides=sides, dtype=torch.float64)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.3 * torch.randn(E))
    q, k = query, key
    if sides != "key":
        q = plain(kind, query)
        if kind != "l2":
            q = q * norm.query_weight
        if kind == "layer":
            q = q + norm.query_bias
    if sides != "query":
        k = plain(kind, key)
        if kind != "l2":
            k = k * norm.key_weight
        if kind == "layer":
            k = k + norm.key_bias
    want = q @ k.repeat_interleave(2, 1).mT
    want = want * (1 if kind == "l2" else E**-0.5)
    torch.testing.assert_close(dot_tile(norm, query, key), want, rtol=1e-12, atol=1e-12)
    names = {name for name, _ in norm.named_parameters()}
    parts = {"l2": [], "rms": ["weight"], "layer": ["weight", "bias"]}[kind]
    both = ["query", "key"] if sides == "both" else [sides]
    assert names == {f"{side}_{part}" for side in both for part in parts}


@pytest.mark.parametrize("kind", ["l2", "rms", "layer"])
def test_gradients(kind: Kind) -> None:
    norm = QKNorm(3, kind, gain=SwinGain(2, dtype=torch.float64), dtype=torch.float64)
    names = [name for name, _ in norm.named_parameters()]

    def call(query: Tensor, key: Tensor, *values: Tensor) -> Tensor:
        q, k = torch.func.functional_call(norm, dict(zip(names, values, strict=True)), (query, key))
        return q @ k.repeat_interleave(2, 1).mT

    query, key = rand(1, 2, 2, 3).requires_grad_(), rand(1, 1, 2, 3).requires_grad_()
    values = [parameter.detach().clone().requires_grad_() for parameter in norm.parameters()]
    assert torch.autograd.gradcheck(call, (query, key, *values))
