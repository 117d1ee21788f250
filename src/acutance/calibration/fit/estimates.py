"""Values at the knots from the sums of a pass, with standard errors by the jackknife."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.stats import t as student
from torch import Tensor

from acutance.calibration.fit.collect import LayerSums

__all__ = ["Estimate", "LayerValues", "student_t_quantile"]

#: Spread of log n within a bin (its variance) below which all rows count as one length.
_ONE_LENGTH = 1e-3


@dataclass(frozen=True)
class Estimate:
    """A measured number for each knot and head, with its standard error.

    A knot is a number n of visible keys at which it is read.

    Attributes:
        value: (knots, heads).
        error: standard error over parts of the text, (knots, heads); NaN from a single part.
    """

    value: Tensor
    error: Tensor


@dataclass(frozen=True)
class LayerValues:
    """The calibrated quantity of one layer at each knot n, as measured in one pass.

    Attributes:
        knots: the n of each value, ascending: the largest n among the rows of its bin.
        bins: index of each knot's bin in the sums.
        value: the calibrated quantity at n = knot, (knots, heads).
        slope: its derivative with respect to log λ, (knots, heads).
        leave_one_out: :attr:`value` with one group left out at a time, (groups, knots, heads).
        present: whether a group has rows in a bin, (groups, knots).
        top: largest logit in each bin, (knots, heads).
    """

    knots: tuple[int, ...]
    bins: tuple[int, ...]
    value: Tensor
    slope: Tensor
    leave_one_out: Tensor
    present: Tensor
    top: Tensor

    @classmethod
    def of(cls, sums: LayerSums) -> LayerValues:
        """Values of a layer from its sums, at the bins that have rows.

        Within a bin the value is a line in log n, fitted to its rows and read at the longest. If
        all rows are equally long, it is their mean.
        """
        total = sums.sums.sum(0)
        bins = tuple((total[..., 0] > 0).all(1).nonzero().squeeze(1).tolist())
        chosen = sums.sums[:, list(bins)]
        knots = tuple(int(sums.longest[k]) for k in bins)
        total = chosen.sum(0)
        left = _at(total - chosen, knots)
        return cls(
            knots=knots,
            bins=bins,
            value=_at(total, knots),
            slope=total[..., 5] / total[..., 0],
            leave_one_out=left,
            present=(chosen[..., 0] > 0).any(-1),
            top=sums.top[:, list(bins)].amax(0),
        )

    @property
    def estimate(self) -> Estimate:
        """The value with its standard error."""
        return Estimate(self.value, self._error(self.leave_one_out, self.present))

    def difference(self, from_knot: int) -> Tensor:
        """Standard error of the value minus the value at one knot, (knots, heads).

        It is usually below the error of the value: both are measured on the same parts of the
        text.
        """
        present = self.present & self.present[:, from_knot : from_knot + 1]
        return self._error(
            self.leave_one_out - self.leave_one_out[:, from_knot : from_knot + 1], present
        )

    def _error(self, left: Tensor, present: Tensor) -> Tensor:
        """Jackknife error from values without one group each; NaN if only one group has rows."""
        there = present.unsqueeze(-1).expand_as(left) & left.isfinite()
        count = there.sum(0)
        mean = torch.where(there, left, 0.0).sum(0) / count.clamp(min=1)
        away = torch.where(there, left - mean, 0.0).square().sum(0)
        error = (away * (count - 1) / count.clamp(min=1)).sqrt()
        return torch.where(count > 1, error, torch.nan)

    def widening(self, level: float = 0.975) -> Tensor:
        """Quantile of Student's t for the groups at each knot, (knots, 1); inf with one group."""
        degrees = (self.present.sum(0) - 1).tolist()
        found = [student_t_quantile(int(d), level) for d in degrees]
        return torch.tensor(found, dtype=torch.float64).unsqueeze(1)


def student_t_quantile(degrees: int, level: float = 0.975) -> float:
    """Quantile of Student's t distribution; infinite for 0 degrees of freedom.

    Example:
        >>> student_t_quantile(7)
        2.3646
    """
    return float(student.ppf(level, degrees)) if degrees > 0 else float("inf")


def _at(sums: Tensor, knots: tuple[int, ...]) -> Tensor:
    """Value of each bin's line in log n at its knot.

    Args:
        sums: (..., knots, heads, 6), as in :class:`LayerSums`.
        knots: n at which each line is read.

    Returns:
        (..., knots, heads); NaN without rows.
    """
    count = sums[..., 0].clamp(min=1e-300)
    x, y = sums[..., 1] / count, sums[..., 3] / count
    spread = (sums[..., 2] / count - x * x).clamp(min=0.0)
    joint = sums[..., 4] / count - x * y
    line = torch.where(spread > _ONE_LENGTH, joint / spread.clamp(min=_ONE_LENGTH), 0.0)
    place = torch.tensor(knots, dtype=torch.float64).log().unsqueeze(-1)
    value = y + line * (place - x)
    return torch.where(sums[..., 0] > 0, value, torch.nan)
