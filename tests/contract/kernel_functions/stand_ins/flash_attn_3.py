"""Stands for ``flash_attn_interface`` 3.0.0: its names and parameters, and ``s_aux`` of the hub."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.contract.kernel_functions.reference import attend, sequences, window


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, scale: Any, causal: Any, size: Any, softcap: Any, sinks: Any
) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    sees = window(len(q), len(k), causal, size)
    return attend(q, k, v, scale, sees, softcap=softcap, sinks=sinks)


def _descaled(tensor: Tensor, descale: Any, index: int) -> Tensor:
    if descale is None:
        return tensor
    group = tensor.shape[-2] // descale.shape[-1]
    return tensor.float() * descale[index].repeat_interleave(group)[:, None]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: Any = None,
    causal: Any = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: Any = 0,
    softcap: Any = 0.0,
    num_splits: Any = 1,
    pack_gqa: Any = None,
    deterministic: Any = False,
    sm_margin: Any = 0,
    return_attn_probs: Any = False,
    s_aux: Any = None,
) -> Any:
    outputs = [
        _sequence(
            _descaled(q[b], q_descale, b),
            _descaled(k[b], k_descale, b),
            _descaled(v[b], v_descale, b),
            *(softmax_scale, causal, window_size, softcap, s_aux),
        )
        for b in range(len(q))
    ]
    output = torch.stack(outputs)
    return (output, None) if return_attn_probs else output


def flash_attn_qkvpacked_func(
    qkv: Any,
    softmax_scale: Any = None,
    causal: Any = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: Any = 0,
    softcap: Any = 0.0,
    deterministic: Any = False,
    num_heads_q: Any = None,
    sm_margin: Any = 0,
    return_attn_probs: Any = False,
) -> Any:
    if qkv.dim() == 5:
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    else:
        fewer = (qkv.shape[2] - num_heads_q) // 2
        query, key, value = qkv.split([num_heads_q, fewer, fewer], 2)
    return flash_attn_func(
        query, key, value, softmax_scale, causal, window_size=window_size, softcap=softcap
    )


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: Any = 0,
    softcap: Any = 0.0,
    num_splits: Any = 1,
    pack_gqa: Any = None,
    deterministic: Any = False,
    sm_margin: Any = 0,
    return_attn_probs: Any = False,
    s_aux: Any = None,
) -> Any:
    output = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype)
    asks, answers = sequences(cu_seqlens_q, seqused_q), sequences(cu_seqlens_k, seqused_k)
    for ask, answer in zip(asks, answers, strict=True):
        options = (softmax_scale, causal, window_size, softcap, s_aux)
        output[ask] = _sequence(q[ask], k[answer], v[answer], *options)
    return output


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: Any = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    attention_chunk: Any = 0,
    softcap: Any = 0.0,
    rotary_interleaved: Any = True,
    scheduler_metadata: Any = None,
    num_splits: Any = 0,
    pack_gqa: Any = None,
    sm_margin: Any = 0,
    return_softmax_lse: Any = False,
) -> Any:
    outputs = []
    for index in range(len(q)):
        filled = int(torch.as_tensor(cache_seqlens).reshape(-1).expand(len(q))[index])
        if k is not None:
            k_cache[index, filled : filled + k.shape[1]] = k[index]
            v_cache[index, filled : filled + k.shape[1]] = v[index]
            filled += k.shape[1]
        options = (softmax_scale, causal, window_size, softcap, None)
        outputs.append(
            _sequence(q[index], k_cache[index, :filled], v_cache[index, :filled], *options)
        )
    return torch.stack(outputs)
