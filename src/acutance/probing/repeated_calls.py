"""Calls of one module in one pass: heads that were computed one after the other, and long loops.

A second call of a module has a layer of its own, ``#1``. Where calls take some of a layer's heads
each, as sliced attention and loops over heads do, they are one layer; where there are many, as in
loops over time, they are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from acutance.summary.layer import Layer
from acutance.summary.moments import Moments
from acutance.summary.optional_parts import OptionalParts

__all__ = ["MOST_CALLS", "joined"]

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
