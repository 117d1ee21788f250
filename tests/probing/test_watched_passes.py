"""A probe of a model of transformers: after a pass that was followed, it watches its doors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import acutance
from acutance.capture.intercept import classes_are_library
from tests.contract.probing.test_watched_passes import followed, gpt2


@pytest.fixture
def ids() -> Tensor:
    return torch.arange(18).view(2, 9)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    doors = F.scaled_dot_product_attention, torch.softmax
    with torch.no_grad():
        yield
    assert doors == (F.scaled_dot_product_attention, torch.softmax)
    assert not torch_module._global_forward_pre_hooks
    assert torch._C._len_torch_function_stack() == 0


def is_followed() -> bool:
    return torch._C._len_torch_function_stack() > 0


class Sometimes(nn.Module):
    """Attention in another way, when a switch outside says so."""

    way: list[str] = []  # noqa: RUF012 - nothing of the module changes

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model(ids).last_hidden_state
        if "sdpa" in self.way:
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return torch.softmax(x @ x.mT, -1) @ x if self.way else x


@pytest.mark.parametrize("way", ["sdpa", "by hand"])
def test_what_comes_by_a_door_is_read(
    way: str, ids: Tensor, as_library: Callable[[type], None]
) -> None:
    as_library(Sometimes)
    model = Sometimes()
    with acutance.probe(model) as probe:
        model(ids)
        assert not is_followed()
        model.way = [way]
        for _ in range(2):
            model(ids)
        assert is_followed()
    calls = {layer.module: layer.calls for layer in probe.summary().layers}
    assert calls == {"Sometimes": 2, "model.h.0.attn": 3, "model.h.1.attn": 3}


def test_a_tap_is_heard_in_a_watched_pass(ids: Tensor, as_library: Callable[[type], None]) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2()

        def forward(self, ids: Tensor) -> Tensor:
            x = self.model(ids).last_hidden_state[:, None]
            with acutance.tap(x, x, x):
                return x

    as_library(Outer)
    model = Outer()
    with acutance.probe(model) as probe:
        for _ in range(3):
            model(ids)
    assert {layer.module: layer.calls for layer in probe.summary().layers}["Outer"] == 3


def test_transformers_may_be_imported_after_a_model_was_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = gpt2()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "transformers")
        assert classes_are_library(nn.Linear(2, 2))
    assert classes_are_library(model)


@pytest.mark.parametrize("how", ["module", "hook", "forward"])
def test_what_changes_is_followed(how: str, ids: Tensor) -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]

    def change(model: Any) -> None:
        attend = Attends()
        if how == "module":
            model.h[1].mlp.act = attend
        elif how == "hook":
            model.ln_f.register_forward_hook(lambda *given: attend.forward(given[-1]))
        else:
            plain = model.ln_f.forward
            model.ln_f.forward = lambda x: attend.forward(plain(x))

    model, fresh = gpt2(), gpt2()
    with acutance.probe(model) as probe:
        model(ids)
        assert not is_followed()
        change(model)
        model(ids)
        assert is_followed()
    change(fresh)
    with followed(), acutance.probe(fresh) as want:
        fresh(ids)
    names = [layer.module for layer in want.summary().layers]
    if how == "module":  # names are read when a probe opens
        names = [name.removesuffix(".act") for name in names]
    assert len(names) == 3
    assert sorted(layer.module for layer in probe.summary().layers) == sorted(names)


def test_a_change_that_another_thread_meets_is_followed_here(ids: Tensor) -> None:
    model = gpt2()

    def attend(module: nn.Module, given: Any, output: Tensor) -> None:
        x = output[:, None]
        F.scaled_dot_product_attention(x, x, x)

    with acutance.probe(model) as probe:
        model(ids)
        model.ln_f.register_forward_hook(attend)
        other = threading.Thread(target=model, args=(ids,))
        other.start()
        other.join()
        model(ids)
        assert is_followed()
    calls = {layer.module: layer.calls for layer in probe.summary().layers}
    assert calls == {"h.0.attn": 3, "h.1.attn": 3, "ln_f": 1}


def test_a_second_probe_reads_what_the_first_did(ids: Tensor) -> None:
    model, summaries = gpt2(), []
    padded = torch.ones_like(ids).index_fill(1, torch.arange(3), 0)
    for _ in range(2):
        with acutance.probe(model, verify=True) as probe:
            summaries.append(is_followed())
            model(ids, attention_mask=padded)
        summaries.append(probe.summary())
    assert (summaries[0], summaries[2]) == (True, False)
    first, second = summaries[1], summaries[3]
    assert first.layers == second.layers
    assert [layer.status for layer in second.layers] == ["verified"] * 2
    for name in probe.metrics:
        torch.testing.assert_close(
            first.mean(name), second.mean(name), rtol=0, atol=0, equal_nan=True
        )


def test_a_module_named_attention_is_listed_by_a_second_probe_too(
    ids: Tensor, as_library: Callable[[type], None]
) -> None:
    class PoolingAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.pool = gpt2(), PoolingAttention()

        def forward(self, ids: Tensor) -> Tensor:
            output: Tensor = self.pool(self.model(ids).last_hidden_state)
            return output

    as_library(Outer)
    as_library(PoolingAttention)
    model, unread = Outer(), []
    for _ in range(2):
        with acutance.probe(model) as probe:
            unread.append(is_followed())
            model(ids)
        unread.append(probe.summary().unread)
    assert (unread[0], unread[2]) == (True, False)
    assert (
        unread[1]
        == unread[3]
        == ("pool: PoolingAttention ran, and nothing in it was read as attention",)
    )
