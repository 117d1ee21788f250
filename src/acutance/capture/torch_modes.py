"""PyTorch's function modes and its compiler, set aside while a model is listened to."""

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

__all__ = ["EAGER", "forget_compiled", "gradient_mode", "leave", "unwatched"]

#: The module that compiles, and that holds the stance.
COMPILER = "torch._dynamo"


class _Eager:
    """Runs compiled models uncompiled while any probe is open.

    A graph compiled earlier would run without ever calling what is captured here. The compiler's
    stance is global to the process, so the first probe to open sets it and the last to close
    restores it. While ``torch._dynamo`` is not imported nothing is compiled, and importing it just
    to set the stance would cost over a second of CPU time: the stance is set when it is imported.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._stance: Any = None
        self._finder = _AfterImport(COMPILER, self._force)

    def __enter__(self) -> None:
        with self._lock:
            self._open += 1
            if self._open == 1:
                sys.meta_path.insert(0, self._finder)
        if COMPILER in sys.modules:
            importlib.import_module(COMPILER)  # another thread may be in the middle of it
            self._force()

    def _force(self) -> None:
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


class _AfterImport(MetaPathFinder):
    """Calls a function right after a module has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec, with a loader that calls the function too."""
        if fullname != self.name:
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
    """Reset the compiler, since compiled graphs may contain a change or lack it."""
    if COMPILER in sys.modules:
        torch.compiler.reset()


@contextmanager
def unwatched() -> Iterator[None]:
    """Disable this thread's function modes, so that other probes and a default device do not apply.

    Disabling them would leave them on the stack, and calls that something might watch take the
    slow way through the dispatcher.
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
    """Remove a mode from this thread's stack, wherever it is; no effect if it is not there.

    Modes leave the innermost first, but not where an interrupt (Ctrl-C) ends a forward pass:
    PyTorch then skips the hooks that would have left a mode entered inside the pass.

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
    """Record gradients of what a listener computes from a model's tensors, or record none.

    What is recorded saves detached tensors: as it is, a saved output would hold its own graph. And
    a checkpoint, which counts what is saved in its part of the model, does not see it: it would
    miss these tensors when it runs that part alone again.
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
