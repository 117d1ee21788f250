"""A mismatch names its likely cause: the change of the call under which the output agrees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM

import acutance
from acutance.capture.attention_call import AttentionCall
from acutance.probing.causes import find_cause

SINKS = torch.tensor([0.5, 1.0, -0.5, 2.0])
PADDING = torch.arange(12) < torch.tensor([[12], [8]])
BAND = torch.ones(12, 12, dtype=torch.bool).tril().triu(-3)[None, None]
WIDER = torch.ones(12, 12, dtype=torch.bool).tril().triu(-4)[None, None]
CAUSAL = torch.ones(12, 12, dtype=torch.bool).tril()


def likely_cause(*arguments: Any) -> str:
    cause = find_cause(*arguments)
    return "" if cause is None else cause.sentence


class Told(nn.Module):
    """Tells the probe of one call, and computes another."""

    def __init__(self, told: dict[str, Any], **computed: Any) -> None:
        super().__init__()
        self.told, self.computed = told, {**told, **computed}

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with acutance.tap(query, key, value, **self.told) as tap:
            tap.output = acutance.attention(query, key, value, **self.computed)
        return tap.output


def inputs(keys: int = 12, heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    key, value = torch.randn(2, 2, heads, keys, 16).unbind(0)
    return torch.randn(2, 4, 12, 16), key, value


def said(model: nn.Module, given: Any, **options: Any) -> str:
    with acutance.probe(model, verify=True, **options) as probe:
        model(*given)
        model(*given)
    (layer,) = probe.summary().layers
    assert layer.status == "mismatch"
    (line,) = probe.unread  # once for a module, not for each call
    return line.partition("of its size; ")[2]


@pytest.mark.parametrize(
    ("told", "computed", "line"),
    [
        ({"sinks": SINKS}, {"sinks": None}, "the sinks are left out: it seems to drop them"),
        (
            {"window": 4},
            {"window": 5},
            "the window is 5 keys: it seems to count the window differently",
        ),
        (
            {"window": 4},
            {"window": 3},
            "the window is 3 keys: it seems to count the window differently",
        ),
        ({"window": 4}, {"window": None}, "the window is left out: it seems to ignore it"),
        ({"attn_mask": BAND}, {"attn_mask": WIDER}, "the window is 5 keys: it seems to count"),
        ({"attn_mask": WIDER}, {"attn_mask": BAND}, "the window is 4 keys: it seems to count"),
        ({"attn_mask": BAND}, {"attn_mask": CAUSAL}, "the mask has no window: it seems to ignore"),
        ({"attn_mask": CAUSAL}, {"attn_mask": None}, "the mask is left out: it seems to ignore"),
        ({"softcap": 0.5}, {"softcap": None}, "the softcap is left out: it seems to drop it"),
        (
            {"scale": 0.4},
            {"scale": None},
            "the scale is 0.25, 1/√d: it seems not to use the given 0.4",
        ),
        ({}, {"scale": 1.0}, "the scale is 1: it seems not to use the given 0.25"),
        ({}, {"is_causal": True}, "it is causal: it seems to hide later keys by itself"),
        ({"is_causal": True}, {"is_causal": False}, "it is not causal: it seems to ignore"),
        ({"key_mask": PADDING}, {"key_mask": None}, "padding is included: it seems to ignore its"),
        ({"bias": torch.eye(12)[None, None]}, {"bias": None}, "the bias is left out: it seems"),
        (
            {"bias": torch.eye(12)[None, None]},
            {"bias": 0.25 * torch.eye(12)[None, None]},
            "the bias is added before the scale: it seems to multiply both",
        ),
        (
            {"sinks": SINKS, "window": 4},
            {"sinks": None, "window": None},
            "the sinks are left out and the window is left out: it seems to ignore both",
        ),
    ],
)
def test_a_planted_fault_is_named(
    told: dict[str, Any], computed: dict[str, Any], line: str
) -> None:
    wanted = f"the output agrees if {line}"
    for options in ({}, {"max_rows": 9}, {"heads": [1, 3]}):
        assert said(Told(told, **computed), inputs(), **options).startswith(wanted)


def test_key_heads_in_turn_and_positions_from_the_other_end_are_named() -> None:
    query, key, value = inputs(heads=2)
    kept = torch.ones(2, 4, 12, dtype=torch.bool)
    turned = acutance.attention(query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1))
    found = likely_cause(AttentionCall("layer", "", query, key, value), turned, kept)
    assert found.endswith(
        "query heads are assigned to key heads in turn: it seems to group heads differently"
    )

    query, key, value = inputs(keys=20)
    call = AttentionCall("layer", "", query, key, value, is_causal=True, query_offset=8)
    theirs = acutance.attention(query, key, value, is_causal=True)
    assert "query 0 is at key 0: it seems to count" in likely_cause(call, theirs, kept)


def test_what_the_module_has_and_the_call_lacks_is_named() -> None:
    query, key, value = inputs()
    kept = torch.ones(2, 4, 12, dtype=torch.bool)
    call = AttentionCall("layer", "", query, key, value)
    for name, value_of, attribute in (
        ("sinks", nn.Parameter(SINKS), "sinks"),
        ("window", 4, "sliding_window"),
        ("softcap", 0.5, "attn_logit_softcapping"),
    ):
        module = nn.Module()
        setattr(module, attribute, value_of)
        theirs = acutance.attention(query, key, value, **{name: value_of})
        assert f"the module's {name}" in likely_cause(call, theirs, kept, module)


def test_what_nothing_explains_has_no_cause() -> None:
    query, key, value = inputs()
    kept = torch.ones(2, 4, 12, dtype=torch.bool)
    theirs = acutance.attention(query, key, value) * 1.3
    full = {"sinks": SINKS, "window": 4, "softcap": 2.0, "key_mask": PADDING, "is_causal": True}
    call = AttentionCall("layer", "", query, key, value, **full)
    assert likely_cause(call, theirs, kept) == ""


@pytest.fixture
def sinkless() -> Iterator[str]:
    """SDPA under another name, so that sinks are passed to it; it drops them."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    def forward(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("sinkless", forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register("sinkless", sdpa_mask)
    yield "sinkless"
    AttentionInterface._global_mapping.pop("sinkless")
    ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop("sinkless")


def test_a_model_whose_sinks_are_dropped(sinkless: str) -> None:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
    )
    model = GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    model.set_attn_implementation(sinkless)
    with torch.no_grad(), acutance.probe(model, verify=True) as probe:
        model(torch.randint(20, (2, 9)), output_router_logits=True)
    assert len(probe.unread) == 2
    for line in probe.unread:
        assert "the output agrees if the sinks are left out: it seems to drop them" in line
        assert "does not know" not in line
