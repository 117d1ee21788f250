"""Rows of attention weights of the heads that a user names, exact, without a model's own map."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import most_heads
from acutance.capture.layer_choice import HeadChoice, LayerChoice
from acutance.capture.module_names import class_name
from acutance.probing.row_sampling import Sample, take_heads, take_rows
from acutance.probing.structure import kernel_call, token_text
from acutance.probing.tokens import InputPlaces, Tokens
from acutance.structure.blocks import blocks, exact
from acutance.summary.head_maps import MOST_SEQUENCES, HeadMap

__all__ = ["MOST_MAP_ROWS", "MapReader", "MapRows", "check_maps"]

#: Rows of a head in each sequence, at most.
MOST_MAP_ROWS = 64
#: Which rows: one, several, or a slice with an end.
MapRows: TypeAlias = "int | Sequence[int] | slice"
_NAMED = re.compile(r"layer (?P<layer>\S+) head (?P<head>\S+)|(?P<short>\S+)\.(?P<number>-?\d+)")


class _Asked(NamedTuple):
    """Rows of one name."""

    name: str
    layer: int | str
    head: int | str
    rows: frozenset[int]


class _Kept:
    """One head's rows of one sequence, as they come."""

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}  # by position, (keys,)
        self.ids = torch.empty(0, dtype=torch.int64)


class MapReader:
    """Keeps rows of named heads of one probe's calls.

    Args:
        model: what is probed.
        maps: as for :func:`acutance.probe`.
        tokenizer: has words for tokens, or None.
        tokens: follows the ids that the model's embedding gets.

    Raises:
        TypeError: if a name or rows are of another type.
        ValueError: if a name is no head of the model, or rows are negative or more than 64.
    """

    def __init__(
        self, model: torch.nn.Module, maps: Mapping[Any, MapRows], tokenizer: Any, tokens: Tokens
    ) -> None:
        self._asked = [
            (one, LayerChoice.from_model(one.layer, model, "maps"), HeadChoice(one.head))
            for one in check_maps(maps)
        ]
        if (most := most_heads(model)) is not None:
            for _, _, heads in self._asked:
                heads.check(most, class_name(model))
        self._tokenizer, self.tokens = tokenizer, tokens
        self._kept: dict[tuple[str, str, int, int], _Kept] = {}
        self._begun: dict[str, tuple[int, int]] = {}  # first sequence of the last call, and next
        self._lock = threading.Lock()

    def read(self, whole: AttentionCall, places: InputPlaces, real: Tensor | None) -> None:
        """Keep what a call has of the rows.

        Args:
            whole: of all heads and rows.
            places: where all its rows stand.
            real: boolean (B, L), rows that count; None if all do.
        """
        name = whole.module.partition("#")[0]
        asked = [(one, heads) for one, layers, heads in self._asked if name in layers]
        if not asked:
            return
        batch, total, queries, _ = whole.query.shape
        with self._lock:
            first, following = self._begun.get(whole.module, (0, 0))
            if places.begins or following - first != batch:
                first, following = following, following + batch
            self._begun[whole.module] = first, following
        if first >= MOST_SEQUENCES:
            return
        at = places.in_input
        at = torch.arange(queries)[None] if at is None else at.cpu()
        at = at.expand(batch, -1)
        ids = None
        if places.queries is not None:
            ids = self.tokens.keys(batch, queries, whole.key.shape[2], places.last)
        for one, choice in asked:
            wanted = torch.isin(at, torch.tensor(sorted(one.rows)))
            if real is not None:
                wanted &= real.cpu()
            heads = choice.of(total)
            if not heads:
                raise ValueError(
                    f"maps: {one.name!r} names a head that the layer does not have: it has {total}"
                )
            if bool(wanted.any()):
                weights, sample = _rows(whole, heads, wanted)
                self._keep(one.name, whole.module, heads, first, at, weights, sample, places, ids)

    def _keep(
        self,
        name: str,
        module: str,
        heads: list[int],
        first: int,
        at: Tensor,
        weights: Tensor,
        sample: Sample,
        places: InputPlaces,
        ids: Tensor | None,
    ) -> None:
        lost = torch.zeros(places.before)  # keys that a sliding cache has dropped
        for b in range(min(len(weights), MOST_SEQUENCES - first)):
            for h, head in enumerate(heads):
                with self._lock:
                    kept = self._kept.setdefault((name, module, head, first + b), _Kept())
                for i in sample.real[b].nonzero()[:, 0].tolist():
                    position = int(at[b, sample.positions[b, i]])
                    kept.rows[position] = torch.cat([lost, weights[b, h, i]])
                if ids is not None:
                    before = kept.ids[: places.before]
                    kept.ids = torch.cat([before, ids[b].cpu()])

    def unrecorded(self) -> list[str]:
        """The names of which no sequence has a row, a sentence each."""
        with self._lock:
            recorded = {name for (name, *_), one in self._kept.items() if one.rows}
        return [
            f"maps: no sequence has row {', '.join(map(str, sorted(one.rows)[:5]))} of {one.name!r}"
            for one, _, _ in self._asked
            if one.name not in recorded
        ]

    def maps(self) -> dict[str, list[HeadMap]]:
        """What was kept, by name as it was given; layers and heads as they ran, then sequences."""
        found: dict[str, list[HeadMap]] = {one.name: [] for one, _, _ in self._asked}
        with self._lock:
            kept = sorted(self._kept.items(), key=lambda item: item[0][3])
        for (name, module, head, sequence), one in kept:
            if not one.rows:  # a shorter sequence of a batch
                continue
            positions = sorted(one.rows)
            keys = max(map(len, one.rows.values()))
            weights = torch.zeros(len(positions), keys)
            for place, position in enumerate(positions):
                row = one.rows[position]
                weights[place, : len(row)] = row
            tokens: tuple[str, ...] = ()
            if self._tokenizer is not None and len(one.ids):
                ids = one.ids[:keys].tolist() + [-1] * (keys - len(one.ids))
                tokens = tuple(token_text(self._tokenizer, i) if i >= 0 else "" for i in ids)
            found[name].append(
                HeadMap(name, module, head, sequence, tuple(positions), weights, tokens)
            )
        return found


def check_maps(maps: Any) -> list[_Asked]:
    """The names and rows of maps, whatever the model.

    Raises:
        TypeError: if a name or rows are of another type.
        ValueError: if a name is none, or rows are none, negative or more than 64.
    """
    if not isinstance(maps, Mapping) or not maps:
        raise TypeError(f"maps must map heads to their rows, got {maps!r:.60}")
    asked = []
    for given, rows in maps.items():
        layer, head, name = _named(given)
        asked.append(_Asked(name, layer, head, _row_numbers(name, rows)))
    return asked


def _named(given: Any) -> tuple[int | str, int | str, str]:
    """Layer, head and name of a key: ``(5, 3)``, ``"layer 5 head 3"`` or ``"5.3"``."""
    if isinstance(given, tuple) and len(given) == 2 and type(given[1]) is int:
        return given[0], given[1], f"layer {given[0]} head {given[1]}"
    match = _NAMED.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        raise ValueError(
            f"maps must name heads as 'layer 5 head 3', '5.3' or (5, 3), got {given!r:.60}"
        )
    return match["layer"] or match["short"], match["head"] or match["number"], given


def _row_numbers(name: str, rows: Any) -> frozenset[int]:
    if isinstance(rows, slice):
        if rows.stop is None:
            raise ValueError(f"maps: the rows of {name!r} must have an end, got {rows}")
        rows = range(rows.start or 0, rows.stop, rows.step or 1)
    rows = [rows] if type(rows) is int else rows
    if not isinstance(rows, Sequence) or not all(type(row) is int for row in rows):
        raise TypeError(f"maps: the rows of {name!r} must be numbers or a slice, got {rows!r:.60}")
    if not rows or min(rows) < 0:
        raise ValueError(f"maps: the rows of {name!r} must be numbers from 0, got {rows!r:.60}")
    if len(set(rows)) > MOST_MAP_ROWS:
        raise ValueError(
            f"maps can record at most {MOST_MAP_ROWS} rows of a head in each "
            f"sequence, but {name!r} "
            f"names {len(set(rows))}"
        )
    return frozenset(rows)


def _rows(whole: AttentionCall, heads: list[int], wanted: Tensor) -> tuple[Tensor, Sample]:
    """Weights (B, heads, r, S) of some rows, in float32 on the CPU, and which rows these are."""
    most = int(wanted.sum(1).max())
    order = wanted.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
    real = wanted.gather(1, order)
    sample = Sample(order.to(whole.query.device), real, int(wanted.numel()), int(wanted.sum()))
    rows = kernel_call(take_rows(take_heads(whole, heads), sample))
    size = (*rows.query.shape[:3], rows.key.shape[2])
    weights = torch.zeros(size)
    with exact(rows) as exactly:
        for block in blocks(exactly):
            region = block.region
            e, Z = block.exponentials(block.largest())
            share = (e / torch.where(Z > 0, Z, 1.0).unsqueeze(-1)).float().cpu()
            keys = slice(block.start, block.start + share.shape[-1])
            weights[region.batch, region.heads, region.rows, keys] = share[:, :, 0]
    return weights, Sample(order, real, sample.total, sample.taken)
