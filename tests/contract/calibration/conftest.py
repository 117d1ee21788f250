"""Small models with random weights, far from even attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}


def _configured(name: str) -> tuple[Any, Any]:
    import transformers as hf

    if name == "gpt2":
        sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        return hf.GPT2LMHeadModel, hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=None)
    if name == "gpt2-upcast":
        sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        return hf.GPT2LMHeadModel, hf.GPT2Config(**sizes, reorder_and_upcast_attn=True)
    if name == "llama":
        return hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED, pad_token_id=0)
    if name == "mistral":
        return hf.MistralForCausalLM, hf.MistralConfig(**GROUPED, sliding_window=5)
    if name == "qwen3":
        return hf.Qwen3ForCausalLM, hf.Qwen3Config(**GROUPED, head_dim=8)
    if name == "gpt-oss":
        own = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5, "head_dim": 8}
        return hf.GptOssForCausalLM, hf.GptOssConfig(**GROUPED, **own, pad_token_id=0)
    return hf.BertModel, hf.BertConfig(**SIZES)


def build(name: str, kind: str) -> torch.nn.Module:
    """A model by name, in one attention implementation; the weights depend on the name alone."""
    model_class, config = _configured(name)
    config = copy.deepcopy(config)
    config._attn_implementation = kind
    torch.manual_seed(3)
    model: torch.nn.Module = model_class._from_config(config, attn_implementation=kind)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if "sinks" in part or not parameter.isfinite().all():
                parameter.normal_(std=0.5 if "sinks" in part else 0.02)
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model.eval()


@pytest.fixture(scope="session")
def built() -> Callable[[str, str], torch.nn.Module]:
    made: dict[tuple[str, str], torch.nn.Module] = {}

    def get(name: str, kind: str = "sdpa") -> torch.nn.Module:
        if (name, kind) not in made:
            made[name, kind] = build(name, kind)
        return made[name, kind]

    return get


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(7))
