"""Rows of independent logits against closed forms, other integrals, identities and Monte Carlo."""

import math
import time

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad
from scipy.special import beta, digamma

from acutance.theory import (
    expected_collision,
    expected_collision_gauss,
    expected_entropy,
    expected_entropy_gauss,
    expected_logsumexp,
    expected_logsumexp_gauss,
    expected_max,
    expected_power_sum,
    expected_weighted_mean,
)

ROW_FUNCTIONS = [
    expected_entropy,
    expected_collision,
    expected_logsumexp,
    expected_weighted_mean,
    expected_power_sum,
]

# A family, its parameter, the same law of SciPy.
FAMILIES = [
    ("gaussian", {}, stats.norm()),
    ("uniform", {}, stats.uniform(-1, 2)),
    ("exponential", {}, stats.expon()),
    ("laplace", {}, stats.laplace()),
    ("gumbel", {}, stats.gumbel_r()),
    ("logistic", {}, stats.logistic()),
    ("cosine", {"d": 2}, stats.arcsine(-1, 2)),
    ("cosine", {"d": 8}, stats.beta(3.5, 3.5, -1, 2)),
    ("cosine", {"d": 128}, stats.beta(63.5, 63.5, -1, 2)),
    ("stretched", {"rho": 0.7}, stats.weibull_min(0.7)),
    ("stretched", {"rho": 4}, stats.weibull_min(4)),
    ("pareto", {"a": 2.5}, stats.pareto(2.5)),
]
IDS = [name + "".join(map(str, parameter.values())) for name, parameter, _ in FAMILIES]
by_family = pytest.mark.parametrize(("family", "parameter", "law"), FAMILIES, ids=IDS)

HISTOGRAM = stats.rv_histogram(([1, 0, 3, 0.5], [0, 1, 4, 4.5, 6]), density=False)()


@pytest.mark.few(1)
@pytest.mark.parametrize("n", [2, 4096, 1e12])
def test_gaussian_family_against_the_gaussian_functions(n):
    """Which are right to 1e-11 and share no quadrature with these."""
    gamma = np.array([1e-9, 0.3, 3.0, 10.0, 1e3])
    for general, special in [
        (expected_entropy, expected_entropy_gauss),
        (expected_collision, expected_collision_gauss),
        (expected_logsumexp, expected_logsumexp_gauss),
    ]:
        assert general(n, gamma) == pytest.approx(special(n, gamma), rel=2e-11, abs=0)


# The density of the difference of two scores, at x >= 0.
DIFFERENCES = [
    ("uniform", lambda x: max(2 - x, 0.0) / 4),
    ("exponential", lambda x: math.exp(-x) / 2),
    ("laplace", lambda x: (1 + x) * math.exp(-x) / 4),
    ("gumbel", lambda x: math.exp(-x) / (1 + math.exp(-x)) ** 2),
]


@pytest.mark.parametrize(("family", "density"), DIFFERENCES)
@pytest.mark.parametrize("gamma", [1e-3, 0.3, 2.0, 12.0])
def test_two_keys_are_one_integral(family, density, gamma):
    def average(function):
        end = 2.0 if family == "uniform" else 40.0
        total, _ = quad(
            lambda x: 2 * density(x) * function(gamma * x),
            *(0, end),
            epsabs=0,
            epsrel=1e-12,
            points=[end / 100, end / 10],
            limit=400,
        )
        return total

    def entropy(gap):
        small = math.exp(-gap)
        return math.log1p(small) + gap * small / (1 + small)

    collision = average(lambda gap: (1 + math.exp(-2 * gap)) / (1 + math.exp(-gap)) ** 2)
    assert expected_entropy(2, gamma, family) == pytest.approx(average(entropy), rel=1e-10, abs=0)
    assert expected_collision(2, gamma, family) == pytest.approx(collision, rel=1e-10, abs=0)


def trapezoid(scores, masses, n, gamma, k=2):
    """E H, E log Z and E Σp^k from the Laplace transform of exp(gamma s) at t = e^-y,

    E log Z = ∫ (e^-t - L^n) dt/t, E Σp^k = n/Γ(k) ∫ t^(k-1) E[e^(kγs) e^(-t e^γs)] L^(n-1) dt.
    """
    logits = gamma * scores
    points = 500 + 12 * int(logits[-1] - logits[0])
    y, step = np.linspace(logits[0] - 6, logits[-1] + 45 + math.log(n), points, retstep=True)
    a = np.exp(np.minimum(logits - y[:, None], 300.0))
    gone = np.exp(-a)
    above, density = -np.expm1(-a) @ masses, a * gone
    log_below = np.log1p(-np.minimum(above, 1 - 1e-16))
    rest = np.exp((n - 1) * log_below)
    logsumexp = step * (np.exp(-np.exp(-y)) - np.exp(n * log_below)).sum()
    mean = n * step * (rest * (density @ (masses * scores))).sum()
    power = n * step * (rest * ((a**k * gone) @ masses)).sum() / math.gamma(k)
    return logsumexp - gamma * mean, logsumexp, power


@pytest.mark.grid
@pytest.mark.parametrize(("n", "gamma"), [(3, 4.0), (100, 0.05), (100, 1.0), (1e7, 2.0)])
@pytest.mark.parametrize("family", ["logistic", "gumbel", "cosine2", "cosine8"])
def test_other_integrals_by_the_trapezoid_rule(family, n, gamma):
    parameter = {}
    if family.startswith("cosine"):  # over the angle, where it is periodic
        parameter, family = {"d": int(family[6:])}, "cosine"
        scores = -np.cos((np.arange(600) + 0.5) * np.pi / 600)
        masses = (1 - scores**2) ** (parameter["d"] / 2 - 1)
    else:
        scores = np.linspace(-40 if family == "logistic" else -5, 60, 1500)
        masses = (stats.logistic if family == "logistic" else stats.gumbel_r).pdf(scores)
    expected = trapezoid(scores, masses / masses.sum(), n, gamma)
    values = [
        function(n, gamma, family, **parameter)
        for function in (expected_entropy, expected_logsumexp, expected_collision)
    ]
    # E H and E log Z are differences of numbers up to 200 there.
    assert values == pytest.approx(expected, rel=2e-10, abs=2e-11)


@pytest.mark.parametrize("n", [2, 100, 1e7])
def test_maxima_in_closed_form(n):
    harmonic = digamma(n + 1) + np.euler_gamma
    assert expected_max(n, "exponential") == pytest.approx(harmonic, rel=1e-13)
    assert expected_max(n, "uniform") == pytest.approx((n - 1) / (n + 1), rel=1e-13)
    assert expected_max(n, "cosine", d=3) == pytest.approx((n - 1) / (n + 1), rel=1e-13)
    assert expected_max(n, "gumbel") == pytest.approx(math.log(n) + np.euler_gamma, rel=1e-13)
    assert expected_max(n, "logistic") == pytest.approx(digamma(n) + np.euler_gamma, rel=1e-13)
    pareto = n * beta(n, 1 - 1 / 2.5)
    assert expected_max(n, "pareto", a=2.5) == pytest.approx(pareto, rel=1e-11)
    assert expected_weighted_mean(n, 1e9, "exponential") == pytest.approx(harmonic, rel=1e-8)


@pytest.mark.parametrize("n", [2, 50, 1e6])
def test_large_scales_in_closed_form(n):
    """E H -> π²/(6γ) n(n-1) ∫ F^(n-2) f² dx, and E⟨s⟩ to the expected maximum."""
    gamma = 1e10
    for family, closeness in [("exponential", 1.0), ("gumbel", 1 - 1 / n), ("uniform", n / 2)]:
        limit = math.pi**2 / 6 * closeness / gamma
        assert expected_entropy(n, gamma, family) == pytest.approx(limit, rel=1e-3 * n / 1e6 + 1e-8)


@pytest.mark.few(1)
@pytest.mark.parametrize("gamma", [2.0, 3.0, 7.5])
def test_exponential_tails_freeze(gamma):
    """For n large the weights are Poisson-Dirichlet: E Y = 1 - 1/γ, E H = ψ(1) - ψ(1 - 1/γ)."""
    frozen = digamma(1) - digamma(1 - 1 / gamma)
    for family in ("exponential", "laplace", "gumbel", "logistic"):
        collision = expected_collision(1e12, gamma, family)
        assert collision == pytest.approx(1 - 1 / gamma, rel=2e-6)
        assert expected_entropy(1e12, gamma, family) == pytest.approx(frozen, rel=2e-5)


@pytest.mark.few(3)
@by_family
def test_scipy_laws_give_the_same(family, parameter, law):
    """SciPy's own quantiles are right to 1e-9."""
    for n, gamma in [(2, 0.7), (300, 3.0), (1e6, 1.5)]:
        for function in ROW_FUNCTIONS:
            named = function(n, gamma, family, **parameter)
            assert function(n, gamma, law) == pytest.approx(named, rel=1e-9)


def test_shift_and_width():
    assert expected_entropy(64, 1.0, stats.norm(5, 2)) == pytest.approx(expected_entropy(64, 2.0))
    shifted = expected_logsumexp(64, 1.0, stats.norm(5, 2))
    assert shifted == pytest.approx(5 + expected_logsumexp(64, 2.0), rel=1e-12)
    # Far from the origin the gaps themselves are rounded, to 1e-10 of the deviation.
    far = expected_entropy(64, 1.0, stats.norm(1e6, 1))
    assert far == pytest.approx(expected_entropy(64, 1.0), rel=1e-9)


def sampled(law, n, gamma, rows, rng):
    """Mean and standard error of H, Y and log Z over sampled rows."""
    scores = gamma * law.rvs(size=(rows, n), random_state=rng)
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    p = weights / total
    entropy = np.log(total[:, 0]) - (p * (scores - top)).sum(axis=1)
    values = np.stack([entropy, (p * p).sum(axis=1), top[:, 0] + np.log(total[:, 0])])
    return values.mean(axis=1), values.std(axis=1) / math.sqrt(rows)


@pytest.mark.few(4)
@by_family
def test_monte_carlo(family, parameter, law):
    rng = np.random.default_rng(2026)
    for n, gamma, rows in [(2, 1.7, 20_000), (11, 0.6, 10_000), (400, 2.3, 1000)]:
        mean, error = sampled(law, n, gamma, rows, rng)
        values = [
            function(n, gamma, family, **parameter)
            for function in (expected_entropy, expected_collision, expected_logsumexp)
        ]
        z = (mean - values) / error
        assert (np.abs(z) < 4).all(), (n, gamma, z)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "law",
    [
        HISTOGRAM,  # kinks, and a hole
        stats.triang(0.3),
        stats.gamma(0.05),  # a density that is infinite at 0
        stats.beta(0.1, 3),
        stats.dweibull(3),  # two humps
        stats.t(4),
        stats.powerlaw(8),
    ],
    ids=lambda law: getattr(law.dist, "name", "") or "histogram",
)
def test_monte_carlo_of_scipy_laws(law):
    rng = np.random.default_rng(1121)
    for n, gamma, rows in [(2, 3.0, 20_000), (60, 1.2, 2000)]:
        mean, error = sampled(law, n, gamma, rows, rng)
        values = [
            function(n, gamma, law)
            for function in (expected_entropy, expected_collision, expected_logsumexp)
        ]
        z = (mean - values) / error
        assert (np.abs(z) < 4).all(), (n, gamma, z)


def test_a_kink_costs_no_accuracy():
    """Two keys of the triangular law, whose difference has a piecewise cubic density."""
    nodes, weights = np.polynomial.legendre.leggauss(40)

    def half(low, high, density):
        x = low + (high - low) * (nodes + 1) / 2
        return x, weights * (high - low) / 2 * density(x)

    rise, fall = half(0, 0.3, lambda x: 2 * x / 0.3), half(0.3, 1, lambda x: 2 * (1 - x) / 0.7)
    x, mass = np.concatenate([rise, fall], axis=1)
    gap = 5 * np.abs(x[:, None] - x)
    exact_kernel = np.log1p(np.exp(-gap)) + gap / (1 + np.exp(gap))
    direct = mass @ exact_kernel @ mass  # smooth in the gap's square: no kink at 0
    assert expected_entropy(2, 5.0, stats.triang(0.3)) == pytest.approx(direct, rel=1e-9)


def test_heavy_tails():
    """Entropy and powers need no moment; log Z and ⟨s⟩ need a mean."""
    rng = np.random.default_rng(3)
    for law, options in [(stats.cauchy(), {}), ("pareto", {"a": 0.8}), (stats.levy(), {})]:
        frozen = stats.pareto(0.8) if law == "pareto" else law
        mean, error = sampled(frozen, 20, 0.4, 20_000, rng)
        assert abs(expected_entropy(20, 0.4, law, **options) - mean[0]) < 4 * error[0]
        assert abs(expected_collision(20, 0.4, law, **options) - mean[1]) < 4 * error[1]
        for function in (expected_logsumexp, expected_weighted_mean):
            with pytest.raises(ValueError, match=r"^family: the mean of .* cannot be computed"):
                function(20, 0.4, law, **options)
        with pytest.raises(
            ValueError, match=r"^family: the mean of .* the expected maximum cannot be computed$"
        ):
            expected_max(20, law, **options)
    # E exp(gamma s) may be infinite.
    assert expected_logsumexp(64, 1.0, stats.lognorm(1.0)) > expected_max(64, stats.lognorm(1.0))


@pytest.mark.few(4)
@by_family
def test_the_mean_is_the_slope_of_logsumexp(family, parameter, law):
    n, gamma, step = 37, 1.3, 1e-3
    ahead, behind, ahead2, behind2 = (
        expected_logsumexp(n, gamma + shift * step, family, **parameter) for shift in (1, -1, 2, -2)
    )
    slope = (8 * (ahead - behind) - (ahead2 - behind2)) / (12 * step)
    mean = expected_weighted_mean(n, gamma, family, **parameter)
    assert mean == pytest.approx(slope, rel=1e-9)


@pytest.mark.few(4)
@by_family
def test_powers(family, parameter, law):
    """For two keys Σp³ = 1 - 3 p q and Σp² = 1 - 2 p q; H is the slope of Σp^k at k = 1."""
    collision = expected_collision(2, 2.0, family, **parameter)
    cubes = expected_power_sum(2, 2.0, family, 3, **parameter)
    assert cubes == pytest.approx(1 - 1.5 * (1 - collision), rel=1e-12)
    assert expected_power_sum(20, 2.0, family, 2, **parameter) == expected_collision(
        20, 2.0, family, **parameter
    )
    assert expected_power_sum(20, 2.0, family, 1, **parameter) == 1.0
    slopes = [
        (1 - expected_power_sum(20, 2.0, family, 1 + h, **parameter)) / h
        for h in (1e-3, 2e-3, 4e-3)
    ]
    extrapolated = (8 * slopes[0] - 6 * slopes[1] + slopes[2]) / 3
    entropy = expected_entropy(20, 2.0, family, **parameter)
    assert extrapolated == pytest.approx(entropy, rel=1e-6)


@pytest.mark.few(2)
@by_family
def test_monotone_and_bounded(family, parameter, law):
    gamma = np.array([0.0, 1e-12, 1e-3, 0.1, 1.0, 5.0, 40.0])
    for n in (2.0, 1000.0):
        entropy = expected_entropy(n, gamma, family, **parameter)
        collision = expected_collision(n, gamma, family, **parameter)
        assert entropy[0] == math.log(n)
        assert entropy[1] == pytest.approx(math.log(n), rel=1e-12)
        assert collision[:2] == pytest.approx(1 / n, rel=1e-12)
        assert (np.diff(entropy[1:]) < 0).all()
        assert (np.diff(collision[1:]) > 0).all()
        assert entropy[-1] > 0
        assert collision[-1] <= 1
        mean = expected_weighted_mean(n, gamma, family, **parameter)
        assert (np.diff(mean[1:]) > 0).all()
        assert mean[-1] < expected_max(n, family, **parameter)
        assert expected_logsumexp(n, 0.0, family, **parameter) == math.log(n)


def test_one_key():
    for family, mean in [("gaussian", 0), ("exponential", 1), ("gumbel", np.euler_gamma)]:
        assert expected_entropy(1, 3.0, family) == 0
        assert expected_collision(1, 3.0, family) == 1
        assert expected_weighted_mean(1, 3.0, family) == pytest.approx(mean, abs=1e-14)
        assert expected_logsumexp(1, 3.0, family) == pytest.approx(3 * mean, abs=1e-14)
        assert expected_max(1, family) == pytest.approx(mean, abs=1e-14)


@pytest.mark.parametrize("gamma", [1e-300, 1e12, 1e30])
def test_extreme_scales(gamma):
    for family, parameter in [("gaussian", {}), ("uniform", {}), ("cosine", {"d": 64})]:
        entropy = expected_entropy(4096, gamma, family, **parameter)
        if gamma < 1:
            assert entropy == pytest.approx(math.log(4096), rel=1e-12)
        else:
            next_one = expected_entropy(4096, 2 * gamma, family, **parameter)
            assert entropy / next_one == pytest.approx(2, rel=1e-6)


def test_gaps_below_the_resolution_of_float64_are_refused():
    """Cosines in the plane crowd at -1, where the next float64 is 1e-16 away."""
    with pytest.raises(ValueError, match=r"^gamma: .* got gamma=1e\+30$"):
        expected_entropy(2, 1e30, "cosine", d=2)


def test_largest_scores_must_be_known():
    message = r"^n: the upper tail of Gaussian\(\) is known .* only for n below .* got n=1e\+70$"
    with pytest.raises(ValueError, match=message):
        expected_entropy(1e70, 1.0)
    with pytest.raises(ValueError, match=r"^n: the upper tail of Pareto"):
        expected_collision(1e6, 1.0, "pareto", a=0.05)
    with pytest.raises(ValueError, match=r"^n: the upper tail of scipy.stats.crystalball"):
        expected_max(1e12, stats.crystalball(2, 5))


def test_ten_million_keys_are_fast():
    law = stats.norm(0, 1.5)
    expected_entropy(16, 1.0, law)  # its cells are found once
    start = time.process_time()
    for gamma in (0.1, 1.0, 3.0, 10.0):
        expected_entropy(1e7, gamma, law)
    assert time.process_time() - start < 4 * 0.5  # it takes 0.03 a point


def test_arguments_broadcast():
    for function in ROW_FUNCTIONS:
        assert function([[2], [16]], [0.5, 1.0, 2.0], "logistic").shape == (2, 3)
        assert isinstance(function(16, 1.0, "logistic"), float)
        assert isinstance(function(np.int64(16), np.float32(1), "logistic"), float)
        assert function([], 1.0).shape == (0,)
    table = expected_entropy([[2], [16]], [0.5, 2.0], "uniform")
    assert table[1, 0] == expected_entropy(16, 0.5, "uniform")
    assert expected_max([[2, 4]], "uniform").shape == (1, 2)


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0.5, 1.0), {}, r"^n: the number of keys must be finite and at least 1, got n=0.5$"),
        ((math.nan, 1.0), {}, r"^n: .* got n=nan$"),
        ((math.inf, 1.0), {}, r"^n: .* got n=inf$"),
        ((16, -1.0), {}, r"^gamma: .* finite and at least 0, got gamma=-1$"),
        ((16, [1.0, math.inf]), {}, r"^gamma: .* got gamma=inf$"),
        ((16, 1.0, "normal"), {}, r'^family: must be one of "gaussian", .* got "normal"$'),
        ((16, 1.0, "cosine"), {}, r'^d: the family "cosine" needs d, got None$'),
        ((16, 1.0, "cosine"), {"d": 1}, r"^d: .* at least 2, got d=1$"),
        ((16, 1.0, "stretched"), {"rho": 0.0}, r"^rho: .* at least 0.05, got rho=0.0$"),
        ((16, 1.0, "uniform"), {"a": 2}, r"^a: the family 'uniform' has no a, got a=2$"),
    ],
)
def test_domain(function, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments, **options)


@pytest.mark.parametrize("k", [0.5, 2000, math.nan, [2, 3]])
def test_domain_of_the_power(k):
    with pytest.raises(ValueError, match=r"^k: the power must be one number between 1 and 1000"):
        expected_power_sum(16, 1.0, k=k)


def test_powers_that_rows_beyond_float64_decide_are_refused():
    with pytest.raises(ValueError, match=r"^k: .* at n=100000 and gamma=0.3 .* got k=60$"):
        expected_power_sum(1e5, 0.3, k=60)
