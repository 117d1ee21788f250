"""Which keys the rows of a call see, and which of them its heads read through windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.masks import hides
from acutance.scaling import Window


@dataclass(frozen=True)
class VisibleKeys:
    """Which keys the rows of a call see without a window.

    Attributes:
        index: index of the key at the position of each row, (B or 1, H or 1, L).
        first: index of the first key that each row sees, same shape.
        count: number of keys that each row sees, same shape.
        seen: boolean mask broadcastable to (B, H, L, S); None if each row sees all keys from
            ``first`` on, up to ``index`` if causal.
        offset: without ``seen``, the index of row 0.
        causal: whether no row sees a key after its position.
        padded: whether some sequence's first visible key is not key 0.
        most: the largest count.
        least: the smallest positive count; 0 if no row sees a key.
    """

    index: Tensor
    first: Tensor
    count: Tensor
    seen: Tensor | None
    offset: int
    causal: bool
    padded: bool
    most: int
    least: int

    @classmethod
    def of(cls, call: AttentionCall) -> VisibleKeys:
        """The visible keys of a call.

        Example:
            >>> x = torch.zeros(1, 1, 3, 4)
            >>> VisibleKeys.of(AttentionCall("", "", x, x, x, is_causal=True)).count
            tensor([[[1, 2, 3]]])
        """
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return cls._of(call)

    @classmethod
    def _of(cls, call: AttentionCall) -> VisibleKeys:
        """The visible keys of a call, with gradients already off."""
        queries, keys = call.query.shape[2], call.key.shape[2]
        offset = call.query_offset if call.is_causal else keys - queries
        place = torch.arange(queries, device=call.query.device)[None, None]
        seen = _seen(call)
        if seen is None:
            index = place + offset
            if call.is_causal:
                count = (index + 1).clamp(min=0, max=keys)
            else:
                count = torch.full_like(index, keys)
            causal = call.is_causal or queries == 1
            return cls(index, 0 * index, count, None, offset, causal, False, *_extremes(count))
        count = seen.sum(-1)
        some = count > 0
        first = seen.to(torch.uint8).argmax(-1)
        last = keys - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
        index = place.expand_as(last) if queries == keys else last
        causal = bool((torch.logical_not(some) | (last <= index)).all())
        begins = torch.where(some, first, keys).amin((1, 2), keepdim=True)
        row = place + int((last - place)[some].max() if bool(some.any()) else 0)
        plain = (last == row) & (first == begins) & (count == last - first + 1)
        hidden = torch.logical_not(some) & (row < begins)
        offset = int(row[0, 0, 0]) if queries else 0
        if causal and adds_nothing(call) and bool((plain | hidden).all()):
            seen = None
            index, first = row.expand_as(first), begins.expand_as(first)
        padded = bool((begins > 0).any())
        return cls(index, first, count, seen, offset, causal, padded, *_extremes(count))

    def of_heads(self, heads: list[int]) -> VisibleKeys:
        """The same for the heads with these indices."""

        def of(tensor: Tensor) -> Tensor:
            return tensor[:, heads] if tensor.shape[1] > 1 else tensor

        return replace(
            self,
            index=of(self.index),
            first=of(self.first),
            count=of(self.count),
            seen=None if self.seen is None else of(self.seen),
        )

    def leading(self, most: int) -> int:
        """Number of rows, from row 0 on, before the first that sees more than ``most`` keys."""
        few = (self.count <= most).flatten(0, 1).all(0)
        return int(few.to(torch.int64).cumprod(0).sum())

    def from_row(self, start: int) -> VisibleKeys:
        """The same for the rows from ``start`` on, where position alone hides keys."""
        return replace(
            self,
            index=self.index[:, :, start:],
            first=self.first[:, :, start:],
            count=self.count[:, :, start:],
            offset=self.offset + start,
        )


def _extremes(count: Tensor) -> tuple[int, int]:
    """The largest and the smallest positive count; (0, 0) if no count is positive."""
    positive = count[count > 0]
    return (int(positive.max()), int(positive.min())) if positive.numel() else (0, 0)


def _seen(call: AttentionCall) -> Tensor | None:
    """Boolean (B or 1, H or 1, L, S), the keys that each row sees; None without any mask.

    A call whose keys only ``is_causal`` hides has no mask in this sense.
    """
    parts = []
    for mask in (call.attn_mask, call.bias):
        if mask is not None:
            while mask.dim() < 4:
                mask = mask.unsqueeze(0)
            parts.append(mask if mask.dtype == torch.bool else torch.logical_not(hides(mask)))
    if call.key_mask is not None:
        parts.append(call.key_mask[:, None, None])
    if call.cu_seqlens is not None:
        bounds = call.cu_seqlens[1:].contiguous()
        keys = torch.arange(call.key.shape[2], device=bounds.device)
        document = torch.searchsorted(bounds, keys, right=True)
        parts.append((document[:, None] == document)[None, None])
    if not parts:
        return None
    rows = torch.arange(call.query.shape[2], device=call.query.device)[:, None] + call.query_offset
    columns = torch.arange(call.key.shape[2], device=call.query.device)
    seen = rows >= columns if call.is_causal else torch.ones_like(rows >= columns)
    seen = seen[None, None]
    for part in parts:
        seen = seen & part
    return seen


def adds_nothing(call: AttentionCall) -> bool:
    """Whether the masks of a call only hide keys, and add no finite number to a score."""
    mask = call.attn_mask
    if call.bias is not None:
        return False
    if mask is None or mask.dtype == torch.bool:
        return True
    return bool((mask.masked_fill(hides(mask), 0.0) == 0).all())


def seen_through(windows: Sequence[Window | None], keys: VisibleKeys, total: int) -> Tensor:
    """Boolean mask of the keys that rows read through windows that move no keys.

    Args:
        windows: one for each head, or a single one for all heads; None reads every visible key.
        keys: the keys that rows see without windows.
        total: number of keys, S.

    Returns:
        (B or 1, H, L, S), or (B or 1, H or 1, L, S) for a single window.
    """
    column = torch.arange(total, device=keys.index.device)
    index, first = keys.index[..., None], keys.first[..., None]
    seen = keys.seen
    if seen is None:
        seen = (column >= first) & (column <= index if keys.causal else column >= 0)
    parts = []
    for window in windows:
        if window is None:
            parts.append(seen)
            continue
        near = (column > index - window.size) & (column < index + window.size)
        read = near | (column < first + window.sinks) | (keys.count[..., None] <= window.beyond)
        parts.append(seen & read)
    if len(parts) == 1:
        return parts[0]
    heads = [part[:, [head]] if part.shape[1] > 1 else part for head, part in enumerate(parts)]
    shape = torch.broadcast_shapes(*(part.shape for part in heads))
    return torch.cat([part.expand(shape) for part in heads], 1)
