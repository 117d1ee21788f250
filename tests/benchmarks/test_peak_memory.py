"""The memory at a call's peak."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.cpu import memory
from benchmarks.cpu.memory import MIB, high_water, memory_method

linux = pytest.mark.skipif(sys.platform != "linux", reason="the mark is reset on Linux only")


def allocate(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


@linux
def test_a_deliberate_allocation_is_seen_and_a_former_one_is_not() -> None:
    allocate(256)
    assert high_water(lambda: allocate(64)) / MIB == pytest.approx(64, abs=4)
    assert high_water(lambda: allocate(64).sum()) / MIB == pytest.approx(64, abs=4)
    assert high_water(lambda: None) / MIB == pytest.approx(0, abs=4)


def test_without_a_resettable_mark_the_largest_size_stands_in(monkeypatch) -> None:
    resource = pytest.importorskip("resource", reason="Windows has no such size")

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(f"{path} is of another system")

    unit = 1 if sys.platform == "darwin" else 1024
    sizes = itertools.chain([100 * MIB // unit, 164 * MIB // unit])
    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=next(sizes)))
    assert high_water(lambda: None) == 64 * MIB
    assert "a lower bound" in memory_method()


@linux
def test_the_largest_size_so_far_is_in_bytes() -> None:
    assert 50 * MIB < memory._largest_so_far() < 2**50
