"""A small decoder whose attention matters."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def build(**changes: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None,
        "pad_token_id": 0, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()
    for part in model.parameters():  # sharper than at initialisation
        part.data *= 3
    return model


@pytest.fixture(params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return build(attn_implementation=request.param)
