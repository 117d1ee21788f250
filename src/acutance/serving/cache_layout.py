"""CacheLayout: where the keys and values of a block lie in a paged cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

#: A digit of the numbers that are written: every float type of 16 bits holds it exactly.
_BASE = 128
#: Writes (T, H, E) keys and (T, H, Ev) values into a cache of one block, at slots (T,).
Write = Callable[[Tensor, Tensor, Tensor, Tensor], object]


@dataclass(frozen=True)
class CacheLayout:
    """Where the keys and values of a block of T tokens are among the numbers of the block.

    Engines order a block to suit their kernels, each processor differently. The layout is not
    assumed: :meth:`discover` writes numbered keys and values and looks where they arrive.

    Attributes:
        key: (H, T, E), index of each entry of the keys in the block, read in memory order.
        value: (H, T, Ev), the same for the values.

    Example:
        >>> def write(key, value, cache, slots):  # (1, T, 2, H, E)
        ...     cache[0, slots, 0], cache[0, slots, 1] = key, value
        >>> cache = torch.zeros(5, 4, 2, 3, 8)  # five blocks of four tokens
        >>> layout = CacheLayout.discover(write, cache, heads=3, width=8, value_width=8)
        >>> cache[2, :, 0] = 1.0
        >>> key = torch.empty(3, 8, 8)
        >>> layout.read(cache, torch.tensor([4, 2]), key)  # a sequence in two blocks
        >>> key[0, :, 0]
        tensor([0., 0., 0., 0., 1., 1., 1., 1.])
    """

    key: Tensor
    value: Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens of a block, T."""
        return self.key.shape[1]

    @staticmethod
    def discover(
        write: Write, cache: Tensor, *, heads: int, width: int, value_width: int
    ) -> CacheLayout:
        """Find the layout of a cache by writing into a copy of one block.

        Args:
            write: writes keys, values into a cache at slots, as the engine does.
            cache: (blocks, ...), float32 or a float type of 16 bits; it is not changed.
            heads: number of key heads, H.
            width: of a key, E.
            value_width: of a value, Ev.

        Raises:
            ValueError: if the cache does not have blocks along its first dimension, is quantised,
                or some key or value does not arrive unchanged.
        """
        per_token = heads * (width + value_width)
        block = cache[:1].numel()
        if cache.dtype.itemsize < 2 or block == 0 or block % per_token:
            raise ValueError(
                f"a cache of shape {tuple(cache.shape)} and {cache.dtype} does not consist of "
                f"blocks of {heads} heads with keys of width {width} and values of {value_width}"
            )
        tokens = block // per_token
        numbers = torch.arange(1, block + 1, device=cache.device)  # 0 is what nothing wrote
        sizes = [tokens * heads * width, tokens * heads * value_width]
        keys, values = (entries.view(tokens, heads, -1) for entries in numbers.split(sizes))
        slots = torch.arange(tokens, device=cache.device)
        arrived = torch.zeros(block, dtype=torch.int64, device=cache.device)
        digit = 1
        while digit <= block:
            scratch = torch.zeros_like(cache[:1])
            key, value = ((n // digit % _BASE).to(cache.dtype) for n in (keys, values))
            write(key, value, scratch, slots)
            arrived += scratch.flatten().round().long() * digit
            digit *= _BASE
        if not torch.equal(arrived.sort().values, numbers):
            raise ValueError(
                f"keys and values written into a block of shape {tuple(cache.shape[1:])} do not "
                "arrive in it one by one, so its layout is not known"
            )
        index = torch.empty_like(arrived)
        index[arrived - 1] = torch.arange(block, device=cache.device)
        key, value = (
            entries.view(tokens, heads, -1).transpose(0, 1).contiguous()
            for entries in index.split(sizes)
        )
        return CacheLayout(key, value)

    def read(self, cache: Tensor, blocks: Tensor, out: Tensor, part: str = "key") -> None:
        """Write the keys or values of one sequence into ``out``.

        Args:
            cache: (blocks, ...).
            blocks: the numbers of the sequence's W blocks, in order, (W,) on the cache's device.
            out: (H, W·T, E), contiguous.
            part: ``"key"`` or ``"value"``.
        """
        index: Tensor = getattr(self, part)
        heads, tokens, width = index.shape
        order = self._orders[part]
        if order is None or not cache[0].is_contiguous():
            entries = cache.index_select(0, blocks).flatten(1)[:, index]
            out.view(heads, len(blocks), tokens, width).copy_(entries.transpose(0, 1))
            return
        halves = cache.dtype.itemsize == 2, cache.stride(0) % 2, cache.storage_offset() % 2
        if order.pairs and halves == (True, 0, 0):
            cache, out, order = cache.view(torch.int32), out.view(torch.int32), order.of_pairs()
        sizes, strides = (len(cache), *order.sizes), (cache.stride(0), *order.strides)
        # the blocks in their order in memory, then in the order of the keys: both are fast
        start = cache.storage_offset() + order.offset
        entries = cache.as_strided(sizes, strides, start).index_select(0, blocks)
        entries = entries.permute(0, *(1 + dim for dim in order.back)).transpose(0, 1)
        out.view(entries.shape).copy_(entries)

    @cached_property
    def _orders(self) -> dict[str, _Order | None]:
        return {part: _order_of(getattr(self, part)) for part in ("key", "value")}


class _Order(NamedTuple):
    """A regular order of the numbers of a block in memory: each number at a sum of strides.

    Attributes:
        sizes: of its dimensions, those with the largest strides first.
        strides: of its dimensions.
        offset: of the first number.
        back: the permutation of the dimensions that gives the order (head, token, channel).
        pairs: whether numbers of 16 bits lie in pairs of neighbouring channels.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    back: tuple[int, ...]
    pairs: bool

    def of_pairs(self) -> _Order:
        """The order of pairs of numbers."""
        return self._replace(
            sizes=(*self.sizes[:-1], self.sizes[-1] // 2),
            strides=(*(stride // 2 for stride in self.strides[:-1]), 1),
            offset=self.offset // 2,
        )


def _order_of(index: Tensor) -> _Order | None:
    """The order of an index (H, T, E), with T and E written as products; None if it has none.

    Kernels interleave tokens and channels by powers of two. The order is then regular in the digits
    of t and e.
    """
    heads = index.shape[0]
    offset = int(index[0, 0, 0])
    dims = [(heads, int(index[1, 0, 0]) - offset if heads > 1 else 0)]
    for line in (index[0, :, 0], index[0, 0, :]):
        digits: list[tuple[int, int]] = []
        factors = _factors(len(line))
        for place, size in enumerate(factors):
            step = math.prod(factors[place + 1 :])
            stride = int(line[step]) - offset if size > 1 else 0
            if digits and digits[-1][1] == size * stride:  # one dimension with the digit before it
                digits[-1] = digits[-1][0] * size, stride
            else:
                digits.append((size, stride))
        dims += digits
    steps = [torch.arange(size, device=index.device) * stride for size, stride in dims]
    regular = offset + torch.cartesian_prod(*steps).sum(1)
    if not torch.equal(regular.view(index.shape), index) or any(s < 0 for _, s in dims):
        return None
    order = sorted(
        range(len(dims)), key=lambda dim: -dims[dim][1] if dims[dim][1] else -index.numel()
    )
    sizes, strides = zip(*(dims[dim] for dim in order), strict=True)
    last = order[-1] == len(dims) - 1 and strides[-1] == 1  # neighbours are channels
    even = all(number % 2 == 0 for number in (sizes[-1], offset, *strides[:-1]))
    back = tuple(order.index(dim) for dim in range(len(dims)))
    return _Order(sizes, strides, offset, back, last and even)


def _factors(size: int) -> list[int]:
    """Prime factors of a size, in ascending order.

    Example:
        >>> _factors(80)
        [2, 2, 2, 2, 5]
    """
    factors, prime = [], 2
    while size > 1:
        while size % prime == 0:
            factors.append(prime)
            size //= prime
        prime += 1
    return factors or [1]
