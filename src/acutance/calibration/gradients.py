"""The loss of a window with derivatives of it, in one backward pass, and laws that lower it."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from acutance.calibration.apply_law import apply
from acutance.calibration.law import Identity, Law
from acutance.calibration.loss_table import (
    FIT,
    Advance,
    LossTable,
    Reader,
    Reading,
    Saving,
    Unit,
    difference,
    margin,
    mean_loss,
    mean_values,
    read_windows,
)
from acutance.calibration.losses import AnyLoss, Loss, Scored, with_forward
from acutance.calibration.measured import knots_of, read_layers
from acutance.calibration.read_window import WindowedCall
from acutance.calibration.result import (
    GateSlope,
    HeadSlope,
    LossCalibration,
    beyond_noise,
    head_records,
)
from acutance.calibration.windows import AnyBatches, Turn, evaluating, first_tokens
from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import attention_layers, class_name, uses_interface
from acutance.capture.intercept import unwatched
from acutance.capture.listener import Listener, ProbeError
from acutance.capture.readers import huggingface
from acutance.capture.readers.huggingface import InterfaceCall
from acutance.capture.rotary import find_rotary
from acutance.scaling import HeadTable, Window
from acutance.scaling.laws import LearnedScaling, Rows, interpolate
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


class Gradients(ExitStack):
    """Reads a model's loss, and its derivatives by some parameters, each window once.

    As a context, it writes the readings and leaves the model as it was when it ends. The model is
    changed at the first run: a resumed fit may need none.

    Args:
        reader: the model, its loss and its windows.
        saving: the file of the readings.
        settings: what decides them besides the reader.
        name: of their table in the file.
        advance: progress callback, or None.
        passes: largest number of passes, for the callback.
    """

    def __init__(
        self,
        reader: Reader,
        saving: Saving,
        settings: Mapping[str, Any],
        name: str = "",
        *,
        advance: Advance | None = None,
        passes: int = 1,
    ) -> None:
        super().__init__()
        table = LossTable({**reader.settings, **settings}, saving, name=name)
        self._table = self.enter_context(table)
        self._reader, self._advance, self._passes = reader, advance, passes
        self._prepared = False

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
        return self._reader.read(
            units,
            self._table,
            f"{'derivatives' if backward else 'loss'} at {digest}",
            lambda batch: self._run(batch, values, backward),
            lambda tokens: self._advance and self._advance(tokens, number, self._passes),
        )

    def _prepare(self, law: Any = None, **options: Any) -> None:
        """Prepare the model for backward passes, under a law if one is given, unless it is done."""
        if not self._prepared:
            self._prepared = True
            self.enter_context(prepared(self._reader.model))
            if law is not None:
                self.enter_context(apply(self._reader.model, law, **options))

    def _run(self, batch: Mapping[str, Any], values: Tensor, backward: bool) -> Reading:
        """The reading of one batch; without derivatives unless ``backward``."""
        raise NotImplementedError

    def _first_turn(self) -> Turn:
        """The first tokens of the first window, as a batch of their own."""
        turn = self._reader.units[0].turns[-1]
        few = min(_FEW, turn.length)
        return Turn(few, first_tokens(turn.batch, few), torch.zeros(1, dtype=torch.int64))


class LossGradients(Gradients):
    """The loss of a model and its derivative by the factor of every head.

    The parameters are one vector of log-factors: layer by layer, head by head, at the knots.

    Args:
        reader: as in :class:`Gradients`.
        saving: likewise.
        law: ``"table"`` for factors at every length, or ``"constant"``.
        windowed: also scale layers with a sliding window.
        fixed: windows of layers, by module name, and of heads, by (module name, head), which
            stay as they are.
        progress: ``advance`` and ``passes`` of :class:`Gradients`.
        settings: further settings.

    Attributes:
        tables: the factors of each layer, by module name.
        places: module name and head of each row of factors.
        skipped: why other layers cannot be scaled, by module name.

    Raises:
        ProbeError: if the model ran no attention that can be read.
        ValueError: if no layer can be scaled.
    """

    def __init__(
        self,
        reader: Reader,
        saving: Saving,
        law: str,
        windowed: bool,
        fixed: Mapping[Any, Window],
        progress: Mapping[str, Any],
        **settings: Any,
    ) -> None:
        settings = {"law": law, "windowed": windowed, **settings}
        super().__init__(reader, saving, settings, **progress)
        few = self._first_turn()
        read, self.skipped = read_layers(
            reader.model, [few], "entropy", (few.length,), windowed=windowed
        )
        knots = knots_of(reader.lengths) if law == "table" else (reader.lengths[-1],)
        self.tables = {
            name: FactorTable(heads, knots) for name, heads in sorted(read.heads.items())
        }
        self.places = [
            (name, head) for name, table in self.tables.items() for head in range(table.num_heads)
        ]
        self._law, self._windowed = joined(self.tables, fixed), windowed

    def zeros(self) -> Tensor:
        """Log-factors that change nothing, (parameters,)."""
        size = sum(table.log_factor.numel() for table in self.tables.values())
        return torch.zeros(size, dtype=torch.float64)

    def set(self, values: Tensor) -> None:
        """Set the tables to these log-factors, (parameters,)."""
        factors = [table.log_factor.data for table in self.tables.values()]
        parts = values.split([factor.numel() for factor in factors])
        for factor, part in zip(factors, parts, strict=True):
            factor.copy_(part.view_as(factor))

    def slopes(self, readings: Sequence[Reading]) -> tuple[HeadSlope, ...]:
        """Derivatives of the mean loss with their standard errors, one record for each head."""
        columns = [part.view(len(self.places), -1) for part in mean_values(readings)]
        lengths = torch.tensor([self.tables[name].lengths for name, _ in self.places])
        return head_records(HeadSlope, self._reader.model, self.places, lengths, *columns)

    def _run(self, batch: Mapping[str, Any], values: Tensor, backward: bool) -> Reading:
        """The reading of one batch, always with derivatives."""
        gradients = []
        self._prepare(self._law, windowed=self._windowed)
        self.set(values)
        scored = self._reader.loss.backward(self._reader.model, batch)
        for table in self.tables.values():
            gradient = table.log_factor.grad
            gradients.append(torch.zeros_like(table.log_factor) if gradient is None else gradient)
            table.log_factor.grad = None
        return Reading.of(scored, torch.cat([one.flatten().double().cpu() for one in gradients]))


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
        context.enter_context(set_checkpoint_early_stop(False))
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


def backward_by_outputs(
    model: torch.nn.Module,
    loss: Loss,
    batch: Mapping[str, Any],
    law: Any,
    layers: Mapping[str, torch.nn.Module],
    receive: Callable[[AttentionCall, Tensor, Tensor], None],
) -> Scored:
    """Run a batch forward and backward under a law, and show the attention calls of some layers.

    Calls are seen in the backward pass, as they are before the law changes them. Their output needs
    a gradient even if no parameter of the model does. Query, key and value are saved by autograd,
    so that a checkpointed block computes them again.

    Args:
        model: the model, which is :func:`prepared`.
        loss: the loss.
        batch: keywords of the model.
        law: a law; empty or None leaves the model as it is.
        layers: the layers, which use transformers' attention interface, by name.
        receive: called with each call, its output and the derivative of the loss by it,
            (B, Hq, L, Ev) each, without gradients and function modes.
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

        def pass_on(gradient: Tensor, output: Tensor, *inputs: Tensor) -> None:
            query, key, value = inputs
            whole = replace(bare, query=query, key=key, value=value)
            with torch.no_grad(), unwatched():  # output and gradient are (B, L, Hq, Ev)
                receive(whole, output.transpose(1, 2), gradient.transpose(1, 2))

        output, *rest = result if isinstance(result, tuple) else (result,)
        same: Tensor = _Identity.apply(  # type: ignore[no-untyped-call]
            output, leaf, pass_on, read.query, read.key, read.value
        )
        return (same, *rest) if isinstance(result, tuple) else same

    applied = apply(model, law) if law else nullcontext()
    with applied, huggingface.intercept(handle, outermost=True):
        return loss.backward(model, batch)


class _Identity(torch.autograd.Function):
    """Returns an attention output; its backward pass shows the gradient to a function."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, leaf: Tensor, receive: Any, *inputs: Tensor) -> Tensor:
        """Return the output; ``leaf`` needs a gradient, so that the output has one."""
        ctx.save_for_backward(output, *inputs)
        ctx.receive = receive
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the gradient on unchanged."""
        ctx.receive(gradients[0], *ctx.saved_tensors)
        return gradients[0], None, None, None, None, None


_BY_HAND = "it does not use transformers' attention interface"


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
        reader: as in :class:`Gradients`; the model's attention uses transformers' interface.
        saving: likewise.
        alternatives: what the gates open to: for each head the same windows or other ways to
            compute its output.
        key_heads: whether the query heads of one key head share a gate.
        progress: ``name``, ``advance`` and ``passes`` of :class:`Gradients`.

    Attributes:
        gates: number of gates of each layer, by module name.
        places: module name and head of each gate.
        skipped: why other layers have none, by module name.

    Raises:
        ProbeError: if the model ran no attention that can be read.
        RotaryError: if a window moves keys and the model's positions are not rotary.
        ValueError: if no layer can have gates.
    """

    def __init__(
        self,
        reader: Reader,
        saving: Saving,
        alternatives: Sequence[Window | Alternative],
        key_heads: bool = False,
        **progress: Any,
    ) -> None:
        words = [str(one) if isinstance(one, Window) else one.words for one in alternatives]
        shown = [
            f"size={one.size},sinks={one.sinks}" if isinstance(one, Window) else one.words
            for one in alternatives
        ]
        settings = {"alternatives": words, "key_heads": key_heads}
        settings["shown"] = {"alternatives": shown}
        super().__init__(reader, saving, settings, **progress)
        model, known = reader.model, attention_layers(reader.model)
        found = _HeadCounts({name for name, module in known.items() if uses_interface(module)})
        with evaluating(model), torch.no_grad(), Listener(model, found) as listener:
            self._first_turn().run(model, reader.device)
        self.skipped, self._alternatives = found.skipped, tuple(alternatives)
        if not found.layers:
            why = "; ".join(f"{name}: {reason}" for name, reason in found.skipped.items())
            if not why:
                raise ProbeError(listener.nothing_captured())
            raise ValueError(f"no layer of {class_name(model)} can have gates: {why}")
        self.gates = {name: heads[key_heads] for name, heads in found.layers.items()}
        self.places = [(name, head) for name, count in self.gates.items() for head in range(count)]
        self._layers = layers = {name: known[name] for name in self.gates}
        moving = any(isinstance(one, Window) and one.moves for one in alternatives)
        rotary = find_rotary(model, layers.values()) if moving else [None] * len(layers)
        self._rotary = dict(zip(layers, rotary, strict=True))
        self._costs: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = {}

    def slopes(
        self, units: Sequence[Unit], values: Tensor, number: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Derivatives, their standard errors, and second-order costs, (gates, alternatives) each.

        Args:
            units: the windows that are read.
            values: what the heads compute, (gates,).
            number: number of this pass.
        """
        mean, error = mean_values(self.readings(units, values, number))
        (slope, curvature), (error, _) = (
            part.view(2, len(values), len(self._alternatives)) for part in (mean, error)
        )
        return slope, error, curvature

    def law(self, values: Tensor) -> dict[Any, Any]:
        """The windows of these values as a law for :func:`acutance.apply`; empty if all are 0."""
        law: dict[Any, Any] = {}
        for name, of_layer in self._split(values).items():
            chosen = [int(value) for value in of_layer.tolist()]
            if len(set(chosen)) == 1 and chosen[0]:
                law[name] = self._alternatives[chosen[0] - 1]
                continue
            for head, value in enumerate(chosen):
                if value:
                    law[name, head] = self._alternatives[value - 1]
        return law

    def _run(self, batch: Mapping[str, Any], values: Tensor, backward: bool) -> Reading:
        model, loss, law = self._reader.model, self._reader.loss, self.law(values)
        self._prepare()
        if not backward:
            with apply(model, law) if law else nullcontext():
                return Reading.of(loss.score(model, batch))
        self._values = self._split(values)
        scored = backward_by_outputs(model, loss, batch, law, self._layers, self._receive)
        none = torch.zeros(2, len(values), len(self._alternatives), dtype=torch.float64)
        costs = [
            self._costs.pop(name, none[:, :gates]).flatten(1) for name, gates in self.gates.items()
        ]
        return Reading.of(scored, torch.cat(costs, 1).flatten())

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
        heads, rotary = call.query.shape[1], self._rotary[call.module]
        of_heads = values.repeat_interleave(heads // gates).to(output.device)
        unchanged = call.rebuild(False)[0] if bool(values.any()) else output
        costs = torch.zeros(2, gates, len(self._alternatives), dtype=torch.float64)
        for index, alternative in enumerate(self._alternatives):
            current = of_heads == index + 1
            if bool(current.all()):
                other = unchanged
            elif isinstance(alternative, Window):
                windowed = WindowedCall.of(call, [alternative] * heads, rotary)
                other = windowed.through(lambda: unchanged)
            else:
                other = alternative.output(call)
            if bool(current.any()):
                other = torch.where(current[:, None, None], unchanged, other)
            rows = ((other - output) * gradient).sum(-1).double()  # (B, Hq, L)
            rows = rows.unflatten(1, (gates, -1)).sum(2)
            costs[0, :, index] = rows.sum((0, 2)).cpu()
            costs[1, :, index] = 0.5 * rows.square().sum((0, 2)).cpu()
        self._costs[call.module] = self._costs.get(call.module, 0.0) + costs


def choose_windows(
    gates: GateGradients, fitting: Sequence[Unit], stopping: Sequence[Unit], passes: int
) -> tuple[Tensor, tuple[Tensor, ...], list[Reading], list[Reading], int]:
    """Choose the heads that read through a window, and through which.

    A pass reads the derivatives of the loss by gates of every head, between what it computes now
    and each alternative. Heads for which an alternative lowers the loss beyond noise change to
    their best one together, if that lowers the loss of the deciding windows beyond noise; if not,
    the half of them with the largest derivatives, and so on. The first pass also tries every head
    with a negative derivative, and each window for all heads.

    Args:
        gates: reads the derivatives.
        fitting: windows whose derivatives are read.
        stopping: those that decide.
        passes: largest number of passes.

    Returns:
        What the heads compute, (gates,): 0 for all keys, k for window k from 1; the derivatives
        without any window, as :meth:`GateGradients.slopes`; the readings of the deciding windows
        without a window and with the chosen ones; and the passes that were made.
    """
    best, number = torch.zeros(len(gates.places), dtype=torch.float64), 1
    before = after = gates.readings(stopping, best, backward=False)
    first = slopes = gates.slopes(fitting, best)
    tried = {tuple(best.tolist())}
    while True:
        better: list[tuple[Tensor, list[Reading]]] = []
        beyond = beyond_noise(slopes[0], slopes[1], len(fitting)) & (slopes[0] < 0)
        for values in _proposals(best, slopes[0], beyond, number == 1):
            if tuple(values.tolist()) in tried:
                continue
            tried.add(tuple(values.tolist()))
            readings = gates.readings(stopping, values, number, backward=False)
            delta, error = difference(after, readings)
            if delta < -margin(error, len(readings)):
                better.append((values, readings))
                if number > 1:
                    break
        if better:
            best, after = min(better, key=lambda pair: mean_loss(pair[1]))
        if not better or number == passes:
            return best, first, before, after, number
        number += 1
        slopes = gates.slopes(fitting, best, number)


def _proposals(now: Tensor, slope: Tensor, beyond: Tensor, first: bool) -> Iterator[Tensor]:
    """What heads may compute instead, (gates,) each, those most likely to help first.

    Args:
        now: what they compute, (gates,).
        slope: derivatives by the gates, (gates, windows).
        beyond: which of them are negative beyond noise.
        first: whether this is the first pass.
    """

    def changed(to: Tensor, change: Tensor) -> Tensor:
        """Change some heads to windows by index; their present one means all keys."""
        return torch.where(change, torch.where(to + 1 == now, 0, to + 1).to(now.dtype), now)

    least, best = slope.masked_fill(~beyond, math.inf).min(1)
    change = least < 0
    while bool(change.any()):
        yield changed(best, change)
        if first:
            break
        strongest = least.argsort()[: int(change.sum()) // 2]
        change = torch.zeros_like(change).index_fill(0, strongest, True)
    if first:
        for index in range(slope.shape[1]):
            window = torch.full_like(best, index)
            yield changed(window, beyond[:, index])
            yield changed(window, slope[:, index] < 0)
            yield torch.full_like(now, index + 1)


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
    reader = read_windows(model, windows, None, loss)
    return read_gates(reader, saving, alternatives, key_heads, advance=advance)


def read_gates(
    reader: Reader,
    saving: Saving,
    alternatives: Sequence[Window | Alternative],
    key_heads: bool = False,
    **progress: Any,
) -> tuple[GateSlope, ...]:
    """:func:`gate_slopes` of windows that are cut, by the arguments of :class:`GateGradients`."""
    _check_errors(reader)
    gradients = GateGradients(reader, saving, alternatives, key_heads, **progress)
    none = torch.zeros(len(gradients.places), dtype=torch.float64)
    with gradients:
        slopes = gradients.slopes(reader.units, none)
    return head_records(GateSlope, reader.model, gradients.places, *slopes)


def _check_errors(reader: Reader) -> None:
    """Refuse a single window, which has no standard error."""
    if len(reader.units) < 2:
        raise ValueError(f"errors need at least 2 windows, got {len(reader.units)}")


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
    tables = {"": FIT, ".windows": FIT} if choices else {"": FIT}
    saved = Saving.to(**saving, tables=tables)
    reader = read_windows(model, batches, lengths, loss)
    fitting, stopping = reader.split()
    progress: dict[str, Any] = {"advance": advance, "passes": passes}
    found: dict[str, Any] = {"passes": 1, "skipped": {}}  # fields of the result
    fixed: dict[Any, Window] = {}
    scalings: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    before: list[Reading] = []
    if choices:
        gated = GateGradients(reader, saved, choices, name=".windows", **progress)
        with gated:
            values, first, before, after, made = choose_windows(gated, fitting, stopping, passes)
        fixed, gates = gated.law(values), head_records(GateSlope, model, gated.places, *first)
        found = {"passes": made, "skipped": gated.skipped, "gates": gates}
        settings["chosen"] = ", ".join(f"{place}: {window}" for place, window in fixed.items())
    if law != "none":
        scaled = LossGradients(
            reader, saved, law, windowed, fixed, progress, limit=limit, **settings
        )
        with scaled:
            values, slopes, unscaled, last, made = _fit(scaled, fitting, stopping, passes, limit)
        scaled.set(values)
        scalings = {name: table.record() for name, table in scaled.tables.items()}
        logs = [scaled.tables[head.module].log_factor[head.head].detach() for head in slopes]
        found["factors"] = tuple(tuple(row.double().exp().tolist()) for row in logs)
        found |= {"slopes": slopes, "skipped": {**found["skipped"], **scaled.skipped}}
        found["passes"] = max(found["passes"], made)
        after = last if not choices or bool(values.any()) else unscaled
        before = before or unscaled
    delta, error = difference(before, after)
    laws = joined(scalings, fixed)
    return LossCalibration(
        model=Identity.of(model),
        layers=Law.of(model, laws).layers if laws else (),
        lengths=reader.lengths,
        target="loss",
        metric="loss",
        family=law,
        windows=reader.counts,
        choices=tuple(choices),
        fitted=len(fitting),
        stopped=len(stopping),
        delta=delta,
        error=error,
        loss=reader.loss.words,
        mean_loss=mean_loss(before),
        **found,
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
    reader = read_windows(model, windows, lengths, loss)
    _check_errors(reader)
    progress = {"advance": advance}
    gradients = LossGradients(reader, saving, law, windowed, {}, progress, slopes=True)
    with gradients:
        readings = gradients.readings(reader.units, gradients.zeros())
    return gradients.slopes(readings)


def _fit(
    gradients: LossGradients,
    fitting: Sequence[Unit],
    stopping: Sequence[Unit],
    passes: int,
    limit: float,
) -> tuple[Tensor, tuple[HeadSlope, ...], list[Reading], list[Reading], int]:
    """Fit log-factors by Adam's steps, from the derivatives of some windows.

    Args:
        gradients: reads the derivatives.
        fitting: windows that are fitted to.
        stopping: windows that decide when to stop.
        passes: largest number of passes.
        limit: factors stay between 1/limit and limit.

    Returns:
        The best log-factors, (parameters,), all 0 if none lowers the loss beyond noise; derivatives
        by them without a law over all windows; readings of the deciding windows without a law and
        with the best factors; and the passes that were made.
    """
    zero = gradients.zeros()
    first = gradients.readings(fitting, zero)
    before = after = gradients.readings(stopping, zero)
    slopes = gradients.slopes([*first, *before])
    slope, noise = mean_values(first)
    free = beyond_noise(slope, noise, len(first)).double()
    if not bool(free.any()):
        return zero, slopes, before, before, 1
    rate, done, best = _RATE, 1, zero
    values, adam = _start(zero, rate)

    def step(slope: Tensor) -> None:
        values.grad = slope * free
        adam.step()
        values.data.clamp_(-math.log(limit), math.log(limit))

    step(slope)
    parts = min(_STEPS, len(fitting))  # one for each step of a pass
    for done in range(2, passes + 1):
        for part in range(parts):
            now = gradients.readings(fitting[part::parts], values.detach(), done)
            step(mean_values(now)[0])
        last = gradients.readings(stopping, values.detach(), done)
        if mean_loss(last) < mean_loss(after):
            best, after = values.detach().clone(), last
        elif rate < _RATE:
            break
        else:  # from the best again, in smaller steps
            rate /= 2
            values, adam = _start(best, rate)
    delta, error = difference(before, after)
    lower = delta < -margin(error, len(before))
    return best if lower else zero, slopes, before, after, done


def _start(values: Tensor, rate: float) -> tuple[torch.nn.Parameter, torch.optim.Adam]:
    """Parameters with these values, and the optimiser of their steps."""
    parameters = torch.nn.Parameter(values.clone())
    betas = (_MOMENTUM, _SQUARES)
    return parameters, torch.optim.Adam([parameters], lr=rate, betas=betas, eps=1e-300)
