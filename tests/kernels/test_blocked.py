"""The plain PyTorch kernel: its ways of summing a tile, and what it keeps between calls."""

from __future__ import annotations

import torch

from acutance import attention
from acutance.kernels import tiles
from acutance.rowstats.dense import dense_statistics
from tests.contract.kernels.test_blocked import NAMES


def test_a_row_of_more_tiles_than_wait_to_be_merged(small_tiles: None) -> None:
    query, key, value = torch.randn(1, 1, 3, 8), *torch.randn(2, 1, 1, 9000, 8).unbind(0)
    out, stats = attention(query, key, value, return_stats=True, backend="blocked")
    want = dense_statistics(query.double(), key.double(), value.double())
    assert 9000 / 256 > 32
    torch.testing.assert_close(out.double(), want["output"], rtol=1e-4, atol=1e-5)
    for name in NAMES:
        torch.testing.assert_close(stats[name].double(), want[name], rtol=1e-5, atol=3e-6)


def test_what_is_held_between_calls_is_some_tiles() -> None:
    query = torch.randn(1, 1, 2000, 8)
    with tiles.lent_buffers(query, torch.float32) as scratch:
        scratch("large", 4 * tiles.TILE_ELEMENTS)
        small = scratch("small", 100)
    with tiles.lent_buffers(query, torch.float32) as again:
        assert again is scratch
        assert again("small", 100).data_ptr() == small.data_ptr()
        assert "large" not in again.names()
        with tiles.lent_buffers(query, torch.float32) as other:
            assert other is not again
