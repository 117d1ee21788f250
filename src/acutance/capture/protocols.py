"""What the parts of a capture ask of each other: observers and receivers of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.kernel_functions.calls import FunctionCall

__all__ = [
    "FunctionObserver",
    "Observer",
    "ProductReceiver",
    "Provider",
    "Receiver",
]


class Observer(Protocol):
    """Receives the calls that a capture sees.

    Attributes:
        provides: whether it may compute calls in place of the model.
    """

    provides: bool

    def provide(
        self,
        read_call: Callable[[], AttentionCall],
        module: str,
        model_output: Callable[[], Tensor],
        refusal: str | None = None,
    ) -> Tensor | None:
        """Compute and record a call in place of the model, (B, Hq, L, Ev); None declines."""

    def call_name_of(self, module: torch.nn.Module) -> str | None:
        """Name for an attention call of a module of the model; None for any other module."""

    def observe(
        self,
        read_call: Callable[[], AttentionCall],
        module: str,
        output: Callable[[], Tensor] | None,
    ) -> None:
        """Handle one attention call; ``output`` returns the model's (B, Hq, L, Ev)."""

    def unreadable(self, module: str, reason: str) -> None:
        """List attention that could not be read."""

    def muted(self) -> bool:
        """Whether this thread is inside a call that is already captured."""

    def mute(self) -> Any:
        """Context in which nested captures are ignored."""


class FunctionObserver(Observer, Protocol):
    """The observer of a :class:`FunctionCapture`; it also tracks the running module.

    Attributes:
        products: whether it receives the products in hand-written scores instead of the scores.
    """

    products: bool

    def note_function(self) -> None:
        """Note that the model calls a function that is or may be attention."""

    def on_kernel_call(self, call: FunctionCall, run: Callable[[], Any]) -> Any:
        """Handle a call of an operator that is a kernel."""

    def call_name(self) -> str | None:
        """Name for an attention call of the running module; None outside the model."""

    def running(self) -> str | None:
        """Name of the running module; None outside the model."""

    def module_of(self, name: str) -> torch.nn.Module | None:
        """The module of a call with this name."""

    def observe_scores(
        self, scores: Tensor, module: str, doubt: Callable[[], str | None] | None = None
    ) -> None:
        """Record rows from their scores (B, H, L, S); ``doubt`` returns why they may be wrong."""

    def observe_products(self, products: Tensor, query: Tensor, key: Tensor, module: str) -> None:
        """Record the scaled products of queries and keys, −inf where the key is hidden."""


class Receiver(Protocol):
    """Receives the attention calls that a listener captures.

    No function mode is active meanwhile.
    """

    def on_call(
        self, call: AttentionCall, output: Callable[[], Tensor] | None, module: torch.nn.Module
    ) -> None:
        """Receive one attention call.

        Args:
            call: its arguments. ``call.module`` is the module's name; for its second, third, ...
                call in a forward pass the name with ``#1``, ``#2``, ...
            output: returns the output of the attention (B, Hq, L, Ev), as the model computed it;
                None if it is unknown.
            module: the module that made the call.
        """

    def on_scores(self, scores: Tensor, name: str, doubt: Callable[[], str | None] | None) -> None:
        """Receive the scores of a hand-written softmax that a matrix product used.

        Args:
            scores: input of the softmax, (B, H, L, S).
            name: name of the call.
            doubt: returns why these may not be the scores, or None.
        """


class ProductReceiver(Receiver, Protocol):
    """A receiver of the products of queries and keys in hand-written scores."""

    def on_products(self, products: Tensor, query: Tensor, key: Tensor, name: str) -> None:
        """Receive the scaled products (B, H, L, S) of queries and keys, −inf on hidden keys."""


class Provider(Receiver, Protocol):
    """A receiver that computes calls in place of the model."""

    def compute(
        self, call: AttentionCall, model_output: Callable[[], Tensor], module: torch.nn.Module
    ) -> tuple[Tensor, Callable[[], None]]:
        """Compute a call in place of the model.

        Args:
            call: the captured call.
            model_output: runs the model's function and returns its output (B, Hq, L, Ev).
            module: the module that made the call.

        Returns:
            The output (B, Hq, L, Ev), and a function that records the call.

        Raises:
            ValueError: if the model must compute it; the message is the reason.
        """
