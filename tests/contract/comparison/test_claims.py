"""What the articles say of each mechanism, asserted on the measured numbers of a comparison."""

from __future__ import annotations

import itertools
import math

import pytest

from acutance import theory
from acutance.comparison import Comparison, compare

#: Standard errors: with 15 degrees of freedom one in four thousand is farther off than this.
FAR = 5.0


def sparsity(found: Comparison, name: str, n: int) -> float:
    return found[name, n]["sparsity"].measured


@pytest.fixture(scope="module")
def usual() -> Comparison:
    """Gaussian queries and keys at two lengths."""
    names = ["scaled_dot", "exp", "dot", "cosine", "cosine_tau", "relu2", "identity", "log_n",
             "linear_elu1", "linear_exp", "decay", "lru"]  # fmt: skip
    return compare(names, n=[256, 1024], d=32, costs=False)


def test_expectations_are_met(usual: Comparison) -> None:
    judged = [
        (result.mechanism, result.n, name, reading.z)
        for result in usual.results
        for name, reading in result.readings.items()
        if not math.isnan(reading.z)
    ]
    assert len(judged) >= 60
    assert max(abs(z) for *_, z in judged) < FAR, max(judged, key=lambda each: abs(each[3]))


@pytest.mark.parametrize("name", ["scaled_dot", "cosine_tau", "relu2", "identity"])
def test_a_formula_five_per_cent_off_would_be_found(usual: Comparison, name: str) -> None:
    reading = usual[name, 1024]["sparsity"]
    error = abs((reading.measured - reading.predicted) / reading.z)  # of the rows' differences
    assert abs(1.05 * reading.predicted - reading.measured) > FAR * error


@pytest.mark.parametrize("name", ["linear_elu1", "linear_exp"])
def test_linear_attention_has_the_value_of_its_population(usual: Comparison, name: str) -> None:
    for n in (256, 1024):  # the formula is off by order 1/n
        assert usual[name, n]["sparsity"].deviation == pytest.approx(0, abs=1 / n + 0.002)


@pytest.mark.slow
def test_exp_concentrates_without_limit_and_ratios_do_not_move() -> None:
    keys, fixed = [], []
    for scale in (1.0, 4.0, 16.0, 256.0):
        names = ["exp_l2", "scaled_dot", "relu2", "identity"]
        found = compare(names, n=256, d=16, std=(scale, 1.0), heads=8, costs=False)
        assert sparsity(found, "exp_l2", 256) == pytest.approx(
            sparsity(found, "scaled_dot", 256), rel=1e-4
        )
        keys.append(found["scaled_dot", 256]["effective_keys"].measured)
        fixed.append((sparsity(found, "relu2", 256), sparsity(found, "identity", 256)))
    assert keys[0] > 80
    assert all(2 * later < earlier for earlier, later in itertools.pairwise(keys[:3]))
    assert keys[3] < 1.05  # one key: two in 128 rows may be near each other at any scale
    for later in fixed[1:]:
        assert later == pytest.approx(fixed[0], rel=1e-4)


def test_relu2_concentrates_only_below_zero() -> None:
    def at(mean: float) -> tuple[float, float, float]:
        found = compare(
            "relu2", n=2048, d=16, mean=(1.0, mean), std=(0.1, 1.0), heads=8, costs=False
        )
        reading = found["relu2", 2048]["sparsity"]
        assert abs(reading.z) < FAR
        return reading.measured, reading.error, float(found["relu2", 2048].parameters["logit_mean"])

    floor = float(theory.sparsity_relu2(0.0, 1.0))
    assert floor == pytest.approx(1 / math.sqrt(6))
    for mean in (0.0, 0.1, 0.5):
        value, error, beta = at(mean)
        assert beta >= 0
        assert value > floor - FAR * error
    below = [at(mean) for mean in (-0.1, -0.3, -0.6)]
    values = [value for value, _, _ in below]
    assert all(beta < 0 for _, _, beta in below)
    assert values == sorted(values, reverse=True)
    assert values[0] < floor
    assert values[-1] < 0.25 * floor


@pytest.mark.parametrize("name", ["identity", "l1", "l2", "linear_identity"])
def test_signed_weights_have_the_floor_of_a_half_normal(name: str) -> None:
    floor = math.sqrt(2 / math.pi)
    centred = compare(name, n=4096, d=16, heads=8, costs=False)[name, 4096]["sparsity"]
    assert abs(centred.measured - floor) < FAR * centred.error + 1 / 4096
    for mean in (-0.5, 0.2):
        shifted = compare(name, n=512, d=16, mean=(1.0, mean), heads=4, costs=False)
        assert shifted[name, 512]["sparsity"].measured > floor


def test_linear_attention_concentrates_only_at_low_signal_to_noise() -> None:
    values, predictions = [], []
    for std in (0.1, 1.0, 3.0):
        found = compare("linear_exp", n=1024, d=8, std=(1.0, std), heads=8, costs=False)
        values.append(sparsity(found, "linear_exp", 1024))
        predictions.append(found["linear_exp", 1024]["sparsity"].predicted)
    assert predictions == sorted(predictions, reverse=True)
    assert values[:2] == pytest.approx(predictions[:2], rel=0.03)
    assert values[0] > 0.99
    assert values[0] > values[1] > values[2]
    assert values[2] < 0.3
    widths = [
        sparsity(compare("linear_relu", n=512, d=d, heads=8, costs=False), "linear_relu", 512)
        for d in (4, 16, 64)
    ]
    assert widths == sorted(widths)  # a larger d makes it less sparse


def test_decay_keeps_its_effective_keys(usual: Comparison) -> None:
    limit = (1 + 0.9) / (1 - 0.9)
    shares = []
    for n in (256, 1024):
        result = usual["decay", n]
        assert result["effective_keys"].measured == pytest.approx(limit, rel=1e-5)
        assert result["effective_keys"].predicted == pytest.approx(limit, rel=1e-5)
        assert result["effective_keys"].error == 0
        shares.append(result["sparsity"].measured)
    assert shares[0] / shares[1] == pytest.approx(2, rel=0.02)  # n^(-1/2): only zeros are added
    assert usual["lru", 1024]["effective_keys"].deviation == pytest.approx(0, abs=1e-4)
