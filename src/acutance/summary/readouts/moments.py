"""The rows of a call, and Moments: count, mean, spread, extremes and histogram over rows.

All arrays have heads first and metrics second. Adding rows and merging records is exact for counts,
extremes and histograms, and exact up to float64 rounding for means and spreads (Chan's formula).
Sampled rows are weighted so that they represent all rows, and the resulting error of each mean is
recorded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from acutance.files import finite
from acutance.rowstats import RowStatistics
from acutance.structure import STRUCTURE, StructureStatistics
from acutance.summary.cells import MOST, Cells, Parts, array, counts, means, squares, totals
from acutance.summary.layer import Layer


class CallRows(NamedTuple):
    """What was read of one attention call.

    Attributes:
        layer: counts of rows, the status and the source of the call.
        stats: row statistics, fields of shape (B, H, L).
        counted: boolean (B, H, L), True on the rows that enter the summary.
        sampled: numbers of rows and of those drawn from them; None if every row was read.
        structure: where the rows' weight lies, fields (B, H, L); None if not requested.
        positions: (1 or B, L), index of the key at each query's position; None in cross-attention.
        parts: readouts measured while the call's queries and keys were at hand.
        doubt: why the rows are not reliable; None if there is no reason.
    """

    layer: Layer
    stats: RowStatistics
    counted: Tensor
    sampled: tuple[int, int] | None = None
    structure: StructureStatistics | None = None
    positions: Tensor | None = None
    parts: Parts = Parts()
    doubt: str | None = None

    def values(self, metrics: tuple[str, ...]) -> Tensor:
        """The metrics of the rows, (metrics, heads, B, L); NaN where one is not known."""
        names = set(metrics)
        values = self.stats.as_dict([name for name in self.stats.available if name in names])
        for name in metrics:
            if self.structure is not None and name in STRUCTURE:
                values[name] = self.structure[name]
            elif name not in values:  # not known from scores alone
                values[name] = torch.full_like(self.stats.state.Z, torch.nan)
        return stack(values, metrics)


BINS = 64
#: Roundings of sums and merges in float64, relative to the largest value, with room to spare.
_ROUNDING = 1e-9
Scale = Literal["unit", "nats", "keys", "positive", "signed"]

_METRICS_OF: dict[Scale, tuple[str, ...]] = {
    "keys": ("n_keys", "effective_keys", "keys_50", "keys_90", "keys_95", "keys_99"),
    "nats": ("entropy", "information", "gaussian_entropy"),
    "positive": (
        *("jensen_gap", "max_gap", "logit_std", "rest_logit_std", "rest_jensen_gap"),
        *("varentropy", "noise_gain", "attention_distance", "critical_ratio"),
    ),
    "signed": (
        *("entropy_slope", "mean_field_entropy", "max_logit", "first_gap", "lse", "logit_mean"),
    ),
}
#: Scale of each metric's histogram; a metric not named here has scale "unit", 0 to 1.
SCALES = {name: scale for scale, names in _METRICS_OF.items() for name in names}

_MOST_NATS, _OCTAVES, _DECADES, _MOST_SIGNED = 16.0, 32.0, 6.0, 1e5


_STEPS = [index / BINS for index in range(BINS + 1)]
#: Histogram edges of each scale, BINS + 1 of them.
_EDGES: dict[Scale, list[float]] = {
    "unit": _STEPS,
    "nats": [_MOST_NATS * step for step in _STEPS],
    "keys": [2.0 ** (_OCTAVES * step) for step in _STEPS],
    "positive": [10.0 ** (2 * _DECADES * (step - 0.5)) for step in _STEPS],
    "signed": [math.sinh(2 * math.asinh(_MOST_SIGNED) * (step - 0.5)) for step in _STEPS],
}


def edges(name: str) -> list[float]:
    """The 65 bin edges of a metric's histogram; the outer bins also hold values beyond them.

    A bin includes its lower edge and excludes its upper edge.

    Example:
        >>> edges("top_weight")[:3]
        [0.0, 0.015625, 0.03125]
        >>> edges("effective_keys")[:3]
        [1.0, 1.4142135623730951, 2.0]
    """
    return list(_EDGES[SCALES.get(name, "unit")])


@functools.lru_cache
def _boundaries(scale: Scale, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Inner bin edges of a histogram scale, (BINS - 1,) in a dtype and on a device.

    Each is the least number of that dtype at or above the exact edge, so that rounding puts no
    value into the wrong bin.
    """
    exact = torch.tensor(_EDGES[scale][1:-1], dtype=torch.float64, device="cpu")
    near = exact.to(dtype)
    up = torch.nextafter(near, torch.full_like(near, torch.inf))
    return torch.where(near.to(torch.float64) < exact, up, near).to(device)


def _find_bins(values: Tensor, scale: Scale, out: Tensor) -> None:
    """Write the bin index of each finite value; evenly spaced bins need one multiplication."""
    if scale in ("unit", "nats"):
        per_bin = BINS if scale == "unit" else BINS / _MOST_NATS
        out.copy_((values * per_bin).clamp_(0, BINS - 1).nan_to_num_(0.0))
        return
    if values.dtype != torch.float32:
        edges = _boundaries(scale, values.dtype, values.device)
        torch.bucketize(values, edges, right=True, out=out)
        return
    base, edge = _cells(scale, values.device)
    flat = values.contiguous().view(torch.int32).flatten()
    cell = (flat >> _SHIFT).bitwise_and_(_CELLS - 1)
    torch.index_select(base, 0, cell, out=out.view(-1))
    out.add_(values >= torch.index_select(edge, 0, cell).view_as(values))


#: Cells of float32 numbers: those that share sign, exponent and two bits of the fraction.
_SHIFT, _CELLS = 21, 1 << 11


@functools.lru_cache
def _cells(scale: Scale, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lookup table from cells to bins of unequal width: a cell's lowest bin, and the edge in it.

    No cell has two edges; the edge is NaN in cells without one.
    """
    edges = _boundaries(scale, torch.float32, torch.device("cpu"))
    first = torch.arange(_CELLS, dtype=torch.int64, device="cpu") << _SHIFT
    ends = torch.stack([first, first + (1 << _SHIFT) - 1])
    ends = torch.where(ends >= 1 << 31, ends - (1 << 32), ends).to(torch.int32).view(torch.float32)
    ends = torch.where(ends.isfinite().all(0), ends, 0.0)  # what is not a number has any bin
    below, above = (torch.searchsorted(edges, end, right=True) for end in ends.aminmax(dim=0))
    next_edge = edges[below.clamp(max=len(edges) - 1)]
    return below.to(device), torch.where(above > below, next_edge, torch.nan).to(device)


@dataclass(frozen=True)
class Moments(Cells):
    """Count, mean, spread, extremes and histogram over rows: (heads, metrics) arrays.

    Attributes:
        count: number of rows on which the metric is finite, int64.
        mean: mean over those rows, float64; NaN without rows.
        M2: sum of squared deviations from the mean.
        low: smallest value, +inf without rows.
        high: largest value, −inf without rows.
        histogram: (heads, metrics, 64) int64, on the edges of :func:`edges`.
        weight: number of rows that the counted ones represent, float64: larger than ``count`` if
            rows were sampled. ``mean`` and ``M2`` refer to these.
        sampling: variance of the sum over those rows from sampling, float64; 0 if all rows were
            read, NaN if a single row was sampled.
    """

    count: Tensor = counts("heads metrics")
    mean: Tensor = means("heads metrics", "weight")
    M2: Tensor = squares("heads metrics", "mean")
    low: Tensor = array("heads metrics", rule="low", empty=math.inf)
    high: Tensor = array("heads metrics", rule="high", empty=-math.inf)
    histogram: Tensor = counts("heads metrics bins")
    weight: Tensor = totals("heads metrics")
    sampling: Tensor = totals("heads metrics")

    axes = ("heads", "metrics")
    fixed: ClassVar = {"bins": BINS}

    @staticmethod
    def of(values: Tensor, names: tuple[str, ...]) -> Moments:
        """Moments of rows given as (metrics, heads, rows); NaN and infinity are ignored.

        Args:
            values: float64 or float32 (other types are converted to float64).
            names: names of the metrics, which determine the bins.

        Returns:
            The record, on the CPU. Sums are computed in the dtype of ``values``.
        """
        x = values.detach()
        if x.device.type == "mps":
            x = x.cpu()
        x = (x if x.dtype == torch.float32 else x.to(torch.float64)).contiguous()
        metrics, heads, rows = x.shape
        if x.numel() == 0:
            return Moments.none(heads, metrics)
        bins = torch.empty(x.shape, dtype=torch.int64, device=x.device)
        for index, name in enumerate(names):
            _find_bins(x[index], SCALES.get(name, "unit"), bins[index])
        low, high = x.amin(-1), x.amax(-1)
        count = torch.full((metrics, heads), rows, device=x.device)
        wide = x.to(torch.float64, copy=True)
        odd = (low.isfinite() & high.isfinite()).all(-1).logical_not()
        ignored = x[odd].isfinite().logical_not() if bool(odd.any()) else None
        if ignored is not None:
            bins[odd] = bins[odd].masked_fill_(ignored, BINS)  # a bin more for what is left out
            low[odd] = x[odd].masked_fill_(ignored, torch.inf).amin(-1)
            high[odd] = x[odd].masked_fill_(ignored, -torch.inf).amax(-1)
            count[odd] = ignored.logical_not().sum(-1)
            wide[odd] = wide[odd].masked_fill_(ignored, 0.0)
        mean = wide.sum(-1) / count.clamp(min=1)
        away = wide.sub_(mean.unsqueeze(-1))
        if ignored is not None:
            away[odd] = away[odd].masked_fill_(ignored, 0.0)
        starts = torch.arange(metrics * heads, device=x.device).view(metrics, heads, 1) * (BINS + 1)
        histogram = torch.bincount(
            bins.add_(starts).flatten(), minlength=metrics * heads * (BINS + 1)
        )
        M2 = torch.linalg.vector_norm(away, dim=-1).square()
        histogram = histogram.view(metrics, heads, BINS + 1)[..., :BINS]
        arrays = (count, mean, M2, low.double(), high.double(), histogram)
        weight, sampling = count.double(), torch.zeros_like(mean)
        columns = (*arrays, weight, sampling)
        return Moments(*(column.transpose(0, 1).contiguous().cpu() for column in columns))

    def possible(self) -> dict[str, Tensor]:
        """For each array a boolean mask (heads, metrics) of the values that rows can give."""
        none = self.count == 0
        slack = _ROUNDING * torch.maximum(self.low.abs(), self.high.abs())
        # values between two bounds vary by half their distance at most
        most = self.weight * ((self.high - self.low) / 2 + slack).square()
        bins = (self.histogram >= 0) & (self.histogram <= MOST)
        return {
            "count": (self.count >= 0) & (self.count <= MOST),
            "histogram": bins.all(-1) & (self.histogram.sum(-1) == self.count),
            "low": torch.where(none, self.low == math.inf, self.low.isfinite()),
            "high": torch.where(none, self.high == -math.inf, self.high.isfinite())
            & (none | (self.low <= self.high)),
            "mean": none | ((self.mean >= self.low - slack) & (self.mean <= self.high + slack)),
            "M2": torch.where(none, self.M2 == 0, (self.M2 >= 0) & (most >= self.M2)),
            "weight": (self.weight >= self.count) & (self.weight <= MOST),
            "sampling": ~(self.sampling < 0) & (self.sampling != math.inf),
        }

    @classmethod
    def checked(
        cls, tensors: Mapping[str, Tensor], heads: int, metrics: int = 0, texts: Any = None
    ) -> Moments:
        """As :meth:`Cells.checked`; means without rows, which may be NaN in a file, are 0."""
        moments = super().checked(tensors, heads, metrics)
        return replace(moments, mean=moments.mean.masked_fill(moments.count == 0, 0.0))

    def sampled(self, total: int, drawn: int) -> Moments:
        r"""These moments, marked as ``drawn`` rows sampled without replacement from ``total``.

        The mean over k counted rows has the variance :math:`(1 - t/T)\, s^2 / k`, with
        :math:`s^2 = M_2 / (k - 1)`, ``drawn`` t and ``total`` T.

        Example:
            >>> values = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
            >>> moments = Moments.of(values, ("entropy",)).sampled(total=100, drawn=4)
            >>> moments.weight.item(), moments.mean.item()
            (100.0, 2.5)
            >>> float(moments.sampling_error)  # √(0.96 · 5/3 / 4)
            0.6324...

        Source:
            Cochran (1977), Sampling Techniques, §2.6.
        """
        weight = self.weight * (total / drawn)
        undefined = torch.where(self.count == 1, math.nan, 0.0)
        variance = self.M2 / (self.count - 1).clamp(min=1) + undefined
        per_row = (1 - drawn / total) * variance / self.count.clamp(min=1)
        sampling = torch.where(self.count == 0, 0.0, weight.square() * per_row)
        return replace(self, weight=weight, M2=self.M2 * (total / drawn), sampling=sampling)

    def columns(self, metrics: tuple[str, ...], *, sampled: bool = False) -> dict[str, list[float]]:
        """Mean, spread and extremes of each metric, a value for each head; NaN without rows."""
        numbers = self._numbers() | ({"sampling_error": self.sampling_error} if sampled else {})
        return {
            f"{name}_{kind}": values[:, column].tolist()
            for column, name in enumerate(metrics)
            for kind, values in numbers.items()
        }

    def _numbers(self) -> dict[str, Tensor]:
        """Mean, spread and extremes, (heads, metrics); NaN without rows."""
        none = self.count == 0
        numbers = {"mean": self.mean, "std": self.std, "min": self.low, "max": self.high}
        return {kind: values.masked_fill(none, math.nan) for kind, values in numbers.items()}

    def to_dicts(self, metrics: tuple[str, ...], *, sampled: bool = False) -> list[dict[str, Any]]:
        """Each head's numbers of each metric as plain JSON values; None where not finite."""
        numbers = {kind: values.tolist() for kind, values in self._numbers().items()}
        counts, errors = self.count.tolist(), self.sampling_error.tolist()
        heads = []
        for head, bins in enumerate(self.histogram.tolist()):
            entry = {}
            for column, name in enumerate(metrics):
                values = {kind: table[head][column] for kind, table in numbers.items()}
                entry[name] = {"count": counts[head][column], **values, "histogram": bins[column]}
                if sampled:
                    entry[name]["sampling_error"] = errors[head][column]
            heads.append(finite(entry))
        return heads

    @property
    def sampling_error(self) -> Tensor:
        """Standard error of each mean from sampling rows; 0 where all rows were read."""
        return self.sampling.sqrt() / torch.where(self.count == 0, math.nan, self.weight)

    @functools.cached_property
    def std(self) -> Tensor:
        """Standard deviation over rows; NaN without rows."""
        return torch.sqrt(self.M2 / self.weight.masked_fill(self.count == 0, math.nan))


def stack(values: Mapping[str, Tensor], metrics: tuple[str, ...]) -> Tensor:
    """Metrics (B, heads, L) as one tensor (metrics, heads, B, L), float32 or float64."""
    first = values[metrics[0]]
    dtype = torch.float64 if torch.float64 in {v.dtype for v in values.values()} else torch.float32
    stacked = first.new_empty((len(metrics), *first.transpose(0, 1).shape), dtype=dtype)
    for index, name in enumerate(metrics):
        stacked[index] = values[name].detach().transpose(0, 1)
    return stacked


def summarise(stacked: Tensor, counted: Tensor, metrics: tuple[str, ...]) -> Moments:
    """Moments of the rows of one call, (heads, metrics).

    Args:
        stacked: the metrics' values, (metrics, heads, B, L), as :func:`stack` returns them.
        counted: boolean (B, heads, L), True for rows that count.
        metrics: names, in the order of the record's columns.
    """
    rows = stacked.flatten(2)
    selected = counted.transpose(0, 1).flatten(1)
    if not bool((selected == selected[:1]).all()):
        rows = torch.where(selected, rows, torch.nan)
    elif not bool(selected.all()):
        rows = rows[..., selected[0]]
    return Moments.of(rows, metrics)


def sums_by_label(x: Tensor, share: Tensor, *, weights: bool = False) -> dict[str, Tensor]:
    """Moments of metrics over the rows of each label, such as an octave or a span.

    Args:
        x: values, (metrics, heads, B, L); 0 on rows that do not count. What is not finite is
            ignored.
        share: (heads or 1, B, L, labels), 1 for the labels of each row that counts, else 0.
        weights: whether values are 0 to 1 in float64, so that sums of squares lose nothing.

    Returns:
        ``count``, ``mean``, ``M2``, ``groups`` and ``between``, as in
        :class:`~acutance.summary.readouts.by_octave.Profile`, (metrics, heads, labels) float64.
    """
    metrics, heads, batch, queries = x.shape

    def by_label(values: Tensor) -> Tensor:
        """Sums over rows of one sequence and label, (B, metrics, heads, labels)."""
        if share.shape[0] == 1:  # one product for each sequence, of all heads and metrics
            flat = values.reshape(len(values) * heads, batch, queries).transpose(0, 1)
            return (flat @ share[0]).view(batch, len(values), heads, share.shape[-1]).double()
        return (values.permute(1, 2, 0, 3) @ share).permute(1, 2, 0, 3).double()

    count = share.sum(2).permute(1, 0, 2).unsqueeze(1).double()  # (B, 1, heads or 1, labels)
    count = count.expand(batch, metrics, heads, -1)
    odd = x.sum((1, 2, 3)).isfinite().logical_not()  # a sum that is not has what is not in it
    ignored = x[odd].isfinite().logical_not() if bool(odd.any()) else None
    if ignored is not None:
        x, count = x.clone(), count.clone()
        x[odd] = x[odd].masked_fill_(ignored, 0.0)
        count[:, odd] = by_label(ignored.logical_not().to(x.dtype))
    # squares are about each head's mean, so that nothing cancels
    centre = x.sum((2, 3)).double() / count.sum((0, 3)).clamp(min=1.0)
    centre = (0.0 * centre if weights else centre).to(x.dtype)[..., None, None]
    away = x - centre
    if ignored is not None:
        away[odd] = away[odd].masked_fill_(ignored, 0.0)
    first = by_label(away)
    second = by_label(away.square_())
    average = first / count.clamp(min=1.0)
    within = (second - count * average.square()).clamp(min=0.0)
    seen = count.sum(0)
    mean = first.sum(0) / seen.clamp(min=1.0)
    between = (count * (average - mean).square()).sum(0)
    groups, M2 = (count > 0).sum(0).double(), within.sum(0) + between
    mean = torch.where(seen > 0, mean + centre.double()[..., 0], 0.0)
    return {"count": seen, "mean": mean, "M2": M2, "groups": groups, "between": between}
