"""Hooks on the forward pass of modules that are not stored on the modules.

A hook stored on a module would enter its copies and pickles. These are PyTorch's global hooks,
which select modules by identity.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

__all__ = ["follow", "follow_inputs", "follow_outputs"]


class _HookWarningFilter:
    """Silences PyTorch's warning about compiling a module while global hooks are registered.

    Our global hooks treat a compiled module and the one inside it as one module.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._filter: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._open == 0:
                text = r"Using `torch\.compile\(module\)` when there are global hooks"
                warnings.filterwarnings("ignore", text)
                self._filter = warnings.filters[0]
            self._open += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0 and self._filter in warnings.filters:
                cast("list[Any]", warnings.filters).remove(self._filter)


_QUIET = _HookWarningFilter()
_React = Callable[[torch.nn.Module], None]


@contextmanager
def follow(enter: _React, leave: _React) -> Iterator[None]:
    """Context in which callbacks run when any module starts and ends its forward pass.

    Args:
        enter: called with the module, before its own hooks.
        leave: called with the module, before its own hooks, also where it raised an error.

    Example:
        >>> model, seen = torch.nn.Sequential(torch.nn.Identity()), []
        >>> with follow(lambda module: seen.append(type(module).__name__), lambda module: None):
        ...     _ = model(torch.zeros(1))
        >>> seen, len(model._forward_pre_hooks)
        (['Sequential', 'Identity'], 0)
    """

    def before(module: torch.nn.Module, args: Any) -> None:
        enter(module)

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        leave(module)

    with _QUIET:
        handles = (
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def follow_inputs(
    modules: Iterable[torch.nn.Module],
    react: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None],
) -> Iterator[None]:
    """Context that calls ``react(module, args, kwargs)`` after each of their forward passes."""
    with _follow_results(modules, lambda module, args, kwargs, _: react(module, args, kwargs)):
        yield


@contextmanager
def follow_outputs(
    modules: Iterable[torch.nn.Module], react: Callable[[torch.nn.Module, Any], None]
) -> Iterator[None]:
    """Context that calls ``react(module, output)`` after each forward pass of these modules."""
    with _follow_results(modules, lambda module, args, kwargs, output: react(module, output)):
        yield


@contextmanager
def _follow_results(
    modules: Iterable[torch.nn.Module], react: Callable[..., None]
) -> Iterator[None]:
    """Context that calls ``react(module, args, kwargs, output)`` after each forward pass."""
    meant = {id(module): module for module in modules}  # holds them: an id is theirs alone

    def after(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if id(module) in meant:
            react(module, args, kwargs, output)

    with _QUIET:
        handle = register_module_forward_hook(after, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
            _global_forward_hooks_with_kwargs.pop(handle.id, None)  # PyTorch leaves it
