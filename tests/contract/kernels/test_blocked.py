"""The plain PyTorch kernel: its ways of summing a tile, and what it keeps between calls."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from acutance import attention, row_statistics
from acutance.rowstats import dense_statistics

NAMES = ("entropy", "varentropy", "collision", "max_logit", "lse", "logit_mean", "logit_std")


@pytest.mark.parametrize("sharpness", [0.0, 0.5, 2.0, 8.0])
@pytest.mark.parametrize("softcap", [None, 500.0])
def test_rows_close_to_their_means_and_far_from_them(
    sharpness: float, softcap: float | None
) -> None:
    """Scores of deviation 2 and less are measured from their means, others from their maxima."""
    query, key, value = torch.randn(3, 1, 2, 300, 16).unbind(0)
    options = {"scale": sharpness / 4, "softcap": softcap}
    out, stats = attention(query, key, value, return_stats=True, backend="blocked", **options)
    want = dense_statistics(query.double(), key.double(), value.double(), **options)
    torch.testing.assert_close(out.double(), want["output"], rtol=1e-4, atol=1e-5)
    for name in NAMES:
        tolerance = {"rtol": 2e-5, "atol": 2e-6 * max(1.0, sharpness**2)}
        torch.testing.assert_close(stats[name].double(), want[name], **tolerance, msg=name)


def test_calls_share_buffers_and_threads_do_not() -> None:
    calls = [torch.randn(1, 2, length, 8) for length in (300, 40, 700, 300)]

    def entropy(query: torch.Tensor) -> torch.Tensor:
        return row_statistics(query, query, backend="blocked").entropy

    want = [entropy(query) for query in calls]
    with ThreadPoolExecutor(4) as pool:
        for found, right in zip(pool.map(entropy, calls * 8), want * 8, strict=True):
            assert torch.equal(found, right)


def test_buffers_made_in_inference_mode_serve_outside_of_it() -> None:
    query = torch.randn(1, 2, 800, 8)

    def gradient() -> torch.Tensor:
        with torch.inference_mode():
            row_statistics(query, query, backend="blocked")
        leaf = query.clone().requires_grad_()
        row_statistics(leaf, leaf, backend="blocked").entropy.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    with ThreadPoolExecutor(1) as pool:  # a thread without buffers
        assert pool.submit(gradient).result().isfinite().all()
