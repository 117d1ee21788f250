"""AttentionMonitor in a loop of one's own: what it measures, and that nothing else changes."""

from __future__ import annotations

import torch
from torch import nn

import acutance
from acutance.training.monitor import scalars


def test_a_number_that_no_row_gives_is_left_out() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.zeros(1, 1, 8)  # one key: H / log n is 0 / 0
    with acutance.probe(model, metrics=["entropy", "normalized_entropy"]) as probe:
        model(x, x, x)
    found = scalars(probe.summary(), ["entropy", "normalized_entropy"], [])
    assert found["attention/MultiheadAttention/entropy"] == 0.0
    assert not any("normalized_entropy" in name for name in found)
