"""Which module of a model each thread is running, which forward pass, and what is muted.

:class:`ModuleStack` names the modules of one model and follows them by hooks that no module holds.
What listens to a model and what changes it each have one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FrameType

import torch

from acutance.capture.module_hooks import follow
from acutance.capture.module_names import named_modules
from acutance.capture.padding import RealRows, TokenMasks

__all__ = ["ModuleStack", "Passes", "Running", "module_of_method", "rerun"]


class _Mute:
    """The context of :meth:`Running.mute`: one for all, since it only counts."""

    def __init__(self, thread: Running) -> None:
        self._thread = thread

    def __enter__(self) -> None:
        self._thread.depth += 1

    def __exit__(self, *_: object) -> None:
        self._thread.depth -= 1


class Running(threading.local):
    """One thread's place in a probed model.

    Attributes:
        depth: contexts open in which captures are ignored.
        stack: names of the modules running, innermost last.
        places: attention calls so far in this pass, by module.
        rows: the last self-attention: module, and which of its rows are real.
        reading: whether this forward pass is read.
        turn: its number.
        calls: attention calls in it, by module.
        late: whether modules began to run before they were followed: frames tell which one runs.
        masks: over tokens, of the modules running.
    """

    def __init__(self) -> None:
        self.masks = TokenMasks()
        self._mute = _Mute(self)
        self.reset()

    def reset(self) -> None:
        """Forget everything, of this thread."""
        self.depth = 0
        self.stack: list[str] = []
        self.late = False
        self.places: dict[str, int] = {}
        self.rows: tuple[str, RealRows] | None = None
        self.reading, self.turn = True, 0
        self.calls: dict[str, int] = {}
        self.masks.clear()

    def mute(self) -> AbstractContextManager[None]:
        """Ignore captures of this thread in the context: a call counts once."""
        return self._mute

    def call_number(self, module: str) -> int:
        """How many calls of a module this forward pass had before."""
        count = self.calls.get(module, 0)
        self.calls[module] = count + 1
        return count


class ModuleStack:
    """The modules of a model, and which of them each thread is running.

    Args:
        model: any module.
        begin: called with a module and its name as it begins to run, before it is on the stack.
        end: called with both when it has run or raised, after it was taken off.

    Attributes:
        thread: the present thread's place in the model.

    Example:
        >>> model, seen = torch.nn.Sequential(torch.nn.Identity()), []
        >>> stack = ModuleStack(model, begin=lambda module, name: seen.append(name))
        >>> stack.read_names()
        >>> with stack.follow():
        ...     _ = model(torch.zeros(1))
        >>> seen
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
        """Name the modules that the model has now."""
        self._names.clear()
        self._modules.clear()
        for index, (name, module) in enumerate(named_modules(self.model)):
            self._names[id(module)] = name
            self._modules[name] = module
            self._order.setdefault(name, index)

    def named(self) -> Mapping[str, torch.nn.Module]:
        """The modules that were named, in model order."""
        return self._modules

    def follow(self) -> AbstractContextManager[None]:
        """Follow the modules that have names, for the length of the context."""
        return follow(self.enter, self.leave)

    def name_of(self, module: torch.nn.Module | None) -> str | None:
        """Name of a module of the model without wrappers, None for any other."""
        return self._names.get(id(module))

    def module_of(self, name: str) -> torch.nn.Module | None:
        """The module that an attention call was named after."""
        return self._modules.get(name.partition("#")[0])

    def running(self) -> str | None:
        """Name of the module now running, None outside the model."""
        stack = self.thread.stack
        return stack[-1] if stack and not self.thread.late else module_of_method(self._names)

    def place(self) -> str | None:
        """Name for an attention call of the running module; None outside the model.

        The second call of a module in one forward pass is named ``name#1``, the third ``name#2``.
        """
        if not self.thread.stack:
            method_of = module_of_method(self._names)
            if method_of is not None:
                self.thread.reading = True  # of no forward pass that could be left out
            return method_of
        name = self.running()
        if name is None:
            return None
        seen = self.thread.places.get(name, 0)
        self.thread.places[name] = seen + 1
        return f"{name}#{seen}" if seen else name

    def order(self, name: str) -> tuple[int, int]:
        """What sorts names of calls as the modules are in the model, then by their number."""
        base, _, call = name.partition("#")
        return self._order.get(base, 0), int(call or 0)

    def enter(self, module: torch.nn.Module) -> None:
        """Handle the start of a module call."""
        if torch.compiler.is_compiling():
            return
        name = self._names.get(id(module))
        if name is not None:
            if self._begin is not None:
                self._begin(module, name)
            self.thread.stack.append(name)

    def leave(self, module: torch.nn.Module) -> None:
        """A module has run, or raised."""
        if torch.compiler.is_compiling():
            return
        stack = self.thread.stack
        if stack and stack[-1] == self._names.get(id(module)):
            name = stack.pop()
            if self._end is not None:
                self._end(module, name)


class Passes:
    """Count forward passes and decide which of them are read.

    Attributes:
        every: the first of every so many is read.
        turn: number of the next one; None counts them.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.turn: int | None = None
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, thread: Running) -> None:
        """Handle the start of a pass at this module.

        Passes that begin at different modules are counted apart, as those of an encoder and of its
        decoder's steps in generation.
        """
        if rerun():
            return
        with self._lock:
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
        thread.reading = count % self.every == 0
        turn = count if self.turn is None else self.turn
        if self.turn is None or turn != thread.turn:
            thread.calls.clear()
        thread.turn = turn


def module_of_method(names: Mapping[int, str]) -> str | None:
    """The module whose method is running, where no forward pass is: ``decoder.decode(x)``.

    It is the first argument of the innermost function that has a module for one.

    Args:
        names: of modules, by identity.
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


def rerun() -> bool:
    """Whether a checkpointed forward pass runs again, for the backward pass."""
    return torch._C._current_graph_task_id() != -1
