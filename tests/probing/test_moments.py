"""Moments against numpy, bin by bin and split by split."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from acutance.probing import Moments, edges
from acutance.rowstats import METRICS
from acutance.summary.readouts.moments import BINS, SCALES, stack, summarise
from tests.contract.probing.test_moments import ONE_OF_EACH_SCALE, random_values


def check(moments: Moments, values: Tensor, names: tuple[str, ...]) -> None:
    for column, name in enumerate(names):
        bounds = np.array(edges(name))
        for head in range(values.shape[1]):
            row = values[column, head].double().numpy()
            row = row[np.isfinite(row)]
            assert int(moments.count[head, column]) == row.size
            counts = np.bincount(
                np.clip(np.searchsorted(bounds, row, side="right") - 1, 0, BINS - 1), minlength=BINS
            )
            assert moments.histogram[head, column].tolist() == counts.tolist()
            if row.size == 0:
                assert moments.low[head, column] == math.inf
                assert moments.high[head, column] == -math.inf
                assert moments.std[head, column].isnan()
                continue
            assert float(moments.low[head, column]) == row.min()
            assert float(moments.high[head, column]) == row.max()
            assert float(moments.mean[head, column]) == pytest.approx(row.mean(), rel=1e-12)
            assert float(moments.std[head, column]) == pytest.approx(row.std(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_equal_numpy(dtype: torch.dtype) -> None:
    values = random_values(dtype)
    check(Moments.of(values, ONE_OF_EACH_SCALE), values, ONE_OF_EACH_SCALE)


def test_integers_and_half_precision_are_widened() -> None:
    values = torch.randint(0, 50, (1, 2, 30))
    check(Moments.of(values, ("n_keys",)), values, ("n_keys",))
    half = torch.randn(1, 2, 30).to(torch.bfloat16)
    check(Moments.of(half, ("lse",)), half, ("lse",))


@pytest.mark.parametrize("name", METRICS)
def test_edges_rise_and_cover(name: str) -> None:
    bounds = edges(name)
    assert len(bounds) == BINS + 1
    assert all(a < b for a, b in itertools.pairwise(bounds))
    assert (bounds[0] == 0 and bounds[-1] == 1) or name in SCALES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ONE_OF_EACH_SCALE)
def test_a_value_at_an_edge_belongs_to_the_bin_above(name: str, dtype: torch.dtype) -> None:
    bounds = torch.tensor(edges(name), dtype=torch.float64)
    at = bounds.to(dtype)
    at = torch.where(
        at.double() < bounds, torch.nextafter(at, torch.full_like(at, torch.inf)), at
    )  # the smallest number of that dtype in the bin
    below = torch.nextafter(at, torch.full_like(at, -torch.inf))
    upper = Moments.of(at[:-1].view(1, 1, -1), (name,)).histogram
    lower = Moments.of(below[1:].view(1, 1, -1), (name,)).histogram
    assert upper.flatten().tolist() == lower.flatten().tolist() == [1] * BINS


def test_rows_left_out_differ_by_head_or_not() -> None:
    values = {"entropy": torch.rand(2, 3, 5), "n_keys": torch.randint(1, 9, (2, 3, 5))}
    for kept in (
        torch.ones(2, 3, 5, dtype=torch.bool),
        (torch.rand(2, 1, 5) > 0.4).expand(2, 3, 5),
        torch.rand(2, 3, 5) > 0.4,
        torch.zeros(2, 3, 5, dtype=torch.bool),
    ):
        names = ("entropy", "n_keys")
        moments = summarise(stack(values, names), kept, names)
        for head in range(3):
            for column, name in enumerate(("entropy", "n_keys")):
                rows = values[name][:, head][kept[:, head]].double()
                assert int(moments.count[head, column]) == len(rows)
                if len(rows):
                    assert float(moments.mean[head, column]) == pytest.approx(float(rows.mean()))
                    assert float(moments.high[head, column]) == float(rows.max())
