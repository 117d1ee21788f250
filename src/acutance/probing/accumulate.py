"""Records: what a probe has read of each layer, as it fills."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.kernels.fast_path import joined_state, packed_alike
from acutance.probing.row_sampling import Sample
from acutance.probing.structure import Structured
from acutance.rowstats import RowStatistics
from acutance.structure import STRUCTURE
from acutance.summary.by_octave import Profile
from acutance.summary.distances import Distances
from acutance.summary.head_summary import Layer
from acutance.summary.moments import Moments, stack, summarise_stacked
from acutance.summary.optional_parts import OptionalParts

__all__ = ["Records", "Rows"]

#: Rows times heads that wait, at most, to be summarised together: a decoded token at a time, the
#: many small steps would take longer than the model.
MOST_WAITING = 1 << 14


class Rows(NamedTuple):
    """The rows of one call.

    Attributes:
        stats: of rows (B, H, L).
        kept: boolean (B, H, L), rows that count.
        sample: how they were drawn, None where they are all.
        structured: where their weight lies, if that was read.
    """

    stats: RowStatistics
    kept: Tensor
    sample: Sample | None = None
    structured: Structured | None = None


class _Record:
    """One layer."""

    def __init__(self, layer: Layer, metrics: int, structure: bool, profile: bool) -> None:
        self.layer = layer
        self.alike: Counter[Layer] = Counter()  # of further calls, which merge into the layer
        self.moments = Moments.none(layer.heads, metrics)
        nothing = Profile.none(layer.heads, metrics)
        self.beside = OptionalParts(
            profile=nothing if profile else None,
            positions=nothing if structure else None,
            distances=Distances.none(layer.heads) if structure else None,
        )
        self.waiting: list[Rows] = []
        self.size = 0

    def add(self, layer: Layer) -> None:
        """Add what is known of another call."""
        if (layer.heads, layer.chosen) != (self.layer.heads, self.layer.chosen):
            self.layer = self.layer.merge(layer)  # says what does not fit
        else:
            self.alike[layer] += 1

    def settle(self) -> None:
        """Merge what is known of further calls: those that are alike by one step."""
        for layer, calls in self.alike.items():
            self.layer = self.layer.merge(layer.times(calls))
        self.alike.clear()

    def take(self, moments: Moments, beside: OptionalParts) -> None:
        """Add rows that are summarised."""
        self.moments = self.moments.merge(moments)
        self.beside = self.beside.merge(beside)


class Records:
    """All layers, by name.

    Args:
        metrics: what is recorded of their rows.
        profile: record it by octave of n too.
    """

    def __init__(self, metrics: tuple[str, ...], profile: bool = True) -> None:
        self._metrics, self._profile = metrics, profile
        self._structure = any(name in STRUCTURE for name in metrics)
        self._lock = threading.Lock()
        self._records: dict[str, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, layer: Layer, rows: Rows) -> None:
        """Add a call's rows to its layer's.

        Raises:
            ValueError: if the layer had other heads before.
        """
        large = rows.sample is not None or rows.kept.numel() > MOST_WAITING // 4
        found = self._summed(rows) if large or self._structure else None
        with self._lock:
            record = self._records.get(layer.module)
            if record is None:
                record = _Record(layer, len(self._metrics), self._structure, self._profile)
                self._records[layer.module] = record
            else:
                record.add(layer)
            if found is not None:
                record.take(*found)
                return
            if record.waiting and not _alike(record.waiting[0], rows):
                self._finish(record)
            record.waiting.append(rows)
            record.size += rows.kept.numel()
            if record.size >= MOST_WAITING:
                self._finish(record)

    def names(self) -> list[str]:
        """Names of the layers."""
        with self._lock:
            return list(self._records)

    def finished(self) -> dict[str, tuple[Layer, Moments, OptionalParts]]:
        """Every layer with the summary of all its rows."""
        with self._lock, torch.no_grad():
            for record in self._records.values():
                record.settle()
                self._finish(record)
            return {
                name: (each.layer, each.moments, each.beside)
                for name, each in self._records.items()
            }

    def _finish(self, record: _Record) -> None:
        """Summarise the rows that wait."""
        if record.waiting:
            record.take(*self._summed(_joined(record.waiting)))
            record.waiting, record.size = [], 0

    def _summed(self, rows: Rows) -> tuple[Moments, OptionalParts]:
        """The moments and optional parts of the rows of one call."""
        stats, structured = rows.stats, rows.structured
        values = stats.as_dict(name for name in stats.available if name in self._metrics)
        for name in self._metrics:
            if structured is not None and name in STRUCTURE:
                values[name] = structured.statistics[name]
            elif name not in values:  # of rows known by their scores alone
                values[name] = torch.full_like(stats.state.Z, torch.nan)
        stacked = stack(values, self._metrics)
        moments = summarise_stacked(stacked, rows.kept, self._metrics)
        if rows.sample is not None:
            moments = moments.sampled(rows.sample.total, rows.sample.taken)
        return moments, self._beside(stacked, rows)

    def _beside(self, stacked: Tensor, rows: Rows) -> OptionalParts:
        """Profile by n, positions and distances of the rows of one call."""
        profile = None
        if self._profile:
            profile = Profile.of(stacked, rows.stats.state.n, rows.kept)
        if not self._structure:
            return OptionalParts(profile)
        heads, structured = rows.kept.shape[1], rows.structured
        positions = Profile.none(heads, len(self._metrics))
        distances = Distances.none(heads)
        if structured is not None and structured.positions is not None:
            places = structured.positions.unsqueeze(1) + 1
            positions = Profile.of(stacked, places.clamp(min=1), rows.kept)
            found = structured.statistics
            distances = Distances.from_rows(found.octaves, found.even, found.peak, rows.kept)
        return OptionalParts(profile, positions, distances)


def _alike(left: Rows, right: Rows) -> bool:
    """Whether two calls' rows can be laid one after the other."""
    if packed_alike(left.stats, right.stats):
        return True

    def form(rows: Rows) -> list[Any]:
        return [(part.shape[1:], part.dtype, part.device) for part in rows.stats.state]

    return form(left) == form(right)


def _joined(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    state = joined_state([part.stats for part in parts])
    return Rows(RowStatistics(state), torch.cat([part.kept for part in parts]))
