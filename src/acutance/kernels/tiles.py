"""Tiles: how a call is cut, how a tile's scores are made, and how its rows fold.

A tile is some heads × some query rows × some keys. The query heads that share a key head become
rows of one matrix product, so grouped queries never repeat a key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.masks import Masking, Region, Tile

__all__ = [
    "TILE_ELEMENTS",
    "TILE_ROWS",
    "Buffers",
    "Rule",
    "Work",
    "accumulate_dtype",
    "draw_kept",
    "dropout_generator",
    "fold_rows",
    "per_row",
    "sink_rows",
    "tile_rows",
    "tile_scores",
    "tile_shape",
    "unfold",
]

#: Elements of one tile: a buffer of 2 MiB in float32, which stays in a shared cache.
TILE_ELEMENTS = 1 << 19
TILE_ROWS = 128


@dataclass(frozen=True)
class Rule:
    """How a call's scores become weights: scale, softcap, sinks, dropout."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    seed: int = 0


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64; everything else is accumulated in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Buffers:
    """Tile-sized scratch tensors, allocated once per call and reshaped for ragged tiles."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._store: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name, viewed in a shape; what it holds is whatever was left there."""
        count = 1
        for size in shape:
            count *= size
        if name not in self._store or self._store[name].numel() < count:
            self._store[name] = self._like.new_empty(count, dtype=self._dtype)
        return self._store[name][:count].view(shape)


class Work(NamedTuple):
    """One tile row: its region, how its rows fold, and the keys and values of its heads."""

    region: Region
    blocks: int  # batch × key heads: the matrix products' batch
    fold: tuple[int, int, int, int]  # batch, heads, group, rows
    key: Tensor  # (blocks, S, E)
    value: Tensor | None  # (blocks, S, Ev)


def tile_shape(masking: Masking) -> tuple[int, int, int]:
    """Query rows, keys and (batch × key heads) of a tile.

    A tile grows with the threads that share each of its operations, so that starting them pays.
    """
    elements = TILE_ELEMENTS * _workers(masking.device)
    rows = max(1, min(masking.queries, TILE_ROWS // masking.group))
    width = min(masking.keys, max(256, elements // (rows * masking.group)))
    blocks = max(1, elements // (rows * masking.group * max(1, width)))
    return rows, width, blocks


def _workers(device: torch.device) -> int:
    return min(8, torch.get_num_threads()) if device.type == "cpu" else 32


def tile_rows(
    key: Tensor, value: Tensor | None, masking: Masking, dtype: torch.dtype
) -> Iterator[Work]:
    """The tile rows of a call, heads first, so that a head's keys are gathered once."""
    rows, _, blocks = tile_shape(masking)
    heads = max(1, min(masking.heads, blocks))
    batches = max(1, min(masking.batch, blocks // max(1, masking.heads)))

    def gather(tensor: Tensor, batch: slice, head: slice) -> Tensor:
        part = tensor[batch, head]
        return part.to(dtype).flatten(0, 1)

    for b in range(0, masking.batch, batches):
        batch = slice(b, min(b + batches, masking.batch))
        for h in range(0, masking.heads, heads):
            head = slice(h, min(h + heads, masking.heads))
            k = gather(key, batch, head)
            v = None if value is None else gather(value, batch, head)
            for i in range(0, masking.queries, rows):
                row = slice(i, min(i + rows, masking.queries))
                fold = (
                    batch.stop - batch.start,
                    head.stop - head.start,
                    masking.group,
                    row.stop - i,
                )
                yield Work(Region(batch, head, row), k.shape[0], fold, k, v)


def fold_rows(tensor: Tensor, work: Work) -> Tensor:
    """Cut (B, H, group, L, …) to the tile row as (blocks, group × rows, …)."""
    region = work.region
    part = tensor[region.batch, region.heads, :, region.rows]
    return part.reshape(work.blocks, -1, *part.shape[4:])


def tile_scores(
    q: Tensor, work: Work, tile: Tile, softcap: float | None, scratch: Buffers
) -> Tensor:
    """Scores of a tile before masking, (blocks, rows, keys), in the buffer ``scores``.

    With a softcap its slope 1 − (s/cap)² stays in the buffer ``slope`` for the backward pass.
    """
    shape = (work.blocks, q.shape[1], tile.width)
    s = scratch("scores", *shape)
    torch.bmm(q, work.key[:, tile.start : tile.stop].transpose(1, 2), out=s)
    if softcap is not None:
        s.div_(softcap).tanh_()
        slope = scratch("slope", *shape)
        torch.mul(s, s, out=slope).neg_().add_(1.0)
        s.mul_(softcap)
    folded = unfold(s, work)
    if tile.alibi is not None:
        slopes, distance = tile.alibi
        folded.addcmul_(slopes.to(s.dtype), distance.to(s.dtype), value=-1.0)
    for bias in tile.biases:
        folded.add_(bias.to(s.dtype))
    return s


def unfold(s: Tensor, work: Work) -> Tensor:
    """View a tile (blocks, group × rows, keys) as masks are: (batch, heads, group, rows, keys)."""
    return s.view(*work.fold, s.shape[-1])


def per_row(values: Tensor, work: Work) -> Tensor:
    """Broadcast (…, rows) of a tile's masks to (blocks, group × rows)."""
    return values.expand(work.fold).reshape(work.blocks, -1)


def draw_kept(
    shape: tuple[int, ...], rule: Rule, generator: torch.Generator | None, like: Tensor
) -> Tensor | None:
    """What dropout multiplies a tile's weights by, 0 or 1/(1 − p); None without dropout."""
    if generator is None:
        return None
    draw = torch.rand(shape, generator=generator, device=like.device, dtype=like.dtype)
    return (draw >= rule.dropout_p).to(like.dtype).div_(1.0 - rule.dropout_p)


def dropout_generator(rule: Rule, device: torch.device) -> torch.Generator | None:
    """A generator that draws a call's dropout alike in the forward and the backward pass."""
    if rule.dropout_p == 0.0:
        return None
    generator = torch.Generator(device=device)
    generator.manual_seed(rule.seed)
    return generator


def sink_rows(rule: Rule, work: Work, masking: Masking, like: Tensor) -> Tensor | None:
    """The sink logits of a tile row, (blocks, rows)."""
    if rule.sinks is None:
        return None
    sinks = rule.sinks.to(like.dtype).view(masking.heads, masking.group)[work.region.heads]
    return per_row(sinks[None, :, :, None], work)
