"""Which law of n a head's factors resemble, and the law that is fitted to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acutance.scaling import ClipLogN, HeadTable, LogN, Scaling, SqrtLogN, SSMax

__all__ = [
    "FAMILIES",
    "FITTED",
    "FamilyFit",
    "Resemblance",
    "extended_table",
    "family_scalings",
    "plain_table",
    "resemble",
]

#: Families by name, with the function that is linear in its two parameters.
FAMILIES = {
    "constant": "a",
    "sqrt_log_n": "√(a + b log n)",
    "log_n": "a + b log n",
    "n": "a + b n",
}
#: A family this much worse in χ² + 2 (parameters) than the best is distinguished from it.
_CLEAR = 4.0
#: Errors are taken to be at least this share of a factor: what Newton steps leave.
_FLOOR = 0.01

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
    b: float
    b_error: float
    error: float
    score: float

    def __call__(self, n: float) -> float:
        """The factor at n, not below 0."""
        if self.name == "n":
            return max(0.0, self.a + self.b * n)
        linear = self.a + self.b * math.log(n)
        if self.name == "sqrt_log_n":
            return math.sqrt(max(0.0, linear))
        return max(0.0, linear)


@dataclass(frozen=True)
class Resemblance:
    """Which family of functions of n a head's factors resemble.

    Attributes:
        name: the family; ``"undecided"`` if several fit; ``"limited"`` if a factor is at its limit,
            so that its growth is unknown.
        best: the family that fits best, even if undecided.
        fits: every fitted family by name; with fewer than three lengths only constant and log n.
        candidates: the families that cannot be distinguished from the best.
    """

    name: str
    best: str
    fits: dict[str, FamilyFit]
    candidates: tuple[str, ...]


def resemble(
    lengths: Sequence[int], factors: Sequence[float], errors: Sequence[float]
) -> Resemblance:
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
        >>> found = resemble(n, [math.sqrt(1 + 2 * math.log(m / 64)) for m in n], [0.01] * 5)
        >>> found.name, round(found.fits["sqrt_log_n"].b, 3)
        ('sqrt_log_n', 2.0)
    """
    n = np.asarray(lengths, np.float64)
    y = np.asarray(factors, np.float64)
    s = np.nan_to_num(np.asarray(errors, np.float64), nan=0.0, posinf=1e6)
    s = np.hypot(s, _FLOOR * y)
    fits = {"constant": _fit("constant", n, y, s)}
    if len(n) >= 2:
        fits["log_n"] = _fit("log_n", n, y, s)
    if len(n) >= 3:
        fits["sqrt_log_n"] = _fit("sqrt_log_n", n, y, s)
        fits["n"] = _fit("n", n, y, s)
    best = min(fits.values(), key=lambda fit: fit.score)
    near = tuple(fit.name for fit in fits.values() if fit.score < best.score + _CLEAR)
    growing = len(n) < 3 and best.name != "constant"
    if len(n) < 4 and best.name == "n":  # it runs away where three lengths bend by chance
        near = tuple(dict.fromkeys((*near, "log_n")))
    decided = len(near) == 1 and not growing and len(n) >= 2
    return Resemblance(best.name if decided else "undecided", best.name, fits, near)


def _fit(name: str, n: Array, y: Array, s: Array) -> FamilyFit:
    """Fit one family by weighted least squares to factors y at n with standard errors s."""
    power = 2 if name == "sqrt_log_n" else 1
    target, weight = y**power, 1 / (power * y ** (power - 1) * s)
    if name == "constant":
        design = np.ones((len(n), 1))
    else:
        growth = n if name == "n" else np.log(n)
        design = np.stack([np.ones_like(n), growth], 1)
    middle = design.mean(0) * (np.arange(design.shape[1]) > 0)  # n beside 1 loses digits
    shifted = design - middle
    system = shifted * weight[:, None]
    found, *_ = np.linalg.lstsq(system, target * weight, rcond=None)
    covariance = np.linalg.pinv(system.T @ system)
    b = float(found[1]) if len(found) > 1 else 0.0
    a = float(found[0]) - b * (float(middle[1]) if len(found) > 1 else 0.0)
    b_error = math.sqrt(max(0.0, float(covariance[1, 1]))) if len(found) > 1 else 0.0
    made = FamilyFit(name, a, b, b_error, 0.0, 0.0)
    predicted = np.array([made(float(m)) for m in n])
    away = predicted - y
    score = float(((away / s) ** 2).sum()) + 2 * design.shape[1]
    error = float(np.sqrt(np.mean((away / y) ** 2)))
    return FamilyFit(name, a, b, b_error, error, score)


#: What ``law=`` may be.
FITTED = ("table", "constant", "ssmax", "log_n", "sqrt_log_n", "clip_log_n")
#: Octaves beyond the largest calibrated length that a table holds.
_BEYOND = 6


def plain_table(knots: Sequence[int], factors: Tensor) -> Scaling:
    """The factors (knots, heads) as a law of the calibrated lengths."""
    return HeadTable(factors.T.contiguous(), lengths=tuple(knots))


def extended_table(
    knots: Sequence[int], factors: Tensor, like: Sequence[Resemblance], limit: float
) -> Scaling:
    """The factors (knots, heads) as a table that each head's growth family extends to longer n.

    The table goes up to 64 times the last knot, with factors between 1/``limit`` and ``limit``. A
    family is rescaled to pass through the last factor. An undecided head is extended by the best
    fit among the families that grow no faster than log n.
    """
    last = knots[-1]
    lengths = (*knots, *(last << step for step in range(1, _BEYOND + 1)))
    columns = []
    for head, found in enumerate(like):
        end = float(factors[-1, head])
        fit = _going_on(found)
        at_last = fit(last)
        further = []
        for n in lengths[len(knots) :]:
            grown = end * fit(n) / at_last if at_last > 0 else end
            further.append(min(max(grown, 1 / limit), limit))
        columns.append([*factors[:, head].tolist(), *further])
    return HeadTable(columns, lengths=lengths)


def _going_on(found: Resemblance) -> FamilyFit:
    """The family that continues a head's factors beyond the last length."""
    if found.name == "limited":  # it stays at its last factor
        return found.fits["constant"]
    if found.name != "undecided":
        return found.fits[found.name]
    slow = [fit for name, fit in found.fits.items() if name != "n"]
    return min(slow, key=lambda fit: fit.score)


def family_scalings(
    law: str, knots: Sequence[int], factors: Tensor, errors: Tensor, reference: int
) -> Scaling | dict[int, Scaling]:
    """Fit the law of a given name to one layer's factors, (knots, heads).

    The law is one of :data:`FITTED` but "table". ``errors`` are the factors' standard errors, and
    ``reference`` is the length at which "sqrt_log_n" and "clip_log_n" have the factor 1.

    Returns:
        One scaling for the layer or, for "log_n", one for each head.
    """
    n = torch.tensor(knots, dtype=torch.float64)
    x = n.log().unsqueeze(1)
    sigma = torch.hypot(torch.nan_to_num(errors, nan=0.0), 0.005 * factors)
    weight = sigma**-2
    if law == "constant":
        middle = (weight * factors).sum(0) / weight.sum(0)
        return HeadTable(middle)
    if law == "ssmax":
        if len(knots) == 1:
            return SSMax(s=[0.0] * factors.shape[1], bias=factors[0].tolist())
        total = weight.sum(0)
        mx, my = (weight * x).sum(0) / total, (weight * factors).sum(0) / total
        s = (weight * (x - mx) * (factors - my)).sum(0) / (weight * (x - mx) ** 2).sum(0)
        return SSMax(s=s.tolist(), bias=(my - s * mx).tolist())
    if law == "log_n":
        c = (weight * x * factors).sum(0) / (weight * x * x).sum(0)
        return {
            head: LogN(base=math.exp(1 / float(one)), n_min=knots[0]) for head, one in enumerate(c)
        }
    if law == "sqrt_log_n":
        growth = x - math.log(reference)
        squared_weight = weight / (4 * factors**2)
        b = (squared_weight * growth * (factors**2 - 1)).sum(0) / (squared_weight * growth**2).sum(
            0
        ).clamp(min=1e-300)
        return SqrtLogN(train_length=reference, gamma=(2 / b.clamp(min=2e-6)).sqrt().tolist())
    return ClipLogN(train_length=reference)
