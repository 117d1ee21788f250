"""Text for the tests of acutance.extend, the same under every version of Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.contract import texts

#: Source code that the package's decoder was not trained on.
CODE = Path(__file__).parents[2] / "data" / "code.txt"


@pytest.fixture(scope="package")
def windows() -> Tensor:
    """Eight windows of 512 bytes."""
    return texts.sample_windows(texts.read([CODE]), 512, 8, torch.Generator().manual_seed(0))
