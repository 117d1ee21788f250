"""The gap histogram against sorting: its counts exactly, what is read from it up to a bin."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import acutance
from acutance import attention, row_statistics
from acutance.rowstats import RowState, RowStatistics, all_reduce_keys, empty, merge, observe
from acutance.rowstats.gaps import BINS, WIDTH
from acutance.structure.blocks import critical_ratio

PERCENT = (50, 90, 95, 99)


def rows(sigma: float, keys: int = 600, count: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(int(sigma * 8) + keys)
    return sigma * torch.randn(count, keys, generator=generator, dtype=torch.float64)


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


def fewest(scores: Tensor, share: float) -> Tensor:
    cumulated = torch.softmax(scores, -1).sort(-1, descending=True).values.cumsum(-1)
    return (cumulated < share).sum(-1) + 1


@pytest.mark.parametrize("sigma", [0.1, 1.0, 6.0])
def test_counts_are_those_of_the_definition(sigma: float) -> None:
    scores = rows(sigma, 200, 8)
    scores[1, ::3] = -math.inf
    scores[2] = (scores[2] * 4).round() / 4  # on the edges of bins
    assert torch.equal(observe(scores, gaps=True).gaps, counted(scores))


@pytest.mark.parametrize("cuts", [(0, 1, 600), (0, 200, 201, 600), (0, 64, 128, 300, 600)])
def test_parts_add_up_to_the_whole_exactly(cuts: tuple[int, ...]) -> None:
    """Bins shift by whole places, also out of the grid where a later key is the largest."""
    scores = rows(3.0)
    scores[:, -1] += 12.0
    parts = [observe(scores[:, a:b], first_key=a, gaps=True) for a, b in itertools.pairwise(cuts)]
    whole = observe(scores, gaps=True).gaps
    for order in (parts, parts[::-1]):
        state = empty((40,), gaps=True, dtype=torch.float64)
        for part in order:
            state = merge(state, part)
        assert torch.equal(state.gaps, whole)
        assert state.gaps.dtype == torch.int32
    assert merge(parts[0], observe(scores[:, :1])).gaps.numel() == 0


@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("percent", PERCENT)
def test_keys_that_hold_a_share_are_right_up_to_a_bin(sigma: float, percent: int) -> None:
    """As many keys hold that share to what the weights of a bin's keys differ by."""
    scores = rows(sigma)
    stats = RowStatistics(observe(scores, gaps=True))
    found, exact = stats[f"keys_{percent}"], fewest(scores, percent / 100)
    ordered = torch.softmax(scores, -1).sort(-1, descending=True).values.cumsum(-1)
    held = ordered.gather(-1, found.long().unsqueeze(-1) - 1)
    before = torch.where(
        found > 1, ordered.gather(-1, found.long().clamp(min=2)[:, None] - 2)[:, 0], 0
    )
    assert (held >= percent / 100 - 0.04).all()
    assert (before < percent / 100 + 0.04).all()
    assert (found / exact - 1).mean().abs() < 0.03
    assert torch.equal(found, stats.keys_holding(percent / 100))


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


def test_rows_worked_by_hand() -> None:
    stats = RowStatistics(observe(torch.zeros(1, 4), gaps=True))
    assert [stats[f"keys_{percent}"].item() for percent in PERCENT] == [2, 4, 4, 4]
    assert stats.mass_of_largest(1).item() == 0.25
    assert stats.mass_below(0.0).item() == 0.0
    assert stats.critical_ratio().item() == 0.0
    one = RowStatistics(observe(torch.tensor([[3.0, -math.inf]]), gaps=True))
    assert [one[f"keys_{percent}"].item() for percent in PERCENT] == [1, 1, 1, 1]
    assert one.critical_ratio().isnan().all()
    far = RowStatistics(observe(torch.tensor([[0.0, *[-20.0] * 50]]), gaps=True))
    assert far.keys_99.item() == 1
    assert far.state.gaps.sum().item() == 1  # the others are below the grid
    assert far.keys_holding(1.0).item() == 51


def test_a_row_without_keys_or_without_numbers_is_unknown() -> None:
    scores = torch.tensor([[-math.inf] * 3, [math.nan] * 3, [0.0, 1.0, math.inf]])
    stats = RowStatistics(observe(scores, gaps=True))
    for found in (
        stats.keys_90,
        stats.mass_of_largest(2),
        stats.mass_below(1.0),
        stats.critical_ratio(),
    ):
        assert found.isnan().all()


@pytest.mark.parametrize("backend", ["blocked", "dense", "auto"])
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


def test_any_score_weighting_and_law_that_is_a_softmax_counts() -> None:
    query = 0.3 * torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(0))
    for options in (
        {"score": "cosine"},
        {"weights": "softmax_one"},
        {"scaling": acutance.scaling.LogN(train_length=4)},
    ):
        stats = row_statistics(query, query, is_causal=True, gaps=True, **options)
        assert torch.equal(stats.state.gaps.sum(-1), stats.n_keys)


def test_statistics_merge_and_pass_through_autograd_with_their_histogram() -> None:
    query, key = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(2))
    whole = row_statistics(query, key, gaps=True)
    parts = [row_statistics(query, key[:, :, part], gaps=True) for part in (slice(4), slice(4, 9))]
    joint = parts[0].merge(parts[1])
    assert torch.equal(joint.state.gaps, whole.state.gaps)
    assert torch.equal(joint.keys_90, whole.keys_90)
    whole.entropy.sum().backward()
    assert query.grad is not None
    assert not whole.keys_90.requires_grad


def test_one_rank_keeps_its_histogram() -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        state = observe(rows(2.0, 50, 3), gaps=True)
        assert torch.equal(all_reduce_keys(state).gaps, state.gaps)
        assert all_reduce_keys(observe(rows(2.0, 50, 3))).gaps.numel() == 0
    finally:
        torch.distributed.destroy_process_group()


def test_states_made_by_earlier_versions_have_none() -> None:
    state = observe(torch.randn(2, 5))
    old = RowState(*state[:-1])
    assert "keys_90" not in RowStatistics(old).available
    assert torch.equal(merge(old, state).Z, 2 * state.Z)


def test_what_was_not_asked_for_says_how_to_ask() -> None:
    stats = row_statistics(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))
    assert not {f"keys_{percent}" for percent in PERCENT} & set(stats.available)
    with pytest.raises(ValueError, match="compute them with gaps=True"):
        stats.keys_90  # noqa: B018
    with pytest.raises(ValueError, match=r"share must be above 0 and at most 1, got 1\.5"):
        stats.keys_holding(1.5)
    with pytest.raises(ValueError, match="keys must be a whole number, at least 1, got 0"):
        stats.mass_of_largest(0)
    with pytest.raises(ValueError, match=r"gap must be a number of nats, 0 or more, got -1\.0"):
        stats.mass_below(-1.0)
    with pytest.raises(TypeError, match="gaps"):
        acutance.row_statistics(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), gaps=1)


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


def test_bounds_are_of_keys_or_of_a_gap() -> None:
    stats = RowStatistics(observe(rows(1.0), gaps=True))
    empty_row = RowStatistics(observe(torch.full((1, 3), -math.inf), gaps=True))
    assert empty_row.mass_bounds(keys=1).least.isnan().all()
    for options, match in (
        ({}, "pass either keys or gap"),
        ({"keys": 1, "gap": 1.0}, "pass either keys or gap"),
        ({"keys": 0}, "at least 1, got 0"),
        ({"gap": -1.0}, "0 or more, got -1.0"),
    ):
        with pytest.raises(ValueError, match=match):
            stats.mass_bounds(**options)
