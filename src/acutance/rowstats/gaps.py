r"""The gap histogram of a row: how many keys lie how far below its maximum score, on a fixed grid.

The bins are aligned to multiples of :data:`WIDTH` in the scores, independent of the row: bin d of a
row with maximum m counts the visible keys with :math:`\lfloor 4m \rfloor - \lfloor 4s_j \rfloor =
d`. When the maximum rises, counts shift by whole bins, so histograms of parts of a row add up
exactly. Keys :data:`BINS` bins or more below the maximum are in no bin; their number is ``n`` minus
the counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Bins of a row.
BINS = 64
#: Width of a bin in nats, a power of two: dividing by it rounds nothing.
WIDTH = 0.25


def absent(rows: Tensor) -> Tensor:
    """An empty histogram (..., 0), for rows recorded without one."""
    return rows.detach().unsqueeze(-1)[..., :0].to(torch.int32)


def edge(scores: Tensor) -> Tensor:
    """Bin number of each score on the grid, floor(4 s), in the scores' dtype."""
    return torch.floor(scores * (1.0 / WIDTH))


def count(scores: Tensor, hidden: Tensor | None, top: Tensor) -> Tensor:
    """The gap histogram of rows of scores.

    Args:
        scores: (..., S).
        hidden: boolean, same shape, True on keys to ignore; None to count all.
        top: :func:`edge` of each row's maximum, (...).

    Returns:
        (..., 64) int32.
    """
    with torch.no_grad():
        gap = top.detach().unsqueeze(-1) - edge(scores.detach())
        place = torch.nan_to_num(gap, BINS, BINS, BINS).clamp_(0, BINS).to(torch.int64)
        if hidden is not None:
            place = place.masked_fill(hidden, BINS)
        ones = torch.ones_like(place, dtype=torch.int32)
        none = place.new_zeros((*place.shape[:-1], BINS + 1), dtype=torch.int32)
        return none.scatter_add(-1, place, ones)[..., :BINS]


def fold(scores: Tensor, top: Tensor) -> Tensor:
    """The gap histogram of scores in blocks, in as few passes as possible.

    Args:
        scores: (blocks, rows, S), divided by the bin width, −inf on hidden keys; overwritten.
        top: (blocks, rows), the floor of each row's maximum.

    Returns:
        (blocks, rows, 64) int32.
    """
    gap = torch.sub(top.unsqueeze(-1), scores.floor_(), out=scores)
    gap.nan_to_num_(BINS, BINS, BINS).clamp_(0, BINS)
    rows = top.numel()
    first = torch.arange(0, rows * (BINS + 1), BINS + 1, dtype=torch.int32, device=top.device)
    place = gap.to(torch.int32).add_(first.view(*top.shape, 1))
    if place.device.type == "cpu":
        counts = torch.bincount(place.flatten(), minlength=rows * (BINS + 1)).to(torch.int32)
    else:  # bincount would wait for the device
        counts = torch.zeros(rows * (BINS + 1), dtype=torch.int32, device=top.device)
        counts.index_add_(0, place.flatten(), torch.ones_like(place).flatten())
    return counts.view(*top.shape, BINS + 1)[..., :BINS]


def aligned(counts: Tensor, old_top: Tensor, top: Tensor) -> Tensor:
    """Shift a histogram to a maximum at or above the row's.

    Args:
        counts: (..., 64).
        old_top: :func:`edge` of the maximum it refers to, (...).
        top: :func:`edge` of the new maximum, (...).
    """
    drop = torch.nan_to_num(top - old_top, BINS, BINS, BINS).clamp(0, BINS).to(torch.int64)
    place = torch.arange(BINS, device=counts.device) - drop.unsqueeze(-1)
    moved = counts.expand(place.shape).gather(-1, place.clamp(min=0))
    return torch.where(place >= 0, moved, torch.zeros_like(moved))
