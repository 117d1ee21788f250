"""A law on a model of transformers: after a pass that was followed, only its doors are watched."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import acutance
from acutance.capture.intercept import Contents, is_library_code
from tests.contract.calibration.test_doors import LAW, Once, gpt2, hidden, pooled


@pytest.fixture
def ids() -> Tensor:
    return torch.arange(18).view(2, 9)


@pytest.fixture(autouse=True)
def doors_are_as_before() -> Iterator[None]:
    from transformers import GPT2Model

    doors = F.scaled_dot_product_attention, torch.softmax, torch.exp
    with torch.no_grad():
        yield
    assert doors == (F.scaled_dot_product_attention, torch.softmax, torch.exp)
    assert not {"softmax", "log_softmax", "exp", "exp_"} & set(vars(torch.Tensor))
    assert "__call__" not in vars(GPT2Model)
    assert not torch_module._global_forward_pre_hooks


class Sometimes(nn.Module):
    """Attention in another way, when a switch outside says so."""

    way: list[str] = []  # noqa: RUF012 - nothing of the module changes

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2()

    def forward(self, ids: Tensor) -> Tensor:
        x = hidden(self.model, ids)
        if "sdpa" in self.way:
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return pooled(x) if self.way else x


def test_what_comes_by_a_door_is_scaled_or_an_error(
    ids: Tensor, as_library: Callable[[type], None]
) -> None:
    model = Sometimes()
    assert not is_library_code(model)
    model.way = ["sdpa"]
    with acutance.apply(model, LAW) as followed:
        want = model(ids)
    as_library(Sometimes)
    model.way = []
    with acutance.apply(model, LAW) as applied:
        model(ids)
        assert applied.by_interface
        model.way = ["sdpa"]
        assert torch.equal(model(ids), want)
        assert applied.calls["Sometimes"] == followed.calls["Sometimes"] == 1
        assert not applied.by_interface  # functions are followed from then on
    model.way = []
    with acutance.apply(model, LAW) as applied:
        model(ids)
        model.way = ["by hand"]
        with pytest.raises(acutance.ApplyError, match="cannot be applied to Sometimes"):
            model(ids)
        model(ids)  # followed from its first product on
    assert applied.calls["Sometimes"] == 1


def test_settings_are_looked_at() -> None:
    model = gpt2()
    contents = Contents(model, [model.h[0].attn])
    assert contents.unchanged()
    model.h[0].attn.scale_attn_weights = False
    assert not contents.unchanged()


def test_a_scripted_child_keeps_passes_followed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Once())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer PyTorch warns of scripts
        model[0] = torch.jit.script(model[0])
    x = torch.randn(1, 5, 8)
    with acutance.apply(model, LAW) as applied:
        for _ in range(2):
            model(x)
        assert not applied.by_interface
    assert applied.calls == {"1": 2}
    assert not is_library_code(nn.Sequential(model[0]))


def test_a_model_that_was_followed_is_not_followed_again_until_it_changes(ids: Tensor) -> None:
    model = gpt2()
    opened = []
    for change in (None, None, "child", None, "hook"):
        if change == "child":
            model.h[0].mlp.act = nn.ReLU()
        elif change == "hook":
            model.ln_f.register_forward_hook(lambda *_: None)
        with acutance.apply(model, LAW) as applied:
            opened.append(applied.by_interface)
            model(ids)
        assert applied.calls == {"h.0.attn": 1, "h.1.attn": 1}
    assert opened == [False, True, False, True, False]


def test_what_is_known_of_a_model_does_not_keep_it() -> None:
    model = gpt2()
    with acutance.apply(model, LAW):
        model(torch.arange(5)[None])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_change_is_noticed_in_a_pass_that_begins_elsewhere(ids: Tensor) -> None:
    model, x = gpt2(), torch.randn(2, 9, 16)
    with acutance.apply(model, LAW):
        model(ids)
    with acutance.apply(model, LAW) as applied:
        model.h[0](x)
        assert applied.by_interface
        assert applied.calls == {"h.0.attn": 1}
        model.h[0].mlp.act = Once()
        model.h[0](x)
        assert not applied.by_interface
    assert applied.calls == {"h.0.attn": 2, "h.0.mlp": 1}


def test_weights_of_products_that_were_split_are_refused() -> None:
    class Split(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            weights = (x @ x.mT).chunk(2, 1)[0].exp()
            return (weights / weights.sum(-1, keepdim=True)) @ x[:, :1]

    model, x = Split(), torch.randn(1, 2, 5, 4)
    with (
        pytest.raises(acutance.ApplyError, match="its weights were computed without a softmax"),
        acutance.apply(model, "ssmax"),
    ):
        model(x)
