"""The next factor of every head from what passes have measured: Newton's step, corrected."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["next_factor", "predicted"]

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
    """The value to expect at the next factor, by the same line that chose it."""
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
