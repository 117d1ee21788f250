"""CallRows: what was read of one call's rows, from which readouts are measured."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acutance.rowstats import RowStatistics
from acutance.structure import STRUCTURE, StructureStatistics
from acutance.summary.cells import Parts
from acutance.summary.layer import Layer
from acutance.summary.readouts.moments import stack


class CallRows(NamedTuple):
    """What was read of one attention call.

    Attributes:
        layer: counts of rows, the status and the source of the call.
        stats: row statistics, fields of shape (B, H, L).
        counted: boolean (B, H, L), True on the rows that enter the summary.
        sampled: numbers of rows and of those drawn from them; None if every row was read.
        structure: where the rows' weight lies, fields (B, H, L); None if not requested.
        positions: (1 or B, L), index of the key at each query's position; None in cross-attention.
        parts: readouts measured while the call's queries and keys were at hand.
        doubt: why the rows are not reliable; None if there is no reason.
    """

    layer: Layer
    stats: RowStatistics
    counted: Tensor
    sampled: tuple[int, int] | None = None
    structure: StructureStatistics | None = None
    positions: Tensor | None = None
    parts: Parts = Parts()
    doubt: str | None = None

    def values(self, metrics: tuple[str, ...]) -> Tensor:
        """The metrics of the rows, (metrics, heads, B, L); NaN where one is not known."""
        names = set(metrics)
        values = self.stats.as_dict([name for name in self.stats.available if name in names])
        for name in metrics:
            if self.structure is not None and name in STRUCTURE:
                values[name] = self.structure[name]
            elif name not in values:  # not known from scores alone
                values[name] = torch.full_like(self.stats.state.Z, torch.nan)
        return stack(values, metrics)
