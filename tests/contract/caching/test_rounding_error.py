"""The theory of rounded keys and values against what rounding does to the heads of models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from acutance.theory import rounding_error


def test_error_of_random_heads_against_independent_noise() -> None:
    """Uniform errors within the same steps, drawn many times, move the output as predicted."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in ((5, 16), (64, 16), (64, 8)))
    for along, axis in (("tokens", 0), ("channels", 1)):
        predicted = rounding_error(q, k, v, key_bits=6, value_bits=5, keys_along=along, group=16)

        def step(x: Any, bits: int, axis: int) -> Any:
            shape = (
                (x.shape[0] // 16, 16, -1) if axis == 0 else (x.shape[0], -1, min(16, x.shape[1]))
            )
            parts = x.reshape(shape)
            at = 1 if axis == 0 else 2
            size = np.ptp(parts, at, keepdims=True) / (2**bits - 1)
            return np.broadcast_to(size, parts.shape).reshape(x.shape)

        def output(keys: Any, values: Any) -> Any:
            scores = np.exp(q @ keys.T / 4)
            return scores / scores.sum(1, keepdims=True) @ values

        plain, draws = output(k, v), []
        for _ in range(2000):
            noise = (rng.random(k.shape) - 0.5) * step(k, 6, axis)
            of_values = (rng.random(v.shape) - 0.5) * step(v, 5, 1)
            draws.append(((output(k + noise, v + of_values) - plain) ** 2).sum(1).mean())
        error = np.std(draws) / math.sqrt(len(draws))
        assert np.mean(draws) == pytest.approx(predicted.total, abs=4 * error, rel=0.01)


def test_one_key_and_no_rounding() -> None:
    """One visible key has all the weight, so noise on its logit changes nothing."""
    q, k, v = np.ones((2, 4)), np.eye(4), np.eye(4)
    assert rounding_error(q, k, v).total == 0.0
    first = rounding_error(q, k, v, key_bits=2, value_bits=2, positions=[0, 0])
    assert first.keys == 0.0
    assert first.values == pytest.approx(4 * (1 / 3) ** 2 / 12)
    assert first.logit_variance > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"key": np.ones((3, 5))}, r"query and key must have the same width d: 4, 5"),
        ({"value": np.ones((2, 4))}, "key and value must have the same number of keys"),
        ({"key_bits": 0}, "key_bits: must be 1 to 16, got 0"),
        ({"value_bits": 17}, "value_bits: must be 1 to 16, got 17"),
        ({"group": 0, "key_bits": 8}, "group: must be at least 1, got 0"),
        ({"keys_along": "rows"}, "keys_along must be 'tokens' or 'channels', got 'rows'"),
        ({"positions": [0, 3]}, "positions must be 2 indices of keys, 0 to 2"),
        ({"query": np.full((2, 4), np.nan)}, "query: every entry must be finite"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "query": np.ones((2, 4)), "key": np.ones((3, 4)), "value": np.ones((3, 4)), **given
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        rounding_error(**arguments)
