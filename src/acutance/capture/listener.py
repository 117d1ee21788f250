"""Listener: captures every attention call of a model without changing the model.

It covers transformers' attention interface, PyTorch's functions (SDPA,
``nn.MultiheadAttention``, FlexAttention, hand-written softmaxes), :func:`acutance.attention`,
:func:`acutance.tap` and kernels that are called as functions, and passes each call to a
:class:`Receiver`: a probe, a calibration or a training monitor. Meanwhile compiled models run
uncompiled.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.counted_rows import RowReader
from acutance.capture.find_layers import scripted_attention
from acutance.capture.intercept import Interception, Passes, is_rerun, open_interceptions
from acutance.capture.kernel_functions import calls
from acutance.capture.layer_choice import Chosen, LayerChoice
from acutance.capture.module_names import class_name
from acutance.capture.protocols import Receiver
from acutance.capture.readers import huggingface
from acutance.capture.readers.interface_call import InterfaceCall
from acutance.capture.readers.torch_functions import FunctionCapture
from acutance.capture.torch_modes import eager, gradient_mode, unwatched

__all__ = ["Listener", "ProbeError", "Receiver"]

_LOOKED_FOR = (
    "a probe captures transformers' attention interface, F.scaled_dot_product_attention, "
    "nn.MultiheadAttention, FlexAttention, acutance.attention, kernels such as flash_attn_func, "
    "and a softmax followed by a matrix product; report any other attention with acutance.tap"
)


class ProbeError(RuntimeError):
    """Raised if nothing could be measured: the model ran no attention that can be read."""


class Listener(Interception):
    """A context that captures the attention calls of a model.

    Args:
        model: any module.
        receiver: receives the captured calls.
        layers: which layers to capture; None for all.
        every: capture the first of every ``every`` forward passes.
        attention_mask: a user's mask over tokens, (B, T).
        rows: which rows count, as for :func:`acutance.probe`.
        gradients: keep the autograd graph of the captured tensors.
        products: pass on the products in hand-written scores instead of the scores.
        provides: the receiver computes calls in place of the model.
        listed_errors: errors that are listed in ``unread``; others end the forward pass.
        all_rows: record padding in layers that are not chosen too; cross-attention needs it from
            the self-attention before it.
        context: another context that is open while the listener is.

    Attributes:
        modules: the model's modules, and which of them is running.
        rows: decides which rows are padding.
        passes: counts forward passes.
        layers: the captured layers; None for all.
        unread: attention that could not be read, with the reason.
        not_provided: attention that the model computed although ``provides`` is set, with the
            reason.
        attention_modules: names of all modules whose attention ran, chosen or not.
        modules_ran: names of all modules that ran.
        calls: number of calls and softmaxes passed on since the context was entered.
        skipped: names of modules that report their attention themselves.

    Raises:
        TypeError: if ``model`` is not a module or ``layers`` holds anything but numbers and text.
        ValueError: if a part of ``layers`` is not a layer of the model.

    Example:
        >>> class Print:
        ...     def on_call(self, call, output, module):
        ...         print(call.module, tuple(call.query.shape))
        >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.zeros(1, 5, 8)
        >>> with Listener(model, Print()):
        ...     _ = model(x, x, x)
        MultiheadAttention (1, 2, 5, 4)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        receiver: Receiver,
        *,
        layers: Chosen | None = None,
        every: int = 1,
        attention_mask: Tensor | None = None,
        rows: Tensor | str = "real",
        gradients: bool = False,
        products: bool = False,
        provides: bool = False,
        listed_errors: tuple[type[Exception], ...] = (Exception,),
        all_rows: bool = False,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        super().__init__(model)
        self.products, self.provides = products, provides
        self.passes = Passes(every)
        self.rows = RowReader(self.modules.thread, attention_mask, rows)
        self.layers = None if layers is None else LayerChoice.from_model(layers, model)
        self.unread: list[str] = []
        self.not_provided: list[str] = []
        self.attention_modules: dict[str, None] = {}
        self.modules_ran: dict[str, None] = {}
        self.calls = 0
        self.skipped: frozenset[str] = frozenset()
        self._receiver: Any = receiver
        self._gradients = gradients
        self._listed_errors, self._all_rows, self._around = listed_errors, all_rows, context
        self._started = False
        self._lock = threading.RLock()
        self._context: ExitStack | None = None

    outside = True

    # -- the context ------------------------------------------------------------------------------

    def __enter__(self) -> Listener:
        if self._context is not None:
            raise ProbeError("this probe is already open; open another one to nest them")
        self.calls, self._started = 0, False
        self.attention_modules.clear()
        try:
            self._context = context = ExitStack()
            context.enter_context(eager())
            context.enter_context(self.opened(self.products))
            context.enter_context(self._around())
            context.enter_context(huggingface.intercept(self._on_interface_call, looks=True))
            context.enter_context(calls.intercept(self.on_kernel_call, looks=True))
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._close()
        finally:  # again where an interrupt cut it short
            self._close()

    def _close(self) -> None:
        """Undo what opening did; what an interrupt left undone is undone when called again."""
        self.modules.thread.reset()
        if self._context is not None:
            self._context.close()
        self._context = None

    def nothing_captured(self) -> str:
        """A sentence that says why no attention call was captured."""
        model = class_name(self.model)
        if self.layers is not None and self._started and not self.unread:
            return f"the probe captured no attention call in the requested layers of {model}"
        if self.unread:
            return f"the probe could not read any attention of {model}: {'; '.join(self.unread)}"
        if not self._started:
            return f"the probe captured no attention call: {model} did not run while it was open"
        if self.passes.left_out and self.passes.gradients:
            return f"the probe captured no attention call: {model} ran only without gradients"
        return f"the probe captured no attention call in {model}: {_LOOKED_FOR}"

    def captures_module(self, name: str) -> bool:
        """Whether the attention of the named module is to be captured."""
        return self.layers is None or name in self.layers

    # -- what the captures ask --------------------------------------------------------------------

    def call_name(self) -> str | None:
        """Name for an attention call of the running module; None outside the model.

        The second call of a module in one forward pass is named ``name#1``, the third ``name#2``.
        """
        return self.modules.call_name()

    def running(self) -> str | None:
        """Name of the running module; None outside the model."""
        return self.modules.running()

    def module_of(self, name: str) -> torch.nn.Module | None:
        """The module of a call with this name."""
        return self.modules.module_of(name)

    def call_name_of(self, module: torch.nn.Module) -> str | None:
        """Name for an attention call of a module, as :meth:`call_name`."""
        name, stack = self.modules.name_of(module), self.modules.thread.stack
        if name is None or not stack or stack[-1] != name:
            return name
        self.interface_modules.add(module)
        return self.call_name()

    def muted(self) -> bool:
        """Whether this thread is inside a call that is already captured."""
        return self.modules.thread.depth > 0

    def mute(self) -> AbstractContextManager[None]:
        """Context in which this thread captures nothing, so that nested calls count once."""
        return self.modules.thread.mute()

    def _on_interface_call(self, call: InterfaceCall, run: Callable[[], Any]) -> Any:
        """Compute, or read, a call of transformers' attention interface."""
        module = call["module"]
        if self.modules.thread.depth or not isinstance(module, torch.nn.Module):
            return run()
        name = self.call_name_of(module)
        if name is None:
            return run()
        read_call, provided = functools.partial(call.read, name), None
        with self.modules.thread.mute():
            if self.provides and call.instead is None and call.provided is None:

                def model_output() -> Tensor:
                    with ExitStack() as quiet:
                        for listener in open_interceptions(Listener):
                            quiet.enter_context(listener.mute())
                        return call.output(call.compute())

                provided = call.provided = self.provide(
                    read_call, name, model_output, call.result_needed_because()
                )
            result = run()
        if provided is None:
            self.observe(read_call, name, lambda: call.output(result))
        return result

    def on_kernel_call(self, call: calls.FunctionCall, run: Callable[[], Any]) -> Any:
        """Read a call of a kernel function or operator."""
        self.on_function()
        name = None if self.muted() else self.call_name()
        if name is None:
            return run()
        self.note_function()
        read_call = functools.partial(call.read, name)
        self.provide(read_call, name, run, f"{call.name} is called as a function")
        with self.mute():
            result = run()
        self.observe(read_call, name, lambda: call.output(result))
        return result

    # -- what the captures report -----------------------------------------------------------------

    def provide(
        self,
        read_call: Callable[[], AttentionCall],
        module: str,
        model_output: Callable[[], Tensor],
        refusal: str | None = None,
    ) -> Tensor | None:
        """Compute an attention call's output in place of the model, and record the call.

        Args:
            read_call: reads the call's arguments.
            module: name of the call.
            model_output: runs the model's function, to compare its output (B, Hq, L, Ev).
            refusal: why calls of this kind cannot be computed here; None if they can.

        Returns:
            The output. None if the model must compute it: with a reason in ``not_provided`` if
            this was refused or failed, without one if the listener does not provide this call.
        """
        if not self.provides or not self.captures_module(module):
            return None
        if not is_rerun() and not self.passes.wants(self.modules.thread):
            return None
        try:
            if refusal is not None:
                raise ValueError(refusal)
            with self.mute():
                with unwatched():
                    call = read_call()
                output, record = self._receiver.compute(call, model_output, self.module_of(module))
        except Exception as problem:  # the model has its own way to go on
            self._add_to_list(self.not_provided, module, problem)
            return None
        self._deliver(module, record)
        computed: Tensor = output
        return computed

    def observe(
        self,
        read_call: Callable[[], AttentionCall],
        module: str,
        output: Callable[[], Tensor] | None,
    ) -> None:
        """Pass an attention call to the receiver.

        Args:
            read_call: reads the call's arguments.
            module: name of the call.
            output: returns the model's output (B, Hq, L, Ev); None if it is unknown.
        """
        if self._all_rows and not self.captures_module(module):
            with self.mute(), torch.no_grad(), unwatched():
                self.rows.real(read_call())
        self._deliver(
            module, lambda: self._receiver.on_call(read_call(), output, self.module_of(module))
        )

    def observe_scores(
        self, scores: Tensor, module: str, doubt: Callable[[], str | None] | None = None
    ) -> None:
        """Pass the scores (B, H, L, S) of a hand-written softmax to the receiver."""
        self._deliver(module, lambda: self._receiver.on_scores(scores, module, doubt))

    def observe_products(self, products: Tensor, query: Tensor, key: Tensor, module: str) -> None:
        """Pass the products in the scores of a hand-written softmax to the receiver."""
        self._deliver(module, lambda: self._receiver.on_products(products, query, key, module))

    def unreadable(self, module: str, reason: object) -> None:
        """List attention that could not be read, with the reason."""
        if self.captures_module(module):
            self._add_to_list(self.unread, module, reason)

    def _add_to_list(self, texts: list[str], module: str, reason: object) -> None:
        """Add a sentence about a module to a list, once."""
        reason_text = " ".join(str(reason).split()) or type(reason).__name__
        text = f"{module}: {reason_text}"
        with self._lock:
            if text not in texts:
                texts.append(text)

    def _deliver(self, module: str, receive: Callable[[], object]) -> None:
        """Call the receiver, hidden from other listeners, function modes and a default device."""
        if (
            is_rerun()
            or not self.modules.thread.is_read
            or not self.passes.wants(self.modules.thread)
            or module.partition("#")[0] in self.skipped
        ):
            return
        self.attention_modules.setdefault(module)
        if not self.captures_module(module):
            return
        with self.mute(), gradient_mode(self._gradients), unwatched():
            try:
                receive()
            except self._listed_errors as problem:  # the model continues; the reason is listed
                self._add_to_list(self.unread, module, problem)
                return
        with self._lock:
            self.calls += 1

    # -- which module runs ------------------------------------------------------------------------

    def new_mode(self) -> FunctionCapture:
        """The mode that reads this thread's functions."""
        return FunctionCapture(self)

    def on_begin(self, module: torch.nn.Module, name: str) -> None:
        """Begin a pass."""
        thread = self.modules.thread
        thread.call_counts.clear()
        self.passes.begin(name, thread)
        self._started = True

    def on_enter(
        self, module: torch.nn.Module, name: str, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Read a module's masks over tokens as it starts, and remember that it ran."""
        self.modules.thread.masks.enter(module, args, kwargs)
        if name not in self.modules_ran:
            self.modules_ran[name] = None
            if reason := scripted_attention(module):
                self.unreadable(name, reason)

    def on_leave(self, module: torch.nn.Module) -> None:
        """Forget the masks of a module that ended."""
        self.modules.thread.masks.leave(module)
