"""A kernel whose queries no parameter names: a law says that it cannot scale them."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import acutance
from acutance.calibration import ApplyError


def flash_attn_func(*, causal: bool = False, **tensors: Tensor) -> Tensor:
    """Attention whose queries, keys and values (B, L, H, E) have no parameters of their own."""
    query, key, value = (tensors[name].transpose(1, 2) for name in "qkv")
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2)


class Layer(torch.nn.Module):
    """Calls the kernel by keywords."""

    def forward(self, x: Tensor) -> Any:
        """Attend from (B, L, H, E) to itself."""
        return sys.modules["flash_attn_interface"].flash_attn_func(q=x, k=x, v=x, causal=True)


def test_what_cannot_be_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn_interface")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    law = acutance.scaling.LogN(train_length=2)
    layer, x = Layer(), torch.randn(1, 20, 2, 4)
    with pytest.raises(ApplyError, match="its q is no parameter"), acutance.apply(layer, law):
        layer(x)
