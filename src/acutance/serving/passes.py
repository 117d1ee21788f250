"""What the reader records of a forward pass, and of the runs that wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from acutance.serving.runs import Choice

__all__ = ["Pass", "Recorded", "Seen"]


class Seen(NamedTuple):
    """The recorded rows of one layer in one forward pass.

    Attributes:
        layer: vLLM's layer.
        query: (rows, Hq, E).
        output: (rows, Hq, Ev), which the layer has computed; None if it is not compared.
        cache: its paged cache.
        metadata: where the sequences' keys are.
    """

    layer: Any
    query: Tensor
    output: Tensor | None
    cache: Tensor
    metadata: Any


@dataclass(frozen=True)
class Pass:
    """A forward pass some of whose rows are read.

    Attributes:
        choice: its runs.
        index: (rows,), the recorded rows.
        tokens: number of rows of the pass.
        compared: whether outputs are recorded, too.
        seen: its layers by name.
    """

    choice: Choice
    index: Tensor
    tokens: int
    compared: bool
    seen: dict[str, Seen]


class Recorded(NamedTuple):
    """What is recorded of a run in layers of the same kind.

    Attributes:
        layers: vLLM's layers.
        caches: their paged caches.
        blocks: the sequence's blocks in them, in order.
        queries: (layers, rows, Hq, E) of each pass.
        outputs: (layers, rows, Hq, Ev) of each pass whose outputs are compared.
    """

    layers: list[Any]
    caches: list[Tensor]
    blocks: Tensor
    queries: list[Tensor]
    outputs: list[Tensor]
