"""A llama of two layers with random weights, as transformers' model and as a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

HEADS, KEY_HEADS, LAYERS = 4, 2, 2
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def llama() -> Any:
    """The model, in evaluation mode."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 64}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS}
    config = LlamaConfig(
        **sizes, **heads, num_hidden_layers=LAYERS, max_position_embeddings=128, rms_norm_eps=1e-5
    )
    return LlamaModel(config).eval()


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokenizer: bool = True,
    keep: Callable[[str], bool] = lambda _: True,
    more: Callable[[gguf.GGUFWriter], object] = lambda _: None,
) -> Path:
    """Write the weights of :func:`llama` as llama.cpp's converter does.

    Args:
        path: of the file.
        architecture: what the file calls itself.
        kind: of the matrices; norms stay F32.
        tokenizer: whether to write a vocabulary of bytes.
        keep: whether to write a tensor of that name.
        more: adds further keys and tensors.
    """
    model = llama()
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if tokenizer:
        tokens = ["<s>", "</s>", "<unk>", *bytes_to_unicode().values(), "th"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
        writer.add_token_merges(["t h"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
    more(writer)
    for name, tensor in tensors(model).items():
        if keep(name):
            stored = kind if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The weights by their names in a GGUF file."""
    named = {}
    for name, parameter in model.state_dict().items():
        data = parameter.numpy()
        if name.startswith("layers."):
            _, layer, rest = name.removesuffix(".weight").split(".", 2)
            if rest.endswith(("q_proj", "k_proj")):  # pairs of a rotation lie side by side there
                heads = HEADS if rest.endswith("q_proj") else KEY_HEADS
                halves = data.reshape(heads, 2, -1, data.shape[-1])
                data = halves.swapaxes(1, 2).reshape(data.shape)
            named[f"blk.{layer}.{_NAMES[rest]}.weight"] = np.ascontiguousarray(data)
        else:
            other = {
                "embed_tokens.weight": "token_embd.weight",
                "norm.weight": "output_norm.weight",
            }
            named[other[name]] = data
    return named
