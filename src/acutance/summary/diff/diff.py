"""Compare two summaries head by head: two checkpoints, lengths, texts or shards."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from acutance.summary.diff.match_heads import Side, match, warnings
from acutance.summary.diff.records import CONFIDENCE, ORDER, Diff
from acutance.summary.head_summary import HeadSummary
from acutance.summary.readouts.by_octave import Profile
from acutance.summary.readouts.moments import Moments
from acutance.summary.standard_errors import Uncertainty, between, uncertainty, worst
from acutance.summary.state import State

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
    left, right = sides = Side.from_summary(before), Side.from_summary(after)
    matched = match(left.summary, right.summary)
    metrics = tuple(name for name in left.summary.metrics if name in right.summary.metrics)
    if not metrics:
        raise ValueError(
            "the two states have no metric in common: one has "
            f"{', '.join(left.summary.metrics)}, the other {', '.join(right.summary.metrics)}"
        )
    cells = [
        (rows, [side.summary.metrics.index(name) for name in metrics])
        for side, rows in zip(sides, matched.rows, strict=True)
    ]
    keys = None
    if equal_n:
        (first, errors), (second, other_errors), keys = _at_equal_n(sides, cells)
    else:
        (first, errors), (second, other_errors) = (
            (side.summary.moments.select(*cell), uncertainty(side.summary, side.run).select(*cell))
            for side, cell in zip(sides, cells, strict=True)
        )
    error = (errors.error.square() + other_errors.error.square()).sqrt()
    floor = (errors.floor.square() + other_errors.floor.square()).sqrt()
    how = worst(errors.how, other_errors.how)
    means = [side.mean.masked_fill(side.count == 0, math.nan) for side in (first, second)]
    change = means[1] - means[0]
    reach = _quantile(_welch(errors, other_errors), len(matched.places)) * error
    rounding = ROUNDING * torch.maximum(means[0].abs(), means[1].abs())
    fewest = torch.minimum(first.count, second.count).to(torch.float64) - 1
    least = _quantile(fewest, len(matched.places)) * floor
    verdicts = torch.full(change.shape, ORDER.index("within noise"), dtype=torch.int8)
    guessed = error.isnan() if how == "sequences" else torch.ones_like(error, dtype=torch.bool)
    verdicts[guessed & (change.abs() > least)] = ORDER.index("unclear")
    verdicts[change.abs() > reach] = ORDER.index("moved")
    verdicts[change.abs() <= rounding] = ORDER.index("equal")
    verdicts[change.isnan()] = -1
    rows = torch.stack([first.count, second.count])
    return Diff(
        about=(left.summary.about, right.summary.about),
        matched=matched,
        metrics=metrics,
        before=means[0],
        after=means[1],
        error=error,
        floor=floor,
        low=change - reach,
        high=change + reach,
        verdicts=verdicts,
        rows=rows,
        deviation=((first.M2 + second.M2) / rows.sum(0).clamp(min=1)).sqrt(),
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


def _distance(first: Moments, second: Moments) -> Tensor:
    """Total variation distance between two histograms; NaN where one is empty or unknown."""
    shares = []
    for part in (first.histogram, second.histogram):
        rows = part.sum(-1, keepdim=True).to(torch.float64)
        shares.append(part / rows.masked_fill(rows == 0, math.nan))
    return (shares[0] - shares[1]).abs().sum(-1) / 2


#: Rows of an octave see as many keys in both states if the means of log n differ by no more.
ALIKE = math.log(1.1)


def _at_equal_n(
    sides: tuple[Side, Side], cells: list[tuple[Tensor, list[int]]]
) -> tuple[tuple[Moments, Uncertainty], tuple[Moments, Uncertainty], tuple[float, float]]:
    """Statistics of both sides over their common octaves of n, each octave weighted equally.

    Args:
        sides: the two summaries.
        cells: for each side, indices of the heads and metrics.

    Returns:
        The moments of both sides, without histograms, and their standard errors; the smallest and
        largest mean number of keys of the compared octaves.

    Raises:
        ValueError: if a side has no profile, or they share no octave.
    """
    profiles = []
    for which, side, cell in zip(("first", "second"), sides, cells, strict=True):
        if side.summary.profile is None:
            raise ValueError(
                f"the {which} state does not record how metrics depend on n, because an older "
                "version wrote it: probe the model again"
            )
        profiles.append(side.summary.profile.select(*cell))
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


def _weighted_octaves(
    profile: Profile, share: Tensor, shared: Tensor
) -> tuple[Moments, Uncertainty]:
    """Moments over the octaves of n of one side, weighted so that both sides have equal n.

    Args:
        profile: metrics by octave.
        share: weight of each octave, summing to 1, (heads, 1 or metrics, octaves).
        shared: whether both sides have rows in the octave, same shape.
    """
    rows = profile.count.double()
    each = profile.M2 / rows.clamp(min=1) / (rows - 1).clamp(min=1)
    error, dof = between(profile, share)
    floor = (share.square() * each).sum(-1).sqrt()
    moments = replace(
        Moments.none(*error.shape),
        count=torch.where(shared, profile.count, 0).sum(-1),
        mean=(share * profile.mean).sum(-1),
        M2=torch.where(shared, profile.M2, 0.0).sum(-1),
    )
    floor = floor.masked_fill(moments.count == 0, math.nan)
    return moments, Uncertainty(error, floor, dof, "sequences")
