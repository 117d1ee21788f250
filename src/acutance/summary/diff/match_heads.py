"""Which layers and heads two summaries share, and what only one of them has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from acutance.summary.head_summary import HeadSummary, Layer

__all__ = ["Matched", "Place", "match"]


@dataclass(frozen=True)
class Place:
    """A head that both summaries have.

    Attributes:
        layer: index of its layer in the first.
        other: index of its layer in the second.
        head: number in the layer.
        module: qualified name of the layer's module in the first.
    """

    layer: int
    other: int
    head: int
    module: str


@dataclass(frozen=True)
class Matched:
    """What two summaries share.

    Attributes:
        places: the shared heads, in the first's order.
        rows: for each side, the shared heads' rows in its arrays, (heads,) int64.
        only: for each side, a sentence for each layer, run of heads or metric that it alone has.
        by_order: True if layers were matched by their order, since no module has the same name.
    """

    places: tuple[Place, ...]
    rows: tuple[Tensor, Tensor]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    by_order: bool = False


def match(one: HeadSummary, other: HeadSummary) -> Matched:
    """Find the shared heads.

    Raises:
        ValueError: if there is none.
    """
    names = [{layer.module: index for index, layer in enumerate(s.layers)} for s in (one, other)]
    pairs = [(index, names[1][name]) for name, index in names[0].items() if name in names[1]]
    by_order = False
    if not pairs and _alike(one.layers, other.layers):
        pairs, by_order = [(index, index) for index in range(len(one.layers))], True
    starts = [_starts(summary.layers) for summary in (one, other)]
    places, rows = [], ([], [])  # type: tuple[list[Place], tuple[list[int], list[int]]]
    for left, right in pairs:
        theirs = {head: row for row, head in enumerate(other.layers[right].numbers)}
        for row, head in enumerate(one.layers[left].numbers):
            if head in theirs:
                places.append(Place(left, right, head, one.layers[left].module))
                rows[0].append(starts[0][left] + row)
                rows[1].append(starts[1][right] + theirs[head])
    if not places:
        raise ValueError(
            f"the two states share no head: one has {_named(one.layers)}, the other "
            f"{_named(other.layers)}"
        )
    return Matched(
        tuple(places),
        (torch.tensor(rows[0]), torch.tensor(rows[1])),
        (_only(one, other, dict(pairs)), _only(other, one, {b: a for a, b in pairs})),
        by_order,
    )


def _starts(layers: tuple[Layer, ...]) -> list[int]:
    """Row of each layer's first head."""
    starts, row = [], 0
    for layer in layers:
        starts.append(row)
        row += layer.heads
    return starts


def _alike(one: tuple[Layer, ...], other: tuple[Layer, ...]) -> bool:
    return [layer.numbers for layer in one] == [layer.numbers for layer in other]


def _only(one: HeadSummary, other: HeadSummary, pairs: dict[int, int]) -> tuple[str, ...]:
    """What the first has and the second has not."""
    found = []
    for index, layer in enumerate(one.layers):
        if index not in pairs:
            found.append(f"layer {index}, {layer.module} ({_heads(layer.numbers)})")
            continue
        theirs = set(other.layers[pairs[index]].numbers)
        if own := [head for head in layer.numbers if head not in theirs]:
            found.append(f"{_heads(own)} of layer {index}, {layer.module}")
    metrics = [name for name in one.metrics if name not in other.metrics]
    if metrics:
        found.append(f"the metric{'s' * (len(metrics) > 1)} {', '.join(metrics)}")
    return tuple(found)


def _heads(numbers: Sequence[int]) -> str:
    """Ascending numbers of heads in words.

    Example:
        >>> _heads([0, 1, 2, 5]), _heads([3])
        ('heads 0–2, 5', 'head 3')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"head{'s' * (len(numbers) != 1)} {', '.join(parts)}"


def _named(layers: tuple[Layer, ...]) -> str:
    names = [layer.module for layer in layers]
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} layers ({shown})" if names else "no layer"
