"""Heads and widths of a model's key-value cache, read in a forward pass of one token."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from acutance.capture.find_layers import (
    attention_layers,
    class_name,
    named_modules,
    unwrap,
    uses_interface,
)
from acutance.capture.model_cache import cache_argument, returned_cache
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
        module, query, key, value, _ = call.positional()
        shapes[module] = LayerShape(key.shape[1], query.shape[1], key.shape[3], value.shape[3])
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
    if by_hand := [
        one for one, layer in attention_layers(model).items() if not uses_interface(layer)
    ]:
        raise PlanError(
            f"the cache of {name} cannot be planned: {by_hand[0]} does not use transformers' "
            "attention interface"
        )
    _check_kinds(name, config)


def _check_kinds(name: str, config: Any) -> None:
    """Raise PlanError unless every layer of transformers' own cache simply grows."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    layers = DynamicCache(config=config).layers
    other = next((one for one in layers if type(one) is not DynamicLayer), None)
    if other is not None:
        raise PlanError(
            f"the cache of {name} cannot be planned: a layer has a {type(other).__name__}, not a "
            "cache of all keys"
        )
