"""The native pass over a call's scores gives what the blocked one gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from acutance.structure import StructureStatistics, statistics

_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "offset": {"is_causal": True, "query_offset": 60},
    "window": {"is_causal": True, "window": 37},
    "both sides": {"window": 20},
    "none seen": {"is_causal": True, "query_offset": -30},
    "softcap": {"is_causal": True, "softcap": 3.0},
    "grouped": {"is_causal": True, "enable_gqa": True},
    "no tokens": {"is_causal": True, "tokens": None, "special": ()},
    "no sorting": {"critical_every": 0},
    "padded": {"key_mask": torch.arange(205).expand(2, -1) < torch.tensor([[205], [130]])},
    "padded left": {
        "is_causal": True,
        "key_mask": torch.arange(205).expand(2, -1) >= torch.tensor([[0], [61]]),
    },
    "documents": {
        "document_ids": (torch.arange(150) // 40, torch.arange(205) // 40),
        "is_causal": True,
    },
    "boolean": {"attn_mask": torch.rand(2, 4, 150, 205, generator=torch.Generator()) > 0.6},
    "additive": {"attn_mask": torch.randn(150, 205, generator=torch.Generator())},
    "slopes": {"is_causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "sinks": {"is_causal": True, "sinks": torch.tensor([0.0, 3.0, -2.0, 90.0])},
    "positions": {"positions": torch.arange(0, 300, 2) - 20},
}


def _read(dtype: torch.dtype, options: dict[str, Any]) -> StructureStatistics:
    chance = torch.Generator().manual_seed(3)
    heads = 2 if options.get("enable_gqa") else 4
    q = torch.randn(2, 4, 150, 20, generator=chance, dtype=torch.float64).to(dtype)
    k = (3.0 * torch.randn(2, heads, 205, 20, generator=chance, dtype=torch.float64)).to(dtype)
    tokens = torch.randint(-1, 30, (2, 205), generator=chance)
    given = {"tokens": tokens, "special": (3, 7), "critical_every": 7} | options
    return statistics(q, k, **given)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", _CASES)
def test_native_pass_is_the_blocked_pass(
    name: str,
    dtype: torch.dtype,
    native_calls: Callable[[str], list[Any]],
    use_backend: Callable[[str], None],
) -> None:
    calls = native_calls("structure")
    found = _read(dtype, _CASES[name])
    assert calls
    use_backend("blocked")
    expected = _read(dtype, _CASES[name])
    assert len(calls) == 1
    for field in vars(expected):
        ours, theirs = getattr(found, field), getattr(expected, field)
        assert ours.dtype == theirs.dtype
        error = 1e-12 if dtype == torch.float64 else 1e-6
        size = {"attention_distance": 205.0, "critical_ratio": 10.0}.get(field, 1.0)
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=error,
            atol=error * size,
            equal_nan=True,
        )
