"""Which tensors are followed to a softmax and from there, and for how long."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

import acutance
from acutance.capture.handwritten.tracker import Followed, Softmax, Tracker
from acutance.training import AttentionWatch


class Layer(nn.Module):
    """Attention by hand, of two heads, beside a projection that a matrix product computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.alive: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(x)
        self.alive.append(weakref.ref(hidden))
        output: Tensor = torch.softmax(x @ x.mT, -1) @ x
        return output + hidden @ self.weight


def test_a_softmax_into_a_tensor_that_is_given_may_be_unused() -> None:
    class Unused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.softmax(x @ x.mT, -1, out=torch.empty(1, 2, 5, 5))
            return x

    model = Unused()
    with (
        pytest.raises(acutance.ProbeError, match="no matrix product uses a softmax"),
        acutance.probe(model),
        torch.no_grad(),
    ):
        model(torch.randn(1, 2, 5, 4))


@torch.no_grad()
def test_factors_of_projections_are_not_kept() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: Tensor) -> list[bool]:
            for layer in self.layers:
                x = layer(x)
            return [layer.alive[0]() is not None for layer in self.layers]

    with AttentionWatch(model := Stack(), gradients=False, products=True) as watch:
        assert model(torch.randn(1, 2, 5, 4)) == [False] * 3
    assert [rows.module for rows in watch.rows] == ["layers.0", "layers.1", "layers.2"]


@torch.no_grad()
def test_a_product_with_parameters_in_the_scores_is_counted() -> None:
    class Summed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            scores = x @ x.mT + x @ self.weight
            return torch.softmax(scores, -1) @ x

    watch = AttentionWatch(model := Summed(), gradients=False, products=True)
    with pytest.raises(acutance.ProbeError, match="the sum of 2 products"), watch:
        model(torch.randn(1, 2, 4, 4))


@torch.no_grad()
def test_an_einsum_of_one_tensor_is_no_product() -> None:
    class Rearranged(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores = torch.einsum("blhe,bshe->blsh", x, x) + torch.arange(5.0)[:, None]
            weights = torch.softmax(torch.einsum("blsh->bhls", scores), -1)
            return weights @ x.transpose(1, 2)

    x, noted = torch.randn(1, 5, 2, 4), []
    with AttentionWatch(
        model := Rearranged(),
        gradients=False,
        products=True,
        noted=lambda name, query, key: noted.append((name, query, key)),
    ):
        model(x)
    (name, query, key), heads = noted[0], x.transpose(1, 2)
    assert name == "Rearranged"
    assert torch.equal(query, heads)
    assert torch.equal(key, heads)
    with (
        pytest.raises(acutance.ApplyError, match="have numbers added that are no mask"),
        acutance.apply(model, "ssmax"),
    ):
        model(x)


def test_tensors_may_be_freed_while_the_last_are_reported() -> None:
    tracker, tensors = Tracker(None), [torch.zeros(2, 3, 4)]

    class Collected(Followed):
        """An entry beside which the garbage collector frees a tensor."""

        @property
        def softmax(self) -> Softmax | None:
            """None, and another tensor is freed."""
            tensors.clear()
            return None

        @softmax.setter
        def softmax(self, _: Softmax | None) -> None: ...

    tracker.known[0] = Collected(weakref.ref(tracker))  # type: ignore[arg-type]
    tracker._entry(tensors[0]).product = True
    tracker.finish()
    assert not tensors
    assert not tracker.known
