"""Which heads read through a window: proposed by gates, decided by the loss of other windows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.by_loss.gates import (
    Alternative,
    GatedLayer,
    GateGradients,
    gated_layers,
)
from acutance.calibration.by_loss.gradients import Reading
from acutance.calibration.by_loss.readings import Readings
from acutance.calibration.by_loss.result import GateSlope, beyond_noise
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
)
from acutance.calibration.fit.windows import AnyBatches
from acutance.calibration.losses import AnyLoss
from acutance.capture.find_layers import layer_numbers
from acutance.files import refuse_replacing
from acutance.scaling import Window

__all__ = ["WindowChoice", "choose_windows", "gate_slopes"]


@dataclass(frozen=True)
class WindowChoice:
    """Which heads read through a window, and what led to it.

    Attributes:
        windows: the windows that heads could choose from.
        law: those chosen, by module name where all heads of a layer have the same, else by
            (name, head).
        gates: for every head, the derivatives of the loss by its gates without any window.
        before: readings of the deciding windows without any window.
        after: the same with the law.
        passes: passes over the windows that were fitted to.
        skipped: why layers have no gates, by module name.
    """

    windows: tuple[Window, ...]
    law: Mapping[Any, Window]
    gates: tuple[GateSlope, ...]
    before: Sequence[Reading]
    after: Sequence[Reading]
    passes: int
    skipped: Mapping[str, str]

    @property
    def words(self) -> str:
        """The choice as text, which a resumed run compares."""
        return ", ".join(f"{place}: {window}" for place, window in self.law.items())


def choose_windows(
    windows: Windows,
    fitting: Sequence[Unit],
    stopping: Sequence[Unit],
    choices: Sequence[Window],
    passes: int,
    *,
    save: str | os.PathLike[str] | None = None,
    save_every: int = 1,
    resume: bool = False,
    advance: Advance | None = None,
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
        save: file of the readings, or None.
        save_every: windows between two writes.
        resume: continue from the file.
        advance: progress callback, or None.

    Raises:
        ValueError: if no layer can have gates.
    """
    run, layers, skipped = _gate_run(windows, choices, False, save, save_every, resume)
    job = _Choice(run, fitting, stopping, passes, advance)
    values = run.running(job.choose)
    slope, error, curvature = job.slopes
    gates = _by_gate(windows.model, layers, run.gradients, slope, error, curvature)
    law = run.gradients.law(values)
    return WindowChoice(tuple(choices), law, gates, job.before, job.after, job.done, skipped)


class _Choice:
    """The passes of one choice; each decision follows from earlier readings."""

    def __init__(
        self,
        run: Run[GateGradients],
        fitting: Sequence[Unit],
        stopping: Sequence[Unit],
        passes: int,
        advance: Advance | None,
    ) -> None:
        self._run, self._fitting, self._stopping = run, fitting, stopping
        self._passes, self._advance = passes, advance
        self.before: list[Reading] = []
        self.after: list[Reading] = []
        self.slopes: tuple[Tensor, Tensor, Tensor] = (torch.empty(0),) * 3
        self.done = 1

    def choose(self) -> Tensor:
        """What each head computes, (gates,): 0 for all its keys, k for window k from 1."""
        gates = sum(self._run.gradients.gates.values())
        best = torch.zeros(gates, dtype=torch.float64)
        self.before = self.after = self._score(best, 1)
        tried = {_key(best)}
        for number in range(1, self._passes + 1):
            slope, error, curvature = self._slopes(best, number)
            if number == 1:
                self.slopes = slope, error, curvature
            self.done = number
            better: list[tuple[Tensor, list[Reading]]] = []
            for values in self._proposals(best, slope, error, number == 1):
                if _key(values) in tried:
                    continue
                tried.add(_key(values))
                after = self._score(values, number)
                delta, error_of_it = difference(self.after, after)
                if delta < -margin(error_of_it, len(after)):
                    better.append((values, after))
                    if number > 1:
                        break
            if not better:
                break
            best, self.after = min(better, key=lambda pair: mean_loss(pair[1]))
        return best

    def _proposals(
        self, now: Tensor, slope: Tensor, error: Tensor, first: bool
    ) -> Iterator[Tensor]:
        """What heads may compute instead, (gates,) each, those most likely to help first.

        Args:
            now: what they compute.
            slope: derivatives by the gates, (gates, windows).
            error: their standard errors.
            first: whether this is the first pass.
        """
        beyond = beyond_noise(slope, error, len(self._fitting)) & (slope < 0)
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

    def _slopes(self, values: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Derivatives by the gates, standard errors and second-order costs at these values."""
        readings = [
            self._run.read(unit, values, self._advance, number, self._passes)
            for unit in self._fitting
        ]
        return _mean(readings, self._run.gradients.alternatives)

    def _score(self, values: Tensor, number: int) -> list[Reading]:
        """Loss of each deciding window at these values."""
        return [
            self._run.read(unit, values, self._advance, number, self._passes, backward=False)
            for unit in self._stopping
        ]


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
    refuse_replacing(save, resume=resume, overwrite=overwrite)
    read = read_windows(model, windows, None, loss)
    if len(read.units) < 2:
        raise ValueError(f"errors need at least 2 windows, got {len(read.units)}")
    run, layers, _ = _gate_run(read, alternatives, key_heads, save, 1, resume)

    def slopes() -> list[Reading]:
        zero = torch.zeros(sum(run.gradients.gates.values()), dtype=torch.float64)
        return [run.read(unit, zero, advance, 1, 1) for unit in read.units]

    return _by_gate(model, layers, run.gradients, *_mean(run.running(slopes), len(alternatives)))


def _gate_run(
    windows: Windows,
    alternatives: Sequence[Window | Alternative],
    key_heads: bool,
    save: str | os.PathLike[str] | None,
    every: int,
    resume: bool,
) -> tuple[Run[GateGradients], Mapping[str, GatedLayer], Mapping[str, str]]:
    """What reads the derivatives by gates, the layers with gates, and why others have none."""
    turn = windows.units[0].turns[-1]
    layers, skipped = gated_layers(windows.model, turn, windows.device)
    gradients = GateGradients(
        windows.model, windows.loss, layers, alternatives, key_heads=key_heads
    )
    words = [str(one) if isinstance(one, Window) else one.words for one in alternatives]
    shown = [
        f"size={one.size},sinks={one.sinks}" if isinstance(one, Window) else one.words
        for one in alternatives
    ]
    settings = {
        **windows.settings(),
        "alternatives": words,
        "key_heads": key_heads,
        "shown": {"alternatives": shown},
    }
    readings = Readings(settings, save, every)
    if resume:
        readings.resume()
    return Run(windows, gradients, readings), layers, skipped


def _mean(readings: Sequence[Reading], alternatives: int) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives, their standard errors, and second-order costs, (gates, alternatives) each."""
    mean, error = mean_gradient(readings)
    slope, curvature = (part.view(-1, alternatives) for part in mean.chunk(2))
    return slope, error.chunk(2)[0].view(-1, alternatives), curvature


def _by_gate(
    model: torch.nn.Module,
    layers: Mapping[str, GatedLayer],
    gradients: GateGradients,
    slope: Tensor,
    error: Tensor,
    curvature: Tensor,
) -> tuple[GateSlope, ...]:
    """Derivatives of all gates and alternatives as one record for each gate, in model order."""
    numbers = layer_numbers(model, list(layers))
    places = [(name, head) for name, gates in gradients.gates.items() for head in range(gates)]
    index = {name: at for at, name in enumerate(layers)}
    parts = [part.tolist() for part in (slope, error, curvature)]
    found = [
        GateSlope(numbers.get(name, index[name]), head, name, *(tuple(part[at]) for part in parts))
        for at, (name, head) in enumerate(places)
    ]
    return tuple(sorted(found, key=lambda one: (one.layer, one.head)))


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
