"""Standard errors of a head's means, and the slope of a metric against the number of keys.

The rows of a sequence are correlated, so a standard error that treats them as independent is often
several times too small. Sequences are treated as the independent unit. A profile records how much
they differ; without one only an upper bound is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from acutance.summary.cells import Cells, array
from acutance.summary.head_summary import HeadSummary
from acutance.summary.readouts.by_octave import Profile, Slope
from acutance.summary.state import Run

How = Literal["sequences", "bound", "unknown"]


#: What each way to a standard error means, for reports; the most reliable first.
HOW: dict[How, str] = {
    "sequences": (
        "Standard errors come from the variation between sequences, which are assumed "
        "independent; rows of one sequence need not be."
    ),
    "bound": (
        "Standard errors are upper bounds: all rows of a sequence count as one observation, "
        "since the state does not record how its sequences differ."
    ),
    "unknown": (
        "Standard errors are unknown, because a state does not record its number of sequences."
    ),
}


@dataclass(frozen=True)
class Uncertainty(Cells):
    """Standard errors of the means of a summary.

    Attributes:
        error: (heads, metrics), from differences between sequences, or an upper bound; NaN if
            unknown.
        floor: (heads, metrics), the standard error if all rows were independent.
        dof: (heads, metrics), degrees of freedom of ``error``; NaN if unknown.
        how: which of the two ``error`` is, see :data:`HOW`.
    """

    error: Tensor = array("heads metrics")
    floor: Tensor = array("heads metrics")
    dof: Tensor = array("heads metrics")
    how: How = "unknown"


def worst(*ways: How) -> How:
    """The least reliable of several sources of a standard error."""
    return max(ways, key=list(HOW).index)


def uncertainty(summary: HeadSummary, run: Run | None = None) -> Uncertainty:
    r"""Standard errors of every head's mean of every metric.

    With a profile, the mean is the weighted mean over octaves of n, so its error is at most the
    weighted sum of the octaves' errors between sequences:

    .. math:: \mathrm{SE} \le \sum_k \frac{N_k}{N} \mathrm{SE}_k

    with equality if a sequence that is high in one octave is high in all. Without a profile, the
    upper bound for G sequences of equal length is :math:`\sigma / \sqrt{G - 1}`, with
    :math:`\sigma` the deviation over rows; it is reached if the rows of each sequence are equal.

    Args:
        summary: any head summary.
        run: its run, which states the number of sequences; without it, the smallest number
            consistent with ``summary`` is used.

    Returns:
        Standard errors, their degrees of freedom and their source.

    Example:
        Two sequences of ten equal rows each are two observations, not twenty:

        >>> import acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> with acutance.probe(layer) as probe:
        ...     for _ in range(2):
        ...         _ = layer(*[torch.randn(1, 1, 8).expand(1, 10, 8)] * 3)
        >>> found = uncertainty(probe.summary())
        >>> column = probe.metrics.index("logit_mean")
        >>> (found.error / found.floor)[:, column].round(decimals=3)  # √19
        tensor([4.3590, 4.3590], dtype=torch.float64)
    """
    std, count = summary.moments.std, summary.moments.count.to(torch.float64)
    rows = count.masked_fill(count < 2, math.nan)
    floor = std / (rows - 1).sqrt()  # the sample's deviation over √rows
    if summary.profile is not None:
        error, dof = between(summary.profile)
        if bool(error.isfinite().any()):
            return Uncertainty(error, floor, dof, "sequences")
    sequences = _sequences(summary, run)
    if sequences is None:
        unknown = torch.full_like(floor, math.nan)
        return Uncertainty(unknown, floor, unknown, "unknown")
    sequences_with_rows = torch.minimum(sequences[:, None].expand_as(rows), rows)
    dof = (sequences_with_rows - 1).masked_fill(~(sequences_with_rows > 1), math.nan)
    error = std / dof.sqrt()  # σ of the sequences' means, corrected for their own mean, over √G
    return Uncertainty(torch.maximum(error, floor), floor, dof, "bound")


def between(profile: Profile, share: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Standard error of a weighted mean over octaves of n, as an upper bound, and its reliability.

    Octave k holds the rows with 2^k to 2^(k+1) − 1 visible keys; its standard error comes from how
    much the means of its sequences differ. The octaves' errors, times their weights, are added
    without squaring: the true error is at most this sum, and equal to it if a sequence that is high
    in one octave is high in all. An octave that only one sequence reaches has no error of its own
    and is given the largest deviation between sequences of any octave.

    Args:
        profile: profile of some heads and metrics.
        share: (heads, metrics, octaves), weight of each octave; None for its share of the rows.

    Returns:
        The error, in the unit of the metric, and its degrees of freedom: the number of sequences
        less one in the octave that contributes most to the error. Both (heads, metrics); NaN if no
        octave has two sequences.
    """
    if not profile.octaves:
        nothing = profile.count.sum(-1) * math.nan
        return nothing, nothing
    count = profile.count.to(torch.float64)
    groups = profile.groups.to(torch.float64)
    reached = count > 0
    known = reached & (groups > 1)
    per_row = profile.between / count.clamp(min=1.0)
    error = (per_row / (groups - 1).clamp(min=1.0)).sqrt()
    spread = torch.where(known, error * groups.sqrt(), 0.0).amax(-1, keepdim=True)
    error = torch.where(known, error, spread / groups.clamp(min=1.0).sqrt())
    if share is None:
        share = count / count.sum(-1, keepdim=True).clamp(min=1.0)
    parts = torch.where(reached, share * error, 0.0)
    total = parts.sum(-1)
    lead = torch.where(known, parts, -1.0).argmax(-1, keepdim=True)
    dof = (groups.gather(-1, lead) - 1).squeeze(-1)
    none = ~known.any(-1)
    return total.masked_fill(none, math.nan), dof.masked_fill(none, math.nan)


def _sequences(summary: HeadSummary, run: Run | None) -> Tensor | None:
    """A lower bound on the number of sequences of each head's rows; None if unknown.

    Windows of a run count by their tokens, so that a short last one counts less than one. Without a
    run, each call has at least one sequence.
    """
    heads = torch.tensor([layer.heads for layer in summary.layers], dtype=torch.int64)
    if run is not None and run.windows:
        length = run.settings.get("length")
        whole = float(run.windows)
        if isinstance(length, int) and length > 0 and run.tokens:
            whole = min(whole, run.tokens / length)
        return torch.full((int(heads.sum()),), whole, dtype=torch.float64)
    calls = torch.tensor([layer.calls for layer in summary.layers], dtype=torch.float64)
    return torch.repeat_interleave(calls, heads) if bool((calls > 0).any()) else None


def slope(
    summary: HeadSummary, metric: str, head: int, *, least_n: float = 0.0, fewest: int = 3
) -> Slope | None:
    """Slope of a head's metric against log n, by :meth:`Profile.slope` on the summary's profile.

    Args:
        summary: any head summary.
        metric: a recorded metric.
        head: index in :attr:`HeadSummary.places`.
        least_n: ignore octaves with fewer keys.
        fewest: number of octaves needed, at least three.

    Returns:
        The slope; None without a profile, or if too few octaves have rows of two sequences.

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
    return summary.profile.slope(head, column, least_n=least_n, fewest=fewest)
