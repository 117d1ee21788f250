"""Planted spans: where they are, what counts, and what plans do to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import acutance
from acutance.caching import CachePlan, HeadPlan, plant, recall
from tests.contract import texts
from tests.contract.trained import decoder


def windows(count: int, length: int) -> torch.Tensor:
    text = texts.read(texts.files("held out")).long()
    return text[: count * length].view(count, length)


def test_spans_are_planted_and_repeated() -> None:
    before = windows(3, 300)
    planted = plant(before, depths=[0.0, 0.5, 1.0], length=20, shown=6, seed=3)
    assert planted.context == 240
    assert sorted(planted.scored.flatten().tolist()) == [
        at + i for at in (240, 260, 280) for i in range(6, 20)
    ]
    for depth, start in enumerate((0, 110, 220)):
        first = int(planted.scored[depth, 0]) - 6
        for row in planted.tokens:
            assert torch.equal(row[start : start + 20], row[first : first + 20])
    rest = [at for start in (20, 130) for at in range(start, start + 90)]
    assert torch.equal(planted.tokens[:, rest], before[:, rest])
    assert not torch.equal(planted.tokens[0, :20], planted.tokens[1, :20])
    assert torch.equal(plant(before, seed=3, depths=[0.1], length=9).tokens,
                       plant(before, seed=3, depths=[0.1], length=9).tokens)  # fmt: skip


def test_what_counts_as_repeated() -> None:
    """Logits that know the tokens score 1; those that know one depth score it alone."""
    planted = plant(windows(2, 200), depths=[0.0, 0.6], length=12, shown=4)
    after = planted.tokens[:, planted.context :]
    known = torch.nn.functional.one_hot(after, 256).float()
    logits = torch.cat([known, known[:, :1]], 1)
    assert planted.accuracy(logits).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    wrong = logits.clone()
    at = planted.scored[1] - planted.context
    wrong[:, at] = torch.nn.functional.one_hot((after[:, at] + 1) % 256, 256).float()
    assert planted.accuracy(wrong).tolist() == [[1.0, 0.0], [1.0, 0.0]]


def test_recall_of_the_decoder_is_that_of_its_logits() -> None:
    model, tokens = decoder(), windows(3, 256)
    given: dict[str, Any] = {"depths": [0.1, 0.9], "length": 16, "shown": 4}
    found = recall(model, tokens, **given)
    planted = plant(tokens, **given)
    with torch.no_grad():
        logits = model(planted.tokens).logits[:, planted.context - 1 :]
    assert torch.equal(found.by_window, planted.accuracy(logits))
    assert found.mean == pytest.approx(sum(found.by_depth) / 2)
    assert found.error == pytest.approx(float(found.by_window.mean(1).std()) / 3**0.5)
    full = recall(model, tokens, CachePlan.of(model), **given)
    assert torch.equal(full.by_window, found.by_window)
    near = CachePlan.of(model, HeadPlan("streaming", first=1, recent=7))
    with torch.no_grad(), acutance.apply(model, near):
        logits = model(planted.tokens).logits[:, planted.context - 1 :]
    less = recall(model, tokens, near, **given)
    assert torch.equal(less.by_window, planted.accuracy(logits))
    assert not torch.equal(less.by_window, found.by_window)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"shown": 24}, ValueError, "shown must be below length, got shown=24 and length=24"),
        ({"depths": [1.5]}, ValueError, "depths must be at most 1, got 1.5"),
        ({"depths": [0.5, 0.51]}, ValueError, "2 spans of 24 tokens .* do not fit into windows"),
        ({"depths": []}, ValueError, "0 spans"),
        ({"windows": torch.zeros(2, 100)}, TypeError, "windows must be integer tokens"),
    ],
)
def test_what_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plant(given.pop("windows", windows(1, 200)), **given)
