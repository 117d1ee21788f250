"""What no general rule finds: fields of some model types' configurations.

The figures are those that keep each model's widths, heads and layers in agreement; most come from
the tests of the model in the transformers repository.
"""

from __future__ import annotations

from typing import Any

_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_KINDS = {
    kind: {"rope_type": "default", "rope_theta": 1e4}
    for kind in ("full_attention", "sliding_attention")
}
_TWO = ["sliding_attention", "full_attention"]
_IMAGE = {"<image>": 7, "IMGIMGA": 8, "IMGIMGB": 9}
_MIMI = {"upsample_groups": 64, "num_filters": 8, "codebook_size": 64, "codebook_dim": 32}
_MIMI |= {"vector_quantization_hidden_dimension": 32, "num_quantizers": 4}
_BARK = {"input_vocab_size": 199, "output_vocab_size": 199, "block_size": 64}
_SMALL_SHARED = {"num_kv_shared_layers": 0, "layer_types": _TWO, "num_hidden_layers": 2}
_ASSISTANT = {
    **_SMALL_SHARED,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
_DIARIZATION = {"diarization_config": {"head_config": {"audio_hidden_size": 64}}}
_VIBE = {"num_filters": 4, "n_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
_HIERA: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 1,
    "blocks_per_stage": [1, 1, 2, 1],
    "embed_dim_per_stage": [16, 32, 64, 128],
    "num_attention_heads_per_stage": [1, 2, 4, 8],
    "window_size_per_stage": [4, 2, 4, 2],
    "global_attention_blocks": [3],
    "window_positional_embedding_background_size": [4, 4],
    "image_size": [64, 64],
}
_SAM2 = {
    "backbone_config": _HIERA,
    "backbone_channel_list": [128, 64, 32, 16],
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    "fpn_hidden_size": 64,
    "image_size": 64,
}
_SAM = {
    "output_channels": 64, "image_size": 64, "patch_size": 16, "window_size": 2,
    "num_hidden_layers": 2, "global_attn_indexes": [1], "num_pos_feats": 32,
}  # fmt: skip
_MEMORY = {
    "memory_attention_rope_feat_sizes": [4, 4], "image_size": 64, "memory_encoder_hidden_size": 64,
    "memory_encoder_output_channels": 64, "mask_downsampler_embed_dim": 64,
    "memory_fuser_embed_dim": 64, "memory_fuser_intermediate_dim": 64,
}  # fmt: skip
_STAGES = ["stage1", "stage2", "stage3", "stage4"]
_RESNET: dict[str, Any] = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 64, 64],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
_LAST = {"backbone_config": {**_RESNET, "out_features": ["stage4"]}}
_THREE = {"backbone_config": {**_RESNET, "out_features": _STAGES[1:]}}
_ALL = {**_RESNET, "out_features": _STAGES}
_SAM3_SIZES = {"backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]}
_PE = {
    "architecture": "vit_pe_core_large_patch14_336",
    "model_args": {
        "embed_dim": 64, "img_size": [56, 56], "depth": 2, "num_heads": 4, "global_pool": "map",
        "ref_feat_shape": [4, 4],
    },
    "num_labels": 64,
}  # fmt: skip
_BEIT = {
    "model_type": "beit", "image_size": 64, "patch_size": 8, "hidden_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
    "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False,
    "use_relative_position_bias": True,
}  # fmt: skip
_SWIN = {
    "model_type": "swin", "image_size": 64, "patch_size": 4, "embed_dim": 16, "window_size": 4,
    "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8], "out_features": _STAGES,
}  # fmt: skip
_NECK = {"neck_hidden_sizes": [16] * 4, "fusion_hidden_size": 16}
_OUT_OF = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 64, "patch_size": 16, "out_indices": [1, 2, 3, 4], "apply_layernorm": True,
}  # fmt: skip
_RT_DETR = {
    "backbone_config": {**_RESNET, "model_type": "rt_detr_resnet", "out_features": _STAGES[1:]},
    "encoder_in_channels": [32, 64, 64],
    "decoder_in_channels": [64, 64, 64],
}
_CONVOLUTIONS = {
    **{
        f"{way}_{size}ratio": [kernel, [1, 1], [side // 2 for side in kernel]]
        for size, length in (("long", 7), ("mid", 5), ("short", 3))
        for way, kernel in (
            ("vertical_long_to_small_conv", [length, 1]),
            ("horizontal_small_to_long_conv", [1, length]),
            ("symmetric_conv_long", [length, length]),
        )
    },
    "reduce_channel": [1, 1, 0],
    "return_channel": [1, 1, 0],
}
_TEXT_FINDER = {
    "backbone_config": {
        "model_type": "hgnet_v2", "out_features": _STAGES, "stem_channels": [3, 8, 16],
        "stage_in_channels": [16, 16, 32, 64], "stage_mid_channels": [8, 8, 16, 16],
        "stage_out_channels": [16, 32, 64, 64], "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [1, 1, 1, 1],
    },
    "intraclass_block_config": _CONVOLUTIONS,
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
    "neck_out_channels": 64,
}  # fmt: skip
_REPVIT = {
    "model_type": "timm_wrapper",
    "architecture": "repvit_m1",
    "num_classes": 2,
    "label_names": ["a", "b"],
    "model_args": {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]},
}
_HYBRID = ["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"]

#: Fields by model type, wherever its configuration stands.
CONFIGS: dict[str, dict[str, Any]] = {
    "autoformer": {
        "context_length": 8,
        "prediction_length": 4,
        "label_length": 4,
        "lags_sequence": [1, 2, 3],
        "num_time_features": 1,
        "moving_average": 3,
    },
    "blt": {"encoder_hash_byte_group_vocab": 500, "num_hidden_layers": 2},
    "clap_audio_model": {
        "num_mel_bins": 64,
        "patch_embeds_hidden_size": 8,
        "hidden_size": 64,
        "num_attention_heads": [1, 2, 4, 8],
    },
    "clvp_encoder": {"hidden_size": 128, "num_attention_heads": 4},
    "dab-detr": {**_LAST, "use_timm_backbone": False},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [32, 64]},
    "depth_pro": {"intermediate_hook_ids": [1, 0]},
    "edgetam_vision_model": {
        "backbone_config": _REPVIT,
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "gemma3n_vision": {"architecture": "resnet18"},
    "idefics": {"use_resampler": True},
    "janus_vqgan": {"num_patches": 4},
    "llama4_vision_model": {
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "intermediate_size": 256,
    },
    "lw_detr": {"projector_scale_factors": [1.0]},
    "lw_detr_vit": {"out_indices": [1, 2], "num_windows": 16},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 192},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "omdet-turbo": {"backbone_config": {"model_type": "timm_backbone", "backbone": "resnet18"}},
    "perception_lm": {"vision_config": {**_PE, "num_labels": 2}},
    "pe_video_encoder": {"vision_config": _PE},
    "pp_ocrv5_server_det": _TEXT_FINDER,
    "pp_ocrv6_medium_det": _TEXT_FINDER,
    "pp_ocrv6_small_det": {
        "backbone_config": {"model_type": "pp_lcnet_v4", "out_features": _STAGES},
        "layer_list_out_channels": [96, 96, 192, 384],
    },
    "deimv2": {
        "backbone_config": {
            "model_type": "hgnet_v2",
            "out_features": _STAGES[1:],
            "hidden_sizes": [128, 512, 1024, 2048],
        },
        "encoder_in_channels": [512, 1024, 2048],
        "decoder_in_channels": [64] * 3,
    },
    "mobilevit": {"image_size": 128},
    "moshi": {"num_codebooks": 4},
    "nemotron3_diarization": {
        "head_config": {"audio_hidden_size": 64},
        "audio_config": {"num_key_value_heads": 4},
    },
    "rt_detr": _RT_DETR,
    "rt_detr_v2": _RT_DETR,
    "uvdoc": {
        "backbone_config": {
            "model_type": "uvdoc_backbone",
            "out_features": [*_STAGES, "stage5", "stage6"],
        }
    },
    "chmv2": {
        "backbone_config": {
            **_OUT_OF,
            "model_type": "dinov3_vit",
            "reshape_hidden_states": True,
            "return_class_token": True,
        },
        "post_process_channels": [16] * 4,
        "fusion_hidden_size": 16,
        "head_hidden_size": 16,
    },
    "tipsv2_dpt": {
        "backbone_config": {
            **_OUT_OF,
            "model_type": "tipsv2_vision_model",
            "reshape_hidden_states": False,
        },
        **_NECK,
    },
    "sam3_tracker": {"vision_config": _SAM3_SIZES},
    "qwen3_omni_moe": {"talker_config": {"spatial_merge_size": 2}},
    "qwen4_exp_text": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 200,
        "split_ngram_parts": 2,
    },
    "sam_vision_model": _SAM,
    "sam_hq_vision_model": _SAM,
    "sam_prompt_encoder": {"image_size": 64, "patch_size": 16, "image_embedding_size": 4},
    "sam_hq_prompt_encoder": {"image_size": 64, "patch_size": 16, "image_embedding_size": 4},
    "sam_hq_mask_decoder": {"vit_dim": 64},
    "sam2_prompt_encoder": {"image_size": 64, "patch_size": 16},
    "sam2_video_prompt_encoder": {"image_size": 64, "patch_size": 16},
    "edgetam_prompt_encoder": {"image_size": 64, "patch_size": 16},
    "edgetam_video_prompt_encoder": {"image_size": 64, "patch_size": 16},
    "sam2_video": _MEMORY,
    "edgetam_video": _MEMORY,
    "sam3_tracker_video": {**_MEMORY, "vision_config": _SAM3_SIZES},
    "seggpt": {"image_size": [64, 32]},
    "shieldgemma2": {"yes_token_index": 7, "no_token_index": 8},
    "table-transformer": {**_LAST, "use_timm_backbone": False},
    "timm_backbone": {"backbone": "resnet18"},
    "tvp": {
        "backbone_config": {**_RESNET, "out_features": ["stage4"]},
        "max_img_size": 64,
        "visual_prompt_size": 8,
        "num_frames": 2,
    },
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [32, 64]},
    "upernet": {"backbone_config": _ALL, "auxiliary_in_channels": 64},
    "vitmatte": {
        "backbone_config": {
            "model_type": "vitdet",
            "num_channels": 4,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 64,
            "patch_size": 16,
            "out_features": ["stage2"],
            "residual_block_indices": [1],
        },
        "convstream_hidden_sizes": [16, 32, 64],
        "fusion_hidden_sizes": [64, 32, 16, 16],
        "hidden_size": 64,
    },
    "zamba": {"num_hidden_layers": 6, "layers_block_type": _HYBRID},
    "zoedepth": {"backbone_config": _BEIT, **_NECK, "bottleneck_features": 16},
    "bark": {"codec_config": {"num_filters": 4, "upsampling_ratios": [2, 2], "hidden_size": 16}},
    "semantic": _BARK,
    "coarse_acoustics": _BARK,
    "fine_acoustics": _BARK,
    "chameleon": {"vocabulary_map": _IMAGE},
    "emu3": {"vocabulary_map": {"<image>": 7, "<|extra_200|>": 8, "<|visual token 000001|>": 9}},
    "cohere_compass": {"text_config": {"rope_parameters": _KINDS}},
    "cohere_compass_text": {"rope_parameters": _KINDS},
    "cosmos3_edge": {"text_config": {"rope_parameters": _SECTIONS}},
    "cosmos3_edge_text": {"rope_parameters": _SECTIONS},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_audio_encoder": {"adapter_input_size": 64},
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense", "dense"],
        "num_hidden_layers": 2,
        "adapter_in_dim": 64,
    },
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 2], "attn_resolutions": [2]},
    "fast_vlm": {
        "vision_config": {"architecture": "resnet18", "hidden_size": 512, "num_labels": 2}
    },
    "fastspeech2_conformer_with_hifigan": {"vocoder_config": {"model_in_dim": 16}},
    "instructblip": {"image_token_index": 9},
    "instructblipvideo": {"video_token_index": 9},
    "mask2former": {"backbone_config": _SWIN},
    "oneformer": {"backbone_config": _SWIN},
    "xclip_vision_model": {"num_frames": 4, "mit_hidden_size": 64, "mit_num_attention_heads": 4},
    "efficientnet": {
        "width_coefficient": 0.25,
        "depth_coefficient": 0.2,
        "image_size": 64,
        "hidden_dim": 320,
    },
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_SECTIONS, "mrope_section": [3, 3, 2]}},
    "esm": {"vocab_size": 199, "pad_token_id": 1, "mask_token_id": 4},
    "florence_vision": {
        "embed_dim": (16, 32, 64, 64),
        "depths": (1, 1, 1, 1),
        "num_heads": (1, 2, 4, 4),
        "num_groups": (1, 2, 4, 4),
        "window_size": 4,
        "projection_dim": 64,
    },
    "fun_asr_nano_encoder": {"num_timestamp_prediction_layers": 1},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16}},
    "gemma3n_text": _SMALL_SHARED,
    "gemma4_assistant": {"backbone_hidden_size": 64, "text_config": _ASSISTANT},
    "gemma4_unified_assistant": {"backbone_hidden_size": 64, "text_config": _ASSISTANT},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
        "spatial_target_layers": [1],
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "hunyuan_vl_text": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_hidden_layers": 2},
    "luke": {"entity_vocab_size": 50, "entity_emb_size": 32},
    "mluke": {"entity_vocab_size": 50, "entity_emb_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mimi": _MIMI,
    "mimi_encoder": _MIMI,
    "mimi_decoder": _MIMI,
    "ministral": {"head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "molmo2_vision": {"image_size": [64, 64], "num_position_embeddings": 64},
    "muse_spark_audio": {
        "patch_sizes": (4, 2),
        "hidden_sizes": (32, 64),
        "depths": (1, 1),
        "num_hidden_layers": 2,
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "nemotron3_5_transcribe_audio": _DIARIZATION,
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "sam2_hiera_det_model": _HIERA,
    "sam2_vision_model": _SAM2,
    "step3p5": {"sliding_window": 5},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "vibevoice_acoustic_tokenizer": _VIBE,
    "vibevoice_acoustic_tokenizer_encoder": _VIBE,
    "vibevoice_acoustic_tokenizer_decoder": _VIBE,
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": _HYBRID, "num_mem_blocks": 1},
}

_SESSION = "takes a session of video frames, which is no tensor"
_PART = "a component without a model class; the sweep did not run it inside its parent model"

#: Why some model types are not built, or not run.
REASONS: dict[str, str] = {
    "dinat": "needs natten",
    "layoutlmv2": "needs detectron2",
    "layoutxlm": "is a name for LayoutLMv2's model, which needs detectron2",
    "higgs_audio_v2_tokenizer": "needs torchaudio, of which there is no version for this PyTorch",
    "nougat": "is a name for the vision-encoder-decoder's model",
    "rag": "is a composite of two models and a retriever's documents",
    "gemma4_assistant": "drafts on the key-value cache of another model",
    "gemma4_unified_assistant": "drafts on the key-value cache of another model",
    "esmfold2": "its rotary embedding needs wider heads than those of the sweep",
    "omdet-turbo": "takes classes and tasks as tokens, which the sweep does not make",
    "pp_ocrv6_small_det": "its default backbone's feature maps do not fit its neck",
    "voxtral_realtime_text": "takes a time embedding of voxtral_realtime, as a keyword",
    "sam2_video": _SESSION,
    "sam3_video": _SESSION,
    "edgetam_video": _SESSION,
    **dict.fromkeys(
        (
            "edgetam_video_mask_decoder", "edgetam_video_prompt_encoder",
            "sam2_video_mask_decoder", "sam2_video_prompt_encoder",
            "gemma4_unified_audio", "gemma4_unified_vision",
            "pp_chart2table", "pp_chart2table_vision", "sapiens2_head", "vibevoice_diffusion",
        ),
        _PART,
    ),
}  # fmt: skip
