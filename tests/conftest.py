"""What every test may rely on: no model hub, a fixed number of threads, a seed."""

from __future__ import annotations

import os
import shutil
import tempfile
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


@pytest.fixture
def blocked_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the plain PyTorch kernel take every call, as ACUTANCE_BACKEND=blocked does."""
    from acutance.kernels import dispatch

    monkeypatch.setattr(dispatch, "_forced", lambda: "blocked")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Start each test from the same random state, whichever tests ran before it."""
    torch.manual_seed(0)
    return 0
