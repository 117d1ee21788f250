"""Seconds of a call, and the memory at its peak."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import acutance
from acutance.comparison import measured
from acutance.comparison.measured import MIB, high_water, memory_method, timed

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
    assert 50 * MIB < measured._largest_so_far() < 2**50


def test_wall_and_cpu_time_are_told_apart() -> None:
    seconds = timed(lambda: time.sleep(0.05))
    assert 0.05 <= seconds.wall < 0.5
    assert seconds.cpu < 0.04


@linux
def test_cpu_time_is_fine_under_a_limit_of_cpu_time() -> None:
    code = """
from resource import RLIM_INFINITY, RLIMIT_CPU, getrlimit, setrlimit
soft, hard = getrlimit(RLIMIT_CPU)
if soft == RLIM_INFINITY:
    setrlimit(RLIMIT_CPU, (3600, hard))
from acutance.comparison.measured import timed
print(min(timed(lambda: sum(range(20_000))).cpu for _ in range(40)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert float(done.stdout) > 0  # time.process_time() then moves in steps of 4 ms


def test_the_package_starts_no_process() -> None:
    package = Path(acutance.__file__).parent
    starts = re.compile(
        r"subprocess|multiprocessing(?!\.util import Finalize)"
        r"|os\.(exec|spawn|popen|system|posix_spawn)"
    )
    there = [
        path for path in package.rglob("*.py") if starts.search(path.read_text(encoding="utf-8"))
    ]
    assert there == []
