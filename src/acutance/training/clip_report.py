"""The report of one step of QKClip, by layer and head."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["ClipReport", "LayerClip"]


@dataclass(frozen=True)
class LayerClip:
    """The effect of one step on one layer.

    Attributes:
        module: qualified name of the module.
        max_logit: largest logit of each head since the last step, over all ranks.
        factor: γ of each head; 1 where nothing was done.
    """

    module: str
    max_logit: tuple[float, ...]
    factor: tuple[float, ...]


@dataclass(frozen=True)
class ClipReport:
    """The effect of one step of a :class:`acutance.training.QKClip`.

    Attributes:
        layers: the layers seen since the last step.
        not_finite: heads, as ``(module, head)``, whose largest logit was no finite number. They
            were left alone: no factor would mend them.
    """

    layers: tuple[LayerClip, ...]
    not_finite: tuple[tuple[str, int], ...] = ()

    @property
    def max_logit(self) -> float:
        """The largest logit of all heads; −inf without rows."""
        return max((value for layer in self.layers for value in layer.max_logit), default=-math.inf)

    @property
    def clipped(self) -> tuple[tuple[str, int], ...]:
        """Heads that were scaled, as ``(module, head)``."""
        return tuple(
            (layer.module, head)
            for layer in self.layers
            for head, factor in enumerate(layer.factor)
            if factor != 1.0
        )
