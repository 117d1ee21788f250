"""Moments: count, mean, spread, extremes and histogram of many metrics for many heads at once.

All arrays have heads first and metrics second. Adding rows, and joining two records, is exact up to
rounding in float64: counts, extremes and histograms exactly, means and spreads by Chan's formula.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

BINS = 64
Scale = Literal["unit", "nats", "keys", "positive", "signed"]

#: Scale of each metric's histogram; a metric not named here has scale "unit", 0 to 1.
SCALES: dict[str, Scale] = {
    "n_keys": "keys",
    "effective_keys": "keys",
    "entropy": "nats",
    "information": "nats",
    "gaussian_entropy": "nats",
    "jensen_gap": "positive",
    "max_gap": "positive",
    "logit_std": "positive",
    "varentropy": "positive",
    "noise_gain": "positive",
    "entropy_slope": "signed",
    "mean_field_entropy": "signed",
    "max_logit": "signed",
    "lse": "signed",
    "logit_mean": "signed",
}

_MOST_NATS, _OCTAVES, _DECADES, _MOST_SIGNED = 16.0, 32.0, 6.0, 1e5


def edges(name: str) -> list[float]:
    """The 65 bin edges of a metric's histogram; the outer bins also take what lies beyond.

    A bin holds the values from its lower edge up to, and without, its upper edge.

    Example:
        >>> edges("top_weight")[:3]
        [0.0, 0.015625, 0.03125]
        >>> edges("effective_keys")[:3]
        [1.0, 1.4142135623730951, 2.0]
    """
    return _edges(_scale(name))


def _edges(scale: Scale) -> list[float]:
    steps = [index / BINS for index in range(BINS + 1)]
    if scale == "nats":
        return [_MOST_NATS * step for step in steps]
    if scale == "keys":
        return [2.0 ** (_OCTAVES * step) for step in steps]
    if scale == "positive":
        return [10.0 ** (2 * _DECADES * (step - 0.5)) for step in steps]
    if scale == "signed":
        return [math.sinh(2 * math.asinh(_MOST_SIGNED) * (step - 0.5)) for step in steps]
    return steps


@functools.lru_cache
def _boundaries(scale: Scale, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The inner edges in a dtype, rounded up: a value of that dtype is then in the right bin."""
    exact = torch.tensor(_edges(scale)[1:-1], dtype=torch.float64, device="cpu")
    near = exact.to(dtype)
    up = torch.nextafter(near, torch.full_like(near, torch.inf))
    return torch.where(near.to(torch.float64) < exact, up, near).to(device)


def _find_bins(values: Tensor, scale: Scale, out: Tensor) -> None:
    """Write the bin of each finite value; where bins are even, by a product that is exact."""
    if scale in ("unit", "nats"):
        per_bin = BINS if scale == "unit" else BINS / _MOST_NATS
        out.copy_((values * per_bin).clamp_(0, BINS - 1).nan_to_num_(0.0))
    else:
        torch.bucketize(
            values, _boundaries(scale, values.dtype, values.device), right=True, out=out
        )


@dataclass(frozen=True)
class Moments:
    """What is kept of the rows of some heads: (heads, metrics) arrays.

    Attributes:
        count: rows counted, int64; a metric that is NaN or infinite on a row does not count it.
        mean: mean over those rows, float64; NaN where there is none.
        M2: sum of squared deviations from the mean.
        low: smallest value, +inf where there is none.
        high: largest value, −inf where there is none.
        histogram: (heads, metrics, 64) int64, on the edges of :func:`edges`.
    """

    count: Tensor
    mean: Tensor
    M2: Tensor
    low: Tensor
    high: Tensor
    histogram: Tensor

    @staticmethod
    def none(heads: int, metrics: int) -> Moments:
        """The record of no rows: the identity of :meth:`merge`."""
        zero = torch.zeros(heads, metrics, dtype=torch.float64, device="cpu")
        return Moments(
            count=torch.zeros_like(zero, dtype=torch.int64),
            mean=zero,
            M2=zero.clone(),
            low=torch.full_like(zero, torch.inf),
            high=torch.full_like(zero, -torch.inf),
            histogram=torch.zeros(heads, metrics, BINS, dtype=torch.int64, device="cpu"),
        )

    @staticmethod
    def of(values: Tensor, names: tuple[str, ...]) -> Moments:
        """The record of rows given as (metrics, heads, rows); NaN and infinity are left out.

        Args:
            values: float64 or float32 (anything else is widened to float64).
            names: what the metrics are called, which says on what scale they are binned.

        Returns:
            The record, on the CPU. Sums are made in float64 where the values are, except on devices
            that have none.
        """
        x = values.detach()
        if x.device.type == "mps":
            x = x.cpu()
        if x.dtype != torch.float32:
            x = x.to(torch.float64)
        metrics, heads, rows = x.shape
        if x.numel() == 0:
            return Moments.none(heads, metrics)
        there = x.isfinite()
        count = there.sum(-1)
        whole = (count == rows).all(-1)
        if bool(whole.any()) and not bool(whole.all()):  # only some need the careful way
            order = whole.logical_not().to(torch.int8).argsort(stable=True).tolist()
            most = int(whole.sum())
            parts = [
                Moments.of(x[part], tuple(names[index] for index in part))
                for part in (order[:most], order[most:])
            ]
            back = torch.tensor(order, device="cpu").argsort()
            return Moments(
                **{
                    field.name: torch.cat([getattr(part, field.name) for part in parts], 1)[:, back]
                    for field in fields(Moments)
                }
            )
        bins = torch.empty(x.shape, dtype=torch.int64, device=x.device)
        for index, name in enumerate(names):
            _find_bins(x[index], _scale(name), bins[index])
        if bool(whole.all()):
            low, high = x.aminmax(dim=-1)
            wide = x.to(torch.float64, copy=True)
            mean = wide.sum(-1) / rows
            away = wide.sub_(mean.unsqueeze(-1))
        else:
            low = torch.where(there, x, torch.inf).amin(-1)
            high = torch.where(there, x, -torch.inf).amax(-1)
            wide = torch.where(there, x, 0.0).to(torch.float64)
            mean = wide.sum(-1) / count.clamp(min=1)
            away = torch.where(there, wide - mean.unsqueeze(-1), 0.0)
            bins = torch.where(there, bins, BINS)  # a bin more for what is left out
        each = torch.arange(metrics * heads, device=x.device).view(metrics, heads, 1) * (BINS + 1)
        histogram = torch.bincount(
            bins.add_(each).flatten(), minlength=metrics * heads * (BINS + 1)
        )
        found = {
            "count": count,
            "mean": mean,
            "M2": torch.linalg.vector_norm(away, dim=-1).square(),
            "low": low.to(torch.float64),
            "high": high.to(torch.float64),
            "histogram": histogram.view(metrics, heads, BINS + 1)[..., :BINS],
        }
        return Moments(
            **{name: part.transpose(0, 1).contiguous().cpu() for name, part in found.items()}
        )

    def merge(self, other: Moments) -> Moments:
        """The record of both sets of rows."""
        count = self.count + other.count
        share = other.count / count.clamp(min=1).to(torch.float64)  # of two integers: float32
        step = torch.where(other.count == 0, 0.0, other.mean - self.mean)
        step = torch.where(self.count == 0, torch.where(other.count == 0, 0.0, other.mean), step)
        base = torch.where(self.count == 0, 0.0, self.mean)
        return Moments(
            count=count,
            mean=base + step * share,
            M2=self.M2 + other.M2 + step.square() * self.count * share,
            low=torch.minimum(self.low, other.low),
            high=torch.maximum(self.high, other.high),
            histogram=self.histogram + other.histogram,
        )

    @property
    def std(self) -> Tensor:
        """Standard deviation over rows; NaN where there is none."""
        count = self.count.to(torch.float64).masked_fill(self.count == 0, math.nan)
        return torch.sqrt(self.M2 / count)

    def tensors(self) -> dict[str, Tensor]:
        """The arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def join(parts: list[Moments]) -> Moments:
        """Records of different heads, one after the other."""
        return Moments(
            **{
                field.name: torch.cat([getattr(part, field.name) for part in parts])
                for field in fields(Moments)
            }
        )

    def heads(self, start: int, stop: int) -> Moments:
        """The record of some of the heads."""
        return Moments(**{name: tensor[start:stop] for name, tensor in self.tensors().items()})


def _scale(name: str) -> Scale:
    return SCALES.get(name, "unit")
