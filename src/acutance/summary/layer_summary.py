"""LayerSummary: the statistics of one layer, and how those of several calls merge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from acutance.summary.cells import Parts
from acutance.summary.layer import Layer


class LayerSummary(NamedTuple):
    """The statistics of one layer.

    Attributes:
        layer: its name, heads and counts.
        parts: the moments of its metrics, ``"moments"``, and readouts by name.
    """

    layer: Layer
    parts: Parts

    def merge(self, other: LayerSummary) -> LayerSummary:
        """The statistics of the rows of both, or of all heads if they have none in common.

        Raises:
            ValueError: if only some of their heads are the same.
        """
        numbers = self.layer.numbers + other.layer.numbers
        if set(self.layer.numbers).isdisjoint(other.layer.numbers):
            order = sorted(range(len(numbers)), key=numbers.__getitem__)
            parts = Parts.join([self.parts, other.parts]).select(order)
            return LayerSummary(self.layer.join_heads(other.layer), parts)
        return LayerSummary(self.layer.merge(other.layer), self.parts.merge(other.parts))

    def named(self, module: str) -> LayerSummary:
        """A copy with another name of the layer."""
        return self._replace(layer=replace(self.layer, module=module))


def merged_layers(layers: Iterable[LayerSummary]) -> list[LayerSummary]:
    """Merge the layers of the same name, in the order of first mention."""
    by_name: dict[str, LayerSummary] = {}
    for layer in layers:
        name = layer.layer.module
        by_name[name] = by_name[name].merge(layer) if name in by_name else layer
    return list(by_name.values())
