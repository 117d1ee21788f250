"""Run one call of a kernel under a probe, and compare it with the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import acutance
from tests.contract.kernel_functions.reference import recording

HEADS, GROUPS, WIDTH = 4, 2, 8


class Calls(nn.Module):
    """A module whose forward pass is one call."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self) -> Any:
        return self.call()


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(2.0)


def tensors(batch: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with two query heads for each key head, (B, L, H, E)."""
    return (
        tensor(batch, queries, HEADS, WIDTH, seed=1),
        tensor(batch, keys, GROUPS, WIDTH, seed=2),
        tensor(batch, keys, GROUPS, WIDTH, seed=3),
    )


def packed(queries: list[int], keys: list[int]) -> tuple[Tensor, ...]:
    """Packed query, key and value (T, H, E), and the cumulative lengths of both."""
    query, key, value = (part[0] for part in tensors(1, sum(queries), sum(keys)))
    return query, key, value, cumulative(queries), cumulative(keys)


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def assert_read(call: Callable[[], Any], source: str = "") -> acutance.HeadSummary:
    """The call is verified, and every head's entropy is the mean over the reference's rows."""
    model = Calls(call)
    with acutance.probe(model, verify=True) as probe, recording() as rows:
        model()
    assert probe.unread == []
    summary = probe.summary()
    (layer,) = summary.layers
    assert layer.status == "verified", layer
    if source:
        assert layer.source == source
    assert layer.rows == len(rows[0]) > 0
    means = torch.tensor([math.fsum(head) / len(head) for head in rows])
    torch.testing.assert_close(summary.mean("entropy").float(), means.float(), atol=2e-5, rtol=1e-4)
    return summary


def assert_listed(call: Callable[[], Any], *words: str) -> None:
    """The call is not read; the reason has these words, and the model runs on."""
    model = Calls(call)
    probe = acutance.probe(model, verify=True)
    try:
        with probe:
            assert model() is not None
    except acutance.ProbeError as error:
        text = str(error)
    else:
        raise AssertionError("the call was read")
    for word in words:
        assert word in text, text
