"""The projections of ``nn.MultiheadAttention``, under its names, for any number of key heads."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from acutance.nn.recording import Recorded, Recording

__all__ = ["Projected", "join_heads", "split_heads"]

_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, heads · E) as (B, heads, L, E)."""
    split: Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split


def join_heads(x: Tensor) -> Tensor:
    """(B, heads, L, E) as (B, L, heads · E)."""
    return x.transpose(1, 2).flatten(2)


class Projected(Recorded):
    """Query, key, value and output projections, named, shaped and initialised as PyTorch's.

    One packed ``in_proj_weight`` where all three inputs are as wide as the module, otherwise
    ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight``. A state dict of either form loads
    into the packed one.
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        kv_width: int,
        *,
        bias: bool,
        add_bias_kv: bool,
        kdim: int,
        vdim: int,
        statistics: Recording,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(statistics)
        self.embed_dim, self.kdim, self.vdim = embed_dim, kdim, vdim
        self.kv_width = kv_width

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        widths = (embed_dim, kv_width, kv_width)
        self.packed = kdim == vdim == embed_dim
        self.register_parameter(
            "in_proj_weight", parameter(sum(widths), embed_dim) if self.packed else None
        )
        for name, width, inputs in zip(_SEPARATE, widths, (embed_dim, kdim, vdim), strict=True):
            self.register_parameter(name, None if self.packed else parameter(width, inputs))
        self.register_parameter("in_proj_bias", parameter(sum(widths)) if bias else None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.register_parameter("bias_k", parameter(1, 1, kv_width) if add_bias_kv else None)
        self.register_parameter("bias_v", parameter(1, 1, kv_width) if add_bias_kv else None)
        self.register_load_state_dict_pre_hook(_pack)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise the input projections like ``nn.MultiheadAttention``; zero the biases."""
        for name in ("in_proj_weight", *_SEPARATE):
            weight = getattr(self, name)
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def _project(self, index: int, x: Tensor) -> Tensor:
        """Query (0), key (1) or value (2) of (..., inputs)."""
        widths = [self.embed_dim, self.kv_width, self.kv_width]
        if self.in_proj_weight is not None:
            weight = self.in_proj_weight.split(widths)[index]
        else:
            weight = getattr(self, _SEPARATE[index])
        bias = None if self.in_proj_bias is None else self.in_proj_bias.split(widths)[index]
        return linear(x, weight, bias)


def _pack(module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, *_: object) -> None:
    """Join separate projections where the module has a packed one."""
    if getattr(module, "in_proj_weight", None) is None:
        return
    names = [prefix + name for name in _SEPARATE]
    if all(name in state_dict for name in names):
        state_dict[prefix + "in_proj_weight"] = torch.cat([state_dict.pop(name) for name in names])
