r"""Merge row statistics over keys that are sharded across processes.

In context-parallel (ring) attention every rank holds some of the keys. Each rank observes its own,
and :func:`all_reduce_keys` gathers the states of all ranks and merges them on each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from acutance.rowstats.metrics import RowStatistics
from acutance.rowstats.state import NO_KEY, UNPLACED, RowState, empty, merge
from acutance.rowstats.weighted import WeightStatistics, WeightSums, merge_weights

__all__ = ["all_reduce_keys"]

State = TypeVar("State", RowState, WeightSums, RowStatistics, WeightStatistics)


def all_reduce_keys(
    state: State, group: dist.ProcessGroup | None = None, *, first_key: int | Tensor = 0
) -> State:
    r"""Merge the states of all ranks, which have the same rows and different keys, exactly.

    Every rank of the group calls it with rows of the same shape and dtype, and gets the same
    result: that of :func:`~acutance.rowstats.merge` or :func:`~acutance.rowstats.merge_weights` in
    float64, in the state's dtype. Each rank receives the states of all, by way of the CPU.

    Args:
        state: this rank's rows over this rank's keys. A rank without keys passes
            :func:`~acutance.rowstats.empty` rows (with ``value_width`` if others carry values) or
            :func:`~acutance.rowstats.empty_weights`.
        group: the ranks that share the keys; None for the default group.
        first_key: position of this rank's key 0 among all keys, if the state does not know it; for
            keys that are not contiguous (zigzag or striped rings), the position of each key, (S,)
            int64, ascending. ``first_weight`` needs it.

    Returns:
        The joint state, of the same kind and detached: autograd does not pass through it. Values'
        sums and the gap histogram are kept if every rank has them, a sink if any has one, and a
        field of :class:`~acutance.rowstats.WeightSums` if every rank knows it.

    Raises:
        RuntimeError: if torch.distributed is not initialised.
        TypeError: if ``state`` is not one of the four records.
        ValueError: on every rank, if ranks differ in shape, dtype or kind, if two of them hold the
            same first key of a row, or if a ``first_key`` does not fit its state; and if this
            process is not in the group.

    Example:
        A group of one rank changes nothing (``torchrun`` starts larger ones):

        >>> from acutance.rowstats import observe
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> state = observe(torch.tensor([[0.5, 2.0, -1.0]]))
        >>> joint = all_reduce_keys(state, first_key=64)
        >>> joint.n.tolist(), joint.first_index.tolist(), torch.equal(joint.Z, state.Z)
        ([3], [64], True)
        >>> dist.destroy_process_group()

    Source:
        Liu, Zaharia & Abbeel (2023), arXiv:2310.01889, for rings.
    """
    if not isinstance(state, RowState | WeightSums | RowStatistics | WeightStatistics):
        raise TypeError(
            "state must be a RowState, WeightSums, RowStatistics or WeightStatistics, got "
            f"{type(state).__name__}"
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "all_reduce_keys needs torch.distributed, which is not initialised: call "
            "torch.distributed.init_process_group first"
        )
    if dist.get_rank(group) < 0:
        raise ValueError("group must be a process group that this rank belongs to")
    if isinstance(state, RowStatistics):
        return RowStatistics(_merged(state.state, group, first_key))
    if isinstance(state, WeightStatistics):
        sums = _merged(state.sums, group, first_key)
        # a rank without scores takes part with rows that have no key, and says so
        rows = empty(tuple(sums.c.shape), dtype=sums.c.dtype, device=sums.c.device)
        scores = _merged(state.scores or rows, group, first_key, known=state.scores is not None)
        return WeightStatistics(sums, scores)
    joint: State = _merged(state, group, first_key)
    return joint


def _merged(
    state: Any, group: dist.ProcessGroup | None, first_key: int | Tensor, known: bool = True
) -> Any:
    """The joint RowState or WeightSums of all ranks, on each; None if one of them is not known.

    Every rank raises what any of them finds wrong, so that none waits for another.
    """
    problem, index = "", state.first_index
    try:
        index = _placed(index, first_key)
    except ValueError as error:
        problem = str(error)
    fields = [field.detach().cpu() for field in state._replace(first_index=index)]
    wide = [field.double() if field.is_floating_point() else field for field in fields]
    rows = f"{type(state).__name__} {tuple(state.n.shape)} {state.first.dtype}"
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (rows, problem, known, wide), group)
    shapes = [shape for shape, *_ in gathered]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"all ranks must hold the same rows: rank {dist.get_rank(group)} has {rows}, "
            f"others have {', '.join(sorted(set(shapes) - {rows}))}"
        )
    if any(other for _, other, *_ in gathered):
        raise ValueError(problem or "first_key of another rank does not fit its state")
    states = [type(state)(*fields) for *_, fields in gathered]
    widths = {other.O.shape[-1] for other in states if isinstance(other, RowState)} - {0}
    if len(widths) > 1:
        raise ValueError(f"all ranks must hold values of one width, got {sorted(widths)}")
    if not all(is_known for *_, is_known, _ in gathered):
        return None
    indices = torch.stack([other.first_index for other in states])
    lowest = indices.amin(0)
    owners = ((indices == lowest) & (lowest != NO_KEY)).sum(0)
    if bool((owners > 1).any()):
        raise ValueError(
            f"ranks must hold different keys, but {int(owners.max())} of them hold key "
            f"{int(lowest[owners > 1][0])}: give the position of each rank's keys with first_key"
        )
    merge_two: Callable[[Any, Any], Any] = merge if isinstance(state, RowState) else merge_weights
    joint = functools.reduce(merge_two, states)
    dtype, device = state.first.dtype, state.n.device
    return type(state)(*(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in joint))


def _placed(index: Tensor, first_key: int | Tensor) -> Tensor:
    """Position of each row's first key among all keys.

    Raises:
        ValueError: if ``first_key`` does not give it.
    """
    has_key = index != NO_KEY
    index = torch.where(index < 0, index - UNPLACED, index)  # among this rank's keys
    if isinstance(first_key, int):
        if first_key < 0:
            raise ValueError(f"first_key must be a position, 0 or more, got {first_key}")
        return index + torch.where(has_key, first_key, 0)
    if first_key.dim() != 1 or first_key.dtype != torch.int64:
        raise ValueError(
            "first_key must be an int or the positions of this rank's keys, (S,) int64, got "
            f"{tuple(first_key.shape)} {first_key.dtype}"
        )
    if len(first_key) > 1 and not bool((first_key.diff() > 0).all()):
        raise ValueError(
            "first_key must contain the positions of this rank's keys in ascending order"
        )
    if not bool(has_key.any()):
        return index
    last = int(index[has_key].max())
    if last >= len(first_key):
        raise ValueError(
            "first_key must contain a position for each key of this rank: it has "
            f"{len(first_key)}, but a row's first key is number {last}"
        )
    keys = torch.where(has_key, index, 0)
    return torch.where(has_key, first_key.to(index.device)[keys], NO_KEY)
