"""Scales for a target: they give it back, agree with tables, and say when there is none."""

import math

import numpy as np
import pytest
from scipy import stats

from acutance.theory import (
    expected_collision,
    expected_entropy,
    scale_for_effective_keys,
    scale_for_entropy,
    scale_for_information,
)

FUNCTIONS = [scale_for_entropy, scale_for_effective_keys, scale_for_information]
FAMILIES = [
    ("gaussian", {}),
    ("uniform", {}),
    ("exponential", {}),
    ("cosine", {"d": 2}),
    ("cosine", {"d": 128}),
    ("stretched", {"rho": 0.5}),
    ("pareto", {"a": 0.6}),
    (stats.norm(3, 1e-3), {}),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "parameter"),
    FAMILIES,
    ids=lambda value: str(value) if isinstance(value, str | dict) else "scipy",
)
def test_the_target_is_given_back(family, parameter):
    for n, fraction in [(2, 0.9), (300, 0.2)]:
        log_n = math.log(n)
        scale = scale_for_information(n, fraction, family, **parameter)
        entropy = expected_entropy(n, scale, family, **parameter)
        assert entropy == pytest.approx((1 - fraction) * log_n, rel=1e-11)
        wanted = (1 - fraction) * log_n
        by_entropy = scale_for_entropy(n, wanted, family, **parameter)
        assert by_entropy == pytest.approx(scale, rel=1e-9)
        keys = 1 + (n - 1) * fraction / 3
        scale = scale_for_effective_keys(n, keys, family, **parameter)
        collision = expected_collision(n, scale, family, **parameter)
        assert 1 / collision == pytest.approx(keys, rel=1e-10)


# n, and the Gaussian scales of H = 0.9 log n, of H = 0.5 log n and of E Σp² = 1/2
CROSSOVERS = [
    (16, 0.7973, 2.4587, 3.1802),
    (4096, 1.2910, 3.1512, 7.0495),
    (2**20, 1.6651, 3.8352, 9.5873),
]


def test_gaussian_crossovers():
    n, *expected = np.array(CROSSOVERS).T
    assert scale_for_information(n, 0.1) == pytest.approx(expected[0], abs=6e-5)
    assert scale_for_entropy(n, np.log(n) / 2) == pytest.approx(expected[1], abs=6e-5)
    assert scale_for_effective_keys(n, 2.0) == pytest.approx(expected[2], abs=6e-5)


def test_scales_that_keep_the_entropy_of_512_keys():
    scales = scale_for_entropy([2048, 8192, 65536], expected_entropy(512, 1.0))
    assert scales == pytest.approx([1.9664, 2.6235, 3.4148], abs=6e-5)


def test_unit_of_the_scores():
    """A width is a scale, a shift is nothing."""
    wide = scale_for_entropy(512, 3.0, stats.norm(-7, 50))
    assert 50 * wide == pytest.approx(scale_for_entropy(512, 3.0), rel=1e-10)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "power"), [("uniform", 1.0), ("exponential", 0.0), ("gumbel", 0.0)]
)
def test_growth_with_the_number_of_keys(family, power):
    few, many = scale_for_entropy([2.0**14, 2.0**20], 2.0, family)
    assert math.log2(many / few) / 6 == pytest.approx(power, abs=2e-3)


@pytest.mark.slow
def test_monotone():
    fractions = np.array([1e-6, 0.1, 0.5, 0.999])
    assert (np.diff(scale_for_information(50, fractions, "laplace")) > 0).all()
    assert (np.diff(scale_for_entropy(50, np.log(50) * fractions, "laplace")) < 0).all()
    assert (np.diff(scale_for_effective_keys(50, 1 + 49 * fractions, "laplace")) < 0).all()


def test_targets_next_to_their_ends():
    """H = log n - γ² Var / 2 (1 - 1/n) for small scales; E H = π²/(6γ) · closeness for large."""
    small = scale_for_information(100, 1e-6)
    assert small == pytest.approx(math.sqrt(2e-6 * math.log(100) / 0.99), rel=1e-4)
    large = scale_for_entropy(100, 1e-9, "exponential")
    assert large == pytest.approx(math.pi**2 / 6 * 1e9, rel=1e-6)
    # Within rounding of log n, so is the scale.
    nearest = scale_for_entropy(100, np.nextafter(math.log(100), 0))
    assert 0 <= nearest < 1e-6
    assert expected_entropy(100, nearest) == pytest.approx(math.log(100), rel=1e-14)


def test_arguments_broadcast():
    assert scale_for_entropy([[16], [64]], [1.0, 2.0], "uniform").shape == (2, 2)
    assert scale_for_effective_keys(16, [2, 3]).shape == (2,)
    assert isinstance(scale_for_information(16, 0.5, "cosine", d=8), float)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (scale_for_entropy, (16, 0.0), r"^entropy: .* got entropy=0$"),
        (scale_for_entropy, (16, 2.8), r"^entropy: .* log n = 2.77259 .* got entropy=2.8$"),
        (scale_for_entropy, (16, math.nan), r"^entropy: .* got entropy=nan$"),
        (scale_for_effective_keys, (16, 1.0), r"^effective_keys: .* got effective_keys=1$"),
        (scale_for_effective_keys, (16, [2, 16]), r"^effective_keys: .* got effective_keys=16$"),
        (scale_for_information, (16, 0.0), r"^fraction: .* got fraction=0$"),
        (scale_for_information, (16, 1.0), r"^fraction: .* got fraction=1$"),
        (scale_for_information, (1.0, 0.5), r"^n: .* at least 2, got n=1$"),
        (scale_for_entropy, (16, 1.0, "cosine"), r'^d: the family "cosine" needs d, got None$'),
        (scale_for_entropy, (16, 1.0, "normal"), r'^family: must be one of .* got "normal"$'),
    ],
)
def test_domain(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_family_is_a_law(function):
    with pytest.raises(
        TypeError, match=r"^family: must be a name or a frozen continuous distribution"
    ):
        function(16, 0.5 if function is scale_for_information else 1.5, stats.poisson(1))
