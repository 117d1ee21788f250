"""The native kernel's gap histogram, on scores that every order of summation makes exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from acutance import row_statistics
from acutance.kernels import native
from acutance.rowstats import observe

pytestmark = pytest.mark.skipif(not native.is_loaded(), reason="no native library")

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def whole_numbers(*shape: int, most: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def check(query: Tensor, key: Tensor, dtype: torch.dtype, scale: float, **options: Any) -> Tensor:
    """Compare with the definition, bin by bin; returns the counts."""
    query, key = query.to(dtype), key.to(dtype)
    found = row_statistics(
        query, key, scale=scale, gaps=True, backend="native", enable_gqa=True, **options
    )
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT * scale
    visible = torch.ones_like(scores, dtype=torch.bool)
    if options.get("is_causal"):
        visible = visible.tril(options["query_offset"])
    if "attn_mask" in options:
        visible = visible & options["attn_mask"]
    want = observe(scores, visible, gaps=True)
    assert torch.equal(found.state.gaps, want.gaps)
    assert torch.equal(found.n_keys, want.n)
    return found.state.gaps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(150, 300, 8), (3, 133, 16), (1, 5, 4)])
@pytest.mark.parametrize("scale", [1 / 64, 1 / 8])
def test_counts_are_exact(dtype: torch.dtype, size: tuple[int, int, int], scale: float) -> None:
    rows, keys, width = size
    query = whole_numbers(1, 4, rows, width, most=8, seed=0)
    key = whole_numbers(1, 2, keys, width, most=8, seed=1)
    check(query, key, dtype, scale)
    check(query, key, dtype, scale, is_causal=True, query_offset=keys - rows)
    mask = torch.rand(rows, keys, generator=torch.Generator().manual_seed(2)) > 0.5
    check(query, key, dtype, scale, attn_mask=mask)


def test_maxima_that_rise_from_tile_to_tile_empty_what_falls_out_of_the_grid() -> None:
    query = whole_numbers(1, 2, 40, 8, most=4, seed=3)
    key = whole_numbers(1, 1, 2000, 8, most=4, seed=4) * (1 + torch.arange(2000)[:, None] // 200)
    counts = check(query, key, torch.float32, 1 / 16)
    assert (counts.sum(-1) < 2000).any()
    check(query, key.flip(2), torch.float32, 1 / 16)


def test_more_keys_than_the_planes_of_bits_hold() -> None:
    query = whole_numbers(1, 2, 9, 4, most=2, seed=5)
    key = whole_numbers(1, 1, 40000, 4, most=2, seed=6)
    counts = check(query, key, torch.float32, 1 / 4)
    assert counts.max() > 4095


def test_scores_beyond_sixteen_bits_are_counted_one_by_one() -> None:
    query = whole_numbers(1, 2, 20, 4, most=8, seed=7)
    key = whole_numbers(1, 1, 300, 4, most=8, seed=8)
    key[..., 0] += 4096
    check(query, key, torch.float32, 4.0)
    check(query, key, torch.float64, 4.0)
