"""HeadMap: rows of attention weights of one head over one sequence, and how files store them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from acutance.from_json import checked

#: Sequences of which a head's rows are kept, and weights that a file holds: 1 MiB.
MOST_SEQUENCES, MOST_STORED = 8, 1 << 18


@dataclass(frozen=True)
class HeadMap:
    """Rows of attention weights of one head over one sequence.

    Attributes:
        name: name under which the user requested the rows.
        module: name of the layer's module.
        head: number of the head in its layer.
        sequence: number of the sequence, in the order in which the layer processed them.
        positions: positions of the rows' queries in the input, ascending.
        weights: (rows, keys) float32 on the CPU; 0 for keys that a row does not see.
        tokens: text of the keys; empty without a tokenizer.
    """

    name: str
    module: str
    head: int
    sequence: int
    positions: tuple[int, ...]
    weights: Tensor
    tokens: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Everything but the weights, as JSON values."""
        record = {**vars(self), "positions": list(self.positions), "tokens": list(self.tokens)}
        del record["weights"]
        return record


def few_enough(maps: Sequence[HeadMap]) -> bool:
    """Whether these maps are small enough to be stored in files."""
    return sum(head_map.weights.numel() for head_map in maps) <= MOST_STORED


def maps_to_dict(maps: Sequence[HeadMap]) -> dict[str, Any]:
    """Maps as JSON values, or their number if they are too large."""
    if not maps:
        return {}
    if not few_enough(maps):
        return {"maps_left_out": len(maps)}
    return {
        "maps": [head_map.record() | {"weights": head_map.weights.tolist()} for head_map in maps]
    }


def merged_maps(first: Sequence[HeadMap], second: Sequence[HeadMap]) -> tuple[HeadMap, ...]:
    """Maps of two runs; the second's sequences are numbered on, and those above eight dropped.

    Rows of different sequences are not averaged.
    """
    after: dict[tuple[str, str, int], int] = {}
    for head_map in first:
        head = _head(head_map)
        after[head] = max(after.get(head, 0), head_map.sequence + 1)
    more = [
        replace(head_map, sequence=head_map.sequence + after.get(_head(head_map), 0))
        for head_map in second
    ]
    return (*first, *(head_map for head_map in more if head_map.sequence < MOST_SEQUENCES))


def _head(head_map: HeadMap) -> tuple[str, str, int]:
    """The requested head that a map is of."""
    return head_map.name, head_map.module, head_map.head


def checked_maps(records: Sequence[Any], arrays: Mapping[str, Tensor]) -> tuple[HeadMap, ...]:
    """Build maps from the records and arrays of a file, after checking them.

    Args:
        records: results of :meth:`HeadMap.record`.
        arrays: their weights, by index as text: ``"0"``, ``"1"``, ….

    Raises:
        ValueError: naming the first thing that does not fit.
    """
    if set(arrays) != {str(index) for index in range(len(records))}:
        raise ValueError(
            f"each map must have one array, got {len(records)} maps and {len(arrays)} arrays"
        )
    names = tuple(field.name for field in fields(HeadMap) if field.name != "weights")
    maps = []
    for index, record in enumerate(records):
        weights, place = arrays[str(index)], f"maps[{index}]"
        if not isinstance(record, dict) or set(record) != set(names):
            raise ValueError(f"{place} must be a JSON object with the fields {', '.join(names)}")
        head_map = checked(HeadMap, {**record, "weights": weights}, place)
        rows = len(head_map.positions)
        if weights.dtype != torch.float32 or weights.dim() != 2 or len(weights) != rows:
            raise ValueError(
                f"the weights of {place} must have shape ({rows}, keys) and dtype torch.float32, "
                f"got {tuple(weights.shape)} and {weights.dtype}"
            )
        if head_map.tokens and len(head_map.tokens) != weights.shape[1]:
            raise ValueError(
                f"'tokens' of {place} must have one token for each of {weights.shape[1]} keys, got "
                f"{len(head_map.tokens)}"
            )
        if not bool(((weights >= 0) & (weights <= 1 + 1e-3)).all()):
            raise ValueError(f"the weights of {place} must be between 0 and 1")
        maps.append(head_map)
    return tuple(maps)
