"""Trained heads: the quadrature against rows drawn from the model, and the exact theory."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.special import expit

from acutance.theory import (
    expected_head_metrics,
)
from acutance.theory.trained_heads import two_sided_normal


@pytest.mark.parametrize("kappa", [-0.4, 0.6])
def test_rows_drawn_from_the_model(kappa: float) -> None:
    rng, n, std = np.random.default_rng(0), 400, 2.0
    z = rng.standard_normal((4000, n - 1))
    raw = z * np.exp(kappa * np.sign(z))
    nodes, mass, skewness = two_sided_normal(kappa)
    assert_allclose([mass.sum(), mass @ nodes, mass @ nodes**2], [1, 0, 1], atol=1e-12)
    centre = np.sqrt(2 / np.pi) * np.sinh(kappa)
    y = (raw - centre) / np.sqrt(np.cosh(2 * kappa) - centre**2)
    assert_allclose((y**3).mean(), skewness, atol=0.02)
    q = np.exp(std * y)
    jensen = np.log(q.mean(axis=1)).mean()
    q /= q.sum(axis=1, keepdims=True)
    a = expit(0.5 + 1.2 * rng.standard_normal((4000, 1)))
    p = np.concatenate([a, (1 - a) * q], axis=1)
    found = expected_head_metrics(
        n, first_gap=0.5, first_gap_std=1.2, rest_logit_std=std, rest_jensen_gap=jensen
    )
    entropy = -(p * np.log(p)).sum(axis=1)
    assert_allclose(found.entropy, entropy.mean(), atol=4 * entropy.std() / 4000**0.5 + 0.01)
    assert_allclose(found.first_weight, a.mean(), atol=0.02)
    assert_allclose(found.top_weight, p.max(axis=1).mean(), atol=0.02)
    assert_allclose(found.effective_keys, (1 / (p**2).sum(axis=1)).mean(), rtol=0.1)
    assert_allclose(found.skewness, skewness, atol=0.05)
