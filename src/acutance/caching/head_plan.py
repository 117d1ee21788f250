"""What one key head keeps in a key-value cache, its bytes, and the shapes of a model's cache."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from acutance.capture.find_layers import (
    attention_layers,
    cache_argument,
    class_name,
    named_modules,
    returned_cache,
    unwrap,
    uses_interface,
)
from acutance.capture.readers import huggingface
from acutance.capture.readers.huggingface import InterfaceCall
from acutance.shapes import check_count


class PlanError(ValueError):
    """A plan cannot be read or does not fit the model, or the model has no cache to plan."""


@dataclass(frozen=True)
class LayerShape:
    """Heads and widths of one layer's cache.

    Attributes:
        heads: key heads.
        query_heads: query heads, a multiple of the key heads.
        key_width: numbers of one key.
        value_width: numbers of one value.

    Raises:
        ValueError: if a number is below 1, or key heads do not divide query heads.
    """

    heads: int
    query_heads: int
    key_width: int
    value_width: int

    def __post_init__(self) -> None:
        for part in fields(self):
            check_count(part.name, getattr(self, part.name), 1)
        if self.query_heads % self.heads:
            raise ValueError(
                f"query_heads must be a multiple of heads, got {self.query_heads} and {self.heads}"
            )

    @property
    def queries_per_key(self) -> int:
        """Query heads that share one key head."""
        return self.query_heads // self.heads


def cache_shapes(model: torch.nn.Module) -> dict[str, LayerShape]:
    """Heads and widths of each layer's cache, by module name.

    Args:
        model: a causal language model of transformers, with or without its head.

    Raises:
        PlanError: if the model is no causal decoder of transformers, its attention does not go
            through transformers' interface, or a layer's cache has a sliding window or a recurrent
            state.
        TypeError: if it is not a module.

    Example:
        >>> from acutance.reproduce import decoder
        >>> list(cache_shapes(decoder()).items())[0]
        ('model.layers.0.self_attn', LayerShape(heads=..., query_heads=..., ...))
    """
    check_model(model)
    name, inner = class_name(model), unwrap(model)
    shapes: dict[torch.nn.Module, LayerShape] = {}

    def note(call: InterfaceCall, run: Callable[[], Any]) -> Any:
        query, key, value = call.query, call.key, call.value
        shapes[call.module] = LayerShape(key.shape[1], query.shape[1], key.shape[3], value.shape[3])
        return run()

    device = next((part.device for part in inner.parameters()), None)
    training = inner.training
    inner.eval()
    try:
        with huggingface.intercept(note), torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.int64, device=device)
            cache = returned_cache(inner(input_ids=token, use_cache=True))
    finally:
        inner.train(training)
    if cache is None or not shapes or cache.get_seq_length() != 1:
        raise PlanError(f"{name} has no key-value cache: it returns none with use_cache=True")
    names = {id(module): place for place, module in named_modules(model)}
    return {names[id(module)]: shape for module, shape in shapes.items()}


def check_model(model: torch.nn.Module) -> None:
    """Raise unless a model's configuration is that of a decoder whose cache can be planned.

    Raises:
        PlanError: as :func:`cache_shapes`.
        TypeError: if it is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    name, inner = class_name(model), unwrap(model)
    config: Any = getattr(inner, "config", None)
    takes = inspect.signature(inner.forward).parameters
    if config is None or cache_argument(takes) is None or "input_ids" not in takes:
        raise PlanError(f"{name} has no key-value cache: its forward method takes none")
    if getattr(config, "is_encoder_decoder", False):
        raise PlanError(f"the cache of {name} cannot be planned: it is an encoder-decoder")
    by_hand = [name for name, layer in attention_layers(model).items() if not uses_interface(layer)]
    if by_hand:
        raise PlanError(
            f"the cache of {name} cannot be planned: {by_hand[0]} does not use transformers' "
            "attention interface"
        )
    from transformers.cache_utils import DynamicCache, DynamicLayer

    kinds = [type(layer) for layer in DynamicCache(config=config).layers]
    if other := next((kind for kind in kinds if kind is not DynamicLayer), None):
        raise PlanError(
            f"the cache of {name} cannot be planned: a layer has a {other.__name__}, not a cache "
            "of all keys"
        )


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
