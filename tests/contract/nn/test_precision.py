"""In half precision, and under autocast, every module is what it is in float32, rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acutance.nn import GatedAttentionUnit, MultiheadAttention
from acutance.scores import QKNorm

MODULES: dict[str, Callable[[], nn.Module]] = {
    "alibi": lambda: MultiheadAttention(32, 4, batch_first=True, positions="alibi"),
    "norm": lambda: MultiheadAttention(
        32, 4, batch_first=True, positions="rotary", score=QKNorm(8), weights="sink"
    ),
    "gated": lambda: GatedAttentionUnit(32, 8, positions="rotary"),
}


def run(module: Any, x: Tensor) -> Tensor:
    if isinstance(module, MultiheadAttention):
        return module(x, x, x, is_causal=True)[0]
    return module(x, is_causal=True)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODULES)
def test_half_precision_is_float32_rounded(name: str, dtype: torch.dtype, autocast: bool) -> None:
    module = MODULES[name]()
    if name == "gated":
        # as published γ starts at 0.02, and relu² of such scores is below float16's range
        nn.init.normal_(module.gamma)
    x = torch.randn(2, 10, 32)
    want = run(module, x)
    if autocast:
        with torch.autocast("cpu", dtype):
            out = run(module, x)
    else:
        small = MODULES[name]().to(dtype)
        small.load_state_dict(module.state_dict())
        out = run(small, x.to(dtype))
        assert out.dtype == dtype
    # some ten roundings of ε/2 each, of numbers up to the output's size
    size = float(want.detach().abs().max())
    torch.testing.assert_close(out.float(), want, rtol=0, atol=8 * torch.finfo(dtype).eps * size)
    out.sum().backward()
    assert module.last_statistics.n_keys.shape[-1] == 10
