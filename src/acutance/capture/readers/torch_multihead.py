"""Capture inside ``F.multi_head_attention_forward``, where no function mode is active."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance.capture.attention_call import VERIFY_TOLERANCE
from acutance.capture.intercept import Handler, pass_on
from acutance.capture.readers.torch_sdpa import SdpaCall

_Change = Callable[[dict[str, Any]], dict[str, Any]]
_SDPA = "scaled_dot_product_attention"


class _Thread(threading.local):
    """What the open contexts of a thread do with its calls, outermost first.

    Attributes:
        changing: handlers of SDPA calls that change them.
        looking: those that see them as all others change them.
        scores: changes made to the scores of softmaxes.
    """

    changing: tuple[Handler, ...] = ()
    looking: tuple[Handler, ...] = ()
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


def looking_at_sdpa(handler: Handler, *, alone: bool = False) -> AbstractContextManager[None]:
    """Context in which a handler looks at this thread's calls of SDPA, or computes them.

    Args:
        handler: called with the call, and with ``run``, which goes on with it.
        alone: whether those of enclosing contexts do not see them.
    """
    outer = () if alone else _thread.looking
    return _replaced(_SDPA, _handled_sdpa, looking=(*outer, handler))


def changing_sdpa(change: _Change) -> AbstractContextManager[None]:
    """Context that changes the arguments of this thread's calls of SDPA."""

    def handler(call: SdpaCall, run: Callable[[], Any]) -> Any:
        call.arguments = change(call.arguments)
        return run()

    return _replaced(_SDPA, _handled_sdpa, changing=(*_thread.changing, handler))


def _handled_sdpa(*args: Any, **kwargs: Any) -> Any:
    """``F.scaled_dot_product_attention``, through this thread's handlers."""
    call = SdpaCall(_originals[_SDPA], args, kwargs)
    return pass_on(call, (*_thread.changing, *_thread.looking))


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


def run_again(
    func: Callable[..., Any], arguments: Mapping[str, Any]
) -> tuple[Tensor, SdpaCall, Tensor]:
    """Run multi-head attention without weights and dropout, unseen by enclosing handlers that look.

    Returns:
        Its output, its call of SDPA, and the output of that.
    """
    calls: list[tuple[SdpaCall, Tensor]] = []

    def note(call: SdpaCall, run: Callable[[], Any]) -> Any:
        result = run()
        calls.append((call, result))
        return result

    with looking_at_sdpa(note, alone=True):
        output, _ = func(**{**arguments, "need_weights": False, "training": False})
    return output, *calls[-1]


def outputs_agree(second_output: Tensor, output: Tensor) -> bool:
    """Whether two outputs are equal up to rounding where the second is finite.

    A row that sees no key is 0 from SDPA and NaN where the weights are computed.
    """
    finite = output.isfinite()
    first, second = (torch.where(finite, part.detach(), 0.0) for part in (second_output, output))
    size = float(second.abs().max()) if second.numel() else 0.0
    tolerance = VERIFY_TOLERANCE.get(output.dtype, 1e-4) * max(size, 1e-30)
    return torch.allclose(first, second, rtol=0.0, atol=tolerance)
