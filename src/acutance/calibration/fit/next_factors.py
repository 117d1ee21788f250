"""The factors of the next pass, from everything that earlier passes measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from acutance.calibration.fit.collect import HELD, Target
from acutance.calibration.fit.estimates import LayerValues

__all__ = [
    "ROUNDING",
    "Aim",
    "LayerState",
    "above",
    "aim_of",
    "decide",
    "next_factor",
    "predicted",
    "status_of",
]

#: λ, y and y' of the pass before.
Before: TypeAlias = tuple[Tensor, Tensor, Tensor]
#: A step multiplies a factor by at most this, and divides it by at most 2.
_FARTHEST = 4.0
#: What came counts where it is within this of what the slopes promised, either way.
_TRUSTED = 8.0


def next_factor(
    factor: Tensor,
    value: Tensor,
    slope: Tensor,
    target: Tensor,
    *,
    before: Before | None = None,
    limit: float = 16.0,
) -> Tensor:
    r"""The factors at which values should meet their targets.

    The entropy of normal logits falls as a straight line in λ², so the step is Newton's there:
    :math:`\lambda \leftarrow \lambda \sqrt{1 + 2 (y^* - y) / y'}` with :math:`y' = dy/d\log\lambda`
    measured. From the second pass on y' is corrected by what the last step did, over what the
    slopes at both ends of it promised: that holds what other layers do to this one's input, and
    errors of slopes that are not exact.

    Args:
        factor: λ that was in force, of any shape.
        value: y measured there.
        slope: y' measured there.
        target: y*.
        before: λ, y and y' of the pass before, None in the first.
        limit: factors stay within 1/limit and limit.

    Example:
        >>> scale, n = torch.tensor([1.0]), torch.tensor([4096.0])
        >>> next_factor(scale, n.log() - 0.5, torch.tensor([-1.0]), torch.tensor([6.0]))
        tensor([2.1530])
    """
    slope = _combined(factor, value, slope, before)
    change = 2 * (target - value) / slope
    step = (1 + change.clamp(-0.75, _FARTHEST**2 - 1)).sqrt()
    moved = (factor * step).clamp(1 / limit, limit)
    return torch.where(moved.isfinite() & (slope.abs() > 1e-9), moved, factor)


def predicted(
    factor: Tensor,
    value: Tensor,
    slope: Tensor,
    following: Tensor,
    *,
    before: Before | None = None,
) -> Tensor:
    """The value expected at the next factor, from the line by which it was chosen."""
    slope = _combined(factor, value, slope, before)
    grown = ((following / factor).square() - 1) / 2
    return value + slope * grown


def _combined(factor: Tensor, value: Tensor, slope: Tensor, before: Before | None) -> Tensor:
    if before is None:
        return slope
    last, then, there = before
    squares = factor.square() - last.square()
    # the change that the slopes at both ends promise, each as dy/d(λ²)
    promised = squares * (slope / factor.square() + there / last.square()) / 4
    ratio = (value - then) / promised
    moved = (factor / last).log().abs()
    good = (moved > 0.02) & (ratio > 1 / _TRUSTED) & (ratio < _TRUSTED)
    return torch.where(good, slope * ratio, slope)


#: A change is worth making where it is more than this share of the target, and beyond noise.
_WORTH = 0.01
#: Student's quantile that tells noise, at each length: a two-sided test at 5 %. A stricter one
#: leaves heads alone that are far off where the text has few parts.
_LEVEL = 0.975
#: A logit exceeds its bound by more than this share of it; less is rounding.
ROUNDING = 1e-5
#: What exceeds its bound is brought this share below it. Other layers then change a layer's input
#: a little more, which a pass would be needed for each time.
_MARGIN = 5e-4


@dataclass(frozen=True)
class Aim:
    """The target values of one layer.

    Attributes:
        target: the metric.
        wanted: value at each knot, (knots, heads).
        possible: whether rows of so many keys can have it, (knots, heads).
        reference: index of the knot that the target was read at, None where a value was given.
        limit: bound of the factors, either way.
    """

    target: Target
    wanted: Tensor
    possible: Tensor
    reference: int | None
    limit: float

    @property
    def bound(self) -> bool:
        """Whether the target is an upper bound and no value to meet."""
        return self.target.name == "max_logit"


@dataclass(frozen=True)
class LayerState:
    """One pass of one layer: the factors that were in force and what they gave.

    Attributes:
        factors: (knots, heads).
        values: what was measured.
    """

    factors: Tensor
    values: LayerValues

    def measured(self, aim: Aim) -> Tensor:
        """What the target is compared with, (knots, heads)."""
        return self.values.top if aim.bound else self.values.value


def aim_of(
    first: LayerValues, target: Target, value: float | None, reference: int, limit: float
) -> Aim:
    """The aim of a layer, from its values without a law.

    Args:
        first: those values.
        target: the metric.
        value: wanted everywhere; None is each head's own at the reference.
        reference: which bin that is; a layer without rows there takes its shortest.
        limit: bound of the factors.
    """
    at = first.bins.index(reference) if reference in first.bins else 0
    shown = first.top if target.name == "max_logit" else first.value
    wanted = shown[at].clone() if value is None else torch.full_like(shown[0], value)
    wanted = wanted.expand_as(shown).clone()
    low = torch.tensor([target.limits(n)[0] for n in first.knots], dtype=torch.float64)
    high = torch.tensor([target.limits(n)[1] for n in first.knots], dtype=torch.float64)
    # the far ends are only reached by rows that are exactly flat, or exactly one-hot
    possible = (wanted >= low.unsqueeze(1)) & (wanted < high.unsqueeze(1))
    if target.name == "top_weight":
        possible = (wanted > low.unsqueeze(1)) & (wanted <= high.unsqueeze(1))
    if value is None:
        possible[at] = True
    return Aim(target, wanted, possible, at if value is None else None, limit)


def decide(history: Sequence[LayerState], aim: Aim) -> tuple[Tensor, Tensor]:
    """The factors of the next pass and the values to expect under them, (knots, heads) each."""
    last = history[-1]
    if aim.bound:
        return _bounded(last, aim)
    value, wanted = last.values.value, aim.wanted
    straight, slope = _straight(last, aim)
    before = (history[-2].factors, *_straight(history[-2], aim)) if len(history) > 1 else None
    aimed = wanted.log() if aim.target.by_ratio else wanted
    moved = next_factor(last.factors, straight, slope, aimed, before=before, limit=aim.limit)
    active = torch.zeros(wanted.shape[1], dtype=torch.bool)
    for state in history:
        active |= matters(state, aim).any(0)
    free = active.unsqueeze(0) & aim.possible
    if aim.reference is not None:
        free[aim.reference] = False  # it is its own target
    near = (value - wanted).abs() <= 0.001 * wanted.abs()
    moved = torch.where(near, last.factors, moved)
    moved = torch.where(free, moved, 1.0)
    expected = predicted(last.factors, straight, slope, moved, before=before)
    return moved, expected.exp() if aim.target.by_ratio else expected


def _straight(state: LayerState, aim: Aim) -> tuple[Tensor, Tensor]:
    """Value and slope as what is closest to a straight line in λ²."""
    value, slope = state.values.value, state.values.slope
    return (value.log(), slope / value) if aim.target.by_ratio else (value, slope)


def matters(state: LayerState, aim: Aim) -> Tensor:
    """Whether a value is away from its target by more than noise and more than is worth mending.

    Returns:
        (knots, heads) boolean; False where the target is impossible.
    """
    values = state.values
    away = (state.measured(aim) - aim.wanted).abs()
    if aim.bound:
        return above(state.measured(aim), aim.wanted)
    error = values.estimate.error if aim.reference is None else values.difference(aim.reference)
    noise = error * values.widening(_LEVEL)
    worth = torch.clamp(_WORTH * aim.wanted.abs(), min=aim.target.floor)
    return (away > noise) & (away > worth) & aim.possible


def above(top: Tensor, bound: Tensor) -> Tensor:
    """Where the largest logit exceeds its bound by more than rounding.

    Example:
        >>> above(torch.tensor([7.0, 7.00001, 7.1]), torch.tensor([7.0, 7.0, 7.0]))
        tensor([False, False,  True])
    """
    return top > bound + ROUNDING * bound.abs()


def _bounded(last: LayerState, aim: Aim) -> tuple[Tensor, Tensor]:
    """Factors that bring each bin's largest logit under the bound.

    A row between two knots has a factor between theirs, so both are multiplied by what the bin
    between them lacks: by the lower, where a knot bounds two bins. What is under the bound already
    lacks nothing, however low its neighbours' factors are.
    """
    top = last.values.top
    over = above(top, aim.wanted) & (top > 0) & (aim.wanted > 0)
    lacks = torch.where(over, aim.wanted / top * (1 - _MARGIN), 1.0)
    lacks = torch.minimum(lacks, torch.cat([lacks[1:], lacks[-1:]]))
    need = (last.factors * lacks).clamp(min=1 / aim.limit)
    return need, top * need / last.factors


def status_of(first: LayerState, last: LayerState, aim: Aim) -> list[list[str]]:
    """For each knot and head: held, missed, kept, impossible or limited."""
    measured = last.measured(aim)
    close = (measured - aim.wanted).abs() <= torch.clamp(
        HELD * aim.wanted.abs(), min=aim.target.floor
    )
    if aim.bound:
        close = ~above(measured, aim.wanted)
    kept = (last.factors == 1.0).all(0) & ~matters(first, aim).any(0)
    edge = (last.factors >= aim.limit * (1 - 1e-9)) | (last.factors <= (1 + 1e-9) / aim.limit)
    found = []
    for k in range(measured.shape[0]):
        row = []
        for h in range(measured.shape[1]):
            if not bool(aim.possible[k, h]):
                row.append("impossible")
            elif bool(kept[h]):
                row.append("kept")
            elif bool(close[k, h]):
                row.append("held")
            else:
                row.append("limited" if bool(edge[k, h]) else "missed")
        found.append(row)
    return found
