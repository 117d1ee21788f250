"""Stands for ``flash_attn.flash_attn_interface`` 2.8.4: its names and parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.contract.kernel_functions.reference import attend, sequences, window


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, scale: Any, causal: Any, size: Any, softcap: Any, slopes: Any
) -> Tensor:
    shift = len(k) - len(q)

    def bias(head: int, row: int, place: int) -> float:
        return 0.0 if slopes is None else -float(slopes[head]) * abs(row + shift - place)

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    sees = window(len(q), len(k), causal, size)
    return attend(q, k, v, scale, sees, softcap=softcap, bias=bias)


def _slopes(slopes: Any, index: int) -> Any:
    return slopes if slopes is None or slopes.dim() == 1 else slopes[index]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: Any = 0.0,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    deterministic: Any = False,
    return_attn_probs: Any = False,
) -> Any:
    options = (softmax_scale, causal, window_size, softcap)
    rows = [_sequence(q[b], k[b], v[b], *options, _slopes(alibi_slopes, b)) for b in range(len(q))]
    output = torch.stack(rows)
    return (output, None, None) if return_attn_probs else output


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: Any = 0.0,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    deterministic: Any = False,
    return_attn_probs: Any = False,
) -> Any:
    key, value = kv[:, :, 0], kv[:, :, 1]
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return flash_attn_func(q, key, value, *options)


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: Any = 0.0,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    deterministic: Any = False,
    return_attn_probs: Any = False,
) -> Any:
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *options)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: Any = 0.0,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    deterministic: Any = False,
    return_attn_probs: Any = False,
    block_table: Any = None,
) -> Any:
    output = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype)
    options = (softmax_scale, causal, window_size, softcap)
    lengths = cu_seqlens_k.diff().tolist()
    for index, (ask, answer) in enumerate(
        zip(sequences(cu_seqlens_q), sequences(cu_seqlens_k), strict=True)
    ):
        key, value = k[answer], v[answer]
        if block_table is not None:
            pages = [int(page) for page in block_table[index]]
            key = torch.cat([k[page] for page in pages])[: lengths[index]]
            value = torch.cat([v[page] for page in pages])[: lengths[index]]
        output[ask] = _sequence(q[ask], key, value, *options, _slopes(alibi_slopes, index))
    return output


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: Any = 0.0,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    deterministic: Any = False,
    return_attn_probs: Any = False,
) -> Any:
    places = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *places, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: Any,
    dropout_p: Any = 0.0,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    deterministic: Any = False,
    return_attn_probs: Any = False,
) -> Any:
    places = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], *places, *options)


def _turned(row: Tensor, place: int, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """One row (H, E), each pair of its numbers turned as a complex number."""
    half, turned = cos.shape[1], row.clone()
    for index in range(half):
        first, second = (2 * index, 2 * index + 1) if pairs else (index, index + half)
        number = torch.complex(row[:, first], row[:, second])
        number = number * torch.complex(cos[place, index], sin[place, index])
        turned[:, first], turned[:, second] = number.real, number.imag
    return turned


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    rotary_interleaved: Any = True,
    alibi_slopes: Any = None,
    num_splits: Any = 0,
    return_softmax_lse: Any = False,
) -> Any:
    outputs = []
    for index in range(len(q)):
        where = index if cache_batch_idx is None else int(cache_batch_idx[index])
        if block_table is None:
            places = [(where, token) for token in range(k_cache.shape[1])]
        else:
            size = k_cache.shape[1]
            places = [(int(page), token) for page in block_table[index] for token in range(size)]
        filled = cache_seqlens
        if isinstance(cache_seqlens, Tensor):
            filled = int(cache_seqlens[index])
        filled = len(places) if filled is None else filled
        mine, fresh = q[index], None if k is None else k[index]
        if rotary_cos is not None:
            local = causal or tuple(window_size) != (-1, -1)
            turn = (rotary_cos, rotary_sin, rotary_interleaved)
            mine = torch.stack(
                [_turned(row, filled + i * local, *turn) for i, row in enumerate(mine)]
            )
            fresh = torch.stack([_turned(row, filled + i, *turn) for i, row in enumerate(fresh)])
        if k is not None:
            for token in range(k.shape[1]):
                k_cache[places[filled]] = fresh[token]
                v_cache[places[filled]] = v[index, token]
                filled += 1
        first = 0 if cache_leftpad is None else int(cache_leftpad[index])
        key, value = (
            torch.stack([cache[place] for place in places[first:filled]])
            for cache in (k_cache, v_cache)
        )
        options = (softmax_scale, causal, window_size, softcap, _slopes(alibi_slopes, index))
        outputs.append(_sequence(mine, key, value, *options))
    output = torch.stack(outputs)
    return (output, None) if return_softmax_lse else output
