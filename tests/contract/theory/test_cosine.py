"""Cosine rows against 60-digit references, brute force, closed forms, limits and Monte Carlo."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import log_softmax

from acutance import theory
from acutance.theory import (
    cosine_best_count,
    cosine_entropy_lower_bound,
    information_range_limit,
    match_dimension,
    needle_scale,
    retrieval_capacity,
    tau_for_information,
    vmf_entropy_drop,
)

REFERENCE = json.loads(Path(__file__).with_name("reference_cosine.json").read_text())
FUNCTIONS = sorted({case["function"] for case in REFERENCE})


def function_named(name):
    return getattr(theory, name)


def entropy_of(logits):
    log_p = log_softmax(logits, axis=-1)
    return -(np.exp(log_p) * log_p).sum(axis=-1)


def test_reference_has_every_function():
    assert len(REFERENCE) == 580
    assert "vmf_entropy_drop" in FUNCTIONS
    assert len(FUNCTIONS) == 11


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reference_values(name):
    wrong = []
    for case in REFERENCE:
        if case["function"] == name:
            value = function_named(name)(**case["args"])
            assert isinstance(value, float)
            if not abs(value - case["value"]) <= case["rel_tol"] * abs(case["value"]):
                wrong.append((case["args"], value, case["value"]))
    assert not wrong


@pytest.mark.parametrize("n", [2, 3, 4, 7, 16, 41])
def test_every_count_tried(n):
    for tau in np.geomspace(0.03, 300, 60):
        rows = np.where(np.arange(n) < np.arange(1, n)[:, None], 1.0, -1.0) / tau
        entropies = entropy_of(rows)
        bound = cosine_entropy_lower_bound(n, tau)
        assert bound == pytest.approx(entropies.min(), rel=1e-11, abs=1e-14)
        best = entropies[int(cosine_best_count(n, tau)) - 1]
        assert best == pytest.approx(entropies.min(), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(("n", "tau"), [(2, 0.7), (5, 1.0), (5, 0.2), (12, 2.0)])
def test_no_cosines_have_less_entropy(n, tau):
    cosines = np.random.default_rng(n).uniform(-1, 1, (4000, n))
    pushed = np.clip(3 * cosines, -1, 1)  # most at an end of the range
    bound = cosine_entropy_lower_bound(n, tau)
    assert entropy_of(np.concatenate([cosines, pushed]) / tau).min() >= bound * (1 - 1e-12)


@pytest.mark.parametrize(
    ("n", "count", "information"), [(16, 3, 0.473149846853), (256, 53, 0.474465904591)]
)
def test_information_at_temperature_one(n, count, information):
    assert cosine_best_count(n, 1.0) == count
    bound = cosine_entropy_lower_bound(n, 1.0)
    assert math.log(n) - bound == pytest.approx(information, abs=1e-12)
    assert bound > math.log(n) - 0.474474647070526937


def test_many_keys_reach_the_limit():
    n, tau = 10**12, np.array([0.3, 1.0, 7.0])
    information = math.log(n) - cosine_entropy_lower_bound(n, tau)
    assert information == pytest.approx(information_range_limit(tau), rel=1e-12, abs=3e-14)
    assert cosine_best_count(n, 1.0) / n == pytest.approx(0.205513187733, rel=1e-11)


def test_range_limit_at_both_ends():
    span = np.array([1e-9, 1e-6])
    assert information_range_limit(2 / span) == pytest.approx(span**2 / 8, rel=1e-9, abs=0)
    span = np.array([1e3, 2e6])
    expected = span - 1 - np.log(span)
    assert information_range_limit(2 / span) == pytest.approx(expected, rel=1e-15, abs=0)
    assert information_range_limit(1.0, width=1.0) == information_range_limit(2.0)


def test_bound_beyond_float_range():
    assert cosine_entropy_lower_bound(10**12, 1e-6) == 0.0
    assert cosine_best_count(10**12, 1e-6) == 1.0
    assert cosine_entropy_lower_bound(16, 1e308) == pytest.approx(math.log(16), rel=1e-15)
    assert cosine_best_count([16, 17], 1e308).tolist() == [8.0, 8.0]
    assert information_range_limit(5e-324) > 1e299


TABLE = [
    (16, 0.5, 0.554778733742, 1),
    (16, 0.9, 0.340036633539, 1),
    (16, 0.99, 0.234002976633, 1),
    (256, 0.5, 0.367053720319, 5),
    (256, 0.9, 0.240865987607, 1),
    (256, 0.99, 0.183383891277, 1),
    (4096, 0.5, 0.281039105422, 20),
    (4096, 0.9, 0.183318322282, 1),
    (4096, 0.99, 0.148468485849, 1),
    (65536, 0.5, 0.229669104066, 83),
    (65536, 0.9, 0.147154345095, 1),
    (65536, 0.99, 0.124041899476, 1),
]


@pytest.mark.parametrize(("n", "fraction", "tau", "count"), TABLE)
def test_table_of_temperatures(n, fraction, tau, count):
    assert tau_for_information(n, fraction) == pytest.approx(tau, abs=1e-12)
    assert cosine_best_count(n, tau) == count


@pytest.mark.parametrize(
    ("n", "tau"),
    [(16, 0.181352871), (256, 0.120905280), (4096, 0.091681544), (65536, 0.073578295)],
)
def test_table_of_temperatures_for_all_rows(n, tau):
    assert tau_for_information(n, 0.9, setting="simplex") == pytest.approx(tau, abs=1e-9)


@pytest.mark.parametrize("n", [2, 3, 37, 65536, 10**12])
@pytest.mark.parametrize("fraction", [0.02, 0.5, 0.50001, 0.97, 1 - 1e-9])
def test_temperature_inverts_the_bound(n, fraction):
    tau = tau_for_information(n, fraction)
    entropy = (1 - fraction) * math.log(n)
    assert cosine_entropy_lower_bound(n, tau) == pytest.approx(entropy, rel=1e-11, abs=0)
    # A simplex row is the one with a single key at the top, over its own width.
    tau = tau_for_information(n, fraction, setting="simplex")
    rest = (n - 1) * math.exp(-n / (n - 1) / tau)
    simplex = math.log1p(rest) + n / (n - 1) / tau * rest / (1 + rest)
    assert simplex == pytest.approx(entropy, rel=1e-11, abs=0)


def test_hotter_by_more_freedom():
    """One free row needs less than all rows at once. Random keys are near orthogonal in many
    dimensions, so almost as good as a simplex; in few, one of them is near the match.
    """
    n, fraction = 4096, np.array([0.6, 0.9, 0.999])
    free, simplex = (tau_for_information(n, fraction, setting=s) for s in ("free", "simplex"))
    dimensions = [2, 8, 128, 10**6]
    random = [tau_for_information(n, fraction, setting="random_keys", d=d) for d in dimensions]
    assert (free > simplex).all()
    assert all((few < many).all() for few, many in pairwise(random))
    assert random[-1] == pytest.approx(simplex, rel=2e-3)


@pytest.mark.parametrize("d", [2, 3, 16, 128])
@pytest.mark.parametrize("n", [2, 3, 4096])
def test_random_keys_need_cold_rows_throughout(n, d):
    fraction = np.concatenate([[1e-12, 1e-6], np.linspace(0.02, 0.98, 25), [1 - 1e-9]])
    tau = tau_for_information(n, fraction, setting="random_keys", d=d)
    assert (np.diff(tau) < 0).all()
    assert (tau > 0).all()


@pytest.mark.parametrize(("n", "d", "fraction"), [(16384, 128, 0.9), (16384, 64, 0.5)])
def test_random_keys_by_sampling(n, d, fraction):
    """An estimate for many keys: within 0.01 of the sampled fraction, itself known to 0.002."""
    tau = tau_for_information(n, fraction, setting="random_keys", d=d)
    rng = np.random.default_rng(d)
    normal, rest = rng.standard_normal((48, n)), rng.chisquare(d - 1, (48, n))
    cosines = normal / np.sqrt(normal**2 + rest)
    cosines[:, 0] = 1
    sample = 1 - entropy_of(cosines / tau) / math.log(n)
    assert sample.std(ddof=1) / math.sqrt(48) < 0.002
    assert sample.mean() == pytest.approx(fraction, abs=0.01)
    # The temperature matters that much: 5 % off would be seen.
    colder = 1 - entropy_of(cosines / (0.95 * tau)) / math.log(n)
    assert colder.mean() > fraction + 0.02


@pytest.mark.parametrize("kappa", [1e-3, 0.5, 4.0, 25.0, 600.0])
def test_sphere_in_three_dimensions(kappa):
    """There the cosine is uniform on [-1, 1]."""
    mean = 1 / math.tanh(kappa) - 1 / kappa
    log_f = kappa + math.log(-math.expm1(-2 * kappa) / (2 * kappa))
    rounding = 1e-15 * max(1.0, kappa)
    assert vmf_entropy_drop(3, kappa) == pytest.approx(kappa * mean - log_f, rel=0, abs=rounding)


@pytest.mark.parametrize(("d", "kappa"), [(2, 0.7), (2, 40.0), (5, 9.0), (64, 8.0), (64, 100.0)])
def test_drop_by_quadrature(d, kappa):
    def average(function):
        def integrand(angle):
            weight = math.exp(kappa * (math.cos(angle) - 1)) * math.sin(angle) ** (d - 2)
            return weight * function(math.cos(angle))

        return quad(integrand, 0, math.pi, epsabs=0, epsrel=1e-12, limit=300)[0]

    uniform = quad(lambda angle: math.sin(angle) ** (d - 2), 0, math.pi, epsrel=1e-12)[0]
    total = average(lambda _: 1.0)
    # relative entropy = κ E cos - log E e^(κ cos), both less κ
    drop = kappa * average(lambda c: c - 1) / total - math.log(total / uniform)
    assert vmf_entropy_drop(d, kappa) == pytest.approx(drop, rel=1e-10)


def test_drop_at_initialisation_and_in_many_dimensions():
    assert vmf_entropy_drop(64, 8.0) == pytest.approx(0.489, abs=5e-4)
    golden = math.log((1 + math.sqrt(5)) / 2) / 2
    assert golden == pytest.approx(0.240605912530, abs=1e-12)
    assert vmf_entropy_drop(10**7, 10**7) / 10**7 == pytest.approx(golden, rel=1e-6)
    for ratio in (1e-3, 0.3, 2.0, 50.0):
        c = 2 * ratio / (1 + math.sqrt(1 + 4 * ratio**2))
        drop = vmf_entropy_drop(10**7, ratio * 10**7) / 10**7
        assert drop == pytest.approx(-math.log1p(-c * c) / 2, rel=1e-5)


@pytest.mark.parametrize("d", [2, 3, 50, 1e6])
def test_drop_grows_from_a_parabola_to_a_logarithm(d):
    small = np.array([1e-7, 1e-5]) * math.sqrt(d)
    assert vmf_entropy_drop(d, small) == pytest.approx(small**2 / (2 * d), rel=1e-9, abs=0)
    assert vmf_entropy_drop(d, 0.0) == 0.0
    far = vmf_entropy_drop(d, [1e150, 1e151])
    assert far[1] - far[0] == pytest.approx((d - 1) / 2 * math.log(10), rel=1e-10)
    assert (np.diff(vmf_entropy_drop(d, np.geomspace(1e-3, 1e8, 300))) > 0).all()


def test_random_rows_lose_the_drop():
    """Log n - H of sampled rows, for n large against exp(2 D)."""
    n, d, kappa = 200_000, 16, 6.0
    rng = np.random.default_rng(16)
    normal, rest = rng.standard_normal((10, n)), rng.chisquare(d - 1, (10, n))
    sample = math.log(n) - entropy_of(kappa * normal / np.sqrt(normal**2 + rest))
    assert sample.mean() == pytest.approx(vmf_entropy_drop(d, kappa), rel=5e-3)


@pytest.mark.parametrize(("n", "mass"), [(4096, 0.5), (65536, 0.9), (10**12, 0.01)])
def test_match_dimension_is_where_the_scale_exists(n, mass):
    d = match_dimension(n, mass)
    assert needle_scale(n, 1.0, (d * (1 + 1e-9)) ** -0.5, mass) == pytest.approx(d, rel=1e-4)
    with pytest.raises(ValueError, match=r"^gap: no scale gives the match its mass"):
        needle_scale(n, 1.0, (d * (1 - 1e-9)) ** -0.5, mass)


def test_match_at_scale_zero_needs_no_dimension():
    assert match_dimension([2, 10], [0.5, 0.1]) == pytest.approx([0, 0], abs=1e-15)


@pytest.mark.parametrize(("d", "others"), [(64, 1808), (128, 4.97e4), (256, 5.39e6)])
def test_retrieval_capacity_of_scaled_dot_products(d, others):
    """N - 1 = exp(sqrt(d) - 1/2); with 64 dimensions the match outweighs 1808 other keys."""
    assert retrieval_capacity(d) - 1 == pytest.approx(others, rel=1e-3)
    assert math.floor(retrieval_capacity(64)) == 1809


@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9])
def test_at_capacity_the_match_has_its_mass(mass):
    n, top = retrieval_capacity(36, mass), math.exp(6)
    assert top / (top + (n - 1) * math.exp(0.5)) == pytest.approx(mass, rel=1e-13)


def test_capacity_beyond_float_range():
    assert retrieval_capacity(1e6) == math.inf


def test_arguments_broadcast():
    n, tau = np.array([[2], [64]]), np.array([0.1, 1.0, 2.0])
    for function in (cosine_entropy_lower_bound, cosine_best_count):
        table = function(n, tau)
        assert table.shape == (2, 3)
        assert table.dtype == np.float64
        assert table[1, 2] == function(64, 2.0)
        assert function(np.empty((0, 1)), tau).shape == (0, 3)
    for setting, d in (("free", None), ("simplex", None), ("random_keys", [4, 5, 6])):
        table = tau_for_information(n, [0.1, 0.5, 0.9], setting=setting, d=d)
        assert table.shape == (2, 3)
    assert vmf_entropy_drop(n, tau).shape == (2, 3)
    assert match_dimension(n, [0.5, 0.9]).shape == (2, 2)
    assert retrieval_capacity([[4], [9]], [0.5, 0.9]).shape == (2, 2)
    assert isinstance(information_range_limit(1), float)


DOMAINS = [
    (information_range_limit, (0.0,), r"^tau: .* greater than 0, got tau=0$"),
    (information_range_limit, ([1.0, -2.0],), r"^tau: .* got tau=-2$"),
    (information_range_limit, (math.inf,), r"^tau: .* finite .* got tau=inf$"),
    (information_range_limit, (math.nan,), r"^tau: .* got tau=nan$"),
    (cosine_entropy_lower_bound, (1, 1.0), r"^n: .* an integer of at least 2, got n=1$"),
    (cosine_entropy_lower_bound, (2.5, 1.0), r"^n: .* an integer .* got n=2.5$"),
    (cosine_entropy_lower_bound, (math.inf, 1.0), r"^n: .* got n=inf$"),
    (cosine_entropy_lower_bound, (4, -1.0), r"^tau: .* got tau=-1$"),
    (cosine_best_count, (math.nan, 1.0), r"^n: .* got n=nan$"),
    (cosine_best_count, (4, 0), r"^tau: .* got tau=0$"),
    (tau_for_information, (1, 0.5), r"^n: .* got n=1$"),
    (tau_for_information, (4, 0.0), r"^fraction: .* above 0 and below 1, got fraction=0$"),
    (tau_for_information, (4, [0.5, 1.0]), r"^fraction: .* got fraction=1$"),
    (vmf_entropy_drop, (1, 1.0), r"^d: .* at least 2, got d=1$"),
    (vmf_entropy_drop, (4, -1.0), r"^kappa: .* at least 0, got kappa=-1$"),
    (vmf_entropy_drop, (4, math.inf), r"^kappa: .* got kappa=inf$"),
    (match_dimension, (1,), r"^n: .* at least 2, got n=1$"),
    (match_dimension, (4, 0.2), r"^mass: .* in \[1/n, 1\), got mass=0.2$"),
    (match_dimension, (4, 1.0), r"^mass: .* got mass=1$"),
    (retrieval_capacity, (1.5,), r"^d: .* got d=1.5$"),
    (retrieval_capacity, (64, 0.0), r"^mass: .* between 0 and 1, got mass=0$"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), DOMAINS)
def test_domain(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"setting": "best"}, r'^setting: must be one of "free".* got setting=\'best\'$'),
        ({"setting": "random_keys"}, r"^d: can be used only with .* got d=None"),
        ({"d": 4}, r'^d: can be used only with .* got d=4 and setting="free"$'),
        ({"setting": "random_keys", "d": 1}, r"^d: .* at least 2, got d=1$"),
    ],
)
def test_settings(options, message):
    with pytest.raises(ValueError, match=message):
        tau_for_information(16, 0.5, **options)


@pytest.mark.parametrize("function", [cosine_entropy_lower_bound, cosine_best_count])
def test_width_domain(function):
    with pytest.raises(ValueError, match=r"^width: .* greater than 0, got width=0$"):
        function(16, 1.0, width=0.0)
