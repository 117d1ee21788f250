"""Listener: captures every attention call of a model without changing the model.

One listener has the model's :class:`ModuleStack`, knows which layers are requested and which rows
are padding, and opens every way of capture: transformers' attention interface, and PyTorch's
functions (SDPA, ``nn.MultiheadAttention``, FlexAttention, softmaxes written by hand,
:func:`acutance.attention`, :func:`acutance.tap`). What it hears it hands to a :class:`Receiver`: a
probe, a calibration, a watch that trains. A compiled model runs uncompiled meanwhile, and nothing
is left on the model. Once a pass came by transformers' interface alone, later ones are watched by
:class:`~acutance.capture.entry_points.Doors`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.counted_rows import RowReader
from acutance.capture.find_layers import scripted_attention
from acutance.capture.layer_choice import Chosen, LayerChoice
from acutance.capture.module_names import class_name
from acutance.capture.module_stack import ModuleStack, Passes, rerun
from acutance.capture.padding import TokenMasks
from acutance.capture.pass_follower import PassFollower
from acutance.capture.readers import huggingface
from acutance.capture.readers.torch_functions import FunctionCapture
from acutance.capture.torch_modes import EAGER, gradient_mode, leave, unwatched

__all__ = ["Listener", "ProbeError", "Receiver"]

_LOOKED_FOR = (
    "a probe captures transformers' attention interface, F.scaled_dot_product_attention, "
    "nn.MultiheadAttention, FlexAttention, acutance.attention, and a softmax followed by a "
    "matrix product; report any other attention with acutance.tap"
)


class ProbeError(RuntimeError):
    """Nothing could be measured: the model ran no attention that can be read."""


class Receiver(Protocol):
    """What a listener hands attention to. No function mode is active while it works."""

    def on_call(
        self, call: AttentionCall, output: Callable[[], Tensor] | None, module: torch.nn.Module
    ) -> None:
        """Receive one attention call.

        Args:
            call: its arguments; ``call.module`` is its name, ``#1`` for a second one in one pass.
            output: gives what the model computed, (B, Hq, L, Ev); None where that is not known.
            module: the module that made it.
        """

    def on_scores(self, scores: Tensor, name: str, doubt: Callable[[], str | None] | None) -> None:
        """Receive the scores of a hand-written softmax that a matrix product used.

        Args:
            scores: what it was taken of, (B, H, L, S).
            name: of the call.
            doubt: says what speaks against these being the scores, None if nothing does.
        """


class ProductReceiver(Receiver, Protocol):
    """A receiver of the products in scores that a model forms itself."""

    def on_products(self, products: Tensor, query: Tensor, key: Tensor, name: str) -> None:
        """The scaled products of queries and keys, −inf where the key is hidden."""


class Provider(Receiver, Protocol):
    """A receiver that computes calls in the model's stead."""

    def compute(
        self, call: AttentionCall, own: Callable[[], Tensor], module: torch.nn.Module
    ) -> tuple[Tensor, Callable[[], None]]:
        """The output of a call, (B, Hq, L, Ev), and what records it.

        Raises:
            ValueError: if it is left to the model; the message is the reason.
        """


class Listener:
    """A context that captures the attention calls of a model.

    Args:
        model: any module.
        receiver: what is told.
        layers: which layers; None is all.
        every: the first of every so many forward passes is heard.
        attention_mask: a user's mask over tokens, (B, T).
        rows: which rows count, as for :func:`acutance.probe`.
        gradients: leave the graph on what is handed over.
        products: the receiver wants the products in scores that the model forms itself, instead of
            the scores.
        provides: the receiver computes calls in the model's stead.
        lists: errors that are listed in ``unread``; others end the forward pass.
        all_rows: note which rows are padding in layers that are not asked for too: those of
            cross-attention are the rows of the self-attention before it.
        around: another context to be in while the model is listened to.

    Attributes:
        modules: the model's modules, and which one runs.
        rows: decides which rows are padding.
        passes: counts forward passes.
        layers: the layers that are heard; None is all.
        unread: attention that could not be read, with the reason.
        not_provided: attention that was left to the model though ``provides`` is set, and why.
        heard: names of all modules whose attention ran, in order, also of layers not asked for.
        ran: names of modules that ran.
        calls: calls and softmaxes that were handed over since the context was entered.
        skipped: names of modules that are not heard: they report by themselves.

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
        lists: tuple[type[Exception], ...] = (Exception,),
        all_rows: bool = False,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.model, self.products, self.provides = model, products, provides
        self.modules = ModuleStack(model, self._enter_module, self._leave_module)
        self.passes = Passes(every)
        self.rows = RowReader(self.modules.thread, attention_mask, rows)
        self.layers = None if layers is None else LayerChoice.from_model(layers, model)
        self.unread: list[str] = []
        self.not_provided: list[str] = []
        self.heard: dict[str, None] = {}
        self.ran: dict[str, None] = {}
        self.calls = 0
        self.skipped: frozenset[str] = frozenset()
        self._receiver: Any = receiver
        self._gradients = gradients
        self._lists, self._all_rows, self._around = lists, all_rows, around
        self._started = False
        self._lock = threading.RLock()
        self._context: ExitStack | None = None
        self._mode = FunctionCapture(self)
        self._home = 0  # the thread that opened this, whose functions the mode sees
        self._follower = PassFollower(
            self.modules, begun=self._begun, ended=self._ended, passed=self._passed
        )

    # -- the context ------------------------------------------------------------------------------

    def __enter__(self) -> Listener:
        if self._context is not None:
            raise ProbeError("this probe is already open; open another one to nest them")
        self.calls, self._started = 0, False
        self.heard.clear()
        self.modules.read_names()
        self._home = threading.get_ident()
        self._mode = FunctionCapture(self)
        with ExitStack() as context:
            context.enter_context(EAGER)
            context.enter_context(self._follower.follow(False if self.products else None))
            context.enter_context(self._around())
            context.enter_context(huggingface.capture(self))
            context.enter_context(self._mode)
            self._context = context.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        context, self._context = self._context, None
        self.modules.thread.reset()
        if context is not None:
            context.close()

    def nothing(self) -> str:
        """Why nothing was handed over."""
        model = class_name(self.model)
        if self.layers is not None and self._started and not self.unread:
            return f"the probe captured no attention call in the requested layers of {model}"
        if self.unread:
            return f"the probe could not read any attention of {model}: {'; '.join(self.unread)}"
        if not self._started:
            return f"the probe captured no attention call: {model} did not run while it was open"
        return f"the probe captured no attention call in {model}: {_LOOKED_FOR}"

    def wants(self, name: str) -> bool:
        """Whether calls of a module are captured."""
        return self.layers is None or name in self.layers

    # -- what the captures ask --------------------------------------------------------------------

    def here(self) -> str | None:
        """Name for an attention call of the running module: :meth:`ModuleStack.place`."""
        return self.modules.place()

    def running(self) -> str | None:
        """Name of the module now running, None outside the model."""
        return self.modules.running()

    def module_of(self, name: str) -> torch.nn.Module | None:
        """The module that an attention call was named after."""
        return self.modules.module_of(name)

    def place_of(self, module: torch.nn.Module) -> str | None:
        """Name for an attention call of a module, numbered as by :meth:`here` where it runs."""
        name, stack = self.modules.name_of(module), self.modules.thread.stack
        if name is None or not stack or stack[-1] != name:
            if name is not None:
                self._follower.library = False
            return name
        self._follower.asked.add(module)
        return self.here()

    def muted(self) -> bool:
        """Whether this thread is inside a call that is already captured."""
        return self.modules.thread.depth > 0

    def mute(self) -> AbstractContextManager[None]:
        """Capture nothing of this thread in the context, since a call counts once."""
        return self.modules.thread.mute()

    # -- what the captures report -----------------------------------------------------------------

    def provide(
        self,
        make: Callable[[], AttentionCall],
        module: str,
        own: Callable[[], Tensor],
        refuse: str | None = None,
    ) -> Tensor | None:
        """Compute a call in the model's stead; None leaves it to the model.

        Args:
            make: reads the call.
            module: the call's name.
            own: runs the model's own function, which gives (B, Hq, L, Ev).
            refuse: why calls of this kind cannot be provided, if they cannot.
        """
        if not self.provides or not self.wants(module):
            return None
        try:
            if refuse is not None:
                raise ValueError(refuse)
            with self.mute():
                with unwatched():
                    call = make()
                output, record = self._receiver.compute(call, own, self.module_of(module))
        except Exception as problem:  # the model has its own way to go on
            self._list(self.not_provided, module, problem)
            return None
        self._hand_over(module, record)
        computed: Tensor = output
        return computed

    def observe(
        self, make: Callable[[], AttentionCall], module: str, output: Callable[[], Tensor] | None
    ) -> None:
        """Handle an attention call."""
        if self._all_rows and not self.wants(module):
            with self.mute(), torch.no_grad(), unwatched():
                self.rows.real(make())
        self._hand_over(
            module, lambda: self._receiver.on_call(make(), output, self.module_of(module))
        )

    def observe_scores(
        self, scores: Tensor, module: str, doubt: Callable[[], str | None] | None = None
    ) -> None:
        """Handle a softmax of which only the scores are known."""
        self._hand_over(module, lambda: self._receiver.on_scores(scores, module, doubt))

    def observe_products(self, products: Tensor, query: Tensor, key: Tensor, module: str) -> None:
        """Handle a softmax whose scores are computed from these products."""
        self._hand_over(module, lambda: self._receiver.on_products(products, query, key, module))

    def unreadable(self, module: str, reason: object) -> None:
        """List attention that could not be read."""
        if self.wants(module):
            self._list(self.unread, module, reason)

    def _list(self, texts: list[str], module: str, reason: object) -> None:
        words = " ".join(str(reason).split()) or type(reason).__name__
        text = f"{module}: {words}"
        with self._lock:
            if text not in texts:
                texts.append(text)

    def _hand_over(self, module: str, tell: Callable[[], object]) -> None:
        """Run the receiver, hidden from other listeners and from a default device."""
        if rerun() or not self.modules.thread.reading or module.partition("#")[0] in self.skipped:
            return
        self.heard.setdefault(module)
        if not self.wants(module):
            return
        with self.mute(), gradient_mode(self._gradients), unwatched():
            try:
                tell()
            except self._lists as problem:  # the model continues; the reason is listed
                self._list(self.unread, module, problem)
                return
        with self._lock:
            self.calls += 1

    # -- which module runs ------------------------------------------------------------------------

    def _enter_module(self, module: torch.nn.Module, name: str) -> None:
        thread = self.modules.thread
        if not thread.stack:
            thread.places.clear()
            self.passes.begin(name, thread)
            self._started = True
            self._follower.begin(module)
        thread.masks.enter(module)
        self._follower.unseen.discard(name)
        if name not in self.ran:
            self.ran[name] = None
            if why := scripted_attention(module):
                self.unreadable(name, why)

    def _leave_module(self, module: torch.nn.Module, name: str) -> None:
        self.modules.thread.masks.leave(module)
        if not self.modules.thread.stack:
            with self._follower.lock:
                if self._follower.end():
                    self._watch_doors()

    # -- passes that are watched at doors ---------------------------------------------------------

    def noticed(self) -> None:
        """Note a call of a function that is or may be attention: passes are followed."""
        if self._follower.library is not False and self.modules.running() is not None:
            self._follower.library = False

    def _watch_doors(self) -> None:
        """Switch to the cheap mode after a pass in which all attention used the interface."""
        if not self._at_home() or self._context is None:
            return
        if self._follower.watch(self._masked, modes=1):
            leave(self._mode)

    def _masked(self) -> Iterator[torch.nn.Module]:
        """Modules that take masks over tokens, by which padding is known."""
        return (one for one in self.model.modules() if TokenMasks.reads(one))

    def _follow_again(self, library: bool | None) -> None:
        """Switch back to following passes, in the thread whose functions the mode sees."""
        with self._follower.lock:
            if self._follower.follow_again():
                self._follower.library = library
                with unwatched():  # below modes that were entered since
                    self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _at_home(self) -> bool:
        return threading.get_ident() == self._home

    def _begun(self, module: torch.nn.Module, unchanged: bool) -> None:
        """Handle the start of a pass; in other threads only the interface is watched."""
        if not unchanged and self._at_home():
            self._follow_again(None)

    def _passed(self, inside: bool, flat: bool) -> None:
        """A function that may be attention is called; no softmax of two dimensions is."""
        if self.muted() or flat or not self._at_home():
            return
        if inside or self.modules.running() is not None:
            self.modules.thread.late = inside
            self._follow_again(False)

    def _ended(self, module: torch.nn.Module) -> None:
        self.modules.thread.late = False
