"""What happens inside ``F.multi_head_attention_forward``, where no function mode is active."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance.capture.attention_call import VERIFY_TOLERANCE
from acutance.capture.readers.torch_sdpa import sdpa_arguments
from acutance.masks import hides

__all__ = [
    "agree",
    "changing_sdpa",
    "changing_softmax",
    "not_padding",
    "run_again",
    "same",
    "sdpa_instead",
    "watch_sdpa",
]

_Calls = list[tuple[dict[str, Any], Tensor]]
_Change = Callable[[dict[str, Any]], dict[str, Any]]
_Instead = Callable[[dict[str, Any], Callable[[], Tensor]], "Tensor | None"]
_thread = threading.local()  # lists: where this thread's SDPA calls go; changes: made to them first
_lock = threading.Lock()
_watchers = 0
_original: Callable[..., Tensor] = F.scaled_dot_product_attention
_changers = 0
_softmax: Callable[..., Tensor] = F.softmax


@contextmanager
def watch_sdpa(*, alone: bool = False, instead: _Instead | None = None) -> Iterator[_Calls]:
    """Arguments and results of this thread's SDPA calls through ``torch.nn.functional``.

    Args:
        alone: hide the calls from the contexts around this one.
        instead: what may compute a call in its stead.
    """
    global _watchers, _original
    seen: _Calls = []
    outer: tuple[_Calls, ...] = getattr(_thread, "lists", ())
    _thread.lists = (seen,) if alone else (*outer, seen)
    before: tuple[_Instead, ...] = getattr(_thread, "instead", ())
    _thread.instead = () if alone else before if instead is None else (*before, instead)
    with _lock:
        if _watchers == 0:
            _original = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = _watched
        _watchers += 1
    try:
        yield seen
    finally:
        _thread.lists, _thread.instead = outer, before
        with _lock:
            _watchers -= 1
            if _watchers == 0:
                F.scaled_dot_product_attention = _original


@contextmanager
def changing_sdpa(change: _Change) -> Iterator[_Calls]:
    """Change the arguments of this thread's SDPA calls, in a way that :func:`watch_sdpa` sees.

    Inside a function that a mode handles no mode is active, so that only the name in
    ``torch.nn.functional`` is left to get between.
    """
    outer: tuple[_Change, ...] = getattr(_thread, "changes", ())
    _thread.changes = (*outer, change)
    try:
        with watch_sdpa() as seen:
            yield seen
    finally:
        _thread.changes = outer


@contextmanager
def changing_softmax(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change the scores of this thread's softmax calls through ``torch.nn.functional``."""
    global _changers, _softmax
    outer: tuple[Callable[[Tensor], Tensor], ...] = getattr(_thread, "scores", ())
    _thread.scores = (*outer, change)
    with _lock:
        if _changers == 0:
            _softmax = F.softmax
            F.softmax = _changed  # type: ignore[assignment]
        _changers += 1
    try:
        yield
    finally:
        _thread.scores = outer
        with _lock:
            _changers -= 1
            if _changers == 0:
                F.softmax = _softmax


def _changed(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    for change in getattr(_thread, "scores", ()):
        scores = change(scores)
    return _softmax(scores, *args, **kwargs)


class _Known(Exception):  # noqa: N818 - it is no error
    """Raised to stop a call once its arguments are known."""


def sdpa_instead(func: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The SDPA arguments that multi-head attention would use if no weights were requested.

    Args:
        func: ``F.multi_head_attention_forward``, which goes no further than that call.
        given: what it is called with.
    """
    calls: list[dict[str, Any]] = []

    def stop(inner: dict[str, Any]) -> dict[str, Any]:
        calls.append(inner)
        raise _Known

    # with is_causal it would leave the mask out
    asked = {**given, "need_weights": False, "is_causal": False}
    with torch.no_grad(), torch._C.DisableTorchFunction(), suppress(_Known), changing_sdpa(stop):
        func(**asked)
    return calls[0]


def _watched(*args: Any, **kwargs: Any) -> Tensor:
    given = sdpa_arguments(args, kwargs)
    for change in getattr(_thread, "changes", ()):
        given = change(given)
    output = None
    for instead in reversed(getattr(_thread, "instead", ())):
        output = instead(given, lambda: _original(**given)) if output is None else output
    output = _original(**given) if output is None else output
    for seen in getattr(_thread, "lists", ()):
        seen.append((given, output))
    return output


def run_again(
    func: Callable[..., Any], given: Mapping[str, Any], seen: list[tuple[dict[str, Any], Tensor]]
) -> tuple[Tensor, Any]:
    """Run multi-head attention without weights and dropout, which concerns no outer watcher."""
    with watch_sdpa(alone=True) as calls:
        result: tuple[Tensor, Any] = func(**{**given, "need_weights": False, "training": False})
    seen.extend(calls)
    return result


def agree(again: Tensor, output: Tensor) -> bool:
    """Whether two outputs are equal up to rounding, rows aside that are not numbers in the second.

    A row that sees no key is 0 from SDPA and NaN where the weights are formed.
    """
    counts = output.isfinite()
    first, second = (torch.where(counts, part.detach(), 0.0) for part in (again, output))
    size = float(second.abs().max()) if second.numel() else 0.0
    tolerance = VERIFY_TOLERANCE.get(output.dtype, 1e-4) * max(size, 1e-30)
    return torch.allclose(first, second, rtol=0.0, atol=tolerance)


def same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are one and the same memory: a transposed view is another object."""
    return left is right or (
        left.data_ptr() == right.data_ptr()
        and left.shape == right.shape
        and left.stride() == right.stride()
    )


def not_padding(mask: Tensor | None) -> Tensor | None:
    """Boolean (B, L), False where a ``key_padding_mask`` marks padding: True, or very low."""
    if mask is None:
        return None
    real = torch.logical_not(mask if mask.dtype == torch.bool else hides(mask))
    return real if real.dim() == 2 else real.unsqueeze(0)
