"""Intercept attention of Hugging Face models at transformers' ``AttentionInterface``.

Since transformers 5.1 each attention layer asks ``AttentionInterface.get_interface`` for the
function to call, eager included, and calls it with ``(module, query, key, value, mask, ...)``. A
wrapper around the returned function passes each call through the open handlers.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from acutance.capture.readers.interface_call import InterfaceCall
from acutance.capture.torch_modes import undoing

#: Handles one call: ``run()`` goes on with it, as the handler left it, and returns its result.
Handler = Callable[[InterfaceCall, Callable[[], Any]], Any]

#: Open handlers that change calls, outermost first, and inside them those that only look.
_changing: list[Handler] = []
_looking: list[Handler] = []
_lock = threading.RLock()
_original: Callable[..., Any] | None = None


@contextmanager
def intercept(handler: Handler, *, looks: bool = False, outermost: bool = False) -> Iterator[None]:
    """Context in which a handler is called around each call of transformers' attention functions.

    A handler may change the call before it calls ``run``, and the result after. Handlers are called
    in the order in which they were opened. The first to open wraps ``get_interface``, the last to
    close restores it.

    Args:
        handler: called with the call, and with ``run``, which goes on with it.
        looks: whether it sees calls as all others change them, and none that are compiled.
        outermost: whether it sees them before all others do.

    Example:
        >>> from acutance.reproduce import decoder
        >>> def double(call, run):
        ...     call.set_query(2 * call["query"])
        ...     return run()
        >>> with intercept(double):
        ...     _ = decoder()(torch.tensor([[1, 2, 3]]))
    """
    # a model of transformers has imported this; importing it here would cost others seconds
    modeling = sys.modules.get("transformers.modeling_utils")
    try:
        interface: Any = getattr(modeling, "AttentionInterface", None)
    except Exception:  # its lazy import fails: a torchvision that does not fit, for one
        interface = None
    if not hasattr(interface, "get_interface"):
        yield
        return
    group = _looking if looks else _changing

    def unwrap() -> None:
        global _original
        with _lock:
            group[:] = [other for other in group if other is not handler]
            if not _looking and not _changing and _original is not None:
                interface.get_interface = _original
                _original = None

    with undoing(unwrap):
        with _lock:
            if not _looking and not _changing:
                _wrap_interface(interface)
            group.insert(0 if outermost else len(group), handler)
        yield


def _wrap_interface(interface: Any) -> None:
    """Replace ``get_interface`` so that it returns wrapped attention functions."""
    global _original
    _original = original = interface.get_interface

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Any:
        function = original(self, attn_implementation, default)
        if torch.compiler.is_compiling():
            return _wrap_function(function, attn_implementation)
        cached = wrapped.get((id(function), attn_implementation))  # holds it: its id is its alone
        if cached is None or cached[0] is not function:
            cached = function, _wrap_function(function, attn_implementation)
            wrapped[id(function), attn_implementation] = cached
        return cached[1]

    wrapped: dict[tuple[int, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
    interface.get_interface = get_interface


def _wrap_function(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    """Wrap an attention function so that each call passes through the open handlers."""

    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        handlers = tuple(_changing) if compiling else (*_changing, *_looking)
        call = InterfaceCall(function, implementation, args, kwargs)
        return pass_on(call, handlers)

    return attend


def pass_on(call: Any, handlers: tuple[Callable[..., Any], ...], number: int = 0) -> Any:
    """Run a call through its handlers from one of them on, and compute it after the last."""
    if number == len(handlers):
        return call.compute()
    return handlers[number](call, functools.partial(pass_on, call, handlers, number + 1))
