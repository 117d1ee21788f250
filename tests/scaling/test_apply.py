"""The factor reaches the logits, row by row and head by head, in the query's dtype."""

from __future__ import annotations

import math

import torch

import acutance
from acutance import scaling
from acutance.masks import Masking
from acutance.scaling import apply_scaling, visible_keys


def test_logits_are_multiplied_by_the_factor() -> None:
    query, key = torch.randn(2, 4, 6, 8).double(), torch.randn(2, 2, 6, 8).double()
    n = visible_keys(Masking(2, 2, 2, 6, 6, causal=True))
    law = scaling.SSMax([0.1, 0.2, 0.4, 0.8], bias=1.0)
    scaled = apply_scaling(query, law, n)
    repeated = key.repeat_interleave(2, 1)
    s, want = scaled @ repeated.mT, torch.empty(2, 4, 6, 6, dtype=torch.float64)
    for h, slope in enumerate((0.1, 0.2, 0.4, 0.8)):
        for i in range(6):
            want[:, h, i] = (slope * math.log(i + 1) + 1.0) * (query @ repeated.mT)[:, h, i]
    torch.testing.assert_close(s, want, rtol=1e-13, atol=1e-13)
    stats = acutance.row_statistics(scaled, key, is_causal=True, enable_gqa=True)
    entropy = torch.special.entr(
        torch.softmax((want / 8**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf), -1)
    ).sum(-1)
    torch.testing.assert_close(stats.entropy, entropy, rtol=1e-12, atol=1e-12)
