"""Shows every attention call of a model with the derivative of the loss by its output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.protocols import Changer
from acutance.capture.readers.interface_call import InterfaceCall
from acutance.capture.torch_modes import unwatched

__all__ = ["OutputGradients"]

#: Called with a call, its output, and the derivative of the loss by it, (B, Hq, L, Ev) each.
Receive = Callable[[AttentionCall, Tensor, Tensor], None]


class OutputGradients(Changer):
    """Passes on the attention calls of some layers during the backward pass.

    The output stays as it is. It needs a gradient even if no parameter of the model does. Query,
    key and value are saved by autograd, so that a checkpointed block computes them again.

    Args:
        layers: the layers, which use transformers' attention interface, by name.
        receive: called with each call, without gradients and function modes.
    """

    def __init__(self, layers: Mapping[str, torch.nn.Module], receive: Receive) -> None:
        self._names = {id(module): name for name, module in layers.items()}
        self._receive = receive
        self._leaf = torch.zeros((), requires_grad=True)

    def changed_output(self, call: InterfaceCall, output: Tensor) -> Tensor | None:
        """The same output (B, L, Hq, Ev), whose gradient is read; None for another layer."""
        name = self._names.get(id(call["module"]))
        if name is None:
            return None
        with torch.no_grad(), unwatched():
            read = call.read(name)
        none = read.query.new_empty(0)  # autograd holds the tensors
        receive = functools.partial(self._pass_on, replace(read, query=none, key=none, value=none))
        same: Tensor = _Identity.apply(  # type: ignore[no-untyped-call]
            output, self._leaf, read.query, read.key, read.value, receive
        )
        return same

    def _pass_on(
        self,
        call: AttentionCall,
        output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gradient: Tensor,
    ) -> None:
        """Pass on a call with its tensors; output and gradient are (B, L, Hq, Ev)."""
        call = replace(call, query=query, key=key, value=value)
        with torch.no_grad(), unwatched():
            self._receive(call, output.transpose(1, 2), gradient.transpose(1, 2))


class _Identity(torch.autograd.Function):
    """Returns an attention output; its backward pass shows the gradient to a function."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        leaf: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        receive: Callable[..., None],
    ) -> Tensor:
        """Return the output; ``leaf`` needs a gradient, so that the output has one."""
        ctx.save_for_backward(output, query, key, value)
        ctx.receive = receive
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the gradient on unchanged."""
        ctx.receive(*ctx.saved_tensors, gradients[0])
        return gradients[0], None, None, None, None, None
