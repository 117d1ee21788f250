"""A probe and a law on a model that calls a compiled function of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2Model

import acutance
from acutance.scaling import LogN

IDS = torch.arange(12)[None]


@torch.no_grad()
def test_a_function_inside_the_model_is_still_compiled_under_a_law() -> None:
    graphs = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def activation(x: Tensor) -> Tensor:
        _, length, width = x.size()
        return torch.tanh(x) * (length / width)

    def model(activation: Any) -> GPT2Model:
        torch.manual_seed(0)
        config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
        config.bos_token_id = config.eos_token_id = 0
        built = GPT2Model(config).eval()
        for block in built.h:
            del block.mlp.act
            block.mlp.act = activation
        return built

    compiled = torch.compile(activation, backend=backend, dynamic=True)
    with acutance.probe(probed := model(compiled)) as probe:
        probed(IDS)
    assert len(probe.summary().layers) == 2
    assert not graphs  # a probe runs models uncompiled
    with acutance.apply(plain := model(activation), LogN(train_length=4)):
        expected = plain(IDS).last_hidden_state
    with acutance.apply(scaled := model(compiled), LogN(train_length=4)) as law:
        torch.testing.assert_close(scaled(IDS).last_hidden_state, expected)
    assert sorted(law.calls) == ["h.0.attn", "h.1.attn"]
    assert graphs
