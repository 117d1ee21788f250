"""Sparsities against digits from mpmath, integrals, laws, limits and Monte Carlo."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from acutance import theory
from acutance.theory import (
    effective_keys,
    effective_keys_decay,
    log_sparsity_decay,
    log_sparsity_exp,
    log_sparsity_identity,
    log_sparsity_linear,
    log_sparsity_linear_iid,
    log_sparsity_relu2,
    sparsity_decay,
    sparsity_exp,
    sparsity_identity,
    sparsity_linear,
    sparsity_linear_iid,
    sparsity_relu2,
)

FUNCTIONS = [
    f"{log}sparsity_{kernel}"
    for log in ("", "log_")
    for kernel in ("decay", "exp", "identity", "linear", "linear_iid", "relu2")
] + ["effective_keys_decay"]
REFERENCE = [
    case
    for case in json.loads(Path(__file__).with_name("reference_closed_forms.json").read_text())
    if case["function"] in FUNCTIONS
]
GAUSSIAN = [sparsity_relu2, log_sparsity_relu2, sparsity_identity, log_sparsity_identity]


def test_reference_has_every_function():
    assert len(REFERENCE) == 395
    assert {case["function"] for case in REFERENCE} == set(FUNCTIONS)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_reference_values(function):
    for case in REFERENCE:
        if case["function"] == function:
            value = getattr(theory, function)(**case["args"])
            expected = pytest.approx(case["value"], rel=case["rel_tol"], abs=1e-290)
            assert value == expected, case["args"]


@pytest.mark.parametrize("u", [-4.0, -1.5, -1.0, -0.3, 0.0, 0.7, 1.0, 2.5, 6.0])
def test_definition_by_quadrature(u):
    def mean(function):
        def integrand(z):
            return function(u + z) * norm.pdf(z)

        return sum(
            quad(integrand, a, b, epsabs=0, epsrel=1e-12, limit=200)[0]
            for a, b in [(-u, -u + 1), (-u + 1, max(-u + 2, 12)), (min(-u - 1, -12), -u)]
        )

    relu2 = mean(lambda x: max(x, 0.0) ** 2) / math.sqrt(mean(lambda x: max(x, 0.0) ** 4))
    assert sparsity_relu2(3 * u, 3.0) == pytest.approx(relu2, rel=1e-10, abs=0)
    size = mean(abs) / math.sqrt(mean(lambda x: x * x))
    assert sparsity_identity(3 * u, 3.0) == pytest.approx(size, rel=1e-10, abs=0)


def assert_monte_carlo(weights, value):
    """Within 4 standard errors, on so many draws that a 5 % wrong value would be over 5 away."""
    first, second = weights.mean(), (weights**2).mean()
    estimate = first / math.sqrt(second)
    influence = weights / first - weights**2 / (2 * second)  # d log S, the delta method
    error = estimate * influence.std() / math.sqrt(weights.size)
    assert abs(estimate - value) < 4 * error
    assert 0.05 * value > 9 * error, "too few draws to notice 5 %"


@pytest.mark.parametrize(("beta", "gamma"), [(0.0, 0.7), (-2.0, 2.0), (1.0, 0.5), (-0.6, 0.6)])
def test_gaussian_scores_monte_carlo(beta, gamma):
    scores = beta + gamma * np.random.default_rng(1).standard_normal(400_000)
    if gamma < 1:  # further up, too few draws carry the mean square
        assert_monte_carlo(np.exp(scores), sparsity_exp(gamma))
    assert_monte_carlo(np.maximum(scores, 0) ** 2, sparsity_relu2(beta, gamma))
    assert_monte_carlo(np.abs(scores), sparsity_identity(beta, gamma))


def test_a_five_percent_error_is_seen():
    scores = np.random.default_rng(2).standard_normal(400_000)
    with pytest.raises(AssertionError, match=r"< \(4 \*"):
        assert_monte_carlo(np.abs(scores), 1.05 * sparsity_identity(0.0, 1.0))


@pytest.mark.parametrize(("mu", "sigma"), [(1.0, 1.0), (0.5, 2.0)])
def test_independent_components_monte_carlo(mu, sigma):
    q = np.array([0.3, 1.0, 2.0, 0.0, 0.5])
    shape = (mu / sigma) ** 2
    keys = np.random.default_rng(3).gamma(shape, mu / shape, (400_000, q.size))
    assert_monte_carlo(keys @ q, sparsity_linear_iid(q, mu, sigma))
    assert_monte_carlo(keys @ q, sparsity_linear(q, np.full(5, mu), sigma**2 * np.eye(5)))


@pytest.mark.parametrize("n", [2, 5, 300])
def test_linear_is_exact_for_empirical_moments(n):
    rng = np.random.default_rng(n)
    q, keys = rng.random(4), rng.exponential(size=(n, 4)) ** 3
    weights = keys @ q
    direct = weights.sum() / math.sqrt(n * (weights**2).sum())
    value = sparsity_linear(q, keys.mean(axis=0), np.cov(keys.T, bias=True))
    assert value == pytest.approx(direct, rel=1e-12, abs=0)
    assert effective_keys(value, n) == pytest.approx(
        weights.sum() ** 2 / (weights**2).sum(), rel=1e-12, abs=0
    )


@pytest.mark.parametrize("lam", [1e-3, 0.5, 0.9, 0.999, 1 - 1e-9, 1.0])
@pytest.mark.parametrize("n", [1, 2, 7, 5000])
def test_decay_is_exact_for_every_n(lam, n):
    weights = lam ** np.arange(n, dtype=np.float64)
    direct = weights.sum() / math.sqrt(n * (weights**2).sum())
    assert sparsity_decay(lam, n) == pytest.approx(direct, rel=1e-12, abs=0)
    keys = weights.sum() ** 2 / (weights**2).sum()
    assert effective_keys_decay(lam, n) == pytest.approx(keys, rel=1e-12, abs=0)
    assert effective_keys(sparsity_decay(lam, n), n) == pytest.approx(keys, rel=1e-12, abs=0)


def test_logarithms_agree_with_values():
    u = np.concatenate([np.linspace(-20, 20, 401), [-1 - 1e-9, -1 + 1e-9, 1 - 1e-9, 1 + 1e-9]])
    near = {"rel": 1e-13, "abs": 1e-15}
    assert np.log(sparsity_relu2(u, 1.0)) == pytest.approx(log_sparsity_relu2(u, 1.0), **near)
    assert np.log(sparsity_identity(u, 1)) == pytest.approx(log_sparsity_identity(u, 1), **near)
    assert np.log(sparsity_exp(abs(u))) == pytest.approx(log_sparsity_exp(abs(u)), **near)
    lam = np.linspace(0.01, 1, 50)
    assert np.log(sparsity_decay(lam, 40)) == pytest.approx(log_sparsity_decay(lam, 40), **near)
    sigma = np.geomspace(1e-3, 1e9, 60)
    expected = log_sparsity_linear_iid([1.0, 3.0], 1.0, sigma)
    assert np.log(sparsity_linear_iid([1.0, 3.0], 1.0, sigma)) == pytest.approx(expected, **near)
    cov = sigma[:, None, None] ** 2 * np.eye(2)
    assert log_sparsity_linear([1.0, 3.0], [1.0, 1.0], cov) == pytest.approx(expected, **near)


def test_relu2_rises_with_beta_over_gamma():
    u = np.concatenate([-np.geomspace(1e6, 1e-6, 400), np.geomspace(1e-6, 1e6, 400)])
    assert (np.diff(log_sparsity_relu2(u, 1.0)) > 0).all()
    assert sparsity_relu2(0.0, [1e-300, 1.0, 1e300]) == pytest.approx(1 / math.sqrt(6), rel=1e-15)


def test_relu2_is_sparsified_by_smaller_gamma_when_beta_is_negative():
    gamma = np.geomspace(0.05, 1e8, 60)
    assert (np.diff(sparsity_relu2(-1.0, gamma)) > 0).all()
    assert (np.diff(sparsity_relu2(1.0, gamma)) < 0).all()
    assert sparsity_relu2([-1.0, 1.0], 1e12) == pytest.approx(1 / math.sqrt(6), rel=1e-10)


@pytest.mark.parametrize("t", [50.0, 1e3, 1e8])
def test_relu2_asymptotes(t):
    low = -(t**2) / 4 - math.log(2 * math.pi) / 4 - math.log(6 * t) / 2 + 1.5 / t**2
    assert log_sparsity_relu2(-t, 1.0) == pytest.approx(low, rel=1e-14, abs=30 / t**4)
    assert log_sparsity_relu2(t, 1.0) == pytest.approx(-2 / t**2, rel=20 / t**2 + 1e-14, abs=0)
    assert log_sparsity_identity(t, 1.0) == pytest.approx(-0.5 / t**2, rel=1 / t**2 + 1e-14, abs=0)


def test_gamma_zero_is_the_limit():
    assert sparsity_relu2([2.0, -2.0], 0.0).tolist() == [1.0, 0.0]
    assert log_sparsity_relu2([2.0, -2.0], 0.0).tolist() == [0.0, -math.inf]
    assert sparsity_identity([2.0, -2.0], 0.0).tolist() == [1.0, 1.0]
    assert log_sparsity_identity([2.0, -2.0], 0.0).tolist() == [0.0, 0.0]
    assert sparsity_relu2([1e300, -1e300], 1e-300).tolist() == [1.0, 0.0]


def test_identity_is_never_sparse():
    u = np.concatenate([[0.0], np.geomspace(1e-12, 1e12, 500)])
    value = sparsity_identity(u, 1.0)
    assert value[0] == math.sqrt(2 / math.pi)
    assert (value >= math.sqrt(2 / math.pi)).all()
    assert (np.diff(value) > -3e-16).all()
    assert (sparsity_identity(-u, 1.0) == value).all()


def test_more_independent_features_are_less_sparse():
    values = [sparsity_linear_iid(np.ones(d), 1.0, 1.0) for d in (1, 4, 64, 1024)]
    assert values == pytest.approx([0.5**0.5, 0.8**0.5, (64 / 65) ** 0.5, (1024 / 1025) ** 0.5])
    rng, d = np.random.default_rng(4), 8
    queries = np.concatenate([rng.random((500, d)) ** 4, np.eye(d), np.ones((1, d))])
    ratio = np.exp(-log_sparsity_linear_iid(queries, 1.0, 1e150) - 150 * math.log(10))
    assert ratio.min() == pytest.approx(d**-0.5, rel=1e-12)  # the minimum, at equal components
    assert ratio.argmin() == len(queries) - 1
    assert ratio.max() == pytest.approx(1.0, rel=1e-12)


def test_binary_keys_are_sparse_in_spite_of_linearity():
    rate = 1e-4
    deviation = math.sqrt(rate * (1 - rate))
    value = sparsity_linear_iid([0.0, 2.0, 0.0], rate, deviation)
    assert value == pytest.approx(math.sqrt(rate), rel=1e-12)


def test_linear_does_not_depend_on_units():
    q, mu, cov = np.array([1.0, 2.0]), np.array([1.0, 0.5]), np.array([[1.0, 0.25], [0.25, 2.0]])
    value = sparsity_linear(q, mu, cov)
    assert sparsity_linear(1e250 * q, mu, cov) == pytest.approx(value, rel=1e-14)
    assert sparsity_linear(q, 1e-140 * mu, 1e-280 * cov) == pytest.approx(value, rel=1e-14)


@pytest.mark.parametrize("lam", [0.5, 0.9, 0.99])
def test_decay_keeps_its_effective_keys(lam):
    n = np.array([1e4, 1e8, 1e12])
    assert effective_keys_decay(lam, n) == pytest.approx((1 + lam) / (1 - lam), rel=1e-12)
    assert (sparsity_decay(lam, n) < 0.2).all()
    assert (np.diff(sparsity_decay(lam, n)) < 0).all()


def test_decay_limits():
    assert sparsity_decay(1.0, [1, 7, 10**12]).tolist() == [1.0, 1.0, 1.0]
    assert sparsity_decay(0.3, 1) == 1.0
    assert sparsity_decay(1e-300, 49) == pytest.approx(1 / 7, rel=1e-14)
    theta = -math.log(1 - 2**-40)
    small = -(1000**2 - 1) * theta**2 / 24
    assert log_sparsity_decay(1 - 2**-40, 1000) == pytest.approx(small, rel=1e-12, abs=0)
    lam = np.linspace(0.01, 1.0, 100)
    assert (np.diff(sparsity_decay(lam, 100)) > 0).all()


@pytest.mark.parametrize("function", GAUSSIAN)
def test_score_arguments_broadcast(function):
    beta, gamma = np.array([[-3.0], [0.5], [4.0]]), np.array([0.5, 1.0])
    table = function(beta, gamma)
    assert table.shape == (3, 2)
    assert table.dtype == np.float64
    assert table[0, 1] == function(-3.0, 1.0)
    assert isinstance(function(-3, 1), float)
    assert function(np.empty((0, 2)), gamma).shape == (0, 2)


def test_other_arguments_broadcast():
    assert sparsity_exp([[1.0, 2.0]]).shape == (1, 2)
    assert isinstance(log_sparsity_exp(1), float)
    for function in (sparsity_decay, log_sparsity_decay, effective_keys_decay):
        table = function(np.array([[0.5], [1.0]]), np.array([1, 10, 100]))
        assert table.shape == (2, 3)
        assert table[0, 2] == function(0.5, 100)
        assert isinstance(function(0.5, 100), float)
    for function in (sparsity_linear, log_sparsity_linear):
        queries = np.array([[1.0, 2.0], [3.0, 4.0], [0.5, 0.0]])
        covariances = np.array([np.eye(2), 4 * np.eye(2)])[:, None]
        table = function(queries, [1.0, 1.0], covariances)
        assert table.shape == (2, 3)
        assert table[1, 2] == function(queries[2], [1.0, 1.0], 4 * np.eye(2))
        assert isinstance(function([1.0], [1.0], [[1.0]]), float)
    for function in (sparsity_linear_iid, log_sparsity_linear_iid):
        table = function([[1.0, 2.0], [3.0, 4.0], [0.5, 0.0]], 1.0, [[1.0], [2.0]])
        assert table.shape == (2, 3)
        assert isinstance(function([1.0], 1.0, 1.0), float)


@pytest.mark.parametrize("function", GAUSSIAN)
@pytest.mark.parametrize(
    ("beta", "gamma", "message"),
    [
        (1.0, -0.5, r"^gamma: .* finite and at least 0, got gamma=-0.5$"),
        (1.0, [1.0, math.nan], r"^gamma: .* got gamma=nan$"),
        (1.0, math.inf, r"^gamma: .* got gamma=inf$"),
        (math.inf, 1.0, r"^beta: .* finite, got beta=inf$"),
        ([1.0, 0.0], 0.0, r"^beta, gamma: must not both be 0, got beta=0, gamma=0$"),
    ],
)
def test_score_domain(function, beta, gamma, message):
    with pytest.raises(ValueError, match=message):
        function(beta, gamma)


@pytest.mark.parametrize("function", [sparsity_exp, log_sparsity_exp])
def test_exp_domain(function):
    with pytest.raises(ValueError, match=r"^gamma: .* got gamma=-1$"):
        function([0.0, -1.0])


@pytest.mark.parametrize("function", [sparsity_decay, log_sparsity_decay, effective_keys_decay])
@pytest.mark.parametrize(
    ("lam", "n", "message"),
    [
        (0.0, 4, r"^lam: a decay must be above 0 and at most 1, got lam=0$"),
        (-0.5, 4, r"^lam: .* got lam=-0.5$"),
        ([0.5, 1.5], 4, r"^lam: .* got lam=1.5$"),
        (math.nan, 4, r"^lam: .* got lam=nan$"),
        (0.5, 0, r"^n: .* finite and at least 1, got n=0$"),
        (0.5, math.inf, r"^n: .* got n=inf$"),
    ],
)
def test_decay_domain(function, lam, n, message):
    with pytest.raises(ValueError, match=message):
        function(lam, n)


@pytest.mark.parametrize("function", [sparsity_linear, log_sparsity_linear])
@pytest.mark.parametrize(
    ("q", "mu", "cov", "message"),
    [
        ([1.0, 1.0], [1.0], [[1.0]], r"q \(2,\), mu \(1,\), Sigma \(1, 1\)$"),
        (1.0, [1.0], [[1.0]], r"q \(\), mu \(1,\), Sigma \(1, 1\)$"),
        ([1.0, 1.0], [1.0, -3.0], np.eye(2), r"^mu: .* q·mu must be positive, got q·mu=-2$"),
        ([1.0, 0.0], [0.0, 1.0], np.eye(2), r"^mu: .* got q·mu=0$"),
        ([1.0, 2.0], [1.0, 1.0], -np.eye(2), r"^Sigma: .* semidefinite, got q'Sigma q=-5$"),
        ([1.0, 1.0], [1.0, 1.0], [[1.0, 0.0], [1.0, 1.0]], r"^Sigma: .* symmetric"),
        ([math.nan, 1.0], [1.0, 1.0], np.eye(2), r"^q: .* finite, got q=nan$"),
        ([1.0, 1.0], [1.0, math.inf], np.eye(2), r"^mu: .* finite, got mu=inf$"),
        ([1.0], [1.0], [[math.inf]], r"^Sigma: .* finite, got Sigma=inf$"),
    ],
)
def test_linear_domain(function, q, mu, cov, message):
    with pytest.raises(ValueError, match=message):
        function(q, mu, cov)


@pytest.mark.parametrize("function", [sparsity_linear_iid, log_sparsity_linear_iid])
@pytest.mark.parametrize(
    ("q", "mu", "sigma", "message"),
    [
        ([1.0, -1.0], 1.0, 1.0, r"^q: .* at least 0, got q=-1$"),
        ([[1.0, 1.0], [0.0, 0.0]], 1.0, 1.0, r"^q: .* must not all be 0, got q of shape \(2, 2\)$"),
        ([1.0], 0.0, 1.0, r"^mu: .* positive, got mu=0$"),
        ([1.0], -1.0, 1.0, r"^mu: .* positive, got mu=-1$"),
        ([1.0], 1.0, -2.0, r"^sigma: .* at least 0, got sigma=-2$"),
    ],
)
def test_linear_iid_domain(function, q, mu, sigma, message):
    with pytest.raises(ValueError, match=message):
        function(q, mu, sigma)


def test_effective_keys_domain():
    with pytest.raises(ValueError, match=r"^sparsity: .* between 0 and 1, got sparsity=1.5$"):
        effective_keys(1.5, 4)
    with pytest.raises(ValueError, match=r"^n: .* got n=0.5$"):
        effective_keys(0.5, 0.5)
