"""Attention written in plain PyTorch: SDPA, nn.MultiheadAttention, transformer layers, softmax."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import acutance
from acutance.capture.readers import functions
from acutance.scaling import LogN
from tests.contract.probing.test_plain_torch import attention_layer

SOFTMAX = F.softmax


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


class ByHand(torch.nn.Module):
    """Attention of two heads, written out, whose softmax is ``F.softmax``."""

    num_heads = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x @ x.mT, dim=-1) @ x


@pytest.mark.parametrize("group", ["looking", "scores"])
def test_multi_head_attention_in_another_thread_hides_no_softmax(group: str) -> None:
    replaced, done = threading.Event(), threading.Event()

    def inside() -> None:
        with functions.handling(group, lambda *_: None):
            replaced.set()
            done.wait(60)

    other = threading.Thread(target=inside)
    other.start()
    try:
        assert replaced.wait(60)
        assert (F.softmax is SOFTMAX) == (group == "looking")
        model, x = ByHand(), torch.randn(1, 2, 6, 4)
        with acutance.probe(model) as probe, torch.no_grad():
            model(x)
        with acutance.apply(model, LogN(train_length=4)) as law, torch.no_grad():
            model(x)
    finally:
        done.set()
        other.join()
    assert [layer.calls for layer in probe.summary().layers] == [1]
    assert law.calls == {"ByHand": 1}
    assert F.softmax is SOFTMAX


class Operators(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_law_computes_multi_head_attention_once() -> None:
    layer, x = attention_layer(), torch.randn(2, 6, 16)
    with Operators() as plain:
        layer(x, x, x, need_weights=True)
    with acutance.apply(layer, LogN(train_length=4)) as law, Operators() as scaled:
        layer(x, x, x, need_weights=True)
    assert law.calls == {"MultiheadAttention": 1}
    assert not [name for name in scaled.names if "scaled_dot_product" in name]
    softmaxes = [sum("softmax" in name for name in ran.names) for ran in (plain, scaled)]
    assert softmaxes == [1, 1]
