"""Seconds of a call."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import acutance
from acutance.comparison.timing import timed

linux = pytest.mark.skipif(sys.platform != "linux", reason="the mark is reset on Linux only")


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
from acutance.comparison.timing import timed
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
