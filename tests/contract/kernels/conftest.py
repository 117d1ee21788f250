"""What the kernels' tests share."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from acutance.kernels import info


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Uninitialised memory holds NaN: a result nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert torch.zeros(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def _absent(name: str) -> str | None:
    if name == "native":
        return info().why_not
    if name == "triton" and importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton, on Linux)"
    return None


@pytest.fixture(params=["native", "blocked", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend by name; Triton's in its interpreter, which computes with numpy and warns."""
    name: str = request.param
    why = _absent(name)
    if why is not None:
        pytest.skip(why)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield name
