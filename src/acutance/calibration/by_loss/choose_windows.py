"""Which heads read through a window: proposed by gates, decided by the loss of other windows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.by_loss.gates import Alternative, GateGradients
from acutance.calibration.by_loss.result import GateSlope, beyond_noise, head_records
from acutance.calibration.fit.windows import AnyBatches
from acutance.calibration.loss_table import (
    Advance,
    Reading,
    Saving,
    Unit,
    Windows,
    difference,
    margin,
    mean_loss,
    read_windows,
)
from acutance.calibration.losses import AnyLoss
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
    gates = _by_gate(windows.model, gradients, *first)
    law = gradients.law(best)
    return WindowChoice(tuple(choices), law, gates, before, after, number, gradients.skipped)


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
    return _by_gate(model, gradients, *slopes)


def _by_gate(
    model: torch.nn.Module, gradients: GateGradients, *numbers: Tensor
) -> tuple[GateSlope, ...]:
    """Derivatives, errors and costs, (gates, alternatives) each, as one record for each gate."""
    places = [(name, head) for name, gates in gradients.gates.items() for head in range(gates)]
    return head_records(GateSlope, model, places, *numbers)


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
