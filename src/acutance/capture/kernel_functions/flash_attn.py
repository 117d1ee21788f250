"""flash-attn 2, 3 and 4, and kernels with the same arguments under other names.

These are SageAttention and PyTorch's ``varlen_attn``. Of flash-attn there are ``flash_attn_func``
and its variants, packed, with a cache, or operators; its versions differ in the parameters that
they have, and a name means the same in all of them. Tensors are (B, L, H, E), or (B, H, L, E) for
SageAttention's layout "HND", packed ones (T, H, E). The causal mask and windows are aligned at the
last key. SageAttention is read as attention of the queries and keys as they are passed; the kernel
rounds them to 8 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acutance.capture.kernel_functions.reading import FunctionCall, Kernel, Reading, Sequences
from acutance.capture.rotary import rotated

_TABLE = "block_table", "page_table"  # names of the table of pages


def _read(call: FunctionCall, layout: str = "BLHE") -> Reading:
    """Any function without a cache: on a batch or on packed sequences.

    Queries, keys and values may be one tensor (..., 3, H, E), or (B, L, all heads, E).
    """
    call.ignore("rotary_interleaved")
    qkv, kv, heads = call.optional("qkv"), call.optional("kv"), call["num_heads_q"]
    if qkv is None:
        query = call.tensor("q")
        key, value = (call.tensor("k"), call.tensor("v")) if kv is None else kv.unbind(-3)
    elif heads is None:
        query, key, value = qkv.unbind(-3)
    else:
        fewer = (qkv.shape[-2] - heads) // 2
        query, key, value = qkv.split([heads, fewer, fewer], dim=-2)
    tensors = query, key, value = _widened(call, query, key, value)
    queries, keys = _sequences(call, query, "q"), _sequences(call, key, "k")
    if queries is None and keys is None:
        reading = Reading.of_batch(tensors, layout, **_options(call))
    else:
        queries, keys = queries or Sequences.batched(query), keys or Sequences.batched(key)
        reading = Reading.of_sequences(tensors, queries, keys, **_options(call))
    if qkv is None:
        return reading

    def rows(tensor: Tensor) -> Tensor:
        if heads is not None:
            tensor = tensor[..., :heads, :]
        elif tensor.dim() == qkv.dim():
            tensor = tensor.unbind(-3)[0]
        return reading.rows(tensor)

    return Reading(reading.fields, rows, "qkv")


def _sequences(call: FunctionCall, tensor: Tensor, side: str) -> Sequences | None:
    """The sequences of queries ("q") or keys ("k"); None for a batch of one length."""
    bounds = call.optional(f"cu_seqlens_{side}", "cu_seqlens")
    lengths = call.optional(f"seqused_{side}")
    if side == "k" and (table := call.optional(*_TABLE)) is not None:
        lengths = bounds.diff() if lengths is None and bounds is not None else lengths
        if lengths is None:
            raise ValueError("the lengths of its keys are missing")
        return Sequences.paged(table, tensor.shape[1], lengths)
    if bounds is not None:
        return Sequences.packed(bounds.to(tensor.device), lengths)
    if tensor.dim() != 4:
        raise ValueError(f"cu_seqlens_{side} is missing")
    return None if lengths is None else Sequences.batched(tensor, lengths)


def _options(call: FunctionCall) -> dict[str, Any]:
    """What all share: masks, scale, softcap, sinks, dropout."""
    if call["attention_chunk"] not in (None, 0):
        raise ValueError(f"{call.name} with attention_chunk cannot be read")
    softcap, sides = call["softcap"], call["window_size"]
    if sides is None:
        sides = call["window_size_left"], call["window_size_right"]
    if any(side is not None and int(side) < -1 for side in sides):
        raise ValueError(f"{call.name} is called with the window {tuple(sides)}")
    return {
        "causal": bool(call["causal"]),
        "window": tuple(None if side is None or int(side) < 0 else int(side) for side in sides),
        "slopes": call.optional("alibi_slopes"),
        "scale": call.number("softmax_scale"),
        "softcap": float(softcap) if softcap and softcap > 0 else None,
        "sinks": call.optional("s_aux", "learnable_sink"),
        "dropout_p": float(call["dropout_p"] or 0.0),
    }


def _widened(call: FunctionCall, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, in float32 if one is in 8 bits.

    A descale factor (B, H), of key heads, multiplies what is stored.
    """
    descales = [call.optional(f"{name}_descale") for name in "qkv"]
    query, key, value = tensors
    if descales == [None] * 3 and all(tensor.dtype.itemsize > 1 for tensor in tensors):
        return query, key, value
    query, key, value = (
        tensor.float() if descale is None else tensor.float() * _factors(call, descale, tensor)
        for tensor, descale in zip(tensors, descales, strict=True)
    )
    return query, key, value


def _factors(call: FunctionCall, descale: Tensor, tensor: Tensor) -> Tensor:
    """A descale factor (B, H) as it multiplies (B, L, Hq, E), or packed tensors if B is 1."""
    factors = descale.float().repeat_interleave(tensor.shape[-2] // descale.shape[-1], -1)
    if tensor.dim() == 4:
        return factors[:, None, :, None]
    if not bool((factors == factors[:1]).all()):
        raise ValueError(f"{call.name} with a descale for each packed sequence cannot be read")
    return factors[0, :, None]


def _read_kvcache(call: FunctionCall) -> Reading:
    """``flash_attn_with_kvcache``: q (B, L, Hq, E) on a cache (B, S, H, E) or in pages."""
    query, key, value = (call.tensor(name) for name in ("q", "k_cache", "v_cache"))
    new, new_value = call.optional("k"), call.optional("v")
    if call["cu_seqlens_q"] is not None or call["cu_seqlens_k_new"] is not None:
        raise ValueError("flash_attn_with_kvcache with packed sequences cannot be read")
    blank, table = call.optional("cache_leftpad"), call.optional(*_TABLE)
    if (chosen := call.optional("cache_batch_idx")) is not None:
        key, value = key[chosen.long()], value[chosen.long()]
    if table is None:
        table = torch.arange(len(query), device=key.device).unsqueeze(1)  # a page each
    filled = call["cache_seqlens"]
    filled = table.shape[1] * key.shape[1] if filled is None else filled
    lengths = torch.as_tensor(filled, device=key.device).long().reshape(-1).expand(len(query))
    index = Sequences.paged(table, key.shape[1], lengths).index
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    options = _options(call)
    if call["rotary_cos"] is not None:
        if new is None or blank is not None:
            raise ValueError("flash_attn_with_kvcache with these rotary factors cannot be read")
        by_row = options["causal"] or options["window"] != (None, None)
        query = _rotated(call, query, lengths, by_row)
        new = _rotated(call, new, lengths, True)
    if new is not None and new_value is not None:  # the kernel writes them there, before or after
        columns = lengths.unsqueeze(1) + torch.arange(new.shape[1], device=key.device)
        if int(columns.max()) >= index.shape[1]:
            raise ValueError(
                "flash_attn_with_kvcache is called with more keys than its cache holds"
            )
        written = index.gather(1, columns).flatten()
        key, value = key.clone(), value.clone()
        key[written] = new.to(key.dtype).flatten(0, 1)
        value[written] = new_value.to(value.dtype).flatten(0, 1)
        lengths = lengths + new.shape[1]
    if blank is not None:
        columns = torch.arange(index.shape[1], device=key.device) + blank.long().unsqueeze(1)
        index = index.gather(1, columns.clamp(max=index.shape[1] - 1))
        lengths = lengths - blank.long()
    query, key, value = _widened(call, query, key, value)
    if bool((lengths == lengths[0]).all()):
        index = index[:, : int(lengths[0])]
        return Reading.of_batch((query, key[index], value[index]), **options)
    keys = Sequences(index, lengths)
    return Reading.of_sequences((query, key, value), Sequences.batched(query), keys, **options)


def _rotated(call: FunctionCall, tensor: Tensor, lengths: Tensor, by_row: bool) -> Tensor:
    """A tensor (B, L, H, E) rotated by ``rotary_cos`` and ``rotary_sin``.

    Args:
        call: the factors, (positions, rotated width / 2), and ``rotary_interleaved``.
        tensor: queries or new keys.
        lengths: position of row 0, (B,).
        by_row: whether row i is at position i from there; else all rows are at row 0's.
    """
    rows = torch.arange(tensor.shape[1], device=tensor.device) * by_row
    places = lengths.unsqueeze(1) + rows
    cos, sin = (call.tensor(f"rotary_{name}")[places][:, :, None] for name in ("cos", "sin"))
    return rotated(tensor, cos, sin, interleaved=bool(call["rotary_interleaved"]))


def _read_sage(call: FunctionCall) -> Reading:
    """``sageattn`` and ``sageattn_varlen``: tensors (B, H, L, E), (B, L, H, E) or (T, H, E)."""
    if call["dropout_p"]:  # of a call of SDPA that was redirected here
        raise ValueError("sageattn has no dropout_p")
    reading = _read(call, "BHLE" if call["tensor_layout"] == "HND" else "BLHE")
    bounds = [call.optional(f"cu_seqlens_{side}") for side in "qk"]
    alike = reading.fields["query"].shape[2] == reading.fields["key"].shape[2]
    if bounds[0] is not None and bounds[1] is not None:
        alike = bounds[0].equal(bounds[1])
    if call["causal"] and not alike:
        raise ValueError("sageattn with is_causal needs as many keys as queries")
    return reading


_SAGE = {"softmax_scale": "sm_scale", "causal": "is_causal"}
_SAGE_VARIANTS = ("pv_fp16_triton", "pv_fp16_cuda", "pv_fp8_cuda", "pv_fp8_cuda_sm90")
_VARLEN = {
    "q": "query",
    "k": "key",
    "v": "value",
    "softmax_scale": "scale",
    "causal": "is_causal",
    **{f"cu_seqlens_{side}": f"cu_seq_{side}" for side in "qk"},
}

_VARIANTS = ("", "kvpacked_", "qkvpacked_", "varlen_", "varlen_kvpacked_", "varlen_qkvpacked_")

#: The functions of flash-attn 2, 3 and 4.
FLASH_ATTN = (
    Kernel("flash_attn_with_kvcache", _read_kvcache),
    *(Kernel(f"flash_attn_{variant}func", _read) for variant in _VARIANTS),
)
#: The functions of SageAttention.
SAGE = tuple(
    Kernel(f"sageattn{variant}", _read_sage, _SAGE)
    for variant in ("", "_varlen", *(f"_qk_int8_{variant}" for variant in _SAGE_VARIANTS))
)
#: The functions of ``torch.nn.attention.varlen``. Their window (−1, 0) is causal.
VARLEN_ATTN = tuple(Kernel(name, _read, _VARLEN) for name in ("varlen_attn", "varlen_attn_out"))
#: Operators that flash-attn and PyTorch register, by namespace and name.
OPERATORS = {
    kernel.name: kernel
    for kernel in (
        Kernel("flash_attn._flash_attn_forward", _read),
        Kernel("flash_attn._flash_attn_varlen_forward", _read),
        Kernel("flash_attn_3._flash_attn_forward", _read),
        Kernel("torch_attn._varlen_attn", _read, _VARLEN),
        Kernel("torch_attn._varlen_attn_out", _read, _VARLEN),
    )
}
