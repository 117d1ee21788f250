"""A trained factor for each head with bounds that it can leave again."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from acutance.scaling import HeadTable, LearnedTemperature
from acutance.scaling.base import Rows
from acutance.shapes import check_number

__all__ = ["ClampedTemperature", "clamp_inward"]


class _ClampInward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bounds = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,), (low, high), (grad,) = ctx.saved_tensors, ctx.bounds, grads
        outward = ((x >= high) & (grad < 0)) | ((x <= low) & (grad > 0))
        return grad.masked_fill(outward, 0.0), None, None


def clamp_inward(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp whose gradient is zero only where a descent step would lead further out.

    Example:
        >>> x = torch.tensor([2.0, 2.0], requires_grad=True)
        >>> (clamp_inward(x, -1.0, 1.0) * torch.tensor([1.0, -1.0])).sum().backward()
        >>> x.grad
        tensor([1., 0.])
    """
    clamped: Tensor = _ClampInward.apply(x, low, high)  # type: ignore[no-untyped-call]
    return clamped


class ClampedTemperature(LearnedTemperature):
    """:class:`~acutance.scaling.LearnedTemperature`, a factor for each head, between bounds.

    A scaling: give it as ``scaling=`` to :class:`acutance.nn.MultiheadAttention` or
    :func:`acutance.attention`. At a bound the gradient that points inward still counts, so no head
    is stuck there, which it would be with ``clamp``.

    Args:
        num_heads: Hq.
        start: where every factor starts.
        minimum: lowest factor, above 0.
        maximum: highest factor, at least the lowest.
        device, dtype: of the parameters.

    Raises:
        TypeError: if a bound is not a number.
        ValueError: if the bounds are not in order, or do not hold the start.

    Example:
        >>> law = ClampedTemperature(num_heads=2, start=1.0, maximum=4.0)
        >>> with torch.no_grad():
        ...     law.log_factor += 5.0
        >>> law.record()
        HeadTable(factors=(4.0, 4.0), lengths=None)

    Source:
        Liu et al. (2022), arXiv:2111.09883, for a bounded temperature of each head.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        start: float = 1.0,
        minimum: float = 0.1,
        maximum: float = 10.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, start=start, device=device, dtype=dtype)
        self.minimum = check_number("minimum", minimum, above=0.0)
        self.maximum = check_number("maximum", maximum, above=0.0)
        if not self.minimum <= start <= self.maximum:
            raise ValueError(
                f"minimum ≤ start ≤ maximum must hold, got minimum={minimum!r}, "
                f"start={start!r}, maximum={maximum!r}"
            )

    def law(self, rows: Rows) -> Tensor:
        """The learned factor, the same for every n."""
        return self._column(self._clamped(), rows).exp() * torch.ones_like(rows.n)

    def record(self) -> HeadTable:
        """The current factors as a constant scaling."""
        return HeadTable(self._clamped().detach().exp())

    def _clamped(self) -> Tensor:
        return clamp_inward(self.log_factor, math.log(self.minimum), math.log(self.maximum))

    def extra_repr(self) -> str:
        """The heads and bounds, for ``print``."""
        return f"num_heads={self.num_heads}, minimum={self.minimum:g}, maximum={self.maximum:g}"
