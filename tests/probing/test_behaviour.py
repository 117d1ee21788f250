"""A probe changes nothing, breaks nothing, counts each call once and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import acutance

# -- what it cannot read, it says -----------------------------------------------------------------


def break_layer(read_by: Any, broken: str) -> None:
    def reading(read: Any, function: Any, implementation: str, name: str, *rest: Any) -> Any:
        if broken in name:
            raise ValueError("a cache\n  nobody knows")
        return read(function, implementation, name, *rest)

    read_by(reading)


def test_a_call_that_cannot_be_read_is_listed(
    gpt2_models: Any, random_tokens: Any, read_by: Any
) -> None:
    model, ids = gpt2_models["sdpa"], random_tokens(2, 6)
    plain = model(ids).logits
    break_layer(read_by, "h.1.")
    with acutance.probe(model) as probe:
        assert torch.equal(model(ids).logits, plain)
        model(ids)
    message = "transformer.h.1.attn: a cache nobody knows"
    assert probe.unread == [message]  # once, however often
    summary = probe.summary()
    assert summary.unread == (message,)
    assert [layer.module for layer in summary.layers] == [
        "transformer.h.0.attn",
        "transformer.h.2.attn",
    ]


def test_nothing_that_can_be_read_raises_with_the_reasons(
    gpt2_models: Any, random_tokens: Any, read_by: Any
) -> None:
    model, ids = gpt2_models["sdpa"], random_tokens(2, 6)
    break_layer(read_by, "attn")
    with (
        pytest.raises(
            acutance.ProbeError,
            match=r"not read any attention of GPT2LMHeadModel: transformer\.h\.0\.attn: a cache",
        ),
        acutance.probe(model),
    ):
        model(ids)


def test_a_wrong_capture_is_a_mismatch(gpt2_models: Any, random_tokens: Any, read_by: Any) -> None:
    model, ids = gpt2_models["eager"], random_tokens(2, 6)

    def forgetful(
        read: Any, function: Any, implementation: str, name: str, args: Any, kwargs: Any
    ) -> Any:
        lost = dict(kwargs) if "h.0." in name else {**kwargs, "scaling": 0.2}
        if "h.0." in name:
            args = (*args[:4], None)  # the mask
        return read(function, implementation, name, args, lost)

    read_by(forgetful)
    with acutance.probe(model, verify=True) as probe:
        model(ids)
    layers = probe.summary().layers
    assert {layer.status for layer in layers} == {"mismatch"}
    assert all(layer.error is not None and layer.error > 1e-3 for layer in layers)
