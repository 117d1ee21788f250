"""Compare two summaries head by head: two checkpoints, lengths, texts or shards."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from acutance.summary.by_octave import Profile
from acutance.summary.diff.match_heads import Side, match, warnings
from acutance.summary.diff.records import CONFIDENCE, ORDER, Diff
from acutance.summary.head_summary import HeadSummary
from acutance.summary.standard_errors import Uncertainty, between, uncertainty, worst
from acutance.summary.state import State

__all__ = ["Aligned", "diff", "take", "take_at_equal_n"]

#: Two float32 means that differ by less, relative to their size, are the same.
ROUNDING = 2.0**-20


def diff(before: HeadSummary | State, after: HeadSummary | State, *, equal_n: bool = False) -> Diff:
    """Compare two summaries head by head.

    Layers are matched by the names of their modules; where no name is shared and the layers are
    alike in number and heads, by their order, which a warning then says.

    The two are taken as independent: where both read the same text, a change is rather more certain
    than its interval says.

    Args:
        before: a summary, or a state that knows which windows it is of.
        after: another.
        equal_n: compare only rows that see as many keys, octave by octave of n, each octave
            weighed alike in both: what remains of a change between two lengths.

    Returns:
        The changes, with what only one of the two has and why they may not compare.

    Raises:
        ValueError: if they share no head, or no metric; with ``equal_n``, if they share no octave
            of n, or one of them keeps no profile.

    Example:
        >>> import torch, acutance
        >>> def state(factor):
        ...     torch.manual_seed(0)
        ...     layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        ...     layer.in_proj_weight.data[:4].mul_(factor)  # the first head's queries
        ...     with acutance.probe(layer) as probe:
        ...         _ = [layer(*[torch.randn(4, 10, 8)] * 3) for _ in range(6)]
        ...     return probe.summary()
        >>> found = diff(state(1.0), state(9.0))
        >>> [(head.head, head.verdict) for head in found.moved("logit_std")]
        [(0, 'moved'), (1, 'equal')]
    """
    left, right = Side.from_summary(before), Side.from_summary(after)
    matched = match(left.summary, right.summary)
    metrics = tuple(name for name in left.summary.metrics if name in right.summary.metrics)
    if not metrics:
        raise ValueError(
            "the two states have no metric in common: one has "
            f"{', '.join(left.summary.metrics)}, the other {', '.join(right.summary.metrics)}"
        )
    keys = None
    if equal_n:
        one, other, keys = take_at_equal_n((left, right), matched.rows, metrics)
    else:
        one, other = take(left, matched.rows[0], metrics), take(right, matched.rows[1], metrics)
    error = (one.errors.error.square() + other.errors.error.square()).sqrt()
    floor = (one.errors.floor.square() + other.errors.floor.square()).sqrt()
    how = worst(one.errors.how, other.errors.how)
    change = other.mean - one.mean
    reach = _quantile(_welch(one.errors, other.errors), len(matched.places)) * error
    rounding = ROUNDING * torch.maximum(one.mean.abs(), other.mean.abs())
    fewest = torch.minimum(one.count, other.count).to(torch.float64) - 1
    least = _quantile(fewest, len(matched.places)) * floor
    verdicts = torch.full(change.shape, ORDER.index("within noise"), dtype=torch.int8)
    guessed = error.isnan() if how == "sequences" else torch.ones_like(error, dtype=torch.bool)
    verdicts[guessed & (change.abs() > least)] = ORDER.index("unclear")
    verdicts[change.abs() > reach] = ORDER.index("moved")
    verdicts[change.abs() <= rounding] = ORDER.index("equal")
    verdicts[change.isnan()] = -1
    rows = torch.stack([one.count, other.count])
    M2 = one.M2 + other.M2
    return Diff(
        about=(left.summary.about, right.summary.about),
        matched=matched,
        metrics=metrics,
        before=one.mean,
        after=other.mean,
        error=error,
        floor=floor,
        low=change - reach,
        high=change + reach,
        verdicts=verdicts,
        rows=rows,
        deviation=(M2 / rows.sum(0).clamp(min=1)).sqrt(),
        shift=_distance(one, other),
        how=how,
        keys=keys,
        warnings=tuple(warnings(left, right, matched, equal_n=equal_n)),
    )


def _welch(one: Uncertainty, other: Uncertainty) -> Tensor:
    """Degrees of freedom of the difference of two means (Welch 1947)."""
    a, b = one.error.square(), other.error.square()
    total = (a + b).square() / (a.square() / one.dof + b.square() / other.dof)
    return torch.where((a + b) == 0, torch.minimum(one.dof, other.dof), total)


def _quantile(dof: Tensor, heads: int) -> Tensor:
    """Half width of a confidence interval, in standard errors."""
    from scipy.special import stdtrit

    tail = (1 - CONFIDENCE) / (2 * max(1, heads))
    return torch.from_numpy(stdtrit(dof.numpy(), 1 - tail))


def _distance(one: Aligned, other: Aligned) -> Tensor:
    """Total variation distance between two histograms; NaN where one is empty or unknown."""
    if one.histogram is None or other.histogram is None:
        return torch.full_like(one.mean, math.nan)
    shares = []
    for part in (one.histogram, other.histogram):
        rows = part.sum(-1, keepdim=True).to(torch.float64)
        shares.append(part / rows.masked_fill(rows == 0, math.nan))
    return (shares[0] - shares[1]).abs().sum(-1) / 2


#: Rows of an octave see as many keys in both states if the means of log n differ by no more.
ALIKE = math.log(1.1)


@dataclass(frozen=True)
class Aligned:
    """Statistics of the shared heads and metrics of one side, in matching order.

    Attributes:
        mean: over rows; NaN where none counts.
        count: rows that count, int64.
        M2: sum of squared deviations of rows.
        errors: standard errors of the mean.
        histogram: (heads, metrics, bins); None where it is not known of the rows taken.
    """

    mean: Tensor
    count: Tensor
    M2: Tensor
    errors: Uncertainty
    histogram: Tensor | None = None


def take(side: Side, rows: Tensor, metrics: tuple[str, ...]) -> Aligned:
    """Statistics of one side over all its rows.

    Args:
        side: the summary.
        rows: which heads, rows of its arrays.
        metrics: which metrics.
    """
    columns = _columns(side, metrics)

    def part(tensor: Tensor) -> Tensor:
        return tensor[rows][:, columns]

    moments, errors = side.summary.moments, uncertainty(side.summary, side.run)
    count = part(moments.count)
    return Aligned(
        mean=part(moments.mean).masked_fill(count == 0, math.nan),
        count=count,
        M2=part(moments.M2),
        errors=Uncertainty(part(errors.error), part(errors.floor), part(errors.dof), errors.how),
        histogram=part(moments.histogram),
    )


def take_at_equal_n(
    sides: tuple[Side, Side], rows: tuple[Tensor, Tensor], metrics: tuple[str, ...]
) -> tuple[Aligned, Aligned, tuple[float, float]]:
    """Statistics of both sides over their common octaves of n, each octave weighted equally.

    Returns:
        Both sides, and the smallest and largest mean number of keys of the octaves compared.

    Raises:
        ValueError: if a side keeps no profile, or they share no octave.
    """
    profiles = []
    for which, side, chosen in zip(("first", "second"), sides, rows, strict=True):
        if side.summary.profile is None:
            raise ValueError(
                f"the {which} state does not record how metrics depend on n, because an older "
                "version wrote it: probe the model again"
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
            f"the two states have no number of keys in common: by octaves, rows see {spans[0]} "
            f"keys in one and {spans[1]} in the other"
        )
    shared = near[:, None] & (one.count > 0) & (other.count > 0)
    weight = torch.where(shared, torch.minimum(one.count, other.count), 0).double()
    share = weight / weight.sum(-1, keepdim=True).masked_fill(~shared.any(-1, keepdim=True), 1.0)
    n = torch.stack([one.log_n[near], other.log_n[near]]).exp()
    return _at(one, share, shared), _at(other, share, shared), (float(n.min()), float(n.max()))


def _at(profile: Profile, share: Tensor, shared: Tensor) -> Aligned:
    """Weighted mean of one side's octaves."""
    none = ~shared.any(-1)
    rows = profile.count.double()
    each = profile.M2 / rows.clamp(min=1) / (rows - 1).clamp(min=1)
    error, dof = between(profile, share)
    floor = (share.square() * each).sum(-1).sqrt().masked_fill(none, math.nan)
    return Aligned(
        mean=(share * profile.mean).sum(-1).masked_fill(none, math.nan),
        count=torch.where(shared, profile.count, 0).sum(-1),
        M2=torch.where(shared, profile.M2, 0.0).sum(-1),
        errors=Uncertainty(error, floor, dof, "sequences"),
    )


def _part(profile: Profile, rows: Tensor, columns: Tensor) -> Profile:
    parts = {}
    for name, tensor in profile.tensors().items():
        chosen = tensor[rows]
        parts[name] = chosen[:, columns] if tensor.dim() == 3 else chosen
    return Profile(**parts)


def _columns(side: Side, metrics: tuple[str, ...]) -> Tensor:
    return torch.tensor([side.summary.metrics.index(name) for name in metrics])
