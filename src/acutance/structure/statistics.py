"""Where each row's weight goes: StructureStatistics, computed in blocks of whole rows.

A block is some query rows of some heads against every key that they can see, so memory is bounded
by the block and independent of the size of the attention map.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from acutance.kernels import dispatch, native
from acutance.kernels.call import KernelCall, accumulate_dtype
from acutance.kernels.tiles import Buffers, Work, as_mask_shape, fold_rows, tile_scores
from acutance.masks import (
    INTEGERS,
    Masking,
    MaskOptions,
    Region,
    Tile,
    check_masking,
    check_sinks,
)
from acutance.rowstats import METRICS
from acutance.shapes import (
    cast_inputs,
    check_count,
    check_flags,
    check_inputs,
    check_number,
    check_softcap,
    check_tensor,
    describe,
    did_you_mean,
)
from acutance.structure.metrics import STRUCTURE

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Scores that are held, at most, to be sorted for ``critical_ratio``: 16 MiB in float32.
_MOST_SORTED = 1 << 22
_MOST_OCTAVES, _MOST_TOKEN = 64, 2**31


@dataclass(frozen=True)
class StructureStatistics:
    r"""Where the weight of each attention row lies.

    Every metric of :data:`STRUCTURE` is an attribute (B, Hq, L), in float32 or float64. It is NaN
    for rows that see no key of that kind: the first row of causal attention sees no previous key.

    Attributes:
        attention_distance: :math:`\sum_j p_j |i - j|`, in positions.
        mass_self: weight on the query's own position.
        mass_previous: weight on the position before it.
        mass_same: weight on other positions with the query's token; NaN without ``tokens``.
        mass_special: weight on special tokens; NaN without them.
        critical_ratio: β/Λ on the rows where it was requested, NaN elsewhere.
        octaves: (B, Hq, L, 2, K) weight by octave of distance, up to the query's position and after
            it: octave 0 is distance 0, octave k distances 2^(k−1) to 2^k − 1.
        even: (B, 1 or Hq, L, 2, K), the same if all visible keys had equal weight.
        peak: (B, Hq, L) int64, position of the largest weight relative to the query, −8 to 8; −128
            if none, or more than one equal to it, lies in that range.
    """

    attention_distance: Tensor
    mass_self: Tensor
    mass_previous: Tensor
    mass_same: Tensor
    mass_special: Tensor
    critical_ratio: Tensor
    octaves: Tensor
    even: Tensor
    peak: Tensor

    def __getitem__(self, name: str) -> Tensor:
        if name not in STRUCTURE:
            names = ", ".join(STRUCTURE)
            if name in METRICS:
                raise ValueError(f"{name!r} is one of METRICS, not of STRUCTURE: {names}")
            hint = did_you_mean(name, list(STRUCTURE), f": choose from {names}")
            raise ValueError(f"there is no structure metric named {name!r}{hint}")
        value: Tensor = getattr(self, name)
        return value


def octaves_of(distance: int) -> int:
    """Number of octaves needed for distances up to ``distance``.

    Example:
        >>> [octaves_of(distance) for distance in (0, 1, 2, 3, 4, 7, 8)]
        [1, 2, 3, 3, 4, 4, 5]
    """
    return distance.bit_length() + 1


def statistics(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    tokens: Tensor | None = None,
    special: Iterable[int] = (),
    positions: Tensor | None = None,
    critical_every: int = 1,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    **masks: Unpack[MaskOptions],
) -> StructureStatistics:
    r"""Where the weight of each row of softmax attention lies, in O(n) memory.

    With weights :math:`p_j` of a query at position i: the mean distance :math:`\sum_j p_j |i - j|`,
    the weight by octave of distance, and the weight on the row's own, previous, same and special
    tokens. The result is not differentiable.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        attn_mask: as in :func:`acutance.attention`, like every option not explained here.
        is_causal: row i sees keys j ≤ i + query_offset.
        scale: factor of the scores; None for 1/√E.
        enable_gqa: allow Hq to be a multiple of H.
        tokens: token ids of the keys, (S,) or (B, S), integers; negative ids match no other.
        special: ids of special tokens; needs ``tokens``.
        positions: index of the key at each query's position, (L,) or (B, L); by default from
            query_offset on.
        critical_every: sort the scores of every such row for ``critical_ratio``; 0 for none.
        softcap: bound of the scaled scores.
        sinks: (Hq,) learned logits in the normaliser; their weight is on no key.
        masks: ``query_offset``, ``window``, ``key_mask``, ``document_ids``, ``cu_seqlens``,
            ``bias`` and ``alibi_slopes``.

    Returns:
        The statistics, rows (B, Hq, L).

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if shapes or values do not fit.

    Example:
        Three keys alike: the last causal row is one position away from its weight on average.

        >>> import torch
        >>> zeros = torch.zeros(1, 1, 3, 4)
        >>> found = statistics(zeros, zeros, is_causal=True, tokens=torch.tensor([7, 8, 7]))
        >>> found.attention_distance
        tensor([[[0.0000, 0.5000, 1.0000]]])
        >>> found.mass_previous, found.mass_same
        (tensor([[[   nan, 0.5000, 0.3333]]]), tensor([[[   nan,    nan, 0.3333]]]))
        >>> found.octaves[0, 0, 2]  # behind: distances 0, 1, 2–3; ahead: none is visible
        tensor([[0.3333, 0.3333, 0.3333],
                [0.0000, 0.0000, 0.0000]])

    Source:
        Vig & Belinkov (2019), arXiv:1906.04284, for the distance; Clark et al. (2019),
        arXiv:1906.04341, for the weight on special, previous and next tokens.
    """
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    query, key, _ = check_inputs(query, key, None, enable_gqa)
    check_count("critical_every", critical_every, 0)
    masking = check_masking(query, key, attn_mask, is_causal, **masks)
    scale = query.shape[3] ** -0.5 if scale is None else check_number("scale", scale)
    softcap = check_softcap(softcap, query.dtype)
    sinks = None if sinks is None else check_sinks(sinks, query)
    call = KernelCall(query, key, None, masking, scale, softcap, sinks)
    if positions is None:
        start = masking.offset
        positions = torch.arange(start, start + query.shape[2], device=query.device)[None]
    else:
        positions = _ids("positions", positions, masking.batch, masking.queries, query)
    marked, marks = None, tuple(special)
    if tokens is not None:
        tokens = _ids("tokens", tokens, masking.batch, masking.keys, query)
        if marks:
            marked = torch.isin(tokens, torch.tensor(marks, device=tokens.device))
    elif marks:
        raise ValueError(
            f"special={special!r:.40} needs the token ids of the keys: pass tokens=..., got "
            "tokens=None"
        )
    query_tokens = None if tokens is None else tokens_at(tokens, positions)
    places = Places(positions, tokens, query_tokens, marked, critical_every)
    return observe_structure(call, places)


def _ids(name: str, value: Tensor, batch: int, length: int, like: Tensor) -> Tensor:
    """Check integers of each position, (1 or B, length)."""
    check_tensor(name, value)
    if value.dtype not in INTEGERS:
        raise TypeError(f"{name} must be an integer Tensor, got {value.dtype}")
    if tuple(value.shape) not in ((length,), (1, length), (batch, length)):
        raise ValueError(
            f"{name} must have shape ({length},) or ({batch}, {length}), got "
            f"{tuple(value.shape)} ({describe(query=like)})"
        )
    if value.device != like.device:
        raise ValueError(f"{name} must be on the query's device {like.device}, got {value.device}")
    return (value if value.dim() == 2 else value.unsqueeze(0)).long()


def tokens_at(tokens: Tensor, positions: Tensor) -> Tensor:
    """The tokens at some positions, −1 outside: (B or 1, S) to (B or 1, L)."""
    batch = max(tokens.shape[0], positions.shape[0])
    places = positions.expand(batch, -1)
    inside = (places >= 0) & (places < tokens.shape[1])
    if tokens.shape[1] == 0:
        return torch.full_like(places, -1)
    gathered = tokens.expand(batch, -1).gather(1, places.clamp(0, tokens.shape[1] - 1))
    return torch.where(inside, gathered, -1)


def observe_structure(call: KernelCall, places: Places) -> StructureStatistics:
    """Structure statistics of a validated call.

    Args:
        call: the call; values are not read.
        places: positions and tokens of its rows and keys; the number of octaves follows from them.
    """
    masking, positions = call.masking, places.positions
    by_head = any(
        mask is not None and max(mask.shape[1:3]) > 1
        for mask in (masking.boolean, *masking.additive)
    )
    if positions is not None and positions.numel() and masking.keys:
        low, high = int(positions.min()), int(positions.max())
        places = places._replace(octaves=octaves_of(max(0, high, masking.keys - 1 - low)))
    with exact(call) as call:
        query, dtype = call.query, accumulate_dtype(call.query.dtype)
        shape, sides = query.shape[:3], (2, places.octaves)
        structure = StructureStatistics(
            **{name: query.new_full(shape, torch.nan, dtype=dtype) for name in STRUCTURE},
            octaves=query.new_zeros(*shape, *sides, dtype=dtype),
            even=query.new_zeros(
                shape[0], shape[1] if by_head else 1, shape[2], *sides, dtype=dtype
            ),
            peak=torch.full(shape, NO_PEAK, device=query.device),
        )
        if _is_native(call, places):
            _fill_natively(structure, call, places, by_head)
            return structure
        by_group = {
            name: values.unflatten(1, (-1, masking.group if values.shape[1] > 1 else 1))
            for name, values in vars(structure).items()
        }
        for block in blocks(call):
            batch, heads, row = block.region.batch, block.region.heads, block.region.rows
            for name, values in _measure(block, places).items():
                if name == "even" and not by_head:
                    by_group[name][batch, :, :, row] = values[:, :1, :1]
                else:
                    by_group[name][batch, heads, :, row] = values
    return structure


def _is_native(call: KernelCall, places: Places) -> bool:
    """Whether the native CPU kernel can compute the structure metrics of a call (:func:`_native`).

    Args:
        call: the call; its tensors already have the dtype that the kernel computes in.
        places: positions and tokens of its rows and keys.
    """
    query, masking, every = call.query, call.masking, places.critical_every
    if not query.numel() or not call.key.numel() or places.octaves > _MOST_OCTAVES:
        return False
    if dispatch.choose(call) != "native" or not native.is_loaded():
        return False
    if places.positions is not None and bool((places.positions.abs() >= 1 << 24).any()):
        return False  # float32 counts no further
    if places.tokens is not None and bool((places.tokens >= _MOST_TOKEN).any()):
        return False
    batch, heads, queries, _ = query.shape
    return not every or batch * heads * -(-queries // every) * masking.keys <= _MOST_SORTED


def _fill_natively(
    structure: StructureStatistics, call: KernelCall, places: Places, by_head: bool
) -> None:
    """Compute structure statistics in place by the native library.

    Args:
        structure: the statistics, as if no row saw a key.
        call: queries, keys and masks.
        places: positions and tokens of queries and keys.
        by_head: whether heads may see different keys.
    """
    positions, tokens, query_tokens, special, every, octaves = places
    scores = None
    if every and call.masking.keys > 1:
        batch, heads, queries = structure.peak.shape
        shape = batch, heads, -(-queries // every), call.masking.keys
        scores = structure.mass_self.new_full(shape, -torch.inf)
    same = tokens is not None and query_tokens is not None
    native.structure(
        call,
        {
            "position": positions,
            "token": tokens if same else None,
            "asked": query_tokens if same else None,
            "special": special,
        },
        {
            "distance": structure.attention_distance,
            "on_self": structure.mass_self,
            "on_previous": structure.mass_previous,
            "on_same": structure.mass_same,
            "on_special": structure.mass_special,
            "mass": structure.octaves,
            "even": structure.even,
            "peak": structure.peak,
            "scores": scores,
        },
        octaves=octaves,
        by_head=int(by_head),
        every=every or 1,
    )
    if scores is not None:
        structure.critical_ratio[:, :, ::every] = critical_ratio(scores)


#: Scores of a block: 2 MiB in float32, which stays in a shared cache.
BLOCK_ELEMENTS = 1 << 19
_FEW_ROWS = 64  # rows of a block below which fewer heads are taken at once


@contextmanager
def exact(call: KernelCall) -> Iterator[KernelCall]:
    """Context without autocast and gradients, with the call's inputs cast as autocast would."""
    query, key, _ = cast_inputs(call.query, call.key, None)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        yield call._replace(query=query.detach(), key=key.detach())


class Block(NamedTuple):
    """Scores of some whole rows.

    Attributes:
        region: batches, key heads and queries of the rows.
        start: index of the key of the first column.
        scores: (batch, heads, group, rows, width), −inf where a key is hidden.
        seen: boolean, each size full or 1, False where a key is hidden; None if none is.
        sink: (1, heads, group, 1) logits in the normaliser, or None.
    """

    region: Region
    start: int
    scores: Tensor
    seen: Tensor | None
    sink: Tensor | None

    def largest(self) -> Tensor:
        """Largest score of each row, (…, rows); −inf for rows that see no key."""
        return self.scores.amax(-1)

    def exponentials(self, top: Tensor) -> tuple[Tensor, Tensor]:
        """Unnormalised weights (…, rows, width) and their normaliser (…, rows).

        The scores are overwritten. For rows that see no key the normaliser is 0, or that of the
        sink.

        Args:
            top: result of :meth:`largest`.
        """
        s = self.scores
        if self.sink is not None:
            top = torch.maximum(top, self.sink)
        top = torch.where(top == -torch.inf, 0.0, top)
        e = s.sub_(top.unsqueeze(-1)).exp_()
        Z = e.sum(-1)
        if self.sink is not None:
            Z = Z + torch.exp(self.sink - top)
        return e, Z


def blocks(call: KernelCall, at: Region | None = None) -> Iterator[Block]:
    """Iterate over the blocks of a call, inside :func:`exact`.

    Rows whose keys are all hidden by position may be in no block.

    Args:
        call: the call; its values are not read.
        at: only this region, as one block.
    """
    masking = call.masking
    for region in _regions(masking) if at is None else (at,):
        for tile in masking.tiles(region, max(1, masking.keys)):
            yield _block(call, region, tile)


def _regions(masking: Masking) -> Iterator[Region]:
    """Regions of rows whose scores fill at most one block."""
    keys = max(1, masking.keys)
    if masking.window is not None:
        keys = min(keys, 2 * masking.window + _FEW_ROWS)
    whole = max(1, BLOCK_ELEMENTS // keys)  # rows of one head that fill a block
    few = min(masking.queries, _FEW_ROWS) * masking.group
    heads = min(masking.heads, max(1, whole // max(1, few)))
    rows = min(masking.queries, max(1, whole // (heads * masking.group)))
    batches = 1
    if heads == masking.heads and rows == masking.queries:
        batches = max(1, whole // max(1, rows * masking.group * heads))
    sizes = (masking.batch, batches), (masking.heads, heads), (masking.queries, rows)
    for slices in product(*(_slices(size, step) for size, step in sizes)):
        yield Region(*slices)


def _slices(size: int, step: int) -> list[slice]:
    """Slices of at most ``step`` that cover a size."""
    return [slice(i, min(i + step, size)) for i in range(0, size, max(1, step))]


def _block(call: KernelCall, region: Region, tile: Tile) -> Block:
    """The scores of some rows (``region``) on some keys (``tile``).

    Returns:
        The scores, (B, key heads, query heads per key head, rows, keys), −inf where a key is
        hidden, with the boolean mask of visible keys (None if no mask applies) and the learned
        sinks (None if there are none).
    """
    masking, dtype = call.masking, accumulate_dtype(call.query.dtype)
    b, h, r = region.batch, region.heads, region.rows
    group = masking.group
    fold = (b.stop - b.start, h.stop - h.start, group, r.stop - r.start)
    k = call.key[b, h, tile.start : tile.stop].to(dtype).flatten(0, 1)
    work = Work(region, len(k), fold, k, None)
    q = fold_rows(call.query.unflatten(1, (masking.heads, group)), work).to(dtype) * call.scale
    s = as_mask_shape(tile_scores(q, work, tile, call.softcap, Buffers(q, dtype)), work)
    seen = None
    if tile.hidden is not None:
        hidden = tile.hidden
        s[..., hidden.start : hidden.stop].masked_fill_(hidden.mask, -torch.inf)
        seen = torch.logical_not(hidden.mask)
        left, right = hidden.start, tile.width - hidden.stop
        if left or right:
            seen = torch.nn.functional.pad(seen, (left, right), value=True)
    sink = None
    if call.sinks is not None:
        sink = call.sinks.to(dtype).view(1, masking.heads, group, 1)[:, h]
    return Block(region, tile.start, s, seen, sink)


def last_visible(masking: Masking) -> Tensor:
    """Index of the last key that each row sees, (B, L) int64; −1 for rows that see none.

    For causal rows given by a mask, or against a cache, this is the query's position. It is the
    maximum over heads that see different keys.

    Example:
        >>> mask = torch.tensor([[True, True, True, False, False]])
        >>> last_visible(Masking(batch=1, heads=2, group=1, queries=1, keys=5, attn_mask=mask))
        tensor([[2]])
    """
    shape = (masking.batch, masking.queries)
    last = torch.full(shape, -1, dtype=torch.int64, device=masking.device)
    rows = max(1, (1 << 22) // max(1, masking.keys * masking.heads * masking.group))
    heads = slice(0, masking.heads)
    for b in range(masking.batch):
        for start in range(0, masking.queries, rows):
            row = slice(start, min(start + rows, masking.queries))
            region = Region(slice(b, b + 1), heads, row)
            for tile in masking.tiles(region, max(1, masking.keys)):
                last[b, row] = tile.stop - 1
                hidden = tile.hidden
                if hidden is None or hidden.stop < tile.width:
                    continue
                # the last column is hidden from some rows; those before the mask are all visible
                seen = torch.logical_not(hidden.mask).flatten(0, 2).any(0)
                backwards = seen.flip(-1).to(torch.uint8).argmax(-1)
                before = tile.start + hidden.start - 1 if hidden.start else -1
                masked = tile.start + hidden.start + seen.shape[-1] - 1 - backwards
                last[b, row] = torch.where(seen.any(-1), masked, before)
    return last


#: How far from its query the largest weight of a row is looked for.
PEAKS = 8
#: Stands for a row whose largest weight is not that near, or not alone.
NO_PEAK = -128


class Places(NamedTuple):
    """Positions and tokens of a call's queries and keys, for structure metrics.

    Attributes:
        positions: (1 or B, L), index of the key at each query's position; None in cross-attention,
            where metrics of distance are NaN.
        tokens: (1 or B, S) ids of the keys, or None.
        query_tokens: (1 or B, L) ids of the queries, or None.
        special: boolean (1 or B, S), True on special tokens, or None.
        critical_every: sort the scores of every such row for ``critical_ratio``; 0 for none.
        octaves: number of octaves of distance on each side.
    """

    positions: Tensor | None = None
    tokens: Tensor | None = None
    query_tokens: Tensor | None = None
    special: Tensor | None = None
    critical_every: int = 1
    octaves: int = 1


def _measure(block: Block, places: Places) -> dict[str, Tensor]:
    """Fields of :class:`StructureStatistics` for the rows of one block, those that are known.

    Tensors are (batch, heads, group, rows, …).
    """
    positions, tokens, query_tokens, special, every, octaves = places
    batch, row, s, seen = block.region.batch, block.region.rows, block.scores, block.seen
    width = s.shape[-1]
    columns, column = slice(block.start, block.start + width), torch.arange(width, device=s.device)
    at = None if positions is None else _cut(positions, batch)[:, None, None, row] - block.start
    values: dict[str, Tensor] = {}
    if every:
        values["critical_ratio"] = _critical(s, row.start, every)
    top = block.largest()
    if at is not None:
        values["peak"] = _peak(s, top, at)
    e, Z = block.exponentials(top)
    none = Z == 0 if seen is None else ~seen.any(-1).expand(Z.shape)
    inverse = torch.where(none, torch.nan, 1.0 / torch.where(none, 1.0, Z))

    def on(kind: Tensor, mass: Tensor) -> Tensor:
        """The weight of each row on some keys; NaN for rows that see none of these keys."""
        visible_kind = kind if seen is None else kind & seen
        return torch.where(visible_kind.any(-1), mass * inverse, torch.nan)

    if special is not None:
        marked = _cut(special, batch)[:, columns]
        mass = (e @ marked.to(e.dtype)[:, None, None, :, None]).squeeze(-1)
        values["mass_special"] = on(marked[:, None, None, None], mass)
    if tokens is not None and query_tokens is not None:
        keys, queries = _cut(tokens, batch)[:, columns], _cut(query_tokens, batch)[:, row]
        same = (queries[:, :, None] == keys[:, None, :]) & (queries >= 0)[:, :, None]
        same = same[:, None, None]
        if at is not None:
            same = same & (column != at.unsqueeze(-1))
        values["mass_same"] = on(same, (e * same).sum(-1))
    if at is None:
        return values
    values["mass_self"] = _at_key(e, seen, at) * inverse
    values["mass_previous"] = _at_key(e, seen, at - 1) * inverse
    share = torch.where(none, 0.0, inverse)
    values["octaves"] = _octave_sums(e.cumsum(-1), at, octaves) * share[..., None, None]
    # if all visible keys had equal weight
    running = e.new_ones(1, 1, 1, 1, width) if seen is None else seen.to(e.dtype)
    running = running.cumsum(-1).expand(*torch.broadcast_shapes(running.shape[:-1], at.shape), -1)
    even = _octave_sums(running, at, octaves)
    values["even"] = even / running[..., -1:].unsqueeze(-1).clamp(min=1.0)
    away = (column - at.unsqueeze(-1)).abs()
    values["attention_distance"] = e.mul_(away.to(e.dtype)).sum(-1) * inverse
    return values


def _at_key(e: Tensor, seen: Tensor | None, column: Tensor) -> Tensor:
    """Value of ``e`` (…, rows, keys) at key ``column`` (…, rows) of each row.

    NaN if there is no such key or the row does not see it.
    """
    width = e.shape[-1]
    inside = (column >= 0) & (column < width)
    place = column.clamp(0, width - 1).unsqueeze(-1)
    if seen is not None:
        size = torch.broadcast_shapes(seen.shape[:-1], place.shape[:-1])
        keys = seen.expand(*size, width)
        inside = inside & keys.gather(-1, place.expand(*size, 1)).squeeze(-1)
    value = e.gather(-1, place.expand(*e.shape[:-1], 1)).squeeze(-1)
    return torch.where(inside, value, torch.nan)


def _octave_sums(running: Tensor, at: Tensor, octaves: int) -> Tensor:
    """Sums over each octave of query-key distance, from cumulative sums over the columns.

    Args:
        running: (…, rows, keys).
        at: column of each query, (…, rows); it may be outside the block.
        octaves: number of octaves.

    Returns:
        (…, 2, octaves): keys up to the query's position, and later keys.
    """
    step = 1 << torch.arange(octaves, device=running.device)
    behind = at.unsqueeze(-1) + 1 - step  # the first column of each octave
    ahead = at.unsqueeze(-1) + step  # the column after each octave
    edges = torch.cat([behind, ahead], -1)
    place = (edges - 1).clamp(0, running.shape[-1] - 1)
    place = place.expand(*running.shape[:-1], edges.shape[-1])
    below = torch.where(edges > 0, running.gather(-1, place), 0.0)
    low, high = below[..., :octaves], below[..., octaves:]
    own_position = high[..., :1] - low[..., :1]
    left, right = -low.diff(dim=-1), high.diff(dim=-1)
    sides = [
        torch.cat([own_position, left], -1),
        torch.cat([torch.zeros_like(own_position), right], -1),
    ]
    return torch.stack(sides, -2).clamp_(min=0.0)


def _peak(s: Tensor, top: Tensor, at: Tensor) -> Tensor:
    """Position of each row's largest score relative to the query, −8 to 8.

    :data:`NO_PEAK` if no largest score, or several, lie in that range, or the row sees no key; one
    of several is returned if the others are further away. ``s`` are the scores (…, rows, keys),
    ``top`` their maximum over the keys, and ``at`` the column of each query.
    """
    column = at.unsqueeze(-1) + torch.arange(-PEAKS, PEAKS + 1, device=s.device)
    place = column.clamp(0, s.shape[-1] - 1).expand(*s.shape[:-1], -1)
    largest = (s.gather(-1, place) == top.unsqueeze(-1)) & (column == place)
    largest &= (top > -torch.inf).unsqueeze(-1)
    alone = largest.sum(-1) == 1
    return torch.where(alone, largest.to(torch.uint8).argmax(-1) - PEAKS, NO_PEAK)


def _critical(s: Tensor, start: int, every: int) -> Tensor:
    """:func:`critical_ratio` of every ``every``-th row, the first being row ``start``; else NaN."""
    ratios = torch.full(s.shape[:-1], torch.nan, dtype=s.dtype, device=s.device)
    first = -start % every
    if first < s.shape[-2] and s.shape[-1] > 1:
        ratios[..., first::every] = critical_ratio(s[..., first::every, :])
    return ratios


def critical_ratio(scores: Tensor) -> Tensor:
    """Scale of each row's scores, divided by the scale at which the row freezes on a few keys.

    Args:
        scores: (…, keys), −inf on hidden keys.

    Returns:
        The smallest gap of a score to the maximum over the log of its rank, (…); NaN for rows that
        see fewer than two keys.
    """
    if scores.device.type == "cpu":  # NumPy's vector instructions are up to 17 times as fast
        ordered = torch.from_numpy(np.sort(scores.detach().numpy(), axis=-1))
    else:
        ordered = scores.sort(-1).values
    top = ordered[..., -1:]
    gaps = torch.where(top == -torch.inf, torch.nan, top) - ordered[..., :-1]
    ranks = torch.arange(scores.shape[-1], 1, -1, device=scores.device, dtype=scores.dtype).log()
    ratio = (gaps / ranks).amin(-1)
    return torch.where(ratio == torch.inf, torch.nan, ratio)


def _cut(tensor: Tensor, batch: slice) -> Tensor:
    """Select sequences of a tensor whose batch dimension may be 1."""
    return tensor if tensor.shape[0] == 1 else tensor[batch]
