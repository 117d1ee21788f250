"""What every test may rely on: no model hub, a fixed number of threads, a seed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from itertools import combinations
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is imported: before anything
# A compiled graph kept from another version of the operators would be run in place of this one.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="acutance-tests-")
# Kernels that are timed halfway through a test would be other ones in its second half.
os.environ["ACUTANCE_MEASURE"] = "never"
os.environ["ACUTANCE_CACHE"] = os.environ["TORCHINDUCTOR_CACHE_DIR"]
# One process a core: further threads would only wait for each other, in commands under test too.
os.environ["OMP_NUM_THREADS"] = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: its kernels run on the CPU

if folder := os.environ.get("ACUTANCE_TEST_LIBRARY"):  # where another build of the kernel is
    from acutance.kernels import library

    library._FOLDER = Path(folder)

# sums are split the same way on a laptop and on a large machine
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_unconfigure() -> None:
    """Remove what this process cached."""
    shutil.rmtree(os.environ["ACUTANCE_CACHE"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of each grid as slow but for enough to see every value of its parameters."""
    grids: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("grid") and not item.get_closest_marker("slow"):
            assert isinstance(item, pytest.Function)
            grids[item.nodeid.partition("[")[0]].append(item)
    for cases in grids.values():
        for case in repeats(cases):
            case.add_marker("slow")


def repeats(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Cases whose values occur in the others: the one with the most new values is chosen next."""
    marker = cases[0].get_closest_marker("grid")
    assert marker is not None
    values = [sorted(case.callspec.indices.items()) for case in cases]
    together = min(marker.args[0] if marker.args else 1, len(values[0]))
    shows = {
        case: set(combinations(value, together)) for case, value in zip(cases, values, strict=True)
    }
    seen: set[tuple[tuple[str, int], ...]] = set()
    rest = list(cases)
    while rest:
        best = max(rest, key=lambda case: len(shows[case] - seen))
        if shows[best] <= seen:
            break
        seen |= shows[best]
        rest.remove(best)
    return rest


@pytest.fixture
def blocked_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the plain PyTorch kernel take every call, as ACUTANCE_BACKEND=blocked does."""
    from acutance.kernels import dispatch

    monkeypatch.setattr(dispatch, "forced", lambda: "blocked")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Start each test from the same random state, whichever tests ran before it."""
    torch.manual_seed(0)
    return 0
