"""Entropies of a row against digits from mpmath, identities, bounds and Monte Carlo."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from acutance import theory
from acutance.theory import (
    EntropyBounds,
    entropy_bounds,
    entropy_floor_from_spectral_norm,
    entropy_lower_bound,
    expected_collision_gauss,
    expected_entropy_gauss,
    expected_logsumexp_gauss,
    expected_max_gauss,
    jensen_gap,
    max_gap,
    mean_field_entropy,
    onehot_entropy,
    softmax_entropy,
    uniform_entropy_drop,
)

NAMES = {
    "entropy_lower_bound",
    "jensen_gap",
    "max_gap",
    "mean_field_entropy",
    "onehot_entropy",
    "softmax_entropy",
    "uniform_entropy_drop",
}
REFERENCE = [
    case
    for case in json.loads(Path(__file__).with_name("reference_closed_forms.json").read_text())
    if case["function"] in NAMES
]
ROW_FUNCTIONS = [softmax_entropy, jensen_gap, max_gap, mean_field_entropy]
ROW = [2.0, 1.0, 0.5, -0.25, -3.0]


def test_reference_has_every_function():
    assert len(REFERENCE) == 302
    assert {case["function"] for case in REFERENCE} == NAMES


@pytest.mark.parametrize("function", sorted({case["function"] for case in REFERENCE}))
def test_reference_values(function):
    for case in REFERENCE:
        if case["function"] == function:
            value = getattr(theory, function)(**case["args"])
            expected = pytest.approx(case["value"], rel=case["rel_tol"], abs=1e-290)
            assert value == expected, case["args"]


@pytest.mark.parametrize("scale", [0.0, 1e-6, 0.3, 1.0, 5.0, 100.0])
def test_entropy_is_mean_field_plus_two_gaps(scale):
    logits = np.random.default_rng(1).standard_normal((20, 300))
    entropy = softmax_entropy(logits, scale)
    parts = [function(logits, scale) for function in (mean_field_entropy, jensen_gap, max_gap)]
    rounding = 1e-14 * (1 + scale * 10)
    assert sum(parts) == pytest.approx(entropy, rel=1e-13, abs=rounding)
    assert (parts[0] <= entropy + rounding).all()
    assert (parts[1] >= 0).all()
    assert (parts[2] >= 0).all()
    assert (parts[1] <= (scale * np.ptp(logits, axis=-1)) ** 2 / 8).all()


def test_entropy_agrees_with_its_definition():
    logits = 3 * np.random.default_rng(2).standard_normal((50, 40))
    log_p = log_softmax(logits, axis=-1)
    direct = -(np.exp(log_p) * log_p).sum(-1)
    assert softmax_entropy(logits) == pytest.approx(direct, rel=1e-12, abs=0)
    divergence = -math.log(40) - log_p.mean(-1)  # of p from the uniform distribution
    assert jensen_gap(logits) == pytest.approx(divergence, rel=1e-12, abs=0)


def test_a_common_shift_changes_nothing():
    logits = np.arange(6.0) ** 2
    for function in ROW_FUNCTIONS:
        assert function(logits + 2.0**30) == pytest.approx(function(logits), rel=1e-14, abs=0)


def test_tied_maxima_share_the_row():
    assert softmax_entropy([5.0, 5.0, 5.0, -1e9]) == pytest.approx(math.log(3), rel=1e-15)
    assert max_gap([5.0, 5.0, 5.0, -1e9]) == 0.0
    assert softmax_entropy([3.0]) == jensen_gap([3.0]) == max_gap([3.0]) == 0.0


def test_extreme_scales():
    assert softmax_entropy(ROW, 0.0) == math.log(5)
    assert [function(ROW, 0.0) for function in (jensen_gap, max_gap)] == [0.0, 0.0]
    found = softmax_entropy([1e308, -1e308, 0.0], [0.0, 1.0, 1e300]).tolist()
    assert found[0] == pytest.approx(math.log(3), rel=4e-16, abs=0)  # log1p's last bit varies
    assert found[1:] == [0.0, 0.0]
    variance = np.var(ROW)
    assert jensen_gap(ROW, 1e-9) == pytest.approx(variance * 1e-18 / 2, rel=1e-8, abs=0)
    assert softmax_entropy([0.0, -700.0]) == pytest.approx(701 * math.exp(-700), rel=1e-12, abs=0)


@pytest.mark.parametrize(("n", "gamma", "rows"), [(64, 1.0, 20_000), (256, 1.5, 12_000)])
def test_gaussian_rows_monte_carlo(n, gamma, rows):
    """Within 4 standard errors, on so many rows that a 5 % wrong formula would be over 5 away."""
    logits = np.random.default_rng(n).standard_normal((rows, n))
    attended = gamma**2 * (1 - expected_collision_gauss(n, gamma))
    expected = {
        softmax_entropy: expected_entropy_gauss(n, gamma),
        jensen_gap: expected_logsumexp_gauss(n, gamma) - math.log(n),
        max_gap: gamma * expected_max_gauss(n) - attended,
        mean_field_entropy: math.log(n) - gamma * expected_max_gauss(n),
    }
    for function, value in expected.items():
        sample = function(logits, gamma)
        error = sample.std(ddof=1) / math.sqrt(rows)
        assert abs(sample.mean() - value) < 4 * error, function.__name__
        assert 0.05 * abs(value) > 9 * error, f"{function.__name__}: too few rows to notice 5 %"


@pytest.mark.parametrize("half_range", [0.5, 2.0, 8.0])
def test_uniform_logits_monte_carlo(half_range):
    n, rows = 20_000, 200
    logits = half_range * np.random.default_rng(3).uniform(-1, 1, (rows, n))
    sample = math.log(n) - softmax_entropy(logits)
    error = sample.std(ddof=1) / math.sqrt(rows)
    value = uniform_entropy_drop(half_range)
    bias = math.exp(2 * half_range) / n if half_range < 2 else 4 * half_range / n  # of finite n
    assert abs(sample.mean() - value) < 4 * error + bias
    assert 0.05 * value > 9 * error + bias


def test_uniform_drop_by_midpoint_sum():
    for half_range in (0.3, 0.99, 1.01, 7.0):
        middles = (np.arange(200_000) + 0.5) / 100_000 - 1
        direct = math.log(middles.size) - softmax_entropy(middles, half_range)
        assert uniform_entropy_drop(half_range) == pytest.approx(direct, rel=1e-7)


def test_uniform_drop_limits():
    size = np.geomspace(1e-6, 1e6, 500)
    drop = uniform_entropy_drop(size)
    assert (np.diff(drop) > 0).all()
    assert uniform_entropy_drop(0.0) == 0.0
    assert drop[:50] == pytest.approx(size[:50] ** 2 / 6, rel=1e-7)
    assert drop[-200:] == pytest.approx(np.log(2 * size[-200:]) - 1, rel=1e-13)


@pytest.mark.parametrize("n", [1, 2, 10, 1000])
@pytest.mark.parametrize("lam", [0.0, 0.5, 3.0, 40.0])
def test_onehot_entropy_is_that_of_the_row(n, lam):
    row = np.zeros(n)
    row[n // 2] = 1.0
    assert onehot_entropy(n, lam) == pytest.approx(softmax_entropy(row, lam), rel=1e-13, abs=0)


def test_bounds_hold_for_random_rows():
    rng = np.random.default_rng(4)
    shapes = [
        rng.standard_normal((400, 12)),
        rng.exponential(size=(400, 12)),
        rng.random((400, 12)),
    ]
    two_level = np.where(np.arange(12) < rng.integers(1, 12, (400, 1)), 1.0, 0.0)
    logits = np.concatenate([*shapes, two_level]) * rng.uniform(0.01, 8, (1600, 1))
    entropy = softmax_entropy(logits)
    p_max = np.exp(log_softmax(logits, axis=-1)).max(-1)
    bounds = entropy_bounds(
        12, logits.max(-1), logits.mean(-1), np.ptp(logits, axis=-1), p_max=p_max
    )
    assert (bounds.lower <= entropy + 1e-12).all()
    assert (entropy <= bounds.upper + 1e-12).all()
    assert (bounds.lower >= math.log(12) - np.ptp(logits, axis=-1) ** 2 / 8 - 1e-12).all()
    # not by being useless: rows with one key above equal others attain the upper bound
    tight = two_level.sum(-1) == 1
    assert tight.sum() > 10
    assert bounds.upper[-400:][tight] == pytest.approx(entropy[-400:][tight], rel=1e-9)


def test_bounds_are_attained_by_two_level_rows():
    from acutance.theory import cosine_best_count

    n, tau = 64, 0.5
    row = np.where(np.arange(n) < cosine_best_count(n, tau), 1.0, -1.0)
    bounds = entropy_bounds(n, 1.0, row.mean(), 2.0, scale=1 / tau)
    assert bounds.lower == pytest.approx(softmax_entropy(row, 1 / tau), rel=1e-12)


def test_bounds_scale_shape_and_ends():
    bounds = entropy_bounds(5, 2.0, 0.05, 5.0, scale=[0.0, 1e-3, 1.0, 1e200])
    assert isinstance(bounds, EntropyBounds)
    assert bounds.lower[0] == bounds.upper[0] == math.log(5)
    assert bounds.upper.shape == (4,)
    assert (np.diff(bounds.lower) < 0).all()
    assert bounds.lower[-1] >= 0
    single = entropy_bounds(5, 2.0, 0.05, 5.0, p_max=1.0)
    assert isinstance(single.lower, float)
    assert single.upper == 0.0
    shifted = entropy_bounds(5, 102.0, 100.05, 5.0)
    assert shifted.lower == pytest.approx(entropy_bounds(5, 2.0, 0.05, 5.0).lower, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 16, 200])
@pytest.mark.parametrize("norm", [0.1, 1.0, 3.0, 8.0])
def test_no_row_of_that_norm_has_less_entropy(n, norm):
    floor = entropy_lower_bound(n, norm)
    logits = np.random.default_rng(n).standard_normal((2_000, n)) ** 3
    logits -= logits.mean(-1, keepdims=True)
    logits *= norm / np.linalg.norm(logits, axis=-1, keepdims=True)
    assert softmax_entropy(logits).min() >= floor * (1 - 1e-12)
    counts = np.arange(1, n)[:, None]  # of keys at the upper of two levels
    levels = np.where(np.arange(n) < counts, 0.0, -norm * np.sqrt(n / (counts * (n - counts))))
    entropies = softmax_entropy(levels)
    assert entropies.min() >= floor * (1 - 1e-12)
    assert entropies[0] == pytest.approx(floor, rel=1e-12, abs=0)  # one against the rest attains it


def test_entropy_floor_values():
    floor = entropy_lower_bound(16, [1.0, 3.0, 6.0, 10.0])
    assert floor == pytest.approx([2.7168, 1.7675, 0.2137, 0.0056], abs=5e-5)


def test_spectral_norm_bounds_every_row_of_a_head():
    rng = np.random.default_rng(5)
    inputs = rng.standard_normal((24, 16))
    query, key = rng.standard_normal((2, 16, 8)) / 4
    logits = inputs @ query @ key.T @ inputs.T
    spectral = np.linalg.norm(query @ key.T, 2)
    gram = np.linalg.norm(inputs @ inputs.T, 2)
    floor = entropy_floor_from_spectral_norm(24, spectral, gram, scale=8**-0.5)
    assert np.linalg.norm(logits, axis=-1).max() <= spectral * gram
    assert 0 < floor <= softmax_entropy(logits, 8**-0.5).min()
    norm = spectral * gram * 8**-0.5
    # e^−norm: an ulp of the norm, by the order of its factors, is `norm` ulps of the floor
    close = 4 * norm * np.finfo(float).eps
    assert floor == pytest.approx(entropy_lower_bound(24, norm), rel=close)


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
def test_rows_broadcast_with_scales(function):
    logits = np.random.default_rng(6).standard_normal((3, 7))
    table = function(logits, np.array([[0.0], [1.0], [2.0], [9.0]]))
    assert table.shape == (4, 3)
    assert table.dtype == np.float64
    assert table[2, 1] == function(logits[1], 2.0)
    assert isinstance(function([1, 2], 1), float)
    assert function(np.empty((0, 4))).shape == (0,)


def test_other_arguments_broadcast():
    assert uniform_entropy_drop([[0.5, 2.0]]).shape == (1, 2)
    assert isinstance(uniform_entropy_drop(2), float)
    for function in (onehot_entropy, entropy_lower_bound, entropy_floor_from_spectral_norm):
        table = function(np.array([[2], [50]]), [0.0, 1.0, 5.0])
        assert table.shape == (2, 3)
        assert table[1, 2] == function(50, 5.0)
        assert isinstance(function(50, 5), float)


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
@pytest.mark.parametrize(
    ("logits", "scale", "message"),
    [
        ([1.0, math.inf], 1.0, r"^logits: logits must be finite, got logits=inf$"),
        ([1.0, math.nan], 1.0, r"^logits: .* got logits=nan$"),
        ([1.0, 2.0], -1.0, r"^scale: .* at least 0, got scale=-1$"),
        ([1.0, 2.0], math.inf, r"^scale: .* finite .* got scale=inf$"),
        ([], 1.0, r"^logits: .* n >= 1, got \(0,\)$"),
        (1.0, 1.0, r"^logits: .* n >= 1, got \(\)$"),
    ],
)
def test_row_domain(function, logits, scale, message):
    with pytest.raises(ValueError, match=message):
        function(logits, scale)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: uniform_entropy_drop(-1.0), r"^half_range: .* got half_range=-1$"),
        (lambda: onehot_entropy(0.5, 1.0), r"^n: .* at least 1, got n=0.5$"),
        (lambda: onehot_entropy(4, -1.0), r"^lam: .* at least 0, got lam=-1$"),
        (lambda: entropy_lower_bound(1, 1.0), r"^n: .* at least 2, got n=1$"),
        (lambda: entropy_lower_bound(4, -1.0), r"^logit_norm: .* got logit_norm=-1$"),
        (lambda: entropy_floor_from_spectral_norm(4, -1.0), r"^spectral_norm: .* got spec.*=-1$"),
        (lambda: entropy_floor_from_spectral_norm(4, 1.0, -2.0), r"^gram_norm: .* got gram.*=-2$"),
        (lambda: entropy_bounds(1, 1.0, 0.0, 1.0), r"^n: .* at least 2, got n=1$"),
        (lambda: entropy_bounds(4, 1.0, 1.5, 1.0), r"^mean: .* s_max, got mean=1.5$"),
        (lambda: entropy_bounds(4, 1.0, -0.5, 1.0), r"^mean: .* s_max, got mean=-0.5$"),
        (lambda: entropy_bounds(4, 1.0, 0.5, -1.0), r"^spread: .* got spread=-1$"),
        (lambda: entropy_bounds(4, 1.0, 0.5, 1.0, p_max=0.1), r"^p_max: .* got p_max=0.1$"),
        (lambda: entropy_bounds(4, 1.0, 0.5, 1.0, p_max=1.1), r"^p_max: .* got p_max=1.1$"),
        (lambda: entropy_bounds(4, 1.0, 0.5, 1.0, scale=-1.0), r"^scale: .* got scale=-1$"),
    ],
)
def test_domain(call, message):
    with pytest.raises(ValueError, match=message):
        call()
