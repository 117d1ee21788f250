"""Profile: how a metric changes with the number of visible keys, or with position.

Rows are grouped by octaves of a count. For each head, metric and octave a profile holds sums that
can be merged: the number of rows, their mean and spread, and how much the means of sequences
differ. Standard errors come from the last, since the rows of one text are not independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from scipy.special import stdtrit
from torch import Tensor

from acutance.summary.cells import Cells, counts, means, squares
from acutance.summary.readouts.moments import CallRows, sums_by_label

#: Octaves of a count; the last takes all that lies beyond.
MOST_OCTAVES = 32


class Slope(NamedTuple):
    """A line fitted to a profile: metric = level + value · log n.

    Attributes:
        value: the slope, in the metric's unit per e-fold of n.
        error: its standard error.
        octaves: number of octaves in the fit.
        low_n: mean n of the first of them.
        high_n: mean n of the last.
        low: fitted metric at ``low_n``.
        high: fitted metric at ``high_n``.
        sequences: smallest number of sequences in any of the octaves.
    """

    value: float
    error: float
    octaves: int
    low_n: float
    high_n: float
    low: float
    high: float
    sequences: int

    @property
    def margin(self) -> float:
        """Half the width of the slope's 98 % confidence interval.

        It uses Student's t with one degree of freedom less than ``sequences``: 32 standard errors
        for two sequences, 2.3 for many.
        """
        return float(stdtrit(max(1, self.sequences - 1), 0.99)) * self.error

    @property
    def significant(self) -> bool:
        """Whether the slope differs from 0 by more than its margin."""
        return abs(self.value) > self.margin


@dataclass(frozen=True)
class Profile(Cells):
    """Moments of metrics by octave of a count, for some heads: (heads, metrics, octaves) arrays.

    Octave k holds the rows whose count is 2^k to 2^(k+1) − 1. There are as many octaves as rows
    need.

    Attributes:
        rows: (heads, octaves) int64, number of rows in the octave.
        log_n: (heads, octaves), mean logarithm of their count; 0 without rows.
        count: int64, number of rows on which the metric is finite.
        mean: mean over those rows; 0 without rows.
        M2: sum of squared deviations of rows from the mean.
        groups: int64, number of sequences of these rows, counted again in each call.
        between: Σ over sequences of rows times the squared deviation of the sequence's mean.
    """

    rows: Tensor = counts("heads octaves")
    log_n: Tensor = means("heads octaves", "rows", least=0)
    count: Tensor = counts("heads metrics octaves")
    mean: Tensor = means("heads metrics octaves", "count")
    M2: Tensor = squares("heads metrics octaves", "mean")
    groups: Tensor = counts("heads metrics octaves")
    between: Tensor = squares("heads metrics octaves", "mean")

    what = " of a profile"
    axes = ("heads", "metrics", "octaves")
    grows = "octaves"
    most = MOST_OCTAVES
    room = f"0 to {MOST_OCTAVES} octaves"

    @staticmethod
    def of(values: Tensor, n: Tensor, mask: Tensor) -> Profile:
        """The profile of one call's rows.

        Args:
            values: (metrics, heads, B, L), float32 or float64; values that are not finite are
                ignored.
            n: counts, integers that broadcast to (B, heads, L).
            mask: boolean (B, heads, L), True on rows that count.

        Returns:
            The profile, on the CPU.
        """
        if values.device.type == "mps":  # it has no float64
            values, n, mask = values.cpu(), n.cpu(), mask.cpu()
        metrics, heads, batch, queries = values.shape
        if values.numel() == 0 or not bool(mask.any()):
            return Profile.none(heads, metrics)
        n = n.expand(batch, -1, queries)
        alike = bool((mask == mask[:, :1]).all()) and bool((n == n[:, :1]).all())
        which = slice(0, 1) if alike else slice(None)
        counted = mask[:, which]
        size = n.expand(-1, heads, -1)[:, which].clamp(min=1).to(torch.float64)
        octave = (torch.frexp(size).exponent - 1).clamp(max=MOST_OCTAVES - 1).long()
        octaves = int(octave.masked_fill(~counted, 0).max()) + 1
        member = torch.nn.functional.one_hot(octave.clamp(max=octaves - 1), octaves)
        share = member.masked_fill(~counted.unsqueeze(-1), 0).transpose(0, 1).to(torch.float64)
        rows = share.sum((1, 2)).expand(heads, octaves)  # share is (heads or 1, B, L, octaves)
        log_n = (size.log().transpose(0, 1).unsqueeze(-1) * share).sum((1, 2)).expand(heads, -1)
        x = values.detach()
        if not bool(mask.all()):
            x = torch.where(mask.transpose(0, 1), x, 0.0)
        sums = sums_by_label(x, share.to(x.dtype))
        arrays = {name: array.transpose(0, 1) for name, array in sums.items()}
        return Profile.rounded(rows=rows, log_n=log_n / rows.clamp(min=1.0), **arrays)

    @property
    def octaves(self) -> int:
        """Number of octaves."""
        return self.rows.shape[-1]

    @cached_property
    def std(self) -> Tensor:
        """Standard deviation over rows, (heads, metrics, octaves); NaN without rows."""
        count = self.count.double().masked_fill(self.count == 0, math.nan)
        return torch.sqrt(self.M2 / count)

    @cached_property
    def error(self) -> Tensor:
        """Standard error of each mean, from differences between sequences; NaN for one sequence."""
        groups = self.groups.double().masked_fill(self.groups < 2, math.nan)
        return torch.sqrt(self.between / self.count.double() / (groups - 1))

    def slope(
        self,
        head: int,
        metric: int,
        *,
        least_n: float = 0.0,
        most_n: float = math.inf,
        fewest: int = 3,
    ) -> Slope | None:
        """Slope of a metric against log n, over the octaves whose mean n lies in a range.

        Octaves are weighted by their rows. The standard error has two parts: differences between
        sequences, and deviations of the octaves from the line. Octaves of one sequence usually
        deviate in the same direction, which the first part ignores, so the error is rather too
        large than too small.

        Args:
            head: index of the head.
            metric: index of the metric.
            least_n: ignore octaves whose mean n is smaller.
            most_n: ignore octaves whose mean n is larger.
            fewest: number of octaves needed.

        Returns:
            The slope; None if fewer octaves have rows of at least two sequences.
        """
        count, groups = self.count[head, metric], self.groups[head, metric]
        x, y = self.log_n[head], self.mean[head, metric]
        typical = x.exp()
        use = (groups > 1) & (typical >= least_n * (1 - 1e-9)) & (typical <= most_n * (1 + 1e-9))
        if int(use.sum()) < max(3, fewest):
            return None
        weight, x, y = count[use].double(), x[use], y[use]
        squares = self.between[head, metric][use]
        error = (squares / weight / (groups[use] - 1)).sqrt()
        total = weight.sum()
        centre, level = (weight * x).sum() / total, (weight * y).sum() / total
        away = x - centre
        spread = (weight * away.square()).sum()
        if not float(spread) > 0.0:
            return None
        pull = weight * away / spread
        value = (pull * y).sum()
        left = y - level - value * away
        scatter = (weight * left.square()).sum() / (len(x) - 2) / spread
        variance = (pull.square() * error.square()).sum() + scatter
        ends = x[[0, -1]]
        fitted = level + value * (ends - centre)
        numbers: list[Any] = [float(value), float(variance.sqrt()), len(x)]
        numbers += [*ends.exp().tolist(), *fitted.tolist(), int(groups[use].min())]
        return Slope(*numbers)

    def final_slope(self, head: int, metric: int, *, octaves: int, least_n: float) -> Slope | None:
        """Slope of a metric over log n in its last ``octaves`` octaves of n.

        Only octaves with rows of at least two sequences and a mean n of at least ``least_n`` are
        used; None if there is none. A last octave with less than a quarter of the previous octave's
        rows is ignored: in texts of 1024 tokens only the last row is in its octave.
        """
        used = (self.groups[head, metric] > 1).nonzero().flatten().tolist()
        count = self.count[head, metric].tolist()
        while len(used) > 1 and count[used[-1]] < 0.25 * count[used[-2]]:
            used.pop()
        if not used:
            return None
        least, most = 2.0 ** (used[-1] - octaves + 1), 2.0 ** (used[-1] + 1) - 1
        return self.slope(head, metric, least_n=max(least, least_n), most_n=most)

    def at(self, head: int, metric: int, n: float) -> tuple[float, float]:
        """Mean of a metric and its standard error in the octave that contains the count n."""
        octave = int((self.log_n[head] - math.log(n)).abs().nan_to_num(math.inf).argmin())
        return float(self.mean[head, metric, octave]), float(self.error[head, metric, octave])

    def to_dicts(self, metrics: tuple[str, ...]) -> list[dict[str, Any]]:
        """For each head, its octaves with rows as columns of JSON values.

        ``from`` is the lowest count of an octave and ``typical`` the mean of its rows; then follow
        for each metric ``count``, ``mean``, ``std``, ``error`` and ``groups``.
        """
        names = ("count", "mean", "std", "error", "groups")
        columns = {name: getattr(self, name) for name in names}
        heads = []
        for head, rows in enumerate(self.rows):
            used = rows.nonzero().flatten()
            lists = [column[head][:, used].tolist() for column in columns.values()]
            of_metrics = [
                dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)
            ]
            octaves = {
                "from": (1 << used).tolist(),
                "typical": self.log_n[head, used].exp().tolist(),
                "rows": rows[used].tolist(),
            }
            heads.append(octaves | {"metrics": dict(zip(metrics, of_metrics, strict=True))})
        return heads


def by_keys(values: Tensor, rows: CallRows) -> Profile:
    """The profile of a call's rows by their number of visible keys."""
    return Profile.of(values, rows.stats.state.n, rows.counted)


def by_position(values: Tensor, rows: CallRows) -> Profile:
    """The profile of a call's rows by their position; empty in cross-attention."""
    if rows.positions is None:
        return Profile.none(rows.counted.shape[1], len(values))
    return Profile.of(values, rows.positions.unsqueeze(1).clamp(min=0) + 1, rows.counted)
