"""Laws from fitted factors: a table that goes on by its family, or a family of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from acutance.calibration.families import FamilyFit, Resemblance
from acutance.scaling import ClipLogN, HeadTable, LogN, Scaling, SqrtLogN, SSMax

__all__ = ["FITTED", "extended_table", "family_scalings", "plain_table"]

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
