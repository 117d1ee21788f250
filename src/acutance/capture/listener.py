"""Listener: captures every attention call of a model without changing the model.

It covers transformers' attention interface, PyTorch's functions (SDPA,
``nn.MultiheadAttention``, FlexAttention, hand-written softmaxes), :func:`acutance.attention`,
:func:`acutance.tap` and kernels that are called as functions, and passes each call to a
receiver: a probe, a calibration or a training monitor. Meanwhile compiled models run
uncompiled.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall, Carrier
from acutance.capture.find_layers import (
    SCRIPTED,
    Chosen,
    LayerChoice,
    class_name,
    computes_attention,
    heads_of,
)
from acutance.capture.function_mode import FunctionMode
from acutance.capture.handwritten.tracker import NOISY, Softmax, Tracker, products_of
from acutance.capture.head_axis import HeadAxes, could_be_over_keys, fold, heads_at_once
from acutance.capture.intercept import (
    OPEN,
    Interception,
    eager,
    gradient_mode,
    is_rerun,
    notify_all,
    unwatched,
)
from acutance.capture.kernel_functions import calls
from acutance.capture.padding import RowReader
from acutance.capture.readers import huggingface
from acutance.capture.readers.functions import QueryChunks, SdpaCall, call_from_arguments
from acutance.capture.readers.huggingface import InterfaceCall

#: Begins the reason of a softmax that is listed as not read.
NO_PRODUCT = "no matrix product uses a softmax over the last dimension of"
#: What is wrong with the rows of a softmax that has a sink among its scores.
NO_VALUE = (
    "its softmax has one score more than its product has values, as a sink: it counts as a key"
)
#: The reason of sparsemax, entmax, or exponentials and their sum.
WRITTEN_OUT = (
    "a matrix product uses weights that were computed without a softmax: report what it computes "
    "with acutance.tap"
)

_LOOKED_FOR = (
    "a probe captures transformers' attention interface, F.scaled_dot_product_attention, "
    "nn.MultiheadAttention, FlexAttention, acutance.attention, kernels such as flash_attn_func, "
    "and a softmax followed by a matrix product; report any other attention with acutance.tap"
)


class ProbeError(RuntimeError):
    """Raised if nothing could be measured: the model ran no attention that can be read."""


class Listener(Interception):
    """A context that captures the attention calls of a model.

    It calls methods of its receiver, while no function mode is active:

    - ``on_call(call, output, module)`` for an :class:`AttentionCall` of a module. Its
      ``call.module`` is the module's name; for its second, third, ... call in a forward pass the
      name with ``#1``, ``#2``, ... ``output()`` is the output of the attention (B, Hq, L, Ev), as
      the model computed it; ``output`` is None if it is unknown.
    - ``on_scores(scores, name, doubt)`` for the scores (B, H, L, S) of a hand-written softmax that
      a matrix product used. ``doubt()`` says why these may not be the scores, or is None.
    - for ``products``, ``on_products(products, query, key, name)`` in place of that, with the
      scaled products (B, H, L, S) of queries and keys, −inf on hidden keys.
    - for ``provides``, ``compute(call, model_output, module)``, which returns the output
      (B, Hq, L, Ev) of a call that it computes in place of the model and a function that records
      the call, or raises ValueError with the reason why the model must compute it.

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
        receiver: as given.
        rows: decides which rows are padding.
        pass_number: number of the next forward pass; None to count passes.
        with_gradients: True to read only passes that record gradients, False to read only the
            others (generated text, frozen models), None to read all.
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
        receiver: Any,
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
        self.pass_number: int | None = None
        self.with_gradients: bool | None = None
        self._every = every
        self._passes: Counter[str] = Counter()  # by the module at which they begin
        self._left_out = False  # whether a pass was because of its gradients
        self.rows = RowReader(attention_mask, rows)
        self.layers = None if layers is None else LayerChoice.from_model(layers, model)
        self.unread: list[str] = []
        self.not_provided: list[str] = []
        self.attention_modules: dict[str, None] = {}
        self.modules_ran: dict[str, None] = {}
        self.calls = 0
        self.skipped: frozenset[str] = frozenset()
        self.receiver = receiver
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
            context.enter_context(calls.intercept(self.on_function_call, looks=True))
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        closed = False
        try:
            self._close()
            closed = True
        finally:
            if not closed:  # again where an interrupt cut it short
                self._close()

    def _close(self) -> None:
        """Undo what opening did; what an interrupt left undone is undone when called again."""
        self.thread.reset()
        self.rows.forget()
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
        if self._left_out and self.with_gradients:
            return f"the probe captured no attention call: {model} ran only without gradients"
        return f"the probe captured no attention call in {model}: {_LOOKED_FOR}"

    def captures_module(self, name: str) -> bool:
        """Whether the attention of the named module is to be captured."""
        return self.layers is None or name in self.layers

    # -- what the captures ask --------------------------------------------------------------------

    def call_name_of(self, module: torch.nn.Module) -> str | None:
        """Name for an attention call of a module; None if it is not the model's."""
        name, stack = self.name_of(module), self.thread.stack
        if name is None or not stack or stack[-1] != name:
            return name
        self.interface_modules.add(module)
        return self.call_name()

    def _on_interface_call(self, call: InterfaceCall, run: Callable[[], Any]) -> Any:
        """Compute, or read, a call of transformers' attention interface."""
        if self.thread.depth or not isinstance(call.module, torch.nn.Module):
            return run()
        name = self.call_name_of(call.module)
        return run() if name is None else self.handle(call, name, run)

    def on_function_call(self, call: Carrier, run: Callable[[], Any]) -> Any:
        """Compute, or read, a call of a function that computes attention."""
        self.on_function()
        name = None if self.muted() else self.call_name()
        if name is None:
            return run()
        self.note_function()
        if not isinstance(call, SdpaCall) or call.multihead is not None:
            return self.handle(call, name, run)
        call.heads, known = heads_of(self.module_of(name)), call.provided
        result = self.handle(call, self._chunks.name(name, call), run)
        if call.provided is not known:  # enclosing modes see no call of the function
            for mode in reversed(_open_modes()):
                mode.owner.on_function_call(call, call.compute)
        return result

    def handle(self, call: Carrier, name: str, run: Callable[[], Any]) -> Any:
        """Compute an attention call in place of the model, or read it as the model computes it."""
        provided = None
        with self.thread:  # nested calls count once
            if self.provides and call.can_be_provided:
                provided = call.provided = self._provide(call, name)
            result = run()
        if provided is None:
            output = functools.partial(call.output, result) if call.compared else None
            self.observe(functools.partial(call.read, name), name, output)
        return result

    # -- what the captures report -----------------------------------------------------------------

    def _provide(self, call: Carrier, name: str) -> Tensor | None:
        """Compute an attention call's output in place of the model, and record the call.

        Returns:
            The output. None if the model must compute it: with a reason in ``not_provided`` if
            this was refused or failed, without one if the listener does not provide this call.
        """
        if not self.captures_module(name) or not (is_rerun() or self._wants_pass()):
            return None

        def model_output() -> Tensor:  # to compare: it concerns no listener
            with ExitStack() as quiet:
                for interception in tuple(OPEN):
                    if isinstance(interception, Listener):
                        quiet.enter_context(interception.mute())
                return call.output(call.compute())

        try:
            if (refusal := call.result_needed_because()) is not None:
                raise ValueError(refusal)
            with self.mute():
                with unwatched():
                    read = call.read(name)
                module, computed = self.module_of(name), self.receiver.compute
                output, record = computed(read, model_output, module)
        except Exception as problem:  # the model has its own way to go on
            self._add_to_list(self.not_provided, name, problem)
            return None
        self.deliver(name, record)
        provided: Tensor = output
        return provided

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
        self.deliver(
            module,
            lambda: self.receiver.on_call(read_call(), output, self.module_of(module)),
        )

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

    def deliver(self, module: str, receive: Callable[[], object]) -> None:
        """Call the receiver, hidden from other listeners, function modes and a default device."""
        if (
            is_rerun()
            or not self.thread.is_read
            or not self._wants_pass()
            or module.partition("#")[0] in self.skipped
        ):
            return
        self.attention_modules.setdefault(module)
        if not self.captures_module(module):
            return
        with self.thread, gradient_mode(self._gradients), unwatched():
            try:
                receive()
            except self._listed_errors as problem:  # the model continues; the reason is listed
                self._add_to_list(self.unread, module, problem)
                return
        with self._lock:
            self.calls += 1

    # -- which module runs ------------------------------------------------------------------------

    def new_mode(self) -> FunctionMode:
        """The mode that reads this thread's functions."""
        self._head_axes, self._chunks = HeadAxes(), QueryChunks()
        mode = FunctionMode(self, looks=True, scores=self.products, factors=self.products)
        self._tracker = mode.tracker
        return mode

    def on_begin(self, module: torch.nn.Module, name: str) -> None:
        """Begin a pass, and decide whether it is read.

        Passes that begin at different modules are counted separately, such as those of an encoder
        and of its decoder during generation.
        """
        thread = self.thread
        thread.call_counts.clear()
        self._started = True
        if is_rerun():
            return
        thread.has_gradients = torch.is_grad_enabled()
        with self._lock:
            count = self._passes[name]
            self._passes[name] += 1
        thread.is_read = count % self._every == 0
        pass_number = count if self.pass_number is None else self.pass_number
        if self.pass_number is None or pass_number != thread.pass_number:
            thread.calls_in_pass.clear()
        thread.pass_number = pass_number

    def _wants_pass(self) -> bool:
        """Whether this pass, or method outside any, is of those that are selected by gradients.

        What counts is the beginning of a pass: reentrant checkpoints run layers without gradients.
        """
        thread = self.thread
        if not thread.stack:
            thread.has_gradients = torch.is_grad_enabled()
        wanted = self.with_gradients is None or thread.has_gradients is self.with_gradients
        self._left_out = self._left_out or not wanted
        return wanted

    def on_enter(
        self, module: torch.nn.Module, name: str, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Read a module's masks over tokens as it starts, and remember that it ran."""
        self.rows.enter(module, args, kwargs)
        if name not in self.modules_ran:
            self.modules_ran[name] = None
            if isinstance(module, torch.jit.ScriptModule) and computes_attention(module):
                self.unreadable(name, SCRIPTED)

    def on_leave(self, module: torch.nn.Module) -> None:
        """Forget the masks of a module that ended."""
        masks = self.rows.thread.masks
        if masks and masks[-1][0] == id(module):
            masks.pop()

    # -- softmaxes in the model's own code --------------------------------------------------------

    def on_softmax(self, softmax: Softmax, tracker: Tracker) -> Tensor:
        """Run a softmax and remember it until a matrix product uses its result."""
        module, scores, dim = self.running(), softmax.base, softmax.dim
        if module is not None:
            self.note_function()
        with self.mute():
            result = softmax.compute()
        if scores is None or dim is None or module is None or scores.dim() == 0:
            return result
        if scores.is_nested:
            self.unreadable(module, "its softmax is of a nested tensor")
        elif scores.layout is torch.strided and result.layout is torch.strided:
            over_keys = could_be_over_keys(scores, dim, self.heads_running())
            if softmax.function in NOISY:
                softmax.unreadable_reason = f"{softmax.function.__name__} adds noise to its scores"
            elif not over_keys:
                softmax.unreadable_reason = (
                    f"a matrix product uses its softmax over dimension {dim % scores.dim()} of "
                    f"{tuple(scores.shape)}, and only softmaxes over the last are read: report "
                    "what it computes with acutance.tap"
                )
            softmax.module, softmax.over_keys = module, over_keys
            if over_keys or scores.shape[-1] > 1:  # or one weight each: taps of a kernel, a pooling
                tracker.add(softmax, result)
            if over_keys and self.products:
                tracker.mark_weights(result)
        return result

    def on_product(self, softmax: Softmax, doubt: Callable[[], str | None]) -> None:
        """Record the scores of a softmax that a matrix product uses."""
        name = self.call_name() if softmax.over_keys else self.running()
        if name is None:
            return
        try:
            if softmax.unreadable_reason:
                raise ValueError(softmax.unreadable_reason)
            if softmax.overwritten():
                raise ValueError("its scores were overwritten after the softmax")
            module = self.module_of(name)
            heads, head_axis = heads_at_once(module), None
            if softmax.last and softmax.base.dim() == 4:
                base = name.partition("#")[0]
                head_axis = self._head_axes.place(
                    base, module, softmax.base.shape, heads, softmax.product_axes
                )
            scores = fold(softmax.base, heads, head_axis, softmax.dim)
            if self.products:
                with self.mute(), torch.no_grad(), torch._C.DisableTorchFunction():
                    products = products_of(self._tracker.of(softmax.base), scores)
                self.deliver(name, lambda: self.receiver.on_products(*products, name))
                return
        except ValueError as error:
            self.unreadable(name, str(error))
            return
        if softmax.left_out == 1:
            self.unreadable(name, NO_VALUE)
        self.deliver(name, lambda: self.receiver.on_scores(scores, name, doubt))

    def on_written_out(self) -> None:
        """List a product that takes weights which were computed without a softmax."""
        if (module := self.running()) is not None:
            self.unreadable(module, WRITTEN_OUT)

    def on_unused(self, softmax: Softmax) -> None:
        """List a softmax that no product used: it may still be attention."""
        self.unreadable(softmax.module, f"{NO_PRODUCT} {tuple(softmax.scores.shape)}")

    def on_functions_end(self, _: Tracker) -> None:
        """List modules whose head dimension is uncertain."""
        for module, reason in self._head_axes.undecided():
            self.unreadable(module, reason)


def _open_modes() -> list[FunctionMode]:
    """The modes of this thread's open listeners, outermost first."""
    stack = torch.overrides._get_current_function_mode_stack()
    return [mode for mode in stack if isinstance(mode, FunctionMode) and mode.looks]


# -- attention that cannot be captured -------------------------------------------------------------


def tap(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    query_offset: int = 0,
    window: int | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tap:
    """Report the attention computed inside this context to every open probe.

    Use it for attention that a probe cannot see, such as a kernel called directly, or of which it
    sees only the softmax. Probes read nothing else inside the context. It costs almost nothing if
    no probe is open.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev); ``verify`` and ``noise`` need it.
        attn_mask: this and the options below are those of :func:`acutance.attention`.
        is_causal: row i sees keys j ≤ i + query_offset.
        scale: factor of the scores; None for 1/√E.
        dropout_p: if above 0, the output is not compared.
        query_offset: position of query 0 among the keys.
        window: sliding window, in keys.
        key_mask: boolean (B, S).
        cu_seqlens: cumulative document lengths.
        bias: added to the scores.
        softcap: bound of the scaled scores.
        sinks: (Hq,).

    Returns:
        A context manager. Set its ``output``, (B, Hq, L, Ev), so that ``verify`` can compare.
        Inputs that do not fit together are listed in :attr:`acutance.HeadSummary.unread`; the model
        runs on.

    Example:
        >>> import torch, acutance
        >>> class Mine(torch.nn.Module):
        ...     def forward(self, x):
        ...         with acutance.tap(x, x, x, scale=0.5) as told:
        ...             weights = torch.exp(0.5 * x @ x.mT)  # no softmax to be seen
        ...             told.output = (weights / weights.sum(-1, keepdim=True)) @ x
        ...         return told.output
        >>> with acutance.probe(model := Mine(), verify=True) as probe:
        ...     _ = model(torch.randn(1, 2, 5, 4))
        >>> probe.summary().layers[0].status
        'verified'
    """
    arguments = dict(locals())
    if torch.compiler.is_compiling():
        return Tap([], arguments)
    notify_all()
    return Tap([mode.owner for mode in _open_modes()], arguments)


class Tap:
    """The context that :func:`tap` returns.

    Attributes:
        output: what the code inside computes, (B, Hq, L, Ev); None if not set.
    """

    def __init__(self, observers: Sequence[Listener], arguments: dict[str, Any]) -> None:
        self.output: Tensor | None = None
        self._observers, self._arguments = observers, arguments
        self._names: dict[Listener, str] = {}
        self._quiet = ExitStack()

    def only(self, observer: Listener) -> Tap:
        """Report to ``observer`` only, or to none if it is not among the open ones; return self."""
        self._observers = [candidate for candidate in self._observers if candidate is observer]
        return self

    def __enter__(self) -> Tap:
        for observer in self._observers:
            name = None if observer.muted() else observer.call_name()
            if name is not None:
                self._names[observer] = name
                self._quiet.enter_context(observer.mute())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._quiet.close()
        if kind is not None:
            return
        output: Any = self.output
        compared = isinstance(output, Tensor) and isinstance(self._arguments.get("value"), Tensor)
        for observer, name in self._names.items():
            read_call = functools.partial(call_from_arguments, self._arguments, name, "tap")
            observer.observe(read_call, name, (lambda: output) if compared else None)
