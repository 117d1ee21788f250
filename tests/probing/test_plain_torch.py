"""Attention written in plain PyTorch: SDPA, nn.MultiheadAttention, transformer layers, softmax."""

from __future__ import annotations

import pytest
import torch

import acutance
from acutance.capture.readers import functions
from tests.contract.probing.test_plain_torch import attention_layer


def test_another_output_when_run_again_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = attention_layer()
    x = torch.randn(2, 6, 16)
    monkeypatch.setattr(functions, "outputs_agree", lambda again, output: False)
    plain, _ = layer(x, x, x)
    with (
        pytest.raises(acutance.ProbeError, match="a different output when run again"),
        acutance.probe(layer) as probe,
    ):
        assert torch.equal(layer(x, x, x)[0], plain)
    assert probe.unread == [
        "MultiheadAttention: multi-head attention returned a different output when run again"
    ]


def test_many_rows_are_read_in_parts() -> None:
    from acutance.capture.attention_call import observe_scores

    scores = torch.randn(2, 3, 900, 900)  # parts have at most 2²² scores
    scores[1, :, :, 800:] = -torch.inf
    parts, real = observe_scores(scores)
    for rows in (slice(0, 400), slice(400, 900)):
        whole, _ = observe_scores(scores[:, :, rows])
        assert torch.equal(whole.entropy, parts.entropy[:, :, rows])
    assert real is not None
    assert real.tolist() == [[True] * 900, [True] * 800 + [False] * 100]
