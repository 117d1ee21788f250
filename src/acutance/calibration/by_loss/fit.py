"""Factors of every head that lower the loss: a few gradient steps, stopped by other windows."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.by_loss.choose_windows import WindowChoice, choose_windows
from acutance.calibration.by_loss.gradients import (
    FactorTable,
    LossGradients,
    Reading,
    attending_layers,
    joined,
)
from acutance.calibration.by_loss.readings import Readings
from acutance.calibration.by_loss.result import HeadSlope, LossCalibration, beyond_noise
from acutance.calibration.by_loss.runs import (
    Advance,
    Run,
    Unit,
    Windows,
    difference,
    margin,
    mean_gradient,
    mean_loss,
    read_windows,
    split_units,
)
from acutance.calibration.fit.measure import knots_of
from acutance.calibration.fit.windows import AnyBatches
from acutance.calibration.identity import Identity
from acutance.calibration.law import Law
from acutance.calibration.losses import AnyLoss
from acutance.capture.find_layers import layer_numbers
from acutance.files import refuse_replacing
from acutance.scaling import Window
from acutance.shapes import check_count, check_flag, check_number

__all__ = ["FAMILIES", "calibrate_by_loss", "loss_slopes"]

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
    window: Window | Sequence[Window] | None = None,
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
        raise ValueError(
            f"target='loss' fits law='table', 'constant' or 'none', got law={law!r:.40}"
        )
    if law == "none" and window is None:
        raise ValueError("law='none' fits no factors: give a window for heads to read through")
    check_number("limit", limit, above=1.0)
    passes = check_count("passes", passes, 2)
    check_flag("windowed", windowed)
    refuse_replacing(save, resume=resume, overwrite=overwrite)
    every = check_count("save_every", save_every, 1)
    windows = read_windows(model, batches, lengths, loss)
    fitting, stopping = split_units(windows)
    choice = None
    if window is not None:
        choices = [window] if isinstance(window, Window) else list(window)
        if not choices or not all(isinstance(one, Window) for one in choices):
            raise TypeError(f"window must be a Window or a list of them, got {window!r:.60}")
        state = None if save is None else f"{os.fspath(save)}.windows"
        refuse_replacing(state, resume=resume, overwrite=overwrite)
        choice = choose_windows(
            windows, fitting, stopping, choices, passes,
            save=state, save_every=every, resume=resume, advance=advance,
        )  # fmt: skip
    run, skipped = None, {} if choice is None else dict(choice.skipped)
    fixed = {} if choice is None else choice.law
    if law != "none":
        more = {"limit": limit} | ({} if choice is None else {"chosen": choice.words})
        run, unscaled = _factor_run(windows, law, windowed, save, every, resume, more, fixed)
        skipped |= unscaled
    return _Job(windows, run, fitting, stopping, passes, limit, advance, choice).result(
        law, skipped
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
    refuse_replacing(save, resume=resume, overwrite=overwrite)
    check_flag("windowed", windowed)
    if law not in FAMILIES[:2]:
        raise ValueError(f"law must be 'table' or 'constant', got {law!r:.40}")
    read = read_windows(model, windows, lengths, loss)
    if len(read.units) < 2:
        raise ValueError(f"errors need at least 2 windows, got {len(read.units)}")
    run, _ = _factor_run(read, law, windowed, save, 1, resume, {"slopes": True}, {})

    def slopes() -> list[Reading]:
        zero = torch.zeros(run.gradients.size, dtype=torch.float64)
        return [run.read(unit, zero, advance, 1, 1) for unit in read.units]

    slope, error = mean_gradient(run.running(slopes))
    return _by_head(model, run.gradients, slope, error)


def _factor_run(
    windows: Windows,
    law: str,
    windowed: bool,
    save: str | os.PathLike[str] | None,
    every: int,
    resume: bool,
    more: Mapping[str, Any],
    fixed: Mapping[Any, Window],
) -> tuple[Run[LossGradients], Mapping[str, str]]:
    """What reads the derivatives by factors, and why layers have none.

    Args:
        windows: windows of the text.
        law: a family.
        windowed: also scale layers with a sliding window.
        save: file of the readings, or None.
        every: windows between two writes.
        resume: continue from the file.
        more: further settings that a resumed run must share.
        fixed: windows of heads that stay as they are.
    """
    turn = windows.units[0].turns[-1]
    layers = attending_layers(windows.model, turn, windows.device, windowed)
    knots = knots_of(windows.lengths) if law == "table" else (windows.lengths[-1],)
    gradients = LossGradients(
        windows.model, windows.loss, layers, knots, windowed=windowed, windows=fixed
    )
    settings = {**windows.settings(), "law": law, "windowed": windowed, **more}
    readings = Readings(settings, save, every)
    if resume:
        readings.resume()
    return Run(windows, gradients, readings), layers.skipped


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
    """One fit by gradient steps; each step is decided by earlier readings.

    Args:
        windows: windows of the text.
        run: reads the derivatives by factors; None if there are none.
        fitting: windows that are fitted to.
        stopping: windows that decide.
        passes: largest number of passes.
        limit: bound of the factors.
        advance: progress callback, or None.
        choice: the heads that read through a window; None if there is none.
    """

    def __init__(
        self,
        windows: Windows,
        run: Run[LossGradients] | None,
        fitting: Sequence[Unit],
        stopping: Sequence[Unit],
        passes: int,
        limit: float,
        advance: Advance | None,
        choice: WindowChoice | None,
    ) -> None:
        self._windows, self._run, self._choice = windows, run, choice
        self._fitting, self._stopping = fitting, stopping
        self._passes, self._limit, self._advance = passes, math.log(limit), advance
        self._slopes: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self._before: Sequence[Reading] = () if choice is None else choice.before
        self._after: Sequence[Reading] = () if choice is None else choice.after
        self._done = 1 if choice is None else choice.passes

    def _fit(self, run: Run[LossGradients]) -> Tensor:
        """The best log-factors, (parameters,); all 0 if none lowers the loss beyond noise."""
        zero = torch.zeros(run.gradients.size, dtype=torch.float64)
        first = self._read(run, self._fitting, zero, 1)
        before = self._read(run, self._stopping, zero, 1)
        self._slopes = mean_gradient([*first, *before])
        slope, error = mean_gradient(first)
        free = beyond_noise(slope, error, len(first)).double()
        self._before = self._before or before
        best, best_loss, found = zero, mean_loss(before), before
        self._after = before
        if not bool(free.any()):
            return zero
        rate, adam, values = _RATE, _Adam(len(zero)), zero
        values = self._step(values, adam, slope * free, rate)
        for number in range(2, self._passes + 1):
            for part in self._parts():
                slope, _ = mean_gradient(self._read(run, part, values, number))
                values = self._step(values, adam, slope * free, rate)
            after = self._read(run, self._stopping, values, number)
            self._done = max(self._done, number)
            if mean_loss(after) < best_loss:
                best, best_loss, found = values, mean_loss(after), after
            elif rate < _RATE:
                break
            else:  # from the best again, in smaller steps
                values, rate, adam = best, rate / 2, _Adam(len(zero))
        delta, error_of_it = difference(before, found)
        lower = delta < -margin(error_of_it, len(before))
        if self._choice is None or lower:
            self._after = found
        return best if lower else zero

    def _parts(self) -> list[Sequence[Unit]]:
        """The windows that are fitted to, one part for each step of a pass."""
        steps = min(_STEPS, len(self._fitting))
        return [self._fitting[step::steps] for step in range(steps)]

    def _step(self, values: Tensor, adam: _Adam, gradient: Tensor, rate: float) -> Tensor:
        """Log-factors after one step of Adam with this rate, within the limits."""
        return (values + rate * adam.step(gradient)).clamp(-self._limit, self._limit)

    def _read(
        self, run: Run[LossGradients], units: Sequence[Unit], values: Tensor, number: int
    ) -> list[Reading]:
        """Loss and gradient of each unit at these log-factors, in pass ``number``."""
        return [run.read(unit, values, self._advance, number, self._passes) for unit in units]

    def result(self, family: str, skipped: Mapping[str, str]) -> LossCalibration:
        """Fit, and return the record of the fit.

        Args:
            family: of the factors.
            skipped: why layers were not fitted, by module name.
        """
        run, choice, model = self._run, self._choice, self._windows.model
        scalings: dict[str, Any] = {}
        factors: dict[str, Tensor] = {}
        slopes: tuple[HeadSlope, ...] = ()
        if run is not None:
            values = run.running(lambda: self._fit(run))
            run.gradients.set(values)
            for name, table in run.gradients.tables.items():
                scalings[name] = table.record()
                factors[name] = table.log_factor.detach().double().exp()
            slopes = _by_head(model, run.gradients, *self._slopes)
        delta, error = difference(self._before, self._after)
        law = joined(scalings, {} if choice is None else choice.law)
        return LossCalibration(
            model=Identity.of(model),
            everywhere=None,
            layers=Law.of(model, law).layers if law else (),
            lengths=self._windows.lengths,
            target="loss",
            metric="loss",
            family=family,
            passes=self._done,
            windows=self._windows.counts,
            skipped=dict(skipped),
            slopes=slopes,
            factors=tuple(tuple(factors[one.module][one.head].tolist()) for one in slopes),
            gates=() if choice is None else choice.gates,
            choices=() if choice is None else choice.windows,
            fitted=len(self._fitting),
            stopped=len(self._stopping),
            delta=delta,
            error=error,
            loss=self._windows.loss.words,
            mean_loss=mean_loss(self._before),
        )


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
