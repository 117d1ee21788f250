"""The stack of running modules, and hooks that are not stored on the modules.

:class:`ModuleStack` names the modules of one model and follows them by global hooks. Each listener
and each applied law has its own.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, cast

import torch
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from acutance.capture.module_names import named_modules
from acutance.capture.padding import RealRows, TokenMasks
from acutance.capture.torch_modes import undoing

__all__ = [
    "ModuleStack",
    "Passes",
    "Running",
    "follow",
    "follow_inputs",
    "follow_outputs",
    "is_rerun",
    "module_of_method",
]


class _Mute:
    """The context of :meth:`Running.mute`; it counts how often it is open."""

    def __init__(self, thread: Running) -> None:
        self._thread = thread

    def __enter__(self) -> None:
        self._thread.depth += 1

    def __exit__(self, *_: object) -> None:
        self._thread.depth -= 1


class Running(threading.local):
    """What one thread is running in a model.

    Attributes:
        depth: number of open contexts in which captures are ignored.
        stack: names of the running modules, innermost last.
        call_counts: number of attention calls named so far in this pass, by module.
        rows: module of the last self-attention, and which of its rows are real.
        is_read: whether this forward pass is to be read.
        has_gradients: whether gradients were recorded when this forward pass began.
        pass_number: number of the forward pass.
        calls_in_pass: number of attention calls read in this pass, by module.
        joined_late: whether following began inside a pass; then the Python stack is searched.
        masks: token masks of the running modules.
    """

    def __init__(self) -> None:
        self.masks = TokenMasks()
        self._mute = _Mute(self)
        self.reset()

    def reset(self) -> None:
        """Forget everything about this thread."""
        self.depth = 0
        self.stack: list[str] = []
        self.joined_late = False
        self.call_counts: dict[str, int] = {}
        self.rows: tuple[str, RealRows] | None = None
        self.is_read, self.pass_number = True, 0
        self.has_gradients = True
        self.calls_in_pass: dict[str, int] = {}
        self.masks.clear()

    def mute(self) -> AbstractContextManager[None]:
        """Context in which captures of this thread are ignored, so that nested calls count once."""
        return self._mute

    def call_number(self, module: str) -> int:
        """Number of earlier calls of a module in this forward pass; counts this one."""
        count = self.calls_in_pass.get(module, 0)
        self.calls_in_pass[module] = count + 1
        return count


class ModuleStack:
    """The modules of a model, and which of them each thread is running.

    Args:
        model: any module.
        begin: called with a module and its name when it starts, before it is on the stack.
        end: called with both when it has ended or raised, after it left the stack.

    Attributes:
        thread: what the current thread is running.

    Example:
        >>> model, started = torch.nn.Sequential(torch.nn.Identity()), []
        >>> stack = ModuleStack(model, begin=lambda module, name: started.append(name))
        >>> stack.read_names()
        >>> with stack.follow():
        ...     _ = model(torch.zeros(1))
        >>> started
        ['Sequential', '0']
    """

    def __init__(
        self,
        model: torch.nn.Module,
        begin: Callable[[torch.nn.Module, str], None] | None = None,
        end: Callable[[torch.nn.Module, str], None] | None = None,
    ) -> None:
        self.model, self.thread = model, Running()
        self._begin, self._end = begin, end
        self._names: dict[int, str] = {}
        self._modules: dict[str, torch.nn.Module] = {}
        self._order: dict[str, int] = {}

    def read_names(self) -> None:
        """Name all modules that the model has now."""
        self._names.clear()
        self._modules.clear()
        for index, (name, module) in enumerate(named_modules(self.model)):
            self._names[id(module)] = name
            self._modules[name] = module
            self._order.setdefault(name, index)

    def named(self) -> Mapping[str, torch.nn.Module]:
        """The named modules, in model order."""
        return self._modules

    def follow(self) -> AbstractContextManager[None]:
        """Context in which the named modules are followed."""
        return follow(self.enter, self.leave)

    def name_of(self, module: torch.nn.Module | None) -> str | None:
        """Name of a module of the model, without wrappers; None for any other module."""
        return self._names.get(id(module))

    def module_of(self, name: str) -> torch.nn.Module | None:
        """The module of a call with this name."""
        return self._modules.get(name.partition("#")[0])

    def running(self) -> str | None:
        """Name of the running module; None outside the model."""
        stack = self.thread.stack
        return stack[-1] if stack and not self.thread.joined_late else module_of_method(self._names)

    def call_name(self) -> str | None:
        """Name for an attention call of the running module; None outside the model.

        The second call of a module in one forward pass is named ``name#1``, the third ``name#2``.
        """
        if not self.thread.stack:
            method_of = module_of_method(self._names)
            if method_of is not None:
                self.thread.is_read = True  # of no forward pass that could be left out
            return method_of
        name = self.running()
        if name is None:
            return None
        count = self.thread.call_counts.get(name, 0)
        self.thread.call_counts[name] = count + 1
        return f"{name}#{count}" if count else name

    def order(self, name: str) -> tuple[int, int]:
        """Sort key for names of calls: position of the module in the model, then call number."""
        base, _, call = name.partition("#")
        return self._order.get(base, 0), int(call or 0)

    def enter(self, module: torch.nn.Module) -> None:
        """Handle the start of a module's forward pass."""
        if torch.compiler.is_compiling():
            return
        name = self._names.get(id(module))
        if name is not None:
            if self._begin is not None:
                self._begin(module, name)
            self.thread.stack.append(name)

    def leave(self, module: torch.nn.Module) -> None:
        """Handle the end of a module's forward pass, also by an exception."""
        if torch.compiler.is_compiling():
            return
        stack = self.thread.stack
        if stack and stack[-1] == self._names.get(id(module)):
            name = stack.pop()
            if self._end is not None:
                self._end(module, name)


class Passes:
    """Counts forward passes and decides which of them are read.

    Attributes:
        every: the first of every ``every`` passes is read.
        pass_number: number of the next pass; None to count passes.
        gradients: True to read only passes that record gradients, False to read only the others
            (generated text, frozen models), None to read all.
        left_out: whether a call was left out because of ``gradients``.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.pass_number: int | None = None
        self.gradients: bool | None = None
        self.left_out = False
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, thread: Running) -> None:
        """Handle the start of a forward pass at the named module.

        Passes that begin at different modules are counted separately, such as those of an encoder
        and of its decoder during generation.
        """
        if is_rerun():
            return
        thread.has_gradients = torch.is_grad_enabled()
        with self._lock:
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
        thread.is_read = count % self.every == 0
        pass_number = count if self.pass_number is None else self.pass_number
        if self.pass_number is None or pass_number != thread.pass_number:
            thread.calls_in_pass.clear()
        thread.pass_number = pass_number

    def wants(self, thread: Running) -> bool:
        """Whether this pass, or method outside any, is of those that :attr:`gradients` selects.

        What counts is the beginning of a pass: reentrant checkpoints run layers without gradients.
        """
        if not thread.stack:
            thread.has_gradients = torch.is_grad_enabled()
        wanted = self.gradients is None or thread.has_gradients is self.gradients
        self.left_out = self.left_out or not wanted
        return wanted


def module_of_method(names: Mapping[int, str]) -> str | None:
    """Name of the module whose method is running outside any forward pass: ``decoder.decode(x)``.

    It is the first argument of the innermost function on the Python stack whose first argument is a
    module.

    Args:
        names: names of modules by ``id``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, torch.nn.Module):
                return names.get(id(first))
        frame = frame.f_back
    return None


def is_rerun() -> bool:
    """Whether a checkpointed forward pass is being recomputed for the backward pass."""
    return torch._C._current_graph_task_id() != -1


_lock = threading.RLock()
_following: set[object] = set()
_filter: Any = None


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without PyTorch's warning about compiling a module while there are global hooks.

    Our global hooks treat a compiled module and the one inside it as one module.
    """
    mine = object()

    def warn() -> None:
        with _lock:
            _following.discard(mine)
            if not _following and _filter in warnings.filters:
                cast("list[Any]", warnings.filters).remove(_filter)

    global _filter
    with undoing(warn):
        with _lock:
            if not _following:
                text = r"Using `torch\.compile\(module\)` when there are global hooks"
                warnings.filterwarnings("ignore", text)
                _filter = warnings.filters[0]
            _following.add(mine)
        yield


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

    handles: list[RemovableHandle] = []

    def remove() -> None:
        for handle in handles:
            handle.remove()

    with _quiet(), undoing(remove):
        handles.append(register_module_forward_pre_hook(before))
        handles.append(register_module_forward_hook(after, always_call=True))
        yield


@contextmanager
def follow_inputs(
    modules: Iterable[torch.nn.Module],
    react: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None],
) -> Iterator[None]:
    """Context that calls ``react(module, args, kwargs)`` after each forward pass of ``modules``.

    ``args`` and ``kwargs`` are the inputs of that pass.
    """
    with _follow_results(modules, lambda module, args, kwargs, _: react(module, args, kwargs)):
        yield


@contextmanager
def follow_outputs(
    modules: Iterable[torch.nn.Module], react: Callable[[torch.nn.Module, Any], None]
) -> Iterator[None]:
    """Context that calls ``react(module, output)`` after each forward pass of ``modules``."""
    with _follow_results(modules, lambda module, args, kwargs, output: react(module, output)):
        yield


@contextmanager
def _follow_results(
    modules: Iterable[torch.nn.Module], react: Callable[..., None]
) -> Iterator[None]:
    """Context that calls ``react(module, args, kwargs, output)`` after each pass of ``modules``."""
    meant = {id(module): module for module in modules}  # holds them: an id is theirs alone

    def after(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if id(module) in meant:
            react(module, args, kwargs, output)

    handles: list[RemovableHandle] = []

    def remove() -> None:
        for handle in handles:
            handle.remove()
            _global_forward_hooks_with_kwargs.pop(handle.id, None)  # PyTorch leaves it

    with _quiet(), undoing(remove):
        handles.append(register_module_forward_hook(after, with_kwargs=True))
        yield
