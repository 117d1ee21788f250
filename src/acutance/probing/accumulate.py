"""LayerRecords: the statistics that a probe has accumulated for each layer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from acutance.kernels.fast_path import joined, packed_alike
from acutance.probing.spans import SpanWeights
from acutance.probing.structure import CallStructure, concatenate
from acutance.probing.tokens import Sample
from acutance.rowstats import RowStatistics
from acutance.structure import STRUCTURE
from acutance.summary.by_octave import Profile
from acutance.summary.distances import Distances
from acutance.summary.layer import Layer
from acutance.summary.moments import Moments, stack, summarise_stacked
from acutance.summary.optional_parts import OptionalParts
from acutance.summary.spans import Spans

__all__ = ["MAX_SEPARATE_CALLS", "LayerRecords", "CallRows", "join_calls"]

#: Most rows times heads that are collected before they are summarised together. Summarising after
#: each decoded token would take longer than the model itself.
MAX_PENDING = 1 << 14
#: Most rows times heads of several layers that are summarised together.
MAX_TOGETHER = 4 * MAX_PENDING


class CallRows(NamedTuple):
    """Statistics of the rows of one attention call.

    Attributes:
        stats: row statistics, fields of shape (B, H, L).
        counted: boolean (B, H, L), True on the rows that enter the summary.
        sample: how the rows were sampled; None if every row was read.
        structure: where the rows' weight lies among the keys; None if not requested.
        span_weights: the rows' weight on named spans of the input; None if not requested.
    """

    stats: RowStatistics
    counted: Tensor
    sample: Sample | None = None
    structure: CallStructure | None = None
    span_weights: SpanWeights | None = None


class _LayerRecord:
    """The statistics accumulated for one layer, and the calls not yet summarised."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.identical_calls: Counter[Layer] = Counter()  # later calls, merged on demand
        self.summary: tuple[Moments, OptionalParts] | None = None  # none before the first rows
        self.pending: list[CallRows] = []
        self.pending_rows = 0

    def add(self, layer: Layer) -> None:
        """Add the counts (calls, rows, padding) of another call of this layer.

        Args:
            layer: the counts of that call.

        Raises:
            ValueError: if it is another layer or has other heads.
        """
        if (layer.heads, layer.chosen) != (self.layer.heads, self.layer.chosen):
            self.layer = self.layer.merge(layer)  # raises if they do not fit
        else:
            self.identical_calls[layer] += 1

    def merge_pending_layers(self) -> None:
        """Add the counts of postponed calls to :attr:`layer`, identical calls in one step."""
        for layer, calls in self.identical_calls.items():
            self.layer = self.layer.merge(layer.times(calls))
        self.identical_calls.clear()

    def add_rows(self, moments: Moments, optional_parts: OptionalParts) -> None:
        """Merge the summary of further rows into the layer's."""
        if self.summary is not None:
            moments = self.summary[0].merge(moments)
            optional_parts = self.summary[1].merge(optional_parts)
        self.summary = moments, optional_parts


class LayerRecords:
    """The statistics that a probe accumulates, for each layer by name.

    Args:
        metrics: names of the row metrics to record.
        profile: also record them by octave of the number of visible keys.
        spans: names of the spans whose weight is recorded; None for no spans.
    """

    def __init__(
        self, metrics: tuple[str, ...], profile: bool = True, spans: tuple[str, ...] | None = None
    ) -> None:
        self._metrics, self._profile, self._spans = metrics, profile, spans
        self._structure = any(name in STRUCTURE for name in metrics)
        self._lock = threading.Lock()
        self._records: dict[str, _LayerRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, layer: Layer, rows: CallRows) -> None:
        """Add the rows of one call to the record of its layer.

        Raises:
            ValueError: if earlier calls of the layer had other heads.
        """
        large = rows.sample is not None or rows.counted.numel() > MAX_PENDING // 4
        summary = self._summarise(rows) if large or self._spans is not None else None
        with self._lock:
            record = self._records.get(layer.module)
            if record is None:
                record = self._records[layer.module] = _LayerRecord(layer)
            else:
                record.add(layer)
            if summary is not None:
                record.add_rows(*summary)
                return
            if record.pending and not _can_concatenate(record.pending[0], rows):
                self._summarise_pending([record])
            record.pending.append(rows)
            wide = rows.structure is not None  # its octaves take as much memory as several rows
            record.pending_rows += (4 if wide else 1) * rows.counted.numel()
            if record.pending_rows >= MAX_PENDING:
                self._summarise_pending([record])

    def names(self) -> list[str]:
        """Names of the recorded layers, in the order of their first calls."""
        with self._lock:
            return list(self._records)

    def finished(self) -> dict[str, tuple[Layer, Moments, OptionalParts]]:
        """Summarise all pending rows and return each layer's record by name."""
        with self._lock, torch.no_grad():
            for record in self._records.values():
                record.merge_pending_layers()
            self._summarise_pending(list(self._records.values()))
            return {
                name: (record.layer, *record.summary)
                for name, record in self._records.items()
                if record.summary is not None
            }

    def _summarise_pending(self, records: Sequence[_LayerRecord]) -> None:
        """Summarise the pending rows of layers; those of layers that are alike together."""
        waiting = [(record, _concatenate(record.pending)) for record in records if record.pending]
        while waiting:
            first = waiting[0][1]
            most = max(1, MAX_TOGETHER // max(1, first.counted.numel()))
            alike = [pair for pair in waiting if _fit_side_by_side(first, pair[1])][:most]
            alike = alike or waiting[:1]
            moments, parts = self._summarise(_side_by_side([rows for _, rows in alike]))
            heads = first.counted.shape[1]
            for number, (record, _) in enumerate(alike):
                place = number * heads, (number + 1) * heads
                record.add_rows(moments.heads(*place), parts.heads(*place))
                record.pending, record.pending_rows = [], 0
            waiting = [pair for pair in waiting if pair[0].pending]

    def _summarise(self, rows: CallRows) -> tuple[Moments, OptionalParts]:
        """Moments and optional parts of the rows of one call."""
        stats, structure = rows.stats, rows.structure
        values = stats.as_dict(name for name in stats.available if name in self._metrics)
        for name in self._metrics:
            if structure is not None and name in STRUCTURE:
                values[name] = structure.statistics[name]
            elif name not in values:  # not known from scores alone
                values[name] = torch.full_like(stats.state.Z, torch.nan)
        stacked = stack(values, self._metrics)
        moments = summarise_stacked(stacked, rows.counted, self._metrics)
        if rows.sample is not None:
            moments = moments.sampled(rows.sample.total, rows.sample.n_sampled)
        return moments, self._optional_parts(stacked, rows)

    def _empty_parts(self, heads: int) -> OptionalParts:
        """Optional parts of a layer without rows."""
        profile, structure = Profile.none(heads, len(self._metrics)), self._structure
        return OptionalParts(
            profile=profile if self._profile else None,
            positions=profile if structure else None,
            distances=Distances.none(heads) if structure else None,
            spans=None if self._spans is None else Spans.none(heads, self._spans),
        )

    def _optional_parts(self, stacked: Tensor, rows: CallRows) -> OptionalParts:
        """Profiles by n and by position, distances and span weights of the rows of one call."""
        parts = self._empty_parts(rows.counted.shape[1])
        if self._profile:
            parts = replace(parts, profile=Profile.of(stacked, rows.stats.state.n, rows.counted))
        structure, weights = rows.structure, rows.span_weights
        if structure is not None and structure.positions is not None:
            positions = structure.positions.unsqueeze(1) + 1
            statistics = structure.statistics
            parts = replace(
                parts,
                positions=Profile.of(stacked, positions.clamp(min=1), rows.counted),
                distances=Distances.from_rows(
                    statistics.octaves, statistics.even, statistics.peak, rows.counted
                ),
            )
        if weights is not None and self._spans is not None:
            spans = Spans.from_rows(*weights, rows.counted, self._spans)
            parts = replace(parts, spans=spans)
        return parts


def _can_concatenate(left: CallRows, right: CallRows) -> bool:
    """Whether the rows of two calls have the same shapes, dtypes and device."""
    if left.counted.shape[1:] != right.counted.shape[1:]:
        return False
    if _structure_kind(left) != _structure_kind(right):
        return False
    if packed_alike(left.stats, right.stats):
        return True

    def form(rows: CallRows) -> list[Any]:
        return [(part.shape[1:], part.dtype, part.device) for part in rows.stats.state]

    return form(left) == form(right)


def _concatenate(parts: list[CallRows]) -> CallRows:
    """Concatenate the rows of several calls along the batch."""
    if len(parts) == 1:
        return parts[0]
    counted = torch.cat([part.counted for part in parts])
    structure = [part.structure for part in parts if part.structure is not None]
    return CallRows(
        joined([part.stats for part in parts]),
        counted,
        structure=concatenate(structure) if structure else None,
    )


def _fit_side_by_side(left: CallRows, right: CallRows) -> bool:
    """Whether the rows of two layers can be summarised as those of one with the heads of both."""
    bare = left.structure is None and right.structure is None
    return bare and packed_alike(left.stats, right.stats)


def _side_by_side(parts: list[CallRows]) -> CallRows:
    """Rows of several layers as those of one layer with the heads of all."""
    if len(parts) == 1:
        return parts[0]
    counted = torch.cat([part.counted for part in parts], 1)
    return CallRows(joined([part.stats for part in parts], 1), counted)


def _structure_kind(rows: CallRows) -> tuple[bool, bool]:
    """Whether structure was measured, and whether positions of the queries are known.

    Calls can be summarised together only if both are equal.
    """
    structure = rows.structure
    return structure is not None, structure is not None and structure.positions is not None


#: Up to this many calls of one module in a forward pass are recorded separately; more are merged.
MAX_SEPARATE_CALLS = 64

#: Sources of calls that may be a loop over heads.
_LOOPED = ("softmax", "scaled_dot_product_attention")
LayerResult: TypeAlias = tuple[Layer, Moments, OptionalParts]


def join_calls(
    records: Mapping[str, LayerResult], heads_of: Callable[[str], int | None]
) -> dict[str, LayerResult]:
    """Join the records of a module that calls attention in a loop.

    A loop over heads becomes one layer with all heads; a loop of more than
    :data:`MAX_SEPARATE_CALLS` calls becomes one merged record.

    Args:
        records: by name of the call: ``name`` for a module's first call in a pass, ``name#1`` for
            its second, and so on.
        heads_of: returns the number of heads of a named module, None if the module has no such
            attribute.
    """
    by_base: dict[str, list[tuple[int, str]]] = {}
    for name in records:
        base, _, number = name.partition("#")
        by_base.setdefault(base, []).append((int(number or 0), name))
    result: dict[str, LayerResult] = {}
    for base, numbered in by_base.items():
        calls_by_number = {number: records[name] for number, name in sorted(numbered)}
        merged = _join_head_loop(calls_by_number, heads_of(base))
        if merged is None and len(calls_by_number) > MAX_SEPARATE_CALLS:
            merged = _merge_calls(list(calls_by_number.values()))
        if merged is None:
            result |= {name: records[name] for _, name in numbered}
        else:
            layer, moments, optional_parts = merged
            result[base] = replace(layer, module=base), moments, optional_parts
    return result


def _join_head_loop(calls: Mapping[int, LayerResult], heads: int | None) -> LayerResult | None:
    """Join the calls of a loop over heads, and batch items, into one layer; None if it is none."""
    layers = [layer for layer, _, _ in calls.values()]
    count, heads_per_call = len(calls), layers[0].heads
    complete = list(calls) == list(range(count)) and heads is not None
    if (
        heads is None
        or not complete
        or heads % heads_per_call
        or (count * heads_per_call) % heads
        or heads == heads_per_call
    ):
        return None
    if any(
        layer.heads != heads_per_call
        or layer.chosen
        or layer.source != layers[0].source
        or layer.source not in _LOOPED
        for layer in layers
    ):
        return None
    batch_size = heads // heads_per_call  # each turn of the loop handles all heads of one item
    parts = []
    for item in range(batch_size):
        part = _merge_calls([calls[k] for k in range(item, count, batch_size)])
        if part is None:
            return None
        layer, moments, optional_parts = part
        numbers = tuple(range(item * heads_per_call, (item + 1) * heads_per_call))
        parts.append((replace(layer, module="", chosen=numbers), moments, optional_parts))
    layer = parts[0][0]
    for other, _, _ in parts[1:]:
        layer = layer.join_heads(other)
    moments = Moments.join([part for _, part, _ in parts])
    return layer, moments, OptionalParts.join([part for _, _, part in parts])


def _merge_calls(parts: list[LayerResult]) -> LayerResult | None:
    """Merge several calls of the same heads; None if the calls had different heads."""
    layer, moments, optional_parts = parts[0]
    layer = replace(layer, module="")
    for next_layer, next_moments, next_parts in parts[1:]:
        if next_layer.numbers != layer.numbers:
            return None
        layer = layer.merge(replace(next_layer, module=""))
        moments, optional_parts = moments.merge(next_moments), optional_parts.merge(next_parts)
    return layer, moments, optional_parts
