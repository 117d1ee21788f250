"""Tiny models whose attention is large enough for every fault to show."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
IDS = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(3))
_MIXED = ["sliding_attention", "full_attention"]


def build(kind: str, attention: str = "eager", **changes: Any) -> nn.Module:
    """A tiny model of one kind, with weights six times as large as at initialisation."""
    import transformers as hf

    torch.manual_seed(0)
    name, config = _config(kind, hf, changes)
    model: nn.Module = getattr(hf, name)._from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "sinks" in key:
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.mul_(6)
    return model


def _config(kind: str, hf: Any, changes: dict[str, Any]) -> tuple[str, Any]:
    """Class of a model, and its configuration."""
    if kind == "llama":
        return "LlamaForCausalLM", hf.LlamaConfig(**BASE, **changes)
    if kind == "mistral":
        return "MistralForCausalLM", hf.MistralConfig(**BASE, **{"sliding_window": 8, **changes})
    if kind == "qwen3":
        return "Qwen3ForCausalLM", hf.Qwen3Config(**BASE, head_dim=16, **changes)
    if kind == "gemma2":
        options = {"sliding_window": 8, "query_pre_attn_scalar": 32, "layer_types": _MIXED}
        return "Gemma2ForCausalLM", hf.Gemma2Config(**BASE, head_dim=16, **{**options, **changes})
    if kind == "gemma3":
        options = {"sliding_window": 8, "layer_types": _MIXED, **changes}
        sizes = {**BASE, "vocab_size": options.pop("vocab_size", 96)}
        return "Gemma3ForCausalLM", hf.Gemma3TextConfig(**sizes, head_dim=16, **options)
    if kind == "gpt_oss":
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}
        plain = {"rope_type": "default", "rope_theta": 1e4}
        config = hf.GptOssConfig(**BASE, head_dim=16, **experts, rope_parameters=plain, **changes)
        return "GptOssForCausalLM", config
    heads = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}
    if kind == "neox":
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        return "GPTNeoXForCausalLM", hf.GPTNeoXConfig(**heads, rope_parameters=rope, **changes)
    if kind == "bart":
        sizes = {f"{part}_{name}": 64 for part in ("encoder", "decoder") for name in ("ffn_dim",)}
        layers = {"encoder_layers": 1, "decoder_layers": 1}
        few = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 64}
        return "BartModel", hf.BartConfig(vocab_size=96, **sizes, **layers, **few)
    if kind == "mpnet":
        return "MPNetModel", hf.MPNetConfig(**heads, **changes)
    if kind == "modernbert":
        ends = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
        config = hf.ModernBertConfig(**heads, local_attention=16, layer_types=_MIXED, **ends)
        return "ModernBertModel", config
    assert kind == "bert"
    return "BertModel", hf.BertConfig(**heads, **changes)


def with_function(model: Any, function: Any, name: str = "planted", mask: Any = None) -> Any:
    """Let a model compute its attention with a function of transformers' interface."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, eager_mask if mask is None else mask)
    model.set_attn_implementation(name)
    return model


def repeated(x: Tensor, group: int) -> Tensor:
    """Key heads, one for each query head."""
    return x.repeat_interleave(group, 1)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as it should be: the base that faults are planted in."""
    group = query.shape[1] // key.shape[1]
    scores = (
        query @ repeated(key, group).mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    )
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    if s_aux is not None:
        sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ repeated(value, group)).transpose(1, 2).contiguous(), None
