"""flash-attn 2, 3 and 4, and kernels with the same arguments under other names.

These are SageAttention and PyTorch's ``varlen_attn``. Of flash-attn there are ``flash_attn_func``
and its variants, packed, with a cache, or operators; its versions differ in the parameters that
they have, and a name means the same in all of them. Tensors are (B, L, H, E), or (B, H, L, E) for
SageAttention's layout "HND", packed ones (T, H, E). The causal mask and windows are aligned at the
last key. SageAttention is read as attention of the queries and keys as they are passed; the kernel
rounds them to 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from acutance.capture.kernel_functions.arguments import Arguments
from acutance.capture.kernel_functions.reading import (
    Kernel,
    Layout,
    Reading,
    Sequences,
    batch_reading,
    batched,
    multiply,
    packed,
    paged,
    sequence_reading,
)

__all__ = ["FLASH_ATTN", "OPERATORS", "SAGE", "VARLEN_ATTN"]

_BLHE, _BHLE = Layout(0, 2, 1), Layout(0, 1, 2)


@dataclass(frozen=True)
class _Names:
    """What a library calls the arguments that all have.

    Attributes:
        tensors: query, key and value.
        starts: cumulative lengths of the sequences of queries and of keys.
        scale: factor of the scores.
        causal: whether rows see no later keys.
    """

    tensors: tuple[str, str, str] = ("q", "k", "v")
    starts: tuple[str, str] = ("cu_seqlens_q", "cu_seqlens_k")
    scale: str = "softmax_scale"
    causal: str = "causal"


_FLASH = _Names()
_SAGE = _Names(scale="sm_scale", causal="is_causal")
_VARLEN = _Names(("query", "key", "value"), ("cu_seq_q", "cu_seq_k"), "scale", "is_causal")


def _read_func(arguments: Arguments) -> Reading:
    """``flash_attn_func``: q (B, L, Hq, E), k and v (B, S, H, E)."""
    tensors = _plain(arguments, *arguments.tensors("q", "k", "v"))
    return batch_reading(tensors, _BLHE, **_options(arguments))


def _read_kvpacked(arguments: Arguments) -> Reading:
    """``flash_attn_kvpacked_func``: q (B, L, Hq, E), kv (B, S, 2, H, E)."""
    key, value = arguments.tensor("kv").unbind(-3)
    tensors = _plain(arguments, arguments.tensor("q"), key, value)
    return batch_reading(tensors, _BLHE, **_options(arguments))


def _read_qkvpacked(arguments: Arguments) -> Reading:
    """``flash_attn_qkvpacked_func``: qkv (B, L, 3, H, E), or with grouped heads (B, L, all, E)."""
    qkv, heads = arguments.tensor("qkv"), arguments["num_heads_q"]
    if qkv.dim() == 4:
        if heads is None:
            raise ValueError("num_heads_q is missing")
        fewer = (qkv.shape[2] - heads) // 2
        parts = qkv.split([heads, fewer, fewer], dim=2)
    else:
        parts = qkv.unbind(-3)
    return batch_reading(_plain(arguments, *parts), _BLHE, **_options(arguments))


def _scaled_packed(qkv: Tensor, factor: Tensor) -> Tensor:
    """Multiply the queries in a packed tensor (..., 3, H, E) or (B, L, all heads, E)."""
    if factor.dim() == 4 and qkv.dim() == 4:
        heads = factor.shape[2]
        return torch.cat([multiply(qkv[:, :, :heads], factor), qkv[:, :, heads:]], 2)
    query, key, value = qkv.unbind(-3)
    return torch.stack([multiply(query, factor), key, value], -3)


def _read_varlen(arguments: Arguments, names: _Names = _FLASH) -> Reading:
    """``flash_attn_varlen_func``: packed sequences; keys may be in pages."""
    query, key, value = _plain(arguments, *arguments.tensors(*names.tensors))
    asks = _sequences(arguments, query, names.starts[0], "seqused_q")
    table = _table(arguments)
    if table is None:
        answers = _sequences(arguments, key, names.starts[1], "seqused_k")
    else:
        cumulative, used = arguments.optional(names.starts[1]), arguments.optional("seqused_k")
        if used is None and cumulative is not None:
            used = cumulative.diff()
        if used is None:
            raise ValueError("the lengths of its keys are missing")
        answers = paged(table, key.shape[1], used, key.shape[0])
    return _of_sequences(arguments, (query, key, value), asks, answers, names)


def _read_varlen_kvpacked(arguments: Arguments) -> Reading:
    """``flash_attn_varlen_kvpacked_func``: q (T, Hq, E), kv (T, 2, H, E)."""
    key, value = arguments.tensor("kv").unbind(-3)
    tensors = _plain(arguments, arguments.tensor("q"), key, value)
    asks = _sequences(arguments, tensors[0], "cu_seqlens_q", "seqused_q")
    answers = _sequences(arguments, key, "cu_seqlens_k", "seqused_k")
    return _of_sequences(arguments, tensors, asks, answers)


def _read_varlen_qkvpacked(arguments: Arguments) -> Reading:
    """``flash_attn_varlen_qkvpacked_func``: qkv (T, 3, H, E)."""
    tensors = _plain(arguments, *arguments.tensor("qkv").unbind(-3))
    both = _sequences(arguments, tensors[0], "cu_seqlens", "")
    return _of_sequences(arguments, tensors, both, both)


def _read_kvcache(arguments: Arguments) -> Reading:
    """``flash_attn_with_kvcache``: q (B, L, Hq, E) on a cache (B, S, H, E) or in pages."""
    query, key, value = (arguments.tensor(name) for name in ("q", "k_cache", "v_cache"))
    new, new_value = arguments.optional("k"), arguments.optional("v")
    if arguments["cu_seqlens_q"] is not None or arguments["cu_seqlens_k_new"] is not None:
        raise ValueError("flash_attn_with_kvcache with packed sequences cannot be read")
    blank = arguments.optional("cache_leftpad")
    batch, rows = query.shape[:2]
    table = _table(arguments)
    if (chosen := arguments.optional("cache_batch_idx")) is not None:
        key, value = key[chosen.long()], value[chosen.long()]
    if table is None:
        index = torch.arange(key.shape[1], device=key.device).expand(batch, -1)
        index = index + torch.arange(batch, device=key.device).unsqueeze(1) * key.shape[1]
    else:
        index = paged(table, key.shape[1], query.new_zeros(batch), key.shape[0]).index
    filled = arguments["cache_seqlens"]
    filled = index.shape[1] if filled is None else filled
    lengths = torch.as_tensor(filled, device=key.device).long().reshape(-1).expand(batch)
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    options = _options(arguments)
    if arguments["rotary_cos"] is not None:
        if new is None or blank is not None:
            raise ValueError("flash_attn_with_kvcache with these rotary factors cannot be read")
        by_row = options["causal"] or options["window"] != (None, None)
        query = _rotated(arguments, query, lengths, by_row)
        new = _rotated(arguments, new, lengths, True)
    if new is not None and new_value is not None:  # the kernel writes them there, before or after
        place = lengths.unsqueeze(1) + torch.arange(new.shape[1], device=key.device)
        if int(place.max()) >= index.shape[1]:
            raise ValueError(
                "flash_attn_with_kvcache is called with more keys than its cache holds"
            )
        there = index.gather(1, place).flatten()
        key, value = key.clone(), value.clone()
        key[there] = new.to(key.dtype).flatten(0, 1)
        value[there] = new_value.to(value.dtype).flatten(0, 1)
        lengths = lengths + new.shape[1]
    if blank is not None:
        column = torch.arange(index.shape[1], device=key.device)
        index = index.gather(1, (column + blank.long().unsqueeze(1)).clamp(max=column[-1]))
        lengths = lengths - blank.long()
    tensors = _plain(arguments, query, key, value)
    if bool((lengths == lengths[0]).all()):
        places = index[:, : int(lengths[0])]
        alike = (tensors[0], tensors[1][places], tensors[2][places])
        return batch_reading(alike, _BLHE, **options)
    asks = batched(batch, rows, lengths.new_full((batch,), rows), query.device)
    return _of_sequences(arguments, tensors, asks, Sequences(index, lengths, len(key)))


def _rotated(arguments: Arguments, tensor: Tensor, lengths: Tensor, by_row: bool) -> Tensor:
    """A tensor (B, L, H, E) rotated by ``rotary_cos`` and ``rotary_sin``.

    Args:
        arguments: the factors, (positions, rotated width / 2), and ``rotary_interleaved``.
        tensor: queries or new keys.
        lengths: position of row 0, (B,).
        by_row: whether row i is at position i from there; else all rows are at row 0's.
    """
    rows = torch.arange(tensor.shape[1], device=tensor.device) * by_row
    places = lengths.unsqueeze(1) + rows
    cos, sin = (arguments.tensor(f"rotary_{name}")[places][:, :, None] for name in ("cos", "sin"))
    width = 2 * cos.shape[-1]
    turned, rest = tensor[..., :width], tensor[..., width:]
    pairs = bool(arguments["rotary_interleaved"])
    if pairs:
        first, second = turned.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = turned.chunk(2, -1)
    both = first * cos - second * sin, first * sin + second * cos
    result = torch.stack(both, -1).flatten(-2) if pairs else torch.cat(both, -1)
    return torch.cat([result.to(tensor.dtype), rest], -1)


def _of_sequences(
    arguments: Arguments,
    tensors: tuple[Tensor, Tensor, Tensor],
    queries: Sequences,
    keys: Sequences,
    names: _Names = _FLASH,
) -> Reading:
    """Read a call whose queries are packed (T, Hq, E), or a batch (B, L, Hq, E)."""
    query, key, value = (part.flatten(0, -3) for part in tensors)
    options = _options(arguments, names)
    if tensors[0].dim() == 3:
        return sequence_reading((query, key, value), queries, keys, **options)
    shape = tensors[0].shape[:2]
    reading = sequence_reading(
        (query, key, value), queries, keys, flat=lambda output: output.flatten(0, 1), **options
    )
    return Reading(
        reading.fields, reading.output, lambda factor: reading.place(factor).unflatten(0, shape)
    )


def _sequences(arguments: Arguments, tensor: Tensor, cumulative: str, used: str) -> Sequences:
    """The sequences of a tensor (T, H, E), or of (B, W, H, E) where it is not packed."""
    bounds = arguments.optional(cumulative)
    lengths = arguments.optional(used) if used else None
    if bounds is None:
        if tensor.dim() != 4:
            raise ValueError(f"{cumulative} is missing")
        batch, width = tensor.shape[:2]
        lengths = tensor.new_full((batch,), width, dtype=torch.long) if lengths is None else lengths
        return batched(batch, width, lengths, tensor.device)
    bounds = bounds.to(tensor.device).long()
    lengths = bounds.diff() if lengths is None else lengths.to(tensor.device)
    return packed(bounds[:-1], lengths, len(tensor))


def _table(arguments: Arguments) -> Tensor | None:
    """The table of pages, which has two names."""
    table = arguments.optional("block_table")
    return arguments.optional("page_table") if table is None else table


def _options(arguments: Arguments, names: _Names = _FLASH) -> dict[str, Any]:
    """What all share: masks, scale, softcap, sinks, dropout."""
    if arguments["attention_chunk"] not in (None, 0):
        raise ValueError(f"{arguments.function} with attention_chunk cannot be read")
    softcap, sinks = arguments["softcap"], arguments.optional("s_aux")
    return {
        "causal": bool(arguments[names.causal]),
        "window": arguments.window(),
        "slopes": arguments.optional("alibi_slopes"),
        "scale": arguments.number(names.scale),
        "softcap": float(softcap) if softcap and softcap > 0 else None,
        "sinks": arguments.optional("learnable_sink") if sinks is None else sinks,
        "dropout_p": float(arguments["dropout_p"] or 0.0),
    }


def _plain(
    arguments: Arguments, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, in float32 if they are in 8 bits.

    A descale factor is (B, H) of key heads; it multiplies what is stored.
    """
    descales = [arguments.optional(f"{name}_descale") for name in "qkv"]
    tensors = [query, key, value]
    if any(part.dtype.itemsize == 1 for part in tensors) or descales != [None] * 3:
        for place, descale in enumerate(descales):
            part = tensors[place] = tensors[place].float()
            if descale is not None:
                tensors[place] = part * _per_head(arguments, descale, part)
    return tensors[0], tensors[1], tensors[2]


def _per_head(arguments: Arguments, descale: Tensor, part: Tensor) -> Tensor:
    """A descale factor (B, H) that multiplies (B, L, Hq, E), or packed tensors if B is 1."""
    group = part.shape[-2] // descale.shape[-1]
    factor = descale.float().repeat_interleave(group, -1)
    if part.dim() == 4:
        return factor[:, None, :, None]
    if len(factor) > 1 and not bool((factor == factor[:1]).all()):
        raise ValueError(
            f"{arguments.function} with a descale for each packed sequence cannot be read"
        )
    return factor[0, :, None]


def _read_operator(arguments: Arguments) -> Reading:
    """The operators under the functions; that of flash-attn 3 has all variants."""
    for name in ("k_new", "rotary_cos", "kv_batch_idx", "leftpad_k"):
        if arguments[name] is not None:
            raise ValueError(f"{arguments.function} with {name} cannot be read")
    arguments.ignore("rotary_interleaved")
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table")
    if any(arguments[name] is not None for name in (*lengths, "block_table")):
        return _read_varlen(arguments)
    return _read_func(arguments)


def _read_sage(arguments: Arguments) -> Reading:
    """``sageattn``: tensors (B, H, L, E) or (B, L, H, E)."""
    query, key, value = arguments.tensors("q", "k", "v")
    if arguments["dropout_p"]:  # of a call of SDPA that was redirected here
        raise ValueError("sageattn has no dropout_p")
    layout = {"HND": _BHLE, "NHD": _BLHE}[arguments["tensor_layout"]]
    options = _options(arguments, _SAGE)
    if options["causal"] and layout.read(query).shape[2] != layout.read(key).shape[2]:
        raise ValueError(_ALIKE)
    return batch_reading((query, key, value), layout, **options)


def _read_sage_varlen(arguments: Arguments) -> Reading:
    """``sageattn_varlen``: packed sequences."""
    bounds = [arguments.tensor(name) for name in _SAGE.starts]
    if arguments["is_causal"] and not bounds[0].equal(bounds[1]):
        raise ValueError(_ALIKE)
    return _read_varlen(arguments, _SAGE)


_ALIKE = "sageattn with is_causal needs as many keys as queries"
_READERS = {
    "flash_attn_func": _read_func,
    "flash_attn_kvpacked_func": _read_kvpacked,
    "flash_attn_varlen_func": _read_varlen,
    "flash_attn_varlen_kvpacked_func": _read_varlen_kvpacked,
    "flash_attn_with_kvcache": _read_kvcache,
}
_PACKED = {
    "flash_attn_qkvpacked_func": _read_qkvpacked,
    "flash_attn_varlen_qkvpacked_func": _read_varlen_qkvpacked,
}
_SAGE_VARIANTS = ("pv_fp16_triton", "pv_fp16_cuda", "pv_fp8_cuda", "pv_fp8_cuda_sm90")
_read_varlen_attn = partial(_read_varlen, names=_VARLEN)

#: The functions of flash-attn 2, 3 and 4.
FLASH_ATTN = (
    *(Kernel(name, read) for name, read in _READERS.items()),
    *(Kernel(name, read, "qkv", _scaled_packed) for name, read in _PACKED.items()),
)
#: The functions of SageAttention.
SAGE = (
    Kernel("sageattn", _read_sage),
    *(Kernel(f"sageattn_qk_int8_{variant}", _read_sage) for variant in _SAGE_VARIANTS),
    Kernel("sageattn_varlen", _read_sage_varlen),
)
#: The functions of ``torch.nn.attention.varlen``. Their window (−1, 0) is causal.
VARLEN_ATTN = tuple(
    Kernel(name, _read_varlen_attn, "query") for name in ("varlen_attn", "varlen_attn_out")
)
#: Operators that flash-attn and PyTorch register, by namespace and name.
OPERATORS = {
    **{
        f"{name}_forward": Kernel(f"{name}_forward", _read_operator)
        for name in (
            "flash_attn._flash_attn",
            "flash_attn._flash_attn_varlen",
            "flash_attn_3._flash_attn",
        )
    },
    **{
        name: Kernel(name, _read_varlen_attn, "query")
        for name in ("torch_attn._varlen_attn", "torch_attn._varlen_attn_out")
    },
}
