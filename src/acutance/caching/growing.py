"""Tensors that grow by tokens: as they are, or packed into 8, 4 or 2 bits but for the newest."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from acutance.caching.head_plan import value_groups
from acutance.kernels.ragged import Stored

#: read(packed, start, stop): tokens before ``packed`` as they are packed, then tokens from
#: ``start`` to ``stop`` as they were, in one tensor.
Read = Callable[[int, int, int], Tensor]


class Growing:
    """A tensor that grows along one dimension, with a little room: at most 1/64 of its length."""

    def __init__(self, dim: int, buffer: Tensor | None = None, n: int = 0) -> None:
        self._dim, self._buffer, self.n = dim, buffer, n

    def append(self, new: Tensor) -> None:
        """Add a tensor at the end."""
        count = new.shape[self._dim]
        if self._buffer is None or self.n + count > self._buffer.shape[self._dim]:
            room = self.n + count
            shape = list(new.shape)
            shape[self._dim] = room + room // 64
            larger = new.new_empty(shape)
            if self._buffer is not None:
                larger.narrow(self._dim, 0, self.n).copy_(self.get())
            self._buffer = larger
        self._buffer.narrow(self._dim, self.n, count).copy_(new)
        self.n += count

    @property
    def full(self) -> bool:
        """Whether there is no room for one more."""
        return self._buffer is None or self.n == self._buffer.shape[self._dim]

    def extend(self) -> None:
        """Add one more, which the caller writes, where there is room."""
        self.n += 1

    @property
    def buffer(self) -> Tensor:
        """All memory, the room at the end included."""
        assert self._buffer is not None
        return self._buffer

    def get(self) -> Tensor:
        """What was added."""
        return self.buffer.narrow(self._dim, 0, self.n)

    def tensors(self) -> list[Tensor]:
        """The tensor, if there is one."""
        return [] if self._buffer is None else [self._buffer]

    def select(self, index: Tensor) -> Growing:
        """A copy with these indices of dimension 0."""
        buffer = None if self._buffer is None else self._buffer.index_select(0, index)
        return Growing(self._dim, buffer, self.n)


class Channel:
    """The keys, or the values, of a few heads in one precision.

    Args:
        bits: 16 packs nothing.
        group: tokens of a group; of values, also channels that share a scale.
        of_keys: whether a scale is shared along tokens, as for keys.
    """

    def __init__(self, bits: int, group: int, *, of_keys: bool) -> None:
        self._bits, self._group, self._of_keys = bits, group, of_keys
        # with 16 bits all tokens, else codes, scales and zero points of whole groups
        self._grown = [Growing(2)] if bits == 16 else [Growing(2), Growing(2), Growing(2)]
        self._rest: Tensor | None = None  # newest tokens, not packed

    def append(self, new: Tensor, packed: int) -> Read:
        """Add tokens (B, H, L, D) and pack all before the token ``packed``; returns their reader.

        The reader is valid until the next call.
        """
        if self._bits == 16:
            self._grown[0].append(new)
            plain = self._grown[0].get()

            def whole(packed: int, start: int, stop: int) -> Tensor:
                if packed == start:
                    return plain[:, :, :stop]
                return torch.cat([plain[:, :, :packed], plain[:, :, start:stop]], 2)

            return whole
        before = self._grown[0].n * self._group
        exact = new if self._rest is None else torch.cat([self._rest, new], 2)
        count = packed - before
        if count:
            groups = exact[:, :, :count].unflatten(2, (-1, self._group))
            width = groups.shape[-1]
            channels = None if self._of_keys else width // value_groups(width, self._group)
            made = quantise(groups, self._bits, channels)
            for grown, part in zip(self._grown, (made.codes, made.scale, made.zero), strict=True):
                grown.append(part)
        if count or self._rest is None:
            self._rest = exact[:, :, count:].clone()
        else:
            self._rest = exact
        restored: list[Tensor] = []  # once, if it is read

        def parts(packed: int, start: int, stop: int) -> Tensor:
            newest = exact[:, :, start - before : stop - before]
            if not packed:
                return newest
            if not restored:
                restored.append(restore(self.stored()._replace(length=0)))
            return torch.cat([restored[0][:, :, :packed], newest], 2)

        return parts

    def stored(self) -> Stored:
        """What it holds of all tokens."""
        first = self._grown[0]
        if self._rest is None:
            return Stored(first.buffer, first.n)
        length, groups = self._rest.shape[2], first.n
        if not groups:
            return Stored(self._rest, length)
        codes, scale, zero = self._grown
        return Stored(
            self._rest, length, None, groups * self._group, self._bits,
            codes.buffer, scale.buffer, zero.buffer,
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """All tensors that it holds."""
        buffers = [grown.buffer for grown in self._grown if grown.n]
        return buffers if self._rest is None else [*buffers, self._rest]

    def select(self, index: Tensor) -> Channel:
        """A copy with the sequences of these indices."""
        other = copy(self)
        other._grown = [grown.select(index) for grown in self._grown]
        other._rest = None if self._rest is None else self._rest.index_select(0, index)
        return other


def restore(stored: Stored) -> Tensor:
    """All tokens, those that are packed rounded, (B, H, S, D)."""
    if stored.codes is None or stored.scale is None or stored.zero is None:
        return stored.plain
    groups = stored.packed // (stored.codes.shape[3] * 8 // stored.bits)
    packed = Packed(
        stored.codes[:, :, :groups], stored.scale[:, :, :groups], stored.zero[:, :, :groups],
        stored.bits,
    )  # fmt: skip
    return torch.cat([packed.restore(stored.buffer.dtype), stored.plain], 2)


#: Spacing of float16 next to 1. The zero point is rounded down by it, so that no number is below.
_EPS = 2.0**-10


@dataclass(frozen=True)
class Packed:
    """Codes of whole groups of tokens with their scales.

    Attributes:
        codes: uint8 (..., G, tokens · bits / 8, D) for G groups of tokens.
        scale: float16, broadcastable to (..., G, tokens, D / c, c) for c channels that share one.
        zero: float16, the same shape.
        bits: 8, 4 or 2.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int

    def restore(self, dtype: torch.dtype) -> Tensor:
        """The rounded numbers, (..., G · tokens, D)."""
        codes = unpack(self.codes, self.bits)
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        parts = codes.unflatten(-1, (self.scale.shape[-2], -1)).to(wide)
        numbers = torch.addcmul(self.zero.to(wide), parts, self.scale.to(wide))
        return numbers.flatten(-2).flatten(-3, -2).to(dtype)


def quantise(groups: Tensor, bits: int, channels: int | None) -> Packed:
    """Round numbers to 2^bits levels between the least and the largest of each group.

    Args:
        groups: (..., G, tokens, D), tokens a multiple of 8.
        bits: 8, 4 or 2.
        channels: channels of a token that share a scale; None shares it along tokens instead, one
            for each channel.

    Example:
        >>> x = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(2).view(1, 8, 1)
        >>> quantise(x, 2, None).restore(torch.float32).flatten()
        tensor([0.0000, 1.0010, 2.0020, 3.0029, 0.0000, 1.0010, 2.0020, 3.0029])
    """
    width = groups.shape[-1]
    parts = groups.unflatten(-1, (width, 1) if channels is None else (-1, channels)).float()
    dim = -3 if channels is None else -1
    least, most = parts.amin(dim, keepdim=True), parts.amax(dim, keepdim=True)
    zero = (least - least.abs() * _EPS).half()
    scale = ((most - zero.float()) / (2**bits - 1) * (1 + _EPS)).half()
    steps = (parts - zero.float()) / scale.float().clamp(min=torch.finfo(torch.float16).tiny)
    codes = steps.round().clamp(0, 2**bits - 1).to(torch.uint8).flatten(-2)
    return Packed(pack(codes, bits), scale, zero, bits)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., tokens, D) into bytes (..., tokens · bits / 8, D).

    Example:
        >>> pack(torch.tensor([[1], [2]], dtype=torch.uint8), 4)
        tensor([[33]], dtype=torch.uint8)
    """
    parts = codes.chunk(8 // bits, -2)
    packed = parts[0].clone()
    for place, part in enumerate(parts[1:], 1):
        packed |= part << (bits * place)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Inverse of :func:`pack`.

    Example:
        >>> unpack(torch.tensor([[33]], dtype=torch.uint8), 4).flatten()
        tensor([1, 2], dtype=torch.uint8)
    """
    if bits == 8:
        return packed
    last = 2**bits - 1
    parts = [(packed >> (bits * place)) & last for place in range(8 // bits)]
    return torch.cat(parts, -2)
