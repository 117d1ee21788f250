"""The numbers of one side of a comparison: over all rows, or over rows that see as many keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from acutance.summary.by_octave import Profile
from acutance.summary.diff.warnings import Side
from acutance.summary.standard_errors import Uncertainty, between, uncertainty

__all__ = ["Taken", "take", "take_at_equal_n"]

#: Rows of an octave see as many keys in both states if the means of log n differ by no more.
ALIKE = math.log(1.1)


@dataclass(frozen=True)
class Taken:
    """The shared heads and metrics of one side, (heads, metrics).

    Attributes:
        mean: over rows; NaN where none counts.
        count: rows that count, int64.
        M2: sum of squared deviations of rows.
        sure: standard errors of the mean.
        histogram: (heads, metrics, bins); None where it is not known of the rows taken.
    """

    mean: Tensor
    count: Tensor
    M2: Tensor
    sure: Uncertainty
    histogram: Tensor | None = None


def take(side: Side, rows: Tensor, metrics: tuple[str, ...]) -> Taken:
    """All rows of a side.

    Args:
        side: the summary.
        rows: which heads, rows of its arrays.
        metrics: which metrics.
    """
    columns = _columns(side, metrics)

    def part(tensor: Tensor) -> Tensor:
        return tensor[rows][:, columns]

    moments, sure = side.summary.moments, uncertainty(side.summary, side.run)
    count = part(moments.count)
    return Taken(
        mean=part(moments.mean).masked_fill(count == 0, math.nan),
        count=count,
        M2=part(moments.M2),
        sure=Uncertainty(part(sure.error), part(sure.floor), part(sure.dof), sure.how),
        histogram=part(moments.histogram),
    )


def take_at_equal_n(
    sides: tuple[Side, Side], rows: tuple[Tensor, Tensor], metrics: tuple[str, ...]
) -> tuple[Taken, Taken, tuple[float, float]]:
    """The rows of both sides in octaves of n that both have, each octave weighed alike on both.

    Returns:
        Both sides, and the smallest and largest mean number of keys of the octaves compared.

    Raises:
        ValueError: if a side keeps no profile, or they share no octave.
    """
    profiles = []
    for which, side, chosen in zip(("first", "second"), sides, rows, strict=True):
        if side.summary.profile is None:
            raise ValueError(
                f"the {which} state does not say how its rows change with n: it is of an older "
                "version; probe the model again"
            )
        profiles.append(_part(side.summary.profile, chosen, _columns(side, metrics)))
    octaves = max(profile.octaves for profile in profiles)
    one, other = (profile.padded(octaves) for profile in profiles)
    both = (one.rows > 0) & (other.rows > 0)
    near = both & ((one.log_n - other.log_n).abs() <= ALIKE)
    if not bool(near.any()):
        seen = [profile.log_n[profile.rows > 0].exp() for profile in profiles]
        spans = [
            f"{float(n.min()):.0f} to {float(n.max()):.0f}" if n.numel() else "no" for n in seen
        ]
        raise ValueError(
            f"the two states share no number of keys: rows see {spans[0]} in one and {spans[1]} in "
            "the other, by octaves"
        )
    shared = near[:, None] & (one.count > 0) & (other.count > 0)
    weight = torch.where(shared, torch.minimum(one.count, other.count), 0).double()
    share = weight / weight.sum(-1, keepdim=True).masked_fill(~shared.any(-1, keepdim=True), 1.0)
    n = torch.stack([one.log_n[near], other.log_n[near]]).exp()
    return _at(one, share, shared), _at(other, share, shared), (float(n.min()), float(n.max()))


def _at(profile: Profile, share: Tensor, shared: Tensor) -> Taken:
    """A side's octaves, weighed."""
    none = ~shared.any(-1)
    rows = profile.count.double()
    each = profile.M2 / rows.clamp(min=1) / (rows - 1).clamp(min=1)
    error, dof = between(profile, share)
    floor = (share.square() * each).sum(-1).sqrt().masked_fill(none, math.nan)
    return Taken(
        mean=(share * profile.mean).sum(-1).masked_fill(none, math.nan),
        count=torch.where(shared, profile.count, 0).sum(-1),
        M2=torch.where(shared, profile.M2, 0.0).sum(-1),
        sure=Uncertainty(error, floor, dof, "sequences"),
    )


def _part(profile: Profile, rows: Tensor, columns: Tensor) -> Profile:
    parts = {}
    for name, tensor in profile.tensors().items():
        chosen = tensor[rows]
        parts[name] = chosen[:, columns] if tensor.dim() == 3 else chosen
    return Profile(**parts)


def _columns(side: Side, metrics: tuple[str, ...]) -> Tensor:
    return torch.tensor([side.summary.metrics.index(name) for name in metrics])
