"""What every test may rely on: no model hub, two threads, a seed."""

from __future__ import annotations

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is imported: before anything
# A compiled graph kept from another version of the operators would be run in place of this one.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="acutance-tests-")

import pytest
import torch

torch.set_num_threads(2)  # sums are split the same way on a laptop and on a large machine


@pytest.fixture(autouse=True)
def seed() -> int:
    """Start each test from the same random state, whichever tests ran before it."""
    torch.manual_seed(0)
    return 0
