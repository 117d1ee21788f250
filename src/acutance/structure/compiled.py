"""Structure statistics by the native kernel, in one pass over the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.kernels import dispatch, native
from acutance.kernels.call import KernelCall, accumulate_dtype
from acutance.structure.metrics import STRUCTURE
from acutance.structure.parts import NO_PEAK, Places, critical_ratio

__all__ = ["read", "takes"]

#: Scores that are held, at most, to be sorted for ``critical_ratio``: 16 MiB in float32.
MOST_SORTED = 1 << 22
_MOST_OCTAVES, _MOST_TOKEN = 64, 2**31


def takes(call: KernelCall, places: Places) -> bool:
    """Whether the native kernel reads the structure of a call, whose inputs are already cast."""
    query, masking, every = call.query, call.masking, places.critical_every
    if not query.numel() or not call.key.numel() or places.octaves > _MOST_OCTAVES:
        return False
    if dispatch.choose("auto", call) != "native" or not native.is_loaded():
        return False
    if places.positions is not None and bool((places.positions.abs() >= 1 << 24).any()):
        return False  # float32 counts no further
    if places.tokens is not None and bool((places.tokens >= _MOST_TOKEN).any()):
        return False
    batch, heads, queries, _ = query.shape
    return not every or batch * heads * -(-queries // every) * masking.keys <= MOST_SORTED


def read(
    call: KernelCall, places: Places, by_head: bool
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """The metrics (B, Hq, L), the octaves, those of even weights, and the peaks.

    Args:
        call: the call.
        places: what is asked of its rows.
        by_head: whether heads may see different keys.
    """
    query, masking, dtype = call.query, call.masking, accumulate_dtype(call.query.dtype)
    positions, tokens, asked, special, every, octaves = places
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
        call,
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
