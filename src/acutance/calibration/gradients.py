"""The loss of a window with derivatives of it, in one backward pass, and laws that lower it."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from acutance.calibration.apply_law import apply
from acutance.calibration.loss_table import (
    Advance,
    LossTable,
    Reading,
    Saving,
    Unit,
    Windows,
    difference,
    margin,
    mean_gradient,
    mean_loss,
    read_units,
    read_windows,
)
from acutance.calibration.losses import AnyLoss, with_forward
from acutance.calibration.measured import knots_of, no_layer, read_layers
from acutance.calibration.read_window import WindowedCall
from acutance.calibration.result import GateSlope, beyond_noise, head_records
from acutance.calibration.windows import AnyBatches, Turn, evaluating, first_tokens
from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import attention_layers, class_name, uses_interface
from acutance.capture.intercept import unwatched
from acutance.capture.listener import Listener, ProbeError
from acutance.capture.readers import huggingface
from acutance.capture.readers.huggingface import InterfaceCall
from acutance.capture.rotary import Rotary, find_rotary
from acutance.scaling import HeadTable, Window
from acutance.scaling.fitted import LearnedScaling, interpolate
from acutance.scaling.laws import Rows

if TYPE_CHECKING:
    from typing_extensions import Self


from collections.abc import Iterable

from acutance.calibration.law import Identity, Law
from acutance.calibration.loss_table import (
    split_units,
)
from acutance.calibration.result import (
    HeadSlope,
    LossCalibration,
)
from acutance.shapes import check_flag

_FEW = 32  # tokens of the run that finds the layers


class FactorTable(LearnedScaling):
    """Factors of each head at some lengths, linear in log n between them and constant beyond.

    Args:
        num_heads: Hq.
        lengths: P lengths, rising.

    Example:
        >>> table = FactorTable(1, (64, 256))
        >>> _ = table.log_factor.data.copy_(torch.tensor([[0.0, 1.0]]))
        >>> table(torch.tensor([8, 128, 256, 1024])).detach()
        tensor([[1.0000, 1.8591, 2.7183, 2.7183]])
        >>> table.record().factor(1024)
        tensor([[2.7183]])
    """

    def __init__(self, num_heads: int, lengths: Sequence[int]) -> None:
        super().__init__(num_heads)
        self.lengths = tuple(lengths)
        self.log_factor = torch.nn.Parameter(torch.zeros(num_heads, len(self.lengths)))

    def law(self, rows: Rows) -> Tensor:
        """The factor of each head and row, (..., Hq, L)."""
        factors, lengths = self._extended()
        factors = factors.to(device=rows.n.device, dtype=rows.n.dtype)
        if lengths is None:
            return factors.unsqueeze(-1) * torch.ones_like(rows.n)
        return interpolate(rows.log_n, lengths, factors)

    def record(self) -> HeadTable:
        """The current factors as a constant table."""
        factors, lengths = self._extended()
        return HeadTable(factors.detach(), lengths)

    def _extended(self) -> tuple[Tensor, tuple[int, ...] | None]:
        """The factors of each head and their lengths, None for a single one.

        A last length with the factor of the one before keeps it constant for longer rows.
        """
        factors = self.log_factor.exp()
        if len(self.lengths) == 1:
            return factors[:, 0], None
        return torch.cat([factors, factors[:, -1:]], 1), (*self.lengths, 2 * self.lengths[-1])


def first_turn(turn: Turn, tokens: int = _FEW) -> Turn:
    """The first tokens of the first window of a batch, as a batch of their own."""
    few = min(tokens, turn.length)
    return Turn(few, first_tokens(turn.batch, few), torch.zeros(1, dtype=torch.int64))


class Gradients(ABC):
    """Context that reads a model's loss, and its derivatives by some parameters, window by window.

    The model is changed at the first run, since a resumed fit may need none.

    Args:
        windows: the model, its loss and its windows.
        settings: what decides the numbers beside them, which a resumed run must share.
        saving: where readings are kept.
        advance: progress callback, or None.
        passes: largest number of passes, for the callback.
    """

    def __init__(
        self,
        windows: Windows,
        settings: Mapping[str, Any],
        saving: Saving,
        advance: Advance | None,
        passes: int,
    ) -> None:
        self._windows, self._model, self._loss = windows, windows.model, windows.loss
        self._advance, self._passes = advance, passes
        self._table = LossTable({**windows.settings, **settings}, saving)
        self._context: ExitStack | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        context, self._context = self._context, None
        try:
            if context is not None:
                context.__exit__(kind, *rest)
        finally:
            self._table.__exit__(kind, *rest)

    def readings(
        self, units: Sequence[Unit], values: Tensor, number: int = 1, *, backward: bool = True
    ) -> list[Reading]:
        """Loss and derivatives of windows, from the table or computed.

        Args:
            units: the windows.
            values: of the parameters, (parameters,) float64.
            number: number of this pass, for the progress callback.
            backward: False reads the loss alone, without derivatives.
        """
        digest = hashlib.sha256(values.float().numpy().tobytes()).hexdigest()[:16]
        return read_units(
            self._windows,
            units,
            self._table,
            f"{'derivatives' if backward else 'loss'} at {digest}",
            lambda batch: self._run(batch, values, backward),
            lambda tokens: self._advance and self._advance(tokens, number, self._passes),
        )

    def _prepare(self) -> None:
        """Prepare the model for backward passes, unless that is done."""
        if self._context is not None:
            return
        with ExitStack() as context:
            context.enter_context(prepared(self._model))
            self._change(context)
            self._context = context.pop_all()

    @abstractmethod
    def _change(self, context: ExitStack) -> None:
        """Change the model while the context lasts."""

    @abstractmethod
    def _run(self, batch: Mapping[str, Any], values: Tensor, backward: bool) -> Reading:
        """The reading of one batch; without derivatives unless ``backward``."""


class LossGradients(Gradients):
    """The loss of a model and its derivative by the factor of every head.

    The parameters are one vector of log-factors: layer by layer, head by head, at the knots.

    Args:
        windows: as in :class:`Gradients`.
        saving: likewise.
        advance: likewise.
        passes: likewise.
        law: ``"table"`` for factors at every length, or ``"constant"``.
        windowed: also scale layers with a sliding window.
        fixed: windows of layers, by module name, and of heads, by (module name, head), which
            stay as they are.
        settings: further settings that a resumed run must share.

    Attributes:
        tables: the factors of each layer, by module name.
        skipped: why other layers cannot be scaled, by module name.

    Raises:
        ProbeError: if the model ran no attention that can be read.
        ValueError: if no layer can be scaled.
    """

    def __init__(
        self,
        windows: Windows,
        saving: Saving,
        advance: Advance | None,
        passes: int,
        *,
        law: str,
        windowed: bool,
        fixed: Mapping[Any, Window] | None = None,
        **settings: Any,
    ) -> None:
        few = first_turn(windows.units[0].turns[-1])
        model = windows.model
        read, self.skipped = read_layers(model, [few], "entropy", (few.length,), windowed=windowed)
        if not read.layers:
            raise ValueError(no_layer(self.skipped))
        super().__init__(
            windows, {"law": law, "windowed": windowed, **settings}, saving, advance, passes
        )
        self._windowed, self._fixed = windowed, fixed or {}
        knots = knots_of(windows.lengths) if law == "table" else (windows.lengths[-1],)
        self.tables = {
            name: FactorTable(values.value.shape[1], knots)
            for name, values in sorted(read.layers.items())
        }

    def _change(self, context: ExitStack) -> None:
        """Apply the law with the factors to be fitted."""
        law = joined(self.tables, self._fixed)
        context.enter_context(apply(self._model, law, windowed=self._windowed))

    @property
    def places(self) -> list[tuple[str, int]]:
        """Module name and head of each row of factors."""
        return [(name, head) for name, one in self.tables.items() for head in range(one.num_heads)]

    def zeros(self) -> Tensor:
        """Log-factors that change nothing, (parameters,)."""
        size = sum(table.log_factor.numel() for table in self.tables.values())
        return torch.zeros(size, dtype=torch.float64)

    def _run(self, batch: Mapping[str, Any], values: Tensor, backward: bool) -> Reading:
        """The reading of one batch, always with derivatives."""
        self._prepare()
        self.set(values)
        with set_checkpoint_early_stop(False):
            scored = self._loss.backward(self._model, batch)
        parts = []
        for table in self.tables.values():
            gradient = table.log_factor.grad
            parts.append(torch.zeros_like(table.log_factor) if gradient is None else gradient)
            table.log_factor.grad = None
        return Reading.of(scored, torch.cat([part.flatten().double().cpu() for part in parts]))

    def set(self, values: Tensor) -> None:
        """Apply these log-factors, (parameters,), from now on."""
        shapes = [table.log_factor.shape for table in self.tables.values()]
        parts = values.split([shape.numel() for shape in shapes])
        for table, part, shape in zip(self.tables.values(), parts, shapes, strict=True):
            with torch.no_grad():
                table.log_factor.copy_(part.view(shape))


def joined(scalings: Mapping[str, Any], windows: Mapping[Any, Window]) -> dict[Any, Any]:
    """One law of the scalings of layers and of the windows of layers or (layer, head).

    Example:
        >>> joined({"a": "ssmax"}, {"a": Window(8), ("b", 1): Window(8)})["a"][0]
        'ssmax'
    """
    law: dict[Any, Any] = {**scalings, **windows}
    return law | {
        name: (scaling, windows[name]) for name, scaling in scalings.items() if name in windows
    }


@contextmanager
def prepared(model: torch.nn.Module) -> Iterator[None]:
    """Context for backward passes that read derivatives by something else than parameters.

    The model is in eval mode and its parameters need no gradient. Activations are stored for one
    block at a time; the others run again in the backward pass.
    """
    with ExitStack() as context:
        context.enter_context(evaluating(model))
        for parameter in model.parameters():
            if parameter.requires_grad:
                context.callback(parameter.requires_grad_, True)
                parameter.requires_grad_(False)
        for block in _blocks(model):
            again = functools.partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
            context.enter_context(with_forward(block, again))
        yield


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model's blocks: members of module lists that contain attention; empty if unknown."""
    attention = {id(one): one for one in attention_layers(model).values()}
    if not all(uses_interface(one) for one in attention.values()):
        return []
    found: list[torch.nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():  # outer ones first
        if not isinstance(module, torch.nn.ModuleList) or id(module) in inside:
            continue
        for block in module:
            parts = {id(part) for part in block.modules()}
            if parts & attention.keys() and id(block) not in inside:
                found.append(block)
                inside |= parts
    return found


#: Called with a call, its output, and the derivative of the loss by it, (B, Hq, L, Ev) each.
Receive = Callable[[AttentionCall, Tensor, Tensor], None]


def output_gradients(
    layers: Mapping[str, torch.nn.Module], receive: Receive
) -> Callable[[InterfaceCall, Callable[[], Any]], Any]:
    """A handler that passes on the attention calls of some layers during the backward pass.

    The output stays as it is. It needs a gradient even if no parameter of the model does. Query,
    key and value are saved by autograd, so that a checkpointed block computes them again. Calls are
    seen as they are before laws change them.

    Args:
        layers: the layers, which use transformers' attention interface, by name.
        receive: called with each call, without gradients and function modes.
    """
    names = {id(module): name for name, module in layers.items()}
    leaf = torch.zeros((), requires_grad=True)

    def handle(call: InterfaceCall, run: Callable[[], Any]) -> Any:
        name = names.get(id(call.module))
        if name is None:
            return run()
        with torch.no_grad(), unwatched():
            read = call.read(name)
        result = run()
        none = read.query.new_empty(0)  # autograd holds the tensors
        bare = replace(read, query=none, key=none, value=none)

        def pass_on(
            output: Tensor, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor
        ) -> None:  # output and gradient are (B, L, Hq, Ev)
            whole = replace(bare, query=query, key=key, value=value)
            with torch.no_grad(), unwatched():
                receive(whole, output.transpose(1, 2), gradient.transpose(1, 2))

        output = result[0] if isinstance(result, tuple) else result
        same: Tensor = _Identity.apply(  # type: ignore[no-untyped-call]
            output, leaf, read.query, read.key, read.value, pass_on
        )
        return (same, *result[1:]) if isinstance(result, tuple) else same

    return handle


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


_BY_HAND = "it does not use transformers' attention interface"


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


class _HeadCounts:
    """Receives the calls of a short run and records the numbers of heads of each layer."""

    def __init__(self, interface: set[str]) -> None:
        self.layers: dict[str, tuple[int, int]] = {}  # query heads and key heads
        self.skipped: dict[str, str] = {}
        self._interface = interface

    def on_call(self, call: AttentionCall, output: Any, module: torch.nn.Module) -> None:
        """Record a layer, or why it can have no gates."""
        if call.cross:
            self.skipped[call.module] = "it is cross-attention"
        elif call.window is not None or getattr(module, "sliding_window", None) is not None:
            self.skipped[call.module] = "it has a sliding window"
        elif call.module not in self._interface:
            self.skipped[call.module] = _BY_HAND
        else:
            self.layers[call.module] = call.query.shape[1], call.key.shape[1]

    def on_scores(self, scores: Tensor, name: str, doubt: Any) -> None:
        """Record that a hand-written softmax can have no gates."""
        self.skipped[name] = _BY_HAND


class GateGradients(Gradients):
    r"""The loss of a model and its derivative by a gate of every head.

    For each gate and alternative there are two numbers: the derivative, and the second-order cost
    :math:`\tfrac12 \sum_i \langle \partial L / \partial o_i, \tilde o_i - o_i \rangle^2`, a sum
    over rows i in which the outer product of gradients stands for the curvature (the empirical
    Fisher information).

    The parameters are what each gate's heads compute: 0 for their own output, k for alternative k,
    counted from 1, which must be a window. In the readings that alternative is then their own
    output. The derivatives of all gates and alternatives come first, then the second-order costs.

    Args:
        windows: as in :class:`Gradients`; the model's attention uses transformers' interface.
        saving: likewise.
        advance: likewise.
        passes: likewise.
        alternatives: what the gates open to: for each head the same windows or other ways to
            compute its output.
        key_heads: whether the query heads of one key head share a gate.

    Attributes:
        gates: number of gates of each layer, by module name.
        skipped: why other layers have none, by module name.

    Raises:
        ProbeError: if the model ran no attention that can be read.
        ValueError: if no layer can have gates.
    """

    def __init__(
        self,
        windows: Windows,
        saving: Saving,
        advance: Advance | None,
        passes: int,
        *,
        alternatives: Sequence[Window | Alternative],
        key_heads: bool = False,
    ) -> None:
        model = windows.model
        known = attention_layers(model)
        found = _HeadCounts({name for name, module in known.items() if uses_interface(module)})
        with evaluating(model), torch.no_grad(), Listener(model, found) as listener:
            first_turn(windows.units[0].turns[-1]).run(model, windows.device)
        if not found.layers:
            why = "; ".join(f"{name}: {reason}" for name, reason in found.skipped.items())
            if not why:
                raise ProbeError(listener.nothing_captured())
            raise ValueError(f"no layer of {class_name(model)} can have gates: {why}")
        shown = [
            f"size={one.size},sinks={one.sinks}" if isinstance(one, Window) else one.words
            for one in alternatives
        ]
        settings = {
            "alternatives": [
                str(one) if isinstance(one, Window) else one.words for one in alternatives
            ],
            "key_heads": key_heads,
            "shown": {"alternatives": shown},
        }
        super().__init__(windows, settings, saving, advance, passes)
        self.gates = {
            name: heads[1] if key_heads else heads[0] for name, heads in found.layers.items()
        }
        self.skipped, self._alternatives = found.skipped, tuple(alternatives)
        self._modules = {name: known[name] for name in self.gates}
        self._outputs = output_gradients(self._modules, self._receive)
        self._found: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = {}
        self._rotary: dict[str, Rotary] = {}

    @property
    def places(self) -> list[tuple[str, int]]:
        """Module name and head of each gate."""
        return [(name, head) for name, gates in self.gates.items() for head in range(gates)]

    def zeros(self) -> Tensor:
        """Every head computes its own output, (gates,)."""
        return torch.zeros(sum(self.gates.values()), dtype=torch.float64)

    def slopes(
        self, units: Sequence[Unit], values: Tensor, number: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Derivatives, their standard errors, and second-order costs, (gates, alternatives) each.

        Args:
            units: the windows that are read.
            values: what the heads compute, (gates,).
            number: number of this pass.
        """
        mean, error = mean_gradient(self.readings(units, values, number))
        (slope, curvature), (error, _) = (
            one.view(2, len(values), len(self._alternatives)) for one in (mean, error)
        )
        return slope, error, curvature

    def _run(self, batch: Mapping[str, Any], values: Tensor, backward: bool) -> Reading:
        self._prepare()
        self._values = self._split(values)
        law = self.law(values)
        with apply(self._model, law) if law else nullcontext():
            if not backward:
                with torch.no_grad():
                    return Reading.of(self._loss.score(self._model, batch))
            with (
                huggingface.intercept(self._outputs, outermost=True),
                set_checkpoint_early_stop(False),
            ):
                scored = self._loss.backward(self._model, batch)
        none = torch.zeros(2, len(values), len(self._alternatives), dtype=torch.float64)
        parts = [
            self._found.pop(name, none[:, :gates]).flatten(1) for name, gates in self.gates.items()
        ]
        return Reading.of(scored, torch.cat(parts, 1).flatten())

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

    def _change(self, context: ExitStack) -> None:
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
        whole = call.rebuild(False)[0] if bool(values.any()) else output
        found = torch.zeros(2, gates, len(self._alternatives), dtype=torch.float64)
        for index, one in enumerate(self._alternatives):
            current = of_heads == index + 1
            if bool(current.all()):
                other = whole
            elif isinstance(one, Window):
                other = WindowedCall.of(call, [one] * heads, rotary).through(lambda: whole)
            else:
                other = one.output(call)
            if bool(current.any()):
                other = torch.where(current[:, None, None], whole, other)
            rows = ((other - output) * gradient).sum(-1).double()  # (B, Hq, L)
            rows = rows.unflatten(1, (gates, -1)).sum(2)
            found[0, :, index] = rows.sum((0, 2)).cpu()
            found[1, :, index] = 0.5 * rows.square().sum((0, 2)).cpu()
        self._found[call.module] = self._found.get(call.module, 0.0) + found


@dataclass(frozen=True)
class WindowChoice:
    """Which heads read through a window, and what led to it; by default none does.

    Attributes:
        law: the windows, by module name where all heads of a layer have the same, else by
            (name, head).
        gates: for every head, the derivatives of the loss by its gates without any window.
        before: readings of the deciding windows without any window.
        after: the same with the law.
        passes: passes over the windows that were fitted to.
        skipped: why layers have no gates, by module name.
    """

    law: Mapping[Any, Window] = field(default_factory=dict)
    gates: tuple[GateSlope, ...] = ()
    before: Sequence[Reading] = ()
    after: Sequence[Reading] = ()
    passes: int = 1
    skipped: Mapping[str, str] = field(default_factory=dict)


def choose_windows(
    windows: Windows,
    fitting: Sequence[Unit],
    stopping: Sequence[Unit],
    choices: Sequence[Window],
    passes: int,
    saving: Saving,
    advance: Advance | None,
) -> WindowChoice:
    """Choose the heads that read through a window, and through which.

    A pass reads the derivatives of the loss by gates of every head, between what it computes now
    and each alternative. Heads for which an alternative lowers the loss beyond noise change to
    their best one together, if that lowers the loss of the deciding windows beyond noise; if not,
    the half of them with the largest derivatives, and so on. The first pass also tries every head
    with a negative derivative, and each window for all heads.

    Args:
        windows: windows of the text.
        fitting: those whose derivatives are read.
        stopping: those that decide.
        choices: the windows.
        passes: largest number of passes.
        saving: where readings are kept.
        advance: progress callback, or None.

    Raises:
        ValueError: if no layer can have gates.
    """
    with GateGradients(windows, saving, advance, passes, alternatives=choices) as gradients:
        best = gradients.zeros()  # 0 for all keys of a head, k for window k from 1
        before = after = gradients.readings(stopping, best, backward=False)
        first = slopes = gradients.slopes(fitting, best)
        tried, number = {_key(best)}, 1
        while True:
            better: list[tuple[Tensor, list[Reading]]] = []
            beyond = beyond_noise(slopes[0], slopes[1], len(fitting)) & (slopes[0] < 0)
            for values in _proposals(best, slopes[0], beyond, number == 1):
                if _key(values) in tried:
                    continue
                tried.add(_key(values))
                found = gradients.readings(stopping, values, number, backward=False)
                delta, error = difference(after, found)
                if delta < -margin(error, len(found)):
                    better.append((values, found))
                    if number > 1:
                        break
            if better:
                best, after = min(better, key=lambda pair: mean_loss(pair[1]))
            if not better or number == passes:
                break
            number += 1
            slopes = gradients.slopes(fitting, best, number)
    gates = head_records(GateSlope, windows.model, gradients.places, *first)
    return WindowChoice(gradients.law(best), gates, before, after, number, gradients.skipped)


def _proposals(now: Tensor, slope: Tensor, beyond: Tensor, first: bool) -> Iterator[Tensor]:
    """What heads may compute instead, (gates,) each, those most likely to help first.

    Args:
        now: what they compute.
        slope: derivatives by the gates, (gates, windows).
        beyond: which of them are negative beyond noise.
        first: whether this is the first pass.
    """
    least, at = slope.masked_fill(~beyond, math.inf).min(1)
    change = least < 0
    while bool(change.any()):
        yield _changed(now, at, change)
        if first:
            break
        strongest = least.argsort()[: int(change.sum()) // 2]
        change = torch.zeros_like(change).index_fill(0, strongest, True)
    if first:
        for one in range(slope.shape[1]):
            yield _changed(now, torch.full_like(at, one), beyond[:, one])
            yield _changed(now, torch.full_like(at, one), slope[:, one] < 0)
            yield torch.full_like(now, one + 1)


def gate_slopes(
    model: torch.nn.Module,
    windows: AnyBatches | Tensor,
    alternatives: Sequence[Window | Alternative],
    *,
    key_heads: bool = False,
    loss: AnyLoss | None = None,
    save: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    advance: Advance | None = None,
) -> tuple[GateSlope, ...]:
    r"""What other outputs of every head would cost, to first order, from one pass.

    With a gate :math:`g` the model computes :math:`(1 - g)\, o + g\, \tilde o` for a head, where
    :math:`o` is its output and :math:`\tilde o` another one, such as through a window. The
    derivative of the loss at g = 0, :math:`\langle \partial L / \partial o, \tilde o - o \rangle`,
    comes from one backward pass for all heads and alternatives. Heads act together and g = 1 is
    not small, so these are proposals: judge what is chosen by them.

    Args:
        model: a language model with its head, or any model with a loss, whose attention uses
            transformers' interface.
        windows: tokens (B, L), read one window at a time, or batches as for
            :func:`acutance.calibrate`; at least 2.
        alternatives: windows, or objects that compute another output of a call.
        key_heads: one gate for the query heads that share a key head, instead of one for each.
        loss: as for :func:`acutance.judge`.
        save: file that keeps the state, to continue from.
        resume: continue from what ``save`` holds.
        overwrite: replace what ``save`` holds.
        advance: called after each window with its tokens, 1 and 1.

    Returns:
        One record for each gate, in model order, with one number for each alternative.

    Raises:
        LossError: if the model has no such loss, or it is not a number.
        ValueError: if there are fewer than two windows, no alternative, or no layer whose
            attention can be read.

    Example:
        >>> from acutance.calibration import gate_slopes
        >>> from acutance.reproduce import decoder, texts
        >>> code = texts.read(texts.files("held out")).long()
        >>> heads = gate_slopes(decoder(), code[: 4 * 512].view(4, 512), [Window(128)])
        >>> len(heads)
        12
        >>> sum(head.slope[0] for head in heads) < -0.1  # beyond 128 a window helps
        True
    """
    if not alternatives:
        raise ValueError("alternatives must contain at least one window, got none")
    saving = Saving.to(save, resume=resume, overwrite=overwrite)
    read = read_windows(model, windows, None, loss)
    if len(read.units) < 2:
        raise ValueError(f"errors need at least 2 windows, got {len(read.units)}")
    with GateGradients(
        read, saving, advance, 1, alternatives=alternatives, key_heads=key_heads
    ) as gradients:
        slopes = gradients.slopes(read.units, gradients.zeros())
    return head_records(GateSlope, model, gradients.places, *slopes)


def _changed(now: Tensor, at: Tensor, change: Tensor) -> Tensor:
    """What heads compute after the change of some.

    Args:
        now: what they compute, (gates,): 0 for all keys, k for window k from 1.
        at: index of the alternative that each head changes to; its present one means all keys.
        change: which heads change, boolean.
    """
    return torch.where(change, torch.where(at + 1 == now, 0, at + 1).to(now.dtype), now)


def _key(values: Tensor) -> bytes:
    """What the heads compute, as a key."""
    return values.to(torch.int32).numpy().tobytes()


#: What ``law`` may be: factors at every length, one for all lengths, or windows alone.
FAMILIES = ("table", "constant", "none")
#: The first rate of Adam's steps in log λ, steps of a pass, and its decays.
_RATE, _STEPS, _MOMENTUM, _SQUARES = 0.05, 4, 0.9, 0.95


def calibrate_by_loss(
    model: torch.nn.Module,
    batches: AnyBatches | Tensor,
    *,
    lengths: Sequence[int] | None = None,
    loss: AnyLoss | None = None,
    law: str = "table",
    window: Window | Iterable[Window] | None = None,
    passes: int = 6,
    limit: float = 16.0,
    windowed: bool = False,
    advance: Advance | None = None,
    **saving: Any,
) -> LossCalibration:
    """:func:`acutance.calibrate` with ``target="loss"``; ``saving`` are its options of saving.

    Raises:
        LossError: if the model has no such loss, or it is not a number.
        ValueError: if there are fewer than six windows, or an argument is out of range.
    """
    if law not in FAMILIES:
        raise ValueError(
            f"target='loss' fits law='table', 'constant' or 'none', got law={law!r:.40}"
        )
    if law == "none" and window is None:
        raise ValueError("law='none' fits no factors: give a window for heads to read through")
    given: Any = () if window is None else window
    choices = list(given) if isinstance(given, Iterable) else [given]
    if window is not None and not (choices and all(isinstance(w, Window) for w in choices)):
        raise TypeError(f"window must be a Window or a list of them, got {window!r:.60}")
    endings = ("",) if window is None else ("", ".windows")
    kept = Saving.to(**saving, endings=endings)
    windows = read_windows(model, batches, lengths, loss)
    fitting, stopping = split_units(windows)
    choice, settings = WindowChoice(), {}
    if choices:
        beside = kept.beside(".windows")
        choice = choose_windows(windows, fitting, stopping, choices, passes, beside, advance)
        chosen = ", ".join(f"{place}: {window}" for place, window in choice.law.items())
        settings = {"chosen": chosen}
    skipped = dict(choice.skipped)
    scalings: dict[str, Any] = {}
    slopes: tuple[HeadSlope, ...] = ()
    before, after, done = choice.before, choice.after, choice.passes
    if law != "none":
        with LossGradients(
            windows, kept, advance, passes, law=law, windowed=windowed, fixed=choice.law,
            limit=limit, **settings,
        ) as gradients:  # fmt: skip
            values, derivatives, first, last, made = _fit(
                gradients, fitting, stopping, passes, limit
            )
            gradients.set(values)
        skipped |= gradients.skipped
        scalings = {name: table.record() for name, table in gradients.tables.items()}
        slopes = _by_head(model, gradients, *derivatives)
        before, done = before or first, max(done, made)
        after = last if not choices or bool(values.any()) else first
    delta, error = difference(before, after)
    found = joined(scalings, choice.law)
    return LossCalibration(
        model=Identity.of(model),
        layers=Law.of(model, found).layers if found else (),
        lengths=windows.lengths,
        target="loss",
        metric="loss",
        family=law,
        passes=done,
        windows=windows.counts,
        skipped=skipped,
        slopes=slopes,
        factors=tuple(
            tuple(
                gradients.tables[one.module].log_factor[one.head].detach().double().exp().tolist()
            )
            for one in slopes
        ),
        gates=choice.gates,
        choices=tuple(choices),
        fitted=len(fitting),
        stopped=len(stopping),
        delta=delta,
        error=error,
        loss=windows.loss.words,
        mean_loss=mean_loss(before),
    )


def loss_slopes(
    model: torch.nn.Module,
    windows: AnyBatches | Tensor,
    *,
    lengths: Sequence[int] | None = None,
    loss: AnyLoss | None = None,
    law: str = "table",
    windowed: bool = False,
    save: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    advance: Advance | None = None,
) -> tuple[HeadSlope, ...]:
    r"""Derivative of the loss by the factor of every head, at every length, without a law.

    One backward pass a window gives :math:`dL/d\log\lambda` of all heads at once. A factor of
    :math:`1 + \varepsilon` changes the mean loss by :math:`\varepsilon` times the slope, to first
    order; heads act together, so the sum of such changes is no promise.

    Args:
        model: a language model with its head, or any model with a loss.
        windows: tokens (B, L), read one window at a time, or batches as for
            :func:`acutance.calibrate`; at least 2.
        lengths: at which there are factors, rising; None is the windows' length and its halves
            down to an eighth.
        loss: as for :func:`acutance.judge`.
        law: ``"table"``, or ``"constant"`` for one factor at all lengths.
        windowed: also layers with a sliding window.
        save: file that keeps the state, to continue from.
        resume: continue from what ``save`` holds.
        overwrite: replace what ``save`` holds.
        advance: called after each window with its tokens, 1 and 1.

    Returns:
        One record for each head, in model order.

    Raises:
        LossError: if the model has no such loss, or it is not a number.
        ValueError: if there are fewer than two windows, or an argument is out of range.

    Example:
        >>> from acutance.calibration import loss_slopes
        >>> from acutance.reproduce import decoder, texts
        >>> code = texts.read(texts.files("held out")).long()
        >>> heads = loss_slopes(decoder(), code[: 4 * 512].view(4, 512), lengths=[128, 512])
        >>> len(heads), heads[0].lengths
        (12, (128, 256, 512))
        >>> min(head.slope[-1] for head in heads) < -0.01  # sharper would help beyond 128
        True
    """
    saving = Saving.to(save, resume=resume, overwrite=overwrite)
    check_flag("windowed", windowed)
    if law not in FAMILIES[:2]:
        raise ValueError(f"law must be 'table' or 'constant', got {law!r:.40}")
    read = read_windows(model, windows, lengths, loss)
    if len(read.units) < 2:
        raise ValueError(f"errors need at least 2 windows, got {len(read.units)}")
    with LossGradients(
        read, saving, advance, 1, law=law, windowed=windowed, slopes=True
    ) as gradients:
        slope, error = mean_gradient(gradients.readings(read.units, gradients.zeros()))
    return _by_head(model, gradients, slope, error)


def _by_head(
    model: torch.nn.Module, gradients: LossGradients, slope: Tensor, error: Tensor
) -> tuple[HeadSlope, ...]:
    """The slopes (parameters,) and their errors as one record for each head."""
    places = gradients.places
    lengths = torch.tensor([gradients.tables[name].lengths for name, _ in places])
    return head_records(
        HeadSlope, model, places, lengths, slope.view(len(places), -1), error.view(len(places), -1)
    )


# -- the fit ---------------------------------------------------------------------------------------


class _Adam:
    """The Adam optimiser: running means of the gradient and of its square."""

    def __init__(self, size: int) -> None:
        self._mean = torch.zeros(size, dtype=torch.float64)
        self._square = torch.zeros(size, dtype=torch.float64)
        self._steps = 0

    def step(self, gradient: Tensor) -> Tensor:
        """The direction of the next step, about 1 in size for each parameter."""
        self._steps += 1
        self._mean = _MOMENTUM * self._mean + (1 - _MOMENTUM) * gradient
        self._square = _SQUARES * self._square + (1 - _SQUARES) * gradient.square()
        mean = self._mean / (1 - _MOMENTUM**self._steps)
        square = self._square / (1 - _SQUARES**self._steps)
        return -mean / square.sqrt().clamp(min=1e-300)


def _fit(
    gradients: LossGradients,
    fitting: Sequence[Unit],
    stopping: Sequence[Unit],
    passes: int,
    limit: float,
) -> tuple[Tensor, tuple[Tensor, Tensor], list[Reading], list[Reading], int]:
    """Fit log-factors by Adam's steps, from the derivatives of some windows.

    Args:
        gradients: reads the derivatives.
        fitting: windows that are fitted to.
        stopping: windows that decide when to stop.
        passes: largest number of passes.
        limit: factors stay between 1/limit and limit.

    Returns:
        The best log-factors, (parameters,), all 0 if none lowers the loss beyond noise; derivatives
        by them without a law over all windows, and their standard errors; readings of the deciding
        windows without a law and with the best factors; and the passes that were made.
    """
    zero = gradients.zeros()
    first = gradients.readings(fitting, zero)
    before = gradients.readings(stopping, zero)
    slopes = mean_gradient([*first, *before])
    slope, noise = mean_gradient(first)
    free = beyond_noise(slope, noise, len(first)).double()
    best, found = zero, before
    if not bool(free.any()):
        return zero, slopes, before, before, 1

    def step(values: Tensor, slope: Tensor) -> Tensor:
        moved = values + rate * adam.step(slope * free)
        return moved.clamp(-math.log(limit), math.log(limit))

    rate, adam = _RATE, _Adam(len(zero))
    values = step(zero, slope)
    parts = min(_STEPS, len(fitting))  # one for each step of a pass
    for done in range(2, passes + 1):
        for part in range(parts):
            slope, _ = mean_gradient(gradients.readings(fitting[part::parts], values, done))
            values = step(values, slope)
        after = gradients.readings(stopping, values, done)
        if mean_loss(after) < mean_loss(found):
            best, found = values, after
        elif rate < _RATE:
            break
        else:  # from the best again, in smaller steps
            values, rate, adam = best, rate / 2, _Adam(len(zero))
    delta, error = difference(before, found)
    lower = delta < -margin(error, len(before))
    return best if lower else zero, slopes, before, found, done
