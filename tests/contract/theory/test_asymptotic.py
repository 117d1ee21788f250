"""Asymptotic forms: right where they should be, and as wrong elsewhere as their docstrings say."""

import math

import numpy as np
import pytest

from acutance.theory import (
    asymptotic_collision_gauss,
    asymptotic_entropy_gauss,
    asymptotic_logsumexp_gauss,
    expected_collision_gauss,
    expected_entropy_gauss,
    expected_logsumexp_gauss,
    expected_max_gauss,
)

FUNCTIONS = [asymptotic_collision_gauss, asymptotic_entropy_gauss, asymptotic_logsumexp_gauss]
PAIRS = [
    (asymptotic_entropy_gauss, expected_entropy_gauss),
    (asymptotic_collision_gauss, expected_collision_gauss),
    (asymptotic_logsumexp_gauss, expected_logsumexp_gauss),
]


@pytest.mark.parametrize(("form", "exact"), PAIRS)
def test_limits(form, exact):
    """For many keys, at scales a fixed factor away from where the pieces meet."""
    for n, rel in [(1e6, 3e-3), (1e12, 1e-4)]:
        low = 0.25 * math.sqrt(2 * math.log(n))
        assert form(n, low) == pytest.approx(exact(n, low), rel=rel)
        # E log Z - γ M_n is small beside γ M_n only as 1/γ².
        assert form(n, 1e3) == pytest.approx(exact(n, 1e3), rel=2e-3)
    assert form(1e12, 0.5) == pytest.approx(exact(1e12, 0.5), rel=1e-9)


def test_entropy_is_wrong_by_nats_at_the_critical_scale():
    n = 65536
    critical = math.sqrt(2 * math.log(n))
    assert expected_entropy_gauss(n, critical) == pytest.approx(3.4, abs=0.05)
    below, above = asymptotic_entropy_gauss(n, [critical * (1 - 1e-12), critical * (1 + 1e-12)])
    assert below == pytest.approx(0, abs=1e-9)
    assert above == pytest.approx(11, abs=0.5)
    multiples = np.array([2.0, 4.0]) * expected_max_gauss(n)
    excess = asymptotic_entropy_gauss(n, multiples) / expected_entropy_gauss(n, multiples) - 1
    assert excess == pytest.approx([0.105, 0.021], abs=0.001)


def test_collision_in_its_three_pieces():
    n = 65536
    values = asymptotic_collision_gauss(n, [1.0, 4.0, 20.0])
    middle = math.exp(-0.5 * (math.log(n) / 4 - 2) ** 2)
    last = 1 - expected_max_gauss(n) / 20
    assert values == pytest.approx([math.e / n, middle, last], rel=1e-12)


def test_broadcasting():
    for function in FUNCTIONS:
        assert function([[16], [256]], [0.5, 1.0, 9.0]).shape == (2, 3)
        assert isinstance(function(16, 1.0), float)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1.0), r"^n: the number of keys must be finite and at least 2, got n=1$"),
        ((16, -1.0), r"^gamma: .* at least 0, got gamma=-1$"),
    ],
)
def test_domain(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
