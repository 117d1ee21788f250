"""The mode by which torch functions of a thread are followed to find attention among them.

A torch-function mode sees the calls of its own thread only. Each call of attention becomes a
carrier, which what is open on the model handles: a probe reads it, a law changes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from acutance.capture.handwritten.tracker import (
    LOG_OPERATORS,
    LOG_SOFTMAX,
    NOISY,
    OPERATORS,
    SOFTMAX,
    Softmax,
    Tracker,
)
from acutance.capture.intercept import ATTENTION_FUNCTIONS, EXP, leave
from acutance.capture.kernel_functions.calls import operator_call
from acutance.capture.readers.functions import (
    ACUTANCE,
    FLEX,
    FlexCall,
    MultiHeadCall,
    OurCall,
    SdpaCall,
    changed_softmax,
    handling,
)

#: What each function is that is not simply run: its carrier, or what happens to it.
_KINDS: dict[Any, Any] = {
    F.scaled_dot_product_attention: SdpaCall,
    F.multi_head_attention_forward: MultiHeadCall,
    FLEX: FlexCall,
    **dict.fromkeys((*SOFTMAX, *LOG_SOFTMAX), "softmax"),
    **dict.fromkeys((torch.matmul, torch.bmm, torch.baddbmm, torch.einsum), "follow"),
    **dict.fromkeys((Tensor.matmul, Tensor.bmm, Tensor.baddbmm), "follow"),
    **dict.fromkeys((Tensor.__matmul__, Tensor.__rmatmul__), "follow"),
    **dict.fromkeys(EXP, "exp"),
}
#: The functions whose names others have taken, by these: a mode may get either.
_ORIGINALS = {**ATTENTION_FUNCTIONS, changed_softmax: F.softmax}
_KINDS |= {taker: _KINDS[function] for taker, function in _ORIGINALS.items()}
#: The same for what only looks at them.
_LOOKS = {**_KINDS, ACUTANCE: OurCall, **dict.fromkeys((F.softmin, *NOISY), "softmax")}
_OPERATORS = {OpOverload, OpOverloadPacket}


class FunctionMode(TorchFunctionMode):
    """A torch-function mode that passes on attention functions, and follows hand-written attention.

    Args:
        owner: the :class:`~acutance.capture.intercept.Interception`. It has methods
            ``on_function_call(call, run)`` for carriers and ``on_softmax(softmax, tracker)``,
            which return the results; ``on_product(softmax, doubt)`` for a softmax that a matrix
            product uses, ``on_unused(softmax)`` for one that is freed unused,
            ``on_written_out()`` for a product of weights that were computed without a softmax,
            and ``on_functions_end(tracker)``. One that looks also has
            ``unreadable(module, reason)``.
        looks: whether the owner only looks at calls, rather than changes them.
        scores: whether to follow what scores consist of.
        factors: whether to keep the products among them.

    Attributes:
        owner, looks: as given.
        tracker: follows tensors from a product to a softmax, and from there to the next product.
    """

    def __init__(
        self, owner: Any, *, looks: bool, scores: bool = False, factors: bool = False
    ) -> None:
        super().__init__()
        self.owner, self.looks = owner, looks
        self.tracker = Tracker(owner, scores=scores, factors=factors)

    def __exit__(self, *error: Any) -> None:
        """Leave the mode and release what it follows."""
        leave(self)
        self.owner.on_functions_end(self.tracker)
        self.tracker.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function; of those that matter few are called where nothing is followed."""
        # nothing of this mode that a compiler cannot guard: it traces this up to ``is_compiling``
        kind = (_LOOKS if self.looks else _KINDS).get(func)
        if kind is None and type(func) in _OPERATORS:
            kind = "operator"
        if kind is None and not self.tracker.known:
            return func(*args, **kwargs) if kwargs else func(*args)
        arguments = dict(kwargs or {})
        if torch.compiler.is_compiling() or self.owner.muted():
            return func(*args, **arguments)
        if kind == "exp" and not self.looks:  # of a softmax that is written out
            self.owner.note_function()
        func = _ORIGINALS.get(func, func)
        if kind == "operator":
            return self._operator(func, args, arguments)
        if kind == "softmax":
            return self.owner.on_softmax(Softmax(func, args, arguments), self.tracker)
        if kind in (None, "follow", "exp"):
            return self.tracker.call(func, args, arguments)
        call = kind(func, args, arguments)
        if kind is MultiHeadCall and not call.arguments["need_weights"]:
            group = "looking" if self.looks else "changing"
            with handling(group, functools.partial(self._on_sdpa, call)):
                return call.compute()
        return self.owner.on_function_call(call, call.compute)

    def _on_sdpa(self, multihead: MultiHeadCall, call: SdpaCall, run: Callable[[], Any]) -> Any:
        """Handle the call of SDPA in multi-head attention, inside which no mode is active."""
        call.multihead = multihead.arguments if self.looks else None
        return self.owner.on_function_call(call, run)

    def _operator(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Handle an operator called directly: of SDPA, a softmax, a kernel, or any other."""
        if (kernel := operator_call(func, args, kwargs)) is not None:
            return self.owner.on_function_call(kernel, kernel.compute)
        if not self.looks:
            return self.tracker.call(func, args, kwargs)
        namespace, _, name = str(func).partition(".")
        aten_name = name.partition(".")[0] if namespace == "aten" else ""
        if aten_name == "scaled_dot_product_attention":
            call = SdpaCall(func, args, kwargs)
            return self.owner.on_function_call(call, call.compute)
        if aten_name in OPERATORS or aten_name in LOG_OPERATORS:
            softmax = Softmax(func, args, kwargs, log=aten_name in LOG_OPERATORS)
            return self.owner.on_softmax(softmax, self.tracker)
        attends = ("attention" in name or "attn" in name) and "backward" not in name
        if (module := self.owner.running()) is not None:
            self.owner.note_function()
            if attends and namespace != "acutance":
                reason = f"{func} is called directly: report what it computes with acutance.tap"
                self.owner.unreadable(module, reason)
        if self.tracker.known:
            return self.tracker.call(func, args, kwargs)
        return func(*args, **kwargs)
