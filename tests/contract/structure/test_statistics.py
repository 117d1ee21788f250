"""Structure statistics against the whole map in float64, under every mask a call can have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from acutance.structure import STRUCTURE, statistics

B, H, G, L, S, E = 2, 2, 2, 7, 11, 4


def random_call(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(B, H * G, L, E, dtype=dtype)
    key = torch.randn(B, H, S, E, dtype=dtype)
    return query, key, torch.randint(0, 5, (B, S))


def test_autocast_casts_the_inputs_and_nothing_else() -> None:
    query, key, tokens = random_call(torch.float32)
    options: dict[str, Any] = {"enable_gqa": True, "tokens": tokens, "special": [1]}
    with torch.autocast("cpu", torch.bfloat16):
        got = statistics(query, key, **options)
    want = statistics(query.bfloat16(), key.bfloat16(), **options)
    for name in STRUCTURE:
        assert torch.equal(got[name].nan_to_num(-1), want[name].nan_to_num(-1)), name


def test_one_position_at_a_time_equals_the_whole() -> None:
    query, key = torch.randn(2, 4, 9, 8).double(), torch.randn(2, 2, 9, 8).double()
    tokens = torch.randint(0, 3, (2, 9))
    options: dict[str, Any] = {"enable_gqa": True, "special": [0], "is_causal": True}
    whole = statistics(query, key, tokens=tokens, **options)
    for i in range(9):
        step = statistics(
            query[:, :, i : i + 1], key[:, :, : i + 1], tokens=tokens[:, : i + 1],
            query_offset=i, **options,
        )  # fmt: skip
        for name in STRUCTURE:
            one, same = step[name][:, :, 0], whole[name][:, :, i]
            assert torch.allclose(one, same, rtol=1e-12, atol=1e-14, equal_nan=True), name
        count = step.octaves.shape[-1]
        assert torch.allclose(step.octaves[:, :, 0], whole.octaves[:, :, i, :, :count], atol=1e-14)


def test_shares_sum_to_one() -> None:
    query, key, _ = random_call()
    got = statistics(query, key, enable_gqa=True, is_causal=True, query_offset=2)
    ones = torch.ones(B, H * G, L, dtype=torch.float64)
    assert torch.allclose(got.octaves.sum((-1, -2)), ones, atol=1e-14)
    assert torch.allclose(got.even.sum((-1, -2)).expand_as(ones), ones, atol=1e-14)
    assert bool((got.octaves[..., 1, :] == 0).all())


def test_critical_ratio_of_every_third_row() -> None:
    query, key, _ = random_call()
    every = statistics(query, key, enable_gqa=True).critical_ratio
    some = statistics(query, key, enable_gqa=True, critical_every=3).critical_ratio
    none = statistics(query, key, enable_gqa=True, critical_every=0).critical_ratio
    assert torch.equal(some[:, :, ::3], every[:, :, ::3])
    assert int(some.isfinite().sum()) == B * H * G * 3
    assert none.isnan().all()


def test_nothing_to_read() -> None:
    zeros = torch.zeros
    for shape, keys in (((0, 2, 3, 4), 3), ((1, 2, 0, 4), 3), ((1, 2, 3, 4), 0)):
        query, key = zeros(*shape), zeros(shape[0], 2, keys, 4)
        got = statistics(query, key, tokens=zeros(keys, dtype=torch.int64))
        assert got.attention_distance.shape == shape[:3]
        assert got.mass_self.isnan().all()
        assert float(got.octaves.abs().sum()) == 0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"tokens": torch.zeros(4)},
            TypeError,
            "tokens must be an integer Tensor, got torch.float32",
        ),
        (
            {"tokens": torch.zeros(4).long()},
            ValueError,
            r"tokens must have shape \(11,\) or \(2, 11\), got",
        ),
        (
            {"positions": torch.zeros(4).int()},
            ValueError,
            r"positions must have shape \(7,\) or \(2, 7\)",
        ),
        ({"tokens": [1]}, TypeError, "tokens must be a Tensor, got list"),
        ({"special": [1]}, ValueError, r"special=\[1\] needs the token ids"),
        ({"critical_every": -1}, ValueError, "critical_every must be at least 0, got -1"),
        ({"critical_every": 1.5}, TypeError, "critical_every must be an integer, got 1.5"),
        ({"softcap": 0.0}, ValueError, "softcap"),
        ({"enable_gqa": False}, ValueError, "pass enable_gqa=True"),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], match: str) -> None:
    query, key, _ = random_call()
    with pytest.raises(error, match=match):
        statistics(query, key, **{"enable_gqa": True, **options})
