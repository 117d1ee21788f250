"""Summaries of drawn rows that are alike within a sequence; run by path, as ``toy`` is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from acutance.probing import HeadSummary, Layer, Moments
from acutance.summary.cells import Parts
from acutance.summary.readouts.by_octave import Profile


def rows_of(
    generator: torch.Generator, sequences: int, heads: int, rows: int, share: float
) -> torch.Tensor:
    """Rows of unit variance, of which ``share`` is a sequence has in common."""
    own = torch.randn(1, sequences, heads, rows, generator=generator, dtype=torch.float64)
    common = torch.randn(1, sequences, heads, 1, generator=generator, dtype=torch.float64)
    return math.sqrt(share) * common + math.sqrt(1 - share) * own


def summary_of(
    values: torch.Tensor,
    n: torch.Tensor | None = None,
    *,
    metrics: Sequence[str] = ("entropy", "max_logit"),
    layers: Sequence[Layer] | None = None,
    about: dict[str, Any] | None = None,
    profile: bool = True,
) -> HeadSummary:
    """A summary of rows (metrics, sequences, heads, rows), whose ``n`` is (sequences, rows)."""
    count, sequences, heads, rows = values.shape
    kept = torch.ones(sequences, heads, rows, dtype=torch.bool)
    size = torch.full((sequences, rows), 100) if n is None else n
    flat = values.permute(0, 2, 1, 3).reshape(count, heads, -1)
    names = tuple(metrics)[:count]
    held = layers or [Layer("attn", heads, calls=1, rows=sequences * rows)]
    beside = (
        Parts(profile=Profile.of(values.transpose(1, 2), size[:, None], kept))
        if profile
        else Parts()
    )
    return HeadSummary(tuple(held), names, Moments.of(flat, names), about or {}, (), beside)
