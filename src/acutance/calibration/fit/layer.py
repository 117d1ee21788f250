"""The fit of one layer: factors that bring a metric of every head to its target, pass by pass."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.fit.families import Growth, extended_table, family_scaling, growth_of
from acutance.calibration.fit.measure import TARGETS, LayerValues
from acutance.calibration.fit.result import HELD, HeadCalibration
from acutance.scaling import HeadTable, Scaling

__all__ = ["LayerFit"]

#: Factors that change by less than this between passes are found.
_SETTLED = 0.002
#: A step multiplies a factor by at most this, and divides it by at most 2.
_FARTHEST = 4.0
#: What came counts where it is within this of what the slopes promised, either way.
_TRUSTED = 8.0
#: A change is worth making where it is more than this share of the target, and beyond noise.
_WORTH = 0.01


class LayerFit:
    r"""The factors of one layer's heads, and what was measured under them.

    The entropy of normal logits falls as a straight line in λ², so the step is Newton's there:
    :math:`\lambda \leftarrow \lambda \sqrt{1 + 2 (y^* - y) / y'}` with :math:`y' = dy/d\log\lambda`
    measured. From the second step on y' is corrected by what the last step did, over what the
    slopes at both ends of it promised: that holds what other layers do to this one's input, and
    errors of slopes that are not exact.

    Args:
        first: what was measured without a law.
        target: name of the metric.
        value: what is wanted of every head; None is each head's own at the reference.
        reference: index of the bin of the reference length; a layer without rows there takes its
            first bin with rows.
        limit: factors stay between 1/limit and limit.

    Attributes:
        first: what was measured without a law.
        values: what was measured last.
        factors: in force there, (knots, heads).
        predicted: values that were expected there under a table.
        wanted: the metric's desired value, (knots, heads).
        possible: whether rows of that many keys can reach it, boolean (knots, heads).
        reference: index of the knot that is its own target; None if a value was given.
    """

    def __init__(
        self, first: LayerValues, target: str, value: float | None, reference: int, limit: float
    ) -> None:
        self._target, self._limit = TARGETS[target], limit
        self.first = self.values = first
        self.factors, self.predicted = torch.ones_like(first.value), first.value
        at = first.bins.index(reference) if reference in first.bins else 0
        self.reference = at if value is None else None
        wanted = first.value[at] if value is None else torch.full_like(first.value[0], value)
        self.wanted = wanted.expand_as(first.value).clone()
        limits = torch.tensor([self._target.limits(n) for n in first.knots], dtype=torch.float64)
        low, high = limits.T.unsqueeze(2)
        # the far ends are only reached by rows that are exactly flat, or exactly one-hot
        self.possible: Tensor = (self.wanted >= low) & (self.wanted < high)
        if target == "top_weight":
            self.possible = (self.wanted > low) & (self.wanted <= high)
        if value is None:
            self.possible[at] = True
        self._active = torch.zeros(first.value.shape[1], dtype=torch.bool)
        self._before: tuple[Tensor, Tensor, Tensor] | None = None  # λ, y and y' of the last step
        self._proposed, self._expected = self.factors, self.predicted
        self._family: Scaling | dict[int, Scaling] | None = None

    # -- steps -------------------------------------------------------------------------------------

    def propose(self) -> bool:
        """Choose the next factors; returns whether they hardly differ from those in force.

        The factor is 1 where the target is impossible, at the knot that is its own target, and for
        heads that were never significantly away from it.
        """
        factors, value = self.factors, self.values.value
        y, slope, wanted = value, self.values.slope, self.wanted
        if self._target.by_ratio:
            y, slope, wanted = value.log(), slope / value, wanted.log()
        measured = factors, y, slope
        slope = self._corrected(y, slope)
        self._before = measured
        step = (1 + (2 * (wanted - y) / slope).clamp(-0.75, _FARTHEST**2 - 1)).sqrt()
        moved = (factors * step).clamp(1 / self._limit, self._limit)
        moved = torch.where(moved.isfinite() & (slope.abs() > 1e-9), moved, factors)
        near = (value - self.wanted).abs() <= 0.001 * self.wanted.abs()
        self._active |= self._matters(self.values).any(0)
        free = self._active & self.possible
        if self.reference is not None:
            free[self.reference] = False
        self._proposed = torch.where(free, torch.where(near, factors, moved), 1.0)
        expected = y + slope * ((self._proposed / factors).square() - 1) / 2
        self._expected = expected.exp() if self._target.by_ratio else expected
        return bool(((self._proposed / factors).log().abs() <= _SETTLED).all())

    def _corrected(self, y: Tensor, slope: Tensor) -> Tensor:
        """The slope dy/d log λ, corrected by the change of y since the previous pass.

        It is unchanged where there was no previous pass, λ hardly moved, or the change is
        implausible.
        """
        if self._before is None:
            return slope
        factors, y_before, slope_before = self._before
        # the change that the slopes at both ends promise, each as dy/d(λ²)
        ends = slope / self.factors.square() + slope_before / factors.square()
        ratio = (y - y_before) / ((self.factors.square() - factors.square()) * ends / 4)
        moved = (self.factors / factors).log().abs() > 0.02
        plausible = (ratio > 1 / _TRUSTED) & (ratio < _TRUSTED)
        return torch.where(moved & plausible, slope * ratio, slope)

    def law(self, module: str, law: str, reference: int) -> dict[Any, Scaling]:
        """What to apply for the proposed factors: their table, or the family fitted to them.

        Args:
            module: name of the layer.
            law: ``"table"`` or the name of the family.
            reference: length at which the family is 1 where a value was given.
        """
        knots, self.factors = self.values.knots, self._proposed
        self.predicted = self._expected
        if law == "table":
            return {module: HeadTable(self.factors.T.contiguous(), lengths=knots)}
        at = reference if self.reference is None else knots[self.reference]
        made = family_scaling(law, knots, self.factors, self.errors(), at)
        self._family, n = made, torch.tensor(knots)
        heads = self.factors.shape[1]
        if isinstance(made, dict):
            columns = [made[head].factor(n, dtype=torch.float64) for head in range(heads)]
            self.factors = torch.stack(columns, 1)
            return {(module, head): scaling for head, scaling in made.items()}
        rows = made.factor(n, dtype=torch.float64)
        self.factors = rows.expand(heads, -1).T if rows.dim() == 1 else rows.T
        return {module: made}

    def add(self, values: LayerValues) -> None:
        """Take what was measured under the law."""
        self.values = values

    def errors(self) -> Tensor:
        """Standard errors of the factors, (knots, heads): those of the values over their slopes."""
        error = self._error(self.values)
        return self.factors * error / self.values.slope.abs().clamp(min=1e-9)

    def _error(self, values: LayerValues) -> Tensor:
        """Standard error of the distance from the target, (knots, heads)."""
        return values.error if self.reference is None else values.difference(self.reference)

    def _matters(self, values: LayerValues) -> Tensor:
        """Whether a value differs from its target by more than noise and enough to be corrected.

        Enough is 1 % of the target, or ``target.floor`` if that is more. Noise is a two-sided test
        at 5 %; a stricter one leaves heads alone that are far off where the text has few parts.
        """
        away = (values.value - self.wanted).abs()
        worth = (_WORTH * self.wanted.abs()).clamp(min=self._target.floor)
        noise = self._error(values) * values.widening()
        return (away > noise) & (away > worth) & self.possible

    # -- the result --------------------------------------------------------------------------------

    def statuses(self) -> list[list[str]]:
        """For each head, the outcome at each knot, a key of ``STATUSES``."""
        allowed = (HELD * self.wanted.abs()).clamp(min=self._target.floor)
        held = (self.values.value - self.wanted).abs() <= allowed
        kept = (self.factors == 1.0).all(0) & ~self._matters(self.first).any(0)
        near = 1 - 1e-9
        edge = (self.factors >= self._limit * near) | (self.factors * near <= 1 / self._limit)
        numbers = torch.where(edge, 3, 4)
        for number, those in ((2, held), (1, kept.expand_as(held)), (0, ~self.possible)):
            numbers = torch.where(those, number, numbers)
        names = ("impossible", "kept", "held", "limited", "missed")
        return [[names[number] for number in row] for row in numbers.T.tolist()]

    def growths(self) -> list[Growth]:
        """The family that each head's factors resemble, where its target is possible."""
        errors, growths = self.errors(), []
        for head, statuses in enumerate(self.statuses()):
            factors = self.factors[:, head]
            if "limited" in statuses:
                growths.append(Growth.flat("limited", float(factors[-1])))
            elif bool((factors == 1.0).all()):
                growths.append(Growth.flat("constant", 1.0))
            else:
                among = self.possible[:, head]
                at = among.nonzero().squeeze(1).tolist() or list(range(len(among)))
                knots = [self.first.knots[k] for k in at]
                growths.append(growth_of(knots, factors[at].tolist(), errors[at, head].tolist()))
        return growths

    def scalings(self, module: str) -> dict[Any, Scaling]:
        """The layer's part of the law: the fitted family, or a table that is continued beyond."""
        if isinstance(self._family, dict):
            return {(module, head): scaling for head, scaling in self._family.items()}
        if self._family is not None:
            return {module: self._family}
        table = extended_table(self.first.knots, self.factors, self.growths(), self._limit)
        return {module: table}

    def heads(self, layer: int, module: str) -> list[HeadCalibration]:
        """The record of each head, for the layer of this number and name."""
        columns = {
            "target": self.wanted,
            "before": self.first.value,
            "before_error": self.first.error,
            "predicted": self.predicted,
            "after": self.values.value,
            "after_error": self.values.error,
            "factors": self.factors,
            "factor_errors": self.errors(),
        }
        records = []
        for head, (growth, status) in enumerate(zip(self.growths(), self.statuses(), strict=True)):
            limited, line = growth.name == "limited", growth.fits.get("log_n")
            rate = (line.b, line.b_error) if line is not None else (0.0, 0.0)
            records.append(
                HeadCalibration(
                    layer=layer,
                    head=head,
                    module=module,
                    lengths=self.first.knots,
                    status=tuple(status),
                    family=growth.name,
                    candidates=growth.candidates,
                    family_errors={} if limited else {n: f.error for n, f in growth.fits.items()},
                    growth=(math.nan, math.nan) if limited else rate,
                    **{name: _numbers(column[:, head]) for name, column in columns.items()},
                )
            )
        return records


def _numbers(column: Tensor) -> tuple[float, ...]:
    """A tensor as a tuple of numbers."""
    return tuple(column.tolist())
