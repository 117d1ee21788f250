"""Which law of n a head's factors resemble, told by the errors of the fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["FAMILIES", "FamilyFit", "Resemblance", "resemble"]

#: Families by name, with the function that is linear in its two parameters.
FAMILIES = {
    "constant": "a",
    "sqrt_log_n": "√(a + b log n)",
    "log_n": "a + b log n",
    "n": "a + b n",
}
#: A family this much worse in χ² + 2 (parameters) than the best is told apart from it.
_CLEAR = 4.0
#: Errors are taken to be at least this share of a factor: what Newton steps leave.
_FLOOR = 0.01

Array = NDArray[np.float64]


@dataclass(frozen=True)
class FamilyFit:
    """One family fitted to a head's factors.

    Attributes:
        name: of the family.
        a: constant parameter.
        b: growth; 0 for the constant.
        b_error: its standard error.
        error: root mean square of the relative error of the factors.
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
    """What a head's factors look like.

    Attributes:
        name: the family, ``"undecided"``, or ``"limited"`` where a factor is at its limit, which
            tells nothing of how it would grow.
        best: the family that fits best, told apart or not.
        fits: every family by name; fewer than three lengths leave only the constant and log n.
        candidates: families that cannot be told apart from the best.
    """

    name: str
    best: str
    fits: dict[str, FamilyFit]
    candidates: tuple[str, ...]


def resemble(
    lengths: Sequence[int], factors: Sequence[float], errors: Sequence[float]
) -> Resemblance:
    r"""Fit :math:`a`, :math:`\sqrt{a + b \log n}`, :math:`a + b \log n` and :math:`a + b n`.

    Each is what a kind of logits needs: an exponential tail, normal logits, one match above a
    narrow bulk, logits that are uniform on an interval.

    Args:
        lengths: n of each factor, rising.
        factors: positive.
        errors: their standard errors; NaN counts as none.

    Returns:
        The best by χ² + 2 (parameters), ``"undecided"`` where another is within 4 of it, where
        two lengths, which every growing family goes through, leave nothing to tell, and where
        only three speak for n.

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
    """Weighted least squares; the square root is linear in its square."""
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
