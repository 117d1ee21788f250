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

__all__ = ["EAGER", "AfterImport", "forget_compiled", "gradient_mode", "leave", "unwatched"]

#: The module that compiles, and that holds the stance.
COMPILER = "torch._dynamo"


class _Eager:
    """Runs compiled models uncompiled while any probe is open.

    A compiled graph would bypass the captured functions. The compiler's stance is global to the
    process: the first probe to open sets it, the last to close restores it. If ``torch._dynamo`` is
    not imported yet, the stance is set when it is, since importing it takes over a second of CPU
    time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._stance: Any = None
        self._finder = AfterImport(frozenset({COMPILER}), self._force)

    def __enter__(self) -> None:
        with self._lock:
            self._open += 1
            if self._open == 1:
                sys.meta_path.insert(0, self._finder)
        if COMPILER in sys.modules:
            importlib.import_module(COMPILER)  # another thread may be in the middle of it
            self._force()

    def _force(self) -> None:
        """Set the compiler's stance to eager, if a probe is open."""
        with self._lock:
            if self._open and self._stance is None:
                self._stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                sys.meta_path.remove(self._finder)
                stance, self._stance = self._stance, None
                if stance is not None:
                    stance.__exit__(None, None, None)


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


EAGER = _Eager()


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
    above = []
    if not any(each is mode for each in _stack()):
        return
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for each in reversed(above):
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
