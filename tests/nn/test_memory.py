"""No module forms a matrix of its rows and keys, but for weights that were asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from acutance.kernels.whole_rows import BLOCK_ELEMENTS
from acutance.nn import GatedAttentionUnit, MultiheadAttention

N = 2500  # N² is three blocks of rows


class Largest(TorchDispatchMode):
    """The number of elements of the largest storage that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                size = leaf.untyped_storage().nbytes() // max(1, leaf.element_size())
                self.elements = max(self.elements, size)
        return out


def largest(module: nn.Module, **options: Any) -> int:
    x = torch.randn(1, N, 8)
    given = (x, x, x) if isinstance(module, MultiheadAttention) else (x,)
    mode = Largest()
    with torch.no_grad(), mode:
        module(*given, **options)
    return mode.elements


def make(**options: Any) -> MultiheadAttention:
    return MultiheadAttention(8, 1, batch_first=True, **options)


@pytest.mark.parametrize(
    "module",
    [
        make(), make(weights="relu2"), make(positions="alibi", scaling="ssmax"),
        GatedAttentionUnit(8, 8),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_nothing_is_as_large_as_the_matrix(module: nn.Module) -> None:
    assert largest(module, is_causal=True) <= BLOCK_ELEMENTS
    assert N * N > 2 * BLOCK_ELEMENTS


def test_needed_weights_are_the_matrix() -> None:
    assert largest(make(), need_weights=True) >= N * N
