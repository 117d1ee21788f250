"""The same statistics by the native kernel: one pass over the scores, nothing held of them."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.kernels import dispatch, native
from acutance.kernels.tiles import Rule
from acutance.structure.blocks import Rows
from acutance.structure.metrics import STRUCTURE
from acutance.structure.parts import NO_PEAK, critical_ratio

__all__ = ["read", "takes"]

#: Scores that are held, at most, to be sorted for ``critical_ratio``: 16 MiB in float32.
MOST_SORTED = 1 << 22
_MOST_OCTAVES, _MOST_TOKEN = 64, 2**31


def takes(
    rows: Rows, positions: Tensor | None, tokens: Tensor | None, octaves: int, every: int
) -> bool:
    """Whether the native kernel reads the structure of a call.

    Args:
        rows: the call, its inputs already cast.
        positions: where queries stand among the keys.
        tokens: ids of the keys.
        octaves: of each side.
        every: rows from one whose scores are sorted to the next.
    """
    query, masking = rows.query, rows.masking
    if not query.numel() or not rows.key.numel() or octaves > _MOST_OCTAVES:
        return False
    if dispatch.choose("auto", query, None, 0.0) != "native" or not native.is_loaded():
        return False
    if positions is not None and bool((positions.abs() >= 1 << 24).any()):
        return False  # float32 counts no further
    if tokens is not None and bool((tokens >= _MOST_TOKEN).any()):
        return False
    return not every or _kept(rows, every) * masking.keys <= MOST_SORTED


def _kept(rows: Rows, every: int) -> int:
    """Rows whose scores are kept."""
    batch, heads, queries, _ = rows.query.shape
    return batch * heads * -(-queries // every)


def read(
    rows: Rows,
    positions: Tensor | None,
    tokens: Tensor | None,
    asked: Tensor | None,
    special: Tensor | None,
    octaves: int,
    every: int,
    by_head: bool,
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """The metrics (B, Hq, L), the octaves, those of even weights, and the peaks.

    Args:
        rows: the call.
        positions: (1 or B, L) where queries stand, or None.
        tokens: (1 or B, S) ids of the keys, or None.
        asked: (1 or B, L) ids of the queries, or None.
        special: boolean (1 or B, S), or None.
        octaves: of each side.
        every: rows from one whose scores are sorted to the next; 0 is none.
        by_head: heads may see different keys.
    """
    query, masking, dtype = rows.query, rows.masking, rows.dtype
    shape = query.shape[:3]
    found = {name: query.new_full(shape, torch.nan, dtype=dtype) for name in STRUCTURE}
    mass = query.new_zeros(*shape, 2, octaves, dtype=dtype)
    heads = shape[1] if by_head else 1
    even = query.new_zeros(shape[0], heads, shape[2], 2, octaves, dtype=dtype)
    peak = torch.full(shape, NO_PEAK, device=query.device)
    scores = None
    if every and masking.keys > 1:
        kept = -(-shape[2] // every)
        scores = query.new_full((*shape[:2], kept, masking.keys), -torch.inf, dtype=dtype)
    same = tokens is not None and asked is not None
    native.structure(
        query,
        rows.key,
        masking,
        Rule(scale=rows.scale, softcap=rows.softcap, sinks=rows.sinks),
        {
            "position": positions,
            "token": tokens if same else None,
            "asked": asked if same else None,
            "special": special,
        },
        {
            "distance": found["attention_distance"],
            "on_self": found["mass_self"],
            "on_previous": found["mass_previous"],
            "on_same": found["mass_same"],
            "on_special": found["mass_special"],
            "mass": mass,
            "even": even,
            "peak": peak,
            "scores": scores,
        },
        octaves=octaves,
        by_head=int(by_head),
        every=every or 1,
    )
    if scores is not None:
        found["critical_ratio"][:, :, ::every] = critical_ratio(scores)
    return found, mass, even, peak
