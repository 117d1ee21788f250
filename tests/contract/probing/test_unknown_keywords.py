"""Keywords of an attention function that the probe does not know: what they change is caught."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import acutance

NAME = "with_registers"


def with_registers(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    register_logit: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A kind of sink that no released model has: a logit of its own beside those of the keys."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
    scores = query @ key.mT * (scaling or query.shape[-1] ** -0.5)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    if register_logit is not None:
        register = torch.full_like(scores[..., :1], register_logit)
        weights = torch.cat([scores, register], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2), None


@pytest.fixture
def registered() -> Iterator[None]:
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    AttentionInterface.register(NAME, with_registers)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    yield
    AttentionInterface._global_mapping.pop(NAME)
    ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(NAME)


def test_a_keyword_that_changes_the_result_is_named(
    registered: None, llama_models: Any, random_tokens: Any
) -> None:
    model, ids = llama_models["sdpa"], random_tokens(2, 6)
    model.set_attn_implementation(NAME)
    with torch.no_grad(), acutance.probe(model, verify=True) as right:
        model(ids)
    assert {layer.status for layer in right.summary().layers} == {"verified"}
    assert right.unread == []

    with torch.no_grad():
        plain = model(ids, register_logit=2.0).logits
        with acutance.probe(model, verify=True) as probe:
            assert torch.equal(model(ids, register_logit=2.0).logits, plain)
    summary = probe.summary()
    assert {layer.status for layer in summary.layers} == {"mismatch"}
    assert len(summary.unread) == len(summary.layers) == 2
    for line in summary.unread:
        assert "do not trust its rows" in line
        assert line.endswith("keywords that the probe does not know: register_logit")


def test_a_keyword_that_changes_nothing_is_not_blamed(
    llama_models: Any, random_tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    model, ids = llama_models["eager"], random_tokens(2, 6)
    right = modeling_llama.eager_attention_forward

    def wrong(*args: Any, **kwargs: Any) -> Any:
        output, weights = right(*args, **kwargs)
        return output * 1.5, weights

    wrong.__signature__ = inspect.signature(right)  # type: ignore[attr-defined]
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", wrong)
    with torch.no_grad(), acutance.probe(model, verify=True) as probe:
        model(ids, swallowed=2.0, absent=None)
    assert {layer.status for layer in probe.summary().layers} == {"mismatch"}
    for line in probe.unread:
        assert line.endswith("of its size"), line
