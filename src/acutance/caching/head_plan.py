"""HeadPlan: what one key head keeps in a key-value cache, and its bytes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from acutance.caching.layer_shapes import LayerShape
from acutance.shapes import check_count

Kind = Literal["full", "streaming", "dropped"]
Bits = Literal[16, 8, 4, 2]
#: Bytes of the scale and the zero point of a group, both float16.
_SCALE_AND_ZERO = 4


@dataclass(frozen=True)
class HeadPlan:
    """What one key head keeps.

    * ``"full"``: every key and value;
    * ``"streaming"``: the first ``first`` and the newest ``recent``, the row's own key included;
    * ``"dropped"``: nothing. The output of its query heads is zero.

    A precision of 16 bits means not quantised: keys or values stay in the model's dtype. Only full
    heads can be quantised; the few keys of a streaming head stay as they are.

    Attributes:
        kind: full, streaming or dropped.
        first: how many of the first keys a streaming head keeps.
        recent: how many of the newest keys a streaming head keeps.
        key_bits: precision of the keys.
        value_bits: precision of the values.

    Raises:
        TypeError: if a number is not an integer.
        ValueError: if a field is unknown or does not fit the kind.

    Example:
        >>> HeadPlan("streaming", first=4, recent=124).keys(4096)
        128
    """

    kind: Kind = "full"
    first: int = 0
    recent: int = 0
    key_bits: Bits = 16
    value_bits: Bits = 16

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be {', '.join(get_args(Kind))}, got {self.kind!r:.60}")
        streams = self.kind == "streaming"
        check_count("first", self.first, 0)
        check_count("recent", self.recent, 1 if streams else 0)
        if not streams and (self.first or self.recent):
            raise ValueError(
                f"only a streaming head has first and recent keys, got first={self.first} and "
                f"recent={self.recent} for a {self.kind} head"
            )
        for name in ("key_bits", "value_bits"):
            bits = getattr(self, name)
            if type(bits) is not int or bits not in get_args(Bits):
                known = ", ".join(map(str, get_args(Bits)))
                raise ValueError(f"{name} must be {known}, got {bits!r:.60}")
            if bits < 16 and self.kind != "full":
                raise ValueError(
                    f"only full heads are quantised, got {name}={bits} for {self.kind}"
                )

    @property
    def quantised(self) -> bool:
        """Whether keys or values have less than 16 bits."""
        return self.key_bits < 16 or self.value_bits < 16

    @property
    def words(self) -> str:
        """What it keeps, in words.

        Example:
            >>> HeadPlan("streaming", first=4, recent=124).words
            '4 first and 124 recent keys'
            >>> HeadPlan(key_bits=8, value_bits=4).words
            'all keys in 8 bits and values in 4'
        """
        if self.kind == "dropped":
            return "nothing"
        if self.kind == "streaming":
            return f"{self.first} first and {self.recent} recent keys"
        if not self.quantised:
            return "all keys"
        if self.key_bits == self.value_bits:
            return f"all keys in {self.key_bits} bits"
        return f"all keys in {self.key_bits} bits and values in {self.value_bits}"

    @property
    def symbol(self) -> str:
        """What it keeps, in a few characters for tables.

        Example:
            >>> HeadPlan().symbol, HeadPlan("streaming", first=4, recent=124).symbol
            ('full', '4+124')
        """
        if self.kind == "streaming":
            return f"{self.first}+{self.recent}"
        if self.kind == "dropped" or not self.quantised:
            return "none" if self.kind == "dropped" else "full"
        bits = {self.key_bits: None, self.value_bits: None}
        return f"{'/'.join(map(str, bits))} bit"

    def keys(self, n: int) -> int:
        """Number of keys that it keeps of n tokens."""
        if self.kind == "full":
            return n
        return min(n, self.first + self.recent)

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def bytes(
        self, n: int, shape: LayerShape, *, group: int = 32, residual: int = 32, itemsize: int = 2
    ) -> int:
        """Bytes of its keys and values for n tokens; scales and zero points count.

        Args:
            n: tokens in the cache.
            shape: of its layer.
            group: tokens that share the scale of a key channel, channels that share the scale of a
                value.
            residual: newest tokens that are never quantised.
            itemsize: bytes of a number that is not quantised.

        Example:
            >>> shape = LayerShape(heads=3, query_heads=9, key_width=64, value_width=64)
            >>> [HeadPlan(key_bits=bits, value_bits=bits).bytes(4096, shape) for bits in (16, 8, 4)]
            [1048576, 593408, 333312]
        """
        check_count("n", n, 0)
        if not self.quantised:
            return self.keys(n) * (shape.key_width + shape.value_width) * itemsize
        groups = quantised_groups(n, group, residual)
        packed = groups * group
        plain = (n - packed) * itemsize

        total = 0
        for width, bits, scales in (
            (shape.key_width, self.key_bits, groups * shape.key_width),
            (shape.value_width, self.value_bits, packed * value_groups(shape.value_width, group)),
        ):
            if bits == 16:
                total += n * width * itemsize
            else:
                total += packed * width * bits // 8 + scales * _SCALE_AND_ZERO + plain * width
        return total


#: Every key and value, not quantised.
FULL = HeadPlan()


def quantised_groups(n: int, group: int, residual: int) -> int:
    """Number of whole groups of tokens that are quantised when a cache holds n tokens.

    Example:
        >>> [quantised_groups(n, 32, 32) for n in (63, 64, 96)]
        [0, 1, 2]
    """
    return max(0, n - residual) // group


def value_groups(width: int, group: int) -> int:
    """Number of scales of one token's value: groups of channels, or one if they do not divide."""
    return width // group if width % group == 0 else 1


class Plan(Protocol):
    """What a cache reads of a :class:`~acutance.CachePlan`."""

    @property
    def shapes(self) -> Mapping[str, LayerShape]:
        """Heads and widths of each layer, by module name."""

    @property
    def layers(self) -> Mapping[str, tuple[HeadPlan, ...]]:
        """What each key head keeps, by module name."""

    @property
    def group(self) -> int:
        """Tokens, or channels, that share a scale."""

    @property
    def residual(self) -> int:
        """Newest tokens that are never quantised."""

    @property
    def search(self) -> Mapping[str, Any] | None:
        """The length and the results of the search for it; None if it was not searched for."""
