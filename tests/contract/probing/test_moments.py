"""Moments against numpy, bin by bin and split by split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from acutance.probing import Moments

ONE_OF_EACH_SCALE = ("top_weight", "entropy", "effective_keys", "logit_std", "lse")


def random_values(dtype: torch.dtype, rows: int = 400, heads: int = 3) -> Tensor:
    """(metrics, heads, rows), in and beyond the histograms' ranges, a third of them holed."""
    values = torch.randn(len(ONE_OF_EACH_SCALE), heads, rows, dtype=torch.float64)
    values *= torch.tensor([0.7, 6.0, 1e4, 1e3, 1e4]).double().view(-1, 1, 1)
    values[1:3] = values[1:3].abs()
    holes = torch.tensor([torch.nan, torch.inf, -torch.inf]).double()
    where = torch.rand(values.shape) < 0.3
    where[2] = False  # one metric is whole
    where[4, 1] = True  # and one head of another is empty
    values = torch.where(where, holes[torch.randint(3, values.shape)], values)
    return values.to(dtype)


def test_moments_are_float64_and_int64() -> None:
    moments = Moments.of(random_values(torch.float32), ONE_OF_EACH_SCALE)
    dtypes = {name: tensor.dtype for name, tensor in moments.tensors().items()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.int64} == {
        "count",
        "histogram",
    }
    assert set(dtypes.values()) == {torch.int64, torch.float64}


def test_a_distant_mean_does_not_spoil_the_spread() -> None:
    values = 1e7 + torch.randn(1, 1, 1000, dtype=torch.float64)
    expected = values.numpy().std()
    assert float(Moments.of(values, ("lse",)).std) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("split", [0, 1, 150, 399, 400])
def test_merge_of_any_split_is_the_whole(split: int) -> None:
    values = random_values(torch.float64)
    whole = Moments.of(values, ONE_OF_EACH_SCALE)
    left = Moments.of(values[..., :split], ONE_OF_EACH_SCALE)
    right = Moments.of(values[..., split:], ONE_OF_EACH_SCALE)
    for merged in (left.merge(right), right.merge(left)):
        for exact in ("count", "low", "high", "histogram"):
            assert torch.equal(getattr(merged, exact), getattr(whole, exact))
        for close in ("mean", "std"):
            a, b = getattr(merged, close), getattr(whole, close)
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_merge_is_associative_and_none_is_its_identity() -> None:
    parts = [
        Moments.of(part, ONE_OF_EACH_SCALE) for part in random_values(torch.float64).chunk(3, -1)
    ]
    left = parts[0].merge(parts[1]).merge(parts[2])
    right = parts[0].merge(parts[1].merge(parts[2]))
    assert torch.allclose(left.mean, right.mean, rtol=1e-12, atol=1e-12)
    assert torch.allclose(left.M2, right.M2, rtol=1e-12, atol=1e-12)
    none = Moments.none(3, len(ONE_OF_EACH_SCALE))
    for merged in (parts[0].merge(none), none.merge(parts[0])):
        for name, tensor in parts[0].tensors().items():
            assert torch.equal(getattr(merged, name), tensor), name


def test_no_rows_are_none() -> None:
    empty = Moments.of(torch.zeros(2, 3, 0), ("entropy", "lse"))
    for name, tensor in Moments.none(3, 2).tensors().items():
        assert torch.equal(getattr(empty, name), tensor)
    assert empty.std.isnan().all()


def test_heads_and_join_are_inverse() -> None:
    moments = Moments.of(random_values(torch.float64), ONE_OF_EACH_SCALE)
    joined = Moments.join([moments.heads(0, 1), moments.heads(1, 3)])
    for name, tensor in moments.tensors().items():
        assert torch.equal(getattr(joined, name), tensor)


def test_values_beyond_the_ends_are_in_the_outer_bins() -> None:
    values = torch.tensor([-1e30, -0.5, 1.0, 1.5, 1e30]).view(1, 1, -1)
    histogram = Moments.of(values, ("top_weight",)).histogram.flatten()
    assert (int(histogram[0]), int(histogram[-1]), int(histogram.sum())) == (2, 3, 5)


def test_metrics_keep_their_columns_where_some_have_holes() -> None:
    values = torch.arange(24.0).view(4, 2, 3)
    values[0, 0, 0] = values[2, 1, 2] = torch.nan
    moments = Moments.of(values, ("lse", "entropy", "max_logit", "n_keys"))
    assert moments.count.tolist() == [[2, 3, 3, 3], [3, 3, 2, 3]]
    assert moments.mean.tolist() == [[1.5, 7.0, 13.0, 19.0], [4.0, 10.0, 15.5, 22.0]]
