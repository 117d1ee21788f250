"""Stands for ``flashinfer.prefill`` 0.6.18: its names and parameters."""

from __future__ import annotations

from typing import Any

import torch

from tests.contract.kernel_functions.reference import attend, sequences, window


def one_request(
    q: Any, k: Any, v: Any, plan: Any, factors: Any = (None, None, None), sinks: Any = None
) -> Any:
    """Attention of q (L, Hq, E) on k and v (S, H, E), with the options of a plan."""
    factors = [1.0 if factor is None else factor for factor in factors]
    scale = plan["sm_scale"] or q.shape[-1] ** -0.5
    mask = plan.get("custom_mask")
    sees = window(len(q), len(k), plan["causal"], (plan["window_left"], None))
    if mask is not None:
        sees = lambda row, place: bool(mask[row, place])  # noqa: E731
    cap = plan["logits_soft_cap"] or 0.0
    scale = scale * factors[0] * factors[1]
    return attend(q, k, v * factors[2], scale, sees, softcap=cap, sinks=sinks)


def single_prefill_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    o_dtype: Any = None,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: Any = None,
    window_left: int = -1,
    logits_soft_cap: Any = None,
    rope_scale: Any = None,
    rope_theta: Any = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Any:
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    heads = [1.0 if scale is None else scale[:, None] for scale in (scale_q, scale_k, scale_v)]
    q, k, v = (part * scale for part, scale in zip((q, k, v), heads, strict=True))
    plan = {
        "causal": causal,
        "sm_scale": sm_scale,
        "window_left": window_left,
        "logits_soft_cap": logits_soft_cap,
        "custom_mask": custom_mask,
    }
    output = one_request(q, k, v, plan, (None, k_scale, v_scale))
    return (output, None) if return_lse else output


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
        self._kv_layout = kv_layout

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: Any = None,
        window_left: int = -1,
        logits_soft_cap: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
    ) -> None:
        self.planned = {name: value for name, value in locals().items() if name != "self"}

    def forward(self, q: Any, paged_kv_cache: Any, causal: bool = False) -> Any:
        self.planned["causal"] = causal
        return self.run(q, paged_kv_cache)

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
        kv_cache_sf: Any = None,
    ) -> Any:
        plan = self.planned if window_left is None else {**self.planned, "window_left": window_left}
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        keys, values = pages(paged_kv_cache, self._kv_layout, *(plan[name] for name in names))
        output = torch.zeros(*q.shape[:2], values[0].shape[-1])
        for ask, key, value in zip(sequences(plan["qo_indptr"]), keys, values, strict=True):
            factors = (q_scale, k_scale, v_scale)
            output[ask] = one_request(q[ask], key, value, plan, factors, sinks)
        return output


def pages(cache: Any, layout: str, starts: Any, indices: Any, last: Any) -> Any:
    """Keys and values of each request, (S, H, E)."""
    both = cache.unbind(1) if isinstance(cache, torch.Tensor) else cache
    found: list[list[Any]] = [[], []]
    for request in range(len(last)):
        mine = indices[starts[request] : starts[request + 1]].tolist()
        for side, whole in zip(found, both, strict=True):
            whole = whole.transpose(1, 2) if layout == "HND" else whole
            tokens = torch.cat([whole[page] for page in mine])
            side.append(tokens[: (len(mine) - 1) * whole.shape[1] + int(last[request])])
    return found


class BatchPrefillWithRaggedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
        self._kv_layout = kv_layout

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: Any = None,
        sm_scale: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        self.planned = {name: value for name, value in locals().items() if name != "self"}

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        o_scale: Any = None,
        return_lse: bool = False,
    ) -> Any:
        output = torch.zeros(*q.shape[:2], v.shape[-1])
        plan = {**self.planned, "custom_mask": None}
        asks, answers = sequences(plan["qo_indptr"]), sequences(plan["kv_indptr"])
        for ask, answer in zip(asks, answers, strict=True):
            output[ask] = one_request(q[ask], k[answer], v[answer], plan)
        return output
