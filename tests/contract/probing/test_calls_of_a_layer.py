"""Several calls of SDPA in one pass that are one layer: chunks of queries, heads one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance

HEADS, LENGTH, WIDTH = 4, 12, 8
sdpa = F.scaled_dot_product_attention


class Attend(nn.Module):
    """Projections, and a function that attends, of queries, keys and values (B, H, L, E)."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.attend, self.n_head = attend, HEADS

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        return self.attend(*(part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in parts))


def causal(start: int, stop: int, keys: int = LENGTH) -> Tensor:
    return torch.ones(LENGTH, keys).tril().bool()[start:stop]


def whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return sdpa(query, key, value, attn_mask=causal(0, LENGTH))


def chunks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    steps = [(start, min(start + 5, LENGTH)) for start in range(0, LENGTH, 5)]
    parts = [sdpa(query[:, :, a:b], key, value, attn_mask=causal(a, b)) for a, b in steps]
    return torch.cat(parts, 2)


def growing_chunks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    steps = [(start, start + 4) for start in range(0, LENGTH, 4)]
    parts = [
        sdpa(query[:, :, a:b], key[:, :, :b], value[:, :, :b], attn_mask=causal(a, b, b))
        for a, b in steps
    ]
    return torch.cat(parts, 2)


def one_by_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = [
        sdpa(query[:, h], key[:, h], value[:, h], attn_mask=causal(0, LENGTH)) for h in range(HEADS)
    ]
    return torch.stack(heads, 1)


def together(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    folded = (part.flatten(0, 1) for part in (query, key, value))
    return sdpa(*folded, attn_mask=causal(0, LENGTH)).unflatten(0, (-1, HEADS))


def together_masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    folded = [part.flatten(0, 1) for part in (query, key, value)]
    mask = causal(0, LENGTH).expand(len(folded[0]), -1, -1)
    return sdpa(*folded, attn_mask=mask).unflatten(0, (-1, HEADS))


def probed(attend: Callable[..., Tensor], batch: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    model, x = Attend(attend), 2 * torch.randn(batch, LENGTH, HEADS * WIDTH)
    plain = model(x)
    with acutance.probe(model, verify=True, **options) as probe:
        assert torch.allclose(model(x), plain, atol=1e-6, rtol=0)
        model(x)
    summary = probe.summary()
    assert summary.unread == summary.not_provided == ()
    return summary


@pytest.mark.parametrize("options", [{}, {"provide": True}, {"structure": True}])
@pytest.mark.parametrize("attend", [chunks, growing_chunks, one_by_one, together, together_masked])
def test_one_layer_with_the_rows_of_a_single_call(attend: Any, options: dict[str, Any]) -> None:
    summary, expected = probed(attend, **options), probed(whole, **options)
    (layer,), (other,) = summary.layers, expected.layers
    assert (layer.module, layer.heads, layer.rows) == (other.module, HEADS, other.rows)
    assert layer.status == other.status
    for name in ("n_keys", "entropy", "first_weight", "logit_std"):
        assert torch.allclose(summary.mean(name), expected.mean(name), atol=1e-5, rtol=1e-5)


def test_items_of_a_batch_as_many_as_heads_are_no_heads() -> None:
    summary, expected = probed(one_by_one, HEADS), probed(whole, HEADS)
    assert [layer.rows for layer in summary.layers] == [layer.rows for layer in expected.layers]
    assert torch.allclose(summary.mean("entropy"), expected.mean("entropy"), atol=1e-5, rtol=1e-5)


def test_a_probe_outside_of_one_that_computes_sees_one_layer_too() -> None:
    model = Attend(chunks)
    with acutance.probe(model) as outer, acutance.probe(model, provide=True):
        model(torch.randn(2, LENGTH, HEADS * WIDTH))
    assert [layer.module for layer in outer.summary().layers] == ["Attend"]


def shared_keys(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    shifted = query + 1
    return sdpa(query, key, value) + sdpa(shifted, key, value) + sdpa(query, key, value)


def test_other_queries_of_the_same_keys_are_layers_of_their_own() -> None:
    assert [layer.module for layer in probed(shared_keys).layers] == [
        "Attend", "Attend#1", "Attend#2",
    ]  # fmt: skip
