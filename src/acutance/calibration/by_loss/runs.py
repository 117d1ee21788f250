"""Runs of a model over windows that give the loss and derivatives of it, and sums over windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from acutance.calibration.by_loss.gradients import Reading
from acutance.calibration.by_loss.readings import Readings
from acutance.calibration.fit.measure import student_t_quantile
from acutance.calibration.fit.windows import (
    AnyBatches,
    Turn,
    batches_by_length,
    check_lengths,
    check_positions,
    cut,
    digest,
)
from acutance.calibration.losses import AnyLoss, Loss, choose_loss
from acutance.corpus.texts import model_digest

__all__ = [
    "Advance",
    "Gradients",
    "Run",
    "Unit",
    "Windows",
    "difference",
    "margin",
    "mean_gradient",
    "mean_loss",
    "ratio",
    "read_windows",
    "split_units",
]

#: Called after each run of the model: tokens just read, the pass from 1, and passes at most.
Advance = Callable[[int, int, int], None]

#: Every so many windows, one decides when to stop and is not fitted to.
_STOPS = 3
#: Windows that are fitted to, and that decide, at least.
_LEAST = (4, 2)
#: Level of the one-sided interval of a difference.
_LEVEL = 0.95


@dataclass(frozen=True)
class Unit:
    """All batches of one window: the window itself, or one cut of it for each length."""

    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of all batches."""
        return sum(turn.tokens for turn in self.turns)


@dataclass(frozen=True)
class Windows:
    """The windows that a model with a loss is run on.

    Attributes:
        model: the model.
        loss: its loss.
        units: the windows, in the order of the text.
        lengths: their lengths, rising.
    """

    model: torch.nn.Module
    loss: Loss
    units: tuple[Unit, ...]
    lengths: tuple[int, ...]

    @property
    def device(self) -> torch.device | None:
        """Device of the model's first parameter; None for a model without parameters."""
        return next((part.device for part in self.model.parameters()), None)

    @property
    def counts(self) -> dict[int, int]:
        """Number of windows by length."""
        counts: dict[int, int] = {}
        for unit in self.units:
            for turn in unit.turns:
                counts[turn.length] = counts.get(turn.length, 0) + turn.groups.numel()
        return counts

    def settings(self) -> dict[str, Any]:
        """What a resumed run must share, as JSON values."""
        return {
            "model": model_digest(self.model),
            "text": digest([turn for unit in self.units for turn in unit.turns]),
            "loss": self.loss.words,
            "lengths": list(self.lengths),
            "windows": len(self.units),
            "weights": str(next((part.dtype for part in self.model.parameters()), None)),
        }


def read_windows(
    model: torch.nn.Module,
    batches: AnyBatches | Tensor,
    lengths: Sequence[int] | None,
    loss: AnyLoss | None,
) -> Windows:
    """Check a model, its loss and its batches, and cut them into windows.

    Raises:
        LossError: if there is no such loss.
        TypeError: if ``model`` is not a module.
        ValueError: if the text is too short or lengths are out of range.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    chosen = choose_loss(model, loss)
    found = batches_by_length(batches.split(1) if isinstance(batches, Tensor) else batches)
    places = check_lengths(lengths, found)
    check_positions(model, places)
    # a causal model's long windows have the short ones inside
    units = _units(found, places if chosen.reads_all else places[-1:])
    return Windows(model, chosen, tuple(units), places)


def split_units(windows: Windows) -> tuple[list[Unit], list[Unit]]:
    """The windows that are fitted to, two of three, and those that decide.

    Raises:
        ValueError: if there are fewer than six.
    """
    units = windows.units
    stopping = [unit for index, unit in enumerate(units) if index % _STOPS == _STOPS - 1]
    fitting = [unit for index, unit in enumerate(units) if index % _STOPS != _STOPS - 1]
    if len(fitting) < _LEAST[0] or len(stopping) < _LEAST[1]:
        raise ValueError(
            f"target='loss' needs at least {sum(_LEAST)} windows of {windows.lengths[-1]} tokens, "
            f"{_LEAST[0]} to fit to and {_LEAST[1]} to decide when to stop, got {len(units)}: "
            "give more windows, more text, or shorter lengths"
        )
    return fitting, stopping


class Gradients(Protocol):
    """Context that computes a model's loss and its derivatives by some parameters."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...

    def read(self, batch: Mapping[str, Any], values: Tensor) -> Reading:
        """Loss and gradient of a batch at these values of the parameters."""

    def score(self, batch: Mapping[str, Any], values: Tensor) -> Reading:
        """The same without a backward pass, with a gradient of 0."""


AnyGradients = TypeVar("AnyGradients", bound=Gradients)


@dataclass
class Run(Generic[AnyGradients]):
    """Readings of windows, each from a file or computed."""

    windows: Windows
    gradients: AnyGradients
    readings: Readings

    def running(self, run: Callable[[], Any]) -> Any:
        """Return ``run()`` with the model prepared; readings are saved even after an interrupt."""
        if not len(self.readings):
            turn = self.windows.units[0].turns[-1]
            self.windows.loss.check(self.windows.model, turn.inputs(self.windows.device))
        with self.gradients:
            try:
                return run()
            finally:
                self.readings.save()

    def read(
        self,
        unit: Unit,
        values: Tensor,
        advance: Advance | None,
        number: int,
        most: int,
        *,
        backward: bool = True,
    ) -> Reading:
        """Loss and gradient of one window at these values, from the file or computed.

        Args:
            unit: the window.
            values: of the parameters, (parameters,).
            advance: progress callback; None calls nothing.
            number: number of this pass, for the callback.
            most: largest number of passes, for the callback.
            backward: False computes the loss alone, with a gradient of 0.
        """

        def make() -> Reading:
            batches = [turn.inputs(self.windows.device) for turn in unit.turns]
            compute = self.gradients.read if backward else self.gradients.score
            parts = [compute(batch, values) for batch in batches]
            return Reading(
                sum(part.loss for part in parts),
                sum(part.count for part in parts),
                torch.stack([part.gradient for part in parts]).sum(0),
            )

        reading = self.readings.get(make)
        if advance is not None:
            advance(unit.tokens, number, most)
        return reading


def _units(found: Mapping[int, list[Any]], places: Sequence[int]) -> list[Unit]:
    """The windows in the order of the text, each with its batches at every length.

    Args:
        found: batches by length, under 0 if they are to be cut.
        places: lengths, ascending.
    """
    if 0 in found:
        cuts = [cut({0: [batch]}, places) for batch in found[0]]
        return [Unit(tuple(turns)) for turns in cuts if turns]
    count = len(found[places[-1]])
    parts: list[list[Turn]] = [[] for _ in range(count)]
    for length in places:
        for index, batch in enumerate(found[length]):
            where = index * count // len(found[length])
            parts[where] += cut({length: [batch]}, [length])
    return [Unit(tuple(turns)) for turns in parts]


def mean_loss(readings: Sequence[Reading]) -> float:
    """Mean loss over the predictions of several windows, in nats."""
    return sum(one.loss for one in readings) / sum(one.count for one in readings)


def mean_gradient(readings: Sequence[Reading]) -> tuple[Tensor, Tensor]:
    """Derivatives of the mean loss by each parameter, and their standard errors over windows."""
    gradients = torch.stack([one.gradient for one in readings])
    counts = torch.tensor([float(one.count) for one in readings], dtype=torch.float64)
    return ratio(gradients, counts)


def ratio(sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over windows of ``sums`` divided by that of ``counts``, and its standard error.

    ``sums`` is (windows, ...) and ``counts`` (windows,).
    """
    total, number = counts.sum(), len(counts)
    mean = sums.sum(0) / total
    away = (sums - mean * counts.view(-1, *[1] * (sums.dim() - 1))).square().sum(0)
    return mean, (away * number / max(1, number - 1)).sqrt() / total


def difference(before: Sequence[Reading], after: Sequence[Reading]) -> tuple[float, float]:
    """Mean loss after minus before on the same windows, with its standard error."""
    sums = torch.tensor([b.loss - a.loss for a, b in zip(before, after, strict=True)]).double()
    counts = torch.tensor([float(one.count) for one in before], dtype=torch.float64)
    mean, error = ratio(sums, counts)
    return float(mean), float(error)


def margin(error: float, windows: int) -> float:
    """What a mean difference over windows must be below 0 to be so at one-sided 95 % confidence.

    Args:
        error: standard error of the difference.
        windows: number of windows.
    """
    return student_t_quantile(windows - 1, _LEVEL) * error
