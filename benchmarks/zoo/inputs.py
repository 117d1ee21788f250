"""Inputs of several kinds for a small model, read off its signature and configuration."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.small import text_config

BATCH, LENGTH = 2, 12


def candidates(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kinds of input that the model's signature has a place for, the likeliest first."""
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    makers = [maker for maker in _MAKERS if maker[1] in parameters]
    makers.sort(key=lambda maker: maker[1] != main)
    for kind, name, make in makers:
        for given in make(model):
            rest = _rest(model, parameters, {name: given})
            yield kind, {name: given, **rest}
            if masks := _masks(parameters, given):
                yield kind, {name: given, **rest, **masks}
    for kind, name, make in makers:  # both towers of a model of two
        for other, second, also in makers:
            if name < second and {name, second} != {"input_ids", "inputs_embeds"}:
                given = {name: next(iter(make(model))), second: next(iter(also(model)))}
                yield f"{kind} and {other}", given | _rest(model, parameters, given)


def run(model: Any, given: dict[str, Any], **extra: Any) -> Any:
    """What a model gives, the same chance each time and the input left as it was."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with torch.no_grad():
        return model(**copy.deepcopy(given), **extra)


def _masks(parameters: Any, given: Tensor) -> dict[str, Any]:
    """Masks of everything for features, which some models cannot do without."""
    names = ("input_features_mask", "feature_attention_mask", "padding_mask", "attention_mask")
    if given.dim() != 3:
        return {}
    length = max(given.shape[1:])
    mask = torch.ones(BATCH, length, dtype=torch.long)
    return {name: mask for name in names if name in parameters}


def _rest(model: Any, parameters: Any, given: dict[str, Any]) -> dict[str, Any]:
    rest: dict[str, Any] = {}
    if "attention_mask" in parameters and "input_ids" in given:
        rest["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if "decoder_input_ids" in parameters and "decoder_input_ids" not in given:
        rest["decoder_input_ids"] = ids(model, 7)
    if "bbox" in parameters and "input_ids" in given:
        box = torch.arange(4).mul(10).repeat(BATCH, LENGTH, 1)
        rest["bbox"] = box + 3 * torch.arange(LENGTH)[None, :, None]
    if (
        "token_type_ids" in parameters
        and "mm_token_type_ids" not in parameters
        and "input_ids" in given
    ):
        rest["token_type_ids"] = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    if "past_time_features" in parameters:
        rest |= _series(model)
    required = {
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    for name in required - set(given) - set(rest):
        if name in _REQUIRED:
            rest[name] = _REQUIRED[name](model)
    return rest


def ids(model: Any, length: int = LENGTH) -> Tensor:
    chance = torch.Generator().manual_seed(7)
    most = getattr(text_config(model.config), "vocab_size", None) or 100
    return torch.randint(3, max(4, min(int(most), 150)), (BATCH, length), generator=chance)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _ids(model: Any) -> Iterator[Tensor]:
    yield ids(model)
    yield torch.stack([ids(model)] * _number(model, 4, "num_codebooks", "num_quantizers"), -1)
    yield torch.stack([ids(model)] * _number(model, 4, "num_codebooks", "num_quantizers"), 1)
    yield torch.randint(3, 150, (BATCH, 64))


def _pixels(model: Any) -> Iterator[Tensor]:
    channels = _number(model, 3, "num_channels", "in_channels", "in_chans")
    side = _number(model, 64, "image_size", "img_size", "pretrain_image_size")
    frames = _number(model, 4, "num_frames")
    yield noise(BATCH, channels, side, side)
    yield noise(BATCH, frames, channels, side, side)
    patch = _number(model, 8, "patch_size")
    yield noise(BATCH, 16, channels * patch * patch)
    for other in (32, 64, 128, 224):
        if other != side:
            yield noise(BATCH, channels, other, other)


def _features(model: Any) -> Iterator[Tensor]:
    bins = _number(model, 80, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels")
    positions = _number(model, 24, "max_source_positions")
    yield noise(BATCH, bins, 2 * positions)
    yield noise(BATCH, 48, bins)
    yield noise(BATCH, bins, 48)
    yield noise(BATCH, 1, 64, bins)
    yield noise(BATCH, 1, 1001, bins)


def _values(model: Any) -> Iterator[Tensor]:
    yield noise(BATCH, 4000)
    yield noise(BATCH, 1, 4000)
    bins = _number(model, 16, "num_mel_bins", "feature_size")
    yield noise(BATCH, _number(model, 64, "max_length"), bins)
    yield noise(BATCH, 16000)


def _states(model: Any) -> Iterator[Tensor]:
    width = _number(model, 64, "hidden_size", "d_model", "embed_dim")
    yield noise(BATCH, LENGTH, width)
    yield noise(LENGTH * BATCH, width)


def _past(model: Any) -> Iterator[Tensor]:
    length = _number(model, 32, "context_length")
    lags = max(getattr(model.config, "lags_sequence", None) or [0])
    channels = _number(model, 1, "num_input_channels", "input_size")
    yield noise(BATCH, length + lags, channels)
    yield noise(BATCH, length + lags)
    yield noise(BATCH, 64)


def _series(model: Any) -> dict[str, Any]:
    length = _number(model, 32, "context_length")
    length += max(getattr(model.config, "lags_sequence", None) or [0])
    ahead = _number(model, 4, "prediction_length")
    times = (
        _number(model, 0, "num_time_features") if hasattr(model.config, "num_time_features") else 1
    )
    return {
        "past_time_features": noise(BATCH, length, times),
        "past_observed_mask": torch.ones(BATCH, length),
        "future_values": noise(BATCH, ahead),
        "future_time_features": noise(BATCH, ahead, times),
    }


def _number(model: Any, otherwise: int, *names: str) -> int:
    """The first of some fields of the configuration, or of those inside it."""
    inner = ("vision_config", "audio_config", "backbone_config", "encoder_config")
    configs = [model.config, *(getattr(model.config, each, None) for each in inner)]
    for config in configs:
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, list | tuple) and value and isinstance(value[0], int):
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return otherwise


_MAKERS = [
    ("ids", "input_ids", _ids),
    ("pixels", "pixel_values", _pixels),
    ("audio features", "input_features", _features),
    ("audio samples", "input_values", _values),
    ("video", "pixel_values_videos", _pixels),
    ("series", "past_values", _past),
    ("states", "hidden_states", _states),
    ("states", "inputs_embeds", _states),
    ("states", "query_embeds", _states),
    ("any", "inputs", _states),
]  # fmt: skip

_REQUIRED: dict[str, Any] = {
    "grid_thw": lambda model: torch.tensor([[1, 4, 4], [1, 4, 4]]),
    "image_grid_thw": lambda model: torch.tensor([[1, 4, 4], [1, 4, 4]]),
    "encoder_hidden_states": lambda model: next(iter(_states(model))),
    "attention_mask": lambda model: torch.ones(BATCH, LENGTH, dtype=torch.long),
    "query_embeds": lambda model: next(iter(_states(model))),
}
