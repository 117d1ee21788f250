"""EntropyRegularizer, ZLoss and AttentionWatch against dense float64."""

from __future__ import annotations

import torch
from torch import nn

from acutance import training
from acutance.nn import MultiheadAttention, recording


def test_the_watch_reads_our_modules_and_leaves_them_as_they_were() -> None:
    torch.manual_seed(0)
    ours = MultiheadAttention(16, 2, batch_first=True, statistics="off")
    theirs = nn.MultiheadAttention(16, 2, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 16)
    both = nn.ModuleDict({"ours": ours, "theirs": theirs})
    with training.AttentionWatch(both) as watch:
        ours(x, x, x)
        theirs(x, x, x)
        ours(x, x, x)
    assert [rows.module for rows in watch.rows] == ["ours", "theirs", "ours"]
    first, second, _ = (rows.statistics.entropy for rows in watch.rows)
    assert first.requires_grad
    torch.testing.assert_close(first, second)
    assert ours.statistics == "off"
    assert not recording._listeners
    with training.AttentionWatch(both, gradients=False) as watch:
        ours(x, x, x)
        theirs(x, x, x)
    assert not any(rows.statistics.entropy.requires_grad for rows in watch.rows)
