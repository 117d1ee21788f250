"""TransformerEngine: ``DotProductAttention.forward``.

Tensors are (L, B, H, E) for the format "sbhd", (B, L, H, E) for "bshd" and (T, H, E) for "thd"; the
output has its heads flattened into the last dimension. Causal masks are aligned at the first key
unless the mask's type says "bottom_right".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acutance.capture.kernel_functions.reading import (
    FunctionCall,
    Kernel,
    Reading,
    Sequences,
    banded,
)

_NAME = "DotProductAttention"
_NAMES = {"q": "query_layer", "k": "key_layer", "v": "value_layer"}
_REFUSED = ("qkv_layer", "kv_layer", "inference_params", "score_mod", "score_mod_tensors")
_IGNORED = (
    *("checkpoint_core_attention", "fast_zero_fill", "max_seqlen_kv", "bf16_backward"),
    *("score_mod_bprop", "score_mod_bprop_tensors", "pad_between_seqs"),
)
_TYPES = {
    *("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right"),
    *("padding_causal_bottom_right", "arbitrary"),
}


def _read(call: FunctionCall) -> Reading:
    module: Any = call["self"]
    call.ignore(*_IGNORED)
    for name in _REFUSED:
        if call[name] is not None:
            raise ValueError(f"{_NAME} with {name} cannot be read")
    group = module.cp_group
    if group is not None and (isinstance(group, list) or group.size() > 1):
        raise ValueError(f"{_NAME} with context parallelism has keys on other ranks; not read")
    tensors = call.qkv()
    query = tensors[0]
    if type(query) is not Tensor:
        raise ValueError(f"{_NAME} of {type(query).__name__} cannot be read")
    kind = (call["attn_mask_type"] or module.attn_mask_type).replace(",", "_")
    kind = "padding_causal" if kind == "causal_padding" else kind
    if kind not in _TYPES:
        raise ValueError(f"{_NAME} with attn_mask_type={kind!r} cannot be read")
    options = _options(call, module, kind)
    form = call["qkv_format"] or module.qkv_format
    options |= _added(call, options["scale"], is_packed=form == "thd")
    if form == "thd":
        queries, keys = _of_thd(call, "q"), _of_thd(call, "kv")
        reading = Reading.of_sequences(tensors, queries, keys, **options)
    else:
        if kind == "arbitrary":
            options["attn_mask"] = torch.logical_not(call.tensor("attention_mask").bool())
        elif "padding" not in kind:
            call.ignore("attention_mask", "cu_seqlens_q", "cu_seqlens_kv")
        reading = Reading.of_batch(tensors, {"sbhd": "LBHE", "bshd": "BLHE"}[form], **options)
        if "padding" in kind:
            _add_padding(call, reading.fields, options)

    def rows(tensor: Tensor) -> Tensor:
        is_output = tensor.dim() < query.dim()
        return reading.rows(tensor.unflatten(-1, (query.shape[-2], -1)) if is_output else tensor)

    return Reading(reading.fields, rows)


def _options(call: FunctionCall, module: Any, kind: str) -> dict[str, Any]:
    """Masks, scale, dropout and sinks."""
    causal, size = "causal" in kind, call["window_size"]
    size = module.window_size if size is None else size
    if size is None or (not causal and tuple(size) == (-1, 0)):
        size = (-1, -1)
    at_end = kind not in ("causal", "padding_causal")
    given = call["bottom_right_diagonal"]
    given = getattr(module, "bottom_right_diagonal", None) if given is None else given
    if at_end and given is not None and "bottom_right" not in kind:
        at_end = bool(given)
    sinks = getattr(module, "softmax_offset", None)
    return {
        "causal": causal,
        "window": tuple(None if side < 0 else int(side) for side in size),
        "at_end": at_end,
        "scale": float(module.flash_attention.softmax_scale),
        "dropout_p": float(module.attention_dropout) if module.training else 0.0,
        "sinks": None if sinks is None else sinks.reshape(-1),
        "cross": module.attention_type == "cross",
    }


def _add_padding(call: FunctionCall, fields: dict[str, Any], options: dict[str, Any]) -> None:
    """Add the masks of a batch whose sequences are padded at their ends."""
    rows, columns = fields["query"].shape[2], fields["key"].shape[2]
    device = fields["query"].device
    lengths = _lengths(call, "q", rows, device)
    key_lengths = _lengths(call, "kv", columns, device)
    fields["real"] = torch.arange(rows, device=device) < lengths.unsqueeze(1)
    fields["key_mask"] = torch.arange(columns, device=device) < key_lengths.unsqueeze(1)
    fields["packed"] = True
    if options["at_end"] and not torch.equal(rows - lengths, columns - key_lengths):
        # rows are aligned at their own last key
        if "bias" in fields:
            raise ValueError(f"{_NAME} with a bias and padding_causal_bottom_right cannot be read")
        for name in ("is_causal", "window", "query_offset"):
            fields.pop(name, None)
        left, right = options["window"]
        right = 0 if options["causal"] else right
        offsets = (key_lengths - lengths).tolist()
        masks = [banded(rows, columns, offset, left, right, device) for offset in offsets]
        fields["attn_mask"] = torch.cat(masks)


def _lengths(call: FunctionCall, name: str, width: int, device: torch.device) -> Tensor:
    """Lengths (B,) of padded sequences, from cumulative lengths or from ``attention_mask``."""
    cumulative = call.optional(f"cu_seqlens_{name}")
    mask = call["attention_mask"]
    if cumulative is not None:
        return cumulative.to(device).long().diff()
    if isinstance(mask, tuple | list):
        mask = mask[name == "kv"]
    if not isinstance(mask, Tensor):
        raise ValueError(f"{_NAME} with padding needs cu_seqlens or attention_mask")
    real = torch.logical_not(mask.to(device).bool()).reshape(mask.shape[0], -1)
    lengths = real.sum(-1)
    at_start = torch.arange(width, device=device) < lengths.unsqueeze(1)
    if real.shape[1] != width or not torch.equal(real, at_start):
        raise ValueError(f"{_NAME} with padding that is not at the ends cannot be read")
    return lengths


def _of_thd(call: FunctionCall, name: str) -> Sequences:
    """The sequences of a packed tensor (T, H, E), with or without gaps."""
    cumulative = call.tensor(f"cu_seqlens_{name}").long()
    starts = call.optional(f"cu_seqlens_{name}_padded")
    return Sequences.packed(cumulative if starts is None else starts, cumulative.diff())


def _added(call: FunctionCall, scale: float, *, is_packed: bool) -> dict[str, Any]:
    """What is added to the scores: slopes of ALiBi, or a bias (1, H, L, S)."""
    kind, bias = call["core_attention_bias_type"], call.optional("core_attention_bias")
    slopes = call.optional("alibi_slopes")
    if kind == "alibi":
        if slopes is None:
            raise ValueError(f"{_NAME} with alibi and without alibi_slopes cannot be read")
        return {"slopes": slopes}
    if kind == "no_bias" or bias is None:
        return {}
    if is_packed:
        raise ValueError(f"{_NAME} with a bias of packed sequences cannot be read")
    return {"bias": bias * scale if kind == "pre_scale_bias" else bias}


#: The module of TransformerEngine.
TRANSFORMER_ENGINE = (Kernel(f"{_NAME}.forward", _read, _NAMES),)
