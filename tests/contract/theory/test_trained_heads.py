"""Trained heads: the quadrature against rows drawn from the model, and the exact theory."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from acutance.theory import (
    expected_effective_keys,
    expected_entropy,
    expected_head_metrics,
    expected_logsumexp,
    expected_top_weight,
)

N, STD = np.array([17.0, 449.0, 2049.0]), np.array([0.7, 2.0, 3.5])


def jensen_gap(keys: np.ndarray, std: np.ndarray) -> np.ndarray:
    return expected_logsumexp(keys, std) - np.log(keys)


def without_sink(n: np.ndarray, std: np.ndarray):
    return expected_head_metrics(
        n,
        first_gap=-60.0,
        first_gap_std=0.0,
        rest_logit_std=std,
        rest_jensen_gap=jensen_gap(n - 1, std),
    )


def test_without_sink_and_skew_it_is_the_exact_theory_of_normal_logits() -> None:
    found = without_sink(N, STD)
    assert_allclose(found.entropy, expected_entropy(N - 1, STD), atol=2e-4)
    assert_allclose(found.effective_keys, expected_effective_keys(N - 1, STD), rtol=1e-3)
    assert_allclose(found.top_weight, expected_top_weight(N - 1, STD), atol=3e-3)
    assert_allclose(found.first_weight, 0.0, atol=1e-20)
    assert_allclose(found.skewness, 0.0, atol=2e-3)


def test_a_steady_sink_splits_the_entropy_by_the_chain_rule() -> None:
    rest = without_sink(N, STD)
    found = expected_head_metrics(
        N,
        first_gap=np.log(3.0),
        first_gap_std=0.0,
        rest_logit_std=STD,
        rest_jensen_gap=jensen_gap(N - 1, STD),
    )
    binary = -0.75 * np.log(0.75) - 0.25 * np.log(0.25)
    assert_allclose(found.first_weight, 0.75)
    assert_allclose(found.entropy, binary + 0.25 * rest.entropy, rtol=1e-9)
    assert_allclose(found.top_weight, 0.75)
    assert_allclose(found.effective_keys, 1 / (0.75**2 + 0.25**2 / rest.effective_keys))


def test_limits() -> None:
    even = expected_head_metrics(
        5, first_gap=-np.log(4), first_gap_std=0, rest_logit_std=0, rest_jensen_gap=0
    )
    assert_allclose([even.entropy, even.effective_keys], [np.log(5), 5.0], rtol=1e-5)
    unknown = expected_head_metrics(
        9, first_gap=[np.nan, 0.0], first_gap_std=0, rest_logit_std=1, rest_jensen_gap=0.5
    )
    assert np.isnan(unknown.entropy).tolist() == [True, False]
    none = expected_head_metrics(
        np.zeros(0) + 9, first_gap=0, first_gap_std=0, rest_logit_std=1, rest_jensen_gap=0.5
    )
    assert none.entropy.shape == (0,)


@pytest.mark.parametrize("std", [30.0, 1e3, 1e6])
def test_logits_far_apart_leave_one_key(std: float) -> None:
    found = expected_head_metrics(
        64, first_gap=-9 * std, first_gap_std=0.1, rest_logit_std=std, rest_jensen_gap=2.3 * std
    )
    assert 0 <= found.entropy < 0.2
    assert 0 <= found.first_weight <= found.top_weight <= 1
    assert 1 <= found.effective_keys < 1.5


def test_a_larger_jensen_gap_is_more_skew_and_less_entropy() -> None:
    gaps = np.linspace(1.0, 3.0, 5)
    found = expected_head_metrics(
        1024, first_gap=-9, first_gap_std=0, rest_logit_std=2, rest_jensen_gap=gaps
    )
    assert (np.diff(found.skewness) > 0).all()
    assert (np.diff(found.entropy) < 0).all()


def measured(s: np.ndarray) -> tuple[float, dict[str, float]]:
    """Mean entropy of the rows of (rows, keys) logits, and the four numbers of such a head."""
    p = np.exp(s - np.logaddexp.reduce(s, axis=1, keepdims=True))
    rest = s[:, 1:]
    lse = np.logaddexp.reduce(rest, axis=1)
    gap = s[:, 0] - lse
    numbers = {
        "first_gap": gap.mean(),
        "first_gap_std": gap.std(),
        "rest_logit_std": rest.std(axis=1).mean(),
        "rest_jensen_gap": (lse - np.log(rest.shape[1]) - rest.mean(axis=1)).mean(),
    }
    return -(p * np.log(p)).sum(axis=1).mean(), numbers


@pytest.mark.parametrize("height", [8.0, 12.0])
def test_one_key_beyond_the_first_that_dominates_has_no_prediction(height: float) -> None:
    s = np.random.default_rng(0).standard_normal((200, 1024))
    s[:, 7] = height
    entropy, numbers = measured(s)
    assert entropy < 3.2  # the nearest possible rows have 5.6
    found = expected_head_metrics(1024, **numbers)
    assert np.isnan([found.entropy, found.effective_keys, found.top_weight, found.skewness]).all()
    first = np.exp(s[:, 0] - np.logaddexp.reduce(s, axis=1)).mean()
    assert_allclose(found.first_weight, first, rtol=0.2)


def test_a_possible_gap_beside_an_impossible_one_keeps_its_prediction() -> None:
    both = expected_head_metrics(
        256, first_gap=-9, first_gap_std=0, rest_logit_std=[0.0, 1, 0, 1, 30, 30],
        rest_jensen_gap=[0, 0.5, 0.5, 4, 60, 900],
    )  # fmt: skip
    assert np.isfinite(both.entropy).tolist() == [True, True, False, False, True, False]
    alone = expected_head_metrics(
        256, first_gap=-9, first_gap_std=0, rest_logit_std=1, rest_jensen_gap=0.5
    )
    assert_allclose(both.entropy[1], alone.entropy, atol=4e-4)


def test_a_gap_within_the_noise_of_a_possible_one_is_predicted() -> None:
    numbers = {"first_gap": -9.0, "first_gap_std": 0.0, "rest_logit_std": 0.05}
    gaps = 0.05**2 / 2 + np.array([0.0, 0.005, 0.05])
    found = expected_head_metrics(64, rest_jensen_gap=gaps, **numbers)
    assert np.isfinite(found.entropy).tolist() == [True, True, False]
    assert_allclose(found.entropy[:2], np.log(63), atol=0.02)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n": 2}, "n: there are a first key and at least two others, got n=2"),
        ({"rest_logit_std": -1.0}, "rest_logit_std: .*, got rest_logit_std=-1"),
        ({"first_gap_std": [1.0, -2.0]}, "first_gap_std: .*, got first_gap_std=-2"),
    ],
)
def test_arguments_outside_their_domain(changed: dict, message: str) -> None:
    given = {"n": 64, "first_gap": 0.0, "first_gap_std": 1.0}
    given |= {"rest_logit_std": 1.0, "rest_jensen_gap": 0.5} | changed
    with pytest.raises(ValueError, match=message):
        expected_head_metrics(given.pop("n"), **given)
