"""Captures attention of plain PyTorch: SDPA, nn.MultiheadAttention, and softmax as a last resort."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from acutance.probing.call import VERIFY_TOLERANCE, AttentionCall
from acutance.probing.huggingface import Observer

_SOFTMAX = {torch.softmax, torch.Tensor.softmax, F.softmax, torch.special.softmax}
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class FunctionObserver(Observer, Protocol):
    """What this capture reports to: it also asks which module is running."""

    def here(self) -> str | None:
        """Name for an attention call of the module now running, None outside the probed model."""

    def observe_scores(self, scores: Tensor, module: str) -> None:
        """Record rows of which only the scores are known."""


class FunctionCapture(TorchFunctionMode):
    """Sees every torch function called in its context, and records those that are attention."""

    def __init__(self, observer: FunctionObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the function unchanged, then record it."""
        kwargs = dict(kwargs or {})
        if self._observer.muted():
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._sdpa(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head(func, args, kwargs)
        if func in _SOFTMAX:
            return self._softmax(func, args, kwargs)
        return func(*args, **kwargs)

    def _sdpa(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = self._observer.here()
        if name is None:
            return func(*args, **kwargs)
        with self._observer.mute():
            output = func(*args, **kwargs)
        given = dict(zip(_SDPA, args, strict=False)) | kwargs
        self._observer.observe(lambda: sdpa_call(given, name), name, lambda: _four(output))
        return output

    def _multi_head(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Watch the SDPA call inside; where weights are asked for there is none, so run once more.

        The second run asks for no weights and drops nothing; its result is compared, not used.
        """
        name = self._observer.here()
        if name is None:
            return func(*args, **kwargs)
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        weights = given.get("need_weights", True)
        with self._observer.mute(), _watch_sdpa() as seen:
            result = func(*args, **kwargs)
            if weights:
                with torch.no_grad():
                    again, _ = func(**{**given, "need_weights": False, "training": False})
        if not seen:
            return result
        call, output = seen[-1]
        cross = given["query"] is not given["key"]
        if weights and not _dropping(given) and not _agree(again, result[0]):
            self._observer.unreadable(name, "multi-head attention gave another output when run again")
            return result
        self._observer.observe(lambda: sdpa_call(call, name, cross=cross), name, lambda: output)
        return result

    def _softmax(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with self._observer.mute():
            result = func(*args, **kwargs)
        scores = args[0] if args else kwargs.get("input")
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        attention = (
            isinstance(scores, Tensor)
            and scores.dim() == 4
            and dim in (-1, 3)
            and scores.is_floating_point()
        )
        name = self._observer.here() if attention else None
        if name is not None:
            self._observer.observe_scores(scores, name)
        return result


def _dropping(given: Mapping[str, Any]) -> bool:
    return bool(given.get("training", True)) and float(given.get("dropout_p") or 0.0) > 0.0


def _agree(first: Tensor, second: Tensor) -> bool:
    tolerance = VERIFY_TOLERANCE.get(first.dtype, 1e-4)
    size = float(second.detach().abs().nan_to_num().max()) if second.numel() else 0.0
    return torch.allclose(first, second, rtol=0.0, atol=tolerance * max(size, 1e-30), equal_nan=True)


@contextmanager
def _watch_sdpa() -> Iterator[list[tuple[dict[str, Any], Tensor]]]:
    """Arguments and results of this thread's SDPA calls made through ``torch.nn.functional``."""
    seen: list[tuple[dict[str, Any], Tensor]] = []
    original, thread = F.scaled_dot_product_attention, threading.get_ident()

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = original(*args, **kwargs)
        if threading.get_ident() == thread:
            seen.append((dict(zip(_SDPA, args, strict=False)) | kwargs, output))
        return output

    F.scaled_dot_product_attention = watched
    try:
        yield seen
    finally:
        F.scaled_dot_product_attention = original


def sdpa_call(given: Mapping[str, Any], name: str, *, cross: bool = False) -> AttentionCall:
    """Read the arguments of ``F.scaled_dot_product_attention``."""
    query, key, value = (_four(given[part]) for part in ("query", "key", "value"))
    batch = torch.broadcast_shapes(query.shape[:1], key.shape[:1], value.shape[:1])
    query, key, value = (t.expand(*batch, *t.shape[1:]) for t in (query, key, value))
    mask = given.get("attn_mask")
    if isinstance(mask, Tensor):
        rank = given["query"].dim()
        if rank == 3 and mask.dim() == 3:
            mask = mask.unsqueeze(1)
        elif mask.dim() > 4:
            mask = mask.flatten(0, mask.dim() - 4)
    scale = given.get("scale")
    return AttentionCall(
        module=name,
        source="scaled_dot_product_attention",
        query=query,
        key=key,
        value=value,
        attn_mask=mask,
        is_causal=bool(given.get("is_causal", False)),
        scale=None if scale is None else float(scale),
        dropout_p=float(given.get("dropout_p") or 0.0),
        cross=cross,
    )


def _four(tensor: Tensor) -> Tensor:
    """Give a tensor of SDPA its four dimensions: (N, L, E) is one head each, more are batches."""
    if tensor.dim() == 2:
        return tensor[None, None]
    if tensor.dim() == 3:
        return tensor.unsqueeze(1)
    return tensor if tensor.dim() == 4 else tensor.flatten(0, tensor.dim() - 4)
