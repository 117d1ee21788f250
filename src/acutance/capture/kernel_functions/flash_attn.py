"""flash-attn 2, 3 and 4: ``flash_attn_func`` and its variants, packed, with a cache, or operators.

Versions differ in the parameters that they have; a name means the same in all of them. Tensors are
(B, L, H, E), packed ones (T, H, E). The causal mask and windows are aligned at the last key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acutance.capture.kernel_functions.arguments import Arguments
from acutance.capture.kernel_functions.reading import Kernel, Layout, Reading, multiply
from acutance.capture.kernel_functions.sequences import (
    Sequences,
    batch_reading,
    batched,
    packed,
    paged,
    sequence_reading,
)

__all__ = ["FLASH_ATTN", "FLASH_OPERATORS"]

_BLHE = Layout(0, 2, 1)


def _read_func(arguments: Arguments) -> Reading:
    """``flash_attn_func``: q (B, L, Hq, E), k and v (B, S, H, E)."""
    tensors = _plain(arguments, *(arguments.tensor(name) for name in ("q", "k", "v")))
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


def _read_varlen(arguments: Arguments) -> Reading:
    """``flash_attn_varlen_func``: packed sequences; keys may be in pages."""
    tensors = _plain(arguments, *(arguments.tensor(name) for name in ("q", "k", "v")))
    query, key, value = tensors
    asks = _sequences(arguments, query, "cu_seqlens_q", "seqused_q")
    table = _table(arguments)
    if table is None:
        answers = _sequences(arguments, key, "cu_seqlens_k", "seqused_k")
    else:
        cumulative, used = arguments.optional("cu_seqlens_k"), arguments.optional("seqused_k")
        if used is None and cumulative is None:
            raise ValueError("the lengths of its keys are missing")
        lengths = used if used is not None or cumulative is None else cumulative.diff()
        assert lengths is not None
        answers = paged(table, key.shape[1], lengths, key.shape[0])
    return _of_sequences(arguments, (query, key, value), asks, answers)


def _read_varlen_kvpacked(arguments: Arguments) -> Reading:
    """``flash_attn_varlen_kvpacked_func``: q (T, Hq, E), kv (T, 2, H, E)."""
    key, value = arguments.tensor("kv").unbind(-3)
    tensors = _plain(arguments, arguments.tensor("q"), key, value)
    asks = _sequences(arguments, tensors[0], "cu_seqlens_q", "seqused_q")
    answers = _sequences(arguments, key, "cu_seqlens_k", "seqused_k")
    return _of_sequences(arguments, tensors, asks, answers)


def _read_varlen_qkvpacked(arguments: Arguments) -> Reading:
    """``flash_attn_varlen_qkvpacked_func``: qkv (T, 3, H, E)."""
    arguments.ignore("max_seqlen")
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
    flat = (tensors[0].flatten(0, 1), *tensors[1:])
    answers = Sequences(index, lengths, len(key))
    return _batch_of_sequences(flat, asks, answers, (batch, rows), options)


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
) -> Reading:
    """Read a call whose queries are packed (T, Hq, E), or a batch (B, L, Hq, E)."""
    query, key, value = (part.flatten(0, -3) for part in tensors)
    options = _options(arguments)
    if tensors[0].dim() == 4:
        batch, rows = tensors[0].shape[:2]
        return _batch_of_sequences((query, key, value), queries, keys, (batch, rows), options)
    return sequence_reading((query, key, value), queries, keys, **options)


def _batch_of_sequences(
    tensors: tuple[Tensor, Tensor, Tensor],
    queries: Sequences,
    keys: Sequences,
    shape: tuple[int, int],
    options: dict[str, Any],
) -> Reading:
    """Read a call whose queries and outputs are (B, L, Hq, E), with keys of different lengths."""
    reading = sequence_reading(
        tensors, queries, keys, flat=lambda output: output.flatten(0, 1), **options
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


def _options(arguments: Arguments) -> dict[str, Any]:
    """What all versions and variants share: masks, scale, softcap, sinks, dropout."""
    if arguments["attention_chunk"] not in (None, 0):
        raise ValueError(f"{arguments.function} with attention_chunk cannot be read")
    scale, softcap = arguments["softmax_scale"], arguments["softcap"]
    sinks = arguments.optional("s_aux")
    return {
        "causal": bool(arguments["causal"]),
        "window": arguments.window(),
        "slopes": arguments.optional("alibi_slopes"),
        "scale": None if scale is None else float(scale),
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
    names = ("q_descale", "k_descale", "v_descale")
    descales = [arguments.optional(name) for name in names]
    tensors = [query, key, value]
    if all(part.dtype.itemsize > 1 for part in tensors) and not any(
        descale is not None for descale in descales
    ):
        return query, key, value
    for place, descale in enumerate(descales):
        part = tensors[place].float()
        if descale is not None:
            part = part * _per_head(arguments, descale, part)
        tensors[place] = part
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

#: The functions of flash-attn 2, 3 and 4.
FLASH_ATTN = (
    *(Kernel(name, read) for name, read in _READERS.items()),
    *(Kernel(name, read, "qkv", _scaled_packed) for name, read in _PACKED.items()),
)


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


#: The operators that they register.
FLASH_OPERATORS = tuple(
    Kernel(name, _read_operator)
    for name in (
        "flash_attn._flash_attn_forward",
        "flash_attn._flash_attn_varlen_forward",
        "flash_attn_3._flash_attn_forward",
    )
)
