"""TransformerEngine: ``DotProductAttention.forward``.

Tensors are (L, B, H, E) for the format "sbhd", (B, L, H, E) for "bshd" and (T, H, E) for "thd"; the
output has its heads flattened into the last dimension. Causal masks are aligned at the first key
unless the mask's type says "bottom_right".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acutance.capture.kernel_functions.arguments import Arguments
from acutance.capture.kernel_functions.reading import (
    Kernel,
    Layout,
    Reading,
    Sequences,
    banded,
    batch_reading,
    packed,
    sequence_reading,
)

__all__ = ["TRANSFORMER_ENGINE"]

_LAYOUTS = {"sbhd": Layout(1, 2, 0), "bshd": Layout(0, 2, 1)}
_NAME = "DotProductAttention"
_REFUSED = ("qkv_layer", "kv_layer", "inference_params", "score_mod", "score_mod_tensors")
_IGNORED = ("checkpoint_core_attention", "fast_zero_fill", "max_seqlen_kv", "bf16_backward")
_TYPES = {
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
}


def _read(arguments: Arguments) -> Reading:
    module: Any = arguments["self"]
    arguments.ignore(*_IGNORED, "score_mod_bprop", "score_mod_bprop_tensors", "pad_between_seqs")
    for name in _REFUSED:
        if arguments[name] is not None:
            raise ValueError(f"{_NAME} with {name} cannot be read")
    group = module.cp_group
    if group is not None and (isinstance(group, list) or group.size() > 1):
        raise ValueError(f"{_NAME} with context parallelism has keys on other ranks; not read")
    query, key, value = arguments.tensors("query_layer", "key_layer", "value_layer")
    if type(query) is not Tensor:
        raise ValueError(f"{_NAME} of {type(query).__name__} cannot be read")
    kind = _mask_type(arguments["attn_mask_type"] or module.attn_mask_type)
    causal, size = "causal" in kind, arguments["window_size"]
    size = module.window_size if size is None else size
    pair = (-1, -1) if size is None or (not causal and tuple(size) == (-1, 0)) else tuple(size)
    options: dict[str, Any] = {
        "causal": causal,
        "window": tuple(None if side < 0 else int(side) for side in pair),
        "at_end": _at_end(arguments, module, kind),
        "scale": float(module.flash_attention.softmax_scale),
        "dropout_p": float(module.attention_dropout) if module.training else 0.0,
        "sinks": getattr(module, "softmax_offset", None),
        "cross": module.attention_type == "cross",
    }
    if options["sinks"] is not None:
        options["sinks"] = options["sinks"].reshape(-1)
    heads = query.shape[-2]
    form = arguments["qkv_format"] or module.qkv_format
    if form == "thd":
        options |= _added(arguments, options["scale"], packed_form=True)
        return sequence_reading(
            (query, key, value),
            _of_thd(arguments, query, "q"),
            _of_thd(arguments, key, "kv"),
            flat=lambda output: output.unflatten(-1, (heads, -1)),
            **options,
        )
    layout = _LAYOUTS[form]

    def output(result: Tensor) -> Tensor:
        return layout.read(result.unflatten(-1, (heads, -1)))

    options |= _added(arguments, options["scale"], packed_form=False)
    if kind == "arbitrary":
        options["attn_mask"] = torch.logical_not(arguments.tensor("attention_mask").bool())
    elif "padding" not in kind:
        arguments.ignore("attention_mask", "cu_seqlens_q", "cu_seqlens_kv")
    reading = batch_reading((query, key, value), layout, output=output, **options)
    return _padded(arguments, reading, options) if "padding" in kind else reading


def _padded(arguments: Arguments, reading: Reading, options: dict[str, Any]) -> Reading:
    """The reading of a batch whose sequences are padded at their ends."""
    fields = reading.fields
    query, key = fields["query"], fields["key"]
    lengths = [
        _lengths(arguments, name, part.shape[2], part.device, place)
        for place, (name, part) in enumerate((("q", query), ("kv", key)))
    ]
    fields["real"], fields["key_mask"] = (
        torch.arange(part.shape[2], device=part.device) < length.unsqueeze(1)
        for part, length in zip((query, key), lengths, strict=True)
    )
    fields["packed"] = True
    ends = [part.shape[2] - length for part, length in zip((query, key), lengths, strict=True)]
    if options["at_end"] and not torch.equal(*ends):  # rows are aligned at their own last key
        if "bias" in fields:
            raise ValueError(f"{_NAME} with a bias and padding_causal_bottom_right cannot be read")
        for name in ("is_causal", "window", "query_offset"):
            fields.pop(name, None)
        left, right = options["window"]
        right = 0 if options["causal"] else right
        shape = query.shape[2], key.shape[2]
        fields["attn_mask"] = torch.cat(
            [
                banded(*shape, offset, left, right, query.device)
                for offset in (lengths[1] - lengths[0]).tolist()
            ]
        )
    return reading


def _lengths(
    arguments: Arguments, name: str, width: int, device: torch.device, place: int
) -> Tensor:
    """Lengths (B,) of padded sequences, from cumulative lengths or from ``attention_mask``."""
    cumulative = arguments.optional(f"cu_seqlens_{name}")
    mask = arguments["attention_mask"]
    if cumulative is not None:
        return cumulative.to(device).long().diff()
    mask = mask[place] if isinstance(mask, tuple | list) else mask
    if not isinstance(mask, Tensor):
        raise ValueError(f"{_NAME} with padding needs cu_seqlens or attention_mask")
    real = torch.logical_not(mask.to(device).bool()).reshape(mask.shape[0], -1)
    lengths = real.sum(-1)
    at_end = torch.arange(width, device=device) < lengths.unsqueeze(1)
    if real.shape[1] != width or not torch.equal(real, at_end):
        raise ValueError(f"{_NAME} with padding that is not at the ends cannot be read")
    return lengths


def _of_thd(arguments: Arguments, tensor: Tensor, name: str) -> Sequences:
    """The packed sequences of a tensor (T, H, E), with or without gaps."""
    cumulative = arguments.tensor(f"cu_seqlens_{name}").long()
    starts = arguments.optional(f"cu_seqlens_{name}_padded")
    starts = cumulative if starts is None else starts.long()
    return packed(starts[:-1], cumulative.diff(), len(tensor))


def _added(arguments: Arguments, scale: float, *, packed_form: bool) -> dict[str, Any]:
    """What is added to the scores: slopes of ALiBi, or a bias (1, H, L, S)."""
    kind, bias = arguments["core_attention_bias_type"], arguments.optional("core_attention_bias")
    slopes = arguments.optional("alibi_slopes")
    if kind == "alibi":
        if slopes is None:
            raise ValueError(f"{_NAME} with alibi and without alibi_slopes cannot be read")
        return {"slopes": slopes}
    if kind == "no_bias" or bias is None:
        return {}
    if packed_form:
        raise ValueError(f"{_NAME} with a bias of packed sequences cannot be read")
    return {"bias": bias * scale if kind == "pre_scale_bias" else bias}


def _mask_type(kind: str) -> str:
    """The type of the mask, in one spelling."""
    kind = kind.replace(",", "_")
    kind = "padding_causal" if kind == "causal_padding" else kind
    if kind not in _TYPES:
        raise ValueError(f"{_NAME} with attn_mask_type={kind!r} cannot be read")
    return kind


def _at_end(arguments: Arguments, module: Any, kind: str) -> bool:
    """Whether the mask is aligned at the last key."""
    if kind in ("causal", "padding_causal"):
        arguments.ignore("bottom_right_diagonal")
        return False
    given = arguments["bottom_right_diagonal"]
    given = getattr(module, "bottom_right_diagonal", None) if given is None else given
    return True if given is None or "bottom_right" in kind else bool(given)


#: The module of TransformerEngine.
TRANSFORMER_ENGINE = (Kernel(f"{_NAME}.forward", _read, "query_layer"),)
