r"""How many keys hold a share of a row's mass, from its gap histogram.

The histogram (:mod:`acutance.rowstats.gaps`) counts keys in bins of a quarter of a nat, so a key's
weight is known up to a factor of :math:`e^{1/4}`; the largest is known exactly. Keys are assumed to
be spread evenly within a bin, and masses are scaled to sum to the normaliser, which the row state
holds exactly. Mass means weight on keys: a sink is excluded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acutance.rowstats.gaps import BINS, WIDTH, edge
from acutance.rowstats.state import RowState, has_gaps

#: Part of a key by which a number of keys may be above a whole number without being the next one.
_ROUNDING = 1e-3


class _Bins(NamedTuple):
    """The histogram bins of rows, from the largest keys down; fields are (..., 65).

    The last bin holds all keys below the grid.

    Attributes:
        keys: number of keys in the bin; the largest key of the row is in none.
        near: gap to the row's maximum at which the bin begins, in nats.
        far: gap at which it ends, in nats.
        mass: share of the row's mass in the bin.
        top: (...), share of the largest key.
    """

    keys: Tensor
    near: Tensor
    far: Tensor
    mass: Tensor
    top: Tensor


def _bins(state: RowState) -> _Bins:
    """Key counts, gaps and masses of each histogram bin.

    Raises:
        ValueError: if the state has no gap histogram.
    """
    if not has_gaps(state):
        raise ValueError("these statistics have no gap histogram: compute them with gaps=True")
    dtype, device = state.Z.dtype, state.Z.device
    m, Z = state.m.detach(), state.Z.detach()
    known = (state.n > 0) & m.isfinite() & (Z > 0)
    counts = state.gaps.to(dtype)
    below = (state.n.to(dtype) - counts.sum(-1)).clamp(min=0.0)
    m = torch.where(known, m, 0.0)
    part = m - edge(m) * WIDTH  # of the first bin, from its lower edge up to the maximum
    far = part.unsqueeze(-1) + torch.arange(BINS, dtype=dtype, device=device) * WIDTH
    near = (far - WIDTH).clamp(min=0.0)
    span = far - near
    # ∫ e^−t dt over a bin, over its width
    weight = torch.exp(-near) * torch.where(span > 0, -torch.expm1(-span) / span, 1.0)
    others = torch.cat([counts[..., :1] - 1, counts[..., 1:]], -1).clamp(min=0.0)
    mass = others * weight
    rest = Z - 1.0
    end = far[..., -1:]
    tail = torch.minimum((rest - mass.sum(-1)).clamp(min=0.0), below * torch.exp(-end[..., 0]))
    inside = mass.sum(-1)
    factor = torch.where(inside > 0, (rest - tail).clamp(min=0.0) / inside, 1.0)
    factor = factor.clamp(torch.exp(Z.new_tensor(-WIDTH)), torch.exp(Z.new_tensor(WIDTH)))
    mass = torch.cat([mass * factor.unsqueeze(-1), tail.unsqueeze(-1)], -1)
    whole = 1.0 + mass.sum(-1)
    unknown = torch.where(known, 0.0, torch.nan).to(dtype)
    return _Bins(
        keys=torch.cat([others, below.unsqueeze(-1)], -1),
        near=torch.cat([near, end], -1),
        far=torch.cat([far, torch.where(below > 0, end[..., 0] + 1.0, end[..., 0])[..., None]], -1),
        mass=mass / whole.unsqueeze(-1),
        top=1.0 / whole + unknown,
    )


def _mass_within(bins: _Bins, part: Tensor) -> Tensor:
    """Share of each bin's mass on the part of it, 0 to 1, that is nearest to the maximum."""
    part = part.clamp(0.0, 1.0)
    span = bins.far - bins.near
    fall = torch.expm1(-span)
    return torch.where(fall < 0, torch.expm1(-part * span) / torch.where(fall < 0, fall, 1.0), part)


def keys_holding(state: RowState, share: float) -> Tensor:
    """Smallest number of keys that hold a share of each row's mass, (...); NaN without keys.

    Args:
        state: row state with a gap histogram (``gaps=True``).
        share: above 0, at most 1.

    Raises:
        ValueError: if the share is not such a number, or the state has no gap histogram.

    Example:
        >>> import torch
        >>> from acutance.rowstats import observe
        >>> weights = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04])
        >>> state = observe(weights.log(), gaps=True)
        >>> [keys_holding(state, share).item() for share in (0.4, 0.75, 0.97, 1.0)]
        [1.0, 2.0, 5.0, 5.0]
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share must be above 0 and at most 1, got {share!r}")
    bins = _bins(state)
    before = bins.top.unsqueeze(-1) + torch.cumsum(bins.mass, -1) - bins.mass
    needed = share - before  # from each bin on
    # a bin gives all its keys if what is wanted exceeds its mass, and none if nothing is
    part = torch.where(bins.mass > 0, needed / torch.where(bins.mass > 0, bins.mass, 1.0), 0.0)
    if share == 1.0:
        part = torch.ones_like(part)
    part = part.clamp(0.0, 1.0)
    span = bins.far - bins.near
    fall = -torch.expm1(-span)
    share_of_bin = torch.where(
        span > 0, -torch.log1p(-part * fall) / torch.where(span > 0, span, 1.0), part
    )
    share_of_bin = torch.where(part >= 1.0, 1.0, share_of_bin)
    count = 1.0 + (bins.keys * share_of_bin).sum(-1)
    rounded = torch.ceil(count - _ROUNDING).clamp(min=1.0)
    return torch.where(bins.top.isnan(), torch.nan, rounded)


def mass_of_largest(state: RowState, keys: int) -> Tensor:
    """Share of each row's mass on its ``keys`` largest keys, (...); NaN for rows without keys.

    Args:
        state: row state with a gap histogram (``gaps=True``).
        keys: number of keys, at least 1.

    Raises:
        ValueError: if ``keys`` is below 1, or the state has no gap histogram.

    Example:
        >>> import torch
        >>> from acutance.rowstats import observe
        >>> state = observe(torch.tensor([2.0, 0.0, 0.0, 0.0]), gaps=True)
        >>> mass_of_largest(state, 1), mass_of_largest(state, 4)
        (tensor(0.7112), tensor(1.))
    """
    if type(keys) is not int or keys < 1:
        raise ValueError(f"keys must be a whole number, at least 1, got {keys!r}")
    bins = _bins(state)
    before = 1.0 + torch.cumsum(bins.keys, -1) - bins.keys
    has_keys = bins.keys > 0
    part = torch.where(has_keys, (keys - before) / torch.where(has_keys, bins.keys, 1.0), 0.0)
    inside = _mass_within(bins, part)
    return (bins.top + (bins.mass * inside).sum(-1)).clamp(max=1.0)


def mass_below(state: RowState, gap: float) -> Tensor:
    """Share of each row's mass on keys more than a gap below its maximum, (...).

    This is the mass lost by dropping them. NaN for rows without keys.

    Args:
        state: row state with a gap histogram (``gaps=True``).
        gap: nats below the maximum, at least 0. A threshold τ on weights relative to the largest is
            a gap of −log τ.

    Raises:
        ValueError: if the gap is negative, or the state has no gap histogram.

    Example:
        >>> import torch
        >>> from acutance.rowstats import observe
        >>> state = observe(torch.tensor([2.0, 0.0, 0.0, 0.0]), gaps=True)
        >>> mass_below(state, 1.0)
        tensor(0.2888)
    """
    if not gap >= 0.0:
        raise ValueError(f"gap must be a number of nats, 0 or more, got {gap!r}")
    bins = _bins(state)
    span = bins.far - bins.near
    part = torch.where(
        span > 0, (gap - bins.near) / torch.where(span > 0, span, 1.0), (gap >= bins.far) * 1.0
    )
    return (bins.mass * (1.0 - _mass_within(bins, part))).sum(-1) + (bins.top - bins.top)


class MassBounds(NamedTuple):
    """Lower and upper bound of a share of each row's mass, both (...)."""

    least: Tensor
    most: Tensor


def mass_bounds(
    state: RowState, *, keys: int | None = None, gap: float | None = None
) -> MassBounds:
    r"""Bounds of :func:`mass_of_largest` or :func:`mass_below`, wherever keys lie in a bin.

    A key's weight relative to the largest is between :math:`e^{-far}` and :math:`e^{-near}`, the
    edges of its bin. This bounds the mass of the selected bins and that of the others; both sum to
    the normaliser, which is exact, so the tighter bound applies.

    Args:
        state: row state with a gap histogram (``gaps=True``).
        keys: bound the share of this many largest keys, at least 1.
        gap: bound the share of keys more than this below the maximum, at least 0, in nats.

    Returns:
        The bounds, which hold up to the rounding of the normaliser; NaN for rows without keys.

    Raises:
        ValueError: unless one of the two is given and is such a number, or if the state has no gap
            histogram.

    Example:
        >>> import torch
        >>> from acutance.rowstats import observe
        >>> state = observe(torch.tensor([2.0, 0.3, 0.0, 0.0]), gaps=True)
        >>> mass_of_largest(state, 2), mass_bounds(state, keys=2)
        (tensor(0.8100), MassBounds(least=tensor(0.8076), most=tensor(0.8138)))
    """
    if (keys is None) == (gap is None):
        raise ValueError(f"pass either keys or gap, got keys={keys!r} and gap={gap!r}")
    if keys is not None and (type(keys) is not int or keys < 1):
        raise ValueError(f"keys must be a whole number, at least 1, got {keys!r}")
    limit = 0.0 if gap is None else gap
    if not limit >= 0.0:
        raise ValueError(f"gap must be a number of nats, 0 or more, got {gap!r}")
    bins = _bins(state)
    Z = state.Z.detach()
    heavy = torch.exp(-bins.near)
    light = torch.cat([torch.exp(-bins.far[..., :-1]), torch.zeros_like(heavy[..., :1])], -1)
    if keys is not None:
        before = 1.0 + torch.cumsum(bins.keys, -1) - bins.keys
        inside = torch.minimum((keys - before).clamp(min=0.0), bins.keys)
        outside = bins.keys - inside
        least, most = 1.0 + (inside * light).sum(-1), 1.0 + (inside * heavy).sum(-1)
        rest_least, rest_most = (outside * light).sum(-1), (outside * heavy).sum(-1)
    else:
        end = torch.cat([bins.far[..., :-1], torch.full_like(heavy[..., :1], torch.inf)], -1)
        below, not_above = bins.near > limit, end > limit
        least = torch.where(below, bins.keys * light, 0.0).sum(-1)
        most = bins.keys * torch.minimum(heavy, heavy.new_tensor(limit).neg().exp())
        most = torch.where(not_above, most, 0.0).sum(-1)
        rest_least = 1.0 + torch.where(not_above, 0.0, bins.keys * light).sum(-1)
        rest_most = 1.0 + torch.where(below, 0.0, bins.keys * heavy).sum(-1)
    unknown = bins.top - bins.top
    least = torch.maximum(least, Z - rest_most) / Z
    most = torch.minimum(most, Z - rest_least) / Z
    return MassBounds(least.clamp(0.0, 1.0) + unknown, most.clamp(0.0, 1.0) + unknown)


def critical_ratio(state: RowState) -> Tensor:
    r""":math:`\beta/\Lambda = \min_{j \ge 2} g_{(j)} / \log j` of each row, (...).

    With :math:`g_{(j)}` the gap of the j-th largest key, this is :math:`1/\Lambda` in units of the
    present scale: below 1 the largest key does not dominate the row. Keys are assumed to be spread
    evenly within a bin, and keys below the grid to be at its end, 16 nats down, which caps the
    result at :math:`16 / \log n`. NaN for rows with fewer than two keys.

    Args:
        state: row state with a gap histogram (``gaps=True``).

    Raises:
        ValueError: if the state has no gap histogram.

    Example:
        >>> import torch
        >>> from acutance.rowstats import observe
        >>> critical_ratio(observe(torch.tensor([2.0] + [-0.125] * 7), gaps=True))
        tensor(1.0734)

    Source:
        Hayase & Karakida (2026), arXiv:2605.12697.
    """
    bins = _bins(state)
    last = 1.0 + torch.cumsum(bins.keys, -1)
    first = last - bins.keys + 1.0
    has_keys = bins.keys > 0
    span = torch.where(torch.arange(BINS + 1, device=last.device) < BINS, bins.far - bins.near, 0.0)
    ratios = []
    for rank, place in ((first, 0.5), (last, bins.keys - 0.5)):
        share = place / torch.where(has_keys, bins.keys, 1.0)
        gap = bins.near + span * share
        log = torch.log(torch.where(has_keys, rank, 2.0))
        ratios.append(torch.where(has_keys, gap / log, torch.inf).amin(-1))
    smallest = torch.minimum(*ratios)
    return torch.where(smallest.isfinite(), smallest, torch.nan) + (bins.top - bins.top)
