"""Scale laws and scales in closed form against exact solves, sampling and tables."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq

from acutance.theory import (
    expected_collision,
    expected_collision_gauss,
    expected_entropy_gauss,
    gauss_hazard_scale,
    gauss_invariant_scale,
    hazard_scale,
    needle_scale,
    scaling_exponent,
)
from tests.versions import older

# The names of the families, their parameter, and the same law of SciPy.
FAMILIES = [
    ("gaussian", {}, stats.norm()),
    ("uniform", {}, stats.uniform(-1, 2)),
    ("exponential", {}, stats.expon()),
    ("laplace", {}, stats.laplace()),
    ("gumbel", {}, stats.gumbel_r()),
    ("logistic", {}, stats.logistic()),
    ("cosine", {"d": 8}, stats.beta(3.5, 3.5, -1, 2)),
    ("cosine", {"d": 64}, stats.beta(31.5, 31.5, -1, 2)),
    ("stretched", {"rho": 4}, stats.weibull_min(4)),
    ("pareto", {"a": 2}, stats.pareto(2)),
]
FAMILY_IDS = [name + "".join(map(str, parameter.values())) for name, parameter, _ in FAMILIES]


def scale_of_two_effective_keys(law, n):
    """Scale at which E Σp² = 1/2, from 1 - E Σp² = n (n-1) ∫ F^(n-2) f² dy with F and f those of
    scale * logit + Gumbel, over logits at survival probabilities exp(-v)."""
    v = (np.arange(1000) + 0.5) / 20
    logits, weights = law.isf(np.exp(-v)), np.exp(-v) / 20
    rate = float(hazard_scale(law, n))

    def excess(c):
        scale = c * rate
        low = scale * law.isf(min(60 / n, 0.5)) - 8
        y, step = np.linspace(low, scale * law.isf(1e-15 / n) + 40, 250, retstep=True)
        hits = np.exp(np.minimum(scale * logits - y[:, None], 50.0))
        missed = np.exp(-hits)
        above, density = (1 - missed) @ weights, (hits * missed) @ weights
        rest = np.exp((n - 2) * np.log1p(-np.minimum(above, 0.999)))
        return n * (n - 1) * step * (density**2 * rest).sum() - 0.5

    return rate * brentq(excess, 1.0, 2.5, rtol=1e-6)


def test_needle_by_its_definition():
    for n, gap, mass in [(16, 1.0, 0.5), (4096, 3.0, 0.9), (10**12, 0.2, 0.01)]:
        scale = needle_scale(n, gap, 0.0, mass)
        weight = 1 / (1 + (n - 1) * math.exp(-scale * gap))
        assert weight == pytest.approx(mass, rel=1e-12)


def test_needle_among_gaussian_keys():
    rng = np.random.default_rng(4096)
    n, gap, sigma, mass = 4096, 1.0, 0.1, 0.5
    scale = needle_scale(n, gap, sigma, mass)
    odds = np.exp(scale * gap) / np.exp(scale * sigma * rng.standard_normal((400, n - 1))).sum(-1)
    weight = odds / (1 + odds)
    error = weight.std(ddof=1) / 20
    assert weight.mean() == pytest.approx(mass, abs=4 * error + 1e-3)


def test_needle_limits():
    assert needle_scale(4096, 5.0, 1e-12, 0.5) == needle_scale(4096, 5.0, 0.0, 0.5)
    assert needle_scale([2, 10], 1.0, 0.3, [0.5, 0.1]) == pytest.approx([0, 0], abs=1e-15)
    # At the edge of what is solvable the scale is gap / sigma².
    gap = math.sqrt(2 * math.log(511))
    assert needle_scale(512, gap, 1.0, 0.5) == pytest.approx(gap, rel=1e-6)
    assert needle_scale(512, 1e200, 1e199, 0.5) == pytest.approx(1e-200 * math.log(511), rel=0.1)


def test_invariant_scale_keeps_the_entropy():
    expected = [1.942, 2.558, 3.272]
    scales = gauss_invariant_scale([2048, 8192, 65536], 512, 1.0)
    assert scales == pytest.approx(expected, abs=5e-4)
    exact = [1.9664, 2.6235, 3.4148]
    assert (scales < exact).all()
    entropy = expected_entropy_gauss([2048, 8192, 65536], scales)
    assert entropy == pytest.approx(expected_entropy_gauss(512, 1.0), abs=0.345)
    assert gauss_invariant_scale(512, 65536, scales[2]) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("n", [64, 4096, 2**20])
def test_gaussian_hazard_is_density_over_tail(n):
    b = stats.norm.isf(1 / n)
    assert gauss_hazard_scale(n) == pytest.approx(stats.norm.pdf(b) / stats.norm.sf(b), rel=1e-12)
    assert hazard_scale("gaussian", n) == gauss_hazard_scale(n)
    assert 1 < math.sqrt(2 * math.log(n)) / gauss_hazard_scale(n) < 1.16


@pytest.mark.parametrize(("family", "parameter", "law"), FAMILIES, ids=FAMILY_IDS)
def test_hazard_is_that_of_the_law(family, parameter, law):
    n = np.array([2, 16, 4096, 1e7, 1e12])
    rates = hazard_scale(family, n, c=1.5, **parameter)
    assert rates == pytest.approx(1.5 * np.asarray(hazard_scale(law, n)), rel=1e-9)
    b = law.isf(1 / n[:4])
    assert rates[:4] == pytest.approx(1.5 * law.pdf(b) / law.sf(b), rel=1e-6)


# scale(E Σp² = 1/2) / h(b_n) at 2^6 and 2^20 keys, and the power of log n or n over 2^10..2^20
SOLVED = [
    ("gaussian", {}, stats.norm(), 1.75, 1.93, 0.61),
    ("cosine", {"d": 64}, stats.beta(31.5, 31.5, -1, 2), 1.74, 1.90, 0.84),
    ("stretched", {"rho": 4}, stats.weibull_min(4), 1.71, 1.91, 0.82),
    ("exponential", {}, stats.expon(), 1.98, 2.00, 0.001),
    ("cosine", {"d": 8}, stats.beta(3.5, 3.5, -1, 2), 1.62, 1.69, 0.297),
    ("uniform", {}, stats.uniform(-1, 2), 1.24, 1.233, 1.000),
]


@pytest.mark.parametrize(("family", "parameter", "law", "few", "many", "power"), SOLVED)
def test_hazard_rule_against_exact_solves(family, parameter, law, few, many, power):
    n = np.array([2.0**6, 2.0**10, 2.0**20])
    scales = np.array([scale_of_two_effective_keys(law, keys) for keys in n])
    ratio = scales / hazard_scale(family, n, **parameter)
    assert ratio[0] == pytest.approx(few, abs=0.006)
    assert ratio[2] == pytest.approx(many, abs=0.006)
    near = 2.0**20 if parameter == {"d": 64} else None
    asymptotic = scaling_exponent(family, n=near, **parameter)
    grown = np.log(n) if asymptotic.variable == "log n" else n
    measured = math.log(scales[2] / scales[1]) / math.log(grown[2] / grown[1])
    assert measured == pytest.approx(power, abs=0.005)
    # The asymptotic law: the right variable, its power from below, its constant within 25 %.
    assert asymptotic.exponent == pytest.approx(measured, abs=0.35)
    assert asymptotic.exponent <= measured + 1e-3
    predicted = asymptotic.constant * grown[2] ** asymptotic.exponent
    assert predicted == pytest.approx(scales[2], rel=0.25)


def test_solver_agrees_with_the_gaussian_quadrature():
    n = 4096
    scale = scale_of_two_effective_keys(stats.norm(), n)
    assert expected_collision_gauss(n, scale) == pytest.approx(0.5, abs=1e-4)


def test_gaussian_scale_for_half_the_entropy():
    """Exact scales for H = log n / 2 approach sqrt(log n) from above."""
    n = np.array([16, 256, 4096, 65536, 2**20])
    law = scaling_exponent("gaussian", "entropy_fraction", fraction=0.5)
    predicted = law.constant * np.log(n) ** law.exponent
    assert predicted == pytest.approx([1.6651, 2.3548, 2.8841, 3.3302, 3.7233], abs=1e-4)
    exact = np.array([2.4587, 2.7963, 3.1512, 3.5002, 3.8352])
    entropy = expected_entropy_gauss(n, exact) / np.log(n)
    assert entropy == pytest.approx(0.5, abs=2e-5)
    assert (np.diff(exact / predicted) < 0).all()


def test_uniform_scale_for_a_fraction_of_the_entropy():
    """For uniform logits the population entropy is log n + log(sinh λ / λ) - λ coth λ + 1."""
    n, fraction = 1e12, 0.4
    law = scaling_exponent("uniform", "entropy_fraction", fraction=fraction)
    assert (law.law, law.constant) == ("n^{3/5}", pytest.approx(math.e / 2, rel=1e-14))
    scale = law.constant * n**law.exponent
    assert math.log(n) + 1 - math.log(2 * scale) == pytest.approx(fraction * math.log(n))


def test_cosine_scale_for_a_fraction_of_the_entropy():
    """d = 3 has cosines uniform on [-1, 1]; d = 8 against the sampled entropy."""
    plane = scaling_exponent("cosine", "entropy_fraction", d=3)
    uniform = scaling_exponent("uniform", "entropy_fraction")
    assert plane.constant == pytest.approx(uniform.constant, rel=1e-14)
    plane, uniform = scaling_exponent("cosine", d=3), scaling_exponent("uniform")
    assert plane.constant == pytest.approx(uniform.constant, rel=1e-12)
    n, fraction = 2**20, 0.3
    law = scaling_exponent("cosine", "entropy_fraction", d=8, fraction=fraction)
    logits = law.constant * n**law.exponent * stats.beta(3.5, 3.5, -1, 2).rvs(n, random_state=8)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum()
    assert entropy / math.log(n) == pytest.approx(fraction, abs=0.08)


@pytest.mark.parametrize(
    ("family", "parameter", "n", "rel"),
    [
        ("uniform", {}, 1e12, 1e-9),
        ("cosine", {"d": 2}, 1e7, 1e-7),
        ("cosine", {"d": 4}, 1e12, 1e-8),
    ],
)
def test_constants_of_bounded_logits_by_exact_rows(family, parameter, n, rel):
    """Where the gaps at the end are 1e-14 of the range and the scale is their inverse."""
    law = scaling_exponent(family, **parameter)
    scale = law.constant * n**law.exponent
    assert expected_collision(n, scale, family, **parameter) == pytest.approx(0.5, rel=rel)


@pytest.mark.parametrize(
    ("family", "options", "few", "fraction"),
    [
        ("two_level", {"gap": 0.5}, ("log n", 1.0, "log n", 2.0), ("log n", 1.0, "log n", 2.0)),
        ("planted", {"gap": 2}, ("log n", 1.0, "log n", 0.5), ("log n", 1.0, "log n", 0.5)),
        (
            "gaussian",
            {"fraction": 0.28},
            ("(log n)^{1/2}", 0.5, "log n", math.sqrt(8)),
            ("(log n)^{1/2}", 0.5, "log n", 1.2),
        ),
        (
            "stretched",
            {"rho": 4, "fraction": 15 / 16},
            ("(log n)^{3/4}", 0.75, "log n", 8.0),
            ("(log n)^{3/4}", 0.75, "log n", 0.5),
        ),
        ("stretched", {"rho": 1}, ("constant", 0, "log n", 2.0), ("constant", 0, "log n", 1.0)),
        ("laplace", {}, ("constant", 0, "log n", 2.0), ("constant", 0, "log n", 1.0)),
        ("gumbel", {}, ("constant", 0, "log n", 2.0), ("constant", 0, "log n", 1.0)),
        ("logistic", {}, ("constant", 0, "log n", 2.0), ("constant", 0, "log n", 1.0)),
        (
            "cosine",
            {"d": 32, "n": 1000, "fraction": 0.75},
            ("(log n)^{1/2}", 0.5, "log n", 16.0),
            ("(log n)^{1/2}", 0.5, "log n", 4.0),
        ),
        (
            "pareto",
            {"a": 2},
            ("n^{-1/2} log n", -0.5, "n", math.sqrt(math.log(2))),
            ("n^{-1/2} log n", -0.5, "n", math.sqrt(math.log(2))),
        ),
    ],
)
def test_table_of_laws(family, options, few, fraction):
    for target, expected in (("effective_keys", few), ("entropy_fraction", fraction)):
        law = scaling_exponent(family, target, **options)
        assert law.law == expected[0]
        assert (law.exponent, law.variable) == expected[1:3]
        assert law.constant == pytest.approx(expected[3], rel=1e-12)
        assert law.condition.endswith(".")


def test_cosine_law_changes_with_the_number_of_keys():
    assert scaling_exponent("cosine", d=8, n=40).law == "(log n)^{1/2}"
    assert scaling_exponent("cosine", d=8, n=10**6).law == "n^{2/7}"
    assert scaling_exponent("cosine", d=8).law == "n^{2/7}"
    with pytest.raises(dataclasses.FrozenInstanceError, match="exponent"):
        scaling_exponent("uniform").exponent = 2.0


def test_pareto_rows_are_one_hot_or_flat():
    """At the law's scale about half of the rows have a key with nearly all the weight."""
    law = scaling_exponent("pareto", a=1)
    n = 20_000
    scale = law.constant * n**law.exponent * math.log(n)
    logits = scale / np.random.default_rng(1).random((200, n))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    top = 1 / weights.sum(axis=1)
    assert ((top > 0.9) | (top < 0.1)).mean() > 0.8
    assert (top > 0.5).mean() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(200) + 0.1)


def test_arguments_broadcast():
    n = np.array([[16], [4096]])
    assert needle_scale(n, [1.0, 2.0, 3.0], 0.0, 0.5).shape == (2, 3)
    assert gauss_invariant_scale(n, 16, [0.0, 1.0]).shape == (2, 2)
    assert gauss_hazard_scale(n).shape == (2, 1)
    assert hazard_scale("cosine", n, d=[8, 64, 128]).shape == (2, 3)
    assert hazard_scale("exponential", n, c=[1.0, 2.0]).tolist() == [[1, 2], [1, 2]]
    assert isinstance(hazard_scale("stretched", 16, rho=2), float)
    assert isinstance(needle_scale(16, 1), float)


DOMAINS = [
    (needle_scale, (1, 1.0), {}, r"^n: .* at least 2, got n=1$"),
    (needle_scale, (16, 0.0), {}, r"^gap: .* greater than 0, got gap=0$"),
    (needle_scale, (16, 1.0, -1.0), {}, r"^sigma: .* at least 0, got sigma=-1$"),
    (needle_scale, (16, 1.0, 0.0, 1.0), {}, r"^mass: .* in \[1/n, 1\), got mass=1$"),
    (needle_scale, (16, 1.0, 0.0, 0.01), {}, r"^mass: .* got mass=0.01$"),
    (needle_scale, (16, 1.0, 1.0), {}, r"^gap: no scale gives the match .* got gap=1$"),
    (gauss_invariant_scale, (512, 1), {}, r"^n0: .* got n0=1$"),
    (gauss_invariant_scale, (512, 512, -1.0), {}, r"^gamma0: .* got gamma0=-1$"),
    (gauss_invariant_scale, (300, 512, 1.0), {}, r"^n: log n must be at least .* got n=300$"),
    (gauss_hazard_scale, (1,), {}, r"^n: .* got n=1$"),
    (gauss_hazard_scale, (math.inf,), {}, r"^n: .* got n=inf$"),
    (hazard_scale, ("uniform", 0), {}, r"^n: .* got n=0$"),
    (hazard_scale, ("uniform", 16), {"c": 0}, r"^c: .* greater than 0, got c=0$"),
    (
        hazard_scale,
        ("normal", 16),
        {},
        r'^family: must be one of "gaussian", .* got family="normal"$',
    ),
    (hazard_scale, ("cosine", 16), {}, r'^d: family="cosine" needs it, got d=None$'),
    (hazard_scale, ("cosine", 16), {"d": 1}, r"^d: .* at least 2, got d=1$"),
    (hazard_scale, ("stretched", 16), {"rho": 0}, r"^rho: .* greater than 0, got rho=0$"),
    (hazard_scale, ("uniform", 16), {"d": 8}, r"^d: family='uniform' has no such .* got d=8$"),
    (
        scaling_exponent,
        ("gaussian", "entropy"),
        {},
        r"^target: must be one of .* got target='entropy'$",
    ),
    (
        scaling_exponent,
        ("normal",),
        {},
        r'^family: must be one of "two_level", .* got family="normal"$',
    ),
    (scaling_exponent, (stats.norm(),), {}, r"^family: .* scipy.stats.norm; .* hazard_scale"),
    (hazard_scale, (stats.norm(), 16), {"d": 8}, r"^d: .* has no such parameter, got d=8$"),
    (scaling_exponent, ("stretched",), {"rho": 0.5}, r"^rho: .* at least 1, got rho=0.5$"),
    (scaling_exponent, ("pareto",), {"a": -1}, r"^a: .* greater than 0, got a=-1$"),
    (scaling_exponent, ("pareto",), {}, r'^a: family="pareto" needs it, got a=None$'),
    (scaling_exponent, ("two_level",), {"gap": 0}, r"^gap: .* got gap=0$"),
    (scaling_exponent, ("planted",), {"sigma": -1}, r"^sigma: .* got sigma=-1$"),
    (scaling_exponent, ("uniform",), {"effective_keys": 1}, r"^effective_keys: .* got .*=1$"),
    (scaling_exponent, ("uniform",), {"fraction": 1}, r"^fraction: .* got fraction=1$"),
    (scaling_exponent, ("cosine",), {"d": 8, "n": 1}, r"^n: .* got n=1$"),
]


@pytest.mark.parametrize(("function", "arguments", "options", "message"), DOMAINS)
def test_domain(function, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments, **options)


@pytest.mark.parametrize("function", [hazard_scale, lambda family, _: scaling_exponent(family)])
@pytest.mark.parametrize("family", [3, stats.poisson(3), stats.norm])
def test_family_is_a_continuous_law(function, family):
    with pytest.raises(
        TypeError, match=r"^family: must be a name or a frozen continuous distribution"
    ):
        function(family, 16)


@pytest.mark.skipif(older("scipy", "1.15"), reason="these came with SciPy 1.15")
def test_newer_distributions_of_scipy():
    law = stats.Normal(mu=1.0, sigma=2.0)
    assert hazard_scale(law, 64) == pytest.approx(gauss_hazard_scale(64) / 2, rel=1e-12)
