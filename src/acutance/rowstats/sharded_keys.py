r"""Merge row statistics over keys that are sharded across processes.

In context-parallel (ring) attention every rank holds some of the keys. Each rank observes its own,
and :func:`all_reduce_keys` merges the states as :func:`~acutance.rowstats.merge` would, with six
all-reduces of the size of one state, independent of the number of ranks.
"""

from __future__ import annotations

import zlib
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from acutance.rowstats import gaps as histogram
from acutance.rowstats.state import (
    NO_KEY,
    UNPLACED,
    RowState,
    _finite,
    _no_elements,
    _shift,
    has_gaps,
    has_noise,
    ratio,
    sum_of_gaps,
)
from acutance.rowstats.state import has_sink as state_has_sink
from acutance.rowstats.statistics import RowStatistics
from acutance.rowstats.weighted import WeightStatistics, WeightSums, _known, _rescaled, unknown

__all__ = ["all_reduce_keys"]

State = TypeVar("State", RowState, WeightSums, RowStatistics, WeightStatistics)


def all_reduce_keys(
    state: State, group: dist.ProcessGroup | None = None, *, first_key: int | Tensor = 0
) -> State:
    r"""Merge the states of all ranks, which have the same rows and different keys, exactly.

    Every rank of the group calls it with rows of the same shape and dtype, and gets the same
    result. With :math:`m = \max_r m_r` and each rank's sums shifted to it,

    .. math::
        Z = \sum_r Z_r, \quad U = \sum_r U_r, \quad
        W = \sum_r W_r + Z_r (c_r - c)^2, \; c_r = U_r / Z_r, \quad
        M_2 = \sum_r M_{2,r} + n_r (d_r - d)^2,

    d being ``depth``, and similarly for Q, O, R1 and R2. Sums are computed in float64 (float32 on
    MPS, which lacks it) and returned in the state's dtype.

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
        Liu, Zaharia & Abbeel (2023), arXiv:2310.01889, for rings; Chan, Golub & LeVeque (1983),
        The American Statistician 37:242, for squared deviations of parts.
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
    with torch.no_grad():
        if isinstance(state, RowState):
            return _rows(state, group, first_key)
        if isinstance(state, WeightSums):
            return _weights(state, group, first_key)
        if isinstance(state, RowStatistics):
            return RowStatistics(_rows(state.state, group, first_key))
        scored = _any([state.scores is None], state.sums.c, group)[0]
        scores = None
        if not scored and state.scores is not None:
            scores = _rows(state.scores, group, first_key)
        return WeightStatistics(_weights(state.sums, group, first_key), scores)


def _rows(state: RowState, group: dist.ProcessGroup | None, first_key: int | Tensor) -> RowState:
    """Merge softmax row states over the ranks of a group."""
    state = RowState(*(field.detach() for field in state))
    index, problem = _placed(state.first_index, first_key)
    noisy = has_noise(state)
    _same_on_all_ranks("RowState", state.Z, group)
    no_noise, no_gaps, sunk, wrong = _any(
        [not noisy, not has_gaps(state), state_has_sink(state), problem is not None],
        state.Z,
        group,
    )
    _refuse(problem, wrong)
    width = state.O.shape[-1] if noisy else 0
    if not no_noise:
        _same_on_all_ranks("values of width", state.Z, group, width)
    add = _adder(group, state.Z)

    sink = state.sink if state_has_sink(state) else torch.full_like(state.Z, -torch.inf)
    both = torch.stack([state.m, sink])
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    m, sink = both.unbind(0)
    n = state.n.clone()
    dist.all_reduce(n, group=group)
    shifted = _shift(_wide(state), _finite(m).to(add.dtype))
    count = state.n.to(add.dtype)
    first_index, first = _first(index, shifted.first, add, group)
    Z, U, Q, mean, depth = add(
        shifted.Z, shifted.U, shifted.Q, count * shifted.mean, count * shifted.depth
    )
    keys = n.to(add.dtype).clamp(min=1)
    depth = depth / keys
    gap = ratio(shifted.U, shifted.Z) - ratio(U, Z)
    away = shifted.depth - depth
    W, M2 = add(shifted.W + shifted.Z * gap.square(), shifted.M2 + count * away.square())
    narrow = state.Z.dtype
    joint = RowState(
        n=n,
        m=m,
        Z=Z.to(narrow),
        U=U.to(narrow),
        W=W.to(narrow),
        Q=Q.to(narrow),
        mean=(mean / keys).to(narrow),
        M2=M2.to(narrow),
        depth=depth.to(narrow),
        first=first.to(narrow),
        first_index=first_index,
        sink=sink if sunk else _no_elements(m),
        O=_no_elements(m),
        R1=_no_elements(m),
        R2=_no_elements(m),
        gaps=histogram.absent(m),
    )
    if not no_gaps:
        gaps = sum_of_gaps((state,), m)
        dist.all_reduce(gaps, group=group)
        joint = joint._replace(gaps=gaps)
    if no_noise:
        return joint
    output, centre = add(shifted.O, shifted.Q.unsqueeze(-1) * shifted.R1)
    centre = ratio(centre, Q.unsqueeze(-1).expand_as(centre))
    off = torch.where((shifted.Q == 0).unsqueeze(-1), 0.0, shifted.R1 - centre)
    (spread,) = add(shifted.R2 + shifted.Q * off.square().sum(-1))
    return joint._replace(O=output.to(narrow), R1=centre.to(narrow), R2=spread.to(narrow))


def _weights(
    sums: WeightSums, group: dist.ProcessGroup | None, first_key: int | Tensor
) -> WeightSums:
    """Merge weight sums over the ranks of a group."""
    sums = WeightSums(*(field.detach() for field in sums))
    index, problem = _placed(sums.first_index, first_key)
    _same_on_all_ranks("WeightSums", sums.c, group)
    names = ("T", "A", "Q", "X", "top", "first")
    unknowns = [not _known(sums, getattr(sums, name)) for name in names]
    *flags, wrong = _any([*unknowns, problem is not None], sums.c, group)
    _refuse(problem, wrong)
    missing = dict(zip(names, flags, strict=True))
    add = _adder(group, sums.c)
    c = sums.c.clone()
    dist.all_reduce(c, dist.ReduceOp.MAX, group)
    n = sums.n.clone()
    dist.all_reduce(n, group=group)
    wide = WeightSums(*(x.to(add.dtype) if x.is_floating_point() else x for x in sums))
    rescaled = _rescaled(wide, c.to(add.dtype))
    merged: dict[str, Tensor] = {
        name: unknown(c) if missing[name] else add(getattr(rescaled, name))[0].to(c.dtype)
        for name in ("T", "A", "Q", "X")
    }
    top = unknown(c)
    if not missing["top"]:
        top = sums.top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
    mine = torch.zeros_like(wide.c) if missing["first"] else wide.first
    first_index, first = _first(index, mine, add, group)
    first = unknown(c) if missing["first"] else first.to(c.dtype)
    return WeightSums(n=n, c=c, top=top, first=first, first_index=first_index, **merged)


def _wide(state: RowState) -> RowState:
    """The state with its sums in the dtype used for adding."""
    dtype = _sum_dtype(state.Z)
    return RowState(*(x.to(dtype) if x.is_floating_point() else x for x in state))


def _sum_dtype(like: Tensor) -> torch.dtype:
    """Dtype in which sums are added over ranks: float64, or float32 on MPS."""
    return torch.float32 if like.device.type == "mps" else torch.float64


class _adder:  # noqa: N801 (used as the function it is)
    """Adds several tensors over the ranks in one all-reduce."""

    def __init__(self, group: dist.ProcessGroup | None, like: Tensor) -> None:
        self._group = group
        self.dtype = _sum_dtype(like)

    def __call__(self, *parts: Tensor) -> list[Tensor]:
        flat = torch.cat([part.to(self.dtype).flatten() for part in parts])
        dist.all_reduce(flat, group=self._group)
        pieces = flat.split([part.numel() for part in parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _placed(index: Tensor, first_key: int | Tensor) -> tuple[Tensor, str | None]:
    """Position of each row's first key among all keys, or the reason why it is unknown."""
    has_key = index != NO_KEY
    index = torch.where(index < 0, index - UNPLACED, index)  # among this rank's keys
    if isinstance(first_key, int):
        if first_key < 0:
            return index, f"first_key must be a position, 0 or more, got {first_key}"
        return torch.where(has_key, index + torch.where(has_key, first_key, 0), NO_KEY), None
    if first_key.dim() != 1 or first_key.dtype != torch.int64:
        return index, (
            "first_key must be an int or the positions of this rank's keys, (S,) int64, got "
            f"{tuple(first_key.shape)} {first_key.dtype}"
        )
    if len(first_key) > 1 and not bool((first_key.diff() > 0).all()):
        return index, "first_key must contain the positions of this rank's keys in ascending order"
    if not bool(has_key.any()):
        return index, None
    last = int(index[has_key].max())
    if last >= len(first_key):
        return index, (
            "first_key must contain a position for each key of this rank: it has "
            f"{len(first_key)}, but a row's first key is number {last}"
        )
    return torch.where(
        has_key, first_key.to(index.device)[torch.where(has_key, index, 0)], NO_KEY
    ), None


def _refuse(problem: str | None, wrong: bool) -> None:
    """Raise the same error on every rank if any rank has a problem, so that none waits."""
    if wrong:
        raise ValueError(problem or "first_key of another rank does not fit its state")


def _first(
    index: Tensor, first: Tensor, add: _adder, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Position and score (or weight) of each row's first key over all ranks."""
    lowest = index.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group)
    owner = (index == lowest) & (lowest != NO_KEY)
    owners, joint = add(owner, torch.where(owner, first, 0.0))
    if bool((owners > 1).any()):
        shared = int(lowest[owners > 1][0])
        raise ValueError(
            f"ranks must hold different keys, but {int(owners.max())} of them hold key "
            f"{shared}: give the position of each rank's keys with first_key"
        )
    return lowest, joint


def _any(flags: list[bool], like: Tensor, group: dist.ProcessGroup | None) -> list[bool]:
    """For each flag, whether it is true on any rank."""
    totals = torch.tensor(flags, dtype=torch.int64, device=like.device)
    dist.all_reduce(totals, dist.ReduceOp.MAX, group)
    return [bool(flag) for flag in totals.tolist()]


def _same_on_all_ranks(
    what: str, rows: Tensor, group: dist.ProcessGroup | None, width: int = 0
) -> None:
    """Raise ValueError on every rank if rows differ in shape, since collectives would hang."""
    shape = f"{what} {width or ''} {tuple(rows.shape)} {rows.dtype}".replace("  ", " ")
    number = zlib.crc32(shape.encode())
    pair = torch.tensor([number, -number], dtype=torch.int64, device=rows.device)
    dist.all_reduce(pair, dist.ReduceOp.MAX, group)
    high, low = pair.tolist()
    if high != -low:
        raise ValueError(
            f"all ranks must hold the same rows: rank {dist.get_rank(group)} has {shape}, "
            "another rank has different rows"
        )
