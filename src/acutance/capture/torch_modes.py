"""Suspend PyTorch's function modes and compiler while a model's attention is captured."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.overrides import _get_current_function_mode_stack as _stack

#: The module that compiles, and that holds the stance.
COMPILER = "torch._dynamo"


class AfterImport(MetaPathFinder):
    """Calls a function right after one of some modules has been imported."""

    def __init__(self, names: frozenset[str], then: Callable[[], None]) -> None:
        self.names, self.then = names, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of the module, with a loader that also calls the function."""
        if fullname not in self.names:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self.then()

        vars(spec.loader)["exec_module"] = exec_module
        return spec


@contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Context that calls ``undo`` at its end: again where an interrupt cut that short.

    Args:
        undo: has the same effect twice as once, also if it was cut short, or had nothing to undo.
    """
    done = False
    try:
        try:
            yield
        finally:
            undo()
            done = True
    finally:
        if not done:
            undo()


_lock = threading.RLock()
_open: set[object] = set()
_stance: Any = None


@contextmanager
def eager() -> Iterator[None]:
    """Context in which compiled models run uncompiled; it may be nested.

    A compiled graph would bypass the captured functions. The compiler's stance is global to the
    process: the first to open sets it, the last to close restores it. If ``torch._dynamo`` is not
    imported yet, the stance is set when it is, since importing it takes over a second of CPU time.
    """
    mine = object()
    with undoing(lambda: _allow(mine)):
        with _lock:
            _open.add(mine)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
        if COMPILER in sys.modules:
            importlib.import_module(COMPILER)  # another thread may be in the middle of it
            _force()
        yield


def _force() -> None:
    """Set the compiler's stance to eager, if a probe is open."""
    global _stance
    with _lock:
        if _open and _stance is None:
            _stance = torch.compiler.set_stance("force_eager")


def _allow(mine: object) -> None:
    """Restore the compiler's stance, if nothing else is open."""
    global _stance
    with _lock:
        _open.discard(mine)
        if _open:
            return
        if _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
        if _stance is not None:
            _stance.__exit__(None, None, None)
            _stance = None


_finder = AfterImport(frozenset({COMPILER}), _force)


def forget_compiled() -> None:
    """Reset the compiler, since compiled graphs may contain a change that no longer applies."""
    if COMPILER in sys.modules:
        torch.compiler.reset()


@contextmanager
def unwatched() -> Iterator[None]:
    """Context without this thread's function modes: other probes and a default device do not apply.

    Modes are removed rather than disabled, since disabled modes still slow down each call.
    """
    count = torch._C._len_torch_function_stack()
    modes = [torch._C._pop_torch_function_stack() for _ in range(count)]
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def leave(mode: TorchFunctionMode) -> None:
    """Remove a function mode from this thread's stack, wherever it is; no effect if it is absent.

    Modes normally leave innermost first. After an interrupt (Ctrl-C) in a forward pass PyTorch
    skips the hooks that would have left a mode entered inside the pass.

    Example:
        >>> outer, inner = TorchFunctionMode(), TorchFunctionMode()
        >>> with outer, inner:
        ...     leave(outer)
        ...     _stack() == [inner]
        ...     _push_mode(outer)
        True
    """
    if not any(each is mode for each in _stack()):
        return
    above = [_pop_mode()]
    try:
        while above[-1] is not mode:
            above.append(_pop_mode())
    finally:
        for each in reversed(above):
            if each is not mode:
                _push_mode(each)


@contextmanager
def gradient_mode(keep: bool) -> Iterator[None]:
    """Context that records gradients of what a listener computes, if ``keep``, or none.

    Recorded operations save detached tensors, since a saved output would hold its own graph.
    Activation checkpoints do not see them: they would miss these tensors when they rerun the
    forward pass.
    """
    if not keep:
        with torch.no_grad():
            yield
        return
    with saved_tensors_hooks(_detached, _as_saved):
        yield


def _detached(saved: Tensor) -> Tensor:
    return saved.detach()


def _as_saved(saved: Tensor) -> Tensor:
    return saved
