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
    """The value expected at the next factor, from the line in λ² by which it was chosen.

    Args:
        factor: λ that was applied, of any shape.
        value: y measured there.
        slope: y' = dy/d log λ measured there.
        following: the next λ.
        before: λ, y and y' of the previous pass; None in the first.
    """
    slope = _combined(factor, value, slope, before)
    grown = ((following / factor).square() - 1) / 2
    return value + slope * grown


def _combined(factor: Tensor, value: Tensor, slope: Tensor, before: Before | None) -> Tensor:
    """The slope dy/d log λ, corrected by the change of y since the previous pass.

    It is unchanged where there was no previous pass, λ hardly moved, or the change is implausible.
    """
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
    """What the fit of one layer aims for: a value of the target metric at each knot and head.

    A knot is a number n of visible keys at which a factor is fitted.

    Attributes:
        target: the metric.
        wanted: the metric's desired value, or its upper bound for ``max_logit``, (knots, heads).
        possible: boolean (knots, heads), whether rows of that many keys can reach the value.
        reference: index of the knot whose value without a law is the target; None if a value was
            given.
        limit: factors stay within 1/limit and limit.
    """

    target: Target
    wanted: Tensor
    possible: Tensor
    reference: int | None
    limit: float

    @property
    def bound(self) -> bool:
        """Whether the target is an upper bound (``max_logit``) rather than a value to reach."""
        return self.target.name == "max_logit"


@dataclass(frozen=True)
class LayerState:
    """One layer in one pass over the windows: the factors that were applied and what was measured.

    Attributes:
        factors: factor λ of the logits at each knot (number n of visible keys), (knots, heads).
        values: what was measured under them.
    """

    factors: Tensor
    values: LayerValues

    def measured(self, aim: Aim) -> Tensor:
        """The measured quantity that is compared with the target, (knots, heads).

        For ``max_logit``, an upper bound, it is the largest logit among the rows of each knot:
        those with more visible keys than the previous knot, and at most as many as this one. For
        every other target it is the mean of the metric over rows with as many visible keys as the
        knot.
        """
        return self.values.top if aim.bound else self.values.value


def aim_of(
    first: LayerValues, target: Target, value: float | None, reference: int, limit: float
) -> Aim:
    """The target of a layer's fit, from what was measured in the unchanged model.

    Args:
        first: what was measured; it has one knot (number of visible keys) for each bin with rows.
        target: the metric that is to have a certain value.
        value: that value, at every knot and head (for ``max_logit`` its upper bound); None: each
            head's own value at the reference length.
        reference: index of the bin of the reference length; a layer without rows there takes its
            first bin with rows.
        limit: factors stay between 1/limit and limit.
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
    """Choose the factors of a layer for the next pass.

    Args:
        history: the passes so far, in order; at least one.
        aim: the target values.

    Returns:
        The factors, and the metric expected under them, (knots, heads) each. The factor is 1 where
        the target is impossible, at the knot that is its own target, and for heads that were never
        significantly away from it.
    """
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
    """Value and slope of the metric, or of its logarithm for targets that are straighter in it."""
    value, slope = state.values.value, state.values.slope
    return (value.log(), slope / value) if aim.target.by_ratio else (value, slope)


def matters(state: LayerState, aim: Aim) -> Tensor:
    """Whether a value differs from its target by more than noise and by enough to be corrected.

    Enough is 1 % of the target, or ``target.floor`` if that is more. Noise is a two-sided test at
    5 %. A bound only matters where it is exceeded.

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
    """Whether the largest logit exceeds its bound by more than rounding, boolean.

    Example:
        >>> above(torch.tensor([7.0, 7.00001, 7.1]), torch.tensor([7.0, 7.0, 7.0]))
        tensor([False, False,  True])
    """
    return top > bound + ROUNDING * bound.abs()


def _bounded(last: LayerState, aim: Aim) -> tuple[Tensor, Tensor]:
    """Factors that bring each bin's largest logit under its bound, and the logits expected then.

    A bin holds the rows between two knots, and the factor of such a row lies between those of the
    two knots. So both knots get the reduction that the bin needs, and a knot between two bins gets
    the stronger one. A bin that is under its bound needs none.
    """
    top = last.values.top
    over = above(top, aim.wanted) & (top > 0) & (aim.wanted > 0)
    lacks = torch.where(over, aim.wanted / top * (1 - _MARGIN), 1.0)
    lacks = torch.minimum(lacks, torch.cat([lacks[1:], lacks[-1:]]))
    need = (last.factors * lacks).clamp(min=1 / aim.limit)
    return need, top * need / last.factors


def status_of(first: LayerState, last: LayerState, aim: Aim) -> list[list[str]]:
    """The outcome for each knot and head, as a key of ``STATUSES`` of a calibration's result.

    ``impossible``: no factor reaches the target. ``kept``: the head was left unchanged. ``held``:
    the target is met. ``limited``: it is missed and the factor is at its limit. ``missed``: it is
    missed otherwise.

    Args:
        first: the layer without a law.
        last: the layer under the law.
        aim: the target values.

    Returns:
        A list for each knot, of one word for each head.
    """
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
