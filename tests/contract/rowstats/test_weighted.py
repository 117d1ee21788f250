"""Laws of the sums of weights: any split is the whole row, and every metric its definition."""

from __future__ import annotations

import itertools
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from acutance.rowstats import (
    METRICS,
    WeightStatistics,
    WeightSums,
    empty_weights,
    merge_weights,
    observe,
    observe_weights,
)

SIZES = st.one_of(
    st.floats(1e-30, 1e30, allow_subnormal=False), st.just(0.0), st.floats(-1e30, -1e-30)
)
ROWS = st.lists(SIZES, min_size=1, max_size=10)
QUICK = settings(max_examples=80, deadline=None, derandomize=True)
SOFTMAX_ALONE = (
    "lse",
    "varentropy",
    "entropy_slope",
    "mean_field_entropy",
    "jensen_gap",
    "max_gap",
    "gaussian_entropy",
    "jacobian_trace",
    "noise_gain",
)


def definition(row: Tensor, distribution: bool) -> dict[str, Tensor]:
    """Metrics of one row of float64 weights, each as a textbook writes it."""
    size = row.abs()
    total = size.sum()
    p = size / total if total > 0 else torch.full_like(size, torch.nan)
    n = row.numel()
    nan = torch.tensor(torch.nan, dtype=torch.float64)
    entropy = -torch.special.xlogy(p, p).sum() if distribution else nan
    log_n = torch.tensor(float(n), dtype=torch.float64).log()
    found = {
        "n_keys": torch.tensor(n),
        "entropy": entropy,
        "normalized_entropy": entropy / log_n if n > 1 else nan,
        "information": log_n - entropy,
        "collision": p.square().sum(),
        "effective_keys": 1 / p.square().sum(),
        "sparsity": (n * p.square().sum()).rsqrt(),
        "top_weight": p.max(),
        "first_weight": p[0],
        "sink_mass": nan * 0 if n == 0 else torch.zeros((), dtype=torch.float64),
    }
    return found | {name: nan for name in METRICS if name not in found}


def parts(row: Tensor, cuts: list[int], **options: bool) -> list[WeightSums]:
    edges = [0, *sorted(min(cut, len(row)) for cut in cuts), len(row)]
    return [observe_weights(row[a:b], first_key=a, **options) for a, b in itertools.pairwise(edges)]


def assert_metrics(stats: WeightStatistics, wanted: dict[str, Tensor], rtol: float) -> None:
    assert set(wanted) == set(METRICS)
    for name in METRICS:
        want, found = wanted[name].double(), stats[name].double()
        # information and entropy are differences of numbers of the size of log n
        torch.testing.assert_close(
            found, want, rtol=rtol, atol=4 * rtol, equal_nan=True, msg=lambda m, n=name: f"{n} {m}"
        )


@QUICK
@given(ROWS, st.lists(st.integers(0, 10), max_size=4), st.booleans(), st.randoms())
def test_any_split_in_any_order_is_the_definition(
    weights: list[float], cuts: list[int], distribution: bool, random
) -> None:
    row = torch.tensor(weights, dtype=torch.float64)
    blocks = parts(row, cuts, distribution=distribution)
    random.shuffle(blocks)
    joint = WeightStatistics(reduce(merge_weights, blocks, empty_weights((), dtype=row.dtype)))
    assert_metrics(joint, definition(row, distribution), 1e-13)


@QUICK
@given(ROWS, ROWS, ROWS)
def test_merge_is_associative_and_commutative(a, b, c) -> None:
    starts = (0, len(a), len(a) + len(b))
    x, y, z = (
        observe_weights(torch.tensor(row, dtype=torch.float64), first_key=start, distribution=True)
        for row, start in zip((a, b, c), starts, strict=True)
    )
    left = merge_weights(merge_weights(x, y), z)
    for other in (merge_weights(x, merge_weights(y, z)), merge_weights(z, merge_weights(y, x))):
        for name, one, two in zip(WeightSums._fields, left, other, strict=True):
            scale = 40.0 if name in ("T", "X") else 0.0  # signed: as exact as their largest term
            torch.testing.assert_close(one, two, rtol=1e-13, atol=1e-13 * scale)


def test_a_hidden_weight_is_the_shorter_row_whatever_it_holds() -> None:
    row = torch.tensor([[torch.nan, 2.0, torch.inf, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[False, True, False, True]])
    hidden = observe_weights(row, mask, distribution=True, first_key=0)
    shorter = observe_weights(row[:, [1, 3]], distribution=True)
    assert hidden.first_index.item() == 1
    for one, two in zip(hidden[:-1], shorter[:-1], strict=True):
        torch.testing.assert_close(one, two)


def test_rows_without_a_key_or_without_weight_are_nan_but_for_their_count() -> None:
    mask = torch.tensor([[False, False], [True, True]])
    stats = WeightStatistics(observe_weights(torch.zeros(2, 2), mask, distribution=True))
    assert stats.n_keys.tolist() == [0, 2]
    for name in ("effective_keys", "sparsity", "collision", "entropy", "top_weight"):
        assert stats[name].isnan().all(), name
    assert stats.sink_mass[1] == 0


def test_tiny_and_huge_float32_weights_keep_their_squares() -> None:
    row = torch.tensor([3.0, 4.0])
    wanted = WeightStatistics(observe_weights(row)).effective_keys
    for unit in (1e-38, 1e-25, 1e25, 5e37):
        torch.testing.assert_close(
            WeightStatistics(observe_weights(row * unit)).effective_keys, wanted
        )


def test_the_sign_and_the_unit_do_not_matter() -> None:
    row = torch.randn(3, 20, dtype=torch.float64)
    one = WeightStatistics(observe_weights(row))
    for other in (-row, row.abs(), 7e5 * row):
        two = WeightStatistics(observe_weights(other))
        for name in ("effective_keys", "sparsity", "collision", "top_weight", "first_weight"):
            torch.testing.assert_close(one[name], two[name])


def test_gradients_pass_zero_weights_and_agree_with_finite_differences() -> None:
    scores = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)

    def read(s: Tensor) -> tuple[Tensor, ...]:
        stats = WeightStatistics(observe_weights(torch.relu(s).square(), distribution=True))
        return tuple(stats[name] for name in ("entropy", "sparsity", "effective_keys"))

    assert (scores < 0).any()
    assert torch.autograd.gradcheck(read, (scores,))
    total = sum(part.sum() for part in read(scores))
    (grad,) = torch.autograd.grad(total, scores)
    assert grad.isfinite().all()
    assert (grad[scores < 0] == 0).all()


def test_what_one_side_does_not_know_the_merge_does_not_claim() -> None:
    row = torch.rand(6)
    mixed = merge_weights(observe_weights(row[:3], distribution=True), observe_weights(row[3:]))
    stats = WeightStatistics(mixed)
    assert "entropy" not in stats.available
    assert stats.entropy.isnan()
    assert set(stats.as_dict()) == set(stats.available)
    for name in SOFTMAX_ALONE:
        assert stats[name].isnan(), name


def test_scores_give_the_metrics_that_are_theirs_and_merge_too() -> None:
    scores = torch.randn(4, 12, dtype=torch.float64)
    left, right = (
        WeightStatistics(observe_weights(part.relu()), observe(part))
        for part in (scores[:, :5], scores[:, 5:])
    )
    stats = left.merge(right)
    torch.testing.assert_close(stats.logit_std, scores.std(-1, correction=0))
    torch.testing.assert_close(stats.max_logit, scores.amax(-1))
    assert left.merge(WeightStatistics(right.sums)).max_logit.isnan().all()


def test_a_misspelt_metric_names_the_nearest() -> None:
    stats = WeightStatistics(observe_weights(torch.ones(3)))
    with pytest.raises(ValueError, match="did you mean 'sparsity'"):
        stats["sparsty"]
