"""Calls through operators, transformers' interface and monitors are read once each."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import acutance
from acutance.training import AttentionMonitor
from tests.contract.caching.conftest import build
from tests.contract.kernel_functions.checks import (
    HEADS,
    WIDTH,
    Calls,
    assert_listed,
    assert_read,
    packed,
    tensor,
    tensors,
)
from tests.contract.kernel_functions.stand_ins import flash_attn_2, flash_attn_3
from tests.versions import CACHE


@pytest.fixture
def operators() -> Any:
    """The operators of flash-attn 2 and 3, with their parameters, for a CPU."""
    masks = (
        "float dropout_p, float softmax_scale, bool causal, int window_size_left, "
        "int window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax"
    )
    lengths = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, "
    second = torch.library.Library("flash_attn", "DEF")
    third = torch.library.Library("flash_attn_3", "DEF")
    tensors_of = "(Tensor q, Tensor k, Tensor v, "
    second.define(f"_flash_attn_forward{tensors_of}{masks}) -> (Tensor, Tensor)")
    second.define(f"_flash_attn_varlen_forward{tensors_of}{lengths}{masks}) -> (Tensor, Tensor)")
    third.define(
        f"_flash_attn_forward{tensors_of}Tensor? k_new=None, Tensor? cu_seqlens_q=None, "
        "Tensor? cu_seqlens_k=None, float? softmax_scale=None, bool causal=False, "
        "int window_size_left=-1, int window_size_right=-1) -> (Tensor, Tensor)"
    )

    def batch(q: Any, k: Any, v: Any, *given: Any) -> tuple[Tensor, Tensor]:
        dropout, scale, causal, left, right, cap, slopes, _ = given
        options = (dropout, scale, causal, (left, right), cap, slopes)
        return flash_attn_2.flash_attn_func(q, k, v, *options), torch.zeros(1)

    def varlen(q: Any, k: Any, v: Any, *given: Any) -> tuple[Tensor, Tensor]:
        dropout, scale, causal, left, right, cap, slopes, _ = given[4:]
        options = (dropout, scale, causal, (left, right), cap, slopes)
        return flash_attn_2.flash_attn_varlen_func(q, k, v, *given[:4], *options), torch.zeros(1)

    def both(
        q: Any,
        k: Any,
        v: Any,
        k_new: Any = None,
        asks: Any = None,
        answers: Any = None,
        scale: Any = None,
        causal: bool = False,
        left: int = -1,
        right: int = -1,
    ) -> tuple[Tensor, Tensor]:
        options = {"softmax_scale": scale, "causal": causal, "window_size": (left, right)}
        if asks is None:
            return flash_attn_3.flash_attn_func(q, k, v, **options), torch.zeros(1)
        output = flash_attn_3.flash_attn_varlen_func(q, k, v, asks, answers, 9, 9, **options)
        return output, torch.zeros(1)

    second.impl("_flash_attn_forward", batch, "CPU")
    second.impl("_flash_attn_varlen_forward", varlen, "CPU")
    third.impl("_flash_attn_forward", both, "CPU")
    yield torch.ops
    second._destroy()
    third._destroy()


def test_operators_of_flash_attn(operators: Any) -> None:
    given, places = tensors(2, 3, 5), packed([2, 3], [4, 3])
    slopes = tensor(HEADS).abs()
    options = (0.0, 0.3, True, 2, -1, 4.0, slopes, False)
    run = operators.flash_attn._flash_attn_forward
    assert_read(lambda: run(*given, *options), "flash_attn._flash_attn_forward")
    run_varlen = operators.flash_attn._flash_attn_varlen_forward
    name = "flash_attn._flash_attn_varlen_forward"
    assert_read(lambda: run_varlen(*places, 3, 4, *options), name)
    third, name = operators.flash_attn_3._flash_attn_forward, "flash_attn_3._flash_attn_forward"
    assert_read(lambda: third(*given, causal=True, window_size_left=2), name)
    cuts = {"cu_seqlens_q": places[3], "cu_seqlens_k": places[4]}
    assert_read(lambda: third(*places[:3], causal=True, softmax_scale=0.3, **cuts), name)
    assert_listed(lambda: third(*given, k_new=given[1]), name, "k_new")


def register(monkeypatch: pytest.MonkeyPatch, function: Any) -> str:
    """Register a kernel with transformers, and return the name."""

    def kernel(module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> Any:
        parts = (part.transpose(1, 2) for part in (query, key, value))
        return function(*parts, softmax_scale=given["scaling"], causal=True), None

    name = "my_kernel"
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, flash_attention_mask)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, kernel)
    return name


def test_a_kernel_under_transformers_interface_is_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = register(monkeypatch, flash_attn_3.flash_attn_func)
    assert name in AttentionInterface().valid_keys()
    model, ids = build(attn_implementation=name), TOKENS
    with acutance.probe(model, verify=True) as probe:
        model(ids)
        model(ids)
    layers = probe.summary().layers
    assert [(layer.status, layer.calls, layer.rows) for layer in layers] == [
        ("verified", 2, 12)
    ] * 2
    assert {layer.source for layer in layers} == {f"transformers {name}"}
    with acutance.apply(model, acutance.scaling.LogN(train_length=2)) as applied:
        model(ids)
    assert set(applied.calls.values()) == {1}


def flash_attn_func(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False) -> Any:
    """One that a compiler can trace."""
    parts = [part.transpose(1, 2) for part in (q, k, v)]
    sizes: dict[str, Any] = {"scale": softmax_scale, "enable_gqa": True}
    sizes["is_causal"] = causal and q.shape[1] > 1  # a single query sees every key
    return F.scaled_dot_product_attention(*parts, **sizes).transpose(1, 2)


@pytest.mark.parametrize("through", ["interface", "function"])
def test_compiled_models_take_laws_and_probes(
    monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    module = ModuleType("flash_attn_interface")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    if through == "interface":
        model, given = build(attn_implementation=register(monkeypatch, flash_attn_func)), TOKENS
    else:
        model, given = Direct(), tensor(1, 5, 2, WIDTH)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    law = acutance.scaling.LogN(train_length=2)
    with torch.no_grad():
        plain = logits(compiled(given))
        with acutance.apply(model, law):
            expected = logits(model(given))
        with acutance.apply(model, law):
            torch.testing.assert_close(logits(compiled(given)), expected)
        assert (expected - plain).abs().max() > 0.1
        with acutance.probe(model, verify=True) as probe:
            assert torch.equal(logits(compiled(given)), plain)
        assert {layer.status for layer in probe.summary().layers} == {"verified"}
        assert torch.equal(logits(compiled(given)), plain)


TOKENS = torch.arange(6)[None]


class Direct(torch.nn.Module):
    def forward(self, x: Tensor) -> Any:
        return flash_attn_func(x, x, x, causal=True)


def logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def test_a_compiled_law_counts_the_keys_of_packed_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(attn_implementation=register(monkeypatch, flash_attn_func))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    places = torch.tensor([[0, 1, 2, 3, 0, 1]])
    with torch.no_grad(), acutance.probe(model, verify=False) as probe:
        model(TOKENS, position_ids=places)
    assert probe.summary().mean("n_keys").allclose(torch.tensor(13 / 6).double())
    law = acutance.scaling.LogN(train_length=2, n_min=1)
    with torch.no_grad(), acutance.apply(model, law):
        expected = model(TOKENS, position_ids=places).logits
        torch.testing.assert_close(compiled(TOKENS, position_ids=places).logits, expected)
        steps = []
        for run in (model, compiled):  # a decoded token sees the keys of the cache
            cache = DynamicCache(config=model.config)
            model(TOKENS, **{CACHE: cache})
            steps.append(run(TOKENS[:, :1], **{CACHE: cache}).logits)
        torch.testing.assert_close(*steps)


def test_a_monitor_reads_kernels_while_training() -> None:
    layer = torch.nn.Linear(WIDTH, WIDTH)
    x = tensor(1, 4, HEADS, WIDTH)
    model = Calls(lambda: flash_attn_3.flash_attn_func(layer(x), x, x, causal=True))
    monitor = AttentionMonitor(every=1)
    with monitor.watch(model):
        model().sum().backward()
    record = monitor.step()
    assert record is not None
    with acutance.probe(model) as probe:
        model()
    expected = float(probe.summary().mean("entropy").mean())
    assert record.scalars["attention/Calls/entropy"] == pytest.approx(expected, rel=1e-5)
