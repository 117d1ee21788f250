"""Attention written out by hand: which softmaxes are attention, and where their heads are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance
from acutance.capture.head_axis import fold
from tests.contract.probing.test_softmaxes import (
    Written,
    in_windows,
    inputs,
)


def test_five_dimensions_without_a_number_of_heads_are_listed() -> None:
    with pytest.raises(
        ValueError, match=r"not known which dimension of its softmax \(2, 3, 4, 5, 6\) is heads"
    ):
        fold(torch.zeros(2, 3, 4, 5, 6), None)
    model = Written(in_windows, heads=None)
    with pytest.raises(acutance.ProbeError, match="it is not known which dimension of its softmax"):  # noqa: SIM117
        with acutance.probe(model):
            model(*inputs())


def test_a_softmax_of_one_number_is_none_of_attention() -> None:
    class Gated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = F.scaled_dot_product_attention(x, x, x)
            return output * torch.softmax(x.sum(), 0)

    model, x = Gated(), torch.randn(1, 2, 5, 4)
    want = model(x)
    with acutance.probe(model) as probe:
        assert torch.equal(model(x), want)
    assert [layer.calls for layer in probe.summary().layers] == [1]
    assert probe.summary().unread == ()


def test_a_power_of_a_matrix_is_no_attention() -> None:
    class Powers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            edges = (x @ x.mT).sigmoid()
            edges = edges / edges.sum(-1, keepdim=True)
            longer = 0.9 * torch.bmm(edges, 0.9 * torch.bmm(edges, edges))
            return F.scaled_dot_product_attention(x, x, x) + longer.mean()

    x, model = torch.randn(2, 6, 4), Powers()
    with acutance.probe(model, verify=True) as probe:
        model(x)
    assert [layer.status for layer in probe.summary().layers] == ["verified"]
    assert not probe.unread
    with acutance.apply(model, "ssmax") as law:
        model(x)
    assert law.calls == {"Powers": 1}
