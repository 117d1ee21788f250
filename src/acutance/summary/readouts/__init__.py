"""Readouts: what a summary may hold beside the moments of its metrics, by name.

A readout is a record of :class:`~acutance.summary.cells.Cells` in a file of this folder, and an
entry here. Measuring, merging, saving, loading and every export run through this table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

from acutance.summary.cells import Cells
from acutance.summary.readouts.by_octave import Profile, by_keys, by_position
from acutance.summary.readouts.distances import Distances
from acutance.summary.readouts.examples import Examples
from acutance.summary.readouts.moments import CallRows
from acutance.summary.readouts.spans import Spans

__all__ = ["READOUTS", "Readout"]

#: Measures the rows of a call from the metrics' values (metrics, heads, B, L).
Measure: TypeAlias = "Callable[[Tensor, CallRows], Cells]"


class Readout(NamedTuple):
    """One kind of statistics beside the moments.

    Attributes:
        cells: its record.
        title: what JSON files call it.
        option: the option of a probe that asks for it; empty for one that every probe records.
        measure: measures it from the rows of one or more calls; None if that needs the queries and
            keys, so that it is measured as a call is read.
    """

    cells: type[Cells]
    title: str
    option: str = ""
    measure: Measure | None = None


READOUTS: dict[str, Readout] = {
    "profile": Readout(Profile, "by_n", "profile", by_keys),
    "positions": Readout(Profile, "by_position", "structure", by_position),
    "distances": Readout(Distances, "distances", "structure", Distances.measure),
    "examples": Readout(Examples, "examples", "examples"),
    "spans": Readout(Spans, "spans", "spans"),
}
