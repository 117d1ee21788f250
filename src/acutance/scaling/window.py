r"""Which keys a row reads: a window over them, and how many are visible.

:func:`visible_keys` counts without forming the L×S mask. Position alone is arithmetic; key padding
is a difference of two prefix sums; documents are two searches in the keys sorted by document. Only
a mask that is itself L×S is read, block by block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from acutance.masks import Masking, Region, shows
from acutance.scaling.laws import arguments
from acutance.shapes import check_count, did_you_mean

__all__ = [
    "Window",
    "visible_keys",
]


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


#: Elements of the mask that are in memory at a time, where there is a mask to read.
BLOCK_ELEMENTS = 1 << 20


def visible_keys(masking: Masking) -> Tensor:
    """Number of visible keys of each row, the n of every metric and scaling.

    Args:
        masking: all masks of a call, from :func:`acutance.masks.check_masking`.

    Returns:
        (B, Hq, L) where a mask differs from head to head, otherwise (B, 1, L); int64. 0 for a row
        that sees nothing. Never the padded length: a padded, packed or windowed row counts what it
        sees.

    Example:
        Three keys, the last one padding, under a causal mask:

        >>> padding = torch.tensor([[True, True, False]])
        >>> visible_keys(Masking(1, 1, 1, 3, 3, key_mask=padding, causal=True))
        tensor([[[1, 2, 2]]])
    """
    masks = [
        tensor for tensor in (masking.boolean, *masking.additive) if isinstance(tensor, Tensor)
    ]
    if any(mask.shape[3] != 1 for mask in masks):
        return _read(masking, masks)
    seen = _seen_keys(masking, masks)
    start, stop = _reach(masking)
    if masking.query_documents is not None and masking.key_documents is not None:
        return _in_documents(masking, seen, start, stop)
    if seen is None:
        count = (stop - start).clamp(min=0)
        return count.expand(masking.batch, 1, masking.queries).clone()
    before = torch.nn.functional.pad(seen.to(torch.int64).cumsum(-1), (1, 0))
    count = before[..., torch.maximum(start, stop)] - before[..., start]
    return count.expand(masking.batch, -1, -1).clone()


def _reach(masking: Masking) -> tuple[Tensor, Tensor]:
    """The range of keys that position alone allows each row: first, and one past the last, (L,)."""
    position = torch.arange(masking.queries, device=masking.device) + masking.offset
    start = torch.zeros_like(position)
    stop = torch.full_like(position, masking.keys)
    if masking.window is not None:
        start = (position - masking.window + 1).clamp(min=0, max=masking.keys)
        stop = torch.minimum(stop, position + masking.window)
    if masking.causal:
        stop = torch.minimum(stop, position + 1)
    return start, stop.clamp(min=0)


def _seen_keys(masking: Masking, masks: list[Tensor]) -> Tensor | None:
    """Keys that masks without a row dimension allow, (B or 1, Hq or 1, S); None for all."""
    seen = None
    if masking.key_mask is not None:
        seen = masking.key_mask[:, None]
    for mask in masks:
        part = shows(mask).squeeze(3)
        if part.shape[1] * part.shape[2] == 1:
            part = part.squeeze(2)
        else:
            part = part.expand(-1, masking.heads, masking.group, -1).flatten(1, 2)
        part = part.expand(-1, -1, masking.keys)
        seen = part if seen is None else seen & part
    return seen


def _in_documents(masking: Masking, seen: Tensor | None, start: Tensor, stop: Tensor) -> Tensor:
    """Number of allowed keys in each row's own document.

    Keys are sorted by (document, column), and the rank of a document's first key stands for the
    document, so that one number orders both.
    """
    assert masking.query_documents is not None
    assert masking.key_documents is not None
    B, S = masking.batch, masking.keys
    keys = masking.key_documents.expand(B, -1).to(torch.int64).contiguous()
    rows = masking.query_documents.expand(B, -1).to(torch.int64).contiguous()
    ids, order = keys.sort(dim=-1, stable=True)
    code = torch.searchsorted(ids, ids) * (S + 1) + order
    first = torch.searchsorted(ids, rows)
    present = torch.searchsorted(ids, rows, right=True) > first
    low = torch.searchsorted(code, first * (S + 1) + start)
    high = torch.searchsorted(code, first * (S + 1) + torch.maximum(start, stop))
    if seen is None:
        count = (high - low)[:, None]
    else:
        seen = seen.expand(B, -1, -1)
        heads = seen.shape[1]
        sorted_seen = seen.gather(-1, order[:, None].expand(-1, heads, -1)).to(torch.int64)
        before = torch.nn.functional.pad(sorted_seen.cumsum(-1), (1, 0))
        low, high = (edge[:, None].expand(-1, heads, -1) for edge in (low, high))
        count = before.gather(-1, high) - before.gather(-1, low)
    return torch.where(present[:, None], count, 0)


def _read(masking: Masking, masks: list[Tensor]) -> Tensor:
    """Count the keys of a mask that differs by row, block by block."""
    by_head = any(mask.shape[1] * mask.shape[2] != 1 for mask in masks)
    heads = masking.heads * masking.group if by_head else 1
    result = torch.zeros(
        masking.batch, heads, masking.queries, dtype=torch.int64, device=masking.device
    )
    step = max(1, BLOCK_ELEMENTS // max(1, heads * masking.keys))
    width = max(1, BLOCK_ELEMENTS // max(1, heads))
    for b in range(masking.batch):
        for i in range(0, masking.queries, step):
            rows = slice(i, min(i + step, masking.queries))
            region = Region(slice(b, b + 1), slice(0, masking.heads), rows)
            size = (1, masking.heads, masking.group) if by_head else (1, 1, 1)
            for tile in masking.tiles(region, width):
                count: Tensor | int = tile.width
                if tile.hidden is not None:
                    count = tile.hidden.visible(tile.width, torch.int64)
                    length = rows.stop - rows.start
                    count = count.expand(*size, length).reshape(heads, length)
                result[b, :, rows] += count
    return result
