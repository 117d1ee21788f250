"""Stands for ``flashinfer.decode`` 0.6.18: its names and parameters."""

from __future__ import annotations

from typing import Any

import torch

from tests.contract.kernel_functions.stand_ins.flashinfer_prefill import one_request, pages


def single_decode_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    window_left: int = -1,
    logits_soft_cap: Any = None,
    sm_scale: Any = None,
    rope_scale: Any = None,
    rope_theta: Any = None,
    return_lse: bool = False,
) -> Any:
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    plan = {
        "causal": True,
        "sm_scale": sm_scale,
        "window_left": window_left,
        "logits_soft_cap": logits_soft_cap,
    }
    return one_request(q[None], k, v, plan, (q_scale, k_scale, v_scale))[0]


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
        self._kv_layout = kv_layout

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        defaults = {"sm_scale": None, "window_left": -1, "logits_soft_cap": None, "causal": True}
        self.places = indptr, indices, last_page_len
        self.planned = {**defaults, **kwargs}

    begin_forward = plan

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: Any = None,
        window_left: Any = None,
        sinks: Any = None,
        q_len_per_req: Any = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        keys, values = pages(paged_kv_cache, self._kv_layout, *self.places)
        factors = (q_scale, k_scale, v_scale)
        rows = [
            one_request(q[r : r + 1], keys[r], values[r], self.planned, factors, sinks)
            for r in range(len(q))
        ]
        return torch.cat(rows)
