"""What runs attention outside a forward pass, or where nothing can listen, is read or listed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance

TOLERANCE = 1e-5


def mean_entropy(scores: Tensor) -> Tensor:
    p = torch.softmax(scores.double(), -1)
    return -torch.xlogy(p, p).sum(-1).mean((0, 2))


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer PyTorch warns of scripts
            self.pool = torch.jit.script(Scripted())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer PyTorch warns of scripts
            self.gate = torch.jit.script(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(x, x, x)
        output: Tensor = self.gate(self.pool(x))
        return output


def test_a_scripted_child_is_listed_and_its_parent_read() -> None:
    model, x = Parent(), torch.randn(2, 3, 5, 8)
    plain = model(x)
    with acutance.probe(model) as probe:
        assert torch.equal(model(x), plain)
    summary = probe.summary()
    assert [layer.rows for layer in summary.layers] == [10]
    (line,) = summary.unread
    assert line.startswith("pool: torch.jit compiled it")
    assert summary.coverage == "Coverage: attention read in 1 module, not in 1: pool."
    assert summary.to_dict()["coverage"] == summary.coverage


class Coder(nn.Module):
    def attend(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    def decode(self, x: Tensor) -> Tensor:
        weights = torch.softmax(2.0 * (x @ x.mT), -1)
        return weights @ x

    forward = attend


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Coder(), Coder()


def test_methods_other_than_forward_are_read() -> None:
    model, x = Pair(), torch.randn(2, 3, 5, 8)
    plain = model.decoder.decode(model.encoder(x))
    with acutance.probe(model) as probe:
        hidden = model.encoder(x)
        assert torch.equal(model.decoder.decode(hidden), plain)
        model.decoder.attend(x)
    summary = probe.summary()
    assert [(layer.module, layer.rows) for layer in summary.layers] == [
        ("encoder", 10),
        ("decoder", 20),
    ]
    assert summary.unread == ()


def test_modules_around_the_model_are_no_part_of_it() -> None:
    model, x = Coder(), torch.randn(2, 3, 5, 8)

    class Trainer(nn.Module):
        def step(self) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x) + model(x)

    with acutance.probe(model) as probe:
        Trainer().step()
        F.scaled_dot_product_attention(x, x, x)
    assert [layer.calls for layer in probe.summary().layers] == [1]


def softmin(scores: Tensor) -> Tensor:
    return F.softmin(-scores, dim=-1)


def overload(scores: Tensor) -> Tensor:
    return torch.ops.aten.softmax.int(scores, -1)


def packet(scores: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten._softmax(scores, -1, False)
    return result


def safe_overload(scores: Tensor) -> Tensor:
    return torch.ops.aten._safe_softmax.default(scores, -1)


def inner(scores: Tensor) -> Tensor:
    return torch._softmax(scores, -1, False)


def safe(scores: Tensor) -> Tensor:
    return torch._safe_softmax(scores, -1)


def logarithm(scores: Tensor) -> Tensor:
    return torch.ops.aten._log_softmax.default(scores, -1, False).exp()


class Weighted(nn.Module):
    def __init__(self, softmax: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.softmax = softmax

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax(2.0 * (x @ x.mT)) @ F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    "softmax", [softmin, overload, packet, safe_overload, inner, safe, logarithm]
)
def test_softmaxes_by_other_names_are_read(softmax: Callable[[Tensor], Tensor]) -> None:
    model, x = Weighted(softmax), torch.randn(2, 3, 5, 8)
    plain = model(x)
    with acutance.probe(model, verify=True) as probe:
        assert torch.equal(model(x), plain)
    summary = probe.summary()
    assert [layer.source for layer in summary.layers] == ["scaled_dot_product_attention", "softmax"]
    assert summary.unread == ()
    expected = mean_entropy(2.0 * (x @ x.mT))
    assert torch.allclose(summary.mean("entropy")[3:], expected, atol=TOLERANCE, rtol=0)


def test_a_softmax_with_noise_of_its_own_is_listed() -> None:
    model, x = Weighted(lambda scores: F.gumbel_softmax(scores, dim=-1)), torch.randn(2, 3, 5, 8)
    with acutance.probe(model) as probe:
        model(x)
    assert [layer.source for layer in probe.summary().layers] == ["scaled_dot_product_attention"]
    (line,) = probe.unread
    assert "gumbel_softmax adds noise to its scores" in line


def test_an_exported_graph_is_read_beside_its_sdpa() -> None:
    x = torch.randn(2, 3, 5, 8)
    graph = torch.export.export(Weighted(lambda scores: scores.softmax(-1)), (x,)).module()
    with acutance.probe(graph) as probe:
        graph(x)
    assert [layer.source for layer in probe.summary().layers] == [
        "scaled_dot_product_attention",
        "softmax",
    ]


class LinearAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (F.elu(x) + 1) @ ((F.elu(x) + 1).mT @ x)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Coder(), LinearAttention()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x))
        return output


def test_coverage_names_attention_that_ran_unread() -> None:
    model, x = Mixed(), torch.randn(2, 3, 5, 8)
    with acutance.probe(model) as probe:
        model(x)
    summary = probe.summary()
    (line,) = summary.unread
    assert line == "second: LinearAttention ran, and nothing in it was read as attention"
    assert summary.coverage == "Coverage: attention read in 1 module, not in 1: second."


class Sparsemax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)).clamp(min=0)


def test_a_sparse_softmax_that_ran_unread_is_named_and_an_ordinary_one_is_not() -> None:
    model = nn.Sequential(Coder(), Sparsemax(), nn.Softmax(-1))
    with acutance.probe(model) as probe:
        model(torch.randn(2, 5, 8))
    assert probe.summary().unread == ("1: Sparsemax ran, and nothing in it was read as attention",)
