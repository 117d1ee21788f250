"""The mode by which torch functions of a thread are followed to find attention among them.

A torch-function mode sees the calls of its own thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from acutance.capture.handwritten.tracker import LOG_SOFTMAX, NOISY, SOFTMAX, Softmax, Tracker
from acutance.capture.intercept import ATTENTION_FUNCTIONS, EXP, Interception, leave
from acutance.capture.readers.functions import ACUTANCE, FLEX

#: What each function is that is not simply run.
_KINDS: dict[Any, str] = {
    F.scaled_dot_product_attention: "sdpa",
    F.multi_head_attention_forward: "multihead",
    FLEX: "flex",
    ACUTANCE: "acutance",
    **dict.fromkeys(SOFTMAX, "softmax"),
    **dict.fromkeys(LOG_SOFTMAX, "log softmax"),
    **dict.fromkeys((F.softmin, *NOISY), "other softmax"),
    **dict.fromkeys((torch.matmul, torch.bmm, torch.baddbmm, torch.einsum), "product"),
    **dict.fromkeys((Tensor.matmul, Tensor.bmm, Tensor.baddbmm), "product"),
    **dict.fromkeys((Tensor.__matmul__, Tensor.__rmatmul__), "product"),
    **dict.fromkeys(EXP, "exp"),
}
_KINDS |= {watched: _KINDS[function] for watched, function in ATTENTION_FUNCTIONS.items()}
_OPERATORS = {OpOverload, OpOverloadPacket}


class FunctionMode(TorchFunctionMode, ABC):
    """A torch-function mode that passes on attention functions, and follows hand-written attention.

    Args:
        owner: what is open on a model.
        scores: whether to follow what scores consist of.
        factors: whether to keep the products among them.

    Attributes:
        tracker: follows tensors from a product to a softmax, and from there to the next product.
    """

    def __init__(self, owner: Interception, *, scores: bool = False, factors: bool = False) -> None:
        super().__init__()
        self._owner = owner
        self.tracker = Tracker(
            self.on_product, self.on_unused, self.on_written_out, scores=scores, factors=factors
        )

    def __exit__(self, *error: Any) -> None:
        """Leave the mode and release what it follows."""
        leave(self)
        self.finish()
        self.tracker.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function; of those that matter few are called where nothing is followed."""
        kind = _KINDS.get(func)
        if kind is None and type(func) in _OPERATORS:
            kind = "operator"
        if kind is None and not self.tracker.known:
            return func(*args, **kwargs) if kwargs else func(*args)
        arguments = dict(kwargs or {})
        if torch.compiler.is_compiling() or self._owner.muted():
            return func(*args, **arguments)
        if kind is None or kind == "product":
            return self.tracker.call(func, args, arguments)
        return self.on_call(kind, ATTENTION_FUNCTIONS.get(func, func), args, arguments)

    @abstractmethod
    def finish(self) -> None:
        """Handle softmaxes that no product used, as the mode ends."""

    @abstractmethod
    def on_call(
        self, kind: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function that may be attention.

        Args:
            kind: ``"sdpa"``, ``"multihead"``, ``"flex"``, ``"acutance"``, ``"softmax"``,
                ``"log softmax"``, ``"other softmax"``, ``"exp"`` or ``"operator"``.
            func: the function.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """

    @abstractmethod
    def on_product(self, softmax: Softmax, doubt: Callable[[], str | None]) -> None:
        """Handle a softmax that a matrix product uses."""

    @abstractmethod
    def on_unused(self, softmax: Softmax) -> None:
        """Handle a softmax that no product used."""

    @abstractmethod
    def on_written_out(self) -> None:
        """Handle a product that takes weights which were computed without a softmax."""
