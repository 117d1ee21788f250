"""Tiles: how a call is split, how scores are computed, and how rows are reshaped.

A tile is some heads × some query rows × some keys. The query heads that share a key head become
rows of one matrix product, so grouped queries never repeat a key.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.kernels.call import KernelCall, accumulate_dtype
from acutance.masks import Masking, Region, Tile

#: Elements of one tile: a buffer of 2 MiB in float32, which stays in a shared cache.
TILE_ELEMENTS = 1 << 19
#: Query rows of a tile: at least, where position hides keys, and at most.
TILE_ROWS = 128
LEVEL_ROWS = 512


class Buffers:
    """Tile-sized scratch tensors, allocated once per call and reshaped for ragged tiles.

    Views are cached too, since tiles have few different shapes.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._store: dict[str, Tensor] = {}
        self._views: dict[tuple[str | float, tuple[int, ...]], Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A reusable, uninitialised tensor of that name and shape."""
        if (name, shape) not in self._views:
            count = prod(shape)
            if name not in self._store or self._store[name].numel() < count:
                self._store[name] = self._like.new_empty(count, dtype=self._dtype)
                self._views = {key: view for key, view in self._views.items() if key[0] != name}
            self._views[name, shape] = self._store[name][:count].view(shape)
        return self._views[name, shape]

    def names(self) -> set[str]:
        """Names of the tensors allocated so far."""
        return set(self._store)

    def trim(self) -> None:
        """Drop all views, and tensors larger than a tile."""
        self._views = {}
        limit = 2 * TILE_ELEMENTS
        self._store = {name: part for name, part in self._store.items() if part.numel() <= limit}

    def full(self, value: float, *shape: int) -> Tensor:
        """A constant tensor, which must not be written to."""
        if (value, shape) not in self._views:
            self._views[value, shape] = self._like.new_full(shape, value, dtype=self._dtype)
        return self._views[value, shape]


class _Pool(threading.local):
    """Buffers of this thread that are not in use, by device and dtype."""

    def __init__(self) -> None:
        self.free: dict[tuple[torch.device, torch.dtype], Buffers] = {}


_POOL = _Pool()


@contextmanager
def lent_buffers(like: Tensor, dtype: torch.dtype) -> Iterator[Buffers]:
    """Buffers for one call, those of an earlier call if they are free.

    New pages from the operating system would cost a call of 1,024 keys a tenth of its time. Between
    calls each thread holds the memory of a few tiles.
    """
    if like.device.type != "cpu" or torch.is_inference_mode_enabled():
        yield Buffers(like, dtype)  # what is made in inference mode is of no use outside of it
        return
    name = (like.device, dtype)
    buffers = _POOL.free.pop(name, None) or Buffers(torch.empty(0, device=like.device), dtype)
    yield buffers  # those of a call that fails are not used again
    buffers.trim()
    _POOL.free[name] = buffers


class Work(NamedTuple):
    """One block of query rows of some heads, with the keys and values of these heads."""

    region: Region
    blocks: int  # batch × key heads: the matrix products' batch
    fold: tuple[int, int, int, int]  # batch, heads, group, rows
    key: Tensor  # (blocks, S, E)
    value: Tensor | None  # (blocks, S, Ev)


def tile_shape(masking: Masking) -> tuple[int, int]:
    """Query rows and keys of a tile.

    Causal masks and windows get fewer rows, so that fewer hidden scores near the diagonal are
    computed. A tile grows with the number of threads, so that starting them pays off.
    """
    level = LEVEL_ROWS
    span = masking.keys if masking.window is None else 2 * masking.window
    if masking.causal or masking.window is not None:
        level = min(level, max(TILE_ROWS, span // 32))
    rows = max(1, min(masking.queries, level // masking.group))
    width = min(masking.keys, max(256, _elements(masking) // (rows * masking.group)))
    return rows, width


def _elements(masking: Masking) -> int:
    """Number of scores per tile; it grows with the number of threads."""
    threads = min(8, torch.get_num_threads()) if masking.device.type == "cpu" else 32
    return TILE_ELEMENTS * threads


def tile_rows(call: KernelCall) -> Iterator[Work]:
    """Split a call into blocks of query rows, each with enough heads to fill a tile.

    Keys and values that need no copy are sliced separately for every tile row, so that early
    causal rows, which see few keys, combine more heads. Others are copied once for all rows.
    """
    masking, dtype = call.masking, accumulate_dtype(call.query.dtype)
    rows, width = tile_shape(masking)
    starts = range(0, masking.queries, rows)
    if all(_mergeable(t, dtype) for t in (call.key, call.value) if t is not None):
        cut: dict[tuple[int, int, int, int], Work] = {}
        for i in starts:
            row = slice(i, min(i + rows, masking.queries))
            first, last, *_ = masking.band(row.start, row.stop - 1)
            for batch, head in _blocks(masking, rows, min(width, last - first)):
                name = (batch.start, batch.stop, head.start, head.stop)
                if name not in cut:
                    cut[name] = _work(call, Region(batch, head, row), dtype)
                yield _at_rows(cut[name], row)
        return
    for batch, head in _blocks(masking, rows, width):
        whole = _work(call, Region(batch, head, slice(0, rows)), dtype)
        for i in starts:
            yield _at_rows(whole, slice(i, min(i + rows, masking.queries)))


def _at_rows(work: Work, rows: slice) -> Work:
    """The block of the same heads with other query rows."""
    region = Region(work.region.batch, work.region.heads, rows)
    return work._replace(region=region, fold=(*work.fold[:3], rows.stop - rows.start))


def _mergeable(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether batch and heads fold into one dimension of a view."""
    batch, heads = tensor.shape[:2]
    folds = batch == 1 or heads == 1 or tensor.stride(0) == heads * tensor.stride(1)
    return folds and tensor.dtype == dtype


def _blocks(masking: Masking, rows: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Slices of batches and key heads, each with about as many scores as a tile may have."""
    blocks = max(1, _elements(masking) // (rows * masking.group * max(1, width)))
    heads = max(1, min(masking.heads, blocks))
    batches = max(1, min(masking.batch, blocks // max(1, masking.heads)))
    for b in range(0, masking.batch, batches):
        for h in range(0, masking.heads, heads):
            yield (
                slice(b, min(b + batches, masking.batch)),
                slice(h, min(h + heads, masking.heads)),
            )


def _work(call: KernelCall, region: Region, dtype: torch.dtype) -> Work:
    """The block of query rows of a region, with keys and values in the accumulation dtype."""
    k, v = (
        None if tensor is None else tensor[region.batch, region.heads].to(dtype).flatten(0, 1)
        for tensor in (call.key, call.value)
    )
    fold = (
        region.batch.stop - region.batch.start,
        region.heads.stop - region.heads.start,
        call.masking.group,
        region.rows.stop - region.rows.start,
    )
    assert k is not None
    return Work(region, fold[0] * fold[1], fold, k, v)


def fold_rows(tensor: Tensor, work: Work) -> Tensor:
    """Cut the rows of a block out of (B, H, group, L, …), as (blocks, group × rows, …)."""
    region = work.region
    part = tensor[region.batch, region.heads, :, region.rows]
    return part.reshape(work.blocks, -1, *part.shape[4:])


def tile_scores(
    q: Tensor, work: Work, tile: Tile, softcap: float | None, scratch: Buffers
) -> Tensor:
    """Scores of a tile before masking, (blocks, rows, keys), in the buffer ``scores``.

    With a softcap, its derivative 1 − (s/cap)² is in the buffer ``slope`` for the backward pass.
    """
    shape = (work.blocks, q.shape[1], tile.width)
    s = scratch("scores", *shape)
    torch.bmm(q, columns(work.key, tile).mT, out=s)
    if softcap is not None:
        s.div_(softcap).tanh_()
        slope = scratch("slope", *shape)
        torch.mul(s, s, out=slope).neg_().add_(1.0)
        s.mul_(softcap)
    folded = as_mask_shape(s, work) if tile.alibi is not None or tile.biases else s
    if tile.alibi is not None:
        slopes, distance = tile.alibi
        folded.addcmul_(slopes.to(s.dtype), distance.to(s.dtype), value=-1.0)
    for bias in tile.biases:
        folded.add_(bias.to(s.dtype))
    return s


def columns(rows: Tensor, tile: Tile) -> Tensor:
    """The keys or values of a tile, cut out of (blocks, S, …)."""
    return rows if tile.width == rows.shape[1] else rows[:, tile.start : tile.stop]


def as_mask_shape(s: Tensor, work: Work) -> Tensor:
    """View a tile (blocks, group × rows, keys) as (batch, heads, group, rows, keys), like masks."""
    return s.view(*work.fold, s.shape[-1])


def expand_rows(values: Tensor, work: Work) -> Tensor:
    """Broadcast one value for each row, (…, rows) as in a mask, to (blocks, group × rows)."""
    return values.expand(work.fold).reshape(work.blocks, -1)


def draw_kept(
    shape: tuple[int, ...], dropout_p: float, generator: torch.Generator | None, like: Tensor
) -> Tensor | None:
    """Random dropout factors for the weights of a tile, 0 or 1/(1 − p); None without dropout."""
    if generator is None:
        return None
    draw = torch.rand(shape, generator=generator, device=like.device, dtype=like.dtype)
    return (draw >= dropout_p).to(like.dtype).div_(1.0 - dropout_p)


def dropout_generator(call: KernelCall) -> torch.Generator | None:
    """A generator that gives a call the same dropout in the forward and backward pass."""
    if call.dropout_p == 0.0:
        return None
    generator = torch.Generator(device=call.query.device)
    generator.manual_seed(0 if call.seed is None else int(call.seed))
    return generator


def sink_rows(call: KernelCall, work: Work, like: Tensor) -> Tensor | None:
    """The sink logits of a block of query rows, (blocks, rows), or None."""
    if call.sinks is None:
        return None
    heads = call.masking.heads, call.masking.group
    sinks = call.sinks.to(like.dtype).view(heads)[work.region.heads]
    return expand_rows(sinks[None, :, :, None], work)
