"""Which keys a row sees, and what is added to its scores.

One :class:`Masking` holds every mask of a call: the explicit mask, key padding, documents, the
causal band, the window and the additive biases. Kernels never see those apart; they ask for one
tile at a time and get back the columns to hide, the numbers to add, and how many keys each row can
see there. :func:`check_masking` makes it, after every mask is checked against queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypedDict

import torch
from torch import Tensor

from acutance.compiling import traceable_property
from acutance.shapes import FLOATS, MOST, check_count, check_tensor, describe

CPU = torch.device("cpu")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
#: An additive mask value at or below this hides its key (see :func:`hides`): −1e9 as the coarsest
#: dtype that holds it, bfloat16, rounds it, so that a mask hides the same keys in every dtype.
ADDITIVE_MASK_LIMIT = -998_244_352.0
_SHALLOW = -1e4  # the least of the numbers that models hide keys with


def hides(additive: Tensor) -> Tensor:
    """Boolean tensor, True where an additive mask hides its key.

    All parts of the library use this rule. An entry hides its key if it is −inf, or so low that no
    bias would be: at or below −1e9 (precisely −998,244,352, which is −1e9 in bfloat16), in float16
    at or below −32,752, half its most negative value. −1e4 hides nothing. Each mask is judged by
    itself, in its own dtype, before anything is added to it.

    Example:
        >>> hides(torch.tensor([0.0, -5.0, -1e9, -torch.inf, torch.finfo(torch.float32).min]))
        tensor([False, False,  True,  True,  True])
        >>> hides(torch.tensor([-1e4, -1e9], dtype=torch.bfloat16))
        tensor([False,  True])
    """
    return additive <= mask_limit(additive.dtype)


def shows(mask: Tensor) -> Tensor:
    """Boolean tensor, True where a boolean or additive mask leaves its key visible.

    Example:
        >>> shows(torch.tensor([0.0, -1e9])), shows(torch.tensor([True, False]))
        (tensor([ True, False]), tensor([ True, False]))
    """
    if mask.dtype == torch.bool:
        return mask
    return torch.logical_not(mask <= mask_limit(mask.dtype))


def mask_limit(dtype: torch.dtype) -> float:
    """The additive mask value at or below which a key is hidden (:func:`hides`)."""
    return max(ADDITIVE_MASK_LIMIT, torch.finfo(dtype).min / 2)


def hidden_scores(scores: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Where an additive mask hides keys, read from scores that it was already added to.

    A score counts as hidden at or below 0.99 times the least value that hides a key (−1e9, or close
    to the minimum of narrow dtypes), since a positive score lifts the sum a little above that.

    Args:
        scores: of any shape.
        dtype: that of the mask; None: that of the scores.

    Returns:
        Boolean tensor of the shape of ``scores``.

    Example:
        >>> hidden_scores(torch.tensor([-1e9 + 640.0, -1e9, -1e4, torch.finfo(torch.float32).min]))
        tensor([ True,  True, False,  True])
    """
    return scores <= 0.99 * mask_limit(scores.dtype if dtype is None else dtype)


def shallow_mask(added: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor | None:
    """Where keys seem hidden by a number that does not count as hiding, such as −1e4.

    A row then has entries about there and none halfway, as ALiBi would have, and some row also has
    others: one that is low as a whole hides nothing.

    Args:
        added: what is added to the products, of any shape.
        dim: of the keys.
        dtype: as for :func:`hidden_scores`.

    Returns:
        Boolean tensor of the shape of ``added``; None if it is nowhere.

    Example:
        >>> shallow_mask(torch.tensor([[0.0, -1e4, -1e4], [0.0, -torch.inf, -1e9]]))
        tensor([[False,  True,  True],
                [False, False, False]])
        >>> shallow_mask(-20000 * torch.rand(2, 999)) is None
        True
    """
    low = added <= 0.99 * _SHALLOW
    if not bool(low.any()):
        return None
    low &= torch.logical_not(hidden_scores(added, dtype))
    between = (added <= 0.5 * _SHALLOW) & (added > 0.99 * _SHALLOW)
    low &= torch.logical_not(between.any(dim, keepdim=True))
    return low if bool((low.any(dim) & torch.logical_not(low.all(dim))).any()) else None


@dataclass(frozen=True)
class Region:
    """A block of query rows: slices of batches, key heads and queries."""

    batch: slice
    heads: slice
    rows: slice


@dataclass(frozen=True)
class Band:
    """The visible diagonals of a block: lowest ≤ column − row ≤ highest; None is no bound."""

    lowest: int | None
    highest: int | None

    def blank(self, block: Tensor) -> None:
        """Set ``block`` (..., rows, columns) to 0 outside the band, in place."""
        if self.highest is not None:
            block.tril_(self.highest)
        if self.lowest is not None:
            block.triu_(self.lowest)

    def outside(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Boolean (rows, columns), True outside the band."""
        step = torch.arange(columns, device=device) - torch.arange(rows, device=device)[:, None]
        hidden = torch.zeros_like(step, dtype=torch.bool)
        if self.highest is not None:
            hidden |= step > self.highest
        if self.lowest is not None:
            hidden |= step < self.lowest
        return hidden


@dataclass(frozen=True)
class Hidden:
    """The keys that are hidden in a tile: ``mask`` is True for them, from column ``start`` on.

    If they depend on position alone, ``band`` is set, and hiding costs a tenth of a masked fill.
    """

    start: int
    stop: int
    mask: Tensor
    band: Band | None = None
    made: dict[tuple[torch.dtype, float | None], Tensor] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Number of columns of the tile from the first to the last that may have hidden keys."""
        return self.stop - self.start

    def visible(self, width: int, dtype: torch.dtype) -> Tensor:
        """Number of visible keys of each row, (..., rows), in a tile of ``width`` keys."""
        if self.band is None:
            return width - self.mask.sum(-1).to(dtype)
        name = (dtype, None)
        if name not in self.made:
            self.made[name] = self.mask.sum(-1).to(dtype)
        return width - self.made[name]

    def blank(self, scores: Tensor) -> None:
        """Zero the hidden keys of (..., rows, keys) scores, in place, even if they are NaN."""
        block = scores[..., self.start : self.stop]
        if self.band is None:
            block.masked_fill_(self.mask, 0.0)
        else:
            self.band.blank(block)

    def bury(self, scores: Tensor, depth: float) -> None:
        """Set scores of hidden keys, which :meth:`blank` has set to 0, to ``depth``, in place."""
        block = scores[..., self.start : self.stop]
        if self._shared(block):
            block.add_(self._weights(scores, depth, 0.0))
        else:
            block.masked_fill_(self.mask, depth)

    def erase(self, values: Tensor) -> None:
        """Set finite ``values`` (..., rows, keys) to 0 at hidden keys, in place."""
        block = values[..., self.start : self.stop]
        if self._shared(block):
            block.mul_(self._weights(values, 0.0, 1.0))
        else:
            block.masked_fill_(self.mask, 0.0)

    def _shared(self, block: Tensor) -> bool:
        """Whether several heads or rows share the mask, so that a float copy of it is cheap."""
        return self.band is not None or 4 * self.mask.numel() <= block.numel()

    def _weights(self, like: Tensor, hidden: float, visible: float) -> Tensor:
        name = (like.dtype, hidden)
        if name not in self.made:
            base = torch.full(self.mask.shape, visible, dtype=like.dtype, device=like.device)
            self.made[name] = base.masked_fill_(self.mask, hidden)
        return self.made[name]


@dataclass(frozen=True)
class Tile:
    """Keys ``start`` to ``stop`` of a region: the biases to add and the keys to hide there.

    Tensors have five dimensions, (batch, key heads, group, queries, keys), each of full size or 1.
    """

    start: int
    stop: int
    hidden: Hidden | None
    biases: tuple[Tensor, ...]
    alibi: tuple[Tensor, Tensor] | None

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.stop - self.start

    def first(self) -> tuple[Tensor, Tensor] | None:
        """Column of each row's first visible key, and whether it has one.

        None if every row sees the tile's column 0.
        """
        if self.hidden is None or self.hidden.start > 0:
            return None
        seen = torch.logical_not(self.hidden.mask)
        inside = seen.any(-1)
        column = seen.to(torch.uint8).argmax(-1)
        if self.hidden.stop < self.width:
            return torch.where(inside, column, self.hidden.stop), torch.ones_like(inside)
        return column, inside


@dataclass(frozen=True)
class Masking:
    """All masks of one call, already validated and broadcastable.

    Attributes:
        batch, heads, group, queries, keys: sizes; ``heads`` counts key heads, ``group`` the query
            heads that share each.
        attn_mask: boolean (True takes part) or additive, broadcastable to (B, Hq, L, S).
        bias: additive, broadcastable to (B, Hq, L, S).
        key_mask: boolean (B, S), True where the key takes part.
        query_documents, key_documents: integer ids (B or 1, L) and (B or 1, S); a row sees its own.
        alibi_slopes: (Hq,); adds −slope · |position − key|.
        causal: whether key j is visible only where j ≤ position.
        offset: position of query 0 among the keys.
        window: a row sees keys with ``abs(position - j) < window``.
        device: where positions are computed.
    """

    batch: int
    heads: int
    group: int
    queries: int
    keys: int
    attn_mask: Tensor | None = None
    bias: Tensor | None = None
    key_mask: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    alibi_slopes: Tensor | None = None
    causal: bool = False
    offset: int = 0
    window: int | None = None
    device: torch.device = CPU

    @traceable_property
    def additive(self) -> tuple[Tensor, ...]:
        """The additive tensors, five-dimensional."""
        found = [self.bias]
        if self.attn_mask is not None and self.attn_mask.dtype != torch.bool:
            found.append(self.attn_mask)
        return tuple(self.spread(tensor) for tensor in found if tensor is not None)

    @traceable_property
    def boolean(self) -> Tensor | None:
        """The boolean mask, five-dimensional, True for visible keys."""
        if self.attn_mask is None or self.attn_mask.dtype != torch.bool:
            return None
        return self.spread(self.attn_mask)

    def spread(self, tensor: Tensor) -> Tensor:
        """View a tensor that broadcasts to (B, Hq, L, S) as (B, H, group, L, S); sizes 1 stay 1."""
        while tensor.dim() < 4:
            tensor = tensor.unsqueeze(0)
        if tensor.shape[1] == 1:
            return tensor.unsqueeze(2)
        split: Tensor = tensor.unflatten(1, (self.heads, self.group))
        return split

    def band(self, first_row: int, last_row: int) -> tuple[int, int, int, int]:
        """Columns any row sees and columns every row sees, by position alone.

        Returns:
            ``(start, stop, all_start, all_stop)``: rows ``first_row`` to ``last_row`` (inclusive)
            see nothing outside start:stop, and all of them see all of all_start:all_stop (may be
            empty).
        """
        low, high = first_row + self.offset, last_row + self.offset
        start, stop, all_start, all_stop = 0, self.keys, 0, self.keys
        if self.window is not None:
            start, all_start = low - self.window + 1, high - self.window + 1
            stop, all_stop = high + self.window, low + self.window
        if self.causal:
            stop, all_stop = min(stop, high + 1), min(all_stop, low + 1)
        clip = [min(max(edge, 0), self.keys) for edge in (start, stop, all_start, all_stop)]
        return clip[0], max(clip[0], clip[1]), clip[2], max(clip[2], clip[3])

    def tiles(self, region: Region, width: int) -> Iterator[Tile]:
        """The tiles of a region, left to right, at most ``width`` keys each."""
        edge, end, all_start, all_stop = self.band(region.rows.start, region.rows.stop - 1)
        while edge < end:
            start, stop = edge, min(edge + width, end)
            edge, columns, hidden = stop, slice(start, stop), None
            ragged = start < all_start or all_stop < stop  # some row does not see all its keys
            seen = self._data_mask(region, columns)
            if seen is not None:
                if ragged:
                    seen = seen & torch.logical_not(self._band(region, columns, start).mask)
                hidden = Hidden(0, stop - start, torch.logical_not(seen))
            elif ragged:
                # hide only the ragged ends: one end is the common, causal case
                first, last = start, stop
                if all_start <= start and all_stop > start:
                    first = all_stop
                elif all_stop >= stop and all_start < stop:
                    last = all_start
                hidden = self._band(region, slice(first, last), start)
            biases = tuple(_cut(tensor, region, columns) for tensor in self.additive)
            yield Tile(start, stop, hidden, biases, self._alibi(region, columns))

    def _data_mask(self, region: Region, columns: slice) -> Tensor | None:
        """True for keys of a tile that no mask tensor hides; None if there is no such mask."""
        parts = []
        if self.boolean is not None:
            parts.append(_cut(self.boolean, region, columns))
        parts.extend(shows(_cut(tensor, region, columns)) for tensor in self.additive)
        if self.key_mask is not None:
            parts.append(_cut(self.key_mask[:, None, None, None], region, columns))
        if self.query_documents is not None and self.key_documents is not None:
            rows = _cut(self.query_documents[:, None, None, :, None], region, columns)
            parts.append(rows == _cut(self.key_documents[:, None, None, None], region, columns))
        seen = None
        for part in parts:
            seen = part if seen is None else seen & part
        if seen is None:
            return None
        # a mask of the rows alone still hides every key: counts need them one by one
        return seen.expand(*seen.shape[:-1], columns.stop - columns.start)

    def _band(self, region: Region, columns: slice, start: int) -> Hidden:
        """The keys in ``columns`` that causality or window hides, for the tile from ``start``."""
        diagonal = region.rows.start + self.offset - columns.start
        place = (diagonal, region.rows.stop - region.rows.start, columns.stop - columns.start)
        masks = self._masks
        if place not in masks:
            highest = lowest = None
            if self.window is not None:
                lowest, highest = diagonal - self.window + 1, diagonal + self.window - 1
            if self.causal:
                highest = diagonal
            band = Band(lowest, highest)
            mask = band.outside(*place[1:], self.device)[None, None, None]
            masks[place] = Hidden(0, place[2], mask, band)
        made = masks[place]
        return replace(made, start=columns.start - start, stop=columns.stop - start)

    @traceable_property
    def _masks(self) -> dict[tuple[int, int, int], Hidden]:
        """Cache of the masks by position, which tiles along the diagonal share."""
        return {}

    def _alibi(self, region: Region, columns: slice) -> tuple[Tensor, Tensor] | None:
        if self.alibi_slopes is None:
            return None
        slopes = self.alibi_slopes.view(self.heads, self.group)[region.heads]
        rows = torch.arange(region.rows.start, region.rows.stop, device=self.device) + self.offset
        keys = torch.arange(columns.start, columns.stop, device=self.device)
        distance = (rows[:, None] - keys).abs()
        return slopes[None, :, :, None, None], distance[None, None, None]


def _cut(tensor: Tensor, region: Region, columns: slice) -> Tensor:
    """Cut a five-dimensional tensor to a region's columns, leaving sizes 1 alone."""
    cuts = (region.batch, region.heads, slice(None), region.rows, columns)
    sizes = zip(cuts, tensor.shape, strict=True)
    return tensor[tuple(cut if size > 1 else slice(None) for cut, size in sizes)]


# -- checks --------------------------------------------------------------------------------------


class MaskOptions(TypedDict, total=False):
    """Keywords of :func:`check_masking`, as :func:`acutance.attention` documents them."""

    query_offset: int
    window: int | None
    key_mask: Tensor | None
    document_ids: Tensor | tuple[Tensor, Tensor] | None
    cu_seqlens: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None


def _check_broadcasts(name: str, tensor: Tensor, query: Tensor, key: Tensor) -> None:
    """Check that a tensor broadcasts to (B, Hq, L, S) and is on the query's device."""
    target = (*query.shape[:3], key.shape[2])
    sizes = zip(reversed(tensor.shape), reversed(target), strict=False)
    if tensor.dim() > len(target) or not all(size in (1, full) for size, full in sizes):
        raise ValueError(
            f"{name} must broadcast to (B, Hq, L, S) = {target}, got {tuple(tensor.shape)} "
            f"({describe(query=query, key=key)})"
        )
    _check_device(name, tensor, query, key)


def _check_device(name: str, tensor: Tensor, query: Tensor, key: Tensor | None) -> None:
    if tensor.device != query.device:
        raise ValueError(
            f"{name} must be on the query's device {query.device}, got {tensor.device} ({name} "
            f"{tuple(tensor.shape)}, {describe(query=query, key=key)})"
        )


def _check_floats(name: str, tensor: Tensor) -> Tensor:
    tensor = check_tensor(name, tensor)
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
    return tensor


def _check_of_heads(name: str, tensor: Tensor, query: Tensor, key: Tensor | None) -> Tensor:
    """Check and return a floating-point tensor with a number for each query head."""
    tensor, heads = _check_floats(name, tensor), query.shape[1]
    if tuple(tensor.shape) != (heads,):
        raise ValueError(
            f"{name} must have shape (Hq,) = ({heads},), got {tuple(tensor.shape)} "
            f"({describe(query=query, key=key)})"
        )
    _check_device(name, tensor, query, key)
    return tensor


def _documents(
    documents: Tensor | tuple[Tensor, Tensor] | None,
    cu_seqlens: Tensor | None,
    query: Tensor,
    key: Tensor,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """Document ids of queries (B or 1, L) and keys (B or 1, S), from one of the two options."""
    batch, queries, keys = len(query), query.shape[2], key.shape[2]
    if cu_seqlens is not None:
        if documents is not None:
            raise ValueError("document_ids and cu_seqlens exclude each other: pass one of them")
        check_tensor("cu_seqlens", cu_seqlens)
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in INTEGERS or cu_seqlens.numel() < 2:
            raise ValueError(
                "cu_seqlens must be one row of at least two integers, 0 to the total length, got "
                f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
            )
        if not torch.compiler.is_compiling():  # reading a tensor's numbers would break the graph
            ends = int(cu_seqlens[0]), int(cu_seqlens[-1])
            if ends != (0, keys) or bool((cu_seqlens.diff() < 0).any()):
                raise ValueError(
                    f"cu_seqlens must rise from 0 to the source length S={keys}, got "
                    f"{cu_seqlens.tolist()[:8]}{' …' if cu_seqlens.numel() > 8 else ''}"
                )
        positions = torch.arange(keys, device=cu_seqlens.device)  # documents may be empty
        documents = torch.searchsorted(cu_seqlens.long(), positions, right=True)
    assert documents is not None
    if isinstance(documents, tuple):
        if len(documents) != 2:
            raise ValueError(
                "document_ids must be one tensor, or a pair of tensors (for queries, for keys), "
                f"got a tuple of {len(documents)}"
            )
        rows, columns = documents
    else:
        columns = documents
        check_tensor("document_ids", columns)
        given = columns.shape[-1] if columns.dim() else 0
        if not 0 <= offset <= given - queries:
            raise ValueError(
                "a single document_ids tensor requires that every query is also a key: "
                f"L={queries} from offset {offset} does not lie within {given} ids; pass a "
                "pair (for queries, for keys)"
            )
        rows = columns[..., offset : offset + queries]
    checked = []
    for name, ids, length in (("queries", rows, queries), ("keys", columns, keys)):
        if check_tensor(f"document_ids of {name}", ids).dtype not in INTEGERS:
            raise TypeError(f"document_ids must be integers, got {ids.dtype} for the {name}")
        if tuple(ids.shape) not in ((length,), (1, length), (batch, length)):
            raise ValueError(
                f"document_ids of {name} must have shape ({length},) or ({batch}, {length}), "
                f"got {tuple(ids.shape)}"
            )
        checked.append(ids if ids.dim() == 2 else ids.unsqueeze(0))
        _check_device(f"document_ids of {name}", checked[-1], query, key)
    return checked[0], checked[1]


def check_masking(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    query_offset: int = 0,
    window: int | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Masking:
    """Check every mask of a call against query and key, and combine them in one record.

    Raises:
        TypeError: if a mask's dtype is wrong.
        ValueError: if a mask's shape or value does not fit, or masks exclude each other.
    """
    batch, query_heads, queries, _ = query.shape
    heads, keys = key.shape[1], key.shape[2]
    if attn_mask is not None:
        attn_mask = check_tensor("attn_mask", attn_mask)
        dtype = attn_mask.dtype
        if is_causal:
            raise ValueError(
                f"attn_mask and is_causal=True exclude each other, as in PyTorch: put the causal "
                f"mask into attn_mask ({describe(attn_mask=attn_mask, query=query, key=key)})"
            )
        if dtype != torch.bool and dtype not in FLOATS:
            raise TypeError(
                "attn_mask must be boolean (True is visible) or floating-point (added to the "
                f"scores), got {dtype} ({describe(attn_mask=attn_mask, query=query, key=key)})"
            )
        _check_broadcasts("attn_mask", attn_mask, query, key)
    if bias is not None:
        bias = _check_floats("bias", bias)
        _check_broadcasts("bias", bias, query, key)
    if key_mask is not None:
        if check_tensor("key_mask", key_mask).dtype != torch.bool:
            raise TypeError(
                f"key_mask must be boolean, True for visible keys, got {key_mask.dtype}"
            )
        if tuple(key_mask.shape) != (batch, keys):
            raise ValueError(
                f"key_mask must have shape (B, S) = ({batch}, {keys}), got "
                f"{tuple(key_mask.shape)} ({describe(query=query, key=key)})"
            )
        _check_device("key_mask", key_mask, query, key)
    if window is not None:
        check_count("window", window, 1)
    check_count("query_offset", query_offset, -MOST)
    if alibi_slopes is not None:
        alibi_slopes = _check_of_heads("alibi_slopes", alibi_slopes, query, key)
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "alibi_slopes must be constants, got a tensor that requires a gradient: "
                "detach it, or pass learned slopes as a bias"
            )
    rows = columns = None
    if document_ids is not None or cu_seqlens is not None:
        rows, columns = _documents(document_ids, cu_seqlens, query, key, query_offset)
    return Masking(
        batch=batch,
        heads=heads,
        group=query_heads // heads if heads else 1,
        queries=queries,
        keys=keys,
        attn_mask=attn_mask,
        bias=bias,
        key_mask=key_mask,
        query_documents=rows,
        key_documents=columns,
        alibi_slopes=alibi_slopes,
        causal=is_causal,
        offset=query_offset,
        window=window,
        device=query.device,
    )


def check_sinks(sinks: Tensor, query: Tensor) -> Tensor:
    """Check and return learned sink logits, one for each query head.

    Raises:
        TypeError: if they are not a floating tensor.
        ValueError: if their shape is not (Hq,).
    """
    return _check_of_heads("sinks", sinks, query, None)
