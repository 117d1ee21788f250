"""What is stored of the keys and values of a few heads, and the attention that reads it.

The heads of one store keep the same, for sequences of the same length without padding. Each store
first attends, so that a row reads what its plan gives it, and then forgets what no later row reads.
"""

from __future__ import annotations

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
#: Rows whose masks are formed at a time.
_BLOCK = 512
#: Spacing of float16 next to 1. The zero point is rounded down by it, so that no number is below.
_EPS = 2.0**-10


class Held:
    """What holds tensors of B sequences, (B, ...): as attributes, or in attributes of its kind."""

    def tensors(self) -> list[Tensor]:
        """All of them."""
        held: list[Tensor] = []
        for value in vars(self).values():
            for entry in value if isinstance(value, list) else [value]:
                if isinstance(entry, Tensor | Held):
                    held += [entry] if isinstance(entry, Tensor) else entry.tensors()
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
                setattr(other, name, [entry.select(index) for entry in value])
        return other


class Growing(Held):
    """A tensor (B, H, n, ...) that grows along n, with a little room: at most 1/64 of its length.

    Attributes:
        n: its length.
        buffer: all memory, the room at the end included; absent before the first tokens.
    """

    n = 0
    buffer: Tensor

    @property
    def full(self) -> bool:
        """Whether there is no room for one more."""
        return not self.n or self.n == self.buffer.shape[2]

    def append(self, new: Tensor) -> None:
        """Add a tensor at the end."""
        before, self.n = self.n, self.n + new.shape[2]
        if not before or self.n > self.buffer.shape[2]:
            larger = new.new_empty((*new.shape[:2], self.n + self.n // 64, *new.shape[3:]))
            if before:
                larger[:, :, :before] = self.buffer[:, :, :before]
            self.buffer = larger
        self.buffer[:, :, before : self.n] = new

    def get(self) -> Tensor:
        """What was added."""
        return self.buffer[:, :, : self.n]


class Channel(Held):
    """The keys, or the values, of a few heads in one precision.

    Args:
        bits: 16 packs nothing.
        group: tokens of a group; of values, also channels that share a scale.
        of_keys: whether a scale is shared along tokens, as for keys.
    """

    def __init__(self, bits: int, group: int, *, of_keys: bool) -> None:
        self._bits, self._group, self._of_keys = bits, group, of_keys
        self._groups = [Growing(), Growing(), Growing()]  # codes, scales and zero points
        self._newest = Growing()  # tokens that are not packed

    def append(self, new: Tensor, packed: int) -> Read:
        """Add tokens (B, H, L, D) and pack all before the token ``packed``; returns their reader.

        The reader is valid until the next call. Gradients reach the new tokens that it reads as
        they were.
        """
        before = self._groups[0].n * self._group
        count = 0 if self._bits == 16 else packed - before
        exact, is_first = new, not self._newest.n
        if not is_first and (count or new.requires_grad):
            exact = torch.cat([self._newest.get(), new], 2)
        with torch.inference_mode(False), torch.no_grad():
            if count:
                self._pack(exact[:, :, :count])
                self._newest = Growing()
            self._newest.append(exact[:, :, count:] if count else new)
        if not is_first and exact is new:
            exact = self._newest.get()
        restored: list[Tensor] = []  # once, if it is read

        def read(packed: int, start: int, stop: int) -> Tensor:
            newest = exact[:, :, start - before : stop - before]
            if not packed:
                return newest
            if not restored:
                stored = self.stored()._replace(length=0)
                restored.append(exact if self._bits == 16 else restore(stored))
            return torch.cat([restored[0][:, :, :packed], newest], 2)

        return read

    def _pack(self, exact: Tensor) -> None:
        """Round the tokens of whole groups, and keep their codes."""
        groups = exact.unflatten(2, (-1, self._group))
        width = groups.shape[-1]
        channels = None if self._of_keys else width // value_groups(width, self._group)
        for grown, codes in zip(self._groups, quantise(groups, self._bits, channels), strict=True):
            grown.append(codes)

    @property
    def full(self) -> bool:
        """Whether there is no room for one more token."""
        return self._newest.full

    def admit(self) -> Stored:
        """:meth:`stored` with one more token, which the caller writes where there is room."""
        self._newest.n += 1
        return self.stored()._replace(fresh=self._newest.n - 1)

    def stored(self) -> Stored:
        """What it holds of all tokens."""
        newest, (codes, scale, zero) = self._newest, self._groups
        if not codes.n:
            return Stored(newest.buffer, newest.n)
        return Stored(
            newest.buffer, newest.n, None, codes.n * self._group, self._bits,
            codes.buffer, scale.buffer, zero.buffer,
        )  # fmt: skip


# -- rounding --------------------------------------------------------------------------------------


def quantise(groups: Tensor, bits: int, channels: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Round numbers to 2^bits levels between the least and the largest of each group.

    Args:
        groups: (..., G, tokens, D), tokens a multiple of 8.
        bits: 8, 4 or 2.
        channels: channels of a token that share a scale; None shares it along tokens instead, one
            for each channel.

    Returns:
        Codes, uint8 (..., G, tokens · bits / 8, D); scales, float16, broadcastable to
        (..., G, tokens, D / c, c) for c channels that share one; and zero points, the same shape.

    Example:
        >>> x = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(2).view(1, 8, 1)
        >>> dequantise(*quantise(x, 2, None), 2, torch.float32).flatten()
        tensor([0.0000, 1.0010, 2.0020, 3.0029, 0.0000, 1.0010, 2.0020, 3.0029])
    """
    width = groups.shape[-1]
    numbers = groups.unflatten(-1, (width, 1) if channels is None else (-1, channels)).float()
    dim = -3 if channels is None else -1
    least, most = numbers.amin(dim, keepdim=True), numbers.amax(dim, keepdim=True)
    zero = (least - least.abs() * _EPS).half()
    scale = ((most - zero.float()) / (2**bits - 1) * (1 + _EPS)).half()
    steps = (numbers - zero.float()) / scale.float().clamp(min=torch.finfo(torch.float16).tiny)
    codes = steps.round().clamp(0, 2**bits - 1).to(torch.uint8).flatten(-2)
    return pack(codes, bits), scale, zero


def dequantise(codes: Tensor, scale: Tensor, zero: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The rounded numbers of what :func:`quantise` returned, (..., G · tokens, D)."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    steps = unpack(codes, bits).unflatten(-1, (scale.shape[-2], -1)).to(wide)
    numbers = torch.addcmul(zero.to(wide), steps, scale.to(wide))
    return numbers.flatten(-2).flatten(-3, -2).to(dtype)


def restore(stored: Stored) -> Tensor:
    """All tokens, those that are packed rounded, (B, H, S, D)."""
    if stored.codes is None or stored.scale is None or stored.zero is None:
        return stored.plain
    groups = stored.packed // (stored.codes.shape[3] * 8 // stored.bits)
    rounded = dequantise(
        stored.codes[:, :, :groups], stored.scale[:, :, :groups], stored.zero[:, :, :groups],
        stored.bits, stored.buffer.dtype,
    )  # fmt: skip
    return torch.cat([rounded, stored.plain], 2)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., tokens, D) into bytes (..., tokens · bits / 8, D).

    Example:
        >>> pack(torch.tensor([[1], [2]], dtype=torch.uint8), 4)
        tensor([[33]], dtype=torch.uint8)
    """
    first, *rest = codes.chunk(8 // bits, -2)
    packed = first.clone()
    for index, later in enumerate(rest, 1):
        packed |= later << (bits * index)
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
    return torch.cat([(packed >> (bits * index)) & last for index in range(8 // bits)], -2)


# -- stores ----------------------------------------------------------------------------------------


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


class Store(Held):
    """Keys and values of H heads and B sequences; this one keeps nothing, others derive from it.

    Attributes:
        n: tokens that were stored, forgotten ones included.
    """

    def __init__(self) -> None:
        self.n = 0

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
        return attend(query, restore(held[0]), restore(held[1]), None, None)

    def _attend_rows(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        """:meth:`attend` for several tokens, or the first."""
        self.add(key, value)
        return query.new_zeros((*query.shape[:3], value.shape[3]))

    def add(self, key: Tensor, value: Tensor) -> Any:
        """Store new tokens, key (B, H, L, E) and value (B, H, L, Ev), that no row reads now."""
        self.n += key.shape[2]

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

    def held(self) -> tuple[Stored, Stored] | None:
        """Keys and values that the newest token's row reads; None if there are none."""
        return None


def store_for(plan: HeadPlan, group: int, residual: int) -> Store:
    """The store of heads with a plan; ``group`` and ``residual`` as in a :class:`CachePlan`."""
    if plan.kind == "dropped":
        return Store()
    if plan.kind == "streaming":
        return Streaming(plan.first, plan.recent)
    return Whole(plan, group, residual)


def some(tensor: Tensor, heads: Sequence[int]) -> Tensor:
    """The tensor's heads with these indices, a view where they are neighbours."""
    if len(heads) == tensor.shape[1]:
        return tensor
    return tensor[:, heads[0] : heads[-1] + 1] if is_range(heads) else tensor[:, heads]


def is_range(heads: Sequence[int]) -> bool:
    """Whether sorted indices are neighbours."""
    return heads[-1] - heads[0] + 1 == len(heads)


class Streaming(Store):
    """The first keys and the newest, which lie in a ring: a new key replaces the oldest."""

    _key: Tensor
    _value: Tensor

    def __init__(self, first: int, recent: int) -> None:
        super().__init__()
        self._first, self._recent, self._most = first, recent, first + recent

    def _places(self, position: Any) -> Any:
        """Where keys lie whose positions are not among the first."""
        return self._first + (position - self._first) % self._recent

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
        count = min(self.n, self._most)
        return Stored(self._key, count), Stored(self._value, count)

    def admit(
        self, key: Tensor, value: Tensor, heads: Sequence[int]
    ) -> tuple[Stored, Stored] | None:
        """See :class:`Store`."""
        if self.n < self._most:
            return super().admit(key, value, heads)
        fresh = self._places(self.n)
        self.n += 1
        return Stored(self._key, self._most, fresh), Stored(self._value, self._most, fresh)

    def _attend_rows(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        before, self.n = self.n, self.n + key.shape[2]
        position = torch.arange(before, self.n, device=key.device)
        new_key, new_value, rows = key, value, position
        if before:
            held = self._positions(before, key.device)
            places = torch.where(held < self._first, held, self._places(held))
            key = torch.cat([self._key[:, :, places], key], 2)
            value = torch.cat([self._value[:, :, places], value], 2)
            position = torch.cat([held, position])
        if self.n <= self._most:
            output = attend(query, key, value, None, before)
        else:  # rows do not all read the same keys
            outputs = []
            block = max(_BLOCK, self._recent)
            for queries, row in zip(query.split(block, 2), rows[:, None].split(block), strict=True):
                near = (position < self._first) | (position > row[0] - self._recent)
                index = (near & (position <= row[-1])).nonzero()[:, 0]
                at = position[index]
                seen = (at <= row) & ((at < self._first) | (at > row - self._recent))
                outputs.append(attend(queries, key[:, :, index], value[:, :, index], seen, None))
            output = torch.cat(outputs, 2)
        self._keep(new_key, new_value, before)
        return output

    def _keep(self, key: Tensor, value: Tensor, before: int) -> None:
        """Store new keys and values, of positions from ``before`` on, that later rows may read."""
        with torch.inference_mode(False), torch.no_grad():
            if key.shape[2] == 1 and before >= self._most:  # decoding: in place
                self._key[:, :, self._places(before)] = key[:, :, 0]
                self._value[:, :, self._places(before)] = value[:, :, 0]
                return
            position = self._positions(self.n, key.device)
            position = position[position >= before]
            places = torch.where(position < self._first, position, self._places(position))
            if not before:
                self._key, self._value = key[:, :, :0], value[:, :, :0]
            room = min(self.n, self._most) - self._key.shape[2]
            if room > 0:
                more = min(room + self.n // 64, self._most - min(before, self._most))
                self._key, self._value = _longer(self._key, more), _longer(self._value, more)
            self._key.index_copy_(2, places, key[:, :, position - before])
            self._value.index_copy_(2, places, value[:, :, position - before])


def _longer(tensor: Tensor, more: int) -> Tensor:
    """A copy (B, H, S, D) with room for ``more`` tokens."""
    held, shape = tensor.shape[2], tensor.shape
    larger = tensor.new_empty((*shape[:2], held + more, shape[3]))
    larger[:, :, :held] = tensor
    return larger


class Whole(Store):
    """All keys and values; of older tokens, keys or values or both may be packed."""

    def __init__(self, plan: HeadPlan, group: int, residual: int) -> None:
        super().__init__()
        self._quantised, self._group, self._residual = plan.quantised, group, residual
        self._key = Channel(plan.key_bits, group, of_keys=True)
        self._value = Channel(plan.value_bits, group, of_keys=False)

    def held(self) -> tuple[Stored, Stored]:
        """All of them."""
        return self._key.stored(), self._value.stored()

    def add(self, key: Tensor, value: Tensor) -> tuple[Read, Read]:
        """See :class:`Store`; returns the readers of keys and values."""
        self.n += key.shape[2]
        packed = self._packed(self.n)
        return self._key.append(key, packed), self._value.append(value, packed)

    def admit(
        self, key: Tensor, value: Tensor, heads: Sequence[int]
    ) -> tuple[Stored, Stored] | None:
        """See :class:`Store`."""
        packs = self._packed(self.n) != self._packed(self.n + 1)
        if packs or self._key.full or self._value.full:
            return super().admit(key, value, heads)
        self.n += 1
        return self._key.admit(), self._value.admit()

    def _attend_rows(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        before = self.n
        keys, values = self.add(key, value)
        if not self._quantised:
            if before:
                key, value = keys(0, 0, self.n), values(0, 0, self.n)
            return attend(query, key, value, None, before)
        outputs = []
        for queries in query.split(_BLOCK, 2):
            after = before + queries.shape[2]
            # rows before..after read tokens up to some between old and new as they are packed
            old, new = self._packed(before + 1), self._packed(after)
            row = torch.arange(before, after, device=key.device)[:, None]
            first = torch.arange(new, device=key.device)
            rest = torch.arange(old, after, device=key.device)
            limit = (row + 1 - self._residual).clamp(min=0) // self._group * self._group
            seen = torch.cat([first < limit, (rest >= limit) & (rest <= row)], 1)
            read = keys(new, old, after), values(new, old, after)
            outputs.append(attend(queries, *read, seen, None))
            before = after
        return torch.cat(outputs, 2)

    def _packed(self, n: int) -> int:
        """Tokens that a row with n visible keys reads packed."""
        if not self._quantised:
            return 0
        return quantised_groups(n, self._group, self._residual) * self._group
