"""Small configurations and models of any model type, with weights that make attention uneven."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zoo.special import CONFIGS

VOCABULARY = 199
WIDTH, HEADS, KEY_HEADS, HEAD_WIDTH = 64, 4, 2, 16
LARGEST = 40_000_000  # parameters: a model that stays larger is not small

#: Fields of configurations that say how large a model is, and what they become.
SIZES: dict[str, int] = {
    name: value
    for value, names in [
        (WIDTH, "hidden_size d_model n_embd embed_dim dim hidden_dim embedding_size emb_dim width "
        "projection_dim text_embed_dim projector_hidden_size out_hidden_size output_dim "
        "encoder_hidden_size decoder_hidden_size text_hidden_size encoder_hidden_dim d_embed "
        "fusion_hidden_size cross_attention_hidden_size text_dim vision_dim feature_size "
        "intermediate_size ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim mlp_dim d_ff ff_dim "
        "moe_intermediate_size shared_expert_intermediate_size feed_forward_hidden_size "
        "dense_intermediate_size intermediate_size_mlp decoder_intermediate_size ffn_hidden_size "
        "lru_width audio_embed_dim memory_attention_hidden_size fpn_hidden_size query_dim_total "
        "hidden_size_global mask_feature_size feature_dim adapter_out_dim proj_dim "
        "projection_size moe_shared_expert_intermediate_size expert_ffn_hidden_size "
        "decoder_dim encoder_dim language_dim input_dim resampler_dim vocab_hidden_size "
        "classifier_proj_size backbone_hidden_size image_text_hidden_size query_hidden_size "
        "memory_attention_feed_forward_hidden_size neck_hidden_size"),
        (HEADS, "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads attention_heads decoder_num_attention_heads heads "
        "encoder_num_attention_heads linear_num_value_heads linear_num_heads index_n_heads "
        "cross_attention_heads memory_attention_num_attention_heads swa_num_attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads"),
        (KEY_HEADS, "num_key_value_heads n_kv_heads num_kv_heads encoder_num_key_value_heads "
        "decoder_num_key_value_heads linear_num_key_heads num_local_experts num_experts "
        "n_routed_experts moe_num_experts n_shared_experts moe_num_shared_experts "
        "num_encoder_layers num_decoder_layers encoder_layers decoder_layers num_hidden_layers "
        "n_layer n_layers num_layers depth decoder_num_hidden_layers encoder_num_hidden_layers "
        "num_codevector_groups d_layers swa_num_key_value_heads memory_attention_num_layers "
        "num_hidden_groups resampler_depth num_blocks decoder_depth num_mtp_layers "
        "num_adapter_layers moe_topk num_experts_per_tok top_k_experts moe_k "
        "num_fusion_layers vision_layers text_layers d_coarse_layers num_relation_heads"),
        (HEAD_WIDTH, "head_dim d_kv d_head attention_head_size kv_channels kv_lora_rank "
        "qk_nope_head_dim v_head_dim global_head_dim linear_key_head_dim linear_value_head_dim "
        "linear_head_dim index_head_dim d_kv_dim attention_head_dim resampler_dim_head "
        "swa_head_dim num_mel_bins "
        "state_size mamba_d_state input_feat_per_channel num_conv_pos_embeddings ssm_state_size "
        "resampler_head_dim hidden_size_per_layer_input vocab_size_per_layer index_topk"),
        (8, "qk_rope_head_dim patch_size encoder_patch_size rotary_dim"),
        (24, "q_lora_rank max_source_positions mamba_chunk_size chunk_size"),
        (1, "n_group topk_group num_expert_group moe_layer_start_index first_k_dense_replace"),
        (64, "image_size img_size pretrain_image_size input_size_image"),
        (VOCABULARY, "vocab_size text_vocab_size vocab_size_per_layer_input input_vocab_size "
        "output_vocab_size"),
        (5, "sliding_window"),
        (6, "attention_chunk_size"),
        (4, "window_size num_frames num_query_tokens attention_window local_attention_window"),
        (12, "num_queries num_latents"),
    ]
    for name in names.split()
}  # fmt: skip


class TooLargeError(Exception):
    """A model that no small configuration makes small."""


def options(
    config_class: Any, sizes: dict[str, int], depth: int | None = None, rough: bool = False
) -> dict[str, Any]:
    """Keyword arguments that make a configuration small, those inside it too.

    Args:
        config_class: a configuration's class.
        sizes: fields by name, and what they become.
        depth: number of layers.
        rough: make every field small whose name sounds like a size, and set those of ``sizes``
            that are None.
    """
    given: dict[str, Any] = {}
    fields = _defaults(config_class)
    specials = iter(range(VOCABULARY - 1, 0, -1))
    for name, default in fields.items():
        if name in sizes and isinstance(default, int) and not isinstance(default, bool):
            given[name] = min(sizes[name], default) if default > 0 else default
        elif rough and name in sizes and default is None:
            given[name] = sizes[name]
        elif rough and (found := _roughly(name, default)) is not None:
            given[name] = found
        elif name in sizes and isinstance(default, list | tuple) and name.startswith("image_size"):
            given[name] = type(default)(sizes[name] for _ in default)
        elif name in _LISTS and isinstance(default, list | tuple):
            given[name] = type(default)(_LISTS[name](index) for index in range(len(default)))
        elif name.endswith(("token_id", "token_index", "start_id", "end_id")) and _above(default):
            given[name] = next(specials)
    if depth is not None:
        given |= {name: depth for name in _DEPTHS if name in given}
    for name, inner in _inner(config_class).items():
        given[name] = {"model_type": inner.model_type, **options(inner, sizes, depth, rough)}
    for name, value in _TOGETHER.items():
        if name in fields and value[0] in fields:
            given[name] = value[1]
    return _merged(given, CONFIGS.get(getattr(config_class, "model_type", ""), {}))


def _merged(given: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with others over them, those of inner configurations too."""
    merged = dict(given)
    for name, value in over.items():
        inner = merged.get(name)
        both = isinstance(value, dict) and isinstance(inner, dict) and "model_type" in inner
        merged[name] = _merged(inner, value) if both and isinstance(inner, dict) else value
    return merged


def _roughly(name: str, default: Any) -> Any:
    """A small value of a field whose name sounds like a size; None for any other."""
    if "vocab" in name or "position" in name or "image" in name:
        return None
    if _SIZE.search(name):
        if type(default) is int and default > WIDTH:
            return WIDTH
        if isinstance(default, list | tuple) and all(type(one) is int for one in default):
            return type(default)(min(one, WIDTH // 2) for one in default)
    if _COUNT.search(name) and type(default) is int and default > 2:
        return HEADS if "heads" in name else 2
    return None


_SIZE = re.compile(r"(size|dim|width|channel|plane|hidden|inner|latents|model|dff)s?$")
_COUNT = re.compile(r"(heads|layers|depth|blocks)$")


#: Fields that must agree with another, or that matter where they are None: set where both exist.
_TOGETHER: dict[str, tuple[str, Any]] = {
    "head_dim": ("qk_rope_head_dim", 8),
    "num_key_value_heads": ("kv_lora_rank", HEADS),
    "num_experts_per_tok": ("n_routed_experts", 2),
    "attn_layer_indices": ("mamba_d_state", [1]),
    "attn_layer_period": ("attn_layer_offset", 2),
    "attn_layer_offset": ("attn_layer_period", 1),
    "window_size": ("fullatt_block_indexes", 32),
    "fullatt_block_indexes": ("window_size", [1]),
    "prediction_length": ("context_length", 4),
}


def _inner(config_class: Any) -> dict[str, Any]:
    """Classes of the configurations inside one."""
    inside = getattr(config_class, "sub_configs", None) or {}
    found = {name: inner for name, inner in inside.items() if dataclasses.is_dataclass(inner)}
    if len(found) < len(inside):  # any model type may stand there: take the usual one
        try:
            usual = config_class()
        except Exception:
            return found
        for name in inside:
            part = getattr(usual, name, None)
            if name not in found and part is not None and dataclasses.is_dataclass(type(part)):
                found[name] = type(part)
    return {name: inner for name, inner in found.items() if name in _defaults(config_class)}


_LISTS: dict[str, Any] = {
    "depths": lambda index: 1,
    "hidden_sizes": lambda index: 32 * 2 ** min(index, 3),
    "embed_dims": lambda index: 32 * 2 ** min(index, 3),
    "num_heads": lambda index: 2 ** min(index, 3),
    "conv_dim": lambda index: 32,
    "tdnn_dim": lambda index: 32,
    "neck_hidden_sizes": lambda index: 32,
}
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "depth")


def _defaults(config_class: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def _above(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 100


def configurations(config_class: Any) -> Iterator[Any]:
    """Small configurations to try, the smallest first."""
    deeper = _depth_of_all_kinds(config_class)
    depths = [deeper] if deeper else [None, 4, 6]
    for depth in depths:
        yield lambda depth=depth: _mended(config_class(**options(config_class, SIZES, depth)))
    few = {name: SIZES[name] for name in _DEPTHS}
    few |= dict.fromkeys(("decoder_layers", "num_experts", "n_routed_experts"), 2)
    yield lambda: _mended(config_class(**options(config_class, SIZES, deeper, rough=True)))
    yield lambda: _mended(config_class(**options(config_class, few, deeper)))
    yield config_class


def _depth_of_all_kinds(config_class: Any) -> int | None:
    """How many layers it takes until each kind of layer has come once; None for one kind."""
    try:
        config = config_class()
    except Exception:
        return None
    text = text_config(config)
    for name in (
        "layer_types",
        "layers_block_type",
        "layers_type",
        "block_types",
        "attn_type_list",
    ):
        kinds = getattr(text, name, None)
        if isinstance(kinds, list | tuple) and len(set(map(str, kinds))) > 1:
            words = [str(kind) for kind in kinds]
            return max(2, 1 + max(words.index(kind) for kind in set(words)))
    return None


def text_config(config: Any) -> Any:
    """The configuration of the part that reads text, if it is known which that is."""
    try:
        return config.get_text_config()
    except (AttributeError, ValueError):  # there may be two
        return config


def _mended(config: Any) -> Any:
    """Bring rotary sections, which must add up to half a head, to the small head's width."""
    for part in _parts(config):
        rope = getattr(part, "rope_parameters", None)
        ropes = [rope, *rope.values()] if isinstance(rope, dict) else []
        if ropes and "mrope_section" in _source(type(part)):
            ropes[0].setdefault("mrope_section", [2, 3, 3])
        for each in ropes:
            sections = each.get("mrope_section") if isinstance(each, dict) else None
            if sections:
                width = (
                    getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
                )
                half = int(width * float(each.get("partial_rotary_factor", 1.0) or 1.0)) // 2
                share = [max(1, half * s // sum(sections)) for s in sections]
                share[-1] += half - sum(share)
                each["mrope_section"] = share
    return config


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", None) or {}:
        inner = getattr(config, name, None)
        if inner is not None and hasattr(inner, "to_dict"):
            yield from _parts(inner)


def config_class_of(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def classes_of(model_type: str, config_class: Any) -> list[Any]:
    """Model classes of a configuration, the plainest first."""
    import transformers
    from transformers.models.auto import modeling_auto

    names: list[str] = []
    for mapping in ("MODEL_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"):
        listed = getattr(modeling_auto, mapping).get(model_type)
        names += [listed] if isinstance(listed, str) else list(listed or ())
    found = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    others = []
    for module in _modules(config_class):
        others += [
            value
            for value in vars(module).values()
            if inspect.isclass(value)
            and getattr(value, "config_class", None) is config_class
            and value.__module__ == module.__name__
            and not value.__name__.endswith("PreTrainedModel")
        ]
    others.sort(key=lambda value: ("For" in value.__name__, len(value.__name__)))
    return [*found, *(other for other in others if other not in found)]


def _modules(config_class: Any) -> Iterator[Any]:
    """Modules beside a configuration's own that speak of it and define models."""
    package = config_class.__module__.rpartition(".")[0]
    folder = Path(inspect.getfile(config_class)).parent
    for file in sorted(folder.glob("modeling_*.py")):
        if config_class.__name__ in file.read_text(encoding="utf-8"):
            with contextlib.suppress(ImportError):
                yield importlib.import_module(f"{package}.{file.stem}")


def _source(config_class: Any) -> str:
    """Code of the models beside a configuration."""
    folder = Path(inspect.getfile(config_class)).parent
    return "".join(f.read_text(encoding="utf-8") for f in sorted(folder.glob("modeling_*.py")))


def build(model_class: Any, config: Any, implementation: str | None) -> Any:
    """A model with uneven attention, in evaluation mode.

    Raises:
        TooLargeError: if it stays large.
    """
    config = copy.deepcopy(config)
    with torch.device("meta"):
        try:
            size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
        except (NotImplementedError, RuntimeError):
            size = 0  # some count on values while they are built
    if size > LARGEST:
        raise TooLargeError(f"{size / 1e6:.0f} million parameters where 40 are the most")
    torch.manual_seed(0)
    extra = {} if implementation is None else {"attn_implementation": implementation}
    model = uneven(model_class._from_config(config, **extra)).eval()
    if type(model).forward is torch.nn.Module.forward:
        if hasattr(model, "encode"):  # a tokenizer of images or sounds
            model.forward = model.encode
        else:  # a row of models, of which each has its turn
            parts = [part for part in model.children() if hasattr(part, "main_input_name")]
            model.forward = parts[0].forward
    return model


#: Weights left alone: logarithms of a box's sides, and convolutions without normalisations. Larger
#: ones overflow.
_AS_DRAWN = ("enc_out_bbox_embed", "dac_encoder")


def uneven(model: Any) -> Any:
    """Scale matrices so that a layer keeps its input's size, and give vectors some spread.

    As they are drawn, weights are so small that every row of attention is nearly even, and then no
    mistake in a score shows.
    """
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if not parameter.numel() or any(part in name for part in _AS_DRAWN):
                continue
            if not bool(parameter.isfinite().all()):
                parameter.zero_()
            noise = torch.randn(parameter.shape, generator=chance, dtype=torch.float32)
            if parameter.dim() < 2:
                parameter.add_(noise, alpha=1.0 if "sink" in name else 0.05)
                continue
            wanted = 1.0 if "embed" in name else 1.5 / math.sqrt(parameter[0].numel())
            size = float(parameter.float().std()) if parameter.numel() > 1 else 0.0
            if size < 1e-12:
                parameter.add_(noise, alpha=wanted)
            elif size < wanted:
                parameter.mul_(wanted / size)
    return model
