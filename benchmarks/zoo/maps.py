"""What a model returns: attention maps, the entropy of their rows, and whether outputs agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["alike", "gives", "maps", "row_entropy", "same", "tensors", "tolerance"]


def tolerance(largest: float, keys: int) -> float:
    """Allowed difference of entropies, both from float32 scores as large as ``largest``.

    A score is off by some roundings of itself, a weight relatively by as much, and an entropy by at
    most that times log n, twice: once for each of the two.
    """
    eps = torch.finfo(torch.float32).eps
    logs = 1.0 + float(np.log(max(keys, 2)))
    sink = keys * (1.0 - float(np.log(1e-5)))  # one less the sum of a row, where that is a sink's
    return eps * (16 * (4.0 + largest) * logs + sink)


def row_entropy(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy of each row of maps (B, H, L, S), and which rows hold weights at all.

    What a row lacks to one is the share of a sink.
    """
    p = weights.double()
    total = p.sum(-1, keepdim=True)
    sink = (1.0 - total).clamp(min=0.0)
    p = torch.cat([p, torch.where(sink > 1e-5, sink, 0.0)], -1)
    return -torch.xlogy(p, p).sum(-1), total.squeeze(-1) > 1e-6


def maps(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Every attention map (B, H, L, S) in an output, whose rows are distributions."""
    for name in output if isinstance(output, dict) else ():
        if "attention" not in name:
            continue
        for index, weights in enumerate(tensors(output[name])):
            if (
                _averaged(weights)
                or weights.dim() != 4
                or not weights.is_floating_point()
                or weights.shape[-1] < 2
            ):
                continue
            if bool((weights >= 0).all()) and float(weights.sum(-1).max()) < 1.001:
                yield f"{name}[{index}]", weights


def _averaged(weights: Tensor) -> bool:
    """Whether a map is one average over heads, repeated."""
    return weights.dim() == 4 and weights.shape[1] > 1 and bool((weights == weights[:, :1]).all())


def tensors(output: Any) -> Iterator[Tensor]:
    """Every tensor of an output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors(value)


def gives(output: Any) -> bool:
    """Whether there is a tensor in an output."""
    return any(True for _ in tensors(output))


def same(left: Any, right: Any) -> bool:
    one, two = list(tensors(left)), list(tensors(right))
    return len(one) == len(two) and all(
        a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(one, two, strict=True)
    )


def alike(left: Any, right: Any) -> bool:
    """Whether two outputs differ by no more than rounding: a thousandth of their size."""
    for a, b in zip(tensors(left), tensors(right), strict=False):
        if a.shape == b.shape and a.is_floating_point():
            size = max(float(a.nan_to_num().abs().max()) if a.numel() else 0.0, 1e-30)
            if a.numel() and float((a - b).nan_to_num().abs().max()) > 1e-3 * size:
                return False
    return True
