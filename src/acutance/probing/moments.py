"""Moments: count, mean, spread, extremes and histogram of many metrics for many heads at once.

All arrays have heads first and metrics second. Adding rows, and joining two records, is exact up to
rounding in float64: counts, extremes and histograms exactly, means and spreads by Chan's formula.
"""

from __future__ import annotations

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


def _place(values: Tensor, scale: Scale) -> Tensor:
    """Map a metric's values to 0..1 on its scale; beyond either end is the end."""
    if scale == "nats":
        place = values / _MOST_NATS
    elif scale == "keys":
        place = torch.log2(values.clamp(min=1.0)) / _OCTAVES
    elif scale == "positive":
        place = 0.5 + torch.log10(values.clamp(min=10.0**-_DECADES)) / (2 * _DECADES)
    elif scale == "signed":
        place = 0.5 + torch.asinh(values) / (2 * math.asinh(_MOST_SIGNED))
    else:
        place = values
    return place


def edges(name: str) -> list[float]:
    """The 65 bin edges of a metric's histogram; the outer bins also take what lies beyond.

    Example:
        >>> edges("top_weight")[:3]
        [0.0, 0.015625, 0.03125]
        >>> edges("effective_keys")[:3]
        [1.0, 1.4142135623730951, 2.0]
    """
    steps = [index / BINS for index in range(BINS + 1)]
    scale = SCALES.get(name, "unit")
    if scale == "nats":
        return [_MOST_NATS * step for step in steps]
    if scale == "keys":
        return [2.0 ** (_OCTAVES * step) for step in steps]
    if scale == "positive":
        return [10.0 ** (2 * _DECADES * (step - 0.5)) for step in steps]
    if scale == "signed":
        return [math.sinh(2 * math.asinh(_MOST_SIGNED) * (step - 0.5)) for step in steps]
    return steps


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
        zero = torch.zeros(heads, metrics, dtype=torch.float64)
        return Moments(
            count=torch.zeros(heads, metrics, dtype=torch.int64),
            mean=zero,
            M2=zero.clone(),
            low=torch.full_like(zero, torch.inf),
            high=torch.full_like(zero, -torch.inf),
            histogram=torch.zeros(heads, metrics, BINS, dtype=torch.int64),
        )

    @staticmethod
    def of(values: Tensor, names: tuple[str, ...]) -> Moments:
        """The record of rows given as (metrics, heads, rows); NaN and infinity are left out."""
        x = values.detach().to("cpu", torch.float64).transpose(0, 1)
        heads, metrics, _ = x.shape
        there = x.isfinite()
        count = there.sum(-1)
        clean = torch.where(there, x, 0.0)
        mean = clean.sum(-1) / count.clamp(min=1)
        M2 = torch.where(there, x - mean.unsqueeze(-1), 0.0).square().sum(-1)
        places = torch.stack(
            [_place(clean[:, index], SCALES.get(name, "unit")) for index, name in enumerate(names)], 1
        )
        bins = (places * BINS).floor().clamp(0, BINS - 1).to(torch.int64)
        histogram = torch.zeros(heads, metrics, BINS, dtype=torch.int64)
        histogram.scatter_add_(-1, bins, there.to(torch.int64))
        if x.shape[-1] == 0:
            return Moments.none(heads, metrics)
        return Moments(
            count=count,
            mean=mean,
            M2=M2,
            low=torch.where(there, x, torch.inf).amin(-1),
            high=torch.where(there, x, -torch.inf).amax(-1),
            histogram=histogram,
        )

    def merge(self, other: Moments) -> Moments:
        """The record of both sets of rows."""
        count = self.count + other.count
        share = other.count / count.clamp(min=1)
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
        return torch.sqrt(self.M2 / self.count.to(torch.float64).masked_fill(self.count == 0, math.nan))

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
