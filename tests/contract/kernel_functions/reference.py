"""Attention as a library's documentation says it, in float64, one row at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: Entropies of the rows of each head that were computed since :func:`recording` began.
_rows: list[list[list[float]]] = []


@contextmanager
def recording() -> Iterator[list[list[float]]]:
    """Context that gives, for each head, the entropies of the rows that see a key."""
    _rows.append([])
    try:
        yield _rows[-1]
    finally:
        _rows.pop()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sees: Callable[[int, int], bool],
    *,
    softcap: float = 0.0,
    bias: Callable[[int, int, int], float] = lambda head, row, key: 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence: query (L, Hq, E), key and value (S, H, E), output (L, Hq, Ev)."""
    dtype = query.dtype if query.dtype.itemsize > 1 else torch.float32
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    output = query.new_zeros(*query.shape[:2], value.shape[-1])
    for head in range(query.shape[1]):
        mine = head // group
        for row in range(len(query)):
            seen = [place for place in range(len(key)) if sees(row, place)]
            if not seen:
                continue
            scores = scale * (key[seen, mine] @ query[row, head])
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores + torch.tensor([bias(head, row, place) for place in seen]).double()
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double().reshape(1)])
            weights = torch.softmax(scores, 0)
            output[row, head] = weights[: len(seen)] @ value[seen, mine]
            for record in _rows:
                while len(record) <= head:
                    record.append([])
                record[head].append(float(-(weights * torch.log(weights)).sum()))
    return output.to(dtype)


def window(
    queries: int,
    keys: int,
    causal: bool,
    size: tuple[int | None, int | None],
    *,
    at_end: bool = True,
) -> Callable[[int, int], bool]:
    """Whether a row sees a key: causality and a window, aligned at the last key or the first."""
    shift = keys - queries if at_end else 0
    left, right = (None if side is None or side < 0 else side for side in size)
    right = 0 if causal else right

    def sees(row: int, place: int) -> bool:
        row += shift
        return (left is None or place >= row - left) and (right is None or place <= row + right)

    return sees


def sequences(cumulative: Tensor, used: Tensor | None = None) -> list[slice]:
    """The slices of packed sequences."""
    starts = cumulative.tolist()
    if used is None:
        return [slice(a, b) for a, b in itertools.pairwise(starts)]
    return [slice(a, a + n) for a, n in zip(starts, used.tolist(), strict=False)]
