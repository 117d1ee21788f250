"""What the kernels' tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from acutance.kernels import tiles


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Uninitialised memory holds NaN: a result nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert torch.zeros(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch, blocked_only: None) -> None:
    """Tiles of 256 keys, the fewest there are, by at most four rows, of the blocked kernel."""
    monkeypatch.setattr(tiles, "TILE_ROWS", 4)
    monkeypatch.setattr(tiles, "LEVEL_ROWS", 4)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 512)
