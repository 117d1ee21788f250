r"""What the loss would do if heads computed something else, from one backward pass a window.

With a gate :math:`g` between a head's output :math:`o` and another one :math:`\tilde o`, the
model computes :math:`(1 - g)\, o + g\, \tilde o`. At g = 0 the derivative of the loss by the gate
is :math:`\langle \partial L / \partial o,\ \tilde o - o \rangle`, so a backward pass of the
unchanged model gives it for every head and any number of alternatives. Only the alternatives'
outputs have to be computed, without a gradient, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from acutance.calibration.apply_law import apply
from acutance.calibration.by_loss.gradients import PreparedModel, Reading
from acutance.calibration.by_loss.output_gradients import OutputGradients
from acutance.calibration.fit.windows import Turn, evaluating, first_tokens
from acutance.calibration.losses import Loss
from acutance.calibration.read_window import read_through
from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import attention_layers, uses_interface
from acutance.capture.listener import Listener, ProbeError
from acutance.capture.module_names import class_name
from acutance.capture.readers import huggingface
from acutance.capture.rotary import Rotary, find_rotary
from acutance.scaling import Window

__all__ = ["Alternative", "GateGradients", "GatedLayer", "gated_layers"]

_FEW = 32  # tokens of the run that finds the layers


@runtime_checkable
class Alternative(Protocol):
    """Another way to compute the output of every head of a call, such as rounded keys.

    Attributes:
        words: what it is, with every setting that changes its numbers.
    """

    @property
    def words(self) -> str:
        """What it is, with every setting that changes its numbers."""

    def output(self, call: AttentionCall) -> Tensor:
        """The output of the call, (B, Hq, L, Ev); no gradient is needed."""


@dataclass(frozen=True)
class GatedLayer:
    """An attention layer whose heads can have gates.

    Attributes:
        name: module name.
        heads: number of query heads.
        key_heads: number of key heads.
    """

    name: str
    heads: int
    key_heads: int


class _Sizes:
    """Receives the calls of a short run and records the number of heads of each layer."""

    def __init__(self, interface: set[str]) -> None:
        self.layers: dict[str, GatedLayer] = {}
        self.skipped: dict[str, str] = {}
        self._interface = interface

    def on_call(self, call: AttentionCall, output: Any, module: torch.nn.Module) -> None:
        """Record a layer, or why it can have no gates."""
        if call.cross:
            self.skipped[call.module] = "it is cross-attention"
        elif call.window is not None or getattr(module, "sliding_window", None) is not None:
            self.skipped[call.module] = "it has a sliding window"
        elif call.module not in self._interface:
            self.skipped[call.module] = "it does not use transformers' attention interface"
        else:
            heads = call.query.shape[1], call.key.shape[1]
            self.layers[call.module] = GatedLayer(call.module, *heads)

    def on_scores(self, scores: Tensor, name: str, doubt: Any) -> None:
        """Record that a hand-written softmax can have no gates."""
        self.skipped[name] = "it does not use transformers' attention interface"


def gated_layers(
    model: torch.nn.Module, turn: Turn, device: torch.device | None
) -> tuple[dict[str, GatedLayer], dict[str, str]]:
    """Find the layers whose heads can have gates by running the model on a few tokens.

    Returns:
        The layers by module name, in the order in which they ran, and why others are left out.

    Raises:
        ProbeError: if the model ran no attention that can be read.
        ValueError: if no layer can have gates.
    """
    known = attention_layers(model)
    sizes = _Sizes({name for name, module in known.items() if uses_interface(module)})
    length = min(_FEW, turn.length)
    few = Turn(length, first_tokens(turn.batch, length), torch.zeros(1, dtype=torch.int64))
    with evaluating(model), torch.no_grad(), Listener(model, sizes) as listener:
        few.run(model, device)
    if not sizes.layers:
        why = "; ".join(f"{name}: {reason}" for name, reason in sizes.skipped.items())
        if not why:
            raise ProbeError(listener.nothing_captured())
        raise ValueError(f"no layer of {class_name(model)} can have gates: {why}")
    return sizes.layers, sizes.skipped


class GateGradients(PreparedModel):
    r"""Context that computes a model's loss and its derivative by a gate of every head.

    For each gate and alternative there are two numbers: the derivative, and the second-order cost
    :math:`\tfrac12 \sum_i \langle \partial L / \partial o_i, \tilde o_i - o_i \rangle^2`, a sum
    over rows i in which the outer product of gradients stands for the curvature (the empirical
    Fisher information).

    Args:
        model: a model with a loss, whose attention uses transformers' interface.
        loss: the loss.
        layers: layers with gates, by module name.
        alternatives: what the gates open to: for each head the same windows or other ways to
            compute its output.
        key_heads: whether the query heads of one key head share a gate.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        layers: Mapping[str, GatedLayer],
        alternatives: Sequence[Window | Alternative],
        *,
        key_heads: bool = False,
    ) -> None:
        super().__init__(model)
        self._loss = loss
        self._alternatives = tuple(alternatives)
        known = attention_layers(model)
        self._modules = {name: known[name] for name in layers}
        self._outputs = OutputGradients(self._modules, self._receive)
        self.gates = {
            name: layer.key_heads if key_heads else layer.heads for name, layer in layers.items()
        }
        self._found: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = {}
        self._rotary: dict[str, Rotary] = {}

    @property
    def alternatives(self) -> int:
        """Number of alternatives of each gate."""
        return len(self._alternatives)

    @property
    def size(self) -> int:
        """Number of derivatives: gates times alternatives."""
        return sum(self.gates.values()) * self.alternatives

    def read(self, batch: Mapping[str, Any], values: Tensor) -> Reading:
        """Loss, derivatives by the gates, and second-order costs of a batch.

        Args:
            batch: keyword arguments of the model.
            values: (gates,), what each head computes: 0 for its own output, k for alternative
                k, counted from 1, which must be a window. In the result that alternative of the
                head is its own output.

        Returns:
            The reading; its gradient has the derivatives of all gates and alternatives, then the
            second-order costs in the same order.
        """
        with (
            self._running(values),
            huggingface.change(self._outputs),
            set_checkpoint_early_stop(False),
        ):
            scored = self._loss.backward(self._model, batch)
        none = torch.zeros(2, 0, self.alternatives, dtype=torch.float64)
        parts = [
            self._found.pop(name, none.new_zeros(2, gates, none.shape[2]))
            for name, gates in self.gates.items()
        ]
        return Reading.of(scored, torch.cat([part.flatten(1) for part in parts], 1).flatten())

    def score(self, batch: Mapping[str, Any], values: Tensor) -> Reading:
        """As :meth:`read` without a backward pass: the derivatives are 0."""
        with self._running(values), torch.no_grad():
            scored = self._loss.score(self._model, batch)
        return Reading.of(scored, torch.zeros(2 * self.size, dtype=torch.float64))

    def law(self, values: Tensor) -> dict[Any, Any]:
        """The windows of these values as a law for :func:`acutance.apply`; empty if all are 0."""
        law: dict[Any, Any] = {}
        for name, part in self._split(values).items():
            chosen = [int(value) for value in part.tolist()]
            if len(set(chosen)) == 1 and chosen[0]:
                law[name] = self._alternatives[chosen[0] - 1]
                continue
            for head, value in enumerate(chosen):
                if value:
                    law[name, head] = self._alternatives[value - 1]
        return law

    # -- while the model runs ---------------------------------------------------------------------

    @contextmanager
    def _running(self, values: Tensor) -> Iterator[None]:
        """Context in which heads compute what these values say."""
        self.prepare()
        self._values = self._split(values)
        law = self.law(values)
        with apply(self._model, law) if law else nullcontext():
            yield

    def _prepare(self, context: ExitStack) -> None:
        """Find the rotary embeddings if a window moves keys."""
        if any(isinstance(one, Window) and one.moves for one in self._alternatives):
            rotary = find_rotary(self._model, self._modules.values())
            self._rotary = dict(zip(self._modules, rotary, strict=True))

    def _split(self, values: Tensor) -> dict[str, Tensor]:
        """Values of all gates as one tensor for each layer, by module name."""
        return dict(zip(self.gates, values.split(list(self.gates.values())), strict=True))

    def _receive(self, call: AttentionCall, output: Tensor, gradient: Tensor) -> None:
        """Add what the gates of one call change, to first and second order.

        Args:
            call: the call.
            output: its output, (B, Hq, L, Ev).
            gradient: derivative of the loss by it.
        """
        values, gates = self._values[call.module], self.gates[call.module]
        heads, rotary = call.query.shape[1], self._rotary.get(call.module)
        of_heads = values.repeat_interleave(heads // gates).to(output.device)
        whole = _whole(call) if bool(values.any()) else output
        found = torch.zeros(2, gates, self.alternatives, dtype=torch.float64)
        for index, one in enumerate(self._alternatives):
            current = of_heads == index + 1
            if bool(current.all()):
                other = whole
            elif isinstance(one, Window):
                other = read_through(call, [one] * heads, rotary, lambda: whole)
            else:
                other = one.output(call)
            if bool(current.any()):
                other = torch.where(current[:, None, None], whole, other)
            rows = ((other - output) * gradient).sum(-1).double()  # (B, Hq, L)
            rows = rows.unflatten(1, (gates, -1)).sum(2)
            found[0, :, index] = rows.sum((0, 2)).cpu()
            found[1, :, index] = 0.5 * rows.square().sum((0, 2)).cpu()
        self._found[call.module] = self._found.get(call.module, 0.0) + found


def _whole(call: AttentionCall) -> Tensor:
    """The output of a call without windows, (B, Hq, L, Ev)."""
    return call.rebuild(False)[0]
