"""The score scale for a target entropy at initialisation, and a trained scale within bounds."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaincinv
from torch import Tensor

from acutance import theory
from acutance.rowstats.gaussian import expected_entropy
from acutance.scaling import HeadTable, LearnedTemperature
from acutance.scaling.base import Rows
from acutance.shapes import check_count, check_number

__all__ = ["ClampedTemperature", "clamp_inward", "initial_scale"]


class _ClampInward(torch.autograd.Function):
    """Clamp, with a gradient that is zero only where a descent step would go further outside."""

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
    """Clamp, with a gradient that is zero only where a descent step would go further outside.

    Example:
        >>> x = torch.tensor([2.0, 2.0], requires_grad=True)
        >>> (clamp_inward(x, -1.0, 1.0) * torch.tensor([1.0, -1.0])).sum().backward()
        >>> x.grad
        tensor([1., 0.])
    """
    clamped: Tensor = _ClampInward.apply(x, low, high)  # type: ignore[no-untyped-call]
    return clamped


class ClampedTemperature(LearnedTemperature):
    """:class:`~acutance.scaling.LearnedTemperature` with bounds: a learned factor for each head.

    It is a scaling for ``scaling=`` of :class:`acutance.nn.MultiheadAttention` or
    :func:`acutance.attention`. At a bound, gradients that point inward still apply, so heads do not
    get stuck as with ``clamp``.

    Args:
        num_heads: number of heads, Hq.
        start: initial factor.
        minimum: lowest factor, above 0.
        maximum: highest factor, at least ``minimum``.
        device, dtype: of the parameters.

    Raises:
        TypeError: if a bound is not a number.
        ValueError: if the bounds are not in order, or do not contain ``start``.

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
        """The logarithm of the factors, within the bounds."""
        return clamp_inward(self.log_factor, math.log(self.minimum), math.log(self.maximum))

    def extra_repr(self) -> str:
        """The heads and bounds, for ``print``."""
        return f"num_heads={self.num_heads}, minimum={self.minimum:g}, maximum={self.maximum:g}"


Unit = Literal["nats", "fraction"]
Score = Literal["dot", "cosine"]
_NODES = 64


def initial_scale(
    d: int, n: int, target: float, *, unit: Unit = "nats", score: Score = "dot"
) -> float:
    r"""Factor λ on the scores that gives rows of n keys a target mean entropy at initialisation.

    .. math:: E\, H(\mathrm{softmax}(\lambda\, q \cdot k_j)) = H^*, \qquad q, k_j \sim N(0, I_d)

    Given its query, a row's logits are Gaussian with standard deviation :math:`\lambda \lVert q
    \rVert`; the mean is also over the norm of the query. The usual scale 1/√d gives about log n − ½
    nats for any d. For cosine scores, directions are uniform.

    Args:
        d: width of a head.
        n: number of visible keys, at least 2.
        target: mean entropy H* of a row, above 0 and below log n; with ``unit="fraction"``, its
            share of log n.
        unit: ``"nats"`` or ``"fraction"``.
        score: ``"dot"`` for q · k, ``"cosine"`` for their cosine.

    Returns:
        λ, for ``scale=``. For a layer with a fixed 1/√d, multiply its query projection by λ√d once.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one is out of range.

    Example:
        >>> scale = initial_scale(64, 1024, 4.0)
        >>> round(scale * 64**0.5, 3)
        2.632
        >>> import acutance
        >>> _ = torch.manual_seed(0)
        >>> query, key = torch.randn(2, 64, 1, 1024, 64)
        >>> acutance.row_statistics(query[:, :, :32], key, scale=scale).entropy.mean()
        tensor(4.0)

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613, for entropy along the scale, exact at finite n
        (:func:`acutance.theory.expected_entropy`).
    """
    check_count("d", d, 2 if score == "cosine" else 1)
    check_count("n", n, 2)
    for name, value, kinds in (("unit", unit, Unit), ("score", score, Score)):
        if value not in get_args(kinds):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kinds))}, got {value!r}")
    aim = check_number("target", target, above=0.0)
    entropy = aim * math.log(n) if unit == "fraction" else aim
    if entropy >= math.log(n):
        most = "1" if unit == "fraction" else f"log n = {math.log(n):.6g} nats"
        raise ValueError(
            f"target must be below {most}, which is the entropy of scale 0, got {target!r}"
        )
    if score == "cosine":
        try:
            return float(theory.scale_for_entropy(n, entropy, "cosine", d=d))
        except ValueError:
            raise ValueError(
                "target must be larger: float64 cannot resolve cosines at the scale that it "
                f"needs, got {target!r} for n={n} and d={d}"
            ) from None
    fixed = float(theory.scale_for_entropy(n, entropy)) / math.sqrt(d)
    keys = torch.full((_NODES,), float(n), dtype=torch.float64)
    lengths, weights = _lengths(d)

    def excess(log_scale: float) -> float:
        stds = torch.from_numpy(lengths * math.exp(log_scale))
        return float(expected_entropy(keys, stds).numpy() @ weights) - entropy

    low = high = math.log(fixed)
    while excess(low) < 0:
        low -= 0.5
    while excess(high) > 0:
        high += 0.5
    return math.exp(brentq(excess, low, high, xtol=1e-10)) if low < high else fixed


@cache
def _lengths(d: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Quadrature nodes and weights for the norm of a standard normal vector in d dimensions."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return np.sqrt(2 * gammaincinv(d / 2, (nodes + 1) / 2)), weights / 2
