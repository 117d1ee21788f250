"""The loss of a window and its derivative by the factor of every head, in one backward pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from acutance.calibration.apply_law import apply
from acutance.calibration.fit.measure import no_layer, read_layers
from acutance.calibration.fit.windows import Turn, evaluating, first_tokens
from acutance.calibration.losses import Loss, Scored
from acutance.capture.find_layers import attention_layers, uses_interface
from acutance.scaling import HeadTable, Window
from acutance.scaling.base import Rows
from acutance.scaling.learned import LearnedScaling

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "FactorTable",
    "Layers",
    "LossGradients",
    "PreparedModel",
    "Reading",
    "attending_layers",
    "joined",
    "prepared",
]

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


@dataclass(frozen=True)
class Layers:
    """The attention layers of a model whose heads can be scaled.

    Attributes:
        heads: number of query heads by module name, in the order in which the layers ran.
        skipped: why other layers cannot be scaled, by module name.
    """

    heads: Mapping[str, int]
    skipped: Mapping[str, str]


def attending_layers(
    model: torch.nn.Module, turn: Turn, device: torch.device | None, windowed: bool
) -> Layers:
    """Find the attention layers of a model by running it on the first tokens of a batch.

    Raises:
        ProbeError: if the model ran no attention that can be read.
        ValueError: if no layer can be scaled.
    """
    few = Turn(
        min(_FEW, turn.length), first_tokens(turn.batch, _FEW), torch.zeros(1, dtype=torch.int64)
    )
    layers, skipped = read_layers(model, [few], "entropy", (few.length,), windowed=windowed)
    if not layers:
        raise ValueError(no_layer(skipped))
    return Layers({name: values.value.shape[1] for name, values in layers.items()}, skipped)


@dataclass(frozen=True)
class Reading:
    """The loss of one or more batches and its derivative by each log-factor.

    Attributes:
        loss: sum over predictions, in nats.
        count: number of predictions.
        gradient: derivative of ``loss`` by each log-factor, (parameters,) float64.
    """

    loss: float
    count: int
    gradient: Tensor

    @classmethod
    def of(cls, scored: Scored, gradient: Tensor) -> Reading:
        """The reading of a batch from the loss of its predictions."""
        known = ~scored.loss.isnan()
        return cls(float(scored.loss[known].sum()), int(known.sum()), gradient)


class PreparedModel:
    """Context for runs of a model that :func:`prepared` changes.

    It is changed at the first run, since a resumed fit may need none.

    Args:
        model: the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._context: ExitStack | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(*error)

    def prepare(self) -> None:
        """Prepare the model, unless that is done."""
        if self._context is not None:
            return
        with ExitStack() as context:
            context.enter_context(prepared(self._model))
            self._prepare(context)
            self._context = context.pop_all()

    def _prepare(self, context: ExitStack) -> None:
        """What a subclass adds to the context."""


class LossGradients(PreparedModel):
    """Context that computes a model's loss and its derivative by the factor of every head.

    The parameters are one vector of log-factors: layer by layer, head by head, at the knots.

    Args:
        model: a model with a loss.
        loss: the loss.
        layers: the layers to scale.
        knots: numbers n of visible keys at which there are factors.
        windowed: also scale layers with a sliding window.
        windows: windows of layers, by module name, and of heads, by (module name, head), which
            stay as they are.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        layers: Layers,
        knots: Sequence[int],
        *,
        windowed: bool = False,
        windows: Mapping[Any, Window] | None = None,
    ) -> None:
        super().__init__(model)
        self._loss, self._windowed = loss, windowed
        self._windows = {} if windows is None else dict(windows)
        self.tables = {name: FactorTable(heads, knots) for name, heads in layers.heads.items()}

    def _prepare(self, context: ExitStack) -> None:
        """Apply the law with the factors to be fitted."""
        law = joined(self.tables, self._windows)
        context.enter_context(apply(self._model, law, windowed=self._windowed))

    @property
    def size(self) -> int:
        """Number of parameters: heads of all layers times knots."""
        return sum(table.log_factor.numel() for table in self.tables.values())

    def read(self, batch: Mapping[str, Any], values: Tensor) -> Reading:
        """Loss and gradient of a batch at these log-factors, (parameters,)."""
        self.prepare()
        self.set(values)
        with set_checkpoint_early_stop(False):
            scored = self._loss.backward(self._model, batch)
        parts = []
        for table in self.tables.values():
            gradient = table.log_factor.grad
            parts.append(torch.zeros_like(table.log_factor) if gradient is None else gradient)
            table.log_factor.grad = None
        return Reading.of(scored, torch.cat([part.flatten().double().cpu() for part in parts]))

    def score(self, batch: Mapping[str, Any], values: Tensor) -> Reading:
        """The loss alone, with a gradient of 0."""
        self.prepare()
        self.set(values)
        with torch.no_grad():
            scored = self._loss.score(self._model, batch)
        return Reading.of(scored, torch.zeros(self.size, dtype=torch.float64))

    def set(self, values: Tensor) -> None:
        """Apply these log-factors, (parameters,), from now on."""
        for table, part in zip(self.tables.values(), self.split(values), strict=True):
            with torch.no_grad():
                table.log_factor.copy_(part)

    def split(self, values: Tensor) -> list[Tensor]:
        """A vector of parameters as one (heads, knots) tensor for each layer."""
        shapes = [table.log_factor.shape for table in self.tables.values()]
        parts = values.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


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
