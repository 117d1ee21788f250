"""LayerRecords: the statistics that a probe has accumulated for each layer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import torch
from torch.nn.functional import pad

from acutance.kernels.fast_path import joined, packed_alike
from acutance.structure import StructureStatistics
from acutance.summary.cells import Cells, Parts
from acutance.summary.head_summary import HeadSummary
from acutance.summary.layer import Layer
from acutance.summary.readouts import READOUTS
from acutance.summary.readouts.moments import CallRows, Moments, summarise

#: Most rows times heads that are collected before they are summarised together. Summarising after
#: each decoded token would take longer than the model itself.
MAX_PENDING = 1 << 14
#: Most rows times heads of several layers that are summarised together.
MAX_TOGETHER = 4 * MAX_PENDING


class _LayerRecord:
    """The statistics accumulated for one layer, and the calls not yet summarised."""

    def __init__(self) -> None:
        self.layers: Counter[Layer] = Counter()  # the counts of rows of each call, merged on demand
        self.parts = Parts()
        self.pending: list[CallRows] = []
        self.pending_rows = 0

    def layer(self) -> Layer:
        """The counts of all calls, those of identical calls added in one step."""
        layer = reduce(Layer.merge, (layer.times(calls) for layer, calls in self.layers.items()))
        self.layers = Counter([layer])
        return layer

    def add_parts(self, parts: Parts) -> None:
        """Merge the statistics of further rows into the layer's."""
        for name, cells in parts.items():
            self.parts[name] = self.parts[name].merge(cells) if name in self.parts else cells


class LayerRecords:
    """The statistics that a probe accumulates, for each layer by name.

    Args:
        metrics: names of the row metrics to record.
        readouts: for each readout to record, its fields that are no arrays.
    """

    def __init__(self, metrics: tuple[str, ...], readouts: Mapping[str, Mapping[str, Any]]) -> None:
        self._metrics, self._readouts = metrics, readouts
        self._lock = threading.Lock()
        self._records: dict[str, _LayerRecord] = {}

    def add(self, rows: CallRows) -> None:
        """Add the rows of one call to the record of its layer.

        Raises:
            ValueError: if earlier calls of the layer had other heads.
        """
        at_once = rows.sampled is not None or rows.counted.numel() > MAX_PENDING // 4
        parts = self._summarise(rows) if at_once else Parts()
        with self._lock:
            record = self._records.setdefault(rows.layer.module, _LayerRecord())
            first = next(iter(record.layers), rows.layer)
            if (first.heads, first.chosen) != (rows.layer.heads, rows.layer.chosen):
                first.merge(rows.layer)  # raises if they do not fit
            record.layers[rows.layer] += 1
            record.add_parts(Parts(parts, **rows.parts))
            if at_once:
                return
            if record.pending and not _can_join(record.pending[0], rows, 0):
                self._summarise_pending([record])
            record.pending.append(rows)
            wide = rows.structure is not None  # its octaves take as much memory as several rows
            record.pending_rows += (4 if wide else 1) * rows.counted.numel()
            if record.pending_rows >= MAX_PENDING:
                self._summarise_pending([record])

    def so_far(self, layer: str, readout: str) -> Cells | None:
        """A readout of a layer's summarised rows; None before the first."""
        record = self._records.get(layer)
        return None if record is None else record.parts.get(readout)

    def names(self) -> list[str]:
        """Names of the recorded layers, in the order of their first calls."""
        with self._lock:
            return list(self._records)

    def finished(self) -> dict[str, HeadSummary]:
        """Summarise all pending rows and return each layer's statistics by name."""
        with self._lock, torch.no_grad():
            self._summarise_pending(list(self._records.values()))
            finished = {}
            for name, record in self._records.items():
                layer, parts, moments = record.layer(), Parts(), record.parts["moments"]
                assert isinstance(moments, Moments)
                for readout, others in self._readouts.items():
                    none = READOUTS[readout].cells.without_rows
                    parts[readout] = record.parts.get(readout) or none(
                        layer.heads, metrics=len(self._metrics), **others
                    )
                finished[name] = HeadSummary((layer,), self._metrics, moments, optional_parts=parts)
            return finished

    def _summarise_pending(self, records: Sequence[_LayerRecord]) -> None:
        """Summarise the pending rows of layers; those of layers that are alike together."""
        waiting = [(record, _join_rows(record.pending, 0)) for record in records if record.pending]
        while waiting:
            first = waiting[0][1]
            most = max(1, MAX_TOGETHER // max(1, first.counted.numel()))
            alike = [pair for pair in waiting if _can_join(first, pair[1], 1)][:most]
            alike = alike or waiting[:1]
            parts = self._summarise(_join_rows([rows for _, rows in alike], 1))
            heads = first.counted.shape[1]
            for number, (record, _) in enumerate(alike):
                record.add_parts(parts.select(slice(number * heads, (number + 1) * heads)))
                record.pending, record.pending_rows = [], 0
            waiting = [pair for pair in waiting if pair[0].pending]

    def _summarise(self, rows: CallRows) -> Parts:
        """Moments and readouts of the rows of one or more calls."""
        values = rows.values(self._metrics)
        moments = summarise(values, rows.counted, self._metrics)
        if rows.sampled is not None:
            moments = moments.sampled(*rows.sampled)
        parts = Parts(moments=moments)
        for name in self._readouts:
            if (measure := READOUTS[name].measure) is not None:
                parts[name] = measure(values, rows)
        return parts


def _can_join(left: CallRows, right: CallRows, dim: int) -> bool:
    """Whether the rows of two calls can be joined: along the batch (0), or the heads (1)."""
    alike = packed_alike(left.stats, right.stats)
    kinds = [(rows.structure is None, rows.positions is None) for rows in (left, right)]
    if dim == 1:
        return alike and kinds[0][0] and kinds[1][0]
    if left.counted.shape[1:] != right.counted.shape[1:] or kinds[0] != kinds[1]:
        return False
    if alike:  # without unpacking their sums
        return True
    return all(
        (one.shape[1:], one.dtype, one.device) == (other.shape[1:], other.dtype, other.device)
        for one, other in zip(left.stats.state, right.stats.state, strict=True)
    )


def _join_rows(calls: Sequence[CallRows], dim: int) -> CallRows:
    """The rows of several calls as those of one: with the batches of all (0), or the heads (1)."""
    first = calls[0]
    if len(calls) == 1:
        return first
    positions = [
        call.positions.expand(len(call.counted), -1) for call in calls if call.positions is not None
    ]
    structures = [call.structure for call in calls if call.structure is not None]
    return first._replace(
        stats=joined([call.stats for call in calls], dim),
        counted=torch.cat([call.counted for call in calls], dim),
        structure=_join_structures(structures) if structures else None,
        positions=torch.cat(positions) if positions else None,
    )


def _join_structures(structures: list[StructureStatistics]) -> StructureStatistics:
    """Concatenate the structure of several calls along the batch."""
    octaves = max(structure.octaves.shape[-1] for structure in structures)
    heads = max(structure.even.shape[1] for structure in structures)
    columns = []
    for entry in fields(structures[0]):
        arrays = [getattr(structure, entry.name) for structure in structures]
        if entry.name in ("octaves", "even"):
            arrays = [pad(array, (0, octaves - array.shape[-1])) for array in arrays]
        if entry.name == "even":
            arrays = [array.expand(-1, heads, -1, -1, -1) for array in arrays]
        columns.append(torch.cat(arrays))
    return StructureStatistics(*columns)


#: Up to this many calls of one module in a forward pass are recorded separately; more are merged.
MAX_SEPARATE_CALLS = 64

#: Sources of calls that may be a loop over heads.
_LOOPED = ("softmax", "scaled_dot_product_attention")


def join_calls(
    records: Mapping[str, HeadSummary], heads_of: Callable[[str], int | None]
) -> dict[str, HeadSummary]:
    """Join the records of a module that calls attention in a loop; each is of one layer.

    A loop over heads becomes one layer with all heads; a loop of more than
    :data:`MAX_SEPARATE_CALLS` calls becomes one merged record.

    Args:
        records: by name of the call: ``name`` for a module's first call in a pass, ``name#1`` for
            its second, and so on.
        heads_of: returns the number of heads of a named module, None if the module has no such
            attribute.
    """
    by_base: dict[str, dict[int, str]] = {}
    for name in records:
        base, _, number = name.partition("#")
        by_base.setdefault(base, {})[int(number or 0)] = name
    result: dict[str, HeadSummary] = {}
    for base, names in by_base.items():
        result |= {name: records[name] for name in names.values()}
        if len(names) == 1:
            continue
        calls = [_with_layer(records[names[number]], module=base) for number in sorted(names)]
        complete = sorted(names) == list(range(len(names)))
        joined = _join_head_loop(calls, heads_of(base)) if complete else None
        alike = len({call.layers[0].numbers for call in calls}) == 1
        if joined is None and alike and len(calls) > MAX_SEPARATE_CALLS:
            joined = reduce(HeadSummary.merge, calls)
        if joined is not None:
            for name in names.values():
                del result[name]
            result[base] = joined
    return result


def _with_layer(record: HeadSummary, **changes: Any) -> HeadSummary:
    """A record of one layer with changed fields of that layer."""
    return replace(record, layers=(replace(record.layers[0], **changes),))


def _join_head_loop(calls: Sequence[HeadSummary], heads: int | None) -> HeadSummary | None:
    """Join the calls of a loop over heads, and batch items, into one layer; None if it is none."""
    layers = [call.layers[0] for call in calls]
    kinds = {(layer.heads, layer.chosen, layer.source) for layer in layers}
    width, chosen, source = kinds.pop()
    if kinds or chosen or source not in _LOOPED:
        return None
    if heads is None or heads % width or (len(calls) * width) % heads or heads == width:
        return None
    turns = heads // width  # each turn of the loop handles all heads of one item
    items = []
    for turn in range(turns):
        item = reduce(HeadSummary.merge, calls[turn::turns])
        numbers = tuple(range(turn * width, (turn + 1) * width))
        items.append(_with_layer(item, chosen=numbers))
    return reduce(HeadSummary.merge, items)
