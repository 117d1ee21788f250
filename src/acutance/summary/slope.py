"""slope: how a head's metric changes with the number of visible keys."""

from __future__ import annotations

from acutance.summary.by_octave import Slope
from acutance.summary.head_summary import HeadSummary

__all__ = ["Slope", "slope"]


def slope(
    summary: HeadSummary, metric: str, head: int, *, least_n: float = 0.0, fewest: int = 3
) -> Slope | None:
    """How a head's metric changes with log n, by :meth:`Profile.slope` on the summary's profile.

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
    return summary.profile.slope(head, column, least_n=least_n, fewest=fewest)
