"""The weight that each key receives, against a softmax that is really formed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import acutance
from acutance.kernels import dispatch


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Uninitialised memory holds NaN: a result nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Largest(TorchDispatchMode):
    """The number of bytes of the largest storage that any operation returns."""

    size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.size = max(self.size, leaf.untyped_storage().nbytes())
        return out


def watched(function: Callable[..., Any], mode: Largest) -> Callable[..., Any]:
    def inside(*arguments: Any) -> Any:
        with mode:
            return function(*arguments)

    return inside


def test_the_blocked_kernel_does_not_form_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    mode, n = Largest(), 3000
    for name in ("forward", "backward"):
        monkeypatch.setattr(dispatch, name, watched(getattr(dispatch, name), mode))
    query, key = torch.randn(2, 1, 1, n, 8)
    mass = acutance.key_mass(query, key, is_causal=True, backend="blocked")
    assert float(mass.sum()) == pytest.approx(n, rel=1e-4)
    assert 4 * n <= mode.size <= 2 * n * n  # half of a float32 matrix
