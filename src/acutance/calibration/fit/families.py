"""Which function of n a head's factors resemble, and the laws that are fitted to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acutance.scaling import ClipLogN, HeadTable, LogN, Scaling, SqrtLogN, SSMax

#: What ``law=`` may be.
FITTED = ("table", "constant", "ssmax", "log_n", "sqrt_log_n", "clip_log_n")
#: A family this much worse in χ² + 2 (parameters) than the best is distinguished from it.
_CLEAR = 4.0
#: Errors are taken to be at least this share of a factor: what Newton steps leave.
_FLOOR = 0.01
#: Octaves beyond the largest calibrated length that a table holds.
_BEYOND = 6

Array = NDArray[np.float64]


@dataclass(frozen=True)
class FamilyFit:
    """One family of functions of n, fitted to a head's factors.

    Attributes:
        name: ``constant`` (a), ``sqrt_log_n`` (√(a + b log n)), ``log_n`` (a + b log n) or ``n``
            (a + b n).
        a: constant parameter.
        b: growth parameter; 0 for the constant.
        b_error: standard error of ``b``.
        error: root mean square of the relative errors of the factors.
        score: χ² plus twice the number of parameters; lower is better.
    """

    name: str
    a: float
    b: float = 0.0
    b_error: float = 0.0
    error: float = 0.0
    score: float = 2.0

    def __call__(self, n: float) -> float:
        """The factor at n, not below 0."""
        linear = max(0.0, self.a + self.b * (n if self.name == "n" else math.log(n)))
        return math.sqrt(linear) if self.name == "sqrt_log_n" else linear


@dataclass(frozen=True)
class Growth:
    """Which family of functions of n a head's factors resemble.

    Attributes:
        name: the family; ``"undecided"`` if several fit; ``"limited"`` if a factor is at its limit,
            so that its growth is unknown.
        fits: every fitted family by name; with fewer than three lengths only constant and log n.
        candidates: the families that cannot be distinguished from the best.
    """

    name: str
    fits: dict[str, FamilyFit]
    candidates: tuple[str, ...]

    @classmethod
    def flat(cls, name: str, factor: float) -> Growth:
        """Factors that are all the same, or ``"limited"``: it stays at its last factor."""
        candidates = () if name == "limited" else (name,)
        return cls(name, {"constant": FamilyFit("constant", factor)}, candidates)

    @property
    def beyond(self) -> FamilyFit:
        """The family that continues the factors beyond the last length.

        For undecided heads it is the best one that grows no faster than log n.
        """
        slow = [fit for name, fit in self.fits.items() if name != "n"]
        return self.fits.get(self.name) or min(slow, key=lambda fit: fit.score)


def growth_of(lengths: Sequence[int], factors: Sequence[float], errors: Sequence[float]) -> Growth:
    r"""Fit :math:`a`, :math:`\sqrt{a + b \log n}`, :math:`a + b \log n` and :math:`a + b n`.

    They suit, in this order, logits with an exponential tail, normal logits, one match above a
    narrow bulk, and logits that are uniform on an interval. With fewer than three lengths only
    :math:`a` and :math:`a + b \log n` are fitted.

    Args:
        lengths: n of each factor, rising.
        factors: positive.
        errors: their standard errors; NaN means 0. At least 1 % of the factor is used.

    Returns:
        The family with the least χ² + 2 × its number of parameters, or ``"undecided"`` if another
        is within 4 of it, if there are fewer than three lengths, or if :math:`a + b n` is the
        best of three lengths.

    Example:
        >>> n = [64, 128, 256, 512, 1024]
        >>> growth = growth_of(n, [math.sqrt(1 + 2 * math.log(m / 64)) for m in n], [0.01] * 5)
        >>> growth.name, round(growth.fits["sqrt_log_n"].b, 3)
        ('sqrt_log_n', 2.0)
    """
    n, y, s = (np.asarray(numbers, np.float64) for numbers in (lengths, factors, errors))
    s = np.hypot(np.nan_to_num(s, nan=0.0, posinf=1e6), _FLOOR * y)
    names = ("constant", "log_n", "sqrt_log_n", "n")[: 4 if len(n) >= 3 else len(n)]
    fits = {name: _fit(name, n, y, s) for name in names}
    best = min(fits.values(), key=lambda fit: fit.score)
    near = [name for name, fit in fits.items() if fit.score < best.score + _CLEAR]
    if best.name == "n" and len(n) < 4 and "log_n" not in near:
        near.append("log_n")  # a + b n runs away where three lengths bend by chance
    decided = len(near) == 1 and (len(n) > 2 or (len(n) == 2 and best.name == "constant"))
    return Growth(best.name if decided else "undecided", fits, tuple(near))


def _fit(name: str, n: Array, y: Array, s: Array) -> FamilyFit:
    """Fit one family by weighted least squares to factors y at n with standard errors s."""
    power = 2 if name == "sqrt_log_n" else 1
    weight = 1 / (power * y ** (power - 1) * s)
    x = n if name == "n" else np.log(n)
    middle = x.mean()  # x beside 1 loses digits
    design = np.stack([np.ones_like(x), x - middle], 1)[:, : 1 if name == "constant" else 2]
    system = design * weight[:, None]
    a, b = [*np.linalg.lstsq(system, y**power * weight, rcond=None)[0], 0.0][:2]
    variance = np.linalg.pinv(system.T @ system)[-1, -1] if name != "constant" else 0.0
    bare = FamilyFit(name, float(a - b * middle), float(b), math.sqrt(max(0.0, variance)))
    away = np.array([bare(float(m)) for m in n]) - y
    score = float(((away / s) ** 2).sum()) + 2 * design.shape[1]
    error = float(np.sqrt(np.mean((away / y) ** 2)))
    return FamilyFit(name, bare.a, bare.b, bare.b_error, error, score)


def extended_table(
    knots: Sequence[int], factors: Tensor, growths: Sequence[Growth], limit: float
) -> Scaling:
    """The factors (knots, heads) as a table that each head's growth family extends to longer n.

    The table goes up to 64 times the last knot, with factors between 1/``limit`` and ``limit``. A
    family is rescaled to pass through the last factor.
    """
    last = knots[-1]
    longer = [last << step for step in range(1, _BEYOND + 1)]
    rows = []
    for column, growth in zip(factors.T.tolist(), growths, strict=True):
        fit, end = growth.beyond, column[-1]
        scale = end / fit(last) if fit(last) > 0 else 0.0
        grown = [scale * fit(n) if scale else end for n in longer]
        rows.append([*column, *(min(max(factor, 1 / limit), limit) for factor in grown)])
    return HeadTable(rows, lengths=(*knots, *longer))


def family_scaling(
    law: str, knots: Sequence[int], factors: Tensor, errors: Tensor, reference: int
) -> Scaling | dict[int, Scaling]:
    """Fit the law of a given name to one layer's factors, (knots, heads).

    The law is one of :data:`FITTED` but "table". ``errors`` are the factors' standard errors, and
    ``reference`` is the length at which "sqrt_log_n" and "clip_log_n" have the factor 1.

    Returns:
        One scaling for the layer or, for "log_n", one for each head.
    """
    x = torch.tensor(knots, dtype=torch.float64).log().unsqueeze(1)
    weight = torch.hypot(torch.nan_to_num(errors, nan=0.0), 0.005 * factors) ** -2
    if law == "clip_log_n":
        return ClipLogN(train_length=reference)
    if law == "constant":
        return HeadTable((weight * factors).sum(0) / weight.sum(0))
    if law == "log_n":
        slopes = (weight * x * factors).sum(0) / (weight * x * x).sum(0)
        return {
            head: LogN(base=math.exp(1 / slope), n_min=knots[0])
            for head, slope in enumerate(slopes.tolist())
        }
    if law == "sqrt_log_n":
        x, weight = x - math.log(reference), weight / (4 * factors**2)
        total = (weight * x**2).sum(0).clamp(min=1e-300)
        slope = (weight * x * (factors**2 - 1)).sum(0) / total
        return SqrtLogN(train_length=reference, gamma=(2 / slope.clamp(min=2e-6)).sqrt().tolist())
    x_mean, mean = ((weight * part).sum(0) / weight.sum(0) for part in (x, factors))
    total = (weight * (x - x_mean) ** 2).sum(0).clamp(min=1e-12)  # 0 at a single length
    s = (weight * (x - x_mean) * (factors - mean)).sum(0) / total
    return SSMax(s=s.tolist(), bias=(mean - s * x_mean).tolist())
