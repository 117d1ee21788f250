"""The gap histogram against sorting: its counts exactly, what is read from it up to a bin."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from acutance import attention, row_statistics
from acutance.rowstats import RowStatistics, observe
from acutance.rowstats.gaps import BINS, WIDTH
from acutance.structure.statistics import critical_ratio
from tests.contract.rowstats.test_gaps import rows


def counted(scores: Tensor) -> Tensor:
    """The histogram by its definition, one key at a time; −inf is hidden."""
    found = torch.zeros(*scores.shape[:-1], BINS, dtype=torch.int32)
    for place in itertools.product(*map(range, scores.shape[:-1])):
        row = scores[place][scores[place] > -math.inf].tolist()
        for s in row:
            d = math.floor(max(row) / WIDTH) - math.floor(s / WIDTH)
            if d < BINS:
                found[(*place, d)] += 1
    return found


@pytest.mark.parametrize("sigma", [0.1, 1.0, 6.0])
def test_counts_are_those_of_the_definition(sigma: float) -> None:
    scores = rows(sigma, 200, 8)
    scores[1, ::3] = -math.inf
    scores[2] = (scores[2] * 4).round() / 4  # on the edges of bins
    assert torch.equal(observe(scores, gaps=True).gaps, counted(scores))


@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.0])
def test_masses_are_those_of_sorting(sigma: float) -> None:
    scores = rows(sigma)
    stats = RowStatistics(observe(scores, gaps=True))
    p = torch.softmax(scores, -1)
    ordered = p.sort(-1, descending=True).values.cumsum(-1)
    for keys in (1, 2, 10, 100, 600):
        error = stats.mass_of_largest(keys) - ordered[:, keys - 1]
        assert error.abs().max() < 0.04
        assert error.mean().abs() < 0.01
    gap = scores.amax(-1, keepdim=True) - scores
    for threshold in (0.0, 1.0, 2.5, 30.0):
        lost = torch.where(gap > threshold, p, 0.0).sum(-1)
        near = torch.where((gap - threshold).abs() < WIDTH, p, 0.0).sum(-1)
        error = (stats.mass_below(threshold) - lost).abs()
        assert (error <= near + 0.04).all()


@pytest.mark.parametrize("sigma", [1.0, 3.0])
def test_the_critical_ratio_of_every_row(sigma: float) -> None:
    scores = rows(sigma, count=400)
    found, exact = (
        RowStatistics(observe(scores, gaps=True)).critical_ratio(),
        critical_ratio(scores),
    )
    assert (found - exact).abs().max() < 2 * WIDTH / math.log(2)
    assert (found - exact).mean().abs() < 0.03


@pytest.mark.parametrize("backend", ["blocked", "auto"])
@pytest.mark.parametrize("masks", ["plain", "causal", "everything"])
def test_every_backend_counts_alike(backend: str, masks: str) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(2, heads, length, 16, generator=generator, dtype=torch.float64)
        for heads, length in ((4, 40), (2, 300), (2, 300))
    )
    options = {
        "plain": {},
        "causal": {"is_causal": True, "query_offset": 260},
        "everything": {
            "attn_mask": torch.rand(40, 300, generator=generator) > 0.3,
            "bias": torch.randn(40, 300, generator=generator, dtype=torch.float64),
            "softcap": 4.0,
            "sinks": torch.randn(4, generator=generator, dtype=torch.float64),
        },
    }[masks]
    options |= {"enable_gqa": True, "scale": 0.7}
    out, stats = attention(
        query, key, value, return_stats=True, gaps=True, backend=backend, **options
    )
    scores = query @ key.repeat_interleave(2, 1).mT * 0.7
    if masks == "causal":
        hidden = torch.ones(40, 300).tril(260) == 0
        scores = scores.masked_fill(hidden, -math.inf)
    elif masks == "everything":
        scores = 4.0 * torch.tanh(scores / 4.0) + options["bias"]
        scores = scores.masked_fill(~options["attn_mask"], -math.inf)
    want = observe(scores, gaps=True).gaps
    assert stats.state.gaps.shape == (2, 4, 40, BINS)
    # a score on the edge of a bin may fall to either side by rounding
    assert (stats.state.gaps - want).abs().sum() <= 2
    plain, without = attention(query, key, value, return_stats=True, backend=backend, **options)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(stats.entropy, without.entropy)
    alone = row_statistics(query, key, gaps=True, backend=backend, **options)
    assert torch.equal(alone.state.gaps, stats.state.gaps)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 4.0])
def test_bounds_hold_the_mass(sigma: float) -> None:
    """Of sorted rows; also where the row reaches below the grid, and with ties of the maximum."""
    scores = rows(sigma)
    scores[0, :300] = scores[0].max()
    scores[1] *= 10
    stats = RowStatistics(observe(scores, gaps=True))
    weights = torch.softmax(scores, -1)
    ordered = weights.sort(-1, descending=True).values.cumsum(-1)
    for keys in (1, 2, 30, 600, 1000):
        bounds, exact = stats.mass_bounds(keys=keys), ordered[:, min(keys, 600) - 1]
        assert (bounds.least <= exact + 1e-12).all()
        assert (exact <= bounds.most + 1e-12).all()
        assert (bounds.most <= math.exp(WIDTH) * bounds.least + 1e-12).all()
    below = scores.amax(-1, keepdim=True) - scores
    for gap in (0.0, 0.3, 2.0, 5.1, 15.9, 40.0):
        bounds, exact = stats.mass_bounds(gap=gap), (weights * (below > gap)).sum(-1)
        assert (bounds.least <= exact + 1e-12).all()
        assert (exact <= bounds.most + 1e-12).all()
        assert (bounds.most - bounds.least < 0.6)[2:].all()
