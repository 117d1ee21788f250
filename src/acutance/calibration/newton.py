"""The next factor of every head from what passes have measured: Newton's step, then the secant."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["next_factor", "predicted"]

#: A step multiplies a factor by at most this, and divides it by at most 2.
_FARTHEST = 4.0
#: The secant counts where it is within this of Newton's slope, either way.
_TRUSTED = 8.0


def next_factor(
    factor: Tensor,
    value: Tensor,
    slope: Tensor,
    target: Tensor,
    *,
    before: tuple[Tensor, Tensor] | None = None,
    limit: float = 16.0,
) -> Tensor:
    r"""The factors at which values should meet their targets.

    The entropy of normal logits falls as a straight line in λ², so the step is Newton's there:
    :math:`\lambda \leftarrow \lambda \sqrt{1 + 2 (y^* - y) / y'}` with :math:`y' = dy/d\log\lambda`
    measured. From the second pass on the slope between the last two passes takes its place where
    the two agree within reason: it also holds what other layers do to this one's input.

    Args:
        factor: λ that was in force, of any shape.
        value: y measured there.
        slope: y' measured there.
        target: y*.
        before: λ and y of the pass before, None in the first.
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
    before: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The value to expect at the next factor, by the same line that chose it."""
    slope = _combined(factor, value, slope, before)
    grown = ((following / factor).square() - 1) / 2
    return value + slope * grown


def _combined(
    factor: Tensor, value: Tensor, slope: Tensor, before: tuple[Tensor, Tensor] | None
) -> Tensor:
    if before is None:
        return slope
    last, then = before
    squares = factor.square() - last.square()
    secant = 2 * factor.square() * (value - then) / squares
    ratio = secant / slope
    moved = (factor / last).log().abs()
    good = (moved > 0.02) & (ratio > 1 / _TRUSTED) & (ratio < _TRUSTED)
    return torch.where(good, secant, slope)
