"""Tensor parallelism: which of a layer's heads this rank has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["first_head"]


def first_head(module: torch.nn.Module | None, query: Tensor) -> int:
    """Number, in its layer, of the first head that a call of this rank has.

    A query projection whose rows are shared out over ranks has made the heads; it is told by its
    weight, a DTensor sharded by rows whose part here is as many rows as the query is wide.

    Args:
        module: the attention's module, with its projections.
        query: (B, Hq, L, E).

    Returns:
        0 where heads are not shared out, or nothing tells.

    Example:
        >>> first_head(torch.nn.Linear(8, 8), torch.zeros(1, 2, 3, 4))
        0
    """
    if module is None or not (dist.is_available() and dist.is_initialized()):
        return 0
    from torch.distributed.tensor import DTensor

    heads, width = query.shape[1], query.shape[3]
    for weight in module.parameters():
        if not isinstance(weight, DTensor) or weight.dim() != 2:
            continue
        start = _first_row(weight)
        if start is not None and weight.to_local().shape[0] == heads * width:
            return start // width
    return 0


def _first_row(weight: Any) -> int | None:
    """The first row of a matrix that this rank has; None where rows are not shared out."""
    place = weight.device_mesh.get_coordinate()
    if place is None:
        return None
    start, length, shared = 0, weight.shape[0], False
    for dim, placement in enumerate(weight.placements):
        if placement.is_shard(0) and weight.device_mesh.size(dim) > 1:
            chunk = -(-length // weight.device_mesh.size(dim))  # as torch.chunk
            start += place[dim] * chunk
            length = max(0, min(chunk, length - place[dim] * chunk))
            shared = True
    return start if shared else None
