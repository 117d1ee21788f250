"""Rows under logit noise against other integrals, closed forms, limits and Monte Carlo."""

import math

import numpy as np
import pytest
from scipy.special import softmax

from acutance.theory import noise as noise_module
from acutance.theory.noise import (
    exact_noise_mse,
    first_order_bias,
    noise_central_moment,
    noise_variance_ratio,
)
from tests.contract.theory.test_robustness import KINDS, moment, softmax_row


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [3, 4])
def test_series_and_closed_form_meet(kind, order):
    at = noise_module._SERIES_BELOW[kind]
    below, above = noise_central_moment(kind, order, [at * (1 - 1e-9), at * (1 + 1e-9)])
    assert below == pytest.approx(above, rel=5e-8, abs=0)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_follow_the_law(kind):
    generator = np.random.default_rng(5)
    noise = noise_module.sample_noise(kind, 0.2, (400_000,), generator)
    factor = np.exp(noise) / moment(kind, 0.2, 1)
    for order in (1, 2):
        powers = factor**order
        expected = 1.0 if order == 1 else 1 + noise_variance_ratio(kind, 0.2)
        error = powers.std() / math.sqrt(powers.size)
        assert abs(powers.mean() - expected) < 4 * error


def test_blocks_of_keys_add_up():
    p, v = softmax_row(7, 100_000, 3.0, 2)
    assert p.size > noise_module._KEY_BLOCK
    value = exact_noise_mse(p, v, "laplace", 0.7)
    there = exact_noise_mse(p[::-1], v[::-1], "laplace", 0.7)
    assert there == pytest.approx(value, rel=1e-13, abs=0)


def test_blocks_of_nodes_add_up(limits):
    p, v = softmax_row(7, 300, 3.0, 2)
    value = exact_noise_mse(p, v, "laplace", 0.7)
    limits(noise_module, _WINDOW=1_000)  # the usual one holds all nodes of this row
    assert exact_noise_mse(p, v, "laplace", 0.7) == pytest.approx(value, rel=1e-13, abs=0)


def test_bias_pulls_towards_the_plain_average():
    p, v = softmax_row(11, 8, 1.5, 2)
    scale, samples = 0.2, 400_000
    noise = noise_module.sample_noise("gaussian", scale, (samples, 8), np.random.default_rng(0))
    change = softmax(np.log(p) + noise, axis=-1) @ v - p @ v
    error = change.std(axis=0) / math.sqrt(samples)
    bias = first_order_bias(p, v, "gaussian", scale)
    assert (np.abs(change.mean(axis=0) - bias) < 4 * error + 2 * scale**2 * np.abs(bias)).all()
    assert (np.abs(bias) > 8 * error).any()
    assert bias @ (v.mean(axis=0) - p @ v) > 0


def test_quantised_numbers_are_integers_of_the_width():
    x = np.array([[0.1, -0.7, 0.33], [0.0, 0.0, 0.0]])
    rounded, step = noise_module._quantized(x, 3, "row")
    assert step[:, 0] == pytest.approx([0.7 / 3, 0])
    assert rounded[0] == pytest.approx(np.array([0, -3, 1]) * 0.7 / 3)
    assert (rounded[1] == 0).all()
    assert noise_module._quantized(x, 3, "tensor")[1][:, 0] == pytest.approx([0.7 / 3] * 2)
