"""Exact rows of attention weights of named heads, computed without the model's full map."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import HeadChoice, LayerChoice
from acutance.probing.settings import ProbeSettings
from acutance.probing.structure import kernel_call, token_text
from acutance.probing.tokens import Reader, Sample, SelectedCall, take_heads, take_rows
from acutance.structure.statistics import blocks, exact
from acutance.summary.readouts.head_maps import MOST_SEQUENCES, HeadMap
from acutance.summary.readouts.moments import CallRows

#: Rows of a head in each sequence, at most.
MOST_MAP_ROWS = 64
_LAST_ROW = 2**63 - 1  # of int64
#: The user's name of a head, its module and number, and the number of a sequence.
_Place = tuple[str, str, int, int]
_HEAD_NAME = re.compile(
    r"layer (?P<layer>\S+) head (?P<head>\S+)|(?P<short>\S+)\.(?P<number>-?\d+)"
)


class _MapRequest(NamedTuple):
    """A head as the user named it, and the positions of the requested rows."""

    name: str
    layer: str
    head: str
    rows: frozenset[int]


class RecordedMaps(dict[str, list[HeadMap]]):
    """Recorded maps by the user's names for the heads; each head is found by any of its names.

    Example:
        >>> maps = RecordedMaps({"layer 29 head 8": []})
        >>> maps[29, 8], maps["29.8"]
        ([], [])
    """

    def __missing__(self, head_key: object) -> list[HeadMap]:
        try:
            head = _head_and_name(head_key)[0]
        except ValueError:  # no name of a head
            raise KeyError(head_key) from None
        for name, maps in self.items():
            if _head_and_name(name)[0] == head:
                return maps
        raise KeyError(head_key)


class MapReader(Reader):
    """Records rows of attention weights of the heads named in ``maps``.

    Raises:
        TypeError: if a head or its rows have the wrong type.
        ValueError: if the model has no such head, or rows are negative or more than 64.
    """

    option = "maps"
    needs_tokens = True

    def __init__(self, model: torch.nn.Module, settings: ProbeSettings, *others: Any) -> None:
        super().__init__(model, settings, *others)
        self._requests = []
        for request in check_maps(settings.maps):
            heads = HeadChoice(request.head)
            layers = LayerChoice.from_model(request.layer, model, "maps")
            heads.check(model)
            self._requests.append((request, layers, heads))
        #: by name, module, head and sequence: weights (keys,) by position, and the keys' token ids
        self._rows: dict[_Place, dict[int, Tensor]] = {}
        self._ids: dict[_Place, Tensor] = {}
        #: by module: number of the first sequence of its last call, and of the next call
        self._sequences: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def read(self, selected: SelectedCall, rows: CallRows) -> CallRows:
        """Record the requested rows that a call contains, of all its heads and rows."""
        whole, real = selected.whole, selected.rows.counted
        name = whole.module.partition("#")[0]
        requests = [(request, heads) for request, layers, heads in self._requests if name in layers]
        if not requests:
            return rows
        batch, total, queries, _ = whole.query.shape
        with self._lock:
            first, following = self._sequences.get(whole.module, (0, 0))
            if selected.begins or following - first != batch:
                first, following = following, following + batch
            self._sequences[whole.module] = first, following
        if first >= MOST_SEQUENCES:
            return rows
        positions, ids = torch.arange(queries)[None], None
        if selected.queries is not None:
            positions = selected.queries.cpu() + selected.before
            ids = self.tokens.keys(batch, queries, whole.key.shape[2], selected.last)
        positions = positions.expand(batch, -1)
        for request, choice in requests:
            wanted = torch.isin(positions, torch.tensor(sorted(request.rows)))
            if real is not None:
                wanted &= real.cpu()
            heads = choice.of(total)
            if not heads:
                raise ValueError(
                    f"maps: {request.name!r} names a head that the layer does not have: "
                    f"it has {total} heads"
                )
            if not bool(wanted.any()):
                continue
            weights, computed, known = _compute_rows(whole, heads, wanted)
            dropped = torch.zeros(selected.before)  # keys that a sliding cache has dropped
            for b in range(min(batch, MOST_SEQUENCES - first)):
                recorded = positions[b, computed[b, known[b]]].tolist()
                for h, head in enumerate(heads):
                    place = request.name, whole.module, head, first + b
                    with self._lock:
                        stored = self._rows.setdefault(place, {})
                    for position, row in zip(recorded, weights[b, h, known[b]], strict=True):
                        stored[position] = torch.cat([dropped, row])
                    if ids is not None:
                        earlier = self._ids.get(place, ids[b, :0].cpu())[: selected.before]
                        self._ids[place] = torch.cat([earlier, ids[b].cpu()])
        return rows

    def unrecorded(self) -> list[str]:
        """One sentence for each request of which no sequence had a row."""
        with self._lock:
            recorded = {name for (name, *_), rows in self._rows.items() if rows}
        lacking = [request for request, *_ in self._requests if request.name not in recorded]
        rows = [", ".join(map(str, sorted(request.rows)[:5])) for request in lacking]
        named = zip(rows, lacking, strict=True)
        return [f"maps: no sequence has row {row} of {request.name!r}" for row, request in named]

    def maps(self) -> RecordedMaps:
        """The recorded maps by the user's name for the head, ordered by sequence."""
        maps = RecordedMaps({request.name: [] for request, _, _ in self._requests})
        tokenizer = self.settings.tokenizer
        with self._lock:
            stored = sorted(self._rows.items(), key=lambda item: item[0][3])
        for place, rows in stored:
            if not rows:  # a shorter sequence of a batch
                continue
            positions = tuple(sorted(rows))
            weights = pad_sequence([rows[position] for position in positions], batch_first=True)
            tokens: tuple[str, ...] = ()
            if tokenizer is not None and place in self._ids:
                ids = self._ids[place][: weights.shape[1]].tolist()
                texts = [token_text(tokenizer, token) if token >= 0 else "" for token in ids]
                tokens = (*texts, *[""] * (weights.shape[1] - len(ids)))
            maps[place[0]].append(HeadMap(*place, positions, weights, tokens))
        return maps


def check_maps(maps: Any) -> list[_MapRequest]:
    """Parse the option ``maps``: heads and the rows requested of each.

    Raises:
        TypeError: if a head or its rows have the wrong type.
        ValueError: if a head's name is not understood, or rows are empty, negative or more than 64.
    """
    if not isinstance(maps, Mapping) or not maps:
        raise TypeError(f"maps must map heads to their rows, got {maps!r:.60}")
    named = ((*_head_and_name(head_key), rows) for head_key, rows in maps.items())
    return [_MapRequest(name, *head, _parse_rows(name, rows)) for head, name, rows in named]


def _head_and_name(head_key: Any) -> tuple[tuple[str, str], str]:
    """Layer and head of ``(5, 3)``, ``"layer 5 head 3"`` or ``"5.3"``, and the name to show."""
    if isinstance(head_key, tuple) and len(head_key) == 2 and type(head_key[1]) is int:
        layer, head = map(str, head_key)
        return (layer, head), f"layer {layer} head {head}"
    match = _HEAD_NAME.fullmatch(head_key) if isinstance(head_key, str) else None
    if match is None:
        raise ValueError(
            f"maps must name heads as 'layer 5 head 3', '5.3' or (5, 3), got {head_key!r:.60}"
        )
    return (match["layer"] or match["short"], match["head"] or match["number"]), head_key


def _parse_rows(name: str, rows: Any) -> frozenset[int]:
    """Row positions from a number, a sequence or a slice with an end; ``name`` is for messages."""
    if isinstance(rows, slice):
        if rows.stop is None:
            raise ValueError(f"maps: the rows of {name!r} must have an end, got {rows}")
        rows = range(rows.start or 0, rows.stop, rows.step or 1)
    rows = [rows] if type(rows) is int else rows
    if not isinstance(rows, Sequence) or not all(type(row) is int for row in rows):
        raise TypeError(f"maps: the rows of {name!r} must be integers or a slice, got {rows!r:.60}")
    if not rows or min(rows) < 0 or max(rows) > _LAST_ROW:
        raise ValueError(
            f"maps: the rows of {name!r} must be integers from 0 to {_LAST_ROW}, got {rows!r:.60}"
        )
    if len(set(rows)) > MOST_MAP_ROWS:
        raise ValueError(
            f"maps can record at most {MOST_MAP_ROWS} rows of a head in each sequence, but "
            f"{name!r} names {len(set(rows))}"
        )
    return frozenset(rows)


def _compute_rows(
    whole: AttentionCall, heads: list[int], selected: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (B, heads, r, S) of the selected rows, float32 on the CPU, and which rows they are.

    Args:
        whole: the call with all its heads and rows.
        heads: numbers of the query heads.
        selected: boolean (B, L), True on the rows to compute.

    Returns:
        The weights; the indices of their rows, (B, r); and where these are rows to compute, not
        padding, boolean (B, r).
    """
    sample = Sample.of(selected, selected.numel())
    here = replace(sample, positions=sample.positions.to(whole.query.device))
    rows = kernel_call(take_rows(take_heads(whole, heads), here))
    weights = torch.zeros((*rows.query.shape[:3], rows.key.shape[2]))
    with exact(rows) as exactly:
        for block in blocks(exactly):
            region = block.region
            e, Z = block.exponentials(block.largest())
            weights_block = (e / torch.where(Z > 0, Z, 1.0).unsqueeze(-1)).float().cpu()
            keys = slice(block.start, block.start + weights_block.shape[-1])
            weights[region.batch, region.heads, region.rows, keys] = weights_block[:, :, 0]
    return weights, sample.positions, sample.real
