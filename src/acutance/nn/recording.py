"""Storage of the statistics of a module's last forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, Literal, NamedTuple, get_args

from torch import nn

from acutance.rowstats import RowStatistics, WeightStatistics

#: Keep statistics without their graph, with it, or not at all.
Recording = Literal["detached", "graph", "off"]


class Recorded(nn.Module):
    """A module that stores the statistics of its last forward pass.

    They are not part of ``state_dict``, copies or pickles.

    Args:
        statistics: ``"detached"`` stores numbers; ``"graph"`` also keeps their gradients, for a
            loss on them, and with it the forward's graph until the next forward; ``"off"`` stores
            nothing and skips extra work. It can be changed at any time.

    Attributes:
        last_statistics: statistics of the last forward or step; None before the first, and if
            switched off.

    Raises:
        ValueError: if ``statistics`` is not one of the three.
    """

    last_statistics: RowStatistics | WeightStatistics | None

    def __init__(self, statistics: Recording) -> None:
        super().__init__()
        self.last_statistics = None
        self.statistics = statistics

    @property
    def statistics(self) -> Recording:
        """Which statistics are stored: ``"detached"``, ``"graph"`` or ``"off"``."""
        if _listeners and (listener := _listeners.get(id(self))) is not None:
            return listener.recording
        return self._statistics

    @statistics.setter
    def statistics(self, value: Recording) -> None:
        if value not in get_args(Recording):
            raise ValueError(
                f"statistics must be one of {', '.join(get_args(Recording))}, got {value!r}"
            )
        self._statistics: Recording = value
        if value == "off":
            self.last_statistics = None

    def _record(self, stats: RowStatistics | WeightStatistics | None) -> None:
        """Store the statistics of a forward pass as :attr:`statistics` says; tell the listener."""
        if stats is None or self.statistics == "off":
            self.last_statistics = None
        elif self.statistics == "graph":
            self.last_statistics = stats
        else:
            self.last_statistics = detached(stats)
        if _listeners and (listener := _listeners.get(id(self))) is not None:
            listener.hear(self, self.last_statistics)

    def __getstate__(self) -> dict[str, Any]:
        # a tensor with a graph can be neither copied nor pickled
        return {**self.__dict__, "last_statistics": None}


class _Listener(NamedTuple):
    """How a listener wants statistics recorded, and its callback."""

    recording: Recording
    hear: Callable[[Recorded, RowStatistics | WeightStatistics | None], None]


#: By a module's id, who hears what it records. Not on the module, where a copy would have it too.
_listeners: dict[int, _Listener] = {}


@contextmanager
def listen(
    modules: Iterable[Recorded],
    recording: Recording,
    hear: Callable[[Recorded, RowStatistics | WeightStatistics | None], None],
) -> Iterator[None]:
    """Context that calls a function with what each of these modules records; contexts nest.

    Args:
        modules: the recording modules.
        recording: what they store meanwhile, overriding their own setting.
        hear: called with the module and its new ``last_statistics``.

    Example:
        >>> import torch
        >>> from acutance.nn import MultiheadAttention
        >>> layer, heard = MultiheadAttention(8, 2, statistics="off"), []
        >>> with listen([layer], "detached", lambda module, stats: heard.append(stats)):
        ...     _ = layer(*torch.randn(3, 1, 5, 8))
        >>> len(heard), layer.statistics
        (1, 'off')
    """
    meant = {id(module): module for module in modules}  # holds them: an id is theirs alone
    before = {number: _listeners[number] for number in meant if number in _listeners}
    _listeners.update(dict.fromkeys(meant, _Listener(recording, hear)))
    try:
        yield
    finally:
        for number in meant:
            _listeners.pop(number, None)
        _listeners.update(before)
        for module in meant.values():
            if module.statistics == "off":
                module.last_statistics = None


def detached(stats: RowStatistics | WeightStatistics) -> RowStatistics | WeightStatistics:
    """The statistics, detached from the autograd graph."""
    parts = {entry.name: getattr(stats, entry.name) for entry in fields(stats)}
    for name, part in parts.items():
        if isinstance(part, tuple):
            parts[name] = type(part)(*(tensor.detach() for tensor in part))
    return replace(stats, **parts)
