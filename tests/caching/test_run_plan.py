"""A model under a plan: what its rows read, in one pass, in chunks, in decoding, with padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance import CachePlan
from acutance.caching import HeadPlan
from acutance.caching.stores import dequantise, quantise
from tests.contract.caching.conftest import build
from tests.contract.caching.test_run_plan import (
    PLANS,
    plan_of,
    tokens,
)
from tests.versions import CACHE


def reference(plan: CachePlan, layers: dict[int, str]) -> Any:
    """An attention function for transformers that follows a plan's words, row by row."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        output = torch.zeros(*query.shape[:3], value.shape[3])
        share = query.shape[1] // key.shape[1]
        for head, one in enumerate(plan.layers[layers[id(module)]]):
            for i in range(query.shape[2]):
                n = i + 1
                k, v = key[:, head, :n].clone(), value[:, head, :n].clone()
                for g in range(max(0, n - plan.residual) // plan.group):
                    group = slice(g * plan.group, (g + 1) * plan.group)
                    if one.key_bits < 16:
                        packed = quantise(k[:, None, group], one.key_bits, None)
                        k[:, group] = dequantise(*packed, one.key_bits, k.dtype)
                    if one.value_bits < 16:
                        width = value.shape[3]
                        channels = plan.group if width % plan.group == 0 else width
                        packed = quantise(v[:, None, group], one.value_bits, channels)
                        v[:, group] = dequantise(*packed, one.value_bits, v.dtype)
                j = torch.arange(n)
                if one.kind == "streaming":
                    kept = (j < one.first) | (j > i - one.recent)
                    k, v = k[:, kept], v[:, kept]
                for h in range(head * share, (head + 1) * share):
                    if one.kind != "dropped":
                        scores = (k @ query[:, h, i, :, None])[..., 0] * scaling
                        output[:, h, i] = (scores.softmax(-1)[:, None] @ v)[:, 0]
        return output.transpose(1, 2), None

    return attend


@pytest.mark.parametrize("name", PLANS)
def test_rows_read_what_the_plan_says(name: str) -> None:
    from transformers import AttentionInterface

    model, ids = build(), tokens(2, 70)
    plan = plan_of(model, name)
    layers = {id(module): name for name, module in model.named_modules()}
    with torch.no_grad(), acutance.apply(model, plan):
        cached = model(ids).logits
    AttentionInterface.register("planned_reference", reference(plan, layers))
    model.set_attn_implementation("planned_reference")
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(cached, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", [(8, 8), (16, 4), (4, 16), (16, 16)], ids=str)
def test_gradients_reach_tokens_that_are_not_packed(bits: tuple[int, int]) -> None:
    """Of one pass, and of the new tokens of a pass that continues another."""
    model, ids = build(), tokens(2, 40)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        with torch.no_grad():
            cache = model(ids[:, :16], use_cache=True).past_key_values
        model(ids[:, 16:], labels=ids[:, 16:], **{CACHE: cache}).loss.backward()
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    expected = gradients()
    plan = HeadPlan(key_bits=bits[0], value_bits=bits[1])
    with acutance.apply(model, CachePlan.of(model, plan, group=8, residual=64)):
        actual = gradients()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    model.zero_grad()
    with acutance.apply(model, CachePlan.of(model, plan, group=8, residual=8)):
        model(ids, labels=ids).loss.backward()
    attention = model.model.layers[0].self_attn
    for projection in (attention.k_proj, attention.v_proj):
        assert projection.weight.grad.abs().max() > 1e-3
