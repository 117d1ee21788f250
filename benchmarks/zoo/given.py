"""Inputs of model types whose signature does not say what they take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from zoo.inputs import ids, noise

Given = Callable[[Any], dict[str, Any]]


def _placed(model: Any, token: int, count: int) -> torch.Tensor:
    """Ids (2, count + 12) that begin with a token's places."""
    return torch.cat([torch.full((2, count), token), ids(model)], 1)


def _codes(model: Any, count: int, length: int = 7) -> torch.Tensor:
    """Ids (2, length, count) of several codebooks."""
    return torch.stack([ids(model, length)] * count, -1)


def _shapes(*shape: int) -> torch.Tensor:
    return torch.tensor([shape, shape])


def _places(side: int) -> torch.Tensor:
    """Places (2, side², 2) of patches in two images."""
    return torch.stack([torch.cartesian_prod(torch.arange(side), torch.arange(side))] * 2)


def _flattened(config: Any) -> torch.Tensor:
    """Patches (2, 16, 2 + width) with their rows and columns before them."""
    return torch.cat([_places(4) + 1, noise(2, 16, config.patch_embed_hidden_size)], -1)


def _packed_sounds(model: Any) -> dict[str, Any]:
    return {
        "input_features": noise(model.config.num_mel_bins, 96),
        "feature_lens": torch.tensor([48, 48]),
    }


def _patches(config: Any) -> dict[str, Any]:
    return {
        "pixel_values": noise(2, 16, config.num_channels * config.patch_size**2),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": _shapes(4, 4),
    }


def _strips(model: Any) -> dict[str, Any]:
    side = model.config.patch_size
    return {"pixel_values": noise(1, 3, side, 32 * side), "target_sizes": _shapes(4, 4).int()}


def _instructed(model: Any, token: int, *frames: int) -> dict[str, Any]:
    count = model.config.num_query_tokens * (frames[0] if frames else 1)
    side = model.config.vision_config.image_size
    return {
        "pixel_values": noise(2, *frames, 3, side, side),
        "qformer_input_ids": ids(model),
        "input_ids": _placed(model, token, count),
    }


def _prompted(model: Any) -> dict[str, Any]:
    """Two images with a point on each."""
    side = model.config.prompt_encoder_config.image_size
    return {
        "pixel_values": noise(2, 3, side, side),
        "input_points": torch.tensor([[[[20.0, 30.0]]]] * 2),
        "input_labels": torch.ones(2, 1, 1, dtype=torch.long),
    }


def _session(model: Any) -> dict[str, Any]:
    """Two frames of a video with a point on the first."""
    module = sys.modules[type(model).__module__]
    (made,) = [value for name, value in vars(module).items() if name.endswith("InferenceSession")]
    side = model.config.prompt_encoder_config.image_size
    session = made(
        video=noise(2, 3, side, side), video_height=side, video_width=side, dtype=torch.float32
    )
    inputs = {
        "point_coords": torch.tensor([[[[20.0, 30.0]]]]),
        "point_labels": torch.ones(1, 1, 1, dtype=torch.int32),
    }
    session.add_point_inputs(session.obj_id_to_idx(1), 0, inputs)
    session.obj_with_new_inputs = [1]
    return {"inference_session": session, "frame_idx": 0}


def _two_codecs(model: Any) -> dict[str, Any]:
    return {"input_values": noise(2, 1, 6400), "input_features": noise(2, 20, 160)}


_PE_VIDEO = noise(2, 4, 3, 56, 56)

#: Inputs by model type, each a function of the model.
GIVEN: dict[str, tuple[Given, ...]] = {
    "bridgetower_vision_model": (lambda m: {"image": noise(2, 3, 64, 64)},),
    "clap": (
        lambda m: {
            "input_ids": ids(m),
            "input_features": noise(2, 1, 1001, m.config.audio_config.num_mel_bins),
        },
    ),
    "clvp": (
        lambda m: {
            "input_ids": ids(m),
            "input_features": noise(2, m.config.decoder_config.feature_size, 24),
        },
    ),
    "deepseek_ocr2_encoder": (
        lambda m: {"inputs_embeds": noise(2, 24, m.config.hidden_size), "num_patches": 12},
    ),
    "dia": (lambda m: {"input_ids": ids(m), "decoder_input_ids": _codes(m, 9)},),
    "dia_decoder": (lambda m: {"input_ids": _codes(m, 9)},),
    "dots3_note_audio_encoder": (
        lambda m: {
            "input_features": noise(2, m.config.feature_size, 96),
            "chunk_sample_lengths": torch.tensor([96, 96]) * m.config.hop_length,
        },
    ),
    "emu3_vqgan": (
        lambda m: {"pixel_values": noise(2, 3, 64, 64), "image_sizes": _shapes(64, 64)},
    ),
    "fastspeech2_conformer_with_hifigan": (lambda m: {"input_ids": ids(m) % 30 + 1},),
    "florence_vision": (lambda m: {"hidden_states": noise(2, 3, 64, 64)},),
    "fun_asr_nano_encoder": (
        lambda m: {
            "input_features": noise(2, 24, m.config.num_mel_bins * m.config.num_stacked_frames),
            "input_features_mask": torch.ones(2, 24, dtype=torch.long),
        },
    ),
    "gemma3n_audio": (
        lambda m: {
            "audio_mel": noise(2, 48, m.config.input_feat_size),
            "audio_mel_mask": torch.zeros(2, 48, dtype=torch.bool),
        },
    ),
    "gemma4_audio": (
        lambda m: {
            "input_features": noise(2, 48, 128),
            "attention_mask": torch.ones(2, 48, dtype=torch.bool),
        },
    ),
    "gemma4_vision": (
        lambda m: {
            "pixel_values": noise(2, 36, 3 * m.config.patch_size**2),
            "pixel_position_ids": _places(6),
        },
    ),
    "glm_image_vqmodel": (
        lambda m: {
            "hidden_states": noise(
                2, next(c for c in m.modules() if isinstance(c, torch.nn.Conv2d)).in_channels, 4, 4
            )
        },
    ),
    "granite_speech5_ctc": (
        lambda m: {"input_features": noise(2, 48, m.encoder.input_linear.in_features)},
    ),
    "granite_speech5_encoder": (
        lambda m: {"input_features": noise(2, 48, m.input_linear.in_features)},
    ),
    "idefics": (
        lambda m: {
            "input_ids": ids(m),
            "pixel_values": noise(2, 1, 3, *[m.config.vision_config.image_size] * 2),
            "image_attention_mask": torch.ones(2, 12, 1, dtype=torch.long),
        },
    ),
    "idefics2_perceiver": (
        lambda m: {
            "context": noise(2, 16, m.config.hidden_size),
            "attention_mask": torch.ones(2, 16, dtype=torch.long),
        },
    ),
    "inkling2_vision": (
        lambda m: {
            "pixel_values": noise(32, *[m.config.patch_size * m.config.spatial_merge_size] * 2, 3),
            "image_grid_thw": _shapes(1, 4, 4),
        },
    ),
    "inkling_vision": (
        lambda m: {
            "pixel_values": noise(
                4, m.config.temporal_patch_size, m.config.patch_size, m.config.patch_size, 3
            )
        },
    ),
    "inkling_audio": (lambda m: {"audio_input_ids": _codes(m, 80, 12) % 8},),
    "instructblip": (lambda m: _instructed(m, m.config.image_token_index),),
    "instructblipvideo": (lambda m: _instructed(m, m.config.video_token_index, 4),),
    "jev": (
        lambda m: {
            "input_ids": ids(m)[:1],
            "marks": torch.tensor([[3, 7]]),
            "num_options": torch.tensor([[2, 2]]),
            "question_type_ids": torch.tensor([[0, 0]]),
        },
    ),
    "kosmos-2": (
        lambda m: {
            "pixel_values": noise(2, 3, *[m.config.vision_config.image_size] * 2),
            "input_ids": ids(m, m.config.latent_query_num + 6),
            "image_embeds_position_mask": (
                torch.arange(m.config.latent_query_num + 6) < m.config.latent_query_num
            ).repeat(2, 1),
        },
    ),
    "lxmert": (
        lambda m: {
            "input_ids": ids(m),
            "visual_feats": noise(2, 5, m.config.visual_feat_dim),
            "visual_pos": noise(2, 5, m.config.visual_pos_dim),
        },
    ),
    "minicpm_ocr_vision": (_strips,),
    "minicpmv4_6_vision": (_strips,),
    "minicpmv4_7_vision": (_strips,),
    "mllama_vision_model": (
        lambda m: {
            "pixel_values": noise(2, 1, m.config.max_num_tiles, 3, *[m.config.image_size] * 2),
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, m.config.max_num_tiles, dtype=torch.long),
        },
    ),
    "molmo2_adapter": (
        lambda m: {
            "image_features": noise(2, 64, 2 * m.config.hidden_size),
            "pooled_patches_idx": torch.arange(64).reshape(16, 4),
        },
    ),
    "molmo2_vision": (lambda m: {"pixel_values": noise(2, 64, 3 * m.config.patch_size**2)},),
    "moshi_depth": (
        lambda m: {"input_ids": ids(m, 4), "last_hidden_state": noise(2, 1, m.config.input_size)},
    ),
    "muse_glimmer_assistant": (
        lambda m: {
            "noise_embeds": noise(2, 6, 64),
            "context_hidden_states": noise(2, 6, 320),
            "attention_mask": torch.ones(2, 12, dtype=torch.long),
        },
    ),
    "musicgen": (lambda m: {"input_ids": ids(m), "decoder_input_ids": ids(m, 7).repeat(4, 1)},),
    "musicgen_melody": (
        lambda m: {"input_ids": ids(m), "decoder_input_ids": ids(m, 7).repeat(4, 1)},
    ),
    "nemotron3_5_transcribe_audio": (
        lambda m: {
            "input_features": noise(2, 48, 16),
            "input_features_mask": torch.ones(2, 48, dtype=torch.long),
        },
    ),
    "neucodec": (_two_codecs,),
    "oneformer": (
        lambda m: {
            "pixel_values": noise(2, 3, 64, 64),
            "task_inputs": torch.randint(3, 150, (2, m.config.task_seq_len)),
        },
    ),
    "paddleocr_vl_vision": (
        lambda m: {
            "pixel_values": noise(1, 32, 3, m.config.patch_size, m.config.patch_size),
            "grid_thw": _shapes(1, 4, 4),
        },
    ),
    "pe_audio": (lambda m: {"input_ids": ids(m), "input_values": noise(2, 1, 4000)},),
    "pe_audio_encoder": (lambda m: {"input_values": noise(2, 1, 4000)},),
    "pe_audio_video": (
        lambda m: {
            "input_ids": ids(m),
            "input_values": noise(2, 1, 4000),
            "pixel_values_videos": _PE_VIDEO,
        },
    ),
    "pe_audio_video_encoder": (
        lambda m: {"input_values": noise(2, 1, 4000), "pixel_values_videos": _PE_VIDEO},
    ),
    "pe_video": (lambda m: {"input_ids": ids(m), "pixel_values_videos": _PE_VIDEO},),
    "pe_video_encoder": (lambda m: {"pixel_values_videos": _PE_VIDEO},),
    "phi4_multimodal_audio": (
        lambda m: {"hidden_states": noise(2, 48, m.config.input_size), "mask": None},
    ),
    "pi0": (
        lambda m: {
            "action_embeds": noise(2, 5, m.config.dit_config.hidden_size),
            "input_ids": ids(m),
            "pixel_values": noise(2, 1, 3, 64, 64),
            "attention_mask": torch.ones(2, 12, dtype=torch.long),
        },
    ),
    "pix2struct": (
        lambda m: {
            "flattened_patches": _flattened(m.config.vision_config),
            "decoder_input_ids": ids(m, 7),
        },
    ),
    "pix2struct_vision_model": (lambda m: {"flattened_patches": _flattened(m.config)},),
    "qwen2_5_omni_audio_encoder": (
        lambda m: _packed_sounds(m) | {"aftercnn_lens": torch.tensor([24, 24])},
    ),
    "qwen2_5_omni_dit": (
        lambda m: {
            "hidden_states": noise(2, 12, m.config.mel_dim),
            "condition_vector": noise(2, 12, m.config.mel_dim),
            "speaker_embedding": noise(2, 12, m.config.enc_emb_dim),
            "quantized_code": ids(m, 12 // m.config.repeats),
            "time_step": torch.tensor(0.5),
        },
    ),
    "qwen3_asr_encoder": (
        lambda m: {
            "input_features": noise(2, m.config.num_mel_bins, 100),
            "input_features_mask": torch.ones(2, 100, dtype=torch.long),
        },
    ),
    "qwen3_omni_moe_audio_encoder": (_packed_sounds,),
    "sam": (_prompted,),
    "sam_hq": (_prompted,),
    "sam2": (_prompted,),
    "sam3_tracker": (_prompted,),
    "edgetam": (_prompted,),
    "sam3": (
        lambda m: {
            "pixel_values": noise(2, 3, 64, 64),
            "input_ids": ids(m),
            "input_boxes": torch.tensor([[[0.4, 0.4, 0.3, 0.3]]] * 2),
            "input_boxes_labels": torch.ones(2, 1, dtype=torch.long),
        },
    ),
    "sam2_video": (_session,),
    "sam3_tracker_video": (_session,),
    "edgetam_video": (_session,),
    "seggpt": (
        lambda m: dict.fromkeys(
            ("pixel_values", "prompt_pixel_values", "prompt_masks"),
            noise(2, 3, m.config.image_size[0] // 2, m.config.image_size[1]),
        ),
    ),
    "siglip2": (lambda m: {"input_ids": ids(m), **_patches(m.config.vision_config)},),
    "siglip2_vision_model": (lambda m: _patches(m.config),),
    "tvp": (  # its column embeddings allow a batch of one alone
        lambda m: {"input_ids": ids(m)[:1], "pixel_values": noise(1, 2, 3, 64, 64)},
    ),
    "unlimited_ocr_vision_encoder": (
        lambda m: {"patch_embeds": noise(2, m.config.hidden_size, 8, 8)},
    ),
    "voxtral_realtime": (
        lambda m: {
            "input_ids": ids(m),
            "input_features": noise(2, m.config.audio_config.num_mel_bins, 96),
        },
    ),
    "wav2vec2-bert": (
        lambda m: {"input_features": noise(2, 24, m.config.feature_projection_input_dim)},
    ),
    "xclip": (
        lambda m: {
            "input_ids": ids(m),
            "pixel_values": noise(2, m.config.vision_config.num_frames, 3, 64, 64),
        },
    ),
    "xclip_vision_model": (lambda m: {"pixel_values": noise(2 * m.config.num_frames, 3, 64, 64)},),
    "xcodec2": (_two_codecs,),
    "xlstm": (lambda m: {"input_ids": ids(m), "use_cache": False},),
}
