"""A text model of two attention layers that starts in no time; tests here run it in processes."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from acutance.corpus.load_model import TextModel
from acutance.corpus.probe_corpus import Options
from acutance.probing.settings import ProbeSettings


class Toy(nn.Module):
    """Two layers of attention of 2 and 4 heads, sharp enough that mistakes show."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = SimpleNamespace(_attn_implementation="toy")
        self.embedding = nn.Embedding(50, 16)
        self.first = nn.MultiheadAttention(16, 2, batch_first=True)
        self.second = nn.MultiheadAttention(16, 4, batch_first=True)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(3.0)

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        x = self.embedding(input_ids)
        for layer in (self.first, self.second):
            x = layer(x, x, x, key_padding_mask=attention_mask == 0, need_weights=False)[0]
        return x


def text_model(seed: int = 0) -> TextModel:
    return TextModel("toy", Toy(seed).eval(), SimpleNamespace(pad_token_id=0), None)


def windows(count: int = 23, length: int = 9) -> list[list[int]]:
    """Windows of tokens, some shorter than the rest."""
    chance = torch.Generator().manual_seed(3)
    return [
        torch.randint(1, 50, (length - 4 * (index % 5 == 0),), generator=chance).tolist()
        for index in range(count)
    ]


def options(**given: Any) -> Options:
    names = {each.name for each in fields(ProbeSettings)} - {"every"}
    settings = {"verify": True, **{name: one for name, one in given.items() if name in names}}
    run = {name: one for name, one in given.items() if name not in names}
    return Options(**{"length": 9, "batch_size": 2} | run, probe=ProbeSettings(**settings))


def assert_same_rows(left: Any, right: Any) -> None:
    """Two summaries of the same rows: counts and extremes exactly, sums to 1e-9 of their size."""
    assert left.layers == right.layers
    assert left.metrics == right.metrics
    for name in ("count", "low", "high", "histogram"):
        assert torch.equal(getattr(left.moments, name), getattr(right.moments, name)), name
    for name in ("mean", "M2"):
        a, b = getattr(left.moments, name), getattr(right.moments, name)
        # M2 of rows all alike is rounding: a sum of squares is known to 1e-9 of the mean's square
        size = b.abs() if name == "mean" else b + right.moments.mean.square()
        assert bool(((a - b).abs() <= 1e-9 * size + 1e-15).all()), name
