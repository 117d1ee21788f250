"""Rows under logit noise against other integrals, closed forms, limits and Monte Carlo."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.polynomial.hermite_e import hermegauss
from numpy.polynomial.legendre import leggauss
from scipy.integrate import quad
from scipy.spatial.distance import pdist
from scipy.special import softmax

from acutance import theory
from acutance.theory import (
    asymptotic_noise_mse,
    certificate,
    exact_noise_mse,
    first_order_bias,
    first_order_mse,
    monte_carlo_mse,
    noise_central_moment,
    noise_tail_rate,
    noise_variance_ratio,
    quantization_noise,
    second_order_mse,
    set_bound,
    tv_bound,
)

REFERENCE = json.loads(Path(__file__).with_name("reference_robustness.json").read_text())
KINDS = ["gaussian", "laplace", "gumbel", "uniform"]
HEAVY = ["laplace", "gumbel"]
TWO_VALUES = [[1.0], [0.0]]


def softmax_row(seed, n, sharpness, dim):
    generator = np.random.default_rng(seed)
    p = softmax(sharpness * generator.standard_normal(n))
    return p, generator.standard_normal((n, dim))


def test_reference_has_every_function():
    assert len(REFERENCE) == 12
    assert len({case["function"] for case in REFERENCE}) == 3


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: f"{case['function']}{case['args']}")
def test_reference_value(case):
    value = getattr(theory, case["function"])(**case["args"])
    assert value == pytest.approx(case["value"], rel=case["rel_tol"], abs=0)


# The laws


def moment(kind, scale, k):
    """E exp(k noise), in closed form."""
    forms = {
        "gaussian": lambda: math.exp((k * scale) ** 2 / 2),
        "laplace": lambda: 1 / (1 - (k * scale) ** 2),
        "gumbel": lambda: math.gamma(1 - k * scale),
        "uniform": lambda: math.sinh(k * scale) / (k * scale),
    }
    return forms[kind]()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("scale", [0.08, 0.12, 0.2, 0.24])
def test_central_moments_expand_to_raw_ones(kind, order, scale):
    mean = moment(kind, scale, 1)
    terms = [
        math.comb(order, k) * (-1) ** (order - k) * moment(kind, scale, k) / mean**k
        for k in range(1, order + 1)
    ]
    value = noise_central_moment(kind, order, scale)
    assert value == pytest.approx((-1) ** order + math.fsum(terms), rel=1e-7, abs=1e-13)


@pytest.mark.parametrize(
    ("kind", "second", "third", "fourth"),
    [
        ("gaussian", 1, 0, 3),
        ("laplace", 2, 0, 24),
        ("gumbel", math.pi**2 / 6, 2.4041138063191886, 27 / 5 * math.pi**4 / 36),
        ("uniform", 1 / 3, 0, 1 / 5),
    ],
)
def test_small_scales_have_the_central_moments_of_the_noise(kind, second, third, fourth):
    scale = np.array([1e-8, 1e-6])
    assert noise_variance_ratio(kind, scale) / scale**2 == pytest.approx(second, rel=1e-5)
    assert noise_central_moment(kind, 4, scale) / scale**4 == pytest.approx(fourth, rel=1e-4)
    # E (ε + ε²/2)³ about the mean, of which a symmetric law keeps the term in b⁴
    cubic = third + 1.5 * scale * (fourth - second**2) * (kind != "gumbel")
    value = noise_central_moment(kind, 3, scale) / scale**3
    assert value == pytest.approx(cubic, rel=1e-4, abs=0)


def test_variance_ratio_at_the_limits():
    assert noise_variance_ratio("uniform", [0.0, 1e8]) == pytest.approx([0, 1e8 - 1], rel=1e-15)
    one = [1 - 1e-12, 1 + 1e-12]
    assert np.ptp(noise_variance_ratio("uniform", one)) < 1e-11
    assert math.isinf(noise_variance_ratio("gaussian", 30.0))
    assert np.isinf(noise_central_moment("gaussian", 4, [30.0, 1e3])).all()
    room = np.array([1e-6, 1e-12])
    assert noise_variance_ratio("laplace", 0.5 - room) * room == pytest.approx(9 / 64, rel=1e-3)
    gumbel = noise_variance_ratio("gumbel", 0.5 - room) * room
    assert gumbel == pytest.approx(1 / (2 * math.pi), rel=1e-3)


def test_variance_ratio_shapes():
    assert isinstance(noise_variance_ratio("laplace", 0.1), float)
    assert noise_variance_ratio("laplace", np.full((2, 3), 0.1)).shape == (2, 3)


# The exact mean square error


def two_key_mse(p, kind, scale):
    """With two keys only the difference of the noises matters: one integral over its density."""
    first, second = p
    gap = math.log(first / second)

    def error(x):
        """Change of p_1, over p_1 p_2."""
        if x > 0:
            return -math.expm1(-x) / (first + second * math.exp(-x))
        return math.expm1(x) / (first * math.exp(x) + second)

    def density(z):
        """Of the difference, per scale."""
        if kind == "gaussian":
            return math.exp(-z * z / 4) / math.sqrt(4 * math.pi)
        if kind == "laplace":
            return (1 + abs(z)) * math.exp(-abs(z)) / 4
        if kind == "gumbel":
            return math.exp(-abs(z)) / (1 + math.exp(-abs(z))) ** 2
        return max(0.0, 2 - abs(z)) / 4

    end = 2.0 if kind == "uniform" else 120.0 + 2 * abs(gap) / scale if scale >= 0.4 else 120.0
    inner = [s * x for s in (-1, 1) for x in (1, 2, 5, 10, 20, 40, 80)]
    inner += [-gap / scale + x / scale for x in (-20, -6, -2, 0, 2, 6, 20)]
    edges = sorted({-end, 0.0, end, *(x for x in inner if abs(x) < end)})
    total = math.fsum(
        quad(
            lambda z: density(z) * (error(scale * z) / min(scale, 1.0)) ** 2,
            a,
            b,
            epsabs=0,
            epsrel=1e-11,
            limit=200,
        )[0]
        for a, b in itertools.pairwise(edges)
    )
    return total * (first * second * min(scale, 1.0)) ** 2


@pytest.mark.few(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-8, 0.05, 0.3, 0.49, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("small", [0.5, 0.2, 1e-3, 1e-9])
@pytest.mark.filterwarnings("ignore::scipy.integrate.IntegrationWarning")  # at the rounding error
def test_two_keys_are_one_integral(kind, scale, small):
    p = [small, 1 - small]
    value = exact_noise_mse(p, TWO_VALUES, kind, scale)
    assert value == pytest.approx(two_key_mse(p, kind, scale), rel=1e-9, abs=0)


@pytest.mark.parametrize(
    ("kind", "rule", "scale"),
    [("gaussian", hermegauss, 0.3), ("gaussian", hermegauss, 0.7), ("uniform", leggauss, 1.5)],
)
def test_three_keys_by_tensor_quadrature(kind, rule, scale):
    nodes, weights = rule(48)
    weights = weights / weights.sum()
    noise = scale * np.stack(np.meshgrid(nodes, nodes, nodes), axis=-1)
    volume = np.einsum("i,j,k->ijk", weights, weights, weights)
    p, v = softmax_row(3, 3, 1.0, 2)
    change = softmax(np.log(p) + noise, axis=-1) @ v - p @ v
    expected = (volume * (change**2).sum(axis=-1)).sum()
    assert exact_noise_mse(p, v, kind, scale) == pytest.approx(expected, rel=1e-9, abs=0)


@pytest.mark.few(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.25, 1.0, 2.0])
@pytest.mark.parametrize(("n", "sharpness"), [(5, 2.0), (12, 0.7)])
def test_monte_carlo(kind, scale, n, sharpness):
    """Within 4 standard errors, on so many rows that a 5 % wrong formula would be over 4 away."""
    p, v = softmax_row(n, n, sharpness, 3)
    sample = monte_carlo_mse(p, v, kind, scale, samples=200_000, seed=17)
    value = exact_noise_mse(p, v, kind, scale)
    assert abs(sample.estimate - value) < 4 * sample.standard_error
    assert 0.05 * value > 8 * sample.standard_error, "too few rows to notice 5 %"


def test_monte_carlo_of_many_keys():
    p, v = softmax_row(8, 2_000, 0.5, 64)
    sample = monte_carlo_mse(p, v, "gaussian", 1.0, samples=5_000, seed=3)
    value = exact_noise_mse(p, v, "gaussian", 1.0)
    assert abs(sample.estimate - value) < 4 * sample.standard_error
    assert 0.05 * value > 8 * sample.standard_error


@pytest.mark.parametrize("kind", KINDS)
def test_small_noise_limit_is_the_first_order(kind):
    for p, v in [
        softmax_row(1, 40, 3.0, 5),
        (np.full(10_000, 1e-4), softmax_row(2, 10_000, 0.0, 2)[1]),
        ([1 - 1e-12, 1e-12], TWO_VALUES),
        ([1 - 1e-100, 1e-100], TWO_VALUES),
    ]:
        value = exact_noise_mse(p, v, kind, 1e-8)
        first = first_order_mse(p, v, kind, 1e-8)
        assert value == pytest.approx(first, rel=3e-7 if kind == "gumbel" else 1e-12, abs=0)
        assert exact_noise_mse(p, v, kind, 0.0) == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_large_noise_limit_attends_one_key_at_random(kind):
    p, v = softmax_row(4, 6, 1.0, 2)
    limit = ((v - p @ v) ** 2).sum(axis=1).mean()
    gaps = [abs(exact_noise_mse(p, v, kind, scale) / limit - 1) for scale in (5.0, 10.0, 20.0)]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 0.2


def test_rows_that_noise_cannot_change():
    assert exact_noise_mse([0.0, 1.0, 0.0], np.eye(3), "laplace", 2.0) == 0
    assert exact_noise_mse([1.0], [[3.0, 4.0]], "gaussian", 1.0) == 0
    assert exact_noise_mse([0.3, 0.7], [[2.0], [2.0]], "gaussian", 1.0) == 0


def test_keys_without_weight_and_order_and_place_do_not_count():
    p, v = softmax_row(6, 9, 1.0, 3)
    value = exact_noise_mse(p, v, "gumbel", 0.8)
    same = {"rel": 1e-12, "abs": 0}
    padded = exact_noise_mse(np.append(p, 0), np.vstack([v, 1e6 * v[:1]]), "gumbel", 0.8)
    assert padded == pytest.approx(value, **same)
    assert exact_noise_mse(p[::-1], v[::-1], "gumbel", 0.8) == pytest.approx(value, **same)
    assert exact_noise_mse(p, v + 7, "gumbel", 0.8) == pytest.approx(value, **same)
    assert exact_noise_mse(p, 3 * v, "gumbel", 0.8) == pytest.approx(9 * value, **same)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_interpolation_and_quadrature_do_not_depend_on_the_grid(kind):
    """The grid starts at the least weight: a key that counts for nothing moves it."""
    p, v = softmax_row(7, 30, 3.0, 2)
    before = [exact_noise_mse(p, v, kind, scale) for scale in (0.02, 0.5, 2.0)]
    for least in (1e-26, 0.97e-26, 0.5e-26):
        one_more = np.append(p, least), np.vstack([v, p @ v])
        after = [exact_noise_mse(*one_more, kind, scale) for scale in (0.02, 0.5, 2.0)]
        assert after == pytest.approx(before, rel=1e-12, abs=0)


# Where the expansions hold, and where not


@pytest.mark.parametrize(("kind", "scale"), [("gaussian", 0.2), ("laplace", 0.1), ("gumbel", 0.1)])
def test_second_order_closes_in_faster(kind, scale):
    p, v = softmax_row(9, 12, 1.0, 3)
    errors = []
    for b in (scale, scale / 2):
        exact = exact_noise_mse(p, v, kind, b)
        first, second = first_order_mse(p, v, kind, b), second_order_mse(p, v, kind, b)
        errors.append([abs(first / exact - 1), abs(second / exact - 1)])
        assert errors[-1][1] < errors[-1][0] / 4
    lost_first, lost_second = (math.log2(a / b) for a, b in zip(*errors, strict=True))
    assert lost_first > (0.9 if kind == "gumbel" else 1.8)  # skew noise has odd orders
    assert lost_second > (2.7 if kind == "gumbel" else 3.6)


def test_first_order_overestimates_strong_noise():
    """64 keys, 24 effective ones: strong noise gathers the weight on few keys, a bounded error."""
    generator = np.random.default_rng(7)
    p = softmax(1.2 * generator.standard_normal(64))
    v = generator.standard_normal((64, 8))
    assert 1 / (p @ p) == pytest.approx(24, rel=0.01)
    assert exact_noise_mse(p, v, "gaussian", 1.0) == pytest.approx(0.3055, abs=5e-5)
    assert first_order_mse(p, v, "gaussian", 1.0) == pytest.approx(0.445, abs=5e-4)
    assert exact_noise_mse(p, v, "gaussian", 2.0) == pytest.approx(1.301, abs=5e-4)
    assert first_order_mse(p, v, "gaussian", 2.0) == pytest.approx(13.9, abs=0.05)
    sample = monte_carlo_mse(p, v, "gaussian", 2.0, samples=20_000, seed=1)
    assert abs(sample.estimate - 1.301) < 4 * sample.standard_error


def test_second_order_is_useless_for_strong_noise():
    p, v = softmax_row(9, 12, 1.0, 3)
    exact = exact_noise_mse(p, v, "gaussian", 1.0)
    assert abs(second_order_mse(p, v, "gaussian", 1.0) / exact - 1) > 1
    assert abs(first_order_mse(p, v, "gaussian", 1.0) / exact - 1) < 1


def test_first_order_underestimates_near_one_hot_rows():
    p = [0.999, 0.001]
    exact = exact_noise_mse(p, TWO_VALUES, "gaussian", 0.5)
    assert exact == pytest.approx(1.14e-6, rel=0.01)
    assert first_order_mse(p, TWO_VALUES, "gaussian", 0.5) == pytest.approx(5.7e-7, rel=0.01)


@pytest.mark.parametrize(
    ("scale", "collisions"), [(2.0, [0.5068, 0.5004, 0.5000]), (1.0, [0.179, 0.113, 0.084])]
)
def test_heavy_tails_do_not_average_out(scale, collisions):
    """Values of alternating sign see E Σ p̃² of an even row, whose noise has no second moment."""
    for n, expected in zip((64, 1024, 16384), collisions, strict=True):
        v = np.where(np.arange(n) % 2 == 0, 1.0, -1.0)[:, None]
        error = exact_noise_mse(np.full(n, 1 / n), v, "laplace", scale)
        # E (Σ p̃ v)² = c - (1 - c) / (n - 1)
        collision = (error * (n - 1) + 1) / n
        assert collision == pytest.approx(expected, abs=5e-5 if scale == 2 else 5e-4)


# Bounds for any noise


def test_tv_bound_is_the_set_bound_at_its_worst():
    omega = np.array([1e-8, 0.3, 2.0, 10.0, 40.0])
    mass = 1 / (1 + np.exp(omega / 2))
    assert set_bound(mass, omega) == pytest.approx(tv_bound(omega), rel=1e-12, abs=0)
    around = set_bound(mass[:, None] * np.array([0.9, 1.1]), omega[:, None])
    assert (around < tv_bound(omega)[:, None]).all()


def test_bounds_at_the_limits():
    assert tv_bound(1e-300) == 2.5e-301
    assert tv_bound(math.inf) == 1
    assert set_bound([0.0, 0.25, 1.0], math.inf) == pytest.approx([0, 0.75, 0])
    assert set_bound(0.5, 0.0) == 0
    assert isinstance(tv_bound(1), float)
    assert tv_bound(np.ones((2, 2))).shape == (2, 2)
    assert certificate([1.0, 0.0], TWO_VALUES, 5.0) == 0
    assert certificate([0.75, 0.25], TWO_VALUES, math.inf) == pytest.approx(0.75)


def test_certificate_is_never_violated():
    generator = np.random.default_rng(23)
    closest = 0.0
    for trial in range(150):
        n, dim = int(generator.integers(2, 12)), int(generator.integers(1, 4))
        p = softmax(generator.uniform(0, 6) * generator.standard_normal(n))
        v = generator.standard_normal((n, dim))
        size = generator.uniform(0, 8)
        if trial % 2:
            noise = generator.uniform(0, size, (16, n))
        else:  # the adversary raises a set of keys, all it can
            noise = size * generator.integers(0, 2, (16, n))
        moved = softmax(np.log(p) + noise, axis=-1)
        change = np.sqrt((((moved - p) @ v) ** 2).sum(axis=-1))
        bound = np.array([certificate(p, v, omega) for omega in np.ptp(noise, axis=1)])
        assert (change <= bound * (1 + 1e-12) + 1e-15).all()
        total = np.abs(moved - p).sum(axis=-1) / 2
        assert (total <= tv_bound(np.ptp(noise, axis=1)) * (1 + 1e-12) + 1e-15).all()
        closest = max(closest, float((change / np.maximum(bound, 1e-12)).max()))
    assert closest > 0.99


@pytest.mark.parametrize("small", [0.5, 0.1, 1e-6])
@pytest.mark.parametrize("omega", [1e-6, 0.7, 5.0, 30.0])
def test_certificate_is_attained_by_two_keys(small, omega):
    p = np.array([1 - small, small])
    gain = small * -math.expm1(-omega) * (1 - small) / (small + (1 - small) * math.exp(-omega))
    assert certificate(p, TWO_VALUES, omega) == pytest.approx(gain, rel=1e-12, abs=0)
    worst = 1 / (1 + math.exp(omega / 2))
    attained = certificate([1 - worst, worst], TWO_VALUES, omega)
    assert attained == pytest.approx(tv_bound(omega), rel=1e-12, abs=0)
    assert certificate(p, TWO_VALUES, omega) <= tv_bound(omega) * (1 + 1e-12)


def test_certificate_of_many_keys_bounds_the_diameter():
    p, v = softmax_row(2, 50, 1.0, 3)
    pairs = np.linalg.norm(v[:, None] - v[None], axis=-1).max()
    assert certificate(p, v, 1.0) == pytest.approx(tv_bound(1.0) * pairs, rel=1e-12)
    simplex = certificate(np.full(300, 1 / 300), np.eye(300), 1.0)
    assert simplex == pytest.approx(tv_bound(1.0) * math.sqrt(2), rel=1e-12)
    assert certificate(p, np.ones((50, 3)), 1.0) == pytest.approx(0, abs=1e-15)
    p, v = softmax_row(2, 4097, 1.0, 3)  # from here on it is a bound
    exact = tv_bound(1.0) * pdist(v).max()
    assert exact < certificate(p, v, 1.0) <= 2 * exact
    basis = np.tile(np.eye(300), (14, 1))
    assert simplex <= certificate(np.full(4200, 1 / 4200), basis, 1.0) <= 2 * simplex


# Sampling and quantisation


def test_samples_are_reproducible_and_chunked():
    p, v = softmax_row(2, 5, 1.0, 2)
    one = monte_carlo_mse(p, v, "laplace", 0.5, samples=1_000, seed=4)
    assert one == monte_carlo_mse(p, v, "laplace", 0.5, samples=1_000, seed=4)
    assert one != monte_carlo_mse(p, v, "laplace", 0.5, samples=1_000, seed=5)
    blocks = monte_carlo_mse(p, v, "laplace", 0.5, samples=500_000, seed=4)  # 10⁶ draws a chunk
    assert blocks.samples == 500_000
    exact = exact_noise_mse(p, v, "laplace", 0.5)
    assert abs(blocks.estimate - exact) < 4 * blocks.standard_error < 0.02 * exact


@pytest.mark.few(1)
@pytest.mark.parametrize("per", ["row", "tensor"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantisation_noise_is_predicted(bits, per):
    draw = np.random.default_rng(12).standard_normal
    q, k, v = draw((32, 64)), draw((256, 64)), draw((256, 32))
    noise = quantization_noise(q, k, v, bits, per=per)
    assert noise.logit_std == pytest.approx(noise.expected_std, rel=0.05)
    assert noise.uniform_scale == pytest.approx(math.sqrt(3) * noise.logit_std)
    assert noise.oscillation > 4 * noise.logit_std
    assert noise.measured_mse == pytest.approx(noise.predicted_mse, rel=0.2)
    finer = quantization_noise(q, k, v, bits + 2, per=per)
    assert 12 < noise.measured_mse / finer.measured_mse < 25  # 16, and an edge effect of 2^b - 1


def test_exact_numbers_cause_no_quantisation_noise():
    q, k = np.array([[3.0, -1.0]]), np.array([[1.0, 3.0], [3.0, 0.0]])
    noise = quantization_noise(q, k, np.eye(2), 3, scale=1.0)
    assert noise.logit_std == pytest.approx(0, abs=1e-15)
    assert noise.measured_mse == pytest.approx(0, abs=1e-30)
    assert noise.predicted_mse == pytest.approx(0, abs=1e-30)


# Domains

ROW_FUNCTIONS = [first_order_mse, first_order_bias, second_order_mse, exact_noise_mse]


@pytest.mark.parametrize("function", ROW_FUNCTIONS)
@pytest.mark.parametrize(
    ("p", "v", "kind", "scale", "message"),
    [
        (
            [0.5, 0.4],
            TWO_VALUES,
            "gaussian",
            1,
            r"^p: weights must sum to 1 within 1e-09, got 0.9 ",
        ),
        ([1.5, -0.5], TWO_VALUES, "gaussian", 1, r"^p: weights must be at least 0, got -0.5 "),
        ([math.nan, 1], TWO_VALUES, "gaussian", 1, r"^p: every entry must be finite, "),
        ([[0.5, 0.5]], TWO_VALUES, "gaussian", 1, r"^p must have shape \(n,\), got \(1, 2\)$"),
        ([], np.empty((0, 2)), "gaussian", 1, r"^p: a row must have at least one key "),
        ([0.5, 0.5], [1.0, 0.0], "gaussian", 1, r"^v must have shape \(n, dim\), got \(2,\)$"),
        (
            [0.5, 0.5],
            [[1.0]],
            "gaussian",
            1,
            r"^p and v must have the same number of keys n: 2, 1 ",
        ),
        ([0.5, 0.5], TWO_VALUES, "gausian", 1, r"got 'gausian'; did you mean 'gaussian'\?$"),
        ([0.5, 0.5], TWO_VALUES, "uniform", -1, r"^scale: .* at least 0, got scale=-1$"),
        ([0.5, 0.5], TWO_VALUES, "uniform", math.inf, r"^scale: .* finite .* got scale=inf$"),
        (
            [0.5, 0.5],
            TWO_VALUES,
            "uniform",
            [1, 2],
            r"^scale: must be one number for one row, .*\(2,\)$",
        ),
    ],
)
def test_row_domain(function, p, v, kind, scale, message):
    with pytest.raises(ValueError, match=message):
        function(p, v, kind, scale)


@pytest.mark.parametrize("kind", HEAVY)
def test_infinite_moments(kind):
    with pytest.raises(ValueError, match=r"second moment of .* infinite for scale >= 1/2, got"):
        noise_variance_ratio(kind, [0.1, 0.5])
    with pytest.raises(ValueError, match=r"second moment of .* is infinite"):
        first_order_mse([0.5, 0.5], TWO_VALUES, kind, 2.0)
    with pytest.raises(ValueError, match=r"third moment of .* infinite for scale >= 1/3"):
        noise_central_moment(kind, 3, 0.4)
    with pytest.raises(ValueError, match=r"fourth moment of .* infinite for scale >= 1/4"):
        second_order_mse([0.5, 0.5], TWO_VALUES, kind, 0.3)
    assert exact_noise_mse([0.5, 0.5], TWO_VALUES, kind, 0.5) > 0


def test_moment_domain():
    with pytest.raises(ValueError, match=r"^order: must be 2, 3 or 4, got 5$"):
        noise_central_moment("gaussian", 5, 0.1)


def test_bound_domain():
    with pytest.raises(ValueError, match=r"^oscillation: .* at least 0, got oscillation=-1$"):
        tv_bound([1.0, -1.0])
    with pytest.raises(ValueError, match=r"^oscillation: .* got oscillation=nan$"):
        certificate([0.5, 0.5], TWO_VALUES, math.nan)
    with pytest.raises(ValueError, match=r"^oscillation: must be one number for one row"):
        certificate([0.5, 0.5], TWO_VALUES, [1.0])
    with pytest.raises(ValueError, match=r"^mass: .* \[0, 1\], got mass=1.5$"):
        set_bound([0.5, 1.5], 1.0)


def test_sample_domain():
    with pytest.raises(ValueError, match=r"^samples: must be at least 2, .* got samples=1$"):
        monte_carlo_mse([0.5, 0.5], TWO_VALUES, "gaussian", 1.0, samples=1, seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": np.ones((5, 3))}, r"^query and key must have the same dimension d: 4, 3 "),
        ({"value": np.ones((6, 2))}, r"^key and value share the number of keys n: 5, 6 "),
        ({"query": np.ones((0, 4))}, r"no dimension may be empty \(query \(0, 4\)"),
        ({"query": np.ones(4)}, r"^query must have shape"),
        ({"bits": 1}, r"^bits: must be 2 to 32, got bits=1$"),
        ({"per": "head"}, r"^per: must be .row. or .tensor., got per='head'$"),
    ],
)
def test_quantisation_domain(change, message):
    given = {"query": np.ones((2, 4)), "key": np.ones((5, 4)), "value": np.ones((5, 2)), "bits": 8}
    with pytest.raises(ValueError, match=message):
        quantization_noise(**(given | change))


# Rates in the number of keys


def even_row_error(n, kind, scale):
    """Exact mean square error of n even keys, for values of unit variance."""
    values = np.where(np.arange(n) % 2, 1.0, -1.0)[:, None]
    return exact_noise_mse(np.full(n, 1 / n), values, kind, scale)


@pytest.mark.parametrize(
    ("kind", "scale", "at"),
    [
        ("laplace", 2 / 3, {256: 0.0284, 4096: 0.0075, 65536: 0.0019, 2**20: 0.0005}),
        ("gumbel", 1.0, {256: 0.144, 4096: 0.100, 65536: 0.077, 2**20: 0.062}),
    ],
)
def test_heavier_tails_are_averaged_slower_and_not_never(kind, scale, at):
    """A simulation's rounded errors at r = 1.5 and 1; the largest n by the rate alone."""
    errors = [even_row_error(n, kind, scale) for n in (256, 4096, 65536)]
    errors.append(asymptotic_noise_mse(2**20, kind, scale))
    assert errors == pytest.approx(list(at.values()), rel=0.06)
    assert errors[0] > errors[1] > errors[2] > errors[3]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("kind", "scale", "tolerance"),
    [
        ("gaussian", 0.5, 1e-4), ("uniform", 2.0, 1e-4), ("laplace", 0.2, 1e-4),
        ("laplace", 0.5, 1e-3), ("gumbel", 0.5, 1e-3), ("laplace", 2 / 3, 4e-3),
        ("gumbel", 2 / 3, 4e-3), ("laplace", 1.0, 0.01), ("gumbel", 1.0, 0.01),
        ("laplace", 2.0, 2e-4), ("gumbel", 2.0, 2e-4),
    ],
)  # fmt: skip
def test_the_rate_of_every_tail(kind, scale, tolerance):
    n = 65536
    exact = even_row_error(n, kind, scale)
    assert asymptotic_noise_mse(n, kind, scale) == pytest.approx(exact, rel=tolerance)
    assert np.array_equal(
        asymptotic_noise_mse([16, n], kind, scale),
        [asymptotic_noise_mse(16, kind, scale), asymptotic_noise_mse(n, kind, scale)],
    )


def test_the_rate_is_that_of_simulated_attention():
    """Laplace noise of rate 1.5; errors of the mean are 0.7 %, from tails that are cut off."""
    noise = np.random.default_rng(5).laplace(0, 2 / 3, (4000, 1024))
    collision = (softmax(noise, axis=1) ** 2).sum(axis=1)
    spread = collision.std() / 4000**0.5
    predicted = asymptotic_noise_mse(1024, "laplace", 2 / 3) + 1 / 1024
    assert abs(collision.mean() - predicted) < 4 * spread + 0.025 * predicted
    assert abs(collision.mean() - predicted / 2) > 8 * spread


def test_tail_rates():
    assert [noise_tail_rate(kind, 0.5) for kind in KINDS] == [math.inf, 2.0, 2.0, math.inf]
    assert noise_tail_rate("laplace", 0.0) == math.inf
    with pytest.raises(ValueError, match="n: the number of keys must be at least 2, got n=1"):
        asymptotic_noise_mse(1, "laplace", 1.0)
    with pytest.raises(ValueError, match="did you mean 'laplace'"):
        noise_tail_rate("laplac", 1.0)
