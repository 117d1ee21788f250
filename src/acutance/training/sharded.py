"""Slices of a weight scaled in place, where it lies whole and where ranks hold parts of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["is_sharded", "multiply", "reshard"]


def is_sharded(weight: Tensor) -> bool:
    """Whether it is a DTensor, of which each rank holds a part or a copy."""
    return type(weight).__name__ == "DTensor"


@torch.no_grad()
def multiply(weight: Tensor, dim: int, start: int, size: int, factor: float) -> None:
    """Scale entries ``start`` to ``start + size`` of a dimension, each rank its own.

    Raises:
        ValueError: if it is not told from the placements which entries are this rank's.

    Example:
        >>> weight = torch.ones(3, 2)
        >>> multiply(weight, 0, 1, 2, 0.5)
        >>> weight[:, 0]
        tensor([1.0000, 0.5000, 0.5000])
    """
    part: Any = weight
    if is_sharded(weight):
        part = part.to_local()
        for axis, placement in enumerate(weight.placements):  # type: ignore[attr-defined]
            if placement.is_partial():
                raise ValueError(f"a weight placed as {placement} cannot be scaled by head")
            if not placement.is_shard(dim):
                continue
            mesh = weight.device_mesh  # type: ignore[attr-defined]
            first, last = _mine(weight.shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
            if part.shape[dim] != last - first:
                raise ValueError(
                    f"rank {mesh.get_local_rank(axis)} of {mesh.size(axis)} has "
                    f"{part.shape[dim]} of {weight.shape[dim]} entries where {last - first} were "
                    "expected: a weight sharded more than once cannot be scaled by head"
                )
            end = min(start + size, last)
            start = max(start, first)
            start, size = start - first, max(end - start, 0)
    if size:
        _multiply(part.narrow(dim, start, size), factor)


def _mine(entries: int, ranks: int, rank: int) -> tuple[int, int]:
    """Entries are dealt as ``torch.chunk`` does."""
    share = -(-entries // ranks)
    return min(rank * share, entries), min((rank + 1) * share, entries)


def _multiply(part: Tensor, factor: float) -> None:
    wide = part.to(torch.float64 if part.dtype == torch.float64 else torch.float32)
    part.copy_(wide * factor)  # rounded once: a factor in the dtype of part would be rounded too


def reshard(model: nn.Module) -> None:
    """Let modules under ``fully_shard`` go back to the weights that the optimiser steps."""
    for module in model.modules():
        if type(module).__name__.startswith("FSDP") and callable(
            again := getattr(module, "reshard", None)
        ):
            again()
