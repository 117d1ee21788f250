"""Capture inside ``F.multi_head_attention_forward``, where no function mode is active."""

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
    "outputs_agree",
    "changing_sdpa",
    "changing_softmax",
    "not_padding",
    "run_again",
    "same_memory",
    "equivalent_sdpa_arguments",
    "watch_sdpa",
]

_Calls = list[tuple[dict[str, Any], Tensor]]
_Change = Callable[[dict[str, Any]], dict[str, Any]]
_Replacement = Callable[[dict[str, Any], Callable[[], Tensor]], "Tensor | None"]
_thread = threading.local()  # lists: where this thread's SDPA calls go; changes: made to them first
_lock = threading.Lock()
_watchers = 0
_original: Callable[..., Tensor] = F.scaled_dot_product_attention
_changers = 0
_softmax: Callable[..., Tensor] = F.softmax


@contextmanager
def watch_sdpa(
    *, hide_from_outer: bool = False, replacement: _Replacement | None = None
) -> Iterator[_Calls]:
    """Context that collects this thread's SDPA calls through ``torch.nn.functional``.

    Args:
        hide_from_outer: hide the calls from enclosing contexts.
        replacement: may compute a call instead; returns None to decline.

    Yields:
        The list of calls: their arguments by name, and their outputs.
    """
    global _watchers, _original
    calls: _Calls = []
    outer: tuple[_Calls, ...] = getattr(_thread, "lists", ())
    _thread.lists = (calls,) if hide_from_outer else (*outer, calls)
    outer_replacements: tuple[_Replacement, ...] = getattr(_thread, "replacement", ())
    _thread.replacement = (
        ()
        if hide_from_outer
        else outer_replacements
        if replacement is None
        else (*outer_replacements, replacement)
    )
    with _lock:
        if _watchers == 0:
            _original = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = _watched_sdpa
        _watchers += 1
    try:
        yield calls
    finally:
        _thread.lists, _thread.replacement = outer, outer_replacements
        with _lock:
            _watchers -= 1
            if _watchers == 0:
                F.scaled_dot_product_attention = _original


@contextmanager
def changing_sdpa(change: _Change) -> Iterator[_Calls]:
    """Context that changes the arguments of this thread's SDPA calls.

    :func:`watch_sdpa` sees the changed calls.

    Function modes are inactive inside a function that a mode handles, so the name in
    ``torch.nn.functional`` is replaced.
    """
    outer: tuple[_Change, ...] = getattr(_thread, "changes", ())
    _thread.changes = (*outer, change)
    try:
        with watch_sdpa() as calls:
            yield calls
    finally:
        _thread.changes = outer


@contextmanager
def changing_softmax(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context that changes the scores of this thread's ``F.softmax`` calls."""
    global _changers, _softmax
    outer: tuple[Callable[[Tensor], Tensor], ...] = getattr(_thread, "scores", ())
    _thread.scores = (*outer, change)
    with _lock:
        if _changers == 0:
            _softmax = F.softmax
            F.softmax = _changed_softmax  # type: ignore[assignment]
        _changers += 1
    try:
        yield
    finally:
        _thread.scores = outer
        with _lock:
            _changers -= 1
            if _changers == 0:
                F.softmax = _softmax


def _changed_softmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``F.softmax`` with the scores changed by this thread's open contexts."""
    for change in getattr(_thread, "scores", ()):
        scores = change(scores)
    return _softmax(scores, *args, **kwargs)


class _ArgumentsKnown(Exception):  # noqa: N818 - it is no error
    """Raised to stop a call once its arguments are known."""


def equivalent_sdpa_arguments(
    func: Callable[..., Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The SDPA arguments that multi-head attention would use if no weights were requested.

    Args:
        func: ``F.multi_head_attention_forward``; it runs only up to that call.
        arguments: its arguments.
    """
    calls: list[dict[str, Any]] = []

    def stop(inner: dict[str, Any]) -> dict[str, Any]:
        calls.append(inner)
        raise _ArgumentsKnown

    # with is_causal it would leave the mask out
    arguments_without_weights = {**arguments, "need_weights": False, "is_causal": False}
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        suppress(_ArgumentsKnown),
        changing_sdpa(stop),
    ):
        func(**arguments_without_weights)
    return calls[0]


def _watched_sdpa(*args: Any, **kwargs: Any) -> Tensor:
    """``F.scaled_dot_product_attention`` as this thread's open contexts change and record it."""
    arguments = sdpa_arguments(args, kwargs)
    for change in getattr(_thread, "changes", ()):
        arguments = change(arguments)
    output = None
    for replacement in reversed(getattr(_thread, "replacement", ())):
        output = (
            replacement(arguments, lambda: _original(**arguments)) if output is None else output
        )
    output = _original(**arguments) if output is None else output
    for calls in getattr(_thread, "lists", ()):
        calls.append((arguments, output))
    return output


def run_again(
    func: Callable[..., Any],
    arguments: Mapping[str, Any],
    seen: list[tuple[dict[str, Any], Tensor]],
) -> tuple[Tensor, Any]:
    """Run multi-head attention without weights and dropout, hidden from enclosing watchers."""
    with watch_sdpa(hide_from_outer=True) as calls:
        result: tuple[Tensor, Any] = func(**{**arguments, "need_weights": False, "training": False})
    seen.extend(calls)
    return result


def outputs_agree(second_output: Tensor, output: Tensor) -> bool:
    """Whether two outputs are equal up to rounding where the second is finite.

    A row that sees no key is 0 from SDPA and NaN where the weights are computed.
    """
    finite = output.isfinite()
    first, second = (torch.where(finite, part.detach(), 0.0) for part in (second_output, output))
    size = float(second.abs().max()) if second.numel() else 0.0
    tolerance = VERIFY_TOLERANCE.get(output.dtype, 1e-4) * max(size, 1e-30)
    return torch.allclose(first, second, rtol=0.0, atol=tolerance)


def same_memory(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are the same memory with the same shape and strides."""
    return left is right or (
        left.data_ptr() == right.data_ptr()
        and left.shape == right.shape
        and left.stride() == right.stride()
    )


def not_padding(mask: Tensor | None) -> Tensor | None:
    """Boolean (B, L), False where a ``key_padding_mask`` is True or very low."""
    if mask is None:
        return None
    real = torch.logical_not(mask if mask.dtype == torch.bool else hides(mask))
    return real if real.dim() == 2 else real.unsqueeze(0)
