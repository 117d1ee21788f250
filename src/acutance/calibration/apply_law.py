"""acutance.apply: a law of scalings and windows on a model that runs as it always does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from acutance.calibration.factors import (
    KnownFactors,
    Plan,
    Plans,
    as_query,
    count,
    entropy_of,
    factor_of_call,
    query_factor,
    scaled_scores,
    situation_of,
    warn_of_shallow_mask,
)
from acutance.calibration.in_force import ApplyError, CountedChange
from acutance.calibration.law import AnyLaw, Change, Law
from acutance.calibration.windowed_calls import (
    WindowedCall,
    masked_arguments,
    masked_scores,
    rotary_of_layers,
)
from acutance.capture.change_functions import FunctionChange
from acutance.capture.find_layers import attention_layers, uses_interface
from acutance.capture.head_axis import could_be_over_keys, heads_of
from acutance.capture.intercept import Interception, classes_are_library
from acutance.capture.kernel_functions import calls
from acutance.capture.module_names import class_name
from acutance.capture.readers import huggingface
from acutance.capture.readers.interface_call import InterfaceCall, is_cross
from acutance.capture.readers.torch_sdpa import sdpa_call
from acutance.capture.torch_modes import eager, forget_compiled

__all__ = ["Applied", "ApplyError", "apply"]

T = TypeVar("T")

_WINDOWED = "its rows see only a window (windowed=True scales it)"
_CROSS = "its rows have no distance from their keys: it is cross-attention"


@overload
def apply(model: torch.nn.Module, law: AnyLaw, *, windowed: bool = False) -> Applied: ...
@overload
def apply(model: torch.nn.Module, law: Change[T], *, windowed: bool = False) -> T: ...
def apply(model: torch.nn.Module, law: Any, *, windowed: bool = False) -> Any:
    """Apply a law to a model: :func:`acutance.apply` for everything but files and names of windows.

    Args:
        model: any module whose attention a law reaches.
        law: a scaling or its name, a window, a pair of both, a mapping from layer or (layer, head)
            to these, a :class:`Law`, or a change with a method ``applied``.
        windowed: also scale layers with a sliding window of the model's.

    Returns:
        What is in force at once and until ``restore()``, or as a context manager until it ends.

    Raises:
        TypeError: if ``model`` is not a module or ``law`` no law.
        ValueError: if a scaling, layer or head does not exist, the law is another model's, or its
            windows move keys and the model's positions are not rotary.

    Example:
        >>> from acutance import scaling
        >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> x = torch.randn(1, 64, 8)
        >>> with apply(model, scaling.LogN(train_length=16)) as applied:
        ...     _ = model(x, x, x)
        >>> applied.calls
        {'MultiheadAttention': 1}
    """
    if isinstance(law, Change):
        return law.applied(model)
    return Applied(model, law, windowed=windowed)


class _Thread(threading.local):
    """State of one thread that runs the model: factors to reuse."""

    def __init__(self) -> None:
        self.factors = KnownFactors()


class Applied(Interception, CountedChange):
    """A law applied to a model: what :func:`apply` returns.

    Attributes:
        calls: number of scaled calls by module name; a compiled module counts once.
        skipped: why calls were not scaled, by module name.
    """

    def __init__(self, model: torch.nn.Module, law: AnyLaw, *, windowed: bool = False) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        super().__init__(model)
        self.calls: dict[str, int] = {}
        self.skipped: dict[str, str] = {}
        self._windowed = windowed
        self._thread = _Thread()
        self.modules.read_names()
        self._law = law
        self._plans = plans = Plans(self.modules, law)
        known = attention_layers(model)
        self._asking = {name for name, module in known.items() if uses_interface(module)}
        # made before a compiler traces what asks for them
        asking = {known[name]: plans.of(name) for name in self._asking}
        self._has_windows = bool(plans.windows())
        if self._has_windows:
            self._rotary = rotary_of_layers(model, asking)
        # whether compiled modules run compiled, with the law in their graphs: all attention asks
        # the interface, by the code of libraries or as a pass of all modules showed
        self._traces = bool(known) and set(known) == self._asking and classes_are_library(model)
        self._traces &= not self._has_windows
        self._compiled = any(type(one).__name__ == "OptimizedModule" for one in model.modules())
        self._compiled &= not self._has_windows  # which choose their calls by what a mask holds
        self._uncompiled = ExitStack()
        self._context: ExitStack | None = None
        self._install()

    # -- in force or not --------------------------------------------------------------------------

    def _install(self) -> None:
        """Install the hooks that scale attention calls."""
        with ExitStack() as context:
            context.callback(forget_compiled)
            context.enter_context(self._uncompiled)
            if not self._traces:
                self._run_uncompiled()
            context.enter_context(self.opened())
            context.enter_context(huggingface.intercept(self._on_interface_call))
            forget_compiled()
            self._context = context.pop_all()

    def _run_uncompiled(self) -> None:
        """Run compiled modules uncompiled, and change kernels that are called as functions.

        These are not replaced while a compiler traces: it remembers a function's parameters.
        """
        self._uncompiled.enter_context(eager())
        self._uncompiled.enter_context(calls.intercept(self.on_kernel_call))

    def _remove(self) -> bool:
        """Remove all hooks; returns whether they were still installed."""
        was_installed = super()._remove()
        self._leave_model()
        return was_installed

    def _did_nothing(self) -> str:
        """The sentence for a law under which no call was scaled, with the first reason."""
        model = class_name(self.model)
        if self.skipped:
            name, why = next(iter(self.skipped.items()))
            return f"the law scaled no call of {model}: {len(self.skipped)} layers, {name}: {why}"
        return (
            f"the law scaled no call of {model}: it did not run, or has no attention with "
            "visible queries and keys"
        )

    @property
    def law(self) -> Law:
        """The law as a record that can be saved."""
        return Law.of(self.model, self._law)

    # -- what transformers' interface asks --------------------------------------------------------

    def _windowed_call(self, call: InterfaceCall) -> WindowedCall | None:
        """A call of transformers' interface as its layer's windows change it; None without windows.

        None also for a call that is skipped: in a sliding-window layer without ``windowed``, or of
        cross-attention.

        Raises:
            ApplyError: if the layer has windows both in the law and of its own.
        """
        name, sliding = self.modules.name_of(call["module"]), call["sliding_window"] is not None
        plan = None if name is None else self._plans.of(name)
        if plan is None or plan.laws is None or not plan.laws.all_windows():
            return None
        if (plan.windowed or sliding) and not self._windowed:
            return None  # its query is not scaled either, and it is noted
        if is_cross(plan.name, call["module"]):
            self.skip(plan.name, _CROSS)
            return None
        if plan.windowed or sliding:
            raise self.unreachable(plan.name, "it has a sliding window of its own")
        situation = None if call["position_bias"] is not None else situation_of(plan.laws, call)
        place = None if situation is None else ("keys", *situation[1:])
        known = None if place is None else self._thread.factors.get(place)
        rotary = self._rotary.get(call["module"])
        windowed = WindowedCall(call, plan.name, plan.laws, rotary, self.unreachable, known)
        if place is not None and known is None:
            self._thread.factors.put(place, call["attention_mask"], windowed.keys)
        return windowed

    def _on_interface_call(self, call: InterfaceCall, run: Callable[[], Any]) -> Any:
        """Run a call of transformers' interface with its query scaled, or through windows."""
        query = self._changed_query(call)
        if query is not None:
            call.set_query(query)
        if self._has_windows and (windowed := self._windowed_call(call)) is not None:
            call.replace(windowed)
        if torch.compiler.is_compiling():
            return run()
        with self.modules.thread.mute():
            return run()

    def _changed_query(self, call: InterfaceCall) -> Tensor | None:
        """The scaled query of a call of transformers' interface; None if the call is not scaled.

        Raises:
            ApplyError: if the law does not fit the call.
        """
        module, query, key, _, mask = call.positional()
        name = self.modules.name_of(module)
        if name is None:
            return None
        if not (compiling := torch.compiler.is_compiling()):
            self.interface_modules.add(module)
        plan = self._plans.of(name)
        if plan.laws is None:
            return None
        if not self._windowed and (plan.windowed or call.kwargs.get("sliding_window") is not None):
            self.skip(plan.name)
            return None
        if not plan.scales:
            self._count(plan.name)
            return None
        situation = None if compiling or not plan.by_count else situation_of(plan.laws, call)
        factor = None if situation is None else self._thread.factors.get(situation)
        if factor is None:
            try:
                n = count(query, key, call.masks())
                entropy = entropy_of(call.read(plan.name)) if plan.laws.needs_entropy else None
                factor = query_factor(plan.laws, n, query.shape[1], query.dtype, entropy)
            except ValueError as error:
                raise self.unreachable(plan.name, str(error)) from error
            factor = factor.unsqueeze(-1)
            if situation is not None:
                self._thread.factors.put(situation, mask, factor)
        self._count(plan.name)
        scaled: Tensor = query * factor
        return scaled

    def mute(self) -> AbstractContextManager[None]:
        """Context in which this thread's calls are not scaled: they are part of a scaled call."""
        return self.modules.thread.mute()

    def muted(self) -> bool:
        """Whether calls are left unscaled: inside a scaled call, or after the law was removed."""
        return self.modules.thread.depth > 0 or self._context is None

    def note_function(self, *, attention: bool = True) -> None:
        """Note that the model calls a function that is or may be attention, or ``exp``.

        ``attention`` is False for ``exp``.
        """
        super().note_function()
        if attention and self._traces:
            self._traces = False
            self._run_uncompiled()

    def unreachable(self, name: str, reason: str) -> ApplyError:
        """The error to raise when the law cannot change the attention of the module ``name``."""
        return ApplyError(f"the law cannot be applied to {name}: {reason}")

    # -- what attention by plain PyTorch functions asks: SDPA, nn.MultiheadAttention, softmaxes ----

    def _running_name(self) -> str | None:
        """Name of the innermost module that this thread runs; None outside the model."""
        return self.modules.running() if self.modules.thread.stack else None

    def _running(self) -> Plan | None:
        """The plan of the innermost module that this thread runs; None outside the model."""
        name = self._running_name()
        return None if name is None else self._plans.of(name)

    def module_to_change(self) -> str | None:
        """Name of the running module if the law changes its attention; None if not."""
        plan = self._running()
        if plan is None or plan.laws is None or self._holds(plan.name):
            return None
        if plan.windowed and not self._windowed:
            self.skip(plan.name)
            return None
        return plan.name

    def _holds(self, name: str) -> bool:
        """Whether a submodule uses transformers' interface and the module itself does not.

        A compiled module reports no running submodules, so functions that seem to be called by the
        module itself are then the submodule's, which the interface scales already.
        """
        if not self._traces:
            return False
        start = "" if name == class_name(self.model) else f"{name}."
        return any(one.startswith(start) and one != name for one in self._asking)

    def changed_arguments(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of SDPA with the query scaled and the keys outside the windows hidden.

        Args:
            name: name of the running module.
            given: SDPA's arguments by name.

        Raises:
            ApplyError: if the law does not fit the call.
        """
        changed = {**given, "query": given["query"] * self.factor_of_arguments(name, given)}
        return self.masked_arguments(name, changed)

    def masked_arguments(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of SDPA with the keys outside the layer's windows hidden.

        Returns:
            The arguments; ``given`` itself if the layer has no windows.

        Raises:
            ApplyError: if the windows cannot be applied to the call.
        """
        plan = self._running()
        if plan is None or plan.laws is None or not plan.laws.all_windows():
            return given
        with self.mute(), torch._C.DisableTorchFunction():
            try:
                return masked_arguments(plan.laws, sdpa_call(given, name), given)
            except ValueError as error:
                raise self.unreachable(name, str(error)) from error

    def factor_of_arguments(self, name: str, given: dict[str, Any]) -> Tensor:
        """Factor to multiply the query with, in a call of SDPA with these arguments.

        Returns:
            The factor, in a shape that broadcasts with the query.

        Raises:
            ApplyError: if the law does not fit the call.
        """
        plan = self._running()
        assert plan is not None
        assert plan.laws is not None
        with self.mute():
            try:
                call = sdpa_call(given, name)
                factor = factor_of_call(plan.laws, call)
            except ValueError as error:
                raise self.unreachable(name, str(error)) from error
            self._count(name)
            return as_query(factor, given["query"], call.query)

    def on_kernel_call(self, call: calls.FunctionCall, run: Callable[[], Any]) -> Any:
        """Run a call of a kernel function or operator with its queries scaled.

        Raises:
            ApplyError: if the law has windows, the call is not understood or does not fit the law.
        """
        self.on_function()
        name = None if self.muted() else self.module_to_change()
        if name is not None:
            self.note_function()
            laws = self._plans.of(name).laws
            assert laws is not None
            try:
                if laws.all_windows():
                    raise ValueError("a law's windows cannot be passed to it")
                with self.mute(), torch.no_grad(), torch._C.DisableTorchFunction():
                    factor = factor_of_call(laws, call.read(name))
                call.scale_queries(factor.unsqueeze(-1))
            except ValueError as error:
                raise self.unreachable(name, call.refusal(str(error))) from error
            self._count(name)
        with self.mute():
            return run()

    def could_be_over_keys(self, scores: Tensor, dim: int) -> bool:
        """Whether a softmax over ``dim`` in the running module could be attention over keys."""
        name = self._running_name()
        return name is not None and could_be_over_keys(scores, dim, self._heads(name))

    def _heads(self, name: str) -> int | None:
        """Number of heads of a module, or of the module around it; None if neither states it."""
        above = self.modules.module_of(name.rpartition(".")[0])
        return heads_of(self.modules.module_of(name)) or heads_of(above)

    def changed_scores(self, name: str, scores: Tensor, narrow: torch.dtype) -> Tensor:
        """The scores of a hand-written softmax over the last dimension as the law changes them.

        Args:
            name: name of the attention module.
            scores: input of the softmax, products of queries and keys with nothing but masks added.
            narrow: dtype whose most negative numbers count as hiding a key.

        Raises:
            ApplyError: if the law cannot be applied to them.
        """
        running, plan = self._running_name(), self._running()
        assert running is not None
        assert plan is not None
        assert plan.laws is not None
        laws, heads, changed = plan.laws, self._heads(running), scores
        try:
            if laws.scalings():
                changed = scaled_scores(scores, laws, heads, narrow)
            if laws.all_windows():
                changed = masked_scores(laws, changed, heads, narrow)
        except ValueError as error:
            raise self.unreachable(name, str(error)) from error
        if name not in self.calls:
            warn_of_shallow_mask(name, scores, narrow)
        self._count(name)
        return changed

    # -- bookkeeping ------------------------------------------------------------------------------

    def _count(self, name: str) -> None:
        """Count a scaled call of module ``name``; one being traced, only if it has no count yet."""
        if name not in self.calls or not torch.compiler.is_compiling():
            self.calls[name] = self.calls.get(name, 0) + 1

    def skip(self, name: str, why: str = _WINDOWED) -> None:
        """Note why the calls of a module are not scaled; the first reason counts."""
        self.skipped.setdefault(name, why)

    def new_mode(self) -> FunctionChange:
        """The mode that changes what this thread's functions compute."""
        return FunctionChange(self)

    def on_enter(
        self, module: torch.nn.Module, name: str, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Follow no functions in a compiled module: the compiler would trace that too."""
        if self._is_traced(module):
            self.pause_functions(1)

    def on_leave(self, module: torch.nn.Module) -> None:
        """Follow functions again after a compiled module."""
        if type(module).__name__ == "OptimizedModule" and self._functions.paused:
            self.pause_functions(-1)

    def on_end(self) -> None:
        """Trace compiled modules from now on, if the pass showed that all attention allows it."""
        self._thread.factors.forget_masks()
        if self._compiled and not self._traces and self.seen_by_interface:
            self._traces = True
            self._uncompiled.close()

    def _leave_model(self) -> None:
        """Reset what this thread holds about a pass; an interrupt may have left modules running."""
        self.modules.thread.stack.clear()
        self._thread.factors.forget_masks()

    def _is_traced(self, module: torch.nn.Module) -> bool:
        """Whether a module is compiled and all attention uses transformers' interface."""
        return self._traces and type(module).__name__ == "OptimizedModule"
