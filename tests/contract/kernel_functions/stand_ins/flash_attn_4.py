"""Stands for ``flash_attn.cute.interface`` (flash-attn 4): its names and parameters."""

from __future__ import annotations

from typing import Any

import torch

from tests.contract.kernel_functions.reference import attend, sequences, window


def _sequence(
    q: Any, k: Any, v: Any, scale: Any, causal: Any, size: Any, sink: Any, cap: Any
) -> Any:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend(q, k, v, scale, window(len(q), len(k), causal, size), softcap=cap, sinks=sink)


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    gather_kv_indices: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (None, None),
    learnable_sink: Any = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> Any:
    options = (softmax_scale, causal, window_size, learnable_sink, softcap)
    output = torch.stack([_sequence(q[b], k[b], v[b], *options) for b in range(len(q))])
    return output, None


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    min_seqlen_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    gather_kv_indices: Any = None,
    page_table: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (None, None),
    learnable_sink: Any = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
) -> Any:
    options = (softmax_scale, causal, window_size, learnable_sink, softcap)
    output = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    if cu_seqlens_q is None:  # a batch of queries on keys of different lengths
        for index, length in enumerate(seqused_k.tolist()):
            row = _sequence(q[index], k[index, :length], v[index, :length], *options)
            output[index] = row
        return output, None
    if page_table is not None:
        for index, ask in enumerate(sequences(cu_seqlens_q, seqused_q)):
            key, value = (torch.cat([*part[page_table[index].long()]]) for part in (k, v))
            length = int(seqused_k[index])
            output[ask] = _sequence(q[ask], key[:length], value[:length], *options)
        return output, None
    asks, answers = sequences(cu_seqlens_q, seqused_q), sequences(cu_seqlens_k, seqused_k)
    for ask, answer in zip(asks, answers, strict=True):
        output[ask] = _sequence(q[ask], k[answer], v[answer], *options)
    return output, None
