"""FlashInfer: prefill and decoding, for one request or for a batch with a plan.

Tensors are (L, Hq, E) and (S, H, E), or (H, S, E) for the key layout "HND". The causal mask is
aligned at the last key. What a wrapper's ``plan`` was given is known only if a probe or a law was
open when it was called.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from acutance.capture.kernel_functions.reading import FunctionCall, Kernel, Reading, Sequences

_IGNORED = (
    *("use_fp16_qk_reduction", "o_dtype", "use_tensor_cores", "rope_scale", "rope_theta"),
    *("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_qk", "head_dim_vo", "page_size"),
    *("q_data_type", "kv_data_type", "o_data_type", "data_type", "non_blocking", "seq_lens"),
    *("seq_lens_q", "block_tables", "max_token_per_sequence", "max_sequence_kv"),
    *("fixed_split_size", "disable_split_kv", "window_right", "token_pos_in_items_len"),
)
#: By wrapper, the arguments of its last plan.
_plans: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _read_single(call: FunctionCall) -> Reading:
    """One request: q (L, Hq, E) in prefill, (Hq, E) in decoding."""
    mask, tensors = call.optional("custom_mask"), call.qkv()
    decodes = tensors[0].dim() == 2
    keys = {"NHD": "LHE", "HND": "HLE"}[call["kv_layout"]]
    layouts = ("HE" if decodes else "LHE", keys, keys)
    query, key, value = (
        _scaled(tensor, call.optional(f"scale_{name}"), layout.index("H"))
        for name, tensor, layout in zip("qkv", tensors, layouts, strict=True)
    )
    options = _options(call, query, causal=decodes)
    options["causal"] &= mask is None or decodes
    if mask is not None:
        options["attn_mask"] = mask.bool()[None, None]
    value = _scaled(value, call.number("v_scale"))
    return Reading.of_batch((query, key, value), layouts[0], keys=keys, **options)


def _scaled(tensor: Tensor, factor: Tensor | float | None, heads: int | None = None) -> Tensor:
    """A tensor times a number, or times a factor (H,) of its dimension ``heads``.

    It is float32 if it was in 8 bits or has a factor for each head.
    """
    if tensor.dtype.itemsize < 2 or isinstance(factor, Tensor):
        tensor = tensor.float()
    if isinstance(factor, Tensor) and heads is not None:
        factor = factor.float().reshape(-1, *[1] * (tensor.dim() - 1 - heads))
    return tensor if factor is None else tensor * factor


def _read_paged(call: FunctionCall) -> Reading:
    """``run`` of the wrappers of a paged cache: prefill, and decoding of one row a request."""
    query, cache = call.tensor("q"), call["paged_kv_cache"]
    layout = _add_plan(call)
    key, value = cache.unbind(1) if isinstance(cache, Tensor) else cache
    if layout == "HND":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    bounds = call.optional("qo_indptr")
    prefix = "paged_kv_" if bounds is not None else ""
    starts, pages, last = (
        call.tensor(f"{prefix}{name}").to(query.device).long()
        for name in ("indptr", "indices", "last_page_len")
    )
    counts = starts.diff()
    if bounds is None:  # decoding
        call.ignore("q_len_per_req")
        bounds = torch.arange(len(counts) + 1, device=query.device)
        if len(query) != len(counts):
            raise ValueError(f"{call.name} with several rows of a request cannot be read")
    table = Sequences.packed(starts).index.clamp(max=max(len(pages) - 1, 0))
    lengths = torch.where(counts > 0, (counts - 1) * key.shape[1] + last, 0)
    keys = Sequences.paged(pages[table], key.shape[1], lengths)
    return _planned(call, (query, key, value), bounds, keys, causal=not prefix)


def _read_ragged(call: FunctionCall) -> Reading:
    """``run`` of the wrapper of packed keys and values."""
    tensors = call.qkv()
    if _add_plan(call) != "NHD":
        raise ValueError("its key layout is not NHD")
    keys = Sequences.packed(call.tensor("kv_indptr").to(tensors[0].device))
    return _planned(call, tensors, call.tensor("qo_indptr"), keys, causal=False)


def _planned(
    call: FunctionCall,
    tensors: tuple[Tensor, Tensor, Tensor],
    bounds: Tensor,
    keys: Sequences,
    *,
    causal: bool,
) -> Reading:
    """Read a call of a wrapper, given where its queries and keys lie."""
    if call["custom_mask"] is not None:
        raise ValueError(f"{call.name} with custom_mask cannot be read")
    query, key, value = tensors
    options = _options(call, query, causal=causal)
    tensors = _scaled(query, None), _scaled(key, None), _scaled(value, call.number("v_scale"))
    queries, sinks = Sequences.packed(bounds.to(query.device)), call.optional("sinks")
    return Reading.of_sequences(tensors, queries, keys, sinks=sinks, **options)


def _add_plan(call: FunctionCall) -> str:
    """Add what the plan of a wrapper was given to the arguments of a call; its key layout."""
    wrapper = call["self"]
    plan = _plans.get(wrapper)
    if plan is None:
        reason = "was planned before the probe or the law began: call plan again"
        raise ValueError(f"{call.name} {reason}")
    call.add(plan)
    layout: str = wrapper._kv_layout
    return layout


def _remember(call: FunctionCall) -> None:
    """Store the arguments of ``plan``; tensors are copied, since they may be overwritten."""
    planned = call.changed()
    wrapper = planned.pop("self")
    _plans[wrapper] = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in planned.items()
    }


def _options(call: FunctionCall, query: Tensor, *, causal: bool) -> dict[str, Any]:
    """Mask, scale with the factors of queries and keys, and softcap."""
    call.ignore(*_IGNORED)
    if call["packed_custom_mask"] is not None:
        raise ValueError(f"{call.name} with packed_custom_mask cannot be read")
    if (mode := call["pos_encoding_mode"]) not in (None, "NONE"):
        raise ValueError(f"{call.name} with pos_encoding_mode={mode!r} cannot be read")
    scale, softcap = call.number("sm_scale"), call["logits_soft_cap"]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    for name in ("q_scale", "k_scale"):
        factor = call.number(name)
        scale *= 1.0 if factor is None else factor
    left = call["window_left"]
    return {
        "causal": causal or bool(call["causal"]),
        "window": (None if left is None or left < 0 else int(left), None),
        "scale": scale,
        "softcap": float(softcap) if softcap and softcap > 0 else None,
    }


def _deprecated(call: FunctionCall) -> Reading:
    raise ValueError(f"{call.name} overrides what its plan says: call run")


def _wrapper(name: str, read: Any) -> tuple[Kernel, ...]:
    """The methods of a wrapper."""
    return (
        Kernel(f"{name}.plan", _remember, plans=True),
        Kernel(f"{name}.run", read),
        Kernel(f"{name}.forward", _deprecated),
        Kernel(f"{name}.forward_return_lse", _deprecated),
    )


#: The functions of ``flashinfer.prefill``.
FLASHINFER_PREFILL = (
    Kernel("single_prefill_with_kv_cache", _read_single),
    *_wrapper("BatchPrefillWithPagedKVCacheWrapper", _read_paged),
    *_wrapper("BatchPrefillWithRaggedKVCacheWrapper", _read_ragged),
)
#: The functions of ``flashinfer.decode``.
FLASHINFER_DECODE = (
    Kernel("single_decode_with_kv_cache", _read_single),
    *_wrapper("BatchDecodeWithPagedKVCacheWrapper", _read_paged),
)
