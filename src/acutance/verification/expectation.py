"""What a model's configuration and parameters say of each attention module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from acutance.verification.rope import Rope, configured_rope, entry_of

__all__ = ["Expectation", "expectation_of", "windows_of"]

_FULL = ("full_attention", "attention", "global_attention")
_SLIDING = ("sliding_attention", "local_attention", "sliding_window_attention")
_CHUNKED = ("chunked_attention",)
#: Architectures whose checkpoints rotate components of two halves, and neighbouring ones.
_HALVES = {
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma"),
    *("gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "gpt_oss", "olmo", "olmo2", "smollm3"),
    *("granite", "stablelm", "starcoder2"),
}
_NEIGHBOURS = {"cohere", "cohere2", "glm", "glm4"}
#: Architectures whose window in both directions is the number of keys on both sides together.
_BOTH_SIDES = {"t5gemma2_encoder", "t5gemma2_text"}
#: Modules that leave out the softcap of their configuration: they pool all tokens with one query.
_UNCAPPED = {"VideoPrismMultiheadAttentionPoolingHead"}


@dataclass(frozen=True)
class Expectation:
    """What an attention module is to compute.

    Attributes:
        scale: factor of the scores; None if nothing states it.
        scale_from: what states it.
        causal: whether later keys are hidden; None if nothing states it.
        window: sliding window, in keys, including the token itself; None for none. In both
            directions, architectures differ in whether it includes the token itself.
        window_from: what states the window, or that there is none.
        softcap: bound of the scores; None for none.
        sinks: the module's sinks, (Hq,); None if it has none.
        key_heads: number of key heads; None if nothing states it.
        rope: rotary positions; None for none.
        rope_problem: why the rotary positions are not known; empty if they are.
        other_ropes: rotary positions of other types of layers.
        masks_problem: why the keys that a row sees are not known; empty if they are.
        interleaved: whether rotated pairs are neighbours, not of two halves; None if unknown.
        folded: a scale that queries, or queries and keys, are multiplied by before; None for none.
        window_of_both_sides: whether a window in both directions is the keys of both sides
            together, as in T5Gemma 2, not those of each side.
    """

    scale: float | None
    scale_from: str
    causal: bool | None
    window: int | None
    window_from: str
    softcap: float | None
    sinks: Tensor | None
    key_heads: int | None
    rope: Rope | None
    rope_problem: str
    other_ropes: tuple[Rope, ...]
    masks_problem: str
    interleaved: bool | None = None
    folded: float | None = None
    window_of_both_sides: bool = False

    @property
    def masks(self) -> bool:
        """Whether the keys that a row sees are known."""
        return not self.masks_problem


def expectation_of(
    module: Any, config: Any, heads: int, width: int, layer: int | None
) -> Expectation:
    """What the configuration and the parameters say of one attention module.

    Args:
        module: the attention module.
        config: its configuration; None if there is none.
        heads: number of query heads, Hq.
        width: components of a query, E.
        layer: the module's index among the layers; None if unknown.
    """
    scale, scale_from = _scale(module, config, width)
    layer_type = _layer_type(module, config, layer)
    window, window_from, problem = _window(config, layer_type)
    causal = getattr(module, "is_causal", None)
    if not isinstance(causal, bool):
        problem = problem or "nothing states whether it is causal"
    elif window is not None and not causal:
        window_from = f"{window_from} in both directions"
    capped = type(module).__name__ not in _UNCAPPED
    softcap: Any = entry_of(config, "attn_logit_softcapping") if capped else None
    sinks = getattr(module, "sinks", None)
    fits = isinstance(sinks, Tensor) and sinks.numel() == heads
    rope, rope_problem, others = _ropes(config, layer_type, width)
    return Expectation(
        scale=scale,
        scale_from=scale_from,
        causal=causal if isinstance(causal, bool) else None,
        window=window,
        window_from=window_from,
        softcap=float(softcap) if _is_positive(softcap) else None,
        sinks=sinks.detach().reshape(-1) if fits and isinstance(sinks, Tensor) else None,
        key_heads=_key_heads(module, config, heads),
        rope=rope,
        rope_problem=rope_problem,
        other_ropes=others,
        masks_problem=problem,
        interleaved=_interleaved(config),
        window_of_both_sides=entry_of(config, "model_type") in _BOTH_SIDES,
    )


def windows_of(config: Any) -> set[int]:
    """Sizes of the sliding windows of a configuration's text layers."""
    if hasattr(config, "get_text_config"):
        try:
            config = config.get_text_config()
        except ValueError:  # it has more than one
            return set()
    types = entry_of(config, "layer_types")
    if isinstance(types, Sequence):
        found = {_window(config, each)[0] for each in types}
    else:
        found = {_window(config, None)[0]}
    return {size for size in found if size is not None}


def _is_positive(value: Any) -> bool:
    """Whether a value is a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _scale(module: Any, config: Any, width: int) -> tuple[float | None, str]:
    """Factor of the scores, and what states it."""
    if _is_positive(base := entry_of(config, "query_pre_attn_scalar")):
        return float(base) ** -0.5, f"query_pre_attn_scalar={base:g}"
    if _is_positive(factor := entry_of(config, "attention_multiplier")):
        return float(factor), f"attention_multiplier={factor:g}"
    for name in ("scaling", "scale"):
        value: Any = getattr(module, name, None)
        if _is_positive(value):
            return float(value), f"the module's {name}={float(value):.4g}"
    return None, ""


def _key_heads(module: Any, config: Any, heads: int) -> int | None:
    """Number of key heads, if the module groups its query heads by them."""
    count = entry_of(config, "num_key_value_heads")
    group = getattr(module, "num_key_value_groups", None)
    fits = isinstance(count, int) and isinstance(group, int) and count * group == heads
    return count if fits else None


def _layer_type(module: Any, config: Any, layer: int | None) -> str | None:
    """The layer's entry in the configuration's ``layer_types``; None if there is none."""
    types = entry_of(config, "layer_types")
    index = getattr(module, "layer_idx", None)
    index = layer if not isinstance(index, int) else index
    if isinstance(types, Sequence) and isinstance(index, int) and 0 <= index < len(types):
        return str(types[index])
    return None


def _window(config: Any, layer_type: str | None) -> tuple[int | None, str, str]:
    """A layer's window, what states it, and why masks are not known; empty if they are."""
    size = entry_of(config, "sliding_window")
    named = f" (layer_types: {layer_type})" if layer_type else ""
    if layer_type in _CHUNKED:
        return None, "", "it attends within chunks"
    if layer_type in _SLIDING:
        if not _is_positive(size):
            return None, "", f"its layer is {layer_type}, but sliding_window is {size}"
        return int(size), f"sliding_window={size}{named}", ""
    if layer_type in _FULL:
        return None, f"no window{named}", ""
    if layer_type is not None:
        return None, "", f"its layer is of type {layer_type}"
    if _is_positive(size) and entry_of(config, "use_sliding_window") is not False:
        return int(size), f"sliding_window={size}", ""
    return None, "no window", ""


def _ropes(
    config: Any, layer_type: str | None, width: int
) -> tuple[Rope | None, str, tuple[Rope, ...]]:
    """Rotary positions of a layer, why they are not known, and those of other types of layers."""
    try:
        rope = configured_rope(config, layer_type, width)
    except (KeyError, ValueError) as error:
        return None, str(error), ()
    others = []
    for other in set(entry_of(config, "layer_types") or ()) - {layer_type}:
        try:
            found = configured_rope(config, other, width)
        except (KeyError, ValueError):
            continue
        if found is not None and found != rope:
            others.append(found)
    return rope, "", tuple(others)


def _interleaved(config: Any) -> bool | None:
    """Whether an architecture rotates neighbouring components; None if it is not listed."""
    kind = entry_of(config, "model_type")
    return False if kind in _HALVES else True if kind in _NEIGHBOURS else None


def layer_index(name: str) -> int | None:
    """The last number in a module's name; None if it has none.

    Example:
        >>> layer_index("model.layers.11.self_attn"), layer_index("attention")
        (11, None)
    """
    numbers = [int(part) for part in name.partition("#")[0].split(".") if part.isdigit()]
    return numbers[-1] if numbers else None
