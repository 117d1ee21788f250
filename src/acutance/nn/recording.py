"""What every module here keeps of its last forward: the statistics of its rows."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal, get_args

from torch import nn

from acutance.rowstats import RowStatistics, WeightStatistics

__all__ = ["Recorded", "Recording"]

#: Keep statistics without their graph, with it, or not at all.
Recording = Literal["detached", "graph", "off"]


class Recorded(nn.Module):
    """A module that keeps the statistics of its last forward.

    Statistics are in no ``state_dict``, and a copy or a pickle of the module has none.

    Args:
        statistics: ``"detached"`` keeps numbers; ``"graph"`` keeps their gradients too, for a loss
            on them, and with it the forward's graph until the next forward; ``"off"`` keeps, and
            where that costs something computes, nothing. It may be set at any time.

    Attributes:
        last_statistics: of the last forward or step; None before the first, and when switched off.

    Raises:
        ValueError: if ``statistics`` is none of the three.
    """

    last_statistics: RowStatistics | WeightStatistics | None

    def __init__(self, statistics: Recording) -> None:
        super().__init__()
        self.last_statistics = None
        self.statistics = statistics

    @property
    def statistics(self) -> Recording:
        """What is kept: ``"detached"``, ``"graph"`` or ``"off"``."""
        return self._statistics

    @statistics.setter
    def statistics(self, value: Recording) -> None:
        if value not in get_args(Recording):
            raise ValueError(
                f"statistics is one of {', '.join(get_args(Recording))}, got {value!r}"
            )
        self._statistics: Recording = value
        if value == "off":
            self.last_statistics = None

    def _record(self, stats: RowStatistics | WeightStatistics | None) -> None:
        if stats is None or self.statistics == "off":
            self.last_statistics = None
        elif self.statistics == "graph":
            self.last_statistics = stats
        else:
            self.last_statistics = detached(stats)

    def __getstate__(self) -> dict[str, Any]:
        # a tensor with a graph can be neither copied nor pickled
        return {**self.__dict__, "last_statistics": None}


def detached(stats: RowStatistics | WeightStatistics) -> RowStatistics | WeightStatistics:
    """The same numbers without their graph."""
    parts = {entry.name: _cut(getattr(stats, entry.name)) for entry in fields(stats)}
    return replace(stats, **parts)


def _cut(part: Any) -> Any:
    """A record of tensors without their graph; anything else as it is."""
    if not isinstance(part, tuple):
        return part
    return type(part)(*(tensor.detach() for tensor in part))
