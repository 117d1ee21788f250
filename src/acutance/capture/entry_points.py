"""Watch attention at a few entry points instead of following every function call.

A torch-function mode sees every call but costs more than a small model's own work. If all code of a
model belongs to PyTorch and transformers, and a followed pass used only transformers' attention
interface, later passes run without the mode and without module hooks. :class:`EntryPoints` watches
instead:

- ``__call__`` of the outermost module's class, where a pass begins and ends. There the model is
  checked for new modules, hooks and ``forward`` functions.
- ``__call__`` of the classes of further modules that the listener must see running.
- transformers' attention interface.
- PyTorch's attention and softmax functions and ``exp``, under the names by which library code calls
  them. If another module holds one of these under a different name, passes stay followed.

A call of one of these functions ends this mode: the rest of the pass and later passes are followed.
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
    "ATTENTION_FUNCTIONS",
    "EXP",
    "EntryPoints",
    "is_library_code",
    "classes_are_library",
    "has_other_observers",
    "notify_all",
]

_SDPA = F.scaled_dot_product_attention
_TORCH = os.path.dirname(torch.__file__) + os.sep


class _EntryPoint(NamedTuple):
    """A function that is watched under one of its names.

    Attributes:
        owner: the module or class with the attribute.
        name: the attribute's name.
        function: the original function.
        watched: the wrapper that replaces it.
    """

    owner: Any
    name: str
    function: Callable[..., Any]
    watched: Callable[..., Any]


#: What is told of a function that a thread calls: (function). Doors that are open, innermost last.
_watchers: list[EntryPoints] = []
_lock = threading.Lock()


def notify_all(args: tuple[Any, ...] = ()) -> None:
    """Notify all watchers that attention or a softmax is about to be called with ``args``."""
    for points in tuple(_watchers):
        points.on_attention(args)


def _entry_point(owner: Any, name: str) -> _EntryPoint:
    """Build the wrapper of ``owner.name`` that notifies all watchers before each call."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            notify_all(args if function is not _SDPA else ())
        return function(*args, **kwargs)

    return _EntryPoint(owner, name, function, watched)


_ATTENTION = [
    _entry_point(F, "scaled_dot_product_attention"),
    _entry_point(torch, "softmax"),
    _entry_point(torch, "log_softmax"),
    _entry_point(torch, "_softmax"),
    _entry_point(torch, "_log_softmax"),
    _entry_point(torch, "_safe_softmax"),
    _entry_point(torch.special, "softmax"),
    _entry_point(torch.special, "log_softmax"),
    _entry_point(torch.Tensor, "softmax"),
    _entry_point(torch.Tensor, "log_softmax"),
]
_EXP = [
    _entry_point(torch, "exp"),
    _entry_point(torch.Tensor, "exp"),
    _entry_point(torch.Tensor, "exp_"),
]
_ENTRY_POINTS = [*_ATTENTION, *_EXP]
#: What takes a function's place, by the function: a mode may get either.
ATTENTION_FUNCTIONS = {point.watched: point.function for point in _ATTENTION}
#: What softmaxes that are written out begin with.
EXP = {each for point in _EXP for each in (point.function, point.watched)}


def _is_library(function: Any, folders: tuple[str, ...]) -> bool:
    """Whether a function's source file lies in one of the folders."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(folders)


def _folders() -> tuple[str, ...]:
    """Folders of PyTorch and transformers (if imported), and this file."""
    module = sys.modules.get("transformers")
    transformers_folder = (
        [os.path.dirname(module.__file__ or "") + os.sep] if module is not None else []
    )
    return _TORCH, __file__, *transformers_folder


def classes_are_library(model: torch.nn.Module) -> bool:
    """Whether the classes of all modules are defined in PyTorch or transformers.

    Example:
        >>> class Mine(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return torch.softmax(x, -1)
        >>> classes_are_library(torch.nn.Linear(2, 2)), classes_are_library(Mine(2, 2))
        (True, False)
    """
    folders = _folders()
    for kind in {type(module) for module in model.modules()}:
        for base in kind.__mro__:
            if base is torch.nn.Module:
                break
            members = (getattr(member, "__func__", member) for member in vars(base).values())
            functions = [member for member in members if hasattr(member, "__code__")]
            if not all(_is_library(member, folders) for member in functions):
                return False
    return True


def is_library_code(model: torch.nn.Module) -> bool:
    """Whether a model is PyTorch and transformers code without hooks or replaced functions."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return False
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return False
    return classes_are_library(model) and not _has_unwatched_alias()


def _has_unwatched_alias() -> bool:
    """Whether other code runs for a watched function, or holds it under another name.

    That is someone's replacement of the function, or a name in a transformers module.
    """
    for point in _ENTRY_POINTS:
        if getattr(point.owner, point.name) not in (point.function, point.watched):
            return True
    watched = {id(point.function) for point in _ENTRY_POINTS}
    for name, module in list(sys.modules.items()):
        is_transformers = name.startswith("transformers.")
        if is_transformers and not watched.isdisjoint(map(id, list(vars(module).values()))):
            return True
    return False


def has_other_observers(hooks: int = 0, modes: int = 0) -> bool:
    """Whether this thread has more function modes, or PyTorch more global hooks, than given."""
    registered = max(len(_global_forward_hooks), len(_global_forward_pre_hooks))
    return torch._C._len_torch_function_stack() > modes or registered > hooks


def _ignore(module: torch.nn.Module) -> None:
    """Do nothing."""


class EntryPoints:
    """Watches the forward passes of one model at a few entry points.

    Args:
        model: a model that consists of library code.
        roots: modules with which a forward pass begins.
        attention: modules that use transformers' attention interface; a change of their settings
            may select another implementation.
        on_begin: called with the module as a pass begins, and False if the model changed.
        on_end: called with the module as a pass ends.
        on_attention: called before an attention function runs: whether this thread is in a pass,
            and whether the first argument has fewer than three dimensions.
        inside: further modules to follow.
        enter: called when such a module starts.
        leave: called when such a module ends or raises.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        roots: set[torch.nn.Module],
        attention: list[torch.nn.Module],
        *,
        on_begin: Callable[[torch.nn.Module, bool], None],
        on_end: Callable[[torch.nn.Module], None],
        on_attention: Callable[[bool, bool], None],
        inside: Iterable[torch.nn.Module] = (),
        enter: Callable[[torch.nn.Module], None] = _ignore,
        leave: Callable[[torch.nn.Module], None] = _ignore,
    ) -> None:
        self._roots = {id(begins_pass): begins_pass for begins_pass in roots}
        self._inside = {id(module): module for module in inside}
        self.enter, self.leave = enter, leave
        self._on_begin, self._on_end, self._on_attention = on_begin, on_end, on_attention
        self._thread = threading.local()
        modules = list(model.modules())
        self._children = [
            (module._modules, tuple(module._modules.values()))
            for module in modules
            if module._modules
        ]
        self._empty = [
            hooks
            for module in modules
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._members = [vars(module) for module in modules]
        self._settings = [(vars(module), *_settings(module)) for module in attention]
        self._forwards = [(kind, kind.forward) for kind in {type(module) for module in modules}]

    def unchanged(self) -> bool:
        """Whether the model is unchanged and nothing else observes it."""
        if has_other_observers() or any(self._empty):
            return False
        for children, recorded in self._children:
            if tuple(children.values()) != recorded:
                return False
        for members, names, values in self._settings:
            if [members.get(name) for name in names] != values:
                return False
        for members in self._members:
            if "forward" in members:
                return False
        return all(kind.forward is forward for kind, forward in self._forwards)

    def on_attention(self, args: tuple[Any, ...]) -> None:
        """Handle an imminent call of an attention function with these positional arguments."""
        flat = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dim() < 3
        self._on_attention(self._in_pass(), flat)

    def _in_pass(self) -> bool:
        """Whether this thread is inside a forward pass of the model."""
        return bool(getattr(self._thread, "depth", 0))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context in which the entry points are watched."""
        kinds = {type(module) for module in (self._roots | self._inside).values()}
        with _lock:
            if not _watchers:
                for point in _ENTRY_POINTS:
                    setattr(point.owner, point.name, point.watched)
            _watchers.append(self)
            for kind in kinds:
                _wrap_call(kind)
        try:
            yield
        finally:
            with _lock:
                _watchers.remove(self)
                if not _watchers:
                    for point in _ENTRY_POINTS:
                        _restore(point)
                for kind in kinds:
                    _unwrap_call(kind)

    def begins_pass(self, module: torch.nn.Module) -> bool:
        """Whether calling this module begins a forward pass in this thread."""
        if self._in_pass():
            return False
        is_rerun = torch._C._current_graph_task_id() != -1  # a checkpoint runs it for the gradients
        return id(module) in self._roots or (id(module) in self._inside and not is_rerun)

    def follows(self, module: torch.nn.Module) -> bool:
        """Whether to report the start and end of this module's call: it is inside a pass."""
        return id(module) in self._inside and self._in_pass()

    @contextmanager
    def in_pass(self, module: torch.nn.Module) -> Iterator[None]:
        """Context of a forward pass that begins with this module."""
        self._thread.depth = 1
        try:
            self._on_begin(module, id(module) in self._roots and self.unchanged())
            yield
        finally:
            self._thread.depth = 0
            self._on_end(module)


def _settings(module: torch.nn.Module) -> tuple[list[str], list[Any]]:
    """Names and values of a module's boolean and string attributes, which select what it does."""
    values = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | str) and name != "training"
    }
    return list(values), list(values.values())


def _restore(point: _EntryPoint) -> None:
    """Put the original function of an entry point back."""
    if point.owner is torch.Tensor:
        delattr(torch.Tensor, point.name)  # its base has it
    else:
        setattr(point.owner, point.name, point.function)


#: By class, how many watch its calls, and the ``__call__`` that it had of its own, if any.
_watched_kinds: dict[type, tuple[int, Any]] = {}


def _wrap_call(kind: type) -> None:
    """Replace ``__call__`` of a module class by a wrapper that reports passes and modules."""
    count, original = _watched_kinds.get(kind, (0, vars(kind).get("__call__")))
    _watched_kinds[kind] = count + 1, original
    if count:
        return
    inherited: Callable[..., Any] = kind.__call__

    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if not _watchers or type(self) is not kind or torch.compiler.is_compiling():
            return inherited(self, *args, **kwargs)
        for points in tuple(_watchers):
            if points.begins_pass(self):
                with points.in_pass(self):
                    return self(*args, **kwargs)
        inside = [points for points in _watchers if points.follows(self)]
        for points in inside:
            points.enter(self)
        try:
            return inherited(self, *args, **kwargs)
        finally:
            for points in reversed(inside):
                points.leave(self)

    kind.__call__ = __call__  # type: ignore[method-assign]


def _unwrap_call(kind: type) -> None:
    """Undo one :func:`_wrap_call`; the last one restores the original ``__call__``."""
    count, original = _watched_kinds.pop(kind)
    if count > 1:
        _watched_kinds[kind] = count - 1, original
    elif original is None:
        del kind.__call__
    else:
        kind.__call__ = original  # type: ignore[method-assign]
