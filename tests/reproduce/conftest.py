"""Records at the quick size, measured once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from acutance.reproduce import EXPERIMENTS, Record, run_one


@pytest.fixture(scope="session")
def quick_record() -> Callable[[str], Record]:
    """The record of an experiment at the quick size with seed 0."""
    return cache(lambda name: run_one(EXPERIMENTS[name], quick=True))
