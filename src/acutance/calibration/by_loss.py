"""Factors of every head that lower the loss: a few gradient steps, stopped by other windows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.gradients import LossGradients, WindowChoice, choose_windows, joined
from acutance.calibration.identity import Identity
from acutance.calibration.law import Law
from acutance.calibration.loss_table import (
    Advance,
    Reading,
    Saving,
    Unit,
    difference,
    margin,
    mean_gradient,
    mean_loss,
    read_windows,
    split_units,
)
from acutance.calibration.losses import AnyLoss
from acutance.calibration.result import (
    HeadSlope,
    LossCalibration,
    beyond_noise,
    head_records,
)
from acutance.calibration.windows import AnyBatches
from acutance.scaling import Window
from acutance.shapes import check_flag

__all__ = ["loss_slopes"]

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
