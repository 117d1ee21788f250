"""Calls of one module in one pass: numbered, of one layer's heads joined, of long loops merged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, DiffLlamaConfig, DiffLlamaForCausalLM

import acutance
from tests.versions import older

HEADS, WIDTH, LENGTH = 4, 8, 7


def rows_of(summary: acutance.HeadSummary, index: int) -> Tensor:
    start = sum(layer.heads for layer in summary.layers[:index])
    return summary.mean("entropy")[start : start + summary.layers[index].heads]


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_weights_shared_over_depth_are_shown_by_depth(kind: str) -> None:
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=20,
        embedding_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        attn_implementation=kind,
        initializer_range=1.0,
    )
    model, ids = AlbertModel(config).eval(), torch.randint(20, (2, 9))
    with torch.no_grad(), acutance.probe(model, verify=True) as probe:
        model(ids)
        model(ids)
    summary = probe.summary()
    base = summary.layers[0].module
    assert [layer.module for layer in summary.layers] == [base, f"{base}#1", f"{base}#2"]
    assert [layer.calls for layer in summary.layers] == [2, 2, 2]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    for depth, each in enumerate(weights):
        entropy = -torch.special.xlogy(each, each).sum(-1).mean((0, 2))
        torch.testing.assert_close(rows_of(summary, depth).float(), entropy, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(older("transformers", "5.2"), reason="diffllama attends once there")
def test_two_calls_of_an_interface_are_two_layers() -> None:
    """diffllama attends twice in a layer, to one half of the values each."""
    torch.manual_seed(0)
    config = DiffLlamaConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    names: dict[str, list[str]] = {}
    for kind in ("sdpa", "eager"):
        config._attn_implementation = kind
        model = DiffLlamaForCausalLM(config).eval()
        with torch.no_grad(), acutance.probe(model) as probe:
            model(torch.randint(20, (2, 9)))
        names[kind] = [layer.module for layer in probe.summary().layers]
        assert all(layer.calls == 1 for layer in probe.summary().layers)
    assert len(names["sdpa"]) > 2
    assert all("#" not in name or name.endswith("#1") for name in names["sdpa"])


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT / WIDTH**0.5, -1) @ value


class Sliced(nn.Module):
    """As diffusers slices attention: some of the heads, of all items of a batch one by one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.heads, self.processor = HEADS, SimpleNamespace(slice_size=size)

    def forward(self, x: Tensor) -> Tensor:
        flat, size = x.flatten(0, 1), self.processor.slice_size
        parts = [attend(part, part, part) for part in flat.split(size)]
        return torch.cat(parts).view_as(x)


class Loop(nn.Module):
    """One head after the other."""

    num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([attend(part, part, part) for part in x.unbind(1)], 1)


@pytest.mark.parametrize(
    ("model", "batch"), [(Sliced(1), 3), (Sliced(2), 3), (Sliced(4), 3), (Loop(), 3), (Loop(), 1)]
)
def test_heads_that_come_one_after_the_other_are_one_layer(model: nn.Module, batch: int) -> None:
    torch.manual_seed(0)
    x = 2.0 * torch.randn(batch, HEADS, LENGTH, WIDTH)
    with acutance.probe(model, verify=True) as probe:
        model(x)
        model(x)
    summary = probe.summary()
    if isinstance(model, Sliced) and model.processor.slice_size == HEADS:  # a call for each item
        assert [layer.heads for layer in summary.layers] == [HEADS] * batch
        return
    (layer,) = summary.layers
    assert (layer.module, layer.heads, layer.rows) == (
        type(model).__name__, HEADS, 2 * batch * LENGTH,
    )  # fmt: skip
    scores = x @ x.mT / WIDTH**0.5
    entropy = torch.distributions.Categorical(logits=scores).entropy().mean((0, 2))
    torch.testing.assert_close(rows_of(summary, 0).float(), entropy, atol=1e-5, rtol=1e-4)


class Steps(nn.Module):
    """A loop over time: one query at a time, on the keys so far."""

    num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(
            [
                attend(x[:, :, i : i + 1], x[:, :, : i + 1], x[:, :, : i + 1])
                for i in range(x.shape[2])
            ],
            2,
        )


def test_a_long_loop_is_one_layer_and_single_keys_count() -> None:
    model, x = Steps(), torch.randn(2, HEADS, 70, WIDTH)
    with acutance.probe(model) as probe:
        model(x)
    (layer,) = probe.summary().layers
    assert (layer.module, layer.heads, layer.calls, layer.rows) == ("Steps", HEADS, 70, 140)
    summary = probe.summary()
    scores = (x @ x.mT / WIDTH**0.5).masked_fill(~torch.ones(70, 70).tril().bool(), -torch.inf)
    weights = scores.softmax(-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1).mean((0, 2))
    torch.testing.assert_close(summary.mean("entropy").float(), entropy, atol=1e-5, rtol=1e-4)

    with acutance.probe(model) as probe:
        model(x[:, :, :3])
    layers = probe.summary().layers
    assert [layer.module for layer in layers] == ["Steps", "Steps#1", "Steps#2"]
    assert [layer.rows for layer in layers] == [2, 2, 2]  # the first sees a single key


def test_a_module_called_twice_from_outside_is_one_layer() -> None:
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True).eval(), torch.randn(2, 5, 16)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = layer

        def forward(self, x: Tensor) -> Tensor:
            x = self.attn(x, x, x)[0]
            return F.relu(self.attn(x, x, x)[0])

    for model, names in ((layer, ["MultiheadAttention"]), (Twice(), ["attn", "attn#1"])):
        with torch.no_grad(), acutance.probe(model) as probe:
            for _ in range(2):
                model(x, x, x) if model is layer else model(x)
        assert [each.module for each in probe.summary().layers] == names
        assert {each.calls for each in probe.summary().layers} == {2}
