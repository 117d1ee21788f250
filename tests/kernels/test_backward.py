"""Gradients of the output and of every metric, in float64, float32 and little memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from acutance.attend import attention
from acutance.kernels import library
from acutance.kernels.backward import backward
from acutance.kernels.blocked import forward
from acutance.kernels.call import KernelCall, SumGradients
from acutance.masks import Masking
from tests.contract.kernels.test_backward import Largest, normal


def largest_tensor(length: int) -> int:
    """The largest tensor of a forward and a backward pass of the kernel, everything asked for."""
    query = torch.randn(1, 1, length, 16)
    masking = Masking(
        batch=1, heads=1, group=1, queries=length, keys=length, causal=True, window=length
    )
    with Largest() as seen:
        call = KernelCall(query, query, query, masking, scale=0.25, noise=True)
        sums = forward(call)
        ones = torch.ones(1, 1, length)
        grad = SumGradients(torch.ones_like(query), *[ones] * (len(SumGradients._fields) - 1))
        backward(grad, sums, call, (True, True, True) + (False,) * 3)
    return seen.storage


def test_memory_does_not_hold_a_matrix() -> None:
    length = 4096
    most = largest_tensor(length)
    assert most >= length * 16, "the recorder saw the output"
    assert most <= length * length // 8
    # what does not grow with the length are tiles; what does is rows
    assert largest_tensor(2 * length) <= 2 * most


@pytest.mark.parametrize("backend", ["auto", "native", "blocked", "triton"])
@pytest.mark.parametrize(
    "shape",
    [
        *((0, 2, 3, 5), (0, 2, 1100, 5), (0, 2, 1100, 600), (1, 0, 3, 5), (1, 0, 1100, 5)),
        *((1, 2, 0, 5), (1, 2, 3, 0), (1, 2, 1100, 0), (0, 0, 0, 0)),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_no_rows_or_keys_have_gradients(
    shape: tuple[int, int, int, int], backend: Any, causal: bool
) -> None:
    batch, heads, queries, keys = shape
    if backend == "native" and isinstance(library.load(), str):
        pytest.skip(str(library.load()))
    if backend == "triton":
        pytest.importorskip("triton")
    query, key, value = (
        normal(batch, heads, length, 4).float().requires_grad_() for length in (queries, keys, keys)
    )
    out, stats = attention(query, key, value, is_causal=causal, return_stats=True, backend=backend)
    assert out.shape == query.shape
    assert all(part.shape == query.shape[:3] for part in stats.as_dict().values())
    (out.sum() + torch.where(stats.n_keys > 0, stats.entropy, 0.0).sum()).backward()
    for tensor in (query, key, value):
        assert tensor.grad is not None
        assert not tensor.grad.any()
