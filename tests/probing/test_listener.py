"""The listener that probes, calibration, watches and clips share."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance
from acutance.calibration.measured import Collector
from acutance.capture.attention_call import AttentionCall
from acutance.capture.listener import Listener, ProbeError
from acutance.training import AttentionWatch, QKClip


class Ways(nn.Module):
    """One module for each way to attention, in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.multihead = nn.MultiheadAttention(8, 2, batch_first=True)
        self.plain, self.ours, self.hand, self.told = (Way(way) for way in (sdpa, ours, hand, told))

    def forward(self, x: Tensor) -> Tensor:
        x = self.multihead(x, x, x, need_weights=False)[0]
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        for part in (self.plain, self.ours, self.hand, self.told):
            heads = part(heads)
        return heads


class Way(nn.Module):
    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.way, self.num_heads = way, 2

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x)


def sdpa(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def ours(x: Tensor) -> Tensor:
    output: Tensor = acutance.attention(x, x, x)
    return output


def hand(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.mT, -1) @ x


def told(x: Tensor) -> Tensor:
    with acutance.tap(x, x, x, scale=1.0):
        return x


class Names:
    """Notes what it is told, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, str]] = []
        self.error = error

    def on_call(
        self, call: AttentionCall, output: Callable[[], Tensor] | None, module: nn.Module
    ) -> None:
        if self.error is not None:
            raise self.error
        assert torch._C._len_torch_function_stack() == 0
        self.calls.append((call.module, call.source))

    def on_scores(self, scores: Tensor, name: str, doubt: Any) -> None:
        self.calls.append((name, "softmax"))


WAYS = [
    ("multihead", "scaled_dot_product_attention"),
    ("plain", "scaled_dot_product_attention"),
    ("ours", "acutance.attention"),
    ("hand", "softmax"),
    ("told", "tap"),
]


def test_every_way_of_capture_is_heard() -> None:
    model, receiver = Ways().eval(), Names()
    with torch.no_grad(), Listener(model, receiver) as listener:
        model(torch.randn(1, 5, 8))
    assert receiver.calls == WAYS
    assert list(listener.attention_modules) == [name for name, _ in WAYS]
    assert listener.calls == 5
    with torch.no_grad():
        model(torch.randn(1, 5, 8))
    assert receiver.calls == WAYS  # nothing is heard once it is closed


def test_layers_that_are_not_asked_for_are_not_handed_over() -> None:
    model, receiver = Ways().eval(), Names()
    with torch.no_grad(), Listener(model, receiver, layers="plain,told") as listener:
        model(torch.randn(1, 5, 8))
    assert [name for name, _ in receiver.calls] == ["plain", "told"]
    assert len(listener.attention_modules) == 5


def test_errors_of_a_receiver_are_listed_or_end_the_pass() -> None:
    model = Way(sdpa).eval()
    with Listener(model, Names(ValueError("no such\nthing"))) as listener:
        model(torch.randn(1, 2, 5, 4))
    assert listener.unread == ["Way: no such thing"]
    expected = "the probe could not read any attention of Way: Way: no such thing"
    assert listener.nothing_captured() == expected
    with (
        pytest.raises(RuntimeError, match="worse"),
        Listener(model, Names(RuntimeError("worse")), listed_errors=(ValueError,)) as strict,
    ):
        model(torch.randn(1, 2, 5, 4))
    assert not strict.muted()
    with Listener(model, Names()) as listener, pytest.raises(ProbeError, match="already open"):
        listener.__enter__()


@pytest.mark.parametrize("way", [sdpa, hand])
def test_tensors_are_freed_with_the_last_reference(way: Callable[[Tensor], Tensor]) -> None:
    """A cycle would keep queries and keys until Python's collector runs."""
    freed: list[int] = []

    def watched(x: Tensor) -> Tensor:
        x = x.clone()
        weakref.finalize(x, freed.append, 1)
        return way(x)

    model = Way(watched).eval()
    gc.disable()
    try:
        for opened in (acutance.probe(model, verify=True), acutance.apply(model, "ssmax")):
            with torch.no_grad(), opened:
                model(torch.randn(1, 2, 5, 4))
            assert freed.pop()
    finally:
        gc.enable()


def test_nothing_subclasses_a_probe_to_listen() -> None:
    ours = [
        one for one in acutance.Probe.__subclasses__() if one.__module__.startswith("acutance.")
    ]
    assert ours == []
    for kind in (AttentionWatch, Collector, QKClip):
        assert not issubclass(kind, acutance.Probe)
