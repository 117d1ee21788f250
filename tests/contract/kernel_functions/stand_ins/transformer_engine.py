"""Stands for ``DotProductAttention`` of TransformerEngine 2.20: its parameters and attributes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.contract.kernel_functions.reference import attend


def _decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """As the library wraps ``forward``: a closure over the function."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapped


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Any = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        bottom_right_diagonal: bool | None = None,
    ) -> None:
        super().__init__()
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type.replace(",", "_")
        self.window_size, self.attention_type = window_size, attention_type
        self.bottom_right_diagonal, self.cp_group = bottom_right_diagonal, None
        self.attention_dropout = attention_dropout
        scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.flash_attention = SimpleNamespace(softmax_scale=scale)
        self.softmax_offset: Any = None
        if softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(num_attention_heads)
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.linspace(-1, 1, num_attention_heads))

    @_decorated
    def forward(
        self,
        query_layer: Any = None,
        key_layer: Any = None,
        value_layer: Any = None,
        attention_mask: Any = None,
        qkv_format: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
        cu_seqlens_q_padded: Any = None,
        cu_seqlens_kv_padded: Any = None,
        max_seqlen_q: Any = None,
        max_seqlen_kv: Any = None,
        attn_mask_type: Any = None,
        window_size: Any = None,
        bottom_right_diagonal: Any = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Any = None,
        alibi_slopes: Any = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: Any = None,
        fp8_output: Any = False,
        bf16_backward: Any = False,
        num_splits: Any = 1,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: Any = None,
        kv_layer: Any = None,
        qkv_interleave_dim: int = -3,
    ) -> Tensor:
        kind = (attn_mask_type or self.attn_mask_type).replace(",", "_")
        size = self.window_size if window_size is None else window_size
        left, right = (-1, -1) if size is None else size
        at_end = "bottom_right" in kind or "causal" not in kind
        form, causal = qkv_format or self.qkv_format, "causal" in kind
        tensors = [query_layer, key_layer, value_layer]
        if form == "sbhd":
            tensors = [part.transpose(0, 1) for part in tensors]
        if form == "thd":
            spans = [
                self._spans(cumulative, padded)
                for cumulative, padded in (
                    (cu_seqlens_q, cu_seqlens_q_padded),
                    (cu_seqlens_kv, cu_seqlens_kv_padded),
                )
            ]
            parts = [
                (tensors[0][a:b], tensors[1][c:d], tensors[2][c:d], None)
                for (a, b), (c, d) in zip(*spans, strict=True)
            ]
            places = [slice(a, b) for a, b in spans[0]]
        else:
            parts, places = [], []
            for b in range(len(tensors[0])):
                rows, keys = tensors[0].shape[1], tensors[1].shape[1]
                if "padding" in kind:
                    rows, keys = self._lengths(b, attention_mask, cu_seqlens_q, cu_seqlens_kv)
                arbitrary = attention_mask[b] if kind == "arbitrary" else None
                query = tensors[0][b, :rows]
                parts.append((query, tensors[1][b, :keys], tensors[2][b, :keys], arbitrary))
                places.append((b, slice(0, rows)))
        output = torch.zeros(*tensors[0].shape[:-1], tensors[2].shape[-1])
        for place, (query, key, value, hidden) in zip(places, parts, strict=True):
            shift = len(key) - len(query) if at_end else 0

            def sees(row: int, column: int, shift: int = shift, hidden: Any = hidden) -> bool:
                far = column - row - shift
                if hidden is not None and hidden[0, row, column]:
                    return False
                return not (
                    (causal and far > 0) or (left >= 0 and far < -left) or (0 <= right < far)
                )

            def bias(head: int, row: int, column: int, shift: int = shift) -> float:
                if core_attention_bias_type == "alibi" and alibi_slopes is not None:
                    return -float(alibi_slopes[head]) * abs(row + shift - column)
                if core_attention_bias is None:
                    return 0.0
                added = float(core_attention_bias[0, head, row, column])
                scaled = core_attention_bias_type == "pre_scale_bias"
                return added * (self.flash_attention.softmax_scale if scaled else 1.0)

            sinks = None if self.softmax_offset is None else self.softmax_offset.detach()
            scale = self.flash_attention.softmax_scale
            output[place] = attend(query, key, value, scale, sees, bias=bias, sinks=sinks)
        if form == "sbhd":
            output = output.transpose(0, 1)
        return output.flatten(-2)

    def _spans(self, cumulative: Any, padded: Any) -> list[tuple[int, int]]:
        starts = cumulative if padded is None else padded
        return [(int(a), int(a + n)) for a, n in zip(starts[:-1], cumulative.diff(), strict=True)]

    def _lengths(self, b: int, mask: Any, asks: Any, answers: Any) -> tuple[int, int]:
        if asks is not None:
            return int(asks.diff()[b]), int(answers.diff()[b])
        both = mask if isinstance(mask, tuple) else (mask, mask)
        first, second = (int((~one[b]).sum()) for one in both)
        return first, second
