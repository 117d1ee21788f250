"""What is stored of the keys and values of a few heads, and the attention that reads it.

The heads of one store keep the same, for sequences of the same length without padding. Each store
first attends, so that a row reads what its plan gives it, and then forgets what no later row reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acutance.attend import attention
from acutance.caching.head_plan import HeadPlan, quantised_groups, value_groups
from acutance.kernels.ragged import Stored

if TYPE_CHECKING:
    from typing_extensions import Self

#: read(packed, start, stop): tokens before ``packed`` as they are packed, then tokens from
#: ``start`` to ``stop`` as they were, in one tensor.
Read = Callable[[int, int, int], Tensor]


class Held:
    """What holds tensors of B sequences, (B, ...): as attributes, or in attributes of its kind."""

    def tensors(self) -> list[Tensor]:
        """All of them."""
        held: list[Tensor] = []
        for value in vars(self).values():
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Tensor | Held):
                    held += [part] if isinstance(part, Tensor) else part.tensors()
        return held

    def select(self, index: Tensor) -> Self:
        """A copy with the sequences of these indices."""
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(other, name, value.index_select(0, index))
            elif isinstance(value, Held):
                setattr(other, name, value.select(index))
            elif isinstance(value, list):
                setattr(other, name, [part.select(index) for part in value])
        return other


class Growing(Held):
    """A tensor that grows along one dimension, with a little room: at most 1/64 of its length."""

    def __init__(self, dim: int) -> None:
        self._dim, self.n = dim, 0
        self._buffer: Tensor | None = None

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


class Channel(Held):
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


#: Rows whose masks are formed at a time.
_BLOCK = 512


@dataclass(frozen=True)
class Attend:
    """Attention with a model's settings.

    Attributes:
        scale: factor of the scores; None is 1 / √E.
        softcap: bounds the scores as c · tanh(s / c).
        dropout: probability of dropping a weight.
    """

    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, offset: int | None
    ) -> Tensor:
        """The output; row i reads the keys up to i + offset, and all if that is None."""
        return attention(
            query, key, value, mask, offset is not None, self.scale, True,
            query_offset=offset or 0, softcap=self.softcap, dropout_p=self.dropout,
        )  # fmt: skip


class Store(Held, ABC):
    """Keys and values of H heads and B sequences.

    Attributes:
        n: tokens that were stored, forgotten ones included.
    """

    _key: Any
    _value: Any

    def __init__(self, key: Any = None, value: Any = None) -> None:
        self.n = 0
        self._key, self._value = key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        """Store new tokens, and return the output of their rows.

        Args:
            query: (B, Hq, L, E), Hq a multiple of H.
            key: (B, H, L, E).
            value: (B, H, L, Ev).
            attend: computes attention.

        Returns:
            (B, Hq, L, Ev).
        """
        if not self.n or query.shape[2] > 1:
            return self._attend_rows(query, key, value, attend)
        self.add(key, value)
        held = self.held()
        if held is None:
            return query.new_zeros((*query.shape[:3], value.shape[3]))
        key, value = (restore(part) for part in held)
        return attend(query, key, value, None, None)

    @abstractmethod
    def _attend_rows(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        """:meth:`attend` for several tokens, or the first."""

    @abstractmethod
    def add(self, key: Tensor, value: Tensor) -> Any:
        """Store new tokens, key (B, H, L, E) and value (B, H, L, Ev), that no row reads now."""

    def admit(
        self, key: Tensor, value: Tensor, heads: Sequence[int]
    ) -> tuple[Stored, Stored] | None:
        """Add one new token of a layer, and return :meth:`held`.

        The caller writes it where :attr:`~acutance.kernels.ragged.Stored.fresh` says.

        Args:
            key: (B, all heads, 1, E).
            value: (B, all heads, 1, Ev).
            heads: those of this store.
        """
        self.add(some(key, heads), some(value, heads))
        return self.held()

    @abstractmethod
    def held(self) -> tuple[Stored, Stored] | None:
        """Keys and values that the newest token's row reads; None if there are none."""


def store_for(plan: HeadPlan, group: int, residual: int) -> Store:
    """The store of heads with a plan; ``group`` and ``residual`` as in a :class:`CachePlan`."""
    if plan.kind == "dropped":
        return Dropped()
    if plan.kind == "streaming":
        return Streaming(plan.first, plan.recent)
    if plan.quantised:
        return Quantised(plan, group, residual)
    return Full()


def some(tensor: Tensor, heads: Sequence[int]) -> Tensor:
    """The tensor's heads with these indices, a view where they are neighbours."""
    if len(heads) == tensor.shape[1]:
        return tensor
    return tensor[:, heads[0] : heads[-1] + 1] if is_range(heads) else tensor[:, heads]


def is_range(heads: Sequence[int]) -> bool:
    """Whether sorted indices are neighbours."""
    return heads[-1] - heads[0] + 1 == len(heads)


class Dropped(Store):
    """Nothing: the output is zero."""

    def _attend_rows(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        self.add(key, value)
        return query.new_zeros((*query.shape[:3], value.shape[3]))

    def add(self, key: Tensor, value: Tensor) -> None:
        """Count them."""
        self.n += key.shape[2]

    def held(self) -> None:
        """None."""


class Full(Store):
    """All keys and values, as they are."""

    def __init__(self) -> None:
        super().__init__(Growing(2), Growing(2))

    def _attend_rows(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        before = self.n
        self.add(key, value)
        if before:
            key, value = self._key.get(), self._value.get()
        return attend(query, key, value, None, before)

    def add(self, key: Tensor, value: Tensor) -> None:
        """See :class:`Store`."""
        self.n += key.shape[2]
        with torch.inference_mode(False), torch.no_grad():
            self._key.append(key)
            self._value.append(value)

    def held(self) -> tuple[Stored, Stored]:
        """All of them."""
        return Stored(self._key.buffer, self.n), Stored(self._value.buffer, self.n)

    def admit(
        self, key: Tensor, value: Tensor, heads: Sequence[int]
    ) -> tuple[Stored, Stored] | None:
        """See :class:`Store`."""
        if self._key.full or self._value.full:
            return super().admit(key, value, heads)
        before, self.n = self.n, self.n + 1
        self._key.extend()
        self._value.extend()
        return (
            Stored(self._key.buffer, self.n, before),
            Stored(self._value.buffer, self.n, before),
        )


class Streaming(Store):
    """The first keys and the newest, which lie in a ring: a new key replaces the oldest."""

    def __init__(self, first: int, recent: int) -> None:
        super().__init__()
        self._first, self._recent = first, recent

    def _places(self, position: Tensor) -> Tensor:
        """Where the keys at these positions lie."""
        ring = self._first + (position - self._first) % self._recent
        return torch.where(position < self._first, position, ring)

    def _positions(self, n: int, device: torch.device) -> Tensor:
        """Positions of the keys that are held of n tokens, in order."""
        start = max(self._first, n - self._recent)
        first = torch.arange(min(self._first, n), device=device)
        return torch.cat([first, torch.arange(start, max(n, start), device=device)])

    def add(self, key: Tensor, value: Tensor) -> None:
        """See :class:`Store`."""
        before, self.n = self.n, self.n + key.shape[2]
        self._keep(key, value, before)

    def held(self) -> tuple[Stored, Stored]:
        """First and newest keys, in any order."""
        count = min(self.n, self._first + self._recent)
        return Stored(self._key, count), Stored(self._value, count)

    def admit(
        self, key: Tensor, value: Tensor, heads: Sequence[int]
    ) -> tuple[Stored, Stored] | None:
        """See :class:`Store`."""
        before, most = self.n, self._first + self._recent
        if before < most:
            return super().admit(key, value, heads)
        self.n += 1
        place = self._first + (before - self._first) % self._recent
        return Stored(self._key, most, place), Stored(self._value, most, place)

    def _attend_rows(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        before, self.n = self.n, self.n + key.shape[2]
        position = torch.arange(before, self.n, device=key.device)
        new_key, new_value = key, value
        if before:
            held_positions = self._positions(before, key.device)
            places = self._places(held_positions)
            key = torch.cat([self._key[:, :, places], key], 2)
            value = torch.cat([self._value[:, :, places], value], 2)
            position = torch.cat([held_positions, position])
        if self.n <= self._first + self._recent:
            output = attend(query, key, value, None, before)
        else:  # rows do not all read the same keys
            outputs = []
            block = max(_BLOCK, self._recent)
            rows = torch.arange(before, self.n, device=key.device)
            for part, some in zip(query.split(block, 2), rows.split(block), strict=True):
                start, stop = int(some[0]), int(some[-1]) + 1
                near = (position < self._first) | (position > start - self._recent)
                index = (near & (position < stop)).nonzero()[:, 0]
                at, row = position[index], some[:, None]
                seen = (at <= row) & ((at < self._first) | (at > row - self._recent))
                outputs.append(attend(part, key[:, :, index], value[:, :, index], seen, None))
            output = torch.cat(outputs, 2)
        self._keep(new_key, new_value, before)
        return output

    def _keep(self, key: Tensor, value: Tensor, before: int) -> None:
        """Store new keys and values, of positions from ``before`` on, that later rows may read."""
        with torch.inference_mode(False), torch.no_grad():
            if key.shape[2] == 1 and before >= self._first + self._recent:  # decoding: in place
                place = self._first + (before - self._first) % self._recent
                self._key[:, :, place] = key[:, :, 0]
                self._value[:, :, place] = value[:, :, 0]
                return
            position = self._positions(self.n, key.device)
            position = position[position >= before]
            key, value = key[:, :, position - before], value[:, :, position - before]
            most = self._first + self._recent
            room = min(self.n, most) - (self._key.shape[2] if before else 0)
            if room > 0:
                more = min(room + self.n // 64, most - min(before, most))
                self._key = _longer(self._key if before else key[:, :, :0], more)
                self._value = _longer(self._value if before else value[:, :, :0], more)
            places = self._places(position)
            self._key.index_copy_(2, places, key)
            self._value.index_copy_(2, places, value)


def _longer(tensor: Tensor, more: int) -> Tensor:
    """A copy (B, H, S, D) with room for ``more`` tokens."""
    shape = (*tensor.shape[:2], tensor.shape[2] + more, tensor.shape[3])
    larger = tensor.new_empty(shape)
    larger[:, :, : tensor.shape[2]] = tensor
    return larger


class Quantised(Store):
    """All keys and values; of older tokens, keys or values or both are packed."""

    def __init__(self, plan: HeadPlan, group: int, residual: int) -> None:
        super().__init__(
            Channel(plan.key_bits, group, of_keys=True),
            Channel(plan.value_bits, group, of_keys=False),
        )
        self._group, self._residual = group, residual

    def held(self) -> tuple[Stored, Stored]:
        """All of them."""
        return self._key.stored(), self._value.stored()

    def add(self, key: Tensor, value: Tensor) -> tuple[Read, Read]:
        """See :class:`Store`; returns the readers of keys and values."""
        self.n += key.shape[2]
        packed = self._packed(self.n)
        with torch.inference_mode(False), torch.no_grad():
            return self._key.append(key, packed), self._value.append(value, packed)

    def _attend_rows(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        before = self.n
        keys, values = self.add(key, value)
        outputs = []
        for part in query.split(_BLOCK, 2):
            after = before + part.shape[2]
            # rows before..after read tokens up to some between old and new as they are packed
            old, new = self._packed(before + 1), self._packed(after)
            row = torch.arange(before, after, device=key.device)[:, None]
            first = torch.arange(new, device=key.device)
            rest = torch.arange(old, after, device=key.device)
            limit = (row + 1 - self._residual).clamp(min=0) // self._group * self._group
            seen = torch.cat([first < limit, (rest >= limit) & (rest <= row)], 1)
            outputs.append(attend(part, keys(new, old, after), values(new, old, after), seen, None))
            before = after
        return torch.cat(outputs, 2)

    def _packed(self, n: int) -> int:
        """Tokens that a row with n visible keys reads packed."""
        return quantised_groups(n, self._group, self._residual) * self._group
