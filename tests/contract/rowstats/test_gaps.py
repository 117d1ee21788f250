"""The gap histogram against sorting: its counts exactly, what is read from it up to a bin."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import acutance
from acutance import row_statistics
from acutance.rowstats import RowState, RowStatistics, all_reduce_keys, empty, merge, observe

PERCENT = (50, 90, 95, 99)


def rows(sigma: float, keys: int = 600, count: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(int(sigma * 8) + keys)
    return sigma * torch.randn(count, keys, generator=generator, dtype=torch.float64)


def fewest(scores: Tensor, share: float) -> Tensor:
    cumulated = torch.softmax(scores, -1).sort(-1, descending=True).values.cumsum(-1)
    return (cumulated < share).sum(-1) + 1


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
