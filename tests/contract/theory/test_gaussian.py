"""Gaussian rows against closed forms, other integrals, identities, limits and Monte Carlo."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import log_softmax, logsumexp

from acutance import theory
from acutance.theory import (
    expected_collision_gauss,
    expected_entropy_gauss,
    expected_logsumexp_gauss,
    expected_max_gauss,
)

REFERENCE = json.loads(Path(__file__).with_name("reference_gauss.json").read_text())
ROW_FUNCTIONS = [expected_entropy_gauss, expected_logsumexp_gauss, expected_collision_gauss]


def test_reference_has_every_function():
    assert len(REFERENCE) == 18
    assert len({case["function"] for case in REFERENCE}) == 4


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: f"{case['function']}{case['args']}")
def test_reference_value(case):
    value = getattr(theory, case["function"])(**case["args"])
    assert value == pytest.approx(case["value"], rel=case["rel_tol"], abs=0)


def test_expected_max_closed_forms():
    root_pi = math.sqrt(math.pi)
    exact = [0.0, 1 / root_pi, 1.5 / root_pi, 6 * math.atan(math.sqrt(2)) / (math.pi * root_pi)]
    assert expected_max_gauss([1, 2, 3, 4]) == pytest.approx(exact, rel=1e-12, abs=0)


@pytest.mark.parametrize("gamma", [1e-3, 0.3, 0.5, 2.0, 12.0])
def test_two_keys_are_one_integral(gamma):
    """With two keys only z_1 - z_2 ~ N(0, 2) matters."""

    def average(function):
        def integrand(x):
            return function(math.sqrt(2) * gamma * x) * math.exp(-x * x / 2)

        total, _ = quad(integrand, 0, 40, epsabs=0, epsrel=1e-12, points=[0.1, 1, 5], limit=400)
        return total * math.sqrt(2 / math.pi)

    def entropy(gap):
        small = math.exp(-gap)
        return math.log1p(small) + gap * small / (1 + small)

    collision = average(lambda gap: (1 + math.exp(-2 * gap)) / (1 + math.exp(-gap)) ** 2)
    logsumexp_ = average(lambda gap: gap / 2 + math.log1p(math.exp(-gap)))
    assert expected_entropy_gauss(2, gamma) == pytest.approx(average(entropy), rel=1e-10, abs=0)
    assert expected_collision_gauss(2, gamma) == pytest.approx(collision, rel=1e-10, abs=0)
    assert expected_logsumexp_gauss(2, gamma) == pytest.approx(logsumexp_, rel=1e-10, abs=0)


@pytest.mark.parametrize("gamma", [0.2, 0.8])
def test_three_keys_by_gauss_hermite(gamma):
    nodes, weights = np.polynomial.hermite_e.hermegauss(48)
    weights = weights / weights.sum()
    logits = gamma * np.stack(np.meshgrid(nodes, nodes, nodes), axis=-1)
    volume = np.einsum("i,j,k->ijk", weights, weights, weights)
    log_p = log_softmax(logits, axis=-1)
    p = np.exp(log_p)
    expected = [
        (volume * row).sum()
        for row in (-(p * log_p).sum(-1), logsumexp(logits, axis=-1), (p * p).sum(-1))
    ]
    values = [function(3, gamma) for function in ROW_FUNCTIONS]
    assert values == pytest.approx(expected, rel=1e-10, abs=0)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("n", "gamma", "rows"),
    [
        (3, 1.5, 200_000),
        (64, 0.4, 4_000),
        (64, 3.0, 60_000),
        (256, 2.5, 40_000),
        (256, 8.0, 40_000),
        (4096, 1.0, 1_000),
    ],
)
def test_monte_carlo(n, gamma, rows):
    """Within 4 standard errors, on so many rows that a 5 % wrong formula would be over 5 away."""
    logits = gamma * np.random.default_rng(1_000 + n).standard_normal((rows, n))
    log_p = log_softmax(logits, axis=-1)
    p = np.exp(log_p)
    samples = [-(p * log_p).sum(-1), logsumexp(logits, axis=-1), (p * p).sum(-1)]
    for function, sample in zip(ROW_FUNCTIONS, samples, strict=True):
        value = function(n, gamma)
        error = sample.std(ddof=1) / math.sqrt(rows)
        assert abs(sample.mean() - value) < 4 * error, function.__name__
        assert 0.05 * value > 9 * error, f"{function.__name__}: too few rows to notice 5 %"


@pytest.mark.parametrize("n", [2, 16, 4096, 1e7, 1e12])
@pytest.mark.parametrize("gamma", [0.05, 0.499, 0.501, 2.0, 6.0, 30.0])
def test_stein_identity(n, gamma):
    """The slope of E log Z is the mean attended logit, gamma (1 - E Y)."""
    step = 1e-3 * gamma
    points = gamma + step * np.array([-2, -1, 1, 2])
    slope = expected_logsumexp_gauss(n, points) @ [1, -8, 8, -1] / (12 * step)
    stein = gamma * (1 - expected_collision_gauss(n, gamma))
    rounding = 1e-12 * expected_logsumexp_gauss(n, gamma) / step
    assert slope == pytest.approx(stein, rel=1e-8, abs=rounding)


@pytest.mark.parametrize(("n", "gamma"), [(16, 3.0), (4096, 2.5)])
def test_collision_alone_determines_entropy(n, gamma):
    nodes, weights = np.polynomial.legendre.leggauss(40)
    points = gamma * (nodes + 1) / 2
    area = gamma / 2 * weights @ (points * expected_collision_gauss(n, points))
    end = gamma**2 * expected_collision_gauss(n, gamma)
    entropy = math.log(n) - gamma**2 / 2 - area + end
    assert expected_entropy_gauss(n, gamma) == pytest.approx(entropy, rel=1e-11, abs=0)


@pytest.mark.parametrize("n", [1, 2, 7, 4096, 1e8, 1e12, 1e30])
def test_equal_logits_limit(n):
    gamma = np.array([0.0, 1e-12, 1e-6, 1e-3])
    spread = gamma**2 * (1 - 1 / n) / 2  # of a sample of n, to the second order
    near = {"rel": 1e-12, "abs": 1e-11}
    assert expected_entropy_gauss(n, gamma) == pytest.approx(math.log(n) - spread, **near)
    assert expected_logsumexp_gauss(n, gamma) == pytest.approx(math.log(n) + spread, **near)
    collision = (1 + 2 * spread) / n
    assert expected_collision_gauss(n, gamma) == pytest.approx(collision, rel=1e-11, abs=0)


@pytest.mark.parametrize("n", [2, 64, 65536, 1e12])
def test_hard_attention_limit(n):
    gamma, top = 1e7, expected_max_gauss(n)
    near = {"rel": 1e-5, "abs": 0}
    assert gamma * expected_entropy_gauss(n, gamma) == pytest.approx(math.pi**2 / 6 * top, **near)
    assert expected_logsumexp_gauss(n, gamma) / gamma == pytest.approx(top, **near)
    assert gamma * (1 - expected_collision_gauss(n, gamma)) == pytest.approx(top, **near)
    assert 0 < expected_entropy_gauss(n, 1e200) < 1e-198


def test_many_keys_limit():
    n, gamma = 1e12, np.array([0.5, 1.0, 1.5])
    log_n, power = math.log(n), np.exp(gamma**2)
    correction = ((gamma**2 - 0.5) * power + 0.5) / n
    entropy = log_n - gamma**2 / 2 + correction
    assert expected_entropy_gauss(n, gamma) == pytest.approx(entropy, rel=1e-13, abs=0)
    assert expected_collision_gauss(n, gamma) == pytest.approx(power / n, rel=1e-8, abs=0)


def test_one_key_has_nothing_to_choose():
    gamma = [0.0, 0.3, 1.0, 40.0]
    assert (expected_entropy_gauss(1, gamma) == 0).all()
    assert (expected_logsumexp_gauss(1, gamma) == 0).all()
    assert expected_collision_gauss(1, gamma) == pytest.approx(1, rel=1e-12, abs=0)


def test_entropy_falls_and_collision_rises_with_gamma():
    gamma = np.linspace(0, 20, 41)
    assert (np.diff(expected_entropy_gauss(512, gamma)) < 0).all()
    assert (np.diff(expected_collision_gauss(512, gamma)) > 0).all()


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
def test_arguments_broadcast(function):
    n, gamma = np.array([[2], [64]]), np.array([0.5, 1.0, 2.0])
    table = function(n, gamma)
    assert table.shape == (2, 3)
    assert table.dtype == np.float64
    assert table[1, 2] == function(64, 2.0)
    assert isinstance(function(64, 2), float)
    assert function(np.empty((0, 3)), gamma).shape == (0, 3)


def test_expected_max_shapes():
    assert expected_max_gauss(np.array([[2, 3]])).shape == (1, 2)
    assert isinstance(expected_max_gauss(2), float)


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
@pytest.mark.parametrize(
    ("n", "gamma", "message"),
    [
        (0, 1.0, r"^n: .* at least 1, got n=0$"),
        ([4, -2], 1.0, r"^n: .* at least 1, got n=-2$"),
        (math.inf, 1.0, r"^n: .* finite .* got n=inf$"),
        (math.nan, 1.0, r"^n: .* finite .* got n=nan$"),
        (4, -0.5, r"^gamma: .* at least 0, got gamma=-0.5$"),
        (4, math.inf, r"^gamma: .* finite .* got gamma=inf$"),
        (4, [0.0, math.nan], r"^gamma: .* finite .* got gamma=nan$"),
    ],
)
def test_row_domain(function, n, gamma, message):
    with pytest.raises(ValueError, match=message):
        function(n, gamma)


def test_expected_max_domain():
    with pytest.raises(ValueError, match=r"^n: .* got n=0.5$"):
        expected_max_gauss(0.5)
