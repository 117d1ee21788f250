"""Distances: the mean weight of each head by octave of distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from acutance.structure.statistics import PEAKS
from acutance.summary.cells import Cells, counts, means
from acutance.summary.readouts.moments import CallRows

#: Octaves of distance at most: keys are counted in 64 bits.
MOST_DISTANCES = 64


@dataclass(frozen=True)
class Distances(Cells):
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

    rows: Tensor = counts("heads")
    mass: Tensor = means("heads sides octaves", "rows", least=0, most=1 + 1e-3)
    even: Tensor = means("heads sides octaves", "rows", least=0, most=1 + 1e-3)
    peaks: Tensor = counts("heads offsets")

    what = " of distances"
    axes = ("heads", "octaves")
    fixed: ClassVar = {"sides": 2, "offsets": 2 * PEAKS + 1}
    grows = "octaves"
    most = MOST_DISTANCES
    room = f"0 to {MOST_DISTANCES} octaves"

    @staticmethod
    def measure(values: Tensor, rows: CallRows) -> Distances:
        """Average the weight in each octave of distance over a call's rows."""
        if rows.structure is None or rows.positions is None:
            return Distances.none(rows.counted.shape[1])
        octaves, even, peak = rows.structure.octaves, rows.structure.even, rows.structure.peak
        counted = rows.counted
        if octaves.device.type == "mps":  # it has no float64
            octaves, even, peak, counted = octaves.cpu(), even.cpu(), peak.cpu(), counted.cpu()
        counted = counted & octaves.isfinite().all(-1).all(-1)  # an overflow gives rows of NaN
        weights = torch.stack([octaves.detach(), even.detach().expand_as(octaves)], -3)
        weights = weights.to(torch.float64).masked_fill_(~counted[..., None, None, None], 0.0)
        total = counted.sum((0, 2))
        mass, alike = (weights.sum((0, 2)) / total.clamp(min=1)[:, None, None, None]).unbind(1)
        near = torch.arange(-PEAKS, PEAKS + 1, device=peak.device)
        peaks = ((peak.unsqueeze(-1) == near) & counted.unsqueeze(-1)).sum((0, 2))
        return Distances(total.cpu(), mass.cpu(), alike.cpu(), peaks.cpu())

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

    def to_dicts(self, metrics: tuple[str, ...]) -> list[dict[str, Any]]:
        """Each head's numbers as JSON values."""
        sides = [*self.mass.unbind(1), *self.even.unbind(1)]
        names = ("rows", "behind", "ahead", "even_behind", "even_ahead", "peaks")
        columns = (array.tolist() for array in (self.rows, *sides, self.peaks))
        return [dict(zip(names, head, strict=True)) for head in zip(*columns, strict=True)]

    def columns(self, metrics: tuple[str, ...]) -> dict[str, list[float]]:
        """Mean weights by octave, ``mass_octave_<k>`` and ``mass_octave_ahead_<k>`` (heads,)."""
        mass = self.mass.masked_fill((self.rows == 0)[:, None, None], math.nan)
        return {
            f"mass_octave_{where}{octave}": mass[:, side, octave].tolist()
            for side, where in enumerate(("", "ahead_"))
            for octave in range(side, mass.shape[-1])
        }
