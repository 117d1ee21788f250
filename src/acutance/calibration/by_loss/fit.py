"""Factors of every head that lower the loss: a few gradient steps, stopped by other windows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import t as student
from torch import Tensor

from acutance.calibration.by_loss.gradients import (
    FactorTable,
    Layers,
    LossGradients,
    Reading,
    attending_layers,
)
from acutance.calibration.by_loss.readings import Readings
from acutance.calibration.by_loss.result import HeadSlope, LossCalibration, significant
from acutance.calibration.fit.passes import knots_of
from acutance.calibration.fit.request import check_positions
from acutance.calibration.fit.windows import (
    AnyBatches,
    Turn,
    batches_by_length,
    check_lengths,
    cut,
    digest,
)
from acutance.calibration.identity import Identity
from acutance.calibration.law import Law
from acutance.calibration.losses import AnyLoss, Loss, choose_loss
from acutance.capture.find_layers import layer_numbers
from acutance.corpus.texts import model_digest
from acutance.files import refuse_replacing
from acutance.shapes import check_count, check_flag, check_number

__all__ = ["FAMILIES", "calibrate_by_loss", "loss_slopes"]

#: Called after each run of the model: tokens just read, the pass from 1, and passes at most.
Advance = Callable[[int, int, int], None]

#: What ``law`` may be: factors at every length, or one for all lengths.
FAMILIES = ("table", "constant")
#: Every so many windows, one decides when to stop and is not fitted to.
_STOPS = 3
#: Windows that are fitted to, and that decide, at least.
_LEAST = (4, 2)
#: Of the factors that are changed, so many are expected to have no slope.
_BY_CHANCE = 0.1
#: The first rate of Adam's steps in log λ, steps of a pass, and its decays.
_RATE, _STEPS, _MOMENTUM, _SQUARES = 0.05, 4, 0.9, 0.95
#: Level of the one-sided test that the law lowers the loss.
_LEVEL = 0.95


@dataclass(frozen=True)
class _Unit:
    """All batches of one window: the window itself, or one cut of it for each length."""

    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of all batches."""
        return sum(turn.length * turn.groups.numel() for turn in self.turns)


def calibrate_by_loss(
    model: torch.nn.Module,
    batches: AnyBatches | Tensor,
    *,
    lengths: Sequence[int] | None = None,
    loss: AnyLoss | None = None,
    law: str = "table",
    passes: int = 6,
    limit: float = 16.0,
    windowed: bool = False,
    save: str | os.PathLike[str] | None = None,
    save_every: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    advance: Advance | None = None,
) -> LossCalibration:
    """:func:`acutance.calibrate` with ``target="loss"``.

    Raises:
        LossError: if the model has no such loss, or it is not a number.
        ValueError: if there are fewer than six windows, or an argument is out of range.
    """
    if law not in FAMILIES:
        raise ValueError(f"target='loss' fits law='table' or 'constant', got law={law!r:.40}")
    check_number("limit", limit, above=1.0)
    passes = check_count("passes", passes, 2)
    start = _start(
        model, batches, lengths, loss, law, windowed, save, save_every, resume, overwrite,
        {"limit": limit},
    )  # fmt: skip
    units = start.units
    stopping = [unit for index, unit in enumerate(units) if index % _STOPS == _STOPS - 1]
    fitting = [unit for index, unit in enumerate(units) if index % _STOPS != _STOPS - 1]
    if len(fitting) < _LEAST[0] or len(stopping) < _LEAST[1]:
        raise ValueError(
            f"target='loss' needs at least {sum(_LEAST)} windows of {start.places[-1]} tokens, "
            f"{_LEAST[0]} to fit to and {_LEAST[1]} to decide when to stop, got {len(units)}: "
            "give more text, or shorter lengths"
        )
    job = _Job(start, fitting, stopping, passes, limit, advance)
    values = start.running(job.fit)
    return job.result(values)


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
        >>> from acutance.experiments.models import texts
        >>> from acutance.experiments.models.trained import decoder
        >>> code = texts.read(texts.files("held out")).long()
        >>> heads = loss_slopes(decoder(), code[: 4 * 512].view(4, 512), lengths=[128, 512])
        >>> len(heads), heads[0].lengths
        (12, (128, 256, 512))
        >>> min(head.slope[-1] for head in heads) < -0.01  # sharper would help beyond 128
        True
    """
    start = _start(
        model, windows, lengths, loss, law, windowed, save, 1, resume, overwrite, {"slopes": True}
    )
    if len(start.units) < 2:
        raise ValueError(f"errors need at least 2 windows, got {len(start.units)}")

    def run() -> list[Reading]:
        zero = torch.zeros(start.gradients.size, dtype=torch.float64)
        return [start.read(unit, zero, advance, 1, 1) for unit in start.units]

    slope, error = _mean(start.running(run))
    return _by_head(model, start.gradients, slope, error)


# -- what both begin with --------------------------------------------------------------------------


@dataclass
class _Start:
    """A checked request: the windows, what computes gradients on them, and stored results."""

    model: torch.nn.Module
    loss: Loss
    units: list[_Unit]
    places: tuple[int, ...]
    law: str
    layers: Layers
    gradients: LossGradients
    readings: Readings

    def running(self, run: Callable[[], Any]) -> Any:
        """Return ``run()`` with the model prepared; readings are saved even after an interrupt."""
        with self.gradients:
            try:
                return run()
            finally:
                self.readings.save()

    def read(
        self, unit: _Unit, values: Tensor, advance: Advance | None, number: int, most: int
    ) -> Reading:
        """Loss and gradient of one unit at given factors, from the file or computed.

        Args:
            unit: the window.
            values: log-factors, (parameters,).
            advance: progress callback; None calls nothing.
            number: number of this pass, for the callback.
            most: largest number of passes, for the callback.
        """

        def make() -> Reading:
            parts = [self.gradients.read(self._batch(turn), values) for turn in unit.turns]
            return Reading(
                sum(part.loss for part in parts),
                sum(part.count for part in parts),
                torch.stack([part.gradient for part in parts]).sum(0),
            )

        reading = self.readings.get(make)
        if advance is not None:
            advance(unit.tokens, number, most)
        return reading

    def _batch(self, turn: Turn) -> Mapping[str, Any]:
        """A batch as keyword arguments of the model, on its device."""
        batch = turn.batch if isinstance(turn.batch, Mapping) else {"input_ids": turn.batch}
        device = self.gradients.device
        return {
            name: part.to(device) if isinstance(part, Tensor) else part
            for name, part in batch.items()
        }


def _start(
    model: torch.nn.Module,
    batches: AnyBatches | Tensor,
    lengths: Sequence[int] | None,
    loss: AnyLoss | None,
    law: str,
    windowed: bool,
    save: str | os.PathLike[str] | None,
    save_every: int,
    resume: bool,
    overwrite: bool,
    more: Mapping[str, Any],
) -> _Start:
    """Check the arguments of :func:`calibrate_by_loss` or :func:`loss_slopes`; resume a file.

    ``more`` are further settings that a resumed run must share.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if resume and save is None:
        raise ValueError("resume needs save, the file to continue from, got save=None")
    if save is not None:
        refuse_replacing(save, resume=resume, overwrite=overwrite)
    check_flag("windowed", windowed)
    every = check_count("save_every", save_every, 1)
    chosen = choose_loss(model, loss)
    found = batches_by_length(batches.split(1) if isinstance(batches, Tensor) else batches)
    places = check_lengths(lengths, found)
    check_positions(model, places)
    # a causal model's long windows have the short ones inside
    units = _units(found, places if chosen.reads_all else places[-1:])
    device = next((part.device for part in model.parameters()), None)
    layers = attending_layers(model, units[0].turns[-1], device, windowed)
    knots = knots_of(places) if law == "table" else (places[-1],)
    gradients = LossGradients(model, chosen, layers, knots, windowed=windowed)
    settings = {
        "model": model_digest(model),
        "text": digest([turn for unit in units for turn in unit.turns]),
        "loss": chosen.words,
        "lengths": list(places),
        "law": law,
        "windowed": windowed,
        "dtype": str(next((part.dtype for part in model.parameters()), None)),
        **more,
    }
    readings = Readings(settings, save, every)
    if resume:
        readings.resume()
    start = _Start(model, chosen, units, places, law, layers, gradients, readings)
    if not len(readings):
        chosen.check(model, start._batch(units[0].turns[-1]))
    return start


def _units(found: Mapping[int, list[Any]], places: Sequence[int]) -> list[_Unit]:
    """The windows in the order of the text, each with its batches at every length.

    Args:
        found: batches by length, under 0 if they are to be cut.
        places: lengths, ascending.
    """
    if 0 in found:
        cuts = [cut({0: [batch]}, places) for batch in found[0]]
        return [_Unit(tuple(turns)) for turns in cuts if turns]
    count = len(found[places[-1]])
    parts: list[list[Turn]] = [[] for _ in range(count)]
    for length in places:
        for index, batch in enumerate(found[length]):
            where = index * count // len(found[length])
            parts[where] += cut({length: [batch]}, [length])
    return [_Unit(tuple(turns)) for turns in parts]


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


class _Job:
    """One fit by gradient steps; each step is decided by earlier readings."""

    def __init__(
        self,
        start: _Start,
        fitting: Sequence[_Unit],
        stopping: Sequence[_Unit],
        passes: int,
        limit: float,
        advance: Advance | None,
    ) -> None:
        self._start, self._fitting, self._stopping = start, fitting, stopping
        self._passes, self._limit, self._advance = passes, math.log(limit), advance
        self._slopes: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self._differences: tuple[float, float] = (0.0, 0.0)
        self._mean_loss, self._done = 0.0, 1

    def fit(self) -> Tensor:
        """The best log-factors, (parameters,); all 0 if none lowers the loss beyond noise."""
        zero = torch.zeros(self._start.gradients.size, dtype=torch.float64)
        first = self._read(self._fitting, zero, 1)
        before = self._read(self._stopping, zero, 1)
        self._slopes = _mean([*first, *before])
        slope, error = _mean(first)
        quotient = (slope / error).abs().nan_to_num(0.0)
        p = torch.as_tensor(2 * student.sf(quotient.numpy(), len(first) - 1))
        free = significant(p, _BY_CHANCE).double()
        self._mean_loss = best_loss = _loss(before)
        best, found = zero, before
        if not bool(free.any()):
            return zero
        rate, adam, values = _RATE, _Adam(len(zero)), zero
        values = self._step(values, adam, slope * free, rate)
        for number in range(2, self._passes + 1):
            for part in self._parts():
                slope, _ = _mean(self._read(part, values, number))
                values = self._step(values, adam, slope * free, rate)
            after = self._read(self._stopping, values, number)
            self._done = number
            if _loss(after) < best_loss:
                best, best_loss, found = values, _loss(after), after
            elif rate < _RATE:
                break
            else:  # from the best again, in smaller steps
                values, rate, adam = best, rate / 2, _Adam(len(zero))
        self._differences = _difference(before, found)
        delta, error_of_it = self._differences
        enough = float(student.ppf(_LEVEL, len(before) - 1)) * error_of_it
        return best if delta < -enough else zero

    def _parts(self) -> list[Sequence[_Unit]]:
        """The windows that are fitted to, one part for each step of a pass."""
        steps = min(_STEPS, len(self._fitting))
        return [self._fitting[step::steps] for step in range(steps)]

    def _step(self, values: Tensor, adam: _Adam, gradient: Tensor, rate: float) -> Tensor:
        """Log-factors after one step of Adam with this rate, within the limits."""
        return (values + rate * adam.step(gradient)).clamp(-self._limit, self._limit)

    def _read(self, units: Sequence[_Unit], values: Tensor, number: int) -> list[Reading]:
        """Loss and gradient of each unit at these log-factors, in pass ``number``."""
        return [
            self._start.read(unit, values, self._advance, number, self._passes) for unit in units
        ]

    def result(self, values: Tensor) -> LossCalibration:
        """The record of the fit."""
        start = self._start
        law: dict[Any, Any] = {}
        factors: dict[str, Tensor] = {}
        start.gradients.set(values)
        for name, table in start.gradients.tables.items():
            law[name] = table.record()
            factors[name] = table.log_factor.detach().double().exp()
        slopes = _by_head(start.model, start.gradients, *self._slopes)
        delta, error = self._differences
        counts: dict[int, int] = {}
        for unit in start.units:
            for turn in unit.turns:
                counts[turn.length] = counts.get(turn.length, 0) + turn.groups.numel()
        return LossCalibration(
            model=Identity.of(start.model),
            everywhere=None,
            layers=Law.of(start.model, law).layers,
            lengths=start.places,
            target="loss",
            metric="loss",
            family=start.law,
            passes=self._done,
            windows=counts,
            skipped=dict(start.layers.skipped),
            slopes=slopes,
            factors=tuple(tuple(factors[one.module][one.head].tolist()) for one in slopes),
            fitted=len(self._fitting),
            stopped=len(self._stopping),
            delta=delta,
            error=error,
            loss=start.loss.words,
            mean_loss=self._mean_loss,
        )


def _loss(readings: Sequence[Reading]) -> float:
    """Mean loss over the predictions of several windows, in nats."""
    return sum(one.loss for one in readings) / sum(one.count for one in readings)


def _mean(readings: Sequence[Reading]) -> tuple[Tensor, Tensor]:
    """Derivatives of the mean loss by each log-factor, and their standard errors over windows."""
    gradients = torch.stack([one.gradient for one in readings])
    counts = torch.tensor([float(one.count) for one in readings], dtype=torch.float64)
    return _ratio(gradients, counts)


def _ratio(sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over windows of ``sums`` divided by that of ``counts``, and its standard error.

    ``sums`` is (windows, ...) and ``counts`` (windows,).
    """
    total, number = counts.sum(), len(counts)
    mean = sums.sum(0) / total
    away = (sums - mean * counts.view(-1, *[1] * (sums.dim() - 1))).square().sum(0)
    return mean, (away * number / max(1, number - 1)).sqrt() / total


def _difference(before: Sequence[Reading], after: Sequence[Reading]) -> tuple[float, float]:
    """Mean loss after minus before on the same windows, with its standard error."""
    sums = torch.tensor([b.loss - a.loss for a, b in zip(before, after, strict=True)]).double()
    counts = torch.tensor([float(one.count) for one in before], dtype=torch.float64)
    mean, error = _ratio(sums, counts)
    return float(mean), float(error)


def _by_head(
    model: torch.nn.Module, gradients: LossGradients, slope: Tensor, error: Tensor
) -> tuple[HeadSlope, ...]:
    """The slopes (parameters,) as one record for each head, in model order."""
    tables: dict[str, FactorTable] = gradients.tables
    numbers = layer_numbers(model, list(tables))
    parts = zip(tables, gradients.split(slope), gradients.split(error), strict=True)
    found = [
        HeadSlope(
            numbers.get(name, index),
            head,
            name,
            tables[name].lengths,
            tuple(mine[head].tolist()),
            tuple(theirs[head].tolist()),
        )
        for index, (name, mine, theirs) in enumerate(parts)
        for head in range(len(mine))
    ]
    return tuple(sorted(found, key=lambda one: (one.layer, one.head)))
