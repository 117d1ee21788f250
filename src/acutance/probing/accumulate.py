"""Records: what a probe has read of each layer, as it fills."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from acutance.kernels.fast_path import joined_state, packed_alike
from acutance.probing.row_sampling import Sample
from acutance.probing.spans import SpanWeights
from acutance.probing.structure import Structured
from acutance.rowstats import RowStatistics
from acutance.structure import STRUCTURE
from acutance.summary.by_octave import Profile
from acutance.summary.distances import Distances
from acutance.summary.layer import Layer
from acutance.summary.moments import Moments, stack, summarise_stacked
from acutance.summary.optional_parts import OptionalParts
from acutance.summary.spans import Spans

__all__ = ["MOST_CALLS", "Records", "Rows", "joined"]

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
        on_spans: their weight on spans of the input, likewise.
    """

    stats: RowStatistics
    kept: Tensor
    sample: Sample | None = None
    structured: Structured | None = None
    on_spans: SpanWeights | None = None


class _Record:
    """One layer."""

    def __init__(self, layer: Layer, nothing: OptionalParts, metrics: int) -> None:
        self.layer = layer
        self.alike: Counter[Layer] = Counter()  # of further calls, which merge into the layer
        self.moments = Moments.none(layer.heads, metrics)
        self.beside = nothing
        self.waiting: list[Rows] = []
        self.size = 0

    def add(self, layer: Layer) -> None:
        """Add what is known of another call."""
        if (layer.heads, layer.chosen) != (self.layer.heads, self.layer.chosen):
            self.layer = self.layer.merge(layer)  # says what does not fit
        else:
            self.alike[layer] += 1

    def settle(self) -> None:
        """Merge the pending calls, those of the same kind in one step."""
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
        spans: names of spans of the input, None where their weight is not recorded.
    """

    def __init__(
        self, metrics: tuple[str, ...], profile: bool = True, spans: tuple[str, ...] | None = None
    ) -> None:
        self._metrics, self._profile, self._spans = metrics, profile, spans
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
        now = large or self._structure or self._spans is not None
        found = self._summed(rows) if now else None
        with self._lock:
            record = self._records.get(layer.module)
            if record is None:
                record = _Record(layer, self._nothing(layer.heads), len(self._metrics))
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

    def _nothing(self, heads: int) -> OptionalParts:
        """What is recorded of no rows."""
        profile, structure = Profile.none(heads, len(self._metrics)), self._structure
        return OptionalParts(
            profile=profile if self._profile else None,
            positions=profile if structure else None,
            distances=Distances.none(heads) if structure else None,
            spans=None if self._spans is None else Spans.none(heads, self._spans),
        )

    def _beside(self, stacked: Tensor, rows: Rows) -> OptionalParts:
        """Profile by n, positions, distances and spans of the rows of one call."""
        parts = self._nothing(rows.kept.shape[1])
        if self._profile:
            parts = replace(parts, profile=Profile.of(stacked, rows.stats.state.n, rows.kept))
        structured, weights = rows.structured, rows.on_spans
        if structured is not None and structured.positions is not None:
            places = structured.positions.unsqueeze(1) + 1
            found = structured.statistics
            parts = replace(
                parts,
                positions=Profile.of(stacked, places.clamp(min=1), rows.kept),
                distances=Distances.from_rows(found.octaves, found.even, found.peak, rows.kept),
            )
        if weights is not None and self._spans is not None:
            spans = Spans.from_rows(*weights, rows.kept, self._spans)
            parts = replace(parts, spans=spans)
        return parts


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


#: Calls of one module in one pass that are distinguished; more are merged.
MOST_CALLS = 64

Found: TypeAlias = tuple[Layer, Moments, OptionalParts]


def joined(records: Mapping[str, Found], heads_of: Callable[[str], int | None]) -> dict[str, Found]:
    """Records by name, those of one layer's heads joined and those of long loops merged.

    Args:
        records: by name of the call, ``name`` or ``name#1``.
        heads_of: how many heads the module of a name says it has, None if it says nothing.
    """
    calls: dict[str, list[tuple[int, str]]] = {}
    for name in records:
        base, _, number = name.partition("#")
        calls.setdefault(base, []).append((int(number or 0), name))
    result: dict[str, Found] = {}
    for base, each in calls.items():
        found = {number: records[name] for number, name in sorted(each)}
        one = _heads(found, heads_of(base))
        if one is None and len(found) > MOST_CALLS:
            one = _merged(list(found.values()))
        if one is None:
            result |= {name: records[name] for _, name in each}
        else:
            layer, moments, beside = one
            result[base] = replace(layer, module=base), moments, beside
    return result


def _heads(found: Mapping[int, Found], heads: int | None) -> Found | None:
    """Calls for different heads of a layer, joined into one; None if they are not."""
    layers = [layer for layer, _, _ in found.values()]
    count, few = len(found), layers[0].heads
    whole = list(found) == list(range(count)) and heads is not None
    if heads is None or not whole or heads % few or (count * few) % heads or heads == few:
        return None
    if any(layer.heads != few or layer.chosen or layer.source != "softmax" for layer in layers):
        return None
    turns = heads // few  # calls for all heads of one item of the batch
    parts = []
    for turn in range(turns):
        part = _merged([found[k] for k in range(turn, count, turns)])
        if part is None:
            return None
        layer, moments, beside = part
        numbers = tuple(range(turn * few, (turn + 1) * few))
        parts.append((replace(layer, module="", chosen=numbers), moments, beside))
    layer = parts[0][0]
    for other, _, _ in parts[1:]:
        layer = layer.join_heads(other)
    moments = Moments.join([part for _, part, _ in parts])
    return layer, moments, OptionalParts.join([part for _, _, part in parts])


def _merged(parts: list[Found]) -> Found | None:
    """Merge several calls of the same heads; None if the calls had different heads."""
    layer, moments, beside = parts[0]
    layer = replace(layer, module="")
    for more, values, rest in parts[1:]:
        if more.numbers != layer.numbers:
            return None
        layer = layer.merge(replace(more, module=""))
        moments, beside = moments.merge(values), beside.merge(rest)
    return layer, moments, beside
