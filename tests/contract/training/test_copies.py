"""What is copied, pickled or saved while a model is measured has nothing of what measures it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import acutance
from acutance import training
from tests.versions import any_global_hook

Opened = Callable[[nn.Module], AbstractContextManager[Any]]
WAYS: dict[str, Opened] = {
    "probe": lambda model: acutance.probe(model, verify=True),
    "structure": lambda model: acutance.probe(model, structure=True, max_rows=4),
    "provide": lambda model: acutance.probe(model, provide=True),
    "law": lambda model: acutance.apply(model, acutance.scaling.LogN(train_length=2)),
    "watch": training.AttentionWatch,
    "QKClip": training.QKClip,
    "monitor": lambda model: training.AttentionMonitor(every=1).watch(model),
}


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


class Mixed(nn.Module):
    """A layer of PyTorch, and one of acutance that keeps statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.theirs = nn.TransformerEncoderLayer(16, 2, batch_first=True)
        self.ours = acutance.nn.MultiheadAttention(16, 2, statistics="off")

    def forward(self, x: Tensor) -> Tensor:
        x = self.theirs(x)
        out, _ = self.ours(x, x, x)
        return out


def result(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def state(module: nn.Module) -> dict[str, Any]:
    """All that a module holds, but for its tensors and parts."""
    mine = {name: value for name, value in vars(module).items() if "hooks" in name}
    return {name: list(value) for name, value in mine.items()} | {"names": sorted(vars(module))}


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file], ids=["deepcopy", "save"])
@pytest.mark.parametrize("kind", ["llama", "mixed"])
@pytest.mark.parametrize("way", WAYS)
def test_copies_have_nothing_of_what_measures(
    way: str, kind: str, copied: Callable[[nn.Module], nn.Module]
) -> None:
    model = llama() if kind == "llama" else Mixed().eval()
    given = torch.randint(20, (2, 7)) if kind == "llama" else torch.randn(2, 7, 16)
    before = [state(module) for module in model.modules()]
    with torch.no_grad():
        plain = result(model(given))
        with WAYS[way](model) as opened:
            model(given)
            twin = copied(model)
            assert [state(module) for module in twin.modules()] == before
            inside = result(twin(given))
            if way not in ("law", "monitor") and hasattr(opened, "_calls"):
                seen = opened._calls
                twin(given)
                assert opened._calls == seen
        torch.testing.assert_close(result(twin(given)), plain, rtol=0, atol=1e-6)
        torch.testing.assert_close(inside, plain, rtol=0, atol=1e-6)
    assert [state(module) for module in model.modules()] == before
    assert not any_global_hook()


def test_a_model_is_pickled_inside_a_watch() -> None:
    model, x = Mixed().eval(), torch.randn(1, 5, 16)
    with training.AttentionWatch(model) as watch:
        model(x)
        assert model.ours.statistics == "graph"
        twin = pickle.loads(pickle.dumps(model))
        assert twin.ours.statistics == "off"
        twin(x)
    assert [rows.module for rows in watch.rows] == ["theirs.self_attn", "ours"]
