"""CallRows: what was read of one call's rows, from which readouts are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from acutance.kernels.fast_path import joined, packed_alike
from acutance.rowstats import RowStatistics
from acutance.structure import STRUCTURE, StructureStatistics
from acutance.summary.cells import Parts
from acutance.summary.layer import Layer
from acutance.summary.readouts.moments import stack

__all__ = ["CallRows", "can_join", "join_rows"]


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


def can_join(left: CallRows, right: CallRows, dim: int) -> bool:
    """Whether the rows of two calls can be joined: along the batch (0), or the heads (1)."""
    kinds = [(rows.structure is None, rows.positions is None) for rows in (left, right)]
    if dim == 1:
        return kinds[0][0] and kinds[1][0] and packed_alike(left.stats, right.stats)
    if left.counted.shape[1:] != right.counted.shape[1:] or kinds[0] != kinds[1]:
        return False
    if packed_alike(left.stats, right.stats):
        return True
    forms = [
        [(field.shape[1:], field.dtype, field.device) for field in rows.stats.state]
        for rows in (left, right)
    ]
    return forms[0] == forms[1]


def join_rows(calls: Sequence[CallRows], dim: int) -> CallRows:
    """The rows of several calls as those of one: with the batches of all (0), or the heads (1)."""
    first = calls[0]
    if len(calls) == 1:
        return first
    structure = positions = None
    if first.structure is not None:
        structure = _join_structures(
            [call.structure for call in calls if call.structure is not None]
        )
    if first.positions is not None:
        positions = torch.cat(
            [
                call.positions.expand(len(call.counted), -1)
                for call in calls
                if call.positions is not None
            ]
        )
    return first._replace(
        stats=joined([call.stats for call in calls], dim),
        counted=torch.cat([call.counted for call in calls], dim),
        structure=structure,
        positions=positions,
    )


def _join_structures(structures: list[StructureStatistics]) -> StructureStatistics:
    """Concatenate the structure of several calls along the batch."""
    octaves = max(structure.octaves.shape[-1] for structure in structures)
    heads = max(structure.even.shape[1] for structure in structures)
    columns = {}
    for entry in fields(structures[0]):
        parts = [getattr(structure, entry.name) for structure in structures]
        if entry.name in ("octaves", "even"):
            parts = [pad(part, (0, octaves - part.shape[-1])) for part in parts]
        if entry.name == "even":
            parts = [part.expand(-1, heads, -1, -1, -1) for part in parts]
        columns[entry.name] = torch.cat(parts)
    return StructureStatistics(**columns)
