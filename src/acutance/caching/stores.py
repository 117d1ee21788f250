"""What is stored of the keys and values of a few heads, and the attention that reads it.

The heads of one store keep the same, for sequences of the same length without padding. Each store
first attends, so that a row reads what its plan gives it, and then forgets what no later row reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.attend import attention
from acutance.caching.growing import Channel, Growing, Read, restore
from acutance.caching.head_plan import HeadPlan, quantised_groups
from acutance.kernels.ragged import Stored

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

    @property
    def plain(self) -> bool:
        """Whether weights are the softmax of scaled scores and nothing else."""
        return not (self.softcap or self.dropout)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, offset: int | None
    ) -> Tensor:
        """The output; row i reads the keys up to i + offset, and all if that is None."""
        return attention(
            query, key, value, mask, offset is not None, self.scale, True,
            query_offset=offset or 0, softcap=self.softcap, dropout_p=self.dropout,
        )  # fmt: skip


class Store(ABC):
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
    def add(self, key: Tensor, value: Tensor) -> None:
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

    def tensors(self) -> list[Tensor]:
        """All tensors that it holds."""
        return [*self._key.tensors(), *self._value.tensors()]

    def select(self, index: Tensor) -> Store:
        """A copy with the sequences of these indices."""
        other = copy(self)
        other._key, other._value = self._key.select(index), self._value.select(index)
        return other


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

    def tensors(self) -> list[Tensor]:
        """None."""
        return []

    def select(self, index: Tensor) -> Store:
        """Another one."""
        return copy(self)


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
        super().__init__(torch.empty(0), torch.empty(0))
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
        else:
            output = self._by_blocks(query, key, value, position, before, attend)
        self._keep(new_key, new_value, before)
        return output

    def _by_blocks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position: Tensor,
        before: int,
        attend: Attend,
    ) -> Tensor:
        """The output of rows that do not all read the same keys; ``position`` rises."""
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
        return torch.cat(outputs, 2)

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

    def tensors(self) -> list[Tensor]:
        """Keys and values."""
        return [self._key, self._value]

    def select(self, index: Tensor) -> Store:
        """See :class:`Store`."""
        other = copy(self)
        if self.n:
            other._key = self._key.index_select(0, index)
            other._value = self._value.index_select(0, index)
        return other


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

    def add(self, key: Tensor, value: Tensor) -> None:
        """See :class:`Store`."""
        self._append(key, value)

    def held(self) -> tuple[Stored, Stored]:
        """All of them."""
        return self._key.stored(), self._value.stored()

    def _append(self, key: Tensor, value: Tensor) -> tuple[Read, Read]:
        """Add tokens; returns the readers of keys and values."""
        self.n += key.shape[2]
        packed = self._packed(self.n)
        with torch.inference_mode(False), torch.no_grad():
            return self._key.append(key, packed), self._value.append(value, packed)

    def _attend_rows(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        before = self.n
        keys, values = self._append(key, value)
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
