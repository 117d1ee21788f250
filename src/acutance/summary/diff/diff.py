"""Compare two summaries head by head: two checkpoints, lengths, texts or shards."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from acutance.summary.diff.match_heads import Side, match, warnings
from acutance.summary.diff.records import CONFIDENCE, ORDER, Diff
from acutance.summary.head_summary import HeadSummary
from acutance.summary.readouts.by_octave import Profile
from acutance.summary.standard_errors import Uncertainty, between, uncertainty, worst
from acutance.summary.state import State

__all__ = ["Aligned", "diff", "statistics_of_all_rows", "statistics_at_equal_n"]

#: Two float32 means that differ by less, relative to their size, are the same.
ROUNDING = 2.0**-20


def diff(before: HeadSummary | State, after: HeadSummary | State, *, equal_n: bool = False) -> Diff:
    """Compare two summaries head by head.

    Layers are matched by module name. If no name is shared and both have the same layers and heads,
    they are matched by order, with a warning. The summaries are treated as independent: if both
    read the same text, a change is more certain than its interval says.

    Args:
        before: a summary, or a state, which also knows the windows it covers.
        after: another one.
        equal_n: compare only rows with similar numbers of visible keys, octave by octave, each
            octave weighted equally in both. This separates a change from the effect of a different
            length.

    Returns:
        The changes, what only one of the two has, and warnings about their comparability.

    Raises:
        ValueError: if they share no head or no metric; with ``equal_n``, if they share no octave of
            n or one of them has no profile.

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
        first, second, keys = statistics_at_equal_n((left, right), matched.rows, metrics)
    else:
        first, second = (
            statistics_of_all_rows(left, matched.rows[0], metrics),
            statistics_of_all_rows(right, matched.rows[1], metrics),
        )
    error = (first.errors.error.square() + second.errors.error.square()).sqrt()
    floor = (first.errors.floor.square() + second.errors.floor.square()).sqrt()
    how = worst(first.errors.how, second.errors.how)
    change = second.mean - first.mean
    reach = _quantile(_welch(first.errors, second.errors), len(matched.places)) * error
    rounding = ROUNDING * torch.maximum(first.mean.abs(), second.mean.abs())
    fewest = torch.minimum(first.count, second.count).to(torch.float64) - 1
    least = _quantile(fewest, len(matched.places)) * floor
    verdicts = torch.full(change.shape, ORDER.index("within noise"), dtype=torch.int8)
    guessed = error.isnan() if how == "sequences" else torch.ones_like(error, dtype=torch.bool)
    verdicts[guessed & (change.abs() > least)] = ORDER.index("unclear")
    verdicts[change.abs() > reach] = ORDER.index("moved")
    verdicts[change.abs() <= rounding] = ORDER.index("equal")
    verdicts[change.isnan()] = -1
    rows = torch.stack([first.count, second.count])
    M2 = first.M2 + second.M2
    return Diff(
        about=(left.summary.about, right.summary.about),
        matched=matched,
        metrics=metrics,
        before=first.mean,
        after=second.mean,
        error=error,
        floor=floor,
        low=change - reach,
        high=change + reach,
        verdicts=verdicts,
        rows=rows,
        deviation=(M2 / rows.sum(0).clamp(min=1)).sqrt(),
        shift=_distance(first, second),
        how=how,
        keys=keys,
        warnings=tuple(warnings(left, right, matched, equal_n=equal_n)),
    )


def _welch(first: Uncertainty, second: Uncertainty) -> Tensor:
    """Degrees of freedom of the difference of two means (Welch 1947)."""
    a, b = first.error.square(), second.error.square()
    total = (a + b).square() / (a.square() / first.dof + b.square() / second.dof)
    return torch.where((a + b) == 0, torch.minimum(first.dof, second.dof), total)


def _quantile(dof: Tensor, heads: int) -> Tensor:
    """Half width of a confidence interval for ``heads`` comparisons, in standard errors."""
    from scipy.special import stdtrit

    tail = (1 - CONFIDENCE) / (2 * max(1, heads))
    return torch.from_numpy(stdtrit(dof.numpy(), 1 - tail))


def _distance(first: Aligned, second: Aligned) -> Tensor:
    """Total variation distance between two histograms; NaN where one is empty or unknown."""
    if first.histogram is None or second.histogram is None:
        return torch.full_like(first.mean, math.nan)
    shares = []
    for part in (first.histogram, second.histogram):
        rows = part.sum(-1, keepdim=True).to(torch.float64)
        shares.append(part / rows.masked_fill(rows == 0, math.nan))
    return (shares[0] - shares[1]).abs().sum(-1) / 2


#: Rows of an octave see as many keys in both states if the means of log n differ by no more.
ALIKE = math.log(1.1)


@dataclass(frozen=True)
class Aligned:
    """Statistics of one side for the heads and metrics that both sides have, in matching order.

    Attributes:
        mean: (heads, metrics), mean over rows; NaN without rows.
        count: number of rows, int64.
        M2: sum of squared deviations of rows.
        errors: standard errors of the mean.
        histogram: (heads, metrics, bins); None if not known for these rows.
    """

    mean: Tensor
    count: Tensor
    M2: Tensor
    errors: Uncertainty
    histogram: Tensor | None = None


def statistics_of_all_rows(side: Side, rows: Tensor, metrics: tuple[str, ...]) -> Aligned:
    """Statistics of one side over all its rows.

    Args:
        side: the summary.
        rows: indices of the heads.
        metrics: names of the metrics.
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


def statistics_at_equal_n(
    sides: tuple[Side, Side], rows: tuple[Tensor, Tensor], metrics: tuple[str, ...]
) -> tuple[Aligned, Aligned, tuple[float, float]]:
    """Statistics of both sides over their common octaves of n, each octave weighted equally.

    Args:
        sides: the two summaries.
        rows: for each side, indices of the heads.
        metrics: names of the metrics.

    Returns:
        Both sides, and the smallest and largest mean number of keys of the compared octaves.

    Raises:
        ValueError: if a side has no profile, or they share no octave.
    """
    profiles = []
    for which, side, chosen in zip(("first", "second"), sides, rows, strict=True):
        if side.summary.profile is None:
            raise ValueError(
                f"the {which} state does not record how metrics depend on n, because an older "
                "version wrote it: probe the model again"
            )
        profiles.append(_select_profile(side.summary.profile, chosen, _columns(side, metrics)))
    octaves = max(profile.octaves for profile in profiles)
    first, second = (profile.padded(octaves) for profile in profiles)
    both = (first.rows > 0) & (second.rows > 0)
    near = both & ((first.log_n - second.log_n).abs() <= ALIKE)
    if not bool(near.any()):
        seen = [profile.log_n[profile.rows > 0].exp() for profile in profiles]
        spans = [
            f"{float(n.min()):.0f} to {float(n.max()):.0f}" if n.numel() else "no" for n in seen
        ]
        raise ValueError(
            f"the two states have no number of keys in common: by octaves, rows see {spans[0]} "
            f"keys in one and {spans[1]} in the other"
        )
    shared = near[:, None] & (first.count > 0) & (second.count > 0)
    weight = torch.where(shared, torch.minimum(first.count, second.count), 0).double()
    share = weight / weight.sum(-1, keepdim=True).masked_fill(~shared.any(-1, keepdim=True), 1.0)
    n = torch.stack([first.log_n[near], second.log_n[near]]).exp()
    return (
        _weighted_octaves(first, share, shared),
        _weighted_octaves(second, share, shared),
        (float(n.min()), float(n.max())),
    )


def _weighted_octaves(profile: Profile, share: Tensor, shared: Tensor) -> Aligned:
    """Means over the octaves of n of one side, weighted so that both sides have equal n.

    Args:
        profile: metrics by octave.
        share: weight of each octave, summing to 1, (heads, 1 or metrics, octaves).
        shared: whether both sides have rows in the octave, same shape.
    """
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


def _select_profile(profile: Profile, rows: Tensor, columns: Tensor) -> Profile:
    """The profile restricted to some heads and metrics."""
    parts = {}
    for name, tensor in profile.tensors().items():
        chosen = tensor[rows]
        parts[name] = chosen[:, columns] if tensor.dim() == 3 else chosen
    return Profile(**parts)


def _columns(side: Side, metrics: tuple[str, ...]) -> Tensor:
    """Indices of metrics in a side's arrays."""
    return torch.tensor([side.summary.metrics.index(name) for name in metrics])
