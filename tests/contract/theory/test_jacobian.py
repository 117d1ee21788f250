"""The softmax Jacobian against digits from mpmath, explicit matrices, laws and Monte Carlo."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import digamma, softmax

from acutance import theory
from acutance.theory import (
    expected_collision_gauss,
    expected_entropy_gauss,
    expected_max_gauss,
    frozen_collision,
    frozen_entropy,
    frozen_jacobian_fro2,
    jacobian_fro2,
    jacobian_trace,
    scale_gradmax_annealed,
    softmax_entropy,
)

NAMES = {
    "frozen_collision",
    "frozen_entropy",
    "frozen_jacobian_fro2",
    "jacobian_fro2",
    "jacobian_trace",
    "scale_gradmax_annealed",
}
REFERENCE = [
    case
    for case in json.loads(Path(__file__).with_name("reference_closed_forms.json").read_text())
    if case["function"] in NAMES
]
FROZEN = [frozen_entropy, frozen_collision, frozen_jacobian_fro2]


def test_reference_has_every_function():
    assert len(REFERENCE) == 189
    assert {case["function"] for case in REFERENCE} == NAMES


@pytest.mark.parametrize("function", sorted({case["function"] for case in REFERENCE}))
def test_reference_values(function):
    for case in REFERENCE:
        if case["function"] == function:
            value = getattr(theory, function)(**case["args"])
            expected = pytest.approx(case["value"], rel=case["rel_tol"], abs=1e-290)
            assert value == expected, case["args"]


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
def test_explicit_matrix(scale):
    for logits in np.random.default_rng(1).standard_normal((20, 9)):
        p = softmax(scale * logits)
        matrix = np.diag(p) - np.outer(p, p)
        assert jacobian_trace(logits, scale) == pytest.approx(np.trace(matrix), rel=1e-12)
        nuclear, entries = np.linalg.norm(matrix, "nuc"), np.abs(matrix).sum()
        assert jacobian_trace(logits, scale) == pytest.approx(nuclear, rel=1e-12)
        assert jacobian_trace(logits, scale) == pytest.approx(entries / 2, rel=1e-12)
        assert jacobian_fro2(logits, scale) == pytest.approx((matrix**2).sum(), rel=1e-12)
        assert np.linalg.norm(matrix, 2) <= min(0.5, p.max()) * (1 + 1e-12)


def test_the_matrix_is_the_derivative():
    logits, scale, step = np.array([0.3, -1.0, 2.0, 0.5]), 1.7, 1e-5
    moves = step * np.eye(4)
    slopes = (
        (softmax(scale * (logits + moves), -1) - softmax(scale * (logits - moves), -1)) / 2 / step
    )
    assert np.trace(slopes) == pytest.approx(scale * jacobian_trace(logits, scale), rel=1e-8)
    assert (slopes**2).sum() == pytest.approx(scale**2 * jacobian_fro2(logits, scale), rel=1e-8)


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_even_weights(n):
    assert jacobian_trace(np.full(n, 3.0)) == pytest.approx(1 - 1 / n, rel=1e-14, abs=0)
    assert jacobian_fro2(np.arange(n), 0.0) == pytest.approx((n - 1) / n**2, rel=1e-13, abs=0)


def test_low_entropy_forces_a_small_jacobian():
    logits = np.random.default_rng(2).standard_normal((500, 30))
    for scale in (0.1, 1.0, 5.0, 50.0, 500.0):
        trace, entropy = jacobian_trace(logits, scale), softmax_entropy(logits, scale)
        assert (trace <= -np.expm1(-entropy) * (1 + 1e-13)).all()
        assert (jacobian_fro2(logits, scale) <= trace).all()


def test_nearly_one_hot_rows_keep_their_digits():
    gap = np.array([50.0, 300.0])
    logits = np.stack([np.zeros(2), -gap, -gap], axis=-1)
    assert jacobian_trace(logits) == pytest.approx(4 * np.exp(-gap), rel=1e-13, abs=0)
    assert jacobian_fro2(logits) == pytest.approx(10 * np.exp(-2 * gap), rel=1e-13, abs=0)


@pytest.mark.parametrize("n", [2, 40, 512, 65536, 10**7])
def test_annealed_scale_maximises_the_surrogate(n):
    best = scale_gradmax_annealed(n)
    found = minimize_scalar(
        lambda x: x * (math.exp(x * x) / n - 1),
        bounds=(0, 5),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert best == pytest.approx(found.x, abs=1e-6)
    assert (1 + 2 * best**2) * math.exp(best**2) == pytest.approx(n, rel=1e-12)


@pytest.mark.parametrize("n", [40, 4096])
def test_the_exact_mean_has_no_maximum(n):
    scale = scale_gradmax_annealed(n) * np.array([0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 4.0, 10.0, 100.0])
    mean = scale * (1 - expected_collision_gauss(n, scale))
    assert (np.diff(mean) > 0).all()
    assert mean[-1] == pytest.approx(expected_max_gauss(n), rel=1e-2)


def test_annealed_scale_rises_with_n():
    scale = scale_gradmax_annealed(np.geomspace(1, 1e300, 200))
    assert scale[0] == 0
    assert (np.diff(scale) > 0).all()
    near_one = scale_gradmax_annealed(1 + 1e-10)
    assert near_one == pytest.approx(math.sqrt(1e-10 / 3), rel=1e-6)


def poisson_dirichlet(m, rows, sticks, seed):
    """Weights in size-biased order: each takes a Beta(1 - m, k m) share of what is left."""
    parts = np.random.default_rng(seed).beta(1 - m, m * np.arange(1, sticks + 1), (rows, sticks))
    left = np.cumprod(1 - parts, axis=-1)
    return parts * np.concatenate([np.ones((rows, 1)), left[:, :-1]], axis=-1)


@pytest.mark.few(1)
@pytest.mark.parametrize("m", [0.2, 0.4, 0.6])
def test_frozen_rows_monte_carlo(m):
    """Within 4 standard errors, on so many rows that a 5 % wrong formula would be over 5 away."""
    p = poisson_dirichlet(m, 80_000, 60, seed=3)
    drawn = poisson_dirichlet(m, 240_000, 1, seed=4)[:, 0]  # the first key is drawn by weight
    square, cube = (p**2).sum(-1), (p**3).sum(-1)
    samples = {
        frozen_entropy: -np.log(drawn),
        frozen_collision: square,
        frozen_jacobian_fro2: square - 2 * cube + square**2,
    }
    for function, sample in samples.items():
        value, error = function(m), sample.std(ddof=1) / math.sqrt(sample.size)
        assert abs(sample.mean() - value) < 4 * error, function.__name__
        assert 0.05 * value > 9 * error, f"{function.__name__}: too few rows to notice 5 %"


def test_frozen_rows_are_a_limit_of_gaussian_ones():
    """By M_n / gamma within the known distance: entropy some 4 % off, collision 0.4 %."""
    n, m = 65536, 1 / 3
    gamma = expected_max_gauss(n) / m
    assert frozen_entropy(m) == pytest.approx(expected_entropy_gauss(n, gamma), rel=0.05)
    assert frozen_collision(m) == pytest.approx(expected_collision_gauss(n, gamma), rel=0.005)


def test_frozen_laws():
    m = np.linspace(0, 0.999, 200)
    assert frozen_entropy(m) == pytest.approx(digamma(1) - digamma(1 - m), rel=1e-12, abs=1e-14)
    assert (np.diff(frozen_entropy(m)) > 0).all()
    assert frozen_entropy(1e-9) == pytest.approx(math.pi**2 / 6 * 1e-9, rel=1e-8, abs=0)
    assert frozen_collision(m) == pytest.approx(1 - m)
    assert frozen_jacobian_fro2(m).max() == pytest.approx(1 / 12, rel=1e-4)
    assert frozen_jacobian_fro2(0.5) == pytest.approx(1 / 12, rel=1e-15)
    assert [function(0.0) for function in FROZEN] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("function", [jacobian_trace, jacobian_fro2])
def test_rows_broadcast_with_scales(function):
    logits = np.random.default_rng(4).standard_normal((3, 7))
    table = function(logits, np.array([[0.0], [1.0]]))
    assert table.shape == (2, 3)
    assert table.dtype == np.float64
    assert table[1, 2] == function(logits[2], 1.0)
    assert isinstance(function([1, 2], 1), float)


@pytest.mark.parametrize("function", [scale_gradmax_annealed, *FROZEN])
def test_arrays_and_scalars(function):
    argument = 7.0 if function is scale_gradmax_annealed else 0.7
    assert function(np.full((2, 3), argument)).shape == (2, 3)
    assert isinstance(function(argument), float)


@pytest.mark.parametrize("function", [jacobian_trace, jacobian_fro2])
def test_row_domain(function):
    with pytest.raises(ValueError, match=r"^logits: .* got logits=inf$"):
        function([1.0, math.inf])
    with pytest.raises(ValueError, match=r"^scale: .* at least 0, got scale=-1$"):
        function([1.0, 2.0], -1.0)


@pytest.mark.parametrize("function", FROZEN)
@pytest.mark.parametrize("m", [1.0, -0.1, math.nan, 2.0])
def test_frozen_domain(function, m):
    with pytest.raises(ValueError, match=r"^m: .* at least 0 and below 1, got m="):
        function([0.5, m])


def test_annealed_scale_domain():
    with pytest.raises(ValueError, match=r"^n: .* at least 1, got n=0.5$"):
        scale_gradmax_annealed(0.5)
    with pytest.raises(ValueError, match=r"^n: .* got n=inf$"):
        scale_gradmax_annealed(math.inf)
