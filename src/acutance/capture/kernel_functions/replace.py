"""Replace the code of kernel functions, so that whoever holds a function calls the new code.

Other modules hold these functions under any name, in closures, partial objects and attributes. So
the function object stays and its ``__code__`` is exchanged; the original code runs in a copy of the
function. Restoring puts the same code object back.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from acutance.capture.kernel_functions.libraries import MODULES, loaded_kernels
from acutance.capture.kernel_functions.reading import Kernel
from acutance.capture.torch_modes import AfterImport, undoing

__all__ = ["Replaced", "replace_new", "replaced", "run_replaced"]


@dataclass(frozen=True)
class Replaced:
    """A kernel function whose code is exchanged.

    Attributes:
        function: the function.
        original: a copy of it that runs the original code.
        code: the original code.
        kernel: how its calls are read.
        signature: of the original function.
    """

    function: FunctionType
    original: FunctionType
    code: CodeType
    kernel: Kernel
    signature: inspect.Signature


_lock = threading.RLock()
_open: set[object] = set()
_modules = 0  # number of imported modules when they were last searched
#: Functions that were ever replaced: a thread may still run their new code after restoring.
_known: dict[str, Replaced] = {}
_active: dict[str, Replaced] = {}
_OnCall = Callable[[Replaced, tuple[Any, ...], dict[str, Any]], Any]
_on_call: _OnCall | None = None


def run_replaced(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a call of the function with this key."""
    function = _known[key]
    if _on_call is None:
        return function.original(*args, **kwargs)
    return _on_call(function, args, kwargs)


def _new_code(*args: Any, **kwargs: Any) -> Any:
    from acutance.capture.kernel_functions.replace import run_replaced

    return run_replaced("key of the function", args, kwargs)


def _code_for(key: str, code: CodeType) -> CodeType:
    """The code that replaces ``code``: it calls :func:`run_replaced` with this key."""
    template = _new_code.__code__
    constants = tuple(
        key if constant == "key of the function" else constant for constant in template.co_consts
    )
    return template.replace(co_consts=constants, co_name=code.co_name)


def _replace(function: FunctionType, kernel: Kernel) -> None:
    """Exchange the code of a function."""
    key = str(id(function))
    if key in _active:
        return
    known = _known.get(key)
    if known is None or known.function is not function or known.code is not function.__code__:
        original = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
        )
        original.__kwdefaults__ = function.__kwdefaults__
        original.__qualname__, original.__module__ = function.__qualname__, function.__module__
        signature = inspect.signature(function)
        known = Replaced(function, original, function.__code__, kernel, signature)
        _known[key] = known
    _active[key] = known  # first: an interrupt may come
    if "__signature__" not in vars(function):  # libraries look up which parameters it has
        vars(function)["__signature__"] = known.signature
    function.__code__ = _code_for(key, known.code)


def _restore() -> None:
    """Put the original code of all functions back."""
    for known in _active.values():
        known.function.__code__ = known.code
        if vars(known.function).get("__signature__") is known.signature:
            del vars(known.function)["__signature__"]
    _active.clear()


def replace_new() -> None:
    """Replace the functions of libraries that were imported since; for the start of a pass."""
    global _modules
    if not _open or len(sys.modules) == _modules:
        return
    with _lock:
        if _open:
            _modules = len(sys.modules)
            for function, kernel in loaded_kernels():
                _replace(function, kernel)


def _replace_all() -> None:
    """Search all modules; after one of the known modules was imported."""
    global _modules
    _modules = 0
    replace_new()


_finder = AfterImport(frozenset(MODULES), _replace_all)


@contextmanager
def replaced(on_call: _OnCall) -> Iterator[None]:
    """Context in which the kernel functions of all libraries are replaced; it may be nested.

    Args:
        on_call: runs a call instead, given the function, its positional and keyword arguments.
    """
    global _on_call
    mine = object()
    with undoing(lambda: _close(mine)):
        with _lock:
            _on_call = on_call
            _open.add(mine)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
                _replace_all()
        replace_new()
        yield


def _close(mine: object) -> None:
    """Put the functions' own code back, if nothing else is open."""
    with _lock:
        _open.discard(mine)
        if not _open:
            if _finder in sys.meta_path:
                sys.meta_path.remove(_finder)
            _restore()
