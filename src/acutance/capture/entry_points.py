"""The doors to PyTorch's attention, watched without following every function.

A mode of PyTorch functions sees every call, however it was reached, and costs more than a small
model's own work. Where all code of a model is that of PyTorch and transformers, and a pass that was
followed came by transformers' attention interface alone, the mode and the hooks on modules are left
out of later passes: :class:`Doors` has them watched at a few places instead.

- ``__call__`` of the outermost module's class: a pass begins and ends, and the model is looked over
  for modules, hooks and ``forward`` functions that were not there before.
- ``__call__`` of the classes of further modules, where the listener has to know that they run.
- transformers' interface, as ever.
- PyTorch's own functions of attention and softmax, and ``exp``, from which softmaxes are written,
  under the names by which that code calls them. The functions are built in: where another module
  holds one under a name of its own, which this could not replace, passes are followed as before.

What comes by a door ends this: the rest of that pass, and passes after it, are followed.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

__all__ = [
    "ATTENTION_DOORS",
    "EXP",
    "Doors",
    "is_library_code",
    "kinds_are_library",
    "others_listen",
    "tell_all",
]

_SDPA = F.scaled_dot_product_attention
_TORCH = os.path.dirname(torch.__file__) + os.sep


class _Door(NamedTuple):
    """A function under one of its names.

    Attributes:
        owner: what has the name.
        name: the attribute.
        function: what is there.
        watched: what takes its place.
    """

    owner: Any
    name: str
    function: Callable[..., Any]
    watched: Callable[..., Any]


#: What is told of a function that a thread calls: (function). Doors that are open, innermost last.
_open: list[Doors] = []
_lock = threading.Lock()


def tell_all(args: tuple[Any, ...] = ()) -> None:
    """Notify all observers of an imminent call of attention or of a softmax."""
    for doors in tuple(_open):
        doors.passed(args)


def _door(owner: Any, name: str) -> _Door:
    function = getattr(owner, name)

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            tell_all(args if function is not _SDPA else ())
        return function(*args, **kwargs)

    return _Door(owner, name, function, watched)


_ATTENTION = [
    _door(F, "scaled_dot_product_attention"),
    _door(torch, "softmax"),
    _door(torch, "log_softmax"),
    _door(torch, "_softmax"),
    _door(torch, "_log_softmax"),
    _door(torch, "_safe_softmax"),
    _door(torch.special, "softmax"),
    _door(torch.special, "log_softmax"),
    _door(torch.Tensor, "softmax"),
    _door(torch.Tensor, "log_softmax"),
]
_EXP = [_door(torch, "exp"), _door(torch.Tensor, "exp"), _door(torch.Tensor, "exp_")]
_DOORS = [*_ATTENTION, *_EXP]
#: What takes a function's place, by the function: a mode may get either.
ATTENTION_DOORS = {door.watched: door.function for door in _ATTENTION}
#: What softmaxes that are written out begin with.
EXP = {each for door in _EXP for each in (door.function, door.watched)}


def _is_library(function: Any, folders: tuple[str, ...]) -> bool:
    """Whether a function was written in one of these folders."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(folders)


def _folders() -> tuple[str, ...]:
    """PyTorch, transformers if it is imported, and this file, which replaces some of theirs."""
    module = sys.modules.get("transformers")
    found = [os.path.dirname(module.__file__ or "") + os.sep] if module is not None else []
    return _TORCH, __file__, *found


def kinds_are_library(model: torch.nn.Module) -> bool:
    """Whether the classes of all modules were written in PyTorch and transformers.

    Example:
        >>> class Mine(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return torch.softmax(x, -1)
        >>> kinds_are_library(torch.nn.Linear(2, 2)), kinds_are_library(Mine(2, 2))
        (True, False)
    """
    folders = _folders()
    for kind in {type(module) for module in model.modules()}:
        for base in kind.__mro__:
            if base is torch.nn.Module:
                break
            members = (getattr(each, "__func__", each) for each in vars(base).values())
            coded = [each for each in members if hasattr(each, "__code__")]
            if not all(_is_library(each, folders) for each in coded):
                return False
    return True


def is_library_code(model: torch.nn.Module) -> bool:
    """Whether a model consists of PyTorch and transformers code that is called by known names."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return False
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return False
    return kinds_are_library(model) and not _aliases()


def _aliases() -> bool:
    """Whether a transformers module refers to a function by a name that is not replaced."""
    watched = {id(door.function) for door in _DOORS}
    for name, module in list(sys.modules.items()):
        ours = name.startswith("transformers.")
        if ours and not watched.isdisjoint(map(id, list(vars(module).values()))):
            return True
    return False


def others_listen(hooks: int = 0, modes: int = 0) -> bool:
    """Whether this thread has more function modes, or modules have more hooks, than so many."""
    held = max(len(_global_forward_hooks), len(_global_forward_pre_hooks))
    return torch._C._len_torch_function_stack() > modes or held > hooks


def _ignore(module: torch.nn.Module) -> None:
    """Do nothing."""


class Doors:
    """Passes of one model that are watched at its doors.

    Args:
        model: whose code is that of libraries.
        roots: modules that a pass begins with.
        attention: modules that ask the interface, whose settings may open another way.
        begun: called as a pass begins; False where the model or what runs around it changed.
        ended: called as it ends.
        passed: called when a function of attention is about to be called: whether that is in a pass
            of this thread, and whether its first argument has fewer than three dimensions.
        inside: further modules to follow.
        enter: called as a module to follow begins to run in a pass.
        leave: called as it has run or raised.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        roots: set[torch.nn.Module],
        attention: list[torch.nn.Module],
        *,
        begun: Callable[[torch.nn.Module, bool], None],
        ended: Callable[[torch.nn.Module], None],
        passed: Callable[[bool, bool], None],
        inside: Iterable[torch.nn.Module] = (),
        enter: Callable[[torch.nn.Module], None] = _ignore,
        leave: Callable[[torch.nn.Module], None] = _ignore,
    ) -> None:
        self._roots = {id(root): root for root in roots}
        self._inside = {id(module): module for module in inside}
        self.enter, self.leave = enter, leave
        self._begun, self._ended, self._passed = begun, ended, passed
        self._thread = threading.local()
        modules = list(model.modules())
        self._children = [
            (module._modules, tuple(module._modules.values()))
            for module in modules
            if module._modules
        ]
        self._empty = [
            hooks for one in modules for hooks in (one._forward_hooks, one._forward_pre_hooks)
        ]
        self._members = [vars(module) for module in modules]
        self._settings = [(vars(module), *_settings(module)) for module in attention]
        self._forwards = [(kind, kind.forward) for kind in {type(module) for module in modules}]

    def unchanged(self) -> bool:
        """Whether the model has not changed since then, and nothing else is listening."""
        if others_listen() or any(self._empty):
            return False
        for held, known in self._children:
            if tuple(held.values()) != known:
                return False
        for members, names, values in self._settings:
            if [members.get(name) for name in names] != values:
                return False
        for members in self._members:
            if "forward" in members:
                return False
        return all(kind.forward is forward for kind, forward in self._forwards)

    def passed(self, args: tuple[Any, ...]) -> None:
        """A function of attention is about to be called."""
        flat = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dim() < 3
        self._passed(self._in_pass(), flat)

    def _in_pass(self) -> bool:
        """Whether this thread is in a pass."""
        return bool(getattr(self._thread, "depth", 0))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the doors for the length of the context."""
        kinds = {type(module) for module in (self._roots | self._inside).values()}
        with _lock:
            if not _open:
                for door in _DOORS:
                    setattr(door.owner, door.name, door.watched)
            _open.append(self)
            for kind in kinds:
                _watch_calls(kind)
        try:
            yield
        finally:
            with _lock:
                _open.remove(self)
                if not _open:
                    for door in _DOORS:
                        _restore(door)
                for kind in kinds:
                    _leave_calls(kind)

    def root(self, module: torch.nn.Module) -> bool:
        """Whether calling this module begins a forward pass in this thread."""
        if self._in_pass():
            return False
        again = torch._C._current_graph_task_id() != -1  # a checkpoint runs it for the gradients
        return id(module) in self._roots or (id(module) in self._inside and not again)

    def follows(self, module: torch.nn.Module) -> bool:
        """Whether a module is to be followed, in a pass of this thread."""
        return id(module) in self._inside and self._in_pass()

    @contextmanager
    def in_pass(self, module: torch.nn.Module) -> Iterator[None]:
        """A context for the pass that begins with this module."""
        self._thread.depth = 1
        try:
            self._begun(module, id(module) in self._roots and self.unchanged())
            yield
        finally:
            self._thread.depth = 0
            self._ended(module)


def _settings(module: torch.nn.Module) -> tuple[list[str], list[Any]]:
    """Plain attributes of a module that choose what it does, and their values."""
    values = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | str) and name != "training"
    }
    return list(values), list(values.values())


def _restore(door: _Door) -> None:
    if door.owner is torch.Tensor:
        delattr(torch.Tensor, door.name)  # its base has it
    else:
        setattr(door.owner, door.name, door.function)


#: By class, how many watch its calls, and the ``__call__`` that it had of its own, if any.
_watched_kinds: dict[type, tuple[int, Any]] = {}


def _watch_calls(kind: type) -> None:
    count, own = _watched_kinds.get(kind, (0, vars(kind).get("__call__")))
    _watched_kinds[kind] = count + 1, own
    if count:
        return
    before: Callable[..., Any] = kind.__call__

    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if not _open or type(self) is not kind or torch.compiler.is_compiling():
            return before(self, *args, **kwargs)
        for doors in tuple(_open):
            if doors.root(self):
                with doors.in_pass(self):
                    return self(*args, **kwargs)
        inside = [doors for doors in _open if doors.follows(self)]
        for doors in inside:
            doors.enter(self)
        try:
            return before(self, *args, **kwargs)
        finally:
            for doors in reversed(inside):
                doors.leave(self)

    kind.__call__ = __call__  # type: ignore[method-assign]


def _leave_calls(kind: type) -> None:
    count, own = _watched_kinds.pop(kind)
    if count > 1:
        _watched_kinds[kind] = count - 1, own
    elif own is None:
        del kind.__call__
    else:
        kind.__call__ = own  # type: ignore[method-assign]
