"""Laws of a score against SciPy's, deep in both tails, and the cells they are averaged on."""

import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats
from scipy.special import expit

from acutance.theory import expected_entropy
from acutance.theory.families import FAMILIES, Scipy, as_family, name_and_parameter
from acutance.theory.quadrature import grid

LAWS = [
    ("gaussian", {}, stats.norm()),
    ("uniform", {}, stats.uniform(-1, 2)),
    ("exponential", {}, stats.expon()),
    ("laplace", {}, stats.laplace()),
    ("gumbel", {}, stats.gumbel_r()),
    ("logistic", {}, stats.logistic()),
    ("cosine", {"d": 2}, stats.arcsine(-1, 2)),
    ("cosine", {"d": 3.5}, stats.beta(1.25, 1.25, -1, 2)),
    ("cosine", {"d": 768}, stats.beta(383.5, 383.5, -1, 2)),
    ("stretched", {"rho": 0.5}, stats.weibull_min(0.5)),
    ("stretched", {"rho": 4}, stats.weibull_min(4)),
    ("pareto", {"a": 3}, stats.pareto(3)),
]
IDS = [name + "".join(map(str, parameter.values())) for name, parameter, _ in LAWS]
by_law = pytest.mark.parametrize(("name", "parameter", "law"), LAWS, ids=IDS)

# one of the laws that came with SciPy 1.15
BINOMIAL = stats.Binomial(n=3, p=0.5) if hasattr(stats, "Binomial") else stats.binom(3, 0.5)


def test_every_family_is_checked():
    assert {name for name, _, _ in LAWS} == set(FAMILIES)


@by_law
def test_quantiles_and_densities(name, parameter, law):
    family = as_family(name, **parameter)
    odds = np.array([-30.0, -5.0, -0.1, 0.0, 0.1, 5.0, 30.0])
    x = family.quantile(odds)
    assert (np.diff(x) > 0).all()
    # Where |x| is a rounded 1 the scores' own distance to the end is checked below.
    assert x == pytest.approx(Scipy(law).quantile(odds), rel=1e-12, abs=1e-12)
    inside = x[1:-1]
    assert family.pdf(inside) == pytest.approx(law.pdf(inside), rel=1e-11)
    assert law.cdf(inside) == pytest.approx(expit(odds[1:-1]), rel=1e-11)


@by_law
def test_offsets_and_densities_from_the_origin(name, parameter, law):
    family = as_family(name, **parameter)
    odds = np.array([-3.0, -0.5, 0.5, 3.0])
    x = family.quantile(odds)
    assert family.origin() + family.offset(odds) == pytest.approx(x, rel=1e-14, abs=1e-14)
    assert family.density(family.offset(odds)) == pytest.approx(family.pdf(x), rel=1e-12)
    outside = family.origin() + np.array([-3.0, 3.0])
    assert family.density(outside - family.origin()) == pytest.approx(law.pdf(outside), rel=1e-9)


def test_distances_to_an_end_keep_their_digits():
    odds = 300.0  # e^-300 of the probability is above
    assert as_family("uniform").offset(odds) == pytest.approx(-2 * math.exp(-300), rel=1e-13)
    # d = 2: the angle is uniform, so 1 - cos = (pi F)² / 2.
    plane = -((math.pi * math.exp(-300)) ** 2) / 2
    assert as_family("cosine", d=2).offset(odds) == pytest.approx(plane, rel=1e-12)
    assert as_family("cosine", d=3).offset(odds) == pytest.approx(-2 * math.exp(-300), rel=1e-12)


@by_law
def test_cells_average_powers_of_a_score(name, parameter, law):
    for family in (as_family(name, **parameter), as_family(law)):
        cells = grid(family)
        assert cells.weights.sum() == pytest.approx(1, abs=1e-14)
        assert cells.mass.sum() == pytest.approx(1, abs=1e-14)
        scores = cells.origin + cells.scores
        assert (cells.weights * scores).sum() == pytest.approx(law.mean(), rel=1e-9, abs=1e-13)
        if name != "pareto":
            variance = (cells.weights * (scores - law.mean()) ** 2).sum()
            assert variance == pytest.approx(law.var(), rel=1e-9)
        assert (np.diff(cells.low) >= 0).all()
        assert (cells.high[:-1] <= cells.low[1:] + 1e-12).all()


@pytest.mark.parametrize(
    ("law", "mean", "variance"),
    [
        # Mass 1/2 on [0, 1] and on [4, 5]; the quantile function jumps in between.
        (stats.rv_histogram(([1, 0, 1], [0, 1, 4, 5]), density=False)(), 2.5, 4 + 1 / 12),
        (stats.triang(0.3), 1.3 / 3, (1 + 0.09 - 0.3) / 18),
        (stats.gamma(0.05), 0.05, 0.05),
        (stats.dweibull(3), 0.0, math.gamma(5 / 3)),
        *([(stats.Normal(mu=3.0, sigma=2.0), 3.0, 4.0)] if hasattr(stats, "Normal") else []),
    ],
)
def test_cells_of_laws_with_kinks_holes_and_poles(law, mean, variance):
    cells = grid(as_family(law))
    scores = cells.origin + cells.scores
    assert (cells.weights * scores).sum() == pytest.approx(mean, rel=1e-11, abs=1e-13)
    second = (cells.weights * (scores - mean) ** 2).sum()
    assert second == pytest.approx(variance, rel=1e-10)


@pytest.mark.parametrize(
    ("law", "has_mean"),
    [
        (stats.norm(), True),
        (stats.t(2), True),
        (stats.lognorm(2.0), True),
        (stats.cauchy(), False),
        (stats.levy(), False),
        (stats.pareto(0.9), False),
        (stats.alpha(2.0), False),  # its isf turns round below 1e-16
    ],
)
def test_whether_there_is_a_mean(law, has_mean):
    assert grid(as_family(law)).has_mean == has_mean


def test_families_are_equal_by_value():
    assert as_family("cosine", d=64) == as_family("cosine", d=64.0)
    assert as_family("cosine", d=64) != as_family("cosine", d=65)
    assert grid(as_family("laplace")) is grid(as_family("laplace"))
    family = as_family("pareto", a=2)
    assert as_family(family) is family
    for name, (_, parameter, _) in FAMILIES.items():
        value = {parameter: 3.0} if parameter else {}
        assert name_and_parameter(as_family(name, **value)) == (name, 3.0 if parameter else 0.0)
    assert name_and_parameter(as_family(stats.norm())) is None


@pytest.mark.parametrize(
    "law", [3, None, "norm()", stats.norm, stats.poisson(3), BINOMIAL, np.ones(2)]
)
def test_what_is_no_continuous_law(law):
    if isinstance(law, str):
        with pytest.raises(
            ValueError, match=r'^family: must be one of "gaussian", .* got "norm\(\)"$'
        ):
            as_family(law)
    else:
        with pytest.raises(
            TypeError, match=r"^family: must be a name or a frozen continuous distribution"
        ):
            as_family(law)


@pytest.mark.parametrize("law", [stats.norm([0, 1], 1), stats.norm(0, -1), stats.beta(-1, 2)])
def test_frozen_laws_are_scalar_and_inside_their_domain(law):
    with pytest.raises(
        ValueError, match=r"^family: a frozen distribution must have scalar parameters"
    ):
        as_family(law)


@pytest.mark.parametrize("law", [stats.norm(0, 1e200), stats.pareto(0.002)])
def test_scores_beyond_float64_are_refused(law):
    with pytest.raises(
        ValueError,
        match=r"^family: scores must stay below 1e\+150 in absolute value; lower the scale of",
    ):
        expected_entropy(2, 1.0, law)


@pytest.mark.parametrize("value", [1.9, math.nan, math.inf, [2, 3], True, "8"])
def test_a_parameter_is_one_number(value):
    with pytest.raises(ValueError, match=r"^d: the family .cosine. needs a finite number"):
        as_family("cosine", d=value)


def test_the_theory_loads_without_scipy_stats():
    """Which takes longer to import than all else."""
    code = "import sys, acutance.theory; sys.exit('scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
