r"""How many keys hold a share of a row's mass, from its gap histogram.

The histogram (:mod:`acutance.rowstats.gaps`) counts keys in bins of a quarter of a nat, so a key's
weight is known up to a factor of :math:`e^{1/4}`; the largest is known exactly. Keys are assumed to
be spread evenly within a bin, and masses are scaled to sum to the normaliser, which the row state
holds exactly. Mass means weight on keys: a sink is excluded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from acutance.rowstats.gaps import BINS, WIDTH, edge
from acutance.rowstats.state import RowState, has_gaps, ratio

#: Part of a key by which a number of keys may be above a whole number without being the next one.
_ROUNDING = 1e-3


class _Bins(NamedTuple):
    """The histogram bins of rows, from the largest keys down; fields are (..., 65).

    The last bin holds all keys below the grid.

    Attributes:
        keys: number of keys in the bin; the largest key of the row is in none.
        before: number of keys above the bin, the largest among them.
        near: gap to the row's maximum at which the bin begins, in nats.
        far: gap at which it ends, in nats.
        mass: share of the row's mass in the bin.
        top: (...), share of the largest key; NaN for rows without keys.
    """

    keys: Tensor
    before: Tensor
    near: Tensor
    far: Tensor
    mass: Tensor
    top: Tensor

    @staticmethod
    def of(state: RowState) -> _Bins:
        """The bins of a state's rows.

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
        first = m - edge(m) * WIDTH  # width of the first bin, from its lower edge to the maximum
        far = first.unsqueeze(-1) + torch.arange(BINS, dtype=dtype, device=device) * WIDTH
        near = (far - WIDTH).clamp(min=0.0)
        span, end = far - near, far[..., -1:]
        # ∫ e^−t dt over a bin, over its width
        weight = torch.exp(-near) * torch.where(span > 0, ratio(-torch.expm1(-span), span), 1.0)
        keys = torch.cat([counts[..., :1] - 1, counts[..., 1:]], -1).clamp(min=0.0)
        mass, rest = keys * weight, Z - 1.0
        inside = mass.sum(-1)
        tail = torch.minimum((rest - inside).clamp(min=0.0), below * torch.exp(-end[..., 0]))
        factor = torch.where(inside > 0, ratio((rest - tail).clamp(min=0.0), inside), 1.0)
        factor = factor.clamp(torch.exp(Z.new_tensor(-WIDTH)), torch.exp(Z.new_tensor(WIDTH)))
        mass = torch.cat([mass * factor.unsqueeze(-1), tail.unsqueeze(-1)], -1)
        total = 1.0 + mass.sum(-1)
        unknown = torch.where(known, 0.0, torch.nan).to(dtype)
        keys = torch.cat([keys, below.unsqueeze(-1)], -1)
        return _Bins(
            keys=keys,
            before=1.0 + torch.cumsum(keys, -1) - keys,
            near=torch.cat([near, end], -1),
            far=torch.cat([far, torch.where(below.unsqueeze(-1) > 0, end + 1.0, end)], -1),
            mass=mass / total.unsqueeze(-1),
            top=1.0 / total + unknown,
        )

    def mass_within(self, part: Tensor) -> Tensor:
        """Share of each bin's mass on the part of it, 0 to 1, that is nearest to the maximum."""
        part, span = part.clamp(0.0, 1.0), self.far - self.near
        fall = torch.expm1(-span)
        return torch.where(fall < 0, ratio(torch.expm1(-part * span), fall), part)


class MassBounds(NamedTuple):
    """Lower and upper bound of a share of each row's mass, both (...)."""

    least: Tensor
    most: Tensor


class GapStatistics:
    """What the gap histogram of rows says: a base of statistics that have a row state."""

    if TYPE_CHECKING:

        @property
        def state(self) -> RowState:
            """The mergeable sums of the rows."""

    def keys_holding(self, share: float) -> Tensor:
        """Smallest number of keys that hold a share of each row's weight, (B, Hq, L).

        Needs ``gaps=True``. NaN for rows without keys.

        Args:
            share: above 0, at most 1.

        Raises:
            ValueError: if the share is not above 0 and at most 1, or the call had no ``gaps=True``.

        Example:
            >>> import torch, acutance
            >>> query = torch.zeros(1, 1, 3, 8)
            >>> acutance.row_statistics(query, query, gaps=True).keys_holding(0.6)
            tensor([[[2., 2., 2.]]])
        """
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share must be above 0 and at most 1, got {share!r}")
        bins = _Bins.of(self.state)
        span = bins.far - bins.near
        needed = share - (bins.top.unsqueeze(-1) + torch.cumsum(bins.mass, -1) - bins.mass)
        # a bin gives all its keys if what is wanted exceeds its mass, and none if nothing is
        part = ratio(needed, bins.mass) if share < 1.0 else torch.ones_like(needed)
        part = part.clamp(0.0, 1.0)
        inside = -torch.log1p(part * torch.expm1(-span))
        share_of_keys = torch.where(span > 0, ratio(inside, span), part)
        share_of_keys = torch.where(part >= 1.0, 1.0, share_of_keys)
        count = torch.ceil(1.0 + (bins.keys * share_of_keys).sum(-1) - _ROUNDING).clamp(min=1.0)
        return torch.where(bins.top.isnan(), torch.nan, count)

    def mass_of_largest(self, keys: int) -> Tensor:
        """Share of each row's weight on its ``keys`` largest keys, (B, Hq, L); needs ``gaps=True``.

        NaN for rows without keys.

        Raises:
            ValueError: if ``keys`` is below 1, or the call had no ``gaps=True``.

        Example:
            >>> import torch
            >>> from acutance.rowstats import RowStatistics, observe
            >>> stats = RowStatistics(observe(torch.tensor([2.0, 0.0, 0.0, 0.0]), gaps=True))
            >>> stats.mass_of_largest(1), stats.mass_of_largest(4)
            (tensor(0.7112), tensor(1.))
        """
        _check_keys(keys)
        bins = _Bins.of(self.state)
        inside = bins.mass_within(ratio(keys - bins.before, bins.keys))
        return (bins.top + (bins.mass * inside).sum(-1)).clamp(max=1.0)

    def mass_below(self, gap: float) -> Tensor:
        """Share of each row's weight on keys far below its maximum; needs ``gaps=True``.

        NaN for rows without keys.

        Args:
            gap: how many nats below the maximum; dropping the keys beyond it loses this share. A
                threshold τ on weights relative to the largest is a gap of −log τ.

        Raises:
            ValueError: if the gap is negative, or the call had no ``gaps=True``.

        Example:
            >>> import torch
            >>> from acutance.rowstats import RowStatistics, observe
            >>> RowStatistics(observe(torch.tensor([2.0, 0.0, 0.0, 0.0]), gaps=True)).mass_below(
            ...     1.0
            ... )
            tensor(0.2888)
        """
        _check_gap(gap)
        bins = _Bins.of(self.state)
        span = bins.far - bins.near
        part = torch.where(span > 0, ratio(gap - bins.near, span), (gap >= bins.far) * 1.0)
        lost = (bins.mass * (1.0 - bins.mass_within(part))).sum(-1)
        return lost + (bins.top - bins.top)

    def mass_bounds(self, *, keys: int | None = None, gap: float | None = None) -> MassBounds:
        r"""Bounds of :meth:`mass_of_largest` or :meth:`mass_below`; needs ``gaps=True``.

        They hold wherever keys lie in their bins. A key's weight relative to the largest is between
        :math:`e^{-far}` and :math:`e^{-near}`, the edges of its bin. This bounds the mass of the
        selected bins and that of the others; both sum to the normaliser, which is exact, so the
        tighter bound applies.

        Args:
            keys: bound the share of this many largest keys, at least 1.
            gap: bound the share of keys more than this below the maximum, at least 0, in nats.

        Returns:
            The bounds, up to the rounding of the normaliser; NaN for rows without keys.

        Raises:
            ValueError: unless exactly one valid argument is given, or if the call had no
                ``gaps=True``.

        Example:
            >>> import torch
            >>> from acutance.rowstats import RowStatistics, observe
            >>> stats = RowStatistics(observe(torch.tensor([2.0, 0.3, 0.0, 0.0]), gaps=True))
            >>> stats.mass_of_largest(2), stats.mass_bounds(keys=2)
            (tensor(0.8100), MassBounds(least=tensor(0.8076), most=tensor(0.8138)))
        """
        if (keys is None) == (gap is None):
            raise ValueError(f"pass either keys or gap, got keys={keys!r} and gap={gap!r}")
        if keys is not None:
            _check_keys(keys)
        limit = 0.0 if gap is None else gap
        _check_gap(limit)
        bins, Z = _Bins.of(self.state), self.state.Z.detach()
        heavy = torch.exp(-bins.near)
        light = torch.cat([torch.exp(-bins.far[..., :-1]), torch.zeros_like(heavy[..., :1])], -1)
        if keys is not None:
            inside = torch.minimum((keys - bins.before).clamp(min=0.0), bins.keys)
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

    def critical_ratio(self) -> Tensor:
        r"""Score scale over the scale from which the largest key dominates; needs ``gaps=True``.

        This is :math:`\beta/\Lambda = \min_{j \ge 2} g_{(j)} / \log j` of each row, (...). With
        :math:`g_{(j)}` the gap of the j-th largest key, it is :math:`1/\Lambda` in units of the
        present scale: below 1 the largest key does not dominate the row. Keys are assumed to be
        spread evenly within a bin, and keys below the grid to be at its end, 16 nats down, which
        caps the result at :math:`16 / \log n`. NaN for rows with fewer than two keys.

        Raises:
            ValueError: if the call had no ``gaps=True``.

        Example:
            >>> import torch
            >>> from acutance.rowstats import RowStatistics, observe
            >>> RowStatistics(
            ...     observe(torch.tensor([2.0] + [-0.125] * 7), gaps=True)
            ... ).critical_ratio()
            tensor(1.0734)

        Source:
            Hayase & Karakida (2026), arXiv:2605.12697.
        """
        bins = _Bins.of(self.state)
        on_grid = torch.arange(BINS + 1, device=bins.far.device) < BINS
        span = torch.where(on_grid, bins.far - bins.near, 0.0)
        has_keys = bins.keys > 0
        ratios, half = [], torch.full_like(bins.keys, 0.5)
        for rank, above in ((bins.before + 1.0, half), (bins.before + bins.keys, bins.keys - half)):
            gap = bins.near + span * ratio(above, bins.keys)
            log = torch.log(torch.where(has_keys, rank, 2.0))
            ratios.append(torch.where(has_keys, gap / log, torch.inf).amin(-1))
        smallest = torch.minimum(*ratios)
        return torch.where(smallest.isfinite(), smallest, torch.nan) + (bins.top - bins.top)


def _check_keys(keys: int) -> None:
    """Raise ValueError unless this is a number of keys."""
    if type(keys) is not int or keys < 1:
        raise ValueError(f"keys must be a whole number, at least 1, got {keys!r}")


def _check_gap(gap: float) -> None:
    """Raise ValueError unless this is a number of nats."""
    if not gap >= 0.0:
        raise ValueError(f"gap must be a number of nats, 0 or more, got {gap!r}")
