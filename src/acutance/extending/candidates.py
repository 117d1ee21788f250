"""What may let a model read beyond its trained length: the changes that are tried."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch

from acutance.calibration.apply_law import ApplyError
from acutance.judging.changes import Change, named_change
from acutance.judging.rope import RopeRemedy, rope_modules
from acutance.shapes import check_count


def proposals(model: torch.nn.Module, train_length: int, to: int) -> list[Change]:
    """Changes to try, in the order in which they are tried.

    The factor of RoPE settings is ``to / train_length``, and groups of windows are so large, that
    the largest distance lies within those of the training.

    Args:
        model: the model; RoPE settings are left out where it has none.
        train_length: tokens of the windows that it was trained on.
        to: tokens that it is to read.

    Raises:
        ValueError: if ``to`` is not above ``train_length``.

    Example:
        >>> from acutance.reproduce import decoder
        >>> [one.name for one in proposals(decoder(), 128, 512)][:2]
        ['rope:yarn,factor=4,original_max_position_embeddings=128', \
'rope:dynamic,factor=1,original_max_position_embeddings=128']
    """
    check_count("train_length", train_length, 2)
    if to <= train_length:
        raise ValueError(
            f"to must be above train_length, the length that the model reads already, got to={to} "
            f"and train_length={train_length}"
        )
    rope: list[Change] = []
    with suppress(ApplyError):  # positions are not rotary
        config: Any = rope_modules(model)[0][2].config
        own = config.max_position_embeddings == train_length  # then nothing has to say it
        trained = {} if own else {"original_max_position_embeddings": train_length}
        rope = _rope(trained, to / train_length, config.rope_parameters.get("rope_theta"))
    names = [f"clip_log_n:train_length={train_length}", *_windows(train_length, to, bool(rope))]
    return [*rope, *(named_change(name) for name in names)]


def _windows(train_length: int, to: int, moved: bool) -> list[str]:
    """Windows to try, as texts of laws, that leave rows up to the trained length unchanged.

    Windows that only drop keys come first; those that move keys are included if ``moved``.
    """
    half, quarter = max(1, train_length // 2), max(1, train_length // 4)
    found = [f"size={train_length}", f"size={half}"]
    if moved:
        found += [
            f"size={max(1, train_length - 4)},sinks=4,sink_positions=window",
            f"size={half},sinks=4,sink_positions=window",
            f"size={half},far=clamp",
        ]
        for size in (half, quarter):  # the farthest key just within the trained length, and nearer
            least = math.ceil((to - size) / (train_length - size))
            found += [f"size={size},far=group,group={group}" for group in (least, least + 1)]
    return [f"window:{one},beyond={train_length}" for one in found]


def _rope(trained: dict[str, int], ratio: float, base: float | None) -> list[Change]:
    """RoPE settings to try.

    Args:
        trained: ``original_max_position_embeddings`` with the trained length.
        ratio: tokens to read over the trained length.
        base: the model's ``rope_theta``; None if layers have different settings.
    """
    factor = int(ratio) if ratio.is_integer() else round(ratio, 4)
    found: list[Change] = [
        RopeRemedy("yarn", {"factor": factor, **trained}),
        RopeRemedy("dynamic", {"factor": 1, **trained}),
        RopeRemedy("dynamic", {"factor": factor, **trained}),
        RopeRemedy("llama3", {"factor": factor, **trained}),
        RopeRemedy("linear", {"factor": factor}),
    ]
    warm = round(1 + 0.2 * math.log(ratio), 3)  # YaRN's is 1 + 0.1 ln factor
    for scale in (1.0, warm):
        more = {"factor": factor, **trained, "attention_factor": scale}
        found.append(RopeRemedy("yarn", more))
    if base is not None:  # else the settings are by type of layer
        found.append(RopeRemedy("default", {"rope_theta": round(base * ratio, 3)}))
    return found
