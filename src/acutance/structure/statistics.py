"""StructureStatistics: where each row's weight goes, computed in blocks of whole rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acutance.kernels import dispatch, native
from acutance.kernels.call import KernelCall, accumulate_dtype
from acutance.masks import INTEGERS, MaskOptions, check_masking, check_sinks
from acutance.shapes import (
    check_flags,
    check_inputs,
    check_number,
    check_softcap,
    check_tensor,
    describe,
)
from acutance.structure.blocks import NO_PEAK, Part, Places, blocks, critical_ratio, exact
from acutance.structure.metrics import STRUCTURE, structure_metric

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
        value: Tensor = getattr(self, structure_metric(name).name)
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
    if isinstance(critical_every, bool) or not isinstance(critical_every, int):
        raise TypeError(f"critical_every must be an integer, got {critical_every!r}")
    if critical_every < 0:
        raise ValueError(f"critical_every must be at least 0, got {critical_every}")
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
    shape = (masking.batch, masking.heads, masking.group, masking.queries)
    if positions is not None and positions.numel() and masking.keys:
        low, high = int(positions.min()), int(positions.max())
        places = places._replace(octaves=octaves_of(max(0, high, masking.keys - 1 - low)))
    with exact(call) as call:
        if _is_native(call, places):
            metrics, octaves, even, peak = _native(call, places, by_head)
            return StructureStatistics(**metrics, octaves=octaves, even=even, peak=peak)
        query, dtype = call.query, accumulate_dtype(call.query.dtype)
        metrics = {name: query.new_full(shape, torch.nan, dtype=dtype) for name in STRUCTURE}
        octaves = query.new_zeros(*shape, 2, places.octaves, dtype=dtype)
        alike = shape if by_head else (shape[0], 1, 1, shape[3])
        even = query.new_zeros(*alike, 2, places.octaves, dtype=dtype)
        peak = torch.full(shape, NO_PEAK, device=query.device)
        for block in blocks(call):
            batch, heads, row = block.region.batch, block.region.heads, block.region.rows
            part = Part(block, places)
            for name, values in part.metrics().items():
                metrics[name][batch, heads, :, row] = values
            if positions is not None:
                octaves[batch, heads, :, row] = part.octaves
                peak[batch, heads, :, row] = part.peak
                if by_head:
                    even[batch, heads, :, row] = part.even
                else:
                    even[batch, :, :, row] = part.even[:, :1, :1]
    return StructureStatistics(
        **{name: values.flatten(1, 2) for name, values in metrics.items()},
        octaves=octaves.flatten(1, 2),
        even=even.flatten(1, 2),
        peak=peak.flatten(1, 2),
    )


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


def _native(
    call: KernelCall, places: Places, by_head: bool
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Structure metrics computed by the native library.

    Args:
        call: queries, keys and masks.
        places: positions and tokens of queries and keys.
        by_head: whether heads may see different keys.

    Returns:
        Metrics by name, (B, Hq, L); weight by octave of distance, (B, Hq, L, 2, octaves); the same
        for uniform weights; and the relative position of the largest weight, (B, Hq, L).
    """
    query, masking, dtype = call.query, call.masking, accumulate_dtype(call.query.dtype)
    positions, tokens, query_tokens, special, every, octaves = places
    shape = query.shape[:3]
    values = {name: query.new_full(shape, torch.nan, dtype=dtype) for name in STRUCTURE}
    mass = query.new_zeros(*shape, 2, octaves, dtype=dtype)
    heads = shape[1] if by_head else 1
    even = query.new_zeros(shape[0], heads, shape[2], 2, octaves, dtype=dtype)
    peak = torch.full(shape, NO_PEAK, device=query.device)
    scores = None
    if every and masking.keys > 1:
        n_sampled = -(-shape[2] // every)
        scores = query.new_full((*shape[:2], n_sampled, masking.keys), -torch.inf, dtype=dtype)
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
            "distance": values["attention_distance"],
            "on_self": values["mass_self"],
            "on_previous": values["mass_previous"],
            "on_same": values["mass_same"],
            "on_special": values["mass_special"],
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
        values["critical_ratio"][:, :, ::every] = critical_ratio(scores)
    return values, mass, even, peak
