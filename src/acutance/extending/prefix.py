"""The first tokens of a window, read once for all changes that begin beyond them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.law import by_layer
from acutance.calibration.logits import call_model, logits_of
from acutance.calibration.losses import Loss, NextToken
from acutance.capture.model_cache import cache_argument
from acutance.judging.remedies import LawRemedy, Remedy

__all__ = ["Prefix", "begins_beyond"]

_COMPARED = 64  # tokens on which a run with kept keys is compared with one without


class Prefix:
    """The keys and values of the first ``length`` tokens of one window, under no change.

    Args:
        model: the model.
        loss: the loss.
        length: tokens that are read once.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss, length: int) -> None:
        self._model, self.length = model, length
        self._usable: bool | None = None if isinstance(loss, NextToken) else False
        self._window: int | None = None
        self._cache: Any = None

    def serves(self, remedy: Remedy, ids: Tensor) -> bool:
        """Whether a window (1, L) under a change need only be read from ``length`` on."""
        if self._usable is None:
            self._usable = _can_continue(self._model, ids)
        return self._usable and begins_beyond(self._model, remedy, self.length)

    @torch.no_grad()
    def after(self, window: int, ids: Tensor) -> dict[str, Any]:
        """The rest of a window as a batch, which continues the kept keys and values.

        Args:
            window: index of the window; those of the last one are kept.
            ids: its tokens, (1, L).
        """
        if window != self._window:
            self._cache = _read(self._model, ids[:, : self.length])
            self._window = window
        return {"input_ids": ids[:, self.length :], **_cached(self._model, self._cache)}


def begins_beyond(model: torch.nn.Module, remedy: Remedy, length: int) -> bool:
    """Whether a change leaves rows with at most ``length`` keys as they are.

    Example:
        >>> from acutance.reproduce import decoder
        >>> from acutance.judging.remedies import as_remedies
        >>> names = ["window:size=64,beyond=128", "window:size=64", "rope:linear,factor=2"]
        >>> [begins_beyond(decoder(), one, 128) for one in as_remedies(names)]
        [True, False, False]
    """
    if not isinstance(remedy, LawRemedy):
        return False
    rest, layers = by_layer(model, remedy.law)
    n = torch.arange(1, length + 1)
    for laws in [*layers.values(), *([] if rest is None else [rest])]:
        if any(window.unchanged < length for window in laws.all_windows()):
            return False
        for scaling in laws.scalings():
            if scaling.needs_entropy or not bool((scaling.factor(n) == 1).all()):
                return False
    return True


def _can_continue(model: Any, ids: Tensor) -> bool:
    """Whether a model with all keys of its first tokens kept reads the next ones as without."""
    config = getattr(model, "config", None)
    kinds = {*(getattr(config, "layer_types", None) or ["full_attention"])}
    if _cache_name(model) is None or kinds != {"full_attention"}:
        return False
    few = ids[:, :_COMPARED]
    half = few.shape[1] // 2
    try:
        with torch.no_grad():
            whole = logits_of(model, call_model(model, {"input_ids": few}))[:, half:]
            rest = {"input_ids": few[:, half:], **_cached(model, _read(model, few[:, :half]))}
            parts = logits_of(model, call_model(model, rest))
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
        return False
    scale = float(whole.abs().amax()) * torch.finfo(whole.dtype).eps
    return bool(((parts - whole).abs() <= max(1e-4, 8 * scale)).all())


def _cache_name(model: Any) -> str | None:
    """The argument of a model's forward method that takes a cache."""
    return cache_argument(inspect.signature(model.forward).parameters)


def _cached(model: Any, cache: Any) -> dict[str, Any]:
    """A cache as an argument of a model that takes one."""
    return {_cache_name(model) or "past_key_values": cache}


def _read(model: Any, ids: Tensor) -> Any:
    """The keys and values of tokens (1, L), as a cache that does not grow when it is continued."""
    from transformers import DynamicCache

    class Fixed(DynamicCache):  # type: ignore[misc]
        """Keys and values that calls continue, each from the same tokens on."""

        full = False

        def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kw: Any) -> Any:
            if not self.full:
                return super().update(key, value, layer, *args, **kw)
            own: Any = self.layers[layer]
            return torch.cat([own.keys, key], -2), torch.cat([own.values, value], -2)

    cache = Fixed()
    base = getattr(model, "base_model", model)
    call_model(base, {"input_ids": ids, **_cached(base, cache)})
    cache.full = True
    return cache
