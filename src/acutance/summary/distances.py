"""Distances: the mean weight of each head by octave of distance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.structure.blocks import PEAKS
from acutance.summary.head_arrays import HeadArrays, check_arrays

__all__ = ["MOST_DISTANCES", "Distances"]

#: Octaves of distance at most: keys are counted in 64 bits.
MOST_DISTANCES = 64


@dataclass(frozen=True)
class Distances(HeadArrays):
    """Mean weight by octave of distance, for each head.

    The third axis is 0 for keys up to the query's position and 1 for later keys. Octave 0 is the
    query's own position, octave k are distances of 2^(k−1) to 2^k − 1.

    Attributes:
        rows: (heads,) int64, number of rows; 0 in cross-attention.
        mass: (heads, 2, octaves) float64, mean weight.
        even: the same if all visible keys had equal weight.
        peaks: (heads, 17) int64, number of rows whose largest weight is 8, 7, …, 1, 0 positions
            before the query, then 1, …, 8 after it.
    """

    rows: Tensor
    mass: Tensor
    even: Tensor
    peaks: Tensor

    @staticmethod
    def none(heads: int, octaves: int = 0) -> Distances:
        """An empty record: the identity of :meth:`merge`."""
        zero = torch.zeros(heads, 2, octaves, dtype=torch.float64, device="cpu")
        rows = torch.zeros(heads, dtype=torch.int64, device="cpu")
        peaks = torch.zeros(heads, 2 * PEAKS + 1, dtype=torch.int64, device="cpu")
        return Distances(rows, zero, zero.clone(), peaks)

    @staticmethod
    def from_rows(octaves: Tensor, even: Tensor, peak: Tensor, counted: Tensor) -> Distances:
        """Average the weight in each octave of query-key distance over the rows of one call.

        Args:
            octaves: (B, heads, L, 2, K), weight behind and ahead of the query, by octave.
            even: (B, heads or 1, L, 2, K), the same for uniform attention.
            peak: (B, heads, L) relative positions of the largest weights.
            counted: boolean (B, heads, L), True for rows that count.
        """
        if octaves.device.type == "mps":  # it has no float64
            octaves, even, peak, counted = octaves.cpu(), even.cpu(), peak.cpu(), counted.cpu()
        counted = counted & octaves.isfinite().all(-1).all(
            -1
        )  # a model that overflows has rows of NaN
        rows = counted.sum((0, 2))
        count = rows.clamp(min=1).to(torch.float64)[:, None, None]
        chosen = counted[..., None, None]
        mass, alike = (
            torch.where(chosen, part.detach(), 0.0).to(torch.float64).sum((0, 2)) / count
            for part in (octaves, even)
        )
        near = torch.arange(-PEAKS, PEAKS + 1, device=peak.device)
        peaks = ((peak.unsqueeze(-1) == near) & counted.unsqueeze(-1)).sum((0, 2))
        return Distances(rows.cpu(), mass.cpu(), alike.cpu(), peaks.cpu())

    def padded(self, octaves: int) -> Distances:
        """A copy with at least ``octaves`` octaves; the added ones are 0."""
        more = (0, max(0, octaves - self.mass.shape[-1]))
        mass, even = (torch.nn.functional.pad(part, more) for part in (self.mass, self.even))
        return Distances(self.rows, mass, even, self.peaks)

    def merge(self, other: Distances) -> Distances:
        """The record of the rows of both."""
        octaves = max(self.mass.shape[-1], other.mass.shape[-1])
        left, right = self.padded(octaves), other.padded(octaves)
        rows = self.rows + other.rows
        share = (other.rows.double() / rows.clamp(min=1).double())[:, None, None]
        return Distances(
            rows,
            left.mass + (right.mass - left.mass) * share,
            left.even + (right.even - left.even) * share,
            left.peaks + right.peaks,
        )

    def within(self, distance: int) -> tuple[Tensor, Tensor]:
        """Mean weight within a distance of 2^k − 1, and the same for uniform attention.

        Args:
            distance: 0, 1, 3, 7, …; other values are rounded down to one of these.

        Returns:
            Two tensors (heads,).
        """
        octaves = (distance + 1).bit_length()
        mass, even = (part[..., :octaves].sum((-1, -2)) for part in (self.mass, self.even))
        return mass, even

    def to_dict(self, head: int) -> dict[str, Any]:
        """One head's numbers as JSON values."""
        (behind, ahead), (even_behind, even_ahead) = (
            self.mass[head].tolist(),
            self.even[head].tolist(),
        )
        return {
            "rows": int(self.rows[head]),
            "behind": behind,
            "ahead": ahead,
            "even_behind": even_behind,
            "even_ahead": even_ahead,
            "peaks": self.peaks[head].tolist(),
        }

    def columns(self) -> dict[str, list[float]]:
        """Mean weights by octave, ``mass_octave_<k>`` and ``mass_octave_ahead_<k>`` (heads,)."""
        mass = self.mass.masked_fill((self.rows == 0)[:, None, None], math.nan)
        return {
            f"mass_octave_{where}{octave}": mass[:, side, octave].tolist()
            for side, where in enumerate(("", "ahead_"))
            for octave in range(side, mass.shape[-1])
        }

    @classmethod
    def join(cls, parts: list[Distances]) -> Distances:
        """Concatenate records of different heads; shorter lists of octaves are padded with 0."""
        octaves = max(part.mass.shape[-1] for part in parts)
        return super().join([part.padded(octaves) for part in parts])

    @staticmethod
    def checked(tensors: Mapping[str, Tensor], heads: int) -> Distances:
        """Build a record from the arrays of a file, after checking shapes, dtypes and ranges.

        Raises:
            ValueError: naming the first array that does not fit.
        """
        octaves = tensors["mass"].shape[-1] if tensors["mass"].dim() else -1
        if not 0 <= octaves <= MOST_DISTANCES:
            raise ValueError(f"distances must have 0 to {MOST_DISTANCES} octaves, got {octaves}")

        def possible(name: str, part: Tensor) -> Tensor:
            return (part >= 0) & (part <= (1 << 53 if name in ("rows", "peaks") else 1 + 1e-3))

        check_arrays("distances", tensors, Distances.none(heads, octaves), possible)
        return Distances(**dict(tensors))
