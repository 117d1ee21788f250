"""Interception: what is open on a model, which of its modules run, and which functions they call.

While something is open, the classes of the model's modules have a ``__call__`` of ours, which tells
it when a module starts and ends. Functions are followed by a torch-function mode, which sees every
call of its thread but costs more than a small model's own work. So after a pass in which a model of
PyTorch's and transformers' code used only transformers' attention interface, it runs without. Its
code calls PyTorch's attention and softmax functions and ``exp`` by names that are replaced
meanwhile: such a call in a pass starts the mode again, and so does a change of the model.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.overrides import _get_current_function_mode_stack as _stack

from acutance.capture.find_layers import (
    has_forward,
    heads_of,
    looks_like_weights,
    may_compute_attention,
    named_modules,
)
from acutance.capture.padding import tells_padding

_lock = threading.RLock()

# -- what is suspended meanwhile -------------------------------------------------------------------

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


_eager: set[object] = set()  # the open contexts of :func:`eager`
_stance: Any = None
#: Apart from the lock of handlers, which may import transformers while another thread imports this.
_stance_lock = threading.RLock()


@contextmanager
def eager() -> Iterator[None]:
    """Context in which compiled models run uncompiled; it may be nested.

    A compiled graph would bypass the captured functions. The compiler's stance is global to the
    process: the first to open sets it, the last to close restores it. If ``torch._dynamo`` is not
    imported yet, the stance is set when it is, since importing it takes over a second of CPU time.
    """
    mine = object()
    with undoing(lambda: _allow(mine)):
        with _stance_lock:
            _eager.add(mine)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
        if COMPILER in sys.modules:
            importlib.import_module(COMPILER)  # another thread may be in the middle of it
            _force()
        yield


def _force() -> None:
    """Set the compiler's stance to eager, if a probe is open."""
    global _stance
    with _stance_lock:
        if _eager and _stance is None:
            _stance = torch.compiler.set_stance("force_eager")


def _allow(mine: object) -> None:
    """Restore the compiler's stance, if nothing else is open."""
    global _stance
    with _stance_lock:
        _eager.discard(mine)
        if _eager:
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
    modes: list[Any] = []
    for _ in range(torch._C._len_torch_function_stack()):
        modes.append(torch._C._pop_torch_function_stack())
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


def gradient_mode(keep: bool) -> AbstractContextManager[Any]:
    """Context that records gradients of what a listener computes, if ``keep``, or none.

    Recorded operations save detached tensors, since a saved output would hold its own graph.
    Activation checkpoints do not see them: they would miss these tensors when they rerun the
    forward pass.
    """
    return saved_tensors_hooks(Tensor.detach, _as_saved) if keep else torch.no_grad()


def _as_saved(saved: Tensor) -> Tensor:
    return saved


# -- handlers of calls -----------------------------------------------------------------------------

#: Handles one call: ``run()`` goes on with it, as the handler left it, and returns its result.
Handler = Callable[[Any, Callable[[], Any]], Any]


class Handlers:
    """The open handlers of one kind of call.

    Args:
        install: makes calls pass through the handlers, or through new kinds of functions too.
        uninstall: undoes that; it may be called twice.

    Attributes:
        changing: those that change calls, outermost first.
        looking: those inside them that only look.
    """

    def __init__(self, install: Callable[[], None], uninstall: Callable[[], None]) -> None:
        self._install, self._uninstall = install, uninstall
        self.changing: list[Handler] = []
        self.looking: list[Handler] = []

    def __len__(self) -> int:
        return len(self.changing) + len(self.looking)

    @contextmanager
    def intercept(
        self, handler: Handler, *, looks: bool = False, outermost: bool = False
    ) -> Iterator[None]:
        """Context in which a handler is called around each call.

        It may change the call before it calls ``run``, and the result after. Handlers are called in
        the order in which they were opened.

        Args:
            handler: called with the call, and with ``run``, which goes on with it.
            looks: whether it sees calls as all others change them, and none that are compiled.
            outermost: whether it sees them before all others do.
        """
        group = self.looking if looks else self.changing

        def remove() -> None:
            with _lock:
                for index, other in enumerate(group):
                    if other is handler:
                        del group[index]
                        break
                if not (self.changing or self.looking):
                    self._uninstall()

        with undoing(remove):
            with _lock:
                group.insert(0 if outermost else len(group), handler)
                self._install()
            yield


def pass_on(call: Any, handlers: Sequence[Handler], number: int = 0) -> Any:
    """Run a call through its handlers from one of them on, and compute it after the last."""
    if number == len(handlers):
        return call.compute()
    return handlers[number](call, functools.partial(pass_on, call, handlers, number + 1))


# -- which modules run -----------------------------------------------------------------------------

#: What is told when modules start and end.
_followers: list[Interception | _Results] = []
#: By class whose ``__call__`` is replaced, its own; None if it inherits it.
_replaced_calls: dict[type[torch.nn.Module], Any] = {}
#: Called as a pass begins.
AT_BEGIN: list[Callable[[], None]] = []


def _remove(follower: Interception | _Results) -> None:
    """Tell a follower nothing more; no effect if that was done."""
    with _lock:
        if follower in _followers:
            _followers.remove(follower)
        _replace_calls()


def _replace_calls() -> None:
    """Replace ``__call__`` of all classes with followed modules; restore it of all others."""
    kinds: set[type[torch.nn.Module]] = set()
    for follower in _followers:
        kinds.update(map(type, follower.followed.values()))
    kinds = set(filter(has_forward, kinds))
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    if _followers and compiled is not None:  # it may hold a module's __call__ from before
        kinds.add(compiled)
    for kind in set(_replaced_calls) - kinds:
        own = _replaced_calls[kind]
        if own is not None:
            kind.__call__ = own  # type: ignore[method-assign]
        elif "__call__" in vars(kind):
            del kind.__call__
        del _replaced_calls[kind]
    for kind in kinds - set(_replaced_calls):
        _replaced_calls[kind] = vars(kind).get("__call__")
        kind.__call__ = _followed_call(kind, kind.__call__)  # type: ignore[method-assign, arg-type]


@functools.lru_cache(maxsize=256)
def _followed_call(
    kind: type[torch.nn.Module], inherited: Callable[..., Any]
) -> Callable[..., Any]:
    """The ``__call__`` of a module class that tells followers; ``inherited`` is the one it had."""
    is_wrapper = kind.__name__ == "OptimizedModule"

    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if type(self) is not kind or torch.compiler.is_compiling():
            return inherited(self, *args, **kwargs)
        key = id(self._orig_mod) if is_wrapper else id(self)
        followers, output = [], None
        for follower in _followers:
            if key in follower.followed:
                followers.append(follower)
        try:
            for follower in followers:
                follower.enter(key, self, args, kwargs)
            output = inherited(self, *args, **kwargs)
            return output
        finally:
            for follower in reversed(followers):
                follower.leave(key, self, args, kwargs, output)

    return __call__


class _Results:
    """Calls a function after each forward pass of some modules, unless it raised an error."""

    def __init__(self, modules: Iterable[torch.nn.Module], react: Callable[..., None]) -> None:
        self.followed = {id(module): module for module in modules}
        self._react = react

    def enter(self, *_: Any) -> None:
        """Do nothing."""

    def leave(self, _: int, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Call the function."""
        if output is not None:
            self._react(module, args, kwargs, output)


@contextmanager
def follow_results(
    modules: Iterable[torch.nn.Module], react: Callable[..., None]
) -> Iterator[None]:
    """Context that calls ``react(module, args, kwargs, output)`` after each pass of ``modules``.

    Example:
        >>> layer, shapes = torch.nn.Linear(2, 3), []
        >>> with follow_results([layer], lambda *call: shapes.append(tuple(call[-1].shape))):
        ...     _ = layer(torch.zeros(1, 2))
        >>> shapes, len(layer._forward_hooks)
        ([(1, 3)], 0)
    """
    follower = _Results(modules, react)
    with undoing(lambda: _remove(follower)):
        with _lock:
            _followers.append(follower)
            _replace_calls()
        yield


# -- which functions may be attention --------------------------------------------------------------

_SDPA = F.scaled_dot_product_attention
#: What is open, in the order of opening.
OPEN: list[Interception] = []


def notify_all() -> None:
    """Tell everything open that attention is about to be called."""
    for interception in tuple(OPEN):
        interception.on_function()


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that tells everything open before it calls ``function``."""

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if torch._C._is_torch_function_enabled() and not torch.compiler.is_compiling():
            flat = function is not _SDPA and isinstance(args[0] if args else None, torch.Tensor)
            if not (flat and args[0].dim() < 3):
                notify_all()
        return function(*args, **kwargs)

    return watched


_SOFTMAXES = ("softmax", "log_softmax")
_ATTENTION_NAMES = [
    (F, ("scaled_dot_product_attention",)),
    (torch, (*_SOFTMAXES, "_softmax", "_log_softmax", "_safe_softmax")),
    (torch.special, _SOFTMAXES),
    (torch.Tensor, _SOFTMAXES),
]
_EXP_NAMES = [(torch, ("exp",)), (torch.Tensor, ("exp", "exp_"))]
#: The functions that are watched: by owner and name the function and what takes its place.
_WATCHED = {
    (owner, name): (getattr(owner, name), _watched(getattr(owner, name)))
    for owner, names in (*_ATTENTION_NAMES, *_EXP_NAMES)
    for name in names
}
#: What takes a function's place, by the function: a mode may get either.
ATTENTION_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _WATCHED[owner, name][1]: _WATCHED[owner, name][0]
    for owner, names in _ATTENTION_NAMES
    for name in names
}
#: What softmaxes that are written out begin with.
EXP = {
    function for owner, names in _EXP_NAMES for name in names for function in _WATCHED[owner, name]
}


def _watch_functions() -> None:
    """Put what is watched in the place of functions, if something open needs it, or them back."""
    watch = False
    for interception in OPEN:
        watch = watch or interception.by_interface
    for (owner, name), (function, watched) in _WATCHED.items():
        current = getattr(owner, name)
        if watch and current is function:
            setattr(owner, name, watched)
        elif not watch and current is watched:
            if owner is torch.Tensor:
                delattr(owner, name)  # its base has it
            else:
                setattr(owner, name, function)


def _can_watch() -> bool:
    """Whether the watched functions have their names, and not those of someone else."""
    taken = False
    for (owner, name), known in _WATCHED.items():
        taken = taken or getattr(owner, name) not in known
    return not taken


def is_library_code(model: torch.nn.Module) -> bool:
    """Whether a model is PyTorch and transformers code that calls the watched functions by name.

    It is not if a module has hooks or a function in place of ``forward``, or other code runs for a
    watched function or holds it under another name.
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return False
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return False
    if not (classes_are_library(model) and _can_watch()):
        return False
    watched = {id(function) for function, _ in _WATCHED.values()}
    loaded = list(sys.modules.items())
    library = [holder for name, holder in loaded if name.startswith("transformers.")]
    return all(watched.isdisjoint(map(id, list(vars(holder).values()))) for holder in library)


def classes_are_library(model: torch.nn.Module) -> bool:
    """Whether the classes of all modules are defined in PyTorch or transformers.

    Example:
        >>> class Mine(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return torch.softmax(x, -1)
        >>> classes_are_library(torch.nn.Linear(2, 2)), classes_are_library(Mine(2, 2))
        (True, False)
    """
    transformers = sys.modules.get("transformers")
    files = (torch.__file__, getattr(transformers, "__file__", None) or torch.__file__)
    folders = (__file__, *(os.path.dirname(file) + os.sep for file in files))
    for kind in set(map(type, model.modules())):
        for base in kind.__mro__:
            if base is torch.nn.Module:
                break
            for member in vars(base).values():
                code = getattr(getattr(member, "__func__", member), "__code__", None)
                if code is not None and not code.co_filename.startswith(folders):
                    return False
    return True


def _settings(layer: torch.nn.Module) -> list[Any]:
    """What selects how a layer computes attention: its implementation, its booleans and strings."""
    config, attributes = getattr(layer, "config", None), vars(layer)
    settings: list[Any] = [len(attributes), getattr(config, "_attn_implementation", None)]
    for name, value in attributes.items():
        if isinstance(value, bool | str) and name != "training":
            settings.append((name, value))
    return settings


class Contents:
    """What a model consists of, to see whether it has changed; it keeps no module alive.

    Args:
        model: the model.
        layers: its attention layers, whose settings may select another implementation.
        roots: modules that began a pass.
        inside: other modules that are followed where calls outside of passes count too.

    Attributes:
        layers, roots, inside: as given.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Iterable[torch.nn.Module],
        roots: Iterable[torch.nn.Module] = (),
        inside: Iterable[torch.nn.Module] = (),
    ) -> None:
        self.layers, self.roots, self.inside = map(weakref.WeakSet, (layers, roots, inside))
        modules = list(model.modules())
        self._modules = [
            (weakref.ref(module), type(module), tuple(map(id, module._modules.values())))
            for module in modules
        ]
        self._settings = [(weakref.ref(layer), _settings(layer)) for layer in self.layers]
        self._forwards = [(kind, kind.forward) for kind in {type(module) for module in modules}]

    def unchanged(self) -> bool:
        """Whether modules, settings of attention layers and ``forward`` functions are as before."""
        for kind, forward in self._forwards:
            if kind.forward is not forward:
                return False
        for reference, kind, children in self._modules:
            module = reference()
            if module is None or type(module) is not kind or "forward" in module.__dict__:
                return False
            if module._forward_hooks or module._forward_pre_hooks:
                return False
            if tuple(map(id, module._modules.values())) != children:  # they are alive: listed too
                return False
        for reference, settings in self._settings:
            layer = reference()
            if layer is None or _settings(layer) != settings:
                return False
        return True


#: By whether functions outside the model's passes count, what was shown of each model by a pass in
#: which all its attention used transformers' interface.
_shown: dict[bool, weakref.WeakKeyDictionary[torch.nn.Module, Contents]] = {
    outside: weakref.WeakKeyDictionary() for outside in (False, True)
}


# -- which modules a thread runs ------------------------------------------------------------------


class Running(threading.local):
    """What one thread is running in a model.

    As a context, it ignores the thread's captures, so that nested calls count once.

    Attributes:
        depth: number of open contexts in which captures are ignored.
        stack: names of the running modules, innermost last.
        call_counts: number of attention calls named so far in this pass, by module.
        is_read: whether this forward pass is to be read.
        has_gradients: whether gradients were recorded when this forward pass began.
        pass_number: number of the forward pass.
        calls_in_pass: number of attention calls read in this pass, by module.
        joined_late: whether modules were followed only from inside a pass on; then the Python stack
            is searched.
        mode: the thread's function mode; None while functions are not followed.
        paused: how often following functions was paused.
    """

    def __init__(self) -> None:
        self.mode: TorchFunctionMode | None = None
        self.paused = 0
        self.reset()

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1

    def reset(self) -> None:
        """Forget everything about this thread."""
        self.depth = 0
        self.stack: list[str] = []
        self.joined_late = False
        self.call_counts: dict[str, int] = {}
        self.is_read, self.pass_number = True, 0
        self.has_gradients = True
        self.calls_in_pass: dict[str, int] = {}

    def call_number(self, module: str) -> int:
        """Number of earlier calls of a module in this forward pass; counts this one."""
        count = self.calls_in_pass.get(module, 0)
        self.calls_in_pass[module] = count + 1
        return count


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


# -- what is open on a model -----------------------------------------------------------------------


class Interception:
    """What is open on a model; a subclass says what it does with attention calls.

    Args:
        model: any module.

    Attributes:
        model: the model.
        modules: its modules by name, in model order.
        by_id: the same by ``id``.
        names: their names by ``id``.
        thread: what the current thread is running.
        followed: those of its modules that are followed, by ``id``.
        by_interface: whether functions are not followed, as all attention goes through
            transformers' interface.
        interface_modules: modules that used it.
        outside: whether functions are also followed outside the model's forward passes, and only
            in the thread that opened this.
    """

    outside = False

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.thread = model, Running()
        self.modules: dict[str, torch.nn.Module] = {}
        self.by_id: dict[int, torch.nn.Module] = {}
        self.names: dict[int, str] = {}
        self.followed: Mapping[int, torch.nn.Module] = {}
        self.by_interface = False
        self.interface_modules: set[torch.nn.Module] = set()
        self._calls_functions = False
        self._not_yet_run: set[str] = set()
        self._roots: set[torch.nn.Module] = set()
        self._contents: Contents | None = None  # while functions are not followed
        self._home = 0
        self._is_open = False

    def new_mode(self) -> TorchFunctionMode:
        """The function mode for a thread."""
        raise NotImplementedError

    def muted(self) -> bool:
        """Whether this thread is inside a call that is already handled."""
        return self.thread.depth > 0

    def mute(self) -> Running:
        """Context in which this thread handles nothing, so that nested calls count once."""
        return self.thread

    def on_begin(self, module: torch.nn.Module, name: str) -> None:
        """Handle the start of a forward pass of the model, which begins with this module."""

    def on_enter(
        self, module: torch.nn.Module, name: str, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Handle the start of a module, before it counts as running."""

    def on_leave(self, module: torch.nn.Module) -> None:
        """Handle the end of a module."""

    def on_end(self) -> None:
        """Handle the end of a forward pass of the model."""

    @contextmanager
    def opened(self, calls_functions: bool = False, *, named: bool = False) -> Iterator[None]:
        """Context in which this is open on its model.

        Args:
            calls_functions: follow functions even where all attention uses transformers' interface.
            named: whether the model's modules have just been named.
        """
        if not named:
            self.read_names()
        self._home = threading.get_ident()
        self._calls_functions = calls_functions
        self.interface_modules.clear()
        self._roots.clear()
        with undoing(self._unlist):
            with _lock:
                OPEN.append(self)
                self._is_open = True
                known = None if calls_functions else _shown[self.outside].get(self.model)
                if known is not None and known.unchanged() and _can_watch():
                    self.interface_modules.update(known.layers)
                    self._roots.update(known.roots)
                    self._not_yet_run = set()
                    self._watch(known)
                else:
                    self._not_yet_run = {
                        name
                        for name, module in self.modules.items()
                        if may_compute_attention(module)
                    }
                    self.followed, self.by_interface = self.by_id, False
                _followers.append(self)
                _replace_calls()
            self.follow_functions()
            yield

    def _unlist(self) -> None:
        """Close this; it may be done again where an interrupt cut it short."""
        self._is_open = False
        with _lock:
            if self in OPEN:
                OPEN.remove(self)
            _watch_functions()
            _remove(self)
        self.follow_functions()

    # -- which modules run ------------------------------------------------------------------------

    def read_names(self) -> None:
        """Name all modules that the model has now."""
        named = named_modules(self.model)
        self.modules = dict(named)
        self.by_id = {id(module): module for _, module in named}
        self.names = {id(module): name for name, module in named}

    def name_of(self, module: torch.nn.Module | None) -> str | None:
        """Name of a module of the model, without wrappers; None for any other module.

        A compiled module has the name of the module that it is made of.
        """
        name = self.names.get(id(module))
        if name is None and module is not None and type(module).__name__ == "OptimizedModule":
            return self.names.get(id(module._orig_mod))
        return name

    def module_of(self, name: str) -> torch.nn.Module | None:
        """The module of a call with this name."""
        return self.modules.get(name.partition("#")[0])

    def running(self) -> str | None:
        """Name of the running module; None outside the model."""
        stack = self.thread.stack
        return stack[-1] if stack and not self.thread.joined_late else module_of_method(self.names)

    def call_name(self) -> str | None:
        """Name for an attention call of the running module; None outside the model.

        The second call of a module in one forward pass is named ``name#1``, the third ``name#2``.
        """
        if not self.thread.stack:
            method_of = module_of_method(self.names)
            if method_of is not None:
                self.thread.is_read = True  # of no forward pass that could be left out
            return method_of
        name = self.running()
        if name is None:
            return None
        count = self.thread.call_counts.get(name, 0)
        self.thread.call_counts[name] = count + 1
        return f"{name}#{count}" if count else name

    def heads_running(self) -> int | None:
        """Heads of the running module, or of that around it; None if neither states them.

        A softmax may be a module of its own: its attention is around it.
        """
        name = self.running() or ""
        around = self.module_of(name.rpartition(".")[0])
        return heads_of(self.module_of(name)) or heads_of(around)

    def order(self, name: str) -> tuple[int, int]:
        """Sort key for names of calls: position of the module in the model, then call number."""
        base, _, call = name.partition("#")
        names = list(self.modules)
        return names.index(base) if base in self.modules else 0, int(call or 0)

    def enter(self, key: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Handle the start of a module, which is followed as ``key``; the first begins a pass."""
        stack, name = self.thread.stack, self.names.get(key, "")
        self._not_yet_run.discard(name)
        if not stack:
            for begin in AT_BEGIN:
                begin()
            if self.by_interface and self._contents is not None and not self._contents.unchanged():
                self.use_functions()
            self._roots.add(module)
            self.on_begin(module, name)
        self.on_enter(module, name, args, kwargs)
        stack.append(name)
        if len(stack) == 1 and not self.by_interface:
            self.follow_functions()

    def leave(self, key: int, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Handle the end of a module; the outermost one ends the pass.

        ``output`` is None if it raised an error.
        """
        thread = self.thread
        if not thread.stack or thread.stack[-1] != self.names.get(key):
            return
        thread.stack.pop()
        self.on_leave(module)
        if not thread.stack:
            thread.joined_late = False
            self.on_end()
            if not self.by_interface and output is not None:  # a whole pass, without an error
                self._use_interface()
            self.follow_functions()

    # -- which functions are called ---------------------------------------------------------------

    @property
    def seen_by_interface(self) -> bool:
        """Whether all modules that may compute attention ran, and only transformers' interface."""
        return bool(self.interface_modules) and not (self._not_yet_run or self._calls_functions)

    def _use_interface(self) -> None:
        """After a pass, follow no functions from now on if they are not needed.

        Of the modules only those are followed that began a pass, and for :attr:`outside` those that
        use the interface or say which tokens are padding.
        """
        elsewhere = self.outside and threading.get_ident() != self._home
        if not self.seen_by_interface or elsewhere or not self._is_open:
            return
        if not is_library_code(self.model):
            self._calls_functions = True
            return
        inside: list[torch.nn.Module] = []
        if self.outside:
            for module in self.by_id.values():  # it may be listed for its name as it runs
                if tells_padding(module) or looks_like_weights(type(module).__name__):
                    inside.append(module)
        contents = Contents(self.model, self.interface_modules, self._roots, inside)
        with _lock:
            _shown[self.outside][self.model] = contents
            self._watch(contents)
            _replace_calls()

    def _watch(self, contents: Contents) -> None:
        """Follow no functions, and few modules, while the model has these contents."""
        self._contents = contents
        followed = [*self._roots]
        if self.outside:
            followed += [*contents.layers, *contents.inside]
        self.followed = dict(zip(map(id, followed), followed, strict=True))
        self.by_interface = True
        _watch_functions()

    def note_interface(self, module: torch.nn.Module) -> None:
        """Note that a module of the model uses transformers' interface.

        A pass that began at a module which is not followed is seen only here to be of a model that
        has changed.
        """
        self.interface_modules.add(module)
        contents = self._contents
        if contents is not None and not self.thread.stack and not contents.unchanged():
            self.use_functions()

    def note_function(self) -> None:
        """Note that the model calls a function that is or may be attention."""
        self._calls_functions = True

    def use_functions(self) -> None:
        """Follow functions from now on."""
        with _lock:
            _shown[self.outside].pop(self.model, None)
            self.by_interface, self._contents = False, None
            self.followed = self.by_id
            _watch_functions()
            _replace_calls()

    def on_function(self) -> None:
        """Before a function that may be attention runs, follow functions if the model calls it."""
        thread = self.thread
        if not self.by_interface or thread.depth or not self._is_open:
            return
        if self.outside and threading.get_ident() != self._home:
            return
        if thread.stack or (self.outside and self.running() is not None):
            self._calls_functions = True
            thread.joined_late = bool(thread.stack)
            self.use_functions()
            self.follow_functions(below=True)

    def follow_functions(self, *, below: bool = False) -> None:
        """Start or end this thread's function mode as it is needed now.

        Args:
            below: start it below modes that were entered since the pass began.
        """
        thread = self.thread
        wanted = self._is_open and not self.by_interface and not thread.paused
        if wanted and self.outside:
            wanted = threading.get_ident() == self._home
        elif wanted:
            wanted = bool(thread.stack)
        if wanted and thread.mode is None:
            thread.mode = self.new_mode()
            with unwatched() if below else nullcontext():
                thread.mode.__enter__()
        elif not wanted and thread.mode is not None:
            mode, thread.mode = thread.mode, None
            mode.__exit__(None, None, None)

    def pause_functions(self, change: int) -> None:
        """Follow no functions of this thread while ``change`` adds up to more than 0."""
        self.thread.paused += change
        self.follow_functions()
