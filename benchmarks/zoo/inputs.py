"""Inputs of several kinds for a small model, read off its signature and configuration."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
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
    from zoo.given import GIVEN

    parameters = inspect.signature(model.forward).parameters
    for given in GIVEN.get(getattr(model.config, "model_type", ""), ()):
        with contextlib.suppress(Exception):  # it is for another class of this model type
            named = given(model)
            if set(named) <= set(parameters):
                yield _kind(named), named
                yield _kind(named), named | _rest(model, parameters, named)
    main = getattr(model, "main_input_name", "input_ids")
    makers = [maker for maker in _MAKERS if maker[1] in parameters]
    makers.sort(key=lambda maker: maker[1] != main)
    if set(parameters) & set(_GRIDS):
        for kind, name, _ in makers:
            if name in ("pixel_values", "hidden_states"):
                for packed in _packed(model):
                    given = {name: packed}
                    yield f"{kind} of patches", given | _rest(model, parameters, given)
    for kind, name, make in makers:
        yield from _single(model, parameters, kind, name, next(iter(make(model))))
    for kind, name, make in makers:  # both towers of a model of two
        for other, second, also in makers:
            if name < second and {name, second} != {"input_ids", "inputs_embeds"}:
                given = {name: next(iter(make(model))), second: next(iter(also(model)))}
                yield f"{kind} and {other}", given | _rest(model, parameters, given)
    for kind, name, make in makers:
        for one in itertools.islice(make(model), 1, None):
            yield from _single(model, parameters, kind, name, one)


def _single(
    model: Any, parameters: Any, kind: str, name: str, one: Tensor
) -> Iterator[tuple[str, dict[str, Any]]]:
    """One main input with what goes with it, without masks and with them."""
    given = {name: one, **_rest(model, parameters, {name: one})}
    yield kind, given
    for masks in _masks(parameters, one):
        yield kind, given | masks


def _kind(given: dict[str, Any]) -> str:
    """Kinds of some inputs, in words."""
    kinds = [kind for kind, name, _ in _MAKERS if name in given]
    return " and ".join(dict.fromkeys(kinds)) or "states"


def run(model: Any, given: dict[str, Any], **extra: Any) -> Any:
    """What a model gives, the same chance each time and the input left as it was.

    PyTorch's fused inference of its own transformer layers is off, as it is under a probe.
    """
    usual = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return run_fused(model, given, **extra)
    finally:
        torch.backends.mha.set_fastpath_enabled(usual)


def run_fused(model: Any, given: dict[str, Any], **extra: Any) -> Any:
    """The same with PyTorch's fused inference, where the model has layers with it."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with torch.no_grad():
        return model(**copy.deepcopy(given), **extra)


def _masks(parameters: Any, given: Tensor) -> Iterator[dict[str, Any]]:
    """Masks of everything for features, which some models cannot do without."""
    names = ("input_features_mask", "feature_attention_mask", "padding_mask", "attention_mask")
    names = tuple(name for name in names if name in parameters)
    if given.dim() == 3 and names:
        for length in sorted(set(given.shape[1:]), reverse=True):
            yield dict.fromkeys(names, torch.ones(BATCH, length, dtype=torch.long))


def _packed(model: Any) -> Iterator[Tensor]:
    """Patches of two images of 4 by 4, one after another, as wide as the model embeds them."""
    channels = _number(model, 3, "num_channels", "in_channels", "in_chans")
    patch = _number(model, 8, "patch_size")
    area = channels * patch * patch
    for width in (area * _number(model, 1, "temporal_patch_size"), area, 2 * area):
        yield noise(2 * 16, width)
        yield noise(1, 2 * 16, width)
    yield noise(2 * 16, channels, patch, patch)
    yield noise(1, 2 * 16, channels, patch, patch)
    yield noise(2 * 16, _number(model, 64, "hidden_size", "embed_dim"))


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
    yield noise(BATCH, 2, channels, side, side)
    patch = _number(model, 8, "patch_size")
    yield noise(BATCH, 16, channels * patch * patch)
    for other in (32, 64, 128, 224):
        if other != side:
            yield noise(BATCH, channels, other, other)


def _features(model: Any) -> Iterator[Tensor]:
    bins = _number(
        model, 80, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_dim"
    )
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
    yield noise(BATCH, width, LENGTH)
    yield noise(BATCH, 1, 20 * LENGTH)


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
    ("spectrogram", "spectrogram", _features),
    ("spectrogram", "mel_spectrogram", _features),
    ("latents", "latents", _states),
    ("states", "hidden_states", _states),
    ("states", "inputs_embeds", _states),
    ("states", "query_embeds", _states),
    ("any", "inputs", _states),
]  # fmt: skip

_GRIDS = ("grid_thw", "image_grid_thw", "grid_thws", "image_grid_hw")
_REQUIRED: dict[str, Any] = {
    "pixel_values": lambda model: next(iter(_pixels(model))),
    "input_ids": lambda model: ids(model),
    "qformer_input_ids": lambda model: ids(model),
    "merge_sizes": lambda model: torch.tensor([1, 1]),
    "merge_size": lambda model: 2,
    "grid_thw": lambda model: torch.tensor([[1, 4, 4], [1, 4, 4]]),
    "image_grid_thw": lambda model: torch.tensor([[1, 4, 4], [1, 4, 4]]),
    "encoder_hidden_states": lambda model: next(iter(_states(model))),
    "attention_mask": lambda model: torch.ones(BATCH, LENGTH, dtype=torch.long),
    "query_embeds": lambda model: next(iter(_states(model))),
}
