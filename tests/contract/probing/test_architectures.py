"""Every head's entropy is the one its model's own attention maps have, and the model is unmoved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import acutance

TOLERANCE = 1e-5


def outputs_of(result: Any) -> dict[str, torch.Tensor]:
    names = ("logits", "last_hidden_state", "pooler_output", "encoder_last_hidden_state")
    found = {name: result[name] for name in names if result.get(name) is not None}
    assert found
    return found


def check(case: Any, kind: str, expected: list[torch.Tensor]) -> None:
    model = case.models[kind]
    with torch.no_grad():
        plain = outputs_of(model(**case.inputs))
        with acutance.probe(model, verify=True) as probe:
            probed = outputs_of(model(**case.inputs))
        after = outputs_of(model(**case.inputs))
    for name, tensor in plain.items():
        assert torch.equal(tensor, probed[name])
        assert torch.equal(tensor, after[name])

    summary = probe.summary()
    assert probe.unread == []
    assert [layer.heads for layer in summary.layers] == [len(heads) for heads in expected]
    measured = summary.mean("entropy")
    assert measured.isfinite().all()
    assert float((measured - torch.cat(expected)).abs().max()) < TOLERANCE

    status = case.statuses.get(kind, "verified")
    assert {layer.status for layer in summary.layers} == {status}
    for layer, (name, _) in zip(summary.layers, case.layers, strict=True):
        real = case.real[name]
        assert layer.calls == 1
        assert layer.rows == int(real.sum())
        assert layer.rows + layer.padded + layer.empty == real.numel()
        assert (layer.error is None) == (status == "unverified")


def test_entropy_equals_that_of_the_attention_maps(case: Any, reference: Any) -> None:
    expected = reference(case)
    assert float(torch.cat(expected).std()) > 0.01  # heads differ: a mix-up would show
    assert "eager" in case.models
    for kind in case.models:
        check(case, kind, expected)


def test_only_softcap_and_sinks_are_without_sdpa(case: Any) -> None:
    eager_only = hasattr(case.eager.config, "attn_logit_softcapping") or case.sinks
    assert set(case.models) == ({"eager"} if eager_only else {"eager", "sdpa"})


def test_a_window_shortens_the_rows(case: Any, request: pytest.FixtureRequest) -> None:
    window = getattr(case.eager.config, "sliding_window", None)
    with torch.no_grad(), acutance.probe(case.eager, metrics=["n_keys"]) as probe:
        case.eager(**case.inputs)
    most = probe.summary().moments.high[:, 0]
    longest = max(int(real.sum(1).max()) for real in case.real.values())
    assert float(most.max()) == longest if window is None else min(most) == window < longest


def test_minilm_has_all_its_heads_read(minilm: Any) -> None:
    model = minilm.models["sdpa"]
    with torch.no_grad(), acutance.probe(model) as probe:
        model(**minilm.inputs)
    summary = probe.summary()
    assert len(minilm.inputs["input_ids"]) >= 6
    assert len(summary.places) == 72
    assert [layer.module for layer in summary.layers] == [
        f"encoder.layer.{index}.attention.self" for index in range(6)
    ]
    assert summary.mean("n_keys").isfinite().all()
