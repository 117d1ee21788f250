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

from acutance.capture.kernel_functions.arguments import Arguments
from acutance.capture.kernel_functions.reading import (
    PACKED,
    Kernel,
    Layout,
    Reading,
    Sequences,
    batch_reading,
    packed,
    paged,
    sequence_reading,
    widened,
)

__all__ = ["FLASHINFER_DECODE", "FLASHINFER_PREFILL"]

_KEYS = {"NHD": Layout(None, 1, 0), "HND": Layout(None, 0, 1)}
_IGNORED = ("use_fp16_qk_reduction", "o_dtype", "use_tensor_cores", "rope_scale", "rope_theta")
_PLAN_IGNORED = (
    *_IGNORED,
    *("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_qk", "head_dim_vo", "page_size"),
    *("q_data_type", "kv_data_type", "o_data_type", "data_type", "non_blocking", "seq_lens"),
    *("seq_lens_q", "block_tables", "max_token_per_sequence", "max_sequence_kv"),
    *("fixed_split_size", "disable_split_kv", "window_right", "token_pos_in_items_len"),
)
#: By wrapper, the arguments of its last plan.
_plans: weakref.WeakKeyDictionary[Any, Arguments] = weakref.WeakKeyDictionary()


def _read_single(arguments: Arguments) -> Reading:
    """One request: q (L, Hq, E) in prefill, (Hq, E) in decoding."""
    arguments.ignore(*_IGNORED)
    mask, tensors = arguments.optional("custom_mask"), arguments.tensors("q", "k", "v")
    if arguments["packed_custom_mask"] is not None:
        raise ValueError(f"{arguments.function} with packed_custom_mask cannot be read")
    decodes = tensors[0].dim() == 2
    layout, keys = Layout(None, 0, None) if decodes else PACKED, _KEYS[arguments["kv_layout"]]
    scales = [arguments.optional(f"scale_{name}") for name in "qkv"]
    query, key, value = (
        widened(part) if scale is None else part.float() * _over_heads(scale, place, part)
        for part, scale, place in zip(tensors, scales, (layout, keys, keys), strict=True)
    )
    return batch_reading(
        (query, key, _scaled_value(arguments, value)),
        layout,
        keys=keys,
        causal=decodes or (bool(arguments["causal"]) and mask is None),
        window=(_bound(arguments["window_left"]), None),
        attn_mask=None if mask is None else mask.bool()[None, None],
        **_options(arguments, arguments, tensors[0]),
    )


def _over_heads(scale: Tensor, layout: Layout, part: Tensor) -> Tensor:
    """A factor (H,) that multiplies a tensor of this layout."""
    assert layout.heads is not None
    shape = [1] * part.dim()
    shape[layout.heads] = -1
    return scale.float().reshape(shape)


def _read_paged(arguments: Arguments) -> Reading:
    """``run`` of the wrappers of a paged cache: prefill, and decoding of one row a request."""
    wrapper, query = arguments["self"], arguments.tensor("q")
    plan = _plan_of(arguments)
    decodes = plan["qo_indptr"] is None
    prefix = "" if decodes else "paged_kv_"
    starts, pages, last = (
        plan.tensor(f"{prefix}{name}").to(query.device).long()
        for name in ("indptr", "indices", "last_page_len")
    )
    key, value = _pages(arguments, wrapper)
    page, counts = key.shape[1], starts.diff()
    table = packed(starts[:-1], counts, len(pages)).index.clamp(max=max(len(pages) - 1, 0))
    lengths = torch.where(counts > 0, (counts - 1) * page + last, 0)
    answers = paged(pages[table], page, lengths, key.shape[0])
    if decodes:
        if len(query) != len(counts):
            raise ValueError(f"{arguments.function} with several rows of a request cannot be read")
        arguments.ignore("q_len_per_req")
        one = torch.ones_like(counts)
        asks = packed(torch.arange(len(counts), device=query.device), one, len(query))
    else:
        bounds = plan.tensor("qo_indptr").to(query.device).long()
        asks = packed(bounds[:-1], bounds.diff(), len(query))
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    return _planned(arguments, plan, (query, key, value), asks, answers, causal=decodes)


def _read_ragged(arguments: Arguments) -> Reading:
    """``run`` of the wrapper of packed keys and values."""
    query, key, value = arguments.tensors("q", "k", "v")
    plan = _plan_of(arguments)
    if arguments["self"]._kv_layout != "NHD":
        raise ValueError("its key layout is not NHD")
    bounds, starts = (
        plan.tensor(name).to(query.device).long() for name in ("qo_indptr", "kv_indptr")
    )
    asks = packed(bounds[:-1], bounds.diff(), len(query))
    answers = packed(starts[:-1], starts.diff(), len(key))
    return _planned(arguments, plan, (query, key, value), asks, answers, causal=False)


def _planned(
    arguments: Arguments,
    plan: Arguments,
    tensors: tuple[Tensor, Tensor, Tensor],
    queries: Sequences,
    keys: Sequences,
    *,
    causal: bool,
) -> Reading:
    """Read a call with what its plan says."""
    plan.ignore(*_PLAN_IGNORED)
    for name in ("custom_mask", "packed_custom_mask"):
        if plan[name] is not None:
            raise ValueError(f"{arguments.function} with {name} cannot be read")
    given = arguments["window_left"]
    left = _bound(plan["window_left"] if given is None else given)
    query, key, value = tensors
    reading = sequence_reading(
        (widened(query), widened(key), _scaled_value(arguments, value)),
        queries,
        keys,
        causal=causal or bool(plan["causal"]),
        window=(left, None),
        sinks=arguments.optional("sinks"),
        **_options(arguments, plan, query),
    )
    plan.check()
    return reading


def _plan_of(arguments: Arguments) -> Arguments:
    """The arguments of the plan of a wrapper."""
    plan = _plans.get(arguments["self"])
    if plan is None:
        reason = "was planned before the probe or the law began: call plan again"
        raise ValueError(f"{arguments.function} {reason}")
    return plan


def _remember(arguments: Arguments) -> None:
    """Store the arguments of ``plan``; tensors are copied, since they may be overwritten."""
    wrapper = arguments["self"]
    _plans[wrapper] = arguments.keep("self")


def _pages(arguments: Arguments, wrapper: Any) -> tuple[Tensor, Tensor]:
    """Keys and values as (pages, page, H, E)."""
    cache = arguments["paged_kv_cache"]
    key, value = cache.unbind(1) if isinstance(cache, Tensor) else cache
    if wrapper._kv_layout == "HND":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    return key, value


def _options(call: Arguments, plan: Arguments, query: Tensor) -> dict[str, Any]:
    """Scale, with the factors of queries and keys, and softcap."""
    if plan["pos_encoding_mode"] not in (None, "NONE"):
        mode = plan["pos_encoding_mode"]
        raise ValueError(f"{call.function} with pos_encoding_mode={mode!r} cannot be read")
    scale, softcap = plan.number("sm_scale"), plan["logits_soft_cap"]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    for name in ("q_scale", "k_scale"):
        factor = call.number(name)
        scale *= 1.0 if factor is None else factor
    return {"scale": scale, "softcap": float(softcap) if softcap and softcap > 0 else None}


def _scaled_value(arguments: Arguments, value: Tensor) -> Tensor:
    """The values times their factor."""
    factor = arguments.number("v_scale")
    return widened(value) if factor is None else widened(value) * factor


def _bound(left: int | None) -> int | None:
    """The left side of a window; None for no bound."""
    return None if left is None or left < 0 else int(left)


def _deprecated(arguments: Arguments) -> Reading:
    raise ValueError(f"{arguments.function} overrides what its plan says: call run")


_PAGED = "BatchPrefillWithPagedKVCacheWrapper"
_RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"
_DECODE = "BatchDecodeWithPagedKVCacheWrapper"


def _wrapper(name: str, read: Any) -> tuple[Kernel, ...]:
    """The methods of a wrapper."""
    return (
        Kernel(f"{name}.plan", _remember, plan=True),
        Kernel(f"{name}.run", read),
        Kernel(f"{name}.forward", _deprecated),
        Kernel(f"{name}.forward_return_lse", _deprecated),
    )


#: The functions of ``flashinfer.prefill``.
FLASHINFER_PREFILL = (
    Kernel("single_prefill_with_kv_cache", _read_single),
    *_wrapper(_PAGED, _read_paged),
    *_wrapper(_RAGGED, _read_ragged),
)
#: The functions of ``flashinfer.decode``.
FLASHINFER_DECODE = (
    Kernel("single_decode_with_kv_cache", _read_single),
    *_wrapper(_DECODE, _read_paged),
)
