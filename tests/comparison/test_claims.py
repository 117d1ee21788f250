"""What the articles say of each mechanism, asserted on the measured numbers of a comparison."""

from __future__ import annotations

import math

import pytest
import torch

from acutance import theory
from acutance.comparison import compare
from acutance.comparison.runner import Gaussian, measure
from acutance.mechanisms import MECHANISMS
from acutance.probing import QueryKeySample


def test_cosines_at_temperature_one_stay_near_log_n() -> None:
    limit = float(theory.information_range_limit(1.0))
    assert limit == pytest.approx(0.4745, abs=5e-5)
    n, d = 4096, 4
    top = round(0.2055 * n)  # the share of keys at +1 that says most
    axis = torch.zeros(d)
    axis[0] = 1.0
    key = torch.where(torch.arange(n)[:, None] < top, axis, -axis)[None]
    sample = QueryKeySample(axis.expand(1, n, d), key, key, ("head",), is_causal=False)
    found = compare("cosine", n=n, source=sample, samples=4, costs=False)
    entropy = found["cosine", n]["entropy"].measured
    assert math.log(n) - limit - 1e-5 < entropy < math.log(n) - limit + 1e-4
    for mean in (0.0, 0.5, 5.0):
        law = Gaussian(mean, 1.0, mean, 1.0)
        inputs = law.draw(256, 2, heads=8, batch=1, samples=64, seed=1, is_causal=False)
        rows = measure(MECHANISMS["cosine"], inputs).values["entropy"]
        assert float(rows.min()) > math.log(256) - limit
