"""Capture inside ``F.multi_head_attention_forward``, where no function mode is active."""

from __future__ import annotations

import threading
from collections import Counter
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
_SDPA = "scaled_dot_product_attention"


class _Thread(threading.local):
    """What the open contexts of a thread do with its calls, outermost first.

    Attributes:
        lists: where SDPA calls go.
        changes: made to their arguments first.
        replacements: may compute them instead.
        scores: changes made to the scores of softmaxes.
    """

    lists: tuple[_Calls, ...] = ()
    changes: tuple[_Change, ...] = ()
    replacements: tuple[_Replacement, ...] = ()
    scores: tuple[Callable[[Tensor], Tensor], ...] = ()


_thread = _Thread()
_lock = threading.Lock()
_open: Counter[str] = Counter()  # contexts in which a function is replaced, by its name
_originals: dict[str, Callable[..., Tensor]] = {}


@contextmanager
def _replaced(name: str, function: Callable[..., Tensor], **of_thread: Any) -> Iterator[None]:
    """Context in which a function of ``torch.nn.functional`` is replaced, for all threads.

    Function modes are inactive inside a function that a mode handles, so that the name has to be.

    Args:
        name: name of the function.
        function: replaces it.
        of_thread: attributes of this thread's :class:`_Thread` meanwhile.
    """
    outer = {key: getattr(_thread, key) for key in of_thread}
    vars(_thread).update(of_thread)
    with _lock:
        if not _open[name]:
            _originals[name] = getattr(F, name)
            setattr(F, name, function)
        _open[name] += 1
    try:
        yield
    finally:
        vars(_thread).update(outer)
        with _lock:
            _open[name] -= 1
            if not _open[name]:
                setattr(F, name, _originals[name])


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
    calls: _Calls = []
    lists, replacements = _thread.lists, _thread.replacements
    if hide_from_outer:
        lists, replacements = (), ()
    if replacement is not None:
        replacements = (*replacements, replacement)
    lists = (*lists, calls)
    with _replaced(_SDPA, _watched_sdpa, lists=lists, replacements=replacements):
        yield calls


@contextmanager
def changing_sdpa(change: _Change) -> Iterator[None]:
    """Context that changes the arguments of this thread's SDPA calls.

    :func:`watch_sdpa` sees the changed calls.
    """
    with _replaced(_SDPA, _watched_sdpa, changes=(*_thread.changes, change)):
        yield


@contextmanager
def changing_softmax(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context that changes the scores of this thread's ``F.softmax`` calls."""
    with _replaced("softmax", _changed_softmax, scores=(*_thread.scores, change)):
        yield


def _changed_softmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``F.softmax`` with the scores changed by this thread's open contexts."""
    for change in _thread.scores:
        scores = change(scores)
    return _originals["softmax"](scores, *args, **kwargs)


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
    arguments, original = sdpa_arguments(args, kwargs), _originals[_SDPA]
    for change in _thread.changes:
        arguments = change(arguments)
    output = None
    for replacement in reversed(_thread.replacements):
        output = replacement(arguments, lambda: original(**arguments)) if output is None else output
    output = original(**arguments) if output is None else output
    for calls in _thread.lists:
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
