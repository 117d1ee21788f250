"""Slope: the line that a metric follows against the logarithm of the number of visible keys."""

from __future__ import annotations

import math
from typing import NamedTuple

from scipy.special import stdtrit

from acutance.summary.by_octave import Profile
from acutance.summary.head_summary import HeadSummary

__all__ = ["Slope", "fit_slope", "slope"]


class Slope(NamedTuple):
    """A line fitted to a profile: metric = level + value · log n.

    Attributes:
        value: the slope, in the metric's unit for each e-fold of n.
        error: its standard error.
        octaves: octaves it was fitted to.
        low_n: typical n of the first of them.
        high_n: typical n of the last.
        low: fitted metric at ``low_n``.
        high: fitted metric at ``high_n``.
        sequences: fewest sequences that an octave had.
    """

    value: float
    error: float
    octaves: int
    low_n: float
    high_n: float
    low: float
    high: float
    sequences: int

    @property
    def margin(self) -> float:
        """How far the slope may be off, on either side, with a chance of one in a hundred each.

        Student's t for one degree of freedom less than there are sequences: with two it is 32
        standard errors, with many 2.3.
        """
        return float(stdtrit(max(1, self.sequences - 1), 0.99)) * self.error

    @property
    def significant(self) -> bool:
        """Whether the slope is beyond its margin."""
        return abs(self.value) > self.margin


def fit_slope(
    profile: Profile,
    head: int,
    metric: int,
    *,
    least_n: float = 0.0,
    most_n: float = math.inf,
    fewest: int = 3,
) -> Slope | None:
    """The slope of a metric against log n, over octaves whose mean n is within bounds.

    Octaves are weighed by their rows. The standard error has two parts: what the means of
    sequences, which differ among themselves, leave open, and how far the octaves are from a line.
    Octaves of one sequence usually err to the same side, which the first part ignores: it then
    comes out too large rather than too small.

    Args:
        profile: of any summary.
        head: row of the arrays.
        metric: column of the arrays.
        least_n: octaves below are left out.
        most_n: octaves above are left out.
        fewest: octaves needed.

    Returns:
        The slope, or None where fewer octaves have rows from two sequences or more.
    """
    count, groups = profile.count[head, metric], profile.groups[head, metric]
    x, y = profile.log_n[head], profile.mean[head, metric]
    typical = x.exp()
    use = (groups > 1) & (typical >= least_n * (1 - 1e-9)) & (typical <= most_n * (1 + 1e-9))
    if int(use.sum()) < max(3, fewest):
        return None
    weight, x, y = count[use].double(), x[use], y[use]
    squares = profile.between[head, metric][use]
    error = (squares / weight / (groups[use] - 1)).sqrt()
    total = weight.sum()
    centre, level = (weight * x).sum() / total, (weight * y).sum() / total
    away = x - centre
    spread = (weight * away.square()).sum()
    if not float(spread) > 0.0:
        return None
    pull = weight * away / spread
    value = (pull * y).sum()
    left = y - level - value * away
    scatter = (weight * left.square()).sum() / (len(x) - 2) / spread
    variance = (pull.square() * error.square()).sum() + scatter
    ends = level + value * (x[[0, -1]] - centre)
    return Slope(
        float(value),
        float(variance.sqrt()),
        len(x),
        float(x[0].exp()),
        float(x[-1].exp()),
        float(ends[0]),
        float(ends[1]),
        int(groups[use].min()),
    )


def slope(
    summary: HeadSummary, metric: str, head: int, *, least_n: float = 0.0, fewest: int = 3
) -> Slope | None:
    """How a head's metric changes with log n, by :func:`fit_slope` on the summary's profile.

    Args:
        summary: any head summary.
        metric: a recorded metric.
        head: index in :attr:`HeadSummary.places`.
        least_n: octaves of fewer keys are left out.
        fewest: octaves needed, at least three.

    Returns:
        The slope; None without a profile, or where too few octaves have rows of two sequences.

    Raises:
        ValueError: if the metric was not recorded.

    Example:
        Causal rows that weigh their keys alike have entropy log n:

        >>> import acutance, torch
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(2, 64, 8)] * 3, attn_mask=hidden)
        >>> round(slope(probe.summary(), "entropy", 0).value, 6)
        1.0
    """
    column = summary.column(metric)
    if summary.profile is None:
        return None
    return fit_slope(summary.profile, head, column, least_n=least_n, fewest=fewest)
