"""Transformers of diffusers, small, with inputs read off their signatures."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zoo.inputs import noise
from zoo.libraries import Built, ready
from zoo.small import HEAD_WIDTH, HEADS, VOCABULARY, WIDTH

TEXT = 6  # tokens of the text
CHANNELS = 4

#: Figures by the words in a parameter's name, the first that fits.
_FIGURES: list[tuple[str, Any]] = [
    (r"vocab_size|codebook_size", VOCABULARY),
    (r"(kv|key_value)\w*heads", HEADS),
    (r"heads$", HEADS),
    (r"head_dim$", HEAD_WIDTH),
    (r"(layers|blocks|depth)$", 2),
    (r"^(in|out|io|latent)_channels$|^(in|out)_(visual_)?dim$", CHANNELS),
    (r"sample_(size|height|width)$|pos_embed_max_size", 8),
    (r"sample_frames$|video_length", 5),
    (r"norm_num_groups", 4),
    (r"num_experts$", 4),
    (r"(dim|size|channels|dims|features|model)\d?$", WIDTH),
]
_KEPT = ("scale", "eps", "theta", "patch_size", "kernel", "max_pos", "max_size", "vocab_dim")


def small(made: Any) -> dict[str, Any]:
    """Arguments that make a transformer small."""
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(made.__init__).parameters.items():
        default = parameter.default
        if re.search(r"axes|rope_axes|rope_dim", name) and isinstance(default, list | tuple):
            if "lens" not in name:
                given[name] = type(default)(_axes(len(default)))
        elif name == "mrope_section":
            given[name] = (2, 3, 3)
        elif name in ("in_channels", "patch_size") and default is None:
            given[name] = CHANNELS if name == "in_channels" else 2
        elif type(default) is int and not any(word in name for word in _KEPT):
            figure = next((f for words, f in _FIGURES if re.search(words, name)), None)
            if figure is not None and default > 0:
                given[name] = min(default, figure)
    return given


def _axes(count: int) -> list[int]:
    """Even shares of a head's width."""
    share = [HEAD_WIDTH // count // 2 * 2] * count
    share[0] += HEAD_WIDTH - sum(share)
    return share


def models(name: str) -> Iterator[Callable[[], Built]]:
    """A transformer and the inputs to try with it; without text where there is a choice, too."""
    from diffusers.models import transformers

    made = getattr(transformers, name)

    def make() -> Built:
        torch.manual_seed(0)
        model = ready(made(**small(made) | SPECIAL.get(name, {})))
        return model, list(_inputs(model, small(made) | SPECIAL.get(name, {})))

    yield make


def _inputs(model: Any, sizes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    parameters = inspect.signature(model.forward).parameters
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in (2, 4)]
    useful = [n for n in parameters if n in _USEFUL and n not in required]
    channels = int(sizes.get("in_channels") or CHANNELS)
    shapes = [
        *((2, channels, 8, 8), (2, channels, 4, 8, 8), (2, 4, channels, 8, 8)),
        *((2, 16, channels), (2, channels, 16), (2, 16, WIDTH), (2, WIDTH)),
    ]
    main = required[0] if required else "hidden_states"
    without = [name for name in required + useful if name not in _SELDOM]
    for shape, names, whole in itertools.product(
        shapes, (required + useful, without, required), (True, False)
    ):
        given: dict[str, Any] = {main: noise(*shape)}
        if main == "x":  # a list of images
            given = {main: [noise(channels, 1, 8, 8)] * 2}
        for other in names:
            if other != main and other in _MAKERS:
                given[other] = _MAKERS[other](model, shape, whole)
        yield given


def _places(model: Any, count: int) -> torch.Tensor:
    axes = getattr(getattr(model, "config", None), "axes_dims_rope", None) or (1, 1, 1)
    return torch.arange(count)[:, None].repeat(1, len(axes)).float()


_MAKERS: dict[str, Callable[[Any, tuple[int, ...], bool], Any]] = {
    "encoder_hidden_states": lambda m, s, w: noise(
        2, sum(getattr(m, "condition_lengths", [TEXT])), WIDTH
    ),
    "encoder_hidden_states_t5": lambda m, s, w: noise(2, TEXT, WIDTH),
    "encoder_hidden_states_mask": lambda m, s, w: torch.ones(2, TEXT, dtype=torch.bool),
    "encoder_attention_mask": lambda m, s, w: torch.ones(2, TEXT, dtype=torch.bool if w else None),
    "attention_mask": lambda m, s, w: torch.ones(2, TEXT, dtype=torch.bool),
    "encoder_mask": lambda m, s, w: torch.ones(2, TEXT, dtype=torch.bool),
    "text_embedding_mask": lambda m, s, w: torch.ones(2, TEXT),
    "text_embedding_mask_t5": lambda m, s, w: torch.ones(2, TEXT),
    "timestep": lambda m, s, w: torch.tensor([3, 5]) if w else torch.tensor([0.3, 0.5]),
    "timesteps": lambda m, s, w: torch.tensor([3, 5]),
    "timestep_r": lambda m, s, w: torch.tensor([0.1, 0.2]),
    "r_timestep": lambda m, s, w: torch.tensor([1, 2]) if w else torch.tensor([0.1, 0.2]),
    "pooled_projections": lambda m, s, w: noise(2, WIDTH),
    "pooled_embeds": lambda m, s, w: noise(2, WIDTH),
    "guidance": lambda m, s, w: torch.tensor([3.0, 4.0]),
    "img_ids": lambda m, s, w: _places(m, s[1] if len(s) == 3 else 16),
    "txt_ids": lambda m, s, w: _places(m, TEXT),
    "class_labels": lambda m, s, w: torch.tensor([1, 2]),
    "original_size": lambda m, s, w: torch.tensor([[16, 16], [16, 16]]),
    "target_size": lambda m, s, w: torch.tensor([[16, 16], [16, 16]]),
    "crop_coords": lambda m, s, w: torch.tensor([[0, 0], [0, 0]]),
    "image_rotary_emb": lambda m, s, w: None,
    "img_shapes": lambda m, s, w: [[(1, 4, 4)]] * 2,
    "img_mask": lambda m, s, w: torch.ones(2, 16, dtype=torch.bool),
    "num_frames": lambda m, s, w: 1,
    "height": lambda m, s, w: 4,
    "width": lambda m, s, w: 4,
    "text_bth": lambda m, s, w: noise(2, TEXT, WIDTH),
    "text_lens": lambda m, s, w: torch.tensor([TEXT, TEXT]),
    "proj_embedding": lambda m, s, w: noise(2, WIDTH),
    "inputs_embeds": lambda m, s, w: noise(2, 8, WIDTH),
    "global_hidden_states": lambda m, s, w: noise(2, WIDTH) if w else noise(2, 1, WIDTH),
    "context_latents": lambda m, s, w: noise(2, 16, 8),
    "encoder_hidden_states_2": lambda m, s, w: noise(2, TEXT, WIDTH),
    "encoder_attention_mask_2": lambda m, s, w: torch.ones(2, TEXT, dtype=torch.bool),
    "indices_latents": lambda m, s, w: torch.arange(4).repeat(2, 1),
    "audio_hidden_states": lambda m, s, w: noise(2, 8, CHANNELS),
    "audio_encoder_hidden_states": lambda m, s, w: noise(2, TEXT, WIDTH),
    "audio_num_frames": lambda m, s, w: 8,
    "control_hidden_states": lambda m, s, w: noise(2, 8, 4, 8, 8),
    "t": lambda m, s, w: torch.tensor([0.3, 0.5]),
    "cap_feats": lambda m, s, w: [noise(TEXT, WIDTH)] * 2,
    "position_ids": lambda m, s, w: _places(m, TEXT + 16),
    "prior_token_id": lambda m, s, w: torch.randint(0, 100, (2, 16)),
    "prior_token_drop": lambda m, s, w: torch.zeros(2, 16, dtype=torch.bool),
    "image_embeds": lambda m, s, w: noise(2, 3, WIDTH),
    "added_cond_kwargs": lambda m, s, w: {"resolution": None, "aspect_ratio": None},
    "visual_rope_pos": lambda m, s, w: [torch.arange(4)] * 3,
    "text_rope_pos": lambda m, s, w: torch.arange(TEXT),
}
_USEFUL = (
    "encoder_hidden_states", "encoder_hidden_states_t5", "timestep", "timesteps", "img_shapes",
    "pooled_projections", "pooled_embeds", "img_ids", "txt_ids", "class_labels", "num_frames",
    "height", "width", "text_embedding_mask", "text_embedding_mask_t5", "added_cond_kwargs",
    "guidance", "encoder_attention_mask", "encoder_hidden_states_mask", "global_hidden_states",
    "encoder_hidden_states_2", "encoder_attention_mask_2", "audio_num_frames",
    "control_hidden_states",
)  # fmt: skip
_SELDOM = ("guidance", "encoder_hidden_states_2", "encoder_attention_mask_2")

#: Arguments that no general rule finds.
SPECIAL: dict[str, dict[str, Any]] = {
    "DiTTransformer2DModel": {"norm_num_groups": 4, "out_channels": 4, "sample_size": 8},
    "AceStepTransformer1DModel": {"in_channels": 12, "audio_acoustic_hidden_dim": CHANNELS},
    "CogVideoXTransformer3DModel": {"max_text_seq_length": TEXT, "sample_frames": 13},
    "ConsisIDTransformer3DModel": {"max_text_seq_length": TEXT, "sample_frames": 13},
    "CosmosTransformer3DModel": {"concat_padding_mask": False},
    "PriorTransformer": {"num_embeddings": TEXT},
    "Transformer2DModel": {
        "norm_num_groups": 4,
        "cross_attention_dim": WIDTH,
        "patch_size": None,
    },
    "DualTransformer2DModel": {"norm_num_groups": 4, "cross_attention_dim": WIDTH},
    "TransformerTemporalModel": {"norm_num_groups": 4},
    "WanVACETransformer3DModel": {"vace_layers": [0], "vace_in_channels": 8},
    "LatteTransformer3DModel": {
        "cross_attention_dim": WIDTH,
        "caption_channels": WIDTH,
        "video_length": 4,
        "num_embeds_ada_norm": 100,
        "norm_type": "ada_norm_single",
    },
    "LuminaNextDiT2DModel": {"num_kv_heads": 2},
    "HiDreamImageTransformer2DModel": {"caption_channels": [WIDTH, WIDTH], "llama_layers": [0, 1]},
    "HunyuanImageTransformer2DModel": {"rope_axes_dim": (8, 8)},
    "HunyuanDiT2DModel": {
        "text_len": TEXT,
        "text_len_t5": TEXT,
        "use_style_cond_and_image_meta_size": False,
    },
    "PRXTransformer2DModel": {"axes_dim": [8, 8]},
    "SD3Transformer2DModel": {"sample_size": 8, "pos_embed_max_size": 8},
}

__all__ = ["SPECIAL", "models", "small"]
