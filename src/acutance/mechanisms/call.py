"""LinearCall: a validated call of linear attention, whose features are computed in segments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from acutance.mechanisms.decays import check_decay
from acutance.mechanisms.feature_maps import FEATURE_MAPS, AnyMap, FeatureMap
from acutance.mechanisms.feature_maps import feature_map as find_map
from acutance.shapes import check_count, check_flag, check_number, check_tensor, describe

__all__ = ["NO_ROWS", "Call", "Features", "Piece", "cut", "make_call"]

#: Features of one stretch, over all heads: what a call forms beyond its result stays near this.
STRETCH = 2**17
#: −log λ from which 64 positions are enough for squared weights to underflow in float32.
FAST = 0.68
#: −log λ times the positions between a row and its nearest key from which rows underflow.
FAR = 10.0
#: −log λ times the rows of a chunk at most, where they would.
CHUNK_FADE = 30.0
NO_ROWS = slice(0, 0)


class Piece(NamedTuple):
    """Consecutive queries and keys of a call, with their positions."""

    query: Tensor
    key: Tensor
    value: Tensor
    visible: Tensor | None
    row_places: Tensor
    key_places: Tensor


class Features(NamedTuple):
    """Features of some queries and some keys, (B, H, G, ...); ``visible`` is (B, keys)."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    log_decay: Tensor | None


@dataclass(frozen=True)
class Call:
    """A validated call of linear attention.

    Attributes:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        feature_map: φ, computes features of queries and keys.
        scale: factor of the weights.
        log_decay: log λ, (H, G) or (H, 1), or None.
        visible: (B, S), or None if every key takes part.
        row_places: (L,), positions of the queries.
        key_places: (S,), positions of the keys.
        chunk: number of rows per chunk of a causal scan; within a chunk, weights are computed
            directly.
        by_sum: whether outputs are divided by the sum of the weights.
        eps: added to that sum.
        underflows: whether the decay can make all weights of a row underflow.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    feature_map: FeatureMap
    scale: float
    log_decay: Tensor | None
    visible: Tensor | None
    row_places: Tensor
    key_places: Tensor
    chunk: int
    by_sum: bool
    eps: float
    underflows: bool

    @property
    def in_units(self) -> bool:
        """Whether sums are stored relative to their size, to avoid underflow.

        Sums of signed weights are not.
        """
        return self.underflows and self.feature_map.nonnegative

    @property
    def rows(self) -> int:
        """Number of rows, L."""
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        """Number of keys, S."""
        return self.key.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the sums."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    def pieces(self, rows: list[slice], keys: list[slice]) -> Iterator[Piece]:
        """Iterate over paired slices of the queries and the keys."""
        query, key, value = cut(self.query, rows), cut(self.key, keys), cut(self.value, keys)
        for i, (row, part) in enumerate(zip(rows, keys, strict=True)):
            visible = None if self.visible is None else self.visible[:, part]
            yield Piece(
                query[i], key[i], value[i], visible, self.row_places[row], self.key_places[part]
            )

    def placed(
        self,
        rows: slice,
        keys: slice,
        query: Tensor | None = None,
        key: Tensor | None = None,
        value: Tensor | None = None,
    ) -> Piece:
        """The piece for slices of rows and keys whose tensors are cut already; None if absent."""
        return Piece(
            self.query[:, :, NO_ROWS] if query is None else query,
            self.key[:, :, NO_ROWS] if key is None else key,
            self.value[:, :, NO_ROWS] if value is None else value,
            None if self.visible is None else self.visible[:, keys],
            self.row_places[rows],
            self.key_places[keys],
        )

    def empty_features(self) -> Features:
        """Features of zero queries and zero keys: empty tensors of the right widths and dtypes."""
        return self.features(self.placed(NO_ROWS, NO_ROWS), self.log_decay)

    def features(self, piece: Piece, log_decay: Tensor | None, missing: int = 0) -> Features:
        """Features of a piece's queries and keys, followed by ``missing`` hidden keys."""
        heads = self.key.shape[1]
        q = self.feature_map(piece.query.to(self.dtype), piece.row_places)
        if self.scale != 1.0:
            q = q * self.scale
        k, v = piece.key.to(self.dtype), piece.value.to(self.dtype)
        if piece.visible is None:
            visible = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
            k = self.feature_map(k, piece.key_places)
        else:
            visible = piece.visible
            seen = visible[:, None, :, None]
            k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
            k = torch.where(seen, self.feature_map(k, piece.key_places), 0.0)
        if missing:
            k, v = pad(k, (0, 0, 0, missing)), pad(v, (0, 0, 0, missing))
            visible = pad(visible, (0, missing))
        group = q.shape[1] // max(1, heads)
        q = q.unflatten(1, (heads, group))
        return Features(q, k.unsqueeze(2), v.unsqueeze(2), visible, log_decay)

    def reversed(self) -> Call:
        """The call with its sequence reversed."""
        return replace(
            self,
            query=self.query.flip(2),
            key=self.key.flip(2),
            value=self.value.flip(2),
            visible=None if self.visible is None else self.visible.flip(1),
            row_places=self.row_places.flip(0),
            key_places=self.key_places.flip(0),
        )

    def segments(self, start: int, stop: int) -> list[slice]:
        """Slices of a sequence from ``start`` to ``stop``, in whole chunks."""
        width = max(1, self.query.shape[0] * self.query.shape[1] * self.query.shape[3])
        size = max(1, STRETCH // (width * self.chunk)) * self.chunk
        return [slice(begin, min(begin + size, stop)) for begin in range(start, stop, size)]

    @property
    def closed(self) -> bool:
        """Whether the feature map is built in and has no parameters."""
        return type(self.feature_map) in FEATURE_MAPS.values()


def cut(tensor: Tensor, parts: list[slice], dim: int = 2) -> tuple[Tensor, ...]:
    """Split a tensor into consecutive parts in one operation.

    Slicing each part would allocate a gradient of full size for each, which is not O(n) in total.
    """
    sizes = [part.stop - part.start for part in parts]
    first = parts[0].start if parts else 0
    rest = tensor.shape[dim] - first - sum(sizes)
    pieces: tuple[Tensor, ...] = tensor.split([first, *sizes, rest], dim)
    return pieces[1:-1]


def make_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: AnyMap,
    decay: float | Tensor | None,
    scale: float,
    key_mask: Tensor | None,
    chunk: int,
    normalize: bool | None,
    eps: float,
    row_start: int,
    key_start: int,
) -> Call:
    """Check all options and make the call; the tensors' shapes have been checked already.

    Raises:
        TypeError: if an option has the wrong type.
        ValueError: if an option does not fit, or a decay is outside (0, 1].
    """
    chosen = find_map(feature_map)
    check_number("scale", scale)
    check_number("eps", eps, above=0.0, including=True)
    check_count("chunk", chunk, 1)
    heads = key.shape[1]
    if key_mask is not None:
        _check_key_mask(key_mask, query, key)
    log_decay = None
    if decay is not None:
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        each = torch.log(check_decay(decay, query.shape[1], query.new_empty(0, dtype=dtype)))
        shared = not (isinstance(decay, Tensor) and decay.dim())
        log_decay = each[:heads, None] if shared else each.view(heads, -1)
    rate = _rate(decay, log_decay)
    gap = max(0, row_start + query.shape[2] - key_start - key.shape[2], key_start - row_start)
    if key_mask is not None and rate > 0 and not torch.compiler.is_compiling() and key_mask.numel():
        gap += int((~key_mask).sum(-1).max())
    underflows = rate > FAST or rate * gap > FAR
    if underflows:
        chunk = max(1, min(chunk, int(CHUNK_FADE / rate)))
    device = query.device
    return Call(
        query,
        key,
        value,
        chosen,
        scale,
        log_decay,
        key_mask,
        torch.arange(row_start, row_start + query.shape[2], device=device),
        torch.arange(key_start, key_start + key.shape[2], device=device),
        chunk,
        _normalizes(normalize, chosen),
        eps,
        underflows,
    )


def _rate(decay: float | Tensor | None, log_decay: Tensor | None) -> float:
    """The largest −log λ of any head; 0 if it is not known while compiling."""
    if isinstance(decay, int | float):
        return -math.log(decay)
    if log_decay is None or log_decay.numel() == 0 or torch.compiler.is_compiling():
        return 0.0
    return -float(log_decay.detach().min())


def _check_key_mask(key_mask: Tensor, query: Tensor, key: Tensor) -> None:
    """Check that ``key_mask`` is boolean, (B, S) and on the key's device."""
    shape = (key.shape[0], key.shape[2])
    if check_tensor("key_mask", key_mask).dtype != torch.bool:
        raise TypeError(f"key_mask must be boolean, True for visible keys, got {key_mask.dtype}")
    if tuple(key_mask.shape) != shape:
        raise ValueError(
            f"key_mask must have shape (B, S) = {shape}, got {tuple(key_mask.shape)} "
            f"({describe(query=query, key=key)})"
        )
    if key_mask.device != key.device:
        raise ValueError(
            f"key_mask must be on the key's device {key.device}, got {key_mask.device}"
        )


def _normalizes(normalize: bool | None, chosen: FeatureMap) -> bool:
    """Whether a call divides outputs by the sum of the weights.

    Raises:
        TypeError: if it is neither a bool nor None.
        ValueError: if the weights have both signs.
    """
    if normalize is None:
        return chosen.nonnegative
    if check_flag("normalize", normalize) and not chosen.nonnegative:
        raise ValueError(
            "normalize=True divides by the sum of the weights, which can be 0 for signed "
            f"ones: feature_map={chosen.name!r} requires normalize=False"
        )
    return normalize
