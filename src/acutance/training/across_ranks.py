"""Operations across ``torch.distributed`` ranks: exact maxima, gathered rows, sharded weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acutance.kernels.call import accumulate_dtype


def ranks(group: Any = None) -> tuple[int, int]:
    """This process's rank and the world size; (0, 1) if torch.distributed is not initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


class ExactMaxima:
    """Largest value of each head over all ranks, including layers that only some ranks run.

    It uses one ``all_reduce`` for all heads of all layers. The ranks agree on a layout first, and
    again when one of them has a new layer.

    Args:
        group: the process group; None for all ranks.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self._layout: dict[str, int] = {}

    def __call__(self, maxima: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Maxima (heads,) by layer over all ranks; unchanged without torch.distributed.

        Raises:
            ValueError: if ranks have different numbers of heads for a layer.
        """
        _, size = ranks(self.group)
        if size == 1:
            return dict(maxima)
        mine = {name: len(value) for name, value in maxima.items()}
        while True:
            unknown = not mine.items() <= self._layout.items()
            sizes = list(self._layout.values())
            values = torch.full((sum(sizes) + 1,), -torch.inf, dtype=torch.float64, device=device)
            by_layer = dict(zip(self._layout, values[:-1].split(sizes), strict=True))  # views
            if not unknown:
                for name, value in maxima.items():
                    by_layer[name].copy_(value)
            values[-1] = float(unknown)
            # a NaN must not be lost: what a maximum makes of it differs from library to library
            values.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
            if not bool(values[-1] > 0):
                return by_layer
            everyone: list[Any] = [None] * size
            dist.all_gather_object(everyone, self._layout | mine, group=self.group)
            layout: dict[str, int] = {}
            for theirs in everyone:
                for name, heads in theirs.items():
                    if layout.setdefault(name, heads) != heads:
                        raise ValueError(
                            f"ranks have different numbers of heads for {name}: {layout[name]} and "
                            f"{heads}"
                        )
            self._layout = layout  # now of every rank, so that the next turn is the last


class _Gather(torch.autograd.Function):
    """Concatenate the rows of all ranks; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        """Gather the rows of all ranks."""
        ctx.group, ctx.count = group, len(rows)
        ctx.rank, size = ranks(group)
        parts = [torch.empty_like(rows) for _ in range(size)]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Sum gradients over ranks and return this rank's rows."""
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        start = ctx.rank * ctx.count
        return total[start : start + ctx.count], None


def gather_rows(rows: Tensor, group: Any = None) -> Tensor:
    """Concatenate the rows (n, d) of all ranks to (ranks · n, d), with gradients.

    Raises:
        ValueError: if ranks have different numbers of rows.
    """
    _, size = ranks(group)
    if size == 1:
        return rows
    counts = torch.tensor([len(rows), -len(rows)], device=rows.device)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
    if int(counts[0]) != -int(counts[1]):
        raise ValueError(
            f"every rank must have the same number of rows, got {-int(counts[1])} on one and "
            f"{int(counts[0])} on another"
        )
    gathered: Tensor = _Gather.apply(rows, group)  # type: ignore[no-untyped-call]
    return gathered


def is_sharded(weight: Tensor) -> bool:
    """Whether a tensor is a DTensor, distributed over several ranks."""
    return type(weight).__name__ == "DTensor"


@torch.no_grad()
def multiply(weight: Tensor, dim: int, start: int, size: int, factor: float) -> None:
    """Multiply entries ``start`` to ``start + size`` of a dimension in place, on every rank.

    Raises:
        ValueError: if the placements do not determine which entries this rank holds.

    Example:
        >>> weight = torch.ones(3, 2)
        >>> multiply(weight, 0, 1, 2, 0.5)
        >>> weight[:, 0]
        tensor([1.0000, 0.5000, 0.5000])
    """
    part: Any = weight
    if is_sharded(weight):
        part = part.to_local()
        entries = _local_entries(weight, dim)
        if len(entries) != part.shape[dim]:
            raise ValueError(
                f"this rank has {part.shape[dim]} of {weight.shape[dim]} entries, expected "
                f"{len(entries)}: a weight placed as {_placements(weight)} cannot be scaled by head"
            )
        chosen = ((entries >= start) & (entries < start + size)).nonzero()[:, 0].to(part.device)
        if len(chosen):
            part.index_copy_(dim, chosen, _times(part.index_select(dim, chosen), factor))
    elif size:
        part = part.narrow(dim, start, size)
        part.copy_(_times(part, factor))


def _local_entries(weight: Any, dim: int) -> Tensor:
    """Which entries of a dimension this rank holds of a distributed tensor, in their order."""
    mesh, entries, count = weight.device_mesh, torch.arange(weight.shape[dim]), 1
    axes = list(enumerate(weight.placements))
    for _, placement in axes:
        if placement.is_partial():
            raise ValueError(f"a weight placed as {placement} cannot be scaled by head")
    # an axis of ``fully_shard`` comes before that of tensor parallelism, and cuts after it
    strided = [(axis, placement) for axis, placement in axes if _is_strided(placement)]
    for axis, placement in [*(each for each in axes if each not in strided), *strided[::-1]]:
        if getattr(placement, "dim", None) != dim:
            continue
        if _is_strided(placement) and placement.split_factor != count:
            raise ValueError(
                f"a weight placed as {_placements(weight)} cannot be scaled by head: it is not "
                f"known how its {placement.split_factor} parts are ordered"
            )
        rank, size = mesh.get_local_rank(axis), mesh.size(axis)
        chunks = entries.chunk(size)  # fewer than ranks, if there are fewer entries
        entries = chunks[rank] if rank < len(chunks) else entries[:0]
        count *= size
    return entries


def head_shards(weight: Tensor, dim: int) -> tuple[int, int]:
    """Number of parts that tensor parallelism cuts a dimension into, and this rank's number.

    ``fully_shard`` gathers its parts before a forward pass, so they do not count. Of weights that
    only ``fully_shard`` cut, or that are not distributed, there is one part.
    """
    if not is_sharded(weight):
        return 1, 0
    mesh: Any = weight.device_mesh  # type: ignore[attr-defined]
    count, index = 1, 0
    for axis, placement in enumerate(weight.placements):  # type: ignore[attr-defined]
        if not _is_strided(placement) and getattr(placement, "dim", None) == dim:
            count, index = count * mesh.size(axis), index * mesh.size(axis)
            index += mesh.get_local_rank(axis)
    return count, index


def _is_strided(placement: Any) -> bool:
    """Whether a placement is that of ``fully_shard`` on top of another axis."""
    return hasattr(placement, "split_factor")


def _placements(weight: Any) -> str:
    """The placements of a distributed tensor, for messages."""
    return ", ".join(map(str, weight.placements))


def _times(part: Tensor, factor: float) -> Tensor:
    """A tensor times a factor, computed in float32 or float64."""
    wide = part.to(accumulate_dtype(part.dtype))
    return (wide * factor).to(part.dtype)  # a factor in the dtype of part would be rounded too


def reshard(model: nn.Module) -> None:
    """Make modules under ``fully_shard`` use the sharded weights that the optimiser updates."""
    for module in model.modules():
        if type(module).__name__.startswith("FSDP") and callable(
            again := getattr(module, "reshard", None)
        ):
            again()
