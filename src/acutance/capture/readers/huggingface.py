"""Capture attention of Hugging Face models at transformers' ``AttentionInterface``.

Since transformers 5.1 each attention layer asks ``AttentionInterface.get_interface`` for the
function to call, eager included, and calls it with ``(module, query, key, value, mask, ...)``. A
wrapper around the returned function sees every argument and changes none.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.protocols import Changer, Instead, Observer
from acutance.capture.readers.interface_call import (
    InterfaceCall,
    base_name,
    read_interface_call,
    stored_keys,
    uses_flash_masks,
)
from acutance.capture.torch_modes import undoing

#: Open captures, innermost last, and open changes. The first of them to open wraps
#: ``get_interface``, the last to close restores it.
_observers: list[Observer] = []
_changers: list[Changer] = []
_output_changers: list[Any] = []  # those that have changed_output
_instead: list[Any] = []  # those that have instead
_lock = threading.RLock()
_original: Callable[..., Any] | None = None


@contextmanager
def capture(observer: Observer) -> Iterator[None]:
    """Context in which an observer sees the calls of transformers' attention functions."""
    with _wrapping(_observers, observer):
        yield


@contextmanager
def change(changer: Changer) -> Iterator[None]:
    """Context in which a changer changes the calls of transformers' attention functions.

    It changes queries and, if it has the methods ``changed_output`` or ``instead``, outputs or the
    whole computation.
    """
    can = {"changed_output": _output_changers, "instead": _instead}
    groups = [group for method, group in can.items() if hasattr(changer, method)]
    with _wrapping(_changers, changer):

        def remove() -> None:
            for group in groups:
                group[:] = [each for each in group if each is not changer]

        with undoing(remove):
            for group in groups:
                group.append(changer)
            yield


@contextmanager
def _wrapping(group: list[Any], member: Any) -> Iterator[None]:
    """Context in which ``member`` is in ``group`` and attention functions are wrapped."""
    # a model of transformers has imported this; importing it here would cost others seconds
    modeling = sys.modules.get("transformers.modeling_utils")
    try:
        interface: Any = getattr(modeling, "AttentionInterface", None)
    except Exception:  # its lazy import fails: a torchvision that does not fit, for one
        interface = None
    if not hasattr(interface, "get_interface"):
        yield
        return

    def unwrap() -> None:
        global _original
        with _lock:
            group[:] = [each for each in group if each is not member]
            if not _observers and not _changers and _original is not None:
                interface.get_interface = _original
                _original = None

    with undoing(unwrap):
        with _lock:
            if not _observers and not _changers:
                _wrap_interface(interface)
            group.append(member)
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
        cache_key = id(function), attn_implementation, bool(_output_changers)
        cached = wrapped.get(cache_key)  # holds the function: its identity is its alone
        if cached is None or cached[0] is not function:
            cached = wrapped[cache_key] = function, _wrap_function(function, attn_implementation)
        return cached[1]

    wrapped: dict[tuple[int, str, bool], tuple[Callable[..., Any], Callable[..., Any]]] = {}
    interface.get_interface = get_interface


def _wrap_function(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    """Wrap an attention function so that changers change, and observers see, each call."""

    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        result = attend(*args, **kwargs)
        for changer in tuple(_output_changers):
            call = InterfaceCall(function, implementation, args, kwargs)
            output = changer.changed_output(call, _output_of(result))
            if output is not None:
                result = (output, *result[1:]) if isinstance(result, tuple) else output
        return result

    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
        """Call the attention function with changed queries, and report the call to observers."""
        instead: Instead | None = None
        if _changers:
            call = InterfaceCall(function, implementation, args, kwargs)
            for changer in tuple(_changers):
                query = changer.changed_query(call)
                if query is not None:
                    call.set_query(query)
            for changer in tuple(_instead):
                another = changer.instead(call)
                if another is not None and instead is not None:
                    raise ValueError("two laws with windows cannot be applied to one layer")
                instead = instead or another
            args, kwargs = call.args, call.kwargs
        used = function if instead is None else instead.run
        if torch.compiler.is_compiling():  # a probe runs nothing compiled: no one is listening
            return used(*args, **kwargs)
        if not _observers:
            return _call_muted(tuple(_changers), used, args, kwargs)
        module = args[0] if args else kwargs.get("module")
        listening: list[tuple[Observer, str]] = []
        for observer in tuple(_observers):
            if observer.muted() or not isinstance(module, torch.nn.Module):
                continue
            name = observer.call_name_of(module)
            if name is not None:
                listening.append((observer, name))
        members: list[Observer | Changer] = [*_changers, *(each for each, _ in listening)]

        def run() -> Any:
            return _call_muted(members, used, args, kwargs)

        def model_output() -> Tensor:
            return _output_of(run()).transpose(1, 2)  # the interface returns (B, L, Hq, Ev)

        def read_call(name: str) -> Callable[[], AttentionCall]:
            if instead is not None:
                return functools.partial(instead.read, name)
            return functools.partial(
                read_interface_call, function, implementation, name, args, whole
            )

        provider, result, whole = None, None, kwargs
        for observer, name in listening:
            if not observer.provides or instead is not None:
                continue
            provided = observer.provide(
                read_call(name), name, model_output, _result_needed_because(implementation, kwargs)
            )
            if provided is not None:
                provider, result = observer, (provided.transpose(1, 2).contiguous(), None)
                break
        if result is None:
            with stored_keys(kwargs) as whole:
                result = run()
        output = _output_of(result)
        for observer, name in listening:
            if observer is not provider:
                observer.observe(read_call(name), name, lambda: output.transpose(1, 2))
        return result

    return changed if _output_changers else attend


def _call_muted(
    members: Sequence[Observer | Changer],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a function while these observers and changers ignore what it calls."""
    if len(members) == 1:
        with members[0].mute():
            return function(*args, **kwargs)
    with ExitStack() as quiet:
        for member in members:
            quiet.enter_context(member.mute())
        return function(*args, **kwargs)


def _output_of(result: Any) -> Tensor:
    """The output among the results of an attention function."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _result_needed_because(implementation: str, kwargs: dict[str, Any]) -> str | None:
    """Why the function's own result is needed; None if another function's output will do."""
    kind = base_name(implementation)
    if kind != "sdpa" and not uses_flash_masks(implementation):
        return f"{kind} attention may return its weights, which only it computes"
    if kwargs.get("output_attentions"):
        return "its weights are requested"
    return None
