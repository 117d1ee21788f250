"""Window: the keys that a row reads, at which distance, where a text is longer than the model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from acutance.scaling.laws import arguments
from acutance.shapes import check_count, did_you_mean

__all__ = ["Window"]

SinkPositions = Literal["keep", "window"]
Far = Literal["drop", "clamp", "group"]


@dataclass(frozen=True)
class Window:
    r"""Which keys a row attends to: the newest and the first, and how it treats those between.

    A row at position i reads the newest ``size`` keys (distance i − j below ``size``) at their own
    distance, and the first ``sinks`` keys it can see. ``far`` decides about the rest:

    * ``"drop"``: they are not read (streaming attention);
    * ``"clamp"``: they are read at distance ``size`` (ReRoPE);
    * ``"group"``: they are read at position ⌊j / group⌋ from a query at position
      ⌊i / group⌋ + size − ⌊size / group⌋ (SelfExtend).

    Positions count from the first key that a row can see, so left padding changes nothing. It is no
    factor: :func:`acutance.apply` takes it as a law, alone or in a pair with a scaling.

    Attributes:
        size: how many keys a row reads at their own distance.
        sinks: how many of the first keys every row reads.
        sink_positions: at which distance a row reads sinks outside the window: ``"keep"``, their
            own; ``"window"``, as if they stood right behind the window, in their order, the last
            one at distance ``size``.
        far: how the other keys are treated: ``"drop"``, ``"clamp"`` or ``"group"``.
        group: how many positions share one, for ``far="group"``.
        beyond: rows with at most this many visible keys are not changed.

    Raises:
        TypeError: if a number is not an integer.
        ValueError: if a number is too small, or a word is unknown.

    Example:
        >>> Window(4096, sinks=4, sink_positions="window").to_dict()["sinks"]
        4
        >>> query, key = Window(4, far="group", group=2).far_positions(
        ...     torch.tensor([9, 10]), torch.tensor([0, 1, 2, 3])
        ... )
        >>> query, key
        (tensor([6, 7]), tensor([0, 0, 1, 1]))

    Source:
        Xiao et al. (2023), arXiv:2309.17453, for sinks and ``"drop"``; Su (2023),
        https://kexue.fm/archives/9708, for ``"clamp"``; Jin et al. (2024), arXiv:2401.01325, for
        ``"group"``.
    """

    name: ClassVar[str] = "window"
    size: int
    sinks: int = 0
    sink_positions: SinkPositions = "keep"
    far: Far = "drop"
    group: int = 4
    beyond: int = 0

    def __post_init__(self) -> None:
        for name, least in {"size": 1, "sinks": 0, "group": 1, "beyond": 0}.items():
            check_count(name, getattr(self, name), least)
        for name, words in {"sink_positions": SinkPositions, "far": Far}.items():
            value, known = getattr(self, name), get_args(words)
            if value not in known:
                hint = did_you_mean(value, known)
                raise ValueError(f"{name} must be {' or '.join(known)}, got {value!r}{hint}")

    @property
    def moves(self) -> bool:
        """Whether rows read some keys as if they were at a distance other than their own.

        That is so for ``far`` other than ``"drop"``, and for sinks moved behind the window.
        """
        return self.far != "drop" or (self.sinks > 0 and self.sink_positions == "window")

    @property
    def unchanged(self) -> int:
        """Largest number of visible keys for which a row reads them all, as without a window."""
        return max(self.size, self.beyond)

    def keys_read(self, n: Tensor) -> Tensor:
        """Number of keys that a row with n visible keys reads, shaped as ``n``.

        Example:
            >>> Window(16, sinks=4, beyond=32).keys_read(torch.tensor([10, 32, 64]))
            tensor([10, 32, 20])
        """
        if self.far != "drop":
            return n
        return torch.where(n > self.beyond, n.clamp(max=self.size + self.sinks), n)

    def far_positions(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Positions at which far keys, those outside the window and no sinks, are read.

        The distance between the returned positions is the distance at which the key is read.

        Args:
            query: positions of queries.
            key: positions of keys.

        Returns:
            The new positions of the queries and of the keys, shaped as the arguments.
        """
        if self.far == "clamp":
            return torch.full_like(query, self.size), torch.zeros_like(key)
        shift = self.size - self.size // self.group
        return query // self.group + shift, key // self.group

    def sink_query(self, query: Tensor) -> Tensor:
        """Positions of queries when they read sinks; the sinks keep theirs."""
        if self.sink_positions == "keep":
            return query
        return query.clamp(max=self.size + self.sinks - 1)

    def to_dict(self) -> dict[str, Any]:
        """Name and fields as JSON values; :meth:`from_dict` is the inverse."""
        return {"name": self.name} | asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Window:
        """What :meth:`to_dict` wrote; fields with a default may be missing.

        Raises:
            TypeError: if a field is of the wrong type.
            ValueError: if a field is unknown or out of range, or there is no size.
        """
        return cls(**arguments(cls, record))
