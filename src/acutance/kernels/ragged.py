"""Decoding from heads that hold keys of their own number and precision, in one call of C++.

One query for each sequence reads all keys that its head holds; packed keys and values are read as
they are packed. No statistics, no mask, no gradient.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from acutance.compiling import unobserved
from acutance.kernels import dispatch, library
from acutance.kernels.library import ABI, RAGGED, Library
from acutance.kernels.native import DTYPES, MOST_WIDTH, check

#: The largest packed group of tokens: one has to fit a tile of keys.
_MOST_TOKENS = 256
#: Channels of a packed value that share a scale are a multiple of this, or all: a vector has one.
_CHANNELS = 16
#: Words of ``acutance_stored_head`` for a head that holds nothing.
_NOTHING = (0,) * 17


class Stored(NamedTuple):
    """The keys, or the values, of H heads and B sequences: packed tokens, then plain ones.

    Attributes:
        buffer: (B, H, ≥ length, D), whose first tokens are not packed.
        length: how many of them are held.
        fresh: where in ``buffer`` the newest token has yet to be written; None if it was.
        packed: earlier tokens, in whole groups, that are packed.
        bits: of a code.
        codes: uint8 (B, H, ≥ groups, tokens · bits / 8, D); None if nothing is packed.
        scale: float16; of keys (B, H, ≥ groups, 1, D, 1), of values (B, H, ≥ groups, tokens, D / c,
            1) for c channels that share one.
        zero: float16, the same shape.
    """

    buffer: Tensor
    length: int
    fresh: int | None = None
    packed: int = 0
    bits: int = 16
    codes: Tensor | None = None
    scale: Tensor | None = None
    zero: Tensor | None = None

    @property
    def plain(self) -> Tensor:
        """(B, H, length, D), tokens that are not packed."""
        return self.buffer[:, :, : self.length]


class HeldHeads(NamedTuple):
    """What some key heads hold.

    Attributes:
        heads: their indices.
        key: their keys.
        value: their values.
    """

    heads: Sequence[int]
    key: Stored
    value: Stored


@cache
def _library() -> Library | None:
    """The loaded library; None if there is none or another backend was asked for."""
    found = library.load()
    if isinstance(found, str) or dispatch.forced() not in ("auto", "native"):
        return None
    return found


def supports(query: Tensor, value_width: int, tokens: int, channels: int) -> bool:
    """Whether :func:`attend` computes a call: dtype, device and widths, without gradient.

    Args:
        query: (B, Hq, 1, E).
        value_width: Ev.
        tokens: of a packed group.
        channels: of a packed value that share a scale.
    """
    return (
        _library() is not None
        and query.is_cpu
        and query.dtype in DTYPES
        and query.dtype is not torch.float64
        and max(query.shape[3], value_width) <= MOST_WIDTH
        and tokens <= _MOST_TOKENS
        and (channels % _CHANNELS == 0 or channels == value_width)
        and not (query.requires_grad and torch.is_grad_enabled())
        and not torch.is_autocast_enabled("cpu")
        and unobserved()
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    held: Sequence[Sequence[HeldHeads]],
    *,
    scale: float,
    tokens: int,
    channels: int,
) -> Tensor:
    """Attention of one query for each sequence, of a call that :func:`supports` allows.

    New keys and values are written where what is held has yet to get them.

    Args:
        query: (B, Hq, 1, E).
        key: (B, H, 1, E).
        value: (B, H, 1, Ev).
        held: for each sequence what its heads hold, or one entry for all B. A head that is in none
            holds nothing.
        scale: factor of the scores.
        tokens: of a packed group.
        channels: of a packed value that share a scale.

    Returns:
        (B, Hq, 1, Ev), zero for a head that holds nothing.

    Raises:
        MemoryError: if its scratch could not be allocated.
        RuntimeError: if there is no native library.
    """
    found = _library()
    if found is None:
        raise RuntimeError("the native kernel is not available")
    batch, query_heads, _, width = query.shape
    heads, value_width = value.shape[1], value.shape[3]
    units: list[tuple[int, ...]] = [_NOTHING] * (batch * heads)
    sequences = range(batch if len(held) == 1 else 1)
    for first, groups in zip(range(0, batch * heads, heads), held, strict=False):
        for group in groups:
            keys, values = _located(group.key), _located(group.value)
            count = (group.key.packed + group.key.length,)
            for place in sequences:
                at = first + place * heads
                for i, head in enumerate(group.heads):
                    units[at + head] = count + _words(keys, place, i) + _words(values, place, i)
    query, key, value = (
        (part if part.stride(3) == 1 else part.contiguous()).resolve_neg()
        for part in (query, key, value)
    )
    out = query.new_empty((batch, query_heads, 1, value_width))
    q0, q1, *_ = query.stride()
    k0, k1, *_ = key.stride()
    v0, v1, *_ = value.stride()
    call = RAGGED.words_packed(
        ABI, DTYPES[query.dtype], batch, heads, query_heads // heads, width, value_width,
        query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), q0, q1, k0, k1, v0, v1,
        scale, tokens, channels, torch.get_num_threads(),
    )  # fmt: skip
    check(found.ragged(call, _packer(len(units))(*chain.from_iterable(units))))
    return out


@cache
def _packer(units: int) -> Callable[..., bytes]:
    """Packs an array of ``acutance_stored_head``."""
    return struct.Struct(f"={units * len(_NOTHING)}q").pack


def _located(stored: Stored) -> tuple[int, ...]:
    """Packed tokens, bits, a row's stride and the bytes to the row that is to be written, or -1.

    Then :func:`_steps` of the plain rows, and of codes, scales and zero points if there are any.
    """
    buffer, _, fresh, packed, bits, codes, scale, zero = stored
    size, stride = buffer.element_size(), buffer.stride()
    row = -1
    if fresh is not None:
        row = fresh * stride[2] * size
        increment_version(buffer)
    plain = buffer.data_ptr(), stride[0] * size, stride[1] * size
    if codes is None or scale is None or zero is None:
        return (0, bits, stride[2], row, *plain)
    return (packed, bits, stride[2], row, *plain, *_steps(codes), *_steps(scale), *_steps(zero))


def _steps(tensor: Tensor) -> tuple[int, int, int]:
    """A tensor's address, and its bytes from sequence to sequence and from head to head."""
    size, stride = tensor.element_size(), tensor.stride()
    return tensor.data_ptr(), stride[0] * size, stride[1] * size


def _words(at: tuple[int, ...], place: int, head: int) -> tuple[int, ...]:
    """``acutance_stored`` of one head of one sequence."""
    packed, bits, stride, row = at[:4]
    plain = at[4] + place * at[5] + head * at[6]
    fresh = plain + row if row >= 0 else 0
    if not packed:
        return plain, fresh, stride, 0, bits, 0, 0, 0
    codes, scale, zero = (at[i] + place * at[i + 1] + head * at[i + 2] for i in (7, 10, 13))
    return plain, fresh, stride, packed, bits, codes, scale, zero
