"""Faults, each modelled on a thread that reports one like it.

A fault is a tiny model with one thing wrong. The thread is named by repository and number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tests.contract.verification.models import attend, build, repeated, with_function
from tests.versions import CACHE

Made = Callable[[], nn.Module]


class Fault(NamedTuple):
    """A planted fault.

    Attributes:
        thread: repository and number of the thread that it is modelled on.
        causes: what verify may call it.
        make: builds the model.
        backward: whether it is in the gradients only.
    """

    thread: str
    causes: tuple[str, ...]
    make: Made
    backward: bool = False


FAULTS: dict[str, Fault] = {}


def fault(thread: str, *causes: str, backward: bool = False) -> Callable[[Made], Made]:
    """Register a function that builds a model with one fault."""

    def add(make: Made) -> Made:
        FAULTS[make.__name__] = Fault(thread, causes, make, backward)
        return make

    return add


def _calls(kind: str, change: Callable[..., Any], **config: Any) -> nn.Module:
    """A model whose attention function gets its arguments through ``change``."""

    def function(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
    ) -> Any:
        return change(module, query, key, value, mask, given)

    return with_function(build(kind, **config), function)


# -- sinks ----------------------------------------------------------------------------------------


@fault("vllm-project/vllm#52156", "sinks dropped")
def sinks_swallowed_by_keywords() -> nn.Module:
    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        given.pop("s_aux", None)
        return attend(module, q, k, v, mask, **given)

    return _calls("gpt_oss", change)


@fault("vllm-project/vllm-metal#550", "sinks dropped")
def sinks_never_reach_the_kernel() -> nn.Module:
    return _own_attention(build("gpt_oss"), sinks=False)


@fault("pytorch/pytorch#181645", "sinks against log2")
def sinks_against_a_base_2_logarithm() -> nn.Module:
    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        sinks = given.pop("s_aux")
        group = q.shape[1] // k.shape[1]
        scores = q @ repeated(k, group).mT * given["scaling"] + mask
        share = torch.sigmoid(scores.logsumexp(-1) / math.log(2) - sinks[:, None])
        return attend(module, q, k, v, mask, **given)[0] * share.mT.unsqueeze(-1), None

    return _calls("gpt_oss", change)


@fault("pytorch/torchtitan#4796", "gradient of lse missing", backward=True)
def no_gradient_through_the_log_sum_exp() -> nn.Module:
    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        sinks = given.pop("s_aux")
        group = q.shape[1] // k.shape[1]
        scores = q @ repeated(k, group).mT * given["scaling"] + mask
        share = torch.sigmoid(scores.logsumexp(-1).detach() - sinks[:, None])
        return attend(module, q, k, v, mask, **given)[0] * share.mT.unsqueeze(-1), None

    return _calls("gpt_oss", change)


# -- windows --------------------------------------------------------------------------------------


@fault("vllm-project/vllm#3385", "window off by one")
def window_counts_one_key_more() -> nn.Module:
    model: Any = build("mistral")
    model.model.config = copy.deepcopy(model.config)  # which masks and caches are made from
    model.model.config.sliding_window += 1
    return model  # type: ignore[no-any-return]


@fault("unslothai/unsloth#8253", "window ignored")
def window_never_reaches_sdpa() -> nn.Module:
    import torch.nn.functional as F

    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        causal = q.shape[2] > 1 and q.shape[2] == k.shape[2]
        group = q.shape[1] // k.shape[1]
        k, v = repeated(k, group), repeated(v, group)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=given["scaling"])
        return output.transpose(1, 2), None

    return _calls("mistral", change)


@fault("vllm-project/vllm#5908", "window ignored")
def every_layer_attends_globally() -> nn.Module:
    model: Any = build("gemma2")
    model.model.config = copy.deepcopy(model.config)
    model.model.config.layer_types = ["full_attention"] * 2
    return model  # type: ignore[no-any-return]


@fault("vllm-project/vllm#7442", "window on the wrong layer", "window ignored")
def window_on_the_odd_layers() -> nn.Module:
    model: Any = build("gemma2")
    model.model.config = copy.deepcopy(model.config)
    model.model.config.layer_types = model.config.layer_types[::-1]
    return model  # type: ignore[no-any-return]


@fault("vllm-project/vllm#49795", "window on the wrong layer")
def window_though_every_layer_is_full() -> nn.Module:
    model: Any = build("gemma2", layer_types=["full_attention"] * 2)
    model.model.config = copy.deepcopy(model.config)
    model.model.config.layer_types = ["sliding_attention"] * 2  # the masks are made from this one
    return model  # type: ignore[no-any-return]


@fault("karpathy/nanochat#456", "window ignored")
def cached_decoding_ignores_the_window() -> nn.Module:
    from transformers import DynamicCache

    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        if q.shape[2] == 1:
            mask = torch.zeros_like(mask)
        return attend(module, q, k, v, mask, **given)

    model: Any = _calls("mistral", change)
    forward = model.model.forward

    def with_whole_cache(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_cache") and kwargs.get(CACHE) is None:
            kwargs[CACHE] = DynamicCache()
        return forward(*args, **kwargs)

    model.model.forward = with_whole_cache
    return model  # type: ignore[no-any-return]


@fault("huggingface/transformers#37574", "cache", "wrong window", "window off by one")
def sliding_cache_rolls_wrongly() -> nn.Module:
    from transformers import cache_utils

    class Rolled(cache_utils.DynamicCache):
        def update(self, key: Tensor, value: Tensor, index: int, *args: Any, **kwargs: Any) -> Any:
            key, value = super().update(key, value, index, *args, **kwargs)
            if key.shape[2] > 8:
                key = torch.cat([torch.roll(key[:, :, :-1], 1, 2), key[:, :, -1:]], 2)
            return key, value

    model: Any = build("mistral")
    forward = model.model.forward

    def with_rolled_cache(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_cache") and kwargs.get(CACHE) is None:
            kwargs[CACHE] = Rolled(config=model.config)
        return forward(*args, **kwargs)

    model.model.forward = with_rolled_cache
    return model  # type: ignore[no-any-return]


@fault("huggingface/transformers#40700", "wrong window")
def window_in_both_directions_too_narrow() -> nn.Module:
    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        near = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(-4).tril(4)
        mask = torch.zeros(()) if mask is None else mask
        mask = torch.where(near, mask, -torch.inf) if module.is_sliding else mask
        return attend(module, q, k, v, mask, **given)

    return _calls("gemma3", change, use_bidirectional_attention=True, sliding_window=17)


# -- softcap, scale, heads ------------------------------------------------------------------------


@fault("vllm-project/vllm-metal#665", "softcap missing")
def softcap_of_the_kernel_is_0() -> nn.Module:
    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        return attend(module, q, k, v, mask, **{**given, "softcap": None})

    return _calls("gemma2", change, attn_logit_softcapping=2.0)


@fault("EricLBuehler/mistral.rs#1928", "softcap missing")
def softcap_is_not_passed() -> nn.Module:
    model: Any = build("gemma2", attn_logit_softcapping=2.0)
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    return model  # type: ignore[no-any-return]


@fault("antonellof/ferrox#40", "wrong scale")
def scale_of_the_head_width() -> nn.Module:
    model: Any = build("gemma2")
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.head_dim**-0.5
    return model  # type: ignore[no-any-return]


@fault("Graylab/DL4Proteins-notebooks#12", "wrong scale")
def scale_of_the_embedding_width() -> nn.Module:
    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        return attend(module, q, k, v, mask, **{**given, "scaling": 64**-0.5})

    return _calls("llama", change)


@fault("onnx/onnx#7274", "heads grouped differently")
def key_heads_are_tiled() -> nn.Module:
    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        return attend(module, q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), mask, **given)

    return _calls("llama", change)


# -- masks ----------------------------------------------------------------------------------------


@fault("deepspeedai/DeepSpeed#1912", "padding ignored", "mask ignored")
def padding_mask_is_overwritten() -> nn.Module:
    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        return attend(module, q, k, v, None, **given)

    return _calls("bert", change)


@fault("deepspeedai/DeepSpeed#1913", "hidden keys counted")
def hidden_keys_have_a_score_of_0() -> nn.Module:
    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        hidden = 0.0 if mask is None else mask
        scores = (q @ k.mT * given["scaling"]).masked_fill(torch.as_tensor(hidden) < 0, 0.0)
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    return _calls("bert", change)


@fault("AnswerDotAI/ModernBERT#40", "padding ignored")
def sdpa_gets_no_padding_mask() -> nn.Module:
    model: Any = build("bert", "sdpa")
    for layer in model.encoder.layer:
        layer.attention.register_forward_pre_hook(_unmasked, with_kwargs=True)
    return model  # type: ignore[no-any-return]


def _unmasked(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 1:
        args = (args[0], None, *args[2:])
    return args, {name: None if name == "attention_mask" else x for name, x in kwargs.items()}


@fault("huggingface/nanoVLM#204", "documents mixed")
def packed_documents_see_each_other() -> nn.Module:
    model: Any = build("llama", "sdpa")
    forward = model.model.forward

    def without_documents(*args: Any, **kwargs: Any) -> Any:
        ids = kwargs["input_ids"]
        if kwargs.get("attention_mask") is None and kwargs.get(CACHE) is None:
            kwargs["attention_mask"] = torch.ones_like(ids)
        return forward(*args, **kwargs)

    model.model.forward = without_documents
    return model  # type: ignore[no-any-return]


@fault("pytorch/executorch#21749", "causal mask shifted")
def causal_mask_is_aligned_with_the_first_key() -> nn.Module:
    import torch.nn.functional as F

    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        if q.shape[2] == 1 or q.shape[2] == k.shape[2]:
            return attend(module, q, k, v, mask, **given)
        group = q.shape[1] // k.shape[1]
        k, v = repeated(k, group), repeated(v, group)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=given["scaling"])
        return output.transpose(1, 2), None

    return _calls("llama", change)


@fault("huggingface/transformers#42820", "causal by mistake", "causal by itself")
def encoder_is_causal_without_a_mask() -> nn.Module:
    import torch.nn.functional as F

    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=given["scaling"])
        return output.transpose(1, 2), None

    return _calls("bert", change)


@fault("rasbt/LLMs-from-scratch#1062", "mask inverted")
def boolean_mask_is_inverted() -> nn.Module:
    from transformers.masking_utils import sdpa_mask

    def inverted(*args: Any, **kwargs: Any) -> Any:
        mask = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
        return None if mask is None else torch.logical_not(mask)

    def function(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> Any:
        return attend(module, q, k, v, torch.where(mask, 0.0, -1e30), **given)

    return with_function(build("llama"), function, "planted_inverted", inverted)


# -- positions ------------------------------------------------------------------------------------


def _rotary(model: Any, change: Callable[[Any], None]) -> nn.Module:
    change((model.gpt_neox if hasattr(model, "gpt_neox") else model.model).rotary_emb)
    return model  # type: ignore[no-any-return]


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
}


@fault("unslothai/unsloth#4078", "positions")
def decoding_counts_padding() -> nn.Module:
    model: Any = build("llama")
    forward = model.model.forward

    def with_cache_positions(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        if cache is not None and cache.get_seq_length():
            start = cache.get_seq_length()
            length = kwargs["input_ids"].shape[1]
            kwargs["position_ids"] = torch.arange(start, start + length)[None]
        return forward(*args, **kwargs)

    model.model.forward = with_cache_positions
    return model  # type: ignore[no-any-return]


@fault("deepspeedai/DeepSpeed#8341", "RoPE scaling ignored")
def scaling_of_llama3_is_dropped() -> nn.Module:
    plain: Any = build("llama")
    rates = plain.model.rotary_emb.inv_freq
    return _rotary(build("llama", rope_parameters=_LLAMA3), lambda rope: rope.inv_freq.copy_(rates))


@fault("deepspeedai/DeepSpeed#4442", "wrong RoPE base")
def base_is_hardcoded() -> nn.Module:
    plain: Any = build("llama")
    rates = plain.model.rotary_emb.inv_freq
    config = {"rope_type": "default", "rope_theta": 1e6}
    return _rotary(build("llama", rope_parameters=config), lambda rope: rope.inv_freq.copy_(rates))


@fault("ml-explore/mlx-lm#1507", "wrong attention factor")
def explicit_attention_factor_is_ignored() -> nn.Module:
    model = build("qwen3", rope_parameters={**_YARN, "attention_factor": 1.0})

    def change(rope: Any) -> None:
        rope.attention_scaling = 0.1 * math.log(16) + 1

    return _rotary(model, change)


@fault("sgl-project/sglang#22711", "wrong attention factor")
def mscale_is_ignored() -> nn.Module:
    model = build("llama", rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0})

    def change(rope: Any) -> None:
        rope.attention_scaling = 0.1 * math.log(16) + 1

    return _rotary(model, change)


@fault("vllm-project/vllm#29111", "RoPE of another layer type")
def sliding_layers_rotate_as_global_ones() -> nn.Module:
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }

    def change(rope: Any) -> None:
        rope.sliding_attention_inv_freq.copy_(rope.full_attention_inv_freq)

    return _rotary(build("gemma3", rope_parameters=ropes), change)


@fault("ollama/ollama#13452", "RoPE scaling ignored")
def global_layers_lack_their_scaling() -> nn.Module:
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }

    def change(rope: Any) -> None:
        rope.full_attention_inv_freq.mul_(8)

    return _rotary(build("gemma3", rope_parameters=ropes), change)


@fault("vllm-project/vllm#863", "positions rounded")
def positions_in_bfloat16() -> nn.Module:
    model: Any = build("llama")

    class Rounded(type(model.model.rotary_emb)):  # type: ignore[misc]
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            rates = self.inv_freq.bfloat16()
            angle = (position_ids[..., None].bfloat16() * rates).float()
            angle = torch.cat([angle, angle], -1)
            return angle.cos(), angle.sin()

    model.model.rotary_emb.__class__ = Rounded
    return model  # type: ignore[no-any-return]


@fault("huggingface/candle#3948", "wrong pairs")
def neighbours_are_paired() -> nn.Module:
    return _own_attention(build("llama"), neighbours=True)


def _own_attention(model: Any, *, neighbours: bool = False, sinks: bool = True) -> nn.Module:
    """A model of Llama's form with an attention of its own.

    Args:
        model: the model.
        neighbours: whether neighbouring components are rotated together.
        sinks: whether the module's sinks are passed on.
    """
    kind = type(model.model.layers[0].self_attn)

    class Own(kind):  # type: ignore[misc, valid-type]
        def forward(
            self,
            hidden_states: Tensor,
            position_embeddings: Any = None,
            attention_mask: Any = None,
            **rest: Any,
        ) -> tuple[Tensor, None]:
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            parts = self.q_proj, self.k_proj, self.v_proj
            q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in parts)
            width = self.head_dim // 2
            cos, sin = (table[..., :width].unsqueeze(1) for table in position_embeddings)
            q, k = (_turned(x, cos, sin, neighbours) for x in (q, k))
            cache = rest.get(CACHE)
            if cache is not None:
                k, v = cache.update(k, v, self.layer_idx)
            function = AttentionInterface().get_interface(self.config._attn_implementation, attend)
            passed = {"s_aux": self.sinks} if sinks and hasattr(self, "sinks") else {}
            output = function(self, q, k, v, attention_mask, scaling=self.scaling, **passed)[0]
            return self.o_proj(output.reshape(*shape[:-2], -1)), None

    for layer in model.model.layers:
        layer.self_attn.__class__ = Own
    return with_function(model, attend, "planted_own")  # type: ignore[no-any-return]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """Vectors rotated, pairing neighbours or halves."""
    a, b = (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, -1)
    parts = a * cos - b * sin, b * cos + a * sin
    return torch.stack(parts, -1).flatten(-2) if neighbours else torch.cat(parts, -1)


@fault("AI-Hypercomputer/maxtext#4616", "wrong RoPE width")
def all_components_are_rotated() -> nn.Module:
    model: Any = build("neox")
    rates = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    model.gpt_neox.rotary_emb.inv_freq = rates
    return model  # type: ignore[no-any-return]


# -- precision and gradients ----------------------------------------------------------------------


@fault("pytorch/pytorch#103167", "scores rounded")
def scores_in_bfloat16() -> nn.Module:
    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        group = q.shape[1] // k.shape[1]
        scores = (q @ repeated(k, group).mT * given["scaling"]).bfloat16().float()
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return (weights @ repeated(v, group)).transpose(1, 2), None

    return _calls("llama", change)


@fault("marin-community/levanter#449", "gradient of groups averaged", backward=True)
def gradients_of_key_heads_are_not_summed() -> nn.Module:
    class Shared(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            return x.repeat_interleave(2, 1)

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient.unflatten(1, (-1, 2)).mean(2)

    def change(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        return attend(module, q, Shared.apply(k), Shared.apply(v), mask, **given)

    return _calls("llama", change)
