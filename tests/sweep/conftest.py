"""The sweep's modules, which lie outside the package."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session", autouse=True)
def zoo() -> Iterator[None]:
    """``benchmarks`` on the path, as it is for ``python benchmarks/sweep.py``."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that a second thread only costs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Models built from arbitrary configurations warn of them."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture(scope="session")
def sweep(zoo: None) -> ModuleType:
    """The command."""
    spec = importlib.util.spec_from_file_location("sweep_command", FOLDER / "sweep.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
