"""Stands for ``sageattention.core`` 2.2.0: its names and parameters, without the rounding."""

from __future__ import annotations

from typing import Any

import torch

from tests.contract.kernel_functions.reference import attend, sequences, window


def _heads_last(tensor: Any, layout: str) -> Any:
    return tensor.transpose(1, 2) if layout == "HND" else tensor


def sageattn(
    q: Any,
    k: Any,
    v: Any,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: Any = None,
    return_lse: bool = False,
    **kwargs: Any,
) -> Any:
    q, k, v = (_heads_last(part, tensor_layout) for part in (q, k, v))
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    sees = window(q.shape[1], k.shape[1], is_causal, (-1, -1))
    output = torch.stack([attend(q[b], k[b], v[b], scale, sees) for b in range(len(q))])
    output = _heads_last(output, tensor_layout)
    return (output, None) if return_lse else output


def sageattn_qk_int8_pv_fp16_cuda(
    q: Any,
    k: Any,
    v: Any,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: Any = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    **kwargs: Any,
) -> Any:
    return sageattn(q, k, v, tensor_layout, is_causal, sm_scale, return_lse)


def sageattn_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: Any = None,
    smooth_k: bool = True,
    **kwargs: Any,
) -> Any:
    output = torch.zeros_like(q)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    for ask, answer in zip(sequences(cu_seqlens_q), sequences(cu_seqlens_k), strict=True):
        sees = window(ask.stop - ask.start, answer.stop - answer.start, is_causal, (-1, -1))
        output[ask] = attend(q[ask], k[answer], v[answer], scale, sees)
    return output
