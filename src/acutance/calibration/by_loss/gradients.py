"""The loss of a window with derivatives of it, in one backward pass: by factors, by outputs."""

from __future__ import annotations

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from acutance.calibration.apply_law import apply
from acutance.calibration.fit.measure import knots_of, no_layer, read_layers
from acutance.calibration.fit.windows import Turn, evaluating, first_tokens
from acutance.calibration.loss_table import (
    Advance,
    LossTable,
    Reading,
    Saving,
    Unit,
    Windows,
    read_units,
)
from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import attention_layers, uses_interface
from acutance.capture.readers.interface_call import InterfaceCall
from acutance.capture.torch_modes import unwatched
from acutance.scaling import HeadTable, Window
from acutance.scaling.laws import Rows
from acutance.scaling.learned import LearnedScaling

if TYPE_CHECKING:
    from typing_extensions import Self

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
        knots = [math.log(n) for n in self.lengths]
        x = rows.log_n.clamp(knots[0], knots[-1])
        parts = []
        for p, knot in enumerate(knots):
            part = torch.ones_like(x)
            if p > 0:
                part = part - (knot - x).clamp(min=0) / (knot - knots[p - 1])
            if p < len(knots) - 1:
                part = part - (x - knot).clamp(min=0) / (knots[p + 1] - knot)
            parts.append(part.clamp(min=0))
        hats = torch.stack(parts, -1)  # (..., L, P), which sum to 1
        factors = self.log_factor.exp().to(device=x.device, dtype=x.dtype)
        return (hats * factors.unsqueeze(-2)).sum(-1)

    def record(self) -> HeadTable:
        """The current factors as a constant table.

        A last length with the factor of the one before keeps it constant for longer rows.
        """
        factors = self.log_factor.detach().exp()
        if len(self.lengths) == 1:
            return HeadTable(factors[:, 0])
        return HeadTable(
            torch.cat([factors, factors[:, -1:]], 1), lengths=(*self.lengths, 2 * self.lengths[-1])
        )


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
        self._table = LossTable({**windows.settings(), **settings}, saving)
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
        layers, self.skipped = read_layers(
            model, [few], "entropy", (few.length,), windowed=windowed
        )
        if not layers:
            raise ValueError(no_layer(self.skipped))
        super().__init__(
            windows, {"law": law, "windowed": windowed, **settings}, saving, advance, passes
        )
        self._windowed, self._fixed = windowed, fixed or {}
        knots = knots_of(windows.lengths) if law == "table" else (windows.lengths[-1],)
        self.tables = {
            name: FactorTable(values.value.shape[1], knots) for name, values in layers.items()
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
    with evaluating(model), _frozen(model), _one_block_at_a_time(model):
        yield


@contextmanager
def _frozen(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the model's parameters need no gradient."""
    needing = [part for part in model.parameters() if part.requires_grad]
    for part in needing:
        part.requires_grad_(False)
    try:
        yield
    finally:
        for part in needing:
            part.requires_grad_(True)


@contextmanager
def _one_block_at_a_time(model: torch.nn.Module) -> Iterator[None]:
    """Context in which blocks are checkpointed, if all attention uses transformers' interface."""
    before = {}
    for block in _blocks(model):
        before[block] = vars(block).get("forward")
        vars(block)["forward"] = functools.partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for block, own in before.items():
            if own is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = own


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


class OutputGradients:
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

    def __call__(self, call: InterfaceCall, run: Callable[[], Any]) -> Any:
        """Run a call, as it is before laws change it, so that its output's gradient is read."""
        name = self._names.get(id(call["module"]))
        if name is None:
            return run()
        with torch.no_grad(), unwatched():
            read = call.read(name)
        result = run()
        output = result[0] if isinstance(result, tuple) else result
        none = read.query.new_empty(0)  # autograd holds the tensors
        receive = functools.partial(self._pass_on, replace(read, query=none, key=none, value=none))
        same: Tensor = _Identity.apply(  # type: ignore[no-untyped-call]
            output, self._leaf, read.query, read.key, read.value, receive
        )
        return (same, *result[1:]) if isinstance(result, tuple) else same

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
