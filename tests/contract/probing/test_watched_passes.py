"""A probe of a model of transformers: after a pass that was followed, it watches its doors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import acutance
from tests.versions import CACHE


def gpt2(layers: int = 2) -> Any:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=16, n_head=2, vocab_size=50, n_positions=32)
    return GPT2Model._from_config(config, attn_implementation="sdpa").eval()


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
    return bool(torch_module._global_forward_pre_hooks)


@contextmanager
def followed() -> Iterator[None]:
    """Keep every pass followed: someone else has hooks on all modules."""
    handles = [
        nn.modules.module.register_module_forward_pre_hook(lambda *_: None) for _ in range(2)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run(model: Any, ids: Tensor) -> None:
    """Passes with a mask and without, and steps of decoding."""
    padded = torch.ones_like(ids).index_fill(1, torch.arange(3), 0)
    for mask in (None, padded, None, torch.ones_like(ids), padded):
        model(ids, attention_mask=mask)
    output = model(ids[:, :5], attention_mask=padded[:, :5], use_cache=True)
    for place in range(5, 9):
        output = model(
            ids[:, place : place + 1],
            attention_mask=padded[:, : place + 1],
            **{CACHE: output.past_key_values},
            use_cache=True,
        )


def test_watched_passes_read_what_followed_ones_do(ids: Tensor) -> None:
    model = gpt2()
    with acutance.probe(model, every=2) as probe:
        model(ids)
        assert not is_followed()
        assert torch._C._len_torch_function_stack() == 0
        run(model, ids)
        assert not is_followed()
    with followed(), acutance.probe(model, every=2) as want:
        model(ids)
        run(model, ids)
    assert probe.summary().layers == want.summary().layers
    for name in probe.metrics:
        got, expected = probe.summary().mean(name), want.summary().mean(name)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_a_layer_in_a_later_pass_takes_few_calls(ids: Tensor) -> None:
    counts, files = [], set()

    def count(frame: Any, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and "src/acutance/" in path:
            counts[-1] += 1
            files.add(path)

    for layers in (2, 6):
        model = gpt2(layers)
        with acutance.probe(model):
            model(ids)
            model(ids)
            counts.append(0)
            sys.setprofile(count)
            try:
                model(ids)
            finally:
                sys.setprofile(None)
    assert counts[1] - counts[0] <= 4 * 150
    assert len(files) <= 16


def test_a_function_that_someone_replaced_stays_replaced(
    ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = F.scaled_dot_product_attention, []

    def mine(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(len(args))
        return original(*args, **kwargs)

    model = gpt2()
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", mine)
        with acutance.probe(model, verify=True) as probe:
            for _ in range(3):
                model(ids)
        assert F.scaled_dot_product_attention is mine
    assert len(seen) == 6
    assert [layer.status for layer in probe.summary().layers] == ["verified"] * 2


def test_a_layer_called_by_itself_is_a_pass(ids: Tensor) -> None:
    model, x = gpt2(), torch.randn(2, 9, 16)
    counts = []
    for around in (followed, None):
        with acutance.probe(model) as probe:
            if around is not None:
                with around():
                    model(ids)
                    model.h[0](x)
            else:
                model(ids)
                model.h[0](x)
        counts.append({layer.module: layer.calls for layer in probe.summary().layers})
    assert counts[0] == counts[1] == {"h.0.attn": 2, "h.1.attn": 1}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_a_checkpointed_backward_pass_is_not_read() -> None:
    ids, counts, means = torch.arange(18).view(2, 9), [], []
    for keep in (followed, nullcontext):
        model = gpt2().train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.enable_grad(), keep(), acutance.probe(model) as probe:
            for _ in range(3):
                model(ids).last_hidden_state.square().sum().backward()
        counts.append({layer.module: layer.calls for layer in probe.summary().layers})
        means.append(probe.summary().mean("entropy"))
    assert counts[0] == counts[1] == {"h.0.attn": 3, "h.1.attn": 3}
    torch.testing.assert_close(means[0], means[1], rtol=0, atol=0)


def test_softmaxes_outside_the_model_do_not_end_it(ids: Tensor) -> None:
    model = gpt2()
    with acutance.probe(model):
        for _ in range(2):
            weights = model(ids).last_hidden_state.softmax(-1)
            assert weights.dim() == 3
            assert not is_followed()


def test_two_models_of_one_class_are_watched(ids: Tensor) -> None:
    one, two = gpt2(), gpt2()
    with acutance.probe(one) as first:
        one(ids)
        with acutance.probe(two) as second:
            for _ in range(2):
                two(ids)
                assert not is_followed()
            one(ids)
            assert not is_followed()
    calls = [[layer.calls for layer in each.summary().layers] for each in (first, second)]
    assert calls == [[2, 2], [2, 2]]
