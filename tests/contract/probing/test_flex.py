"""FlexAttention outside transformers: its score_mod and mask_mod are read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import acutance

TOLERANCE = 1e-5
QUERIES, KEYS = 20, 24
SLOPES = torch.tensor([0.1, 0.2, 0.4, 0.8])
STARTS = torch.tensor([0, 5])


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    with warnings.catch_warnings():  # PyTorch warns that FlexAttention runs without its compiler
        warnings.simplefilter("ignore")
        yield


class Flex(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value, enable_gqa=True, **self.options)  # type: ignore


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i + 4 >= j


def by_head(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j - i < h + 2


def late(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j >= STARTS[b]


def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 3 * torch.tanh(score / 3)


def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score - SLOPES[h] * (i - j).abs()


def hiding(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return torch.where(i >= j, score, -torch.inf)


def reference(
    query: Tensor, key: Tensor, scale: float, score_mod: Any = None, mask_mod: Any = None
) -> Tensor:
    """Mean entropy by head, one score at a time, in float64."""
    batch, heads = query.shape[:2]
    rows = torch.empty(batch, heads, QUERIES, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(QUERIES):
                scores = query[b, h, i].double() @ key[b, h // 2].double().mT * scale
                kept = []
                for j in range(KEYS):
                    place = [torch.tensor(n) for n in (b, h, i, j)]
                    score = scores[j] if score_mod is None else score_mod(scores[j], *place)
                    if mask_mod is None or bool(mask_mod(*place)):
                        kept.append(score.double())
                p = torch.softmax(torch.stack(kept), 0)
                rows[b, h, i] = -torch.xlogy(p, p).sum()
    return rows.mean((0, 2))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("score_mod", "mask_mod", "scale"),
    [
        (None, None, None),
        (capped, None, 0.3),
        (alibi, causal, None),
        (hiding, None, None),
        (None, by_head, None),
        (alibi, late, 0.5),
    ],
)
def test_entropies_are_those_of_every_score(score_mod: Any, mask_mod: Any, scale: Any) -> None:
    query, key = 2 * torch.randn(2, 4, QUERIES, 16), torch.randn(2, 2, KEYS, 16)
    value = torch.randn(2, 2, KEYS, 8)
    options: dict[str, Any] = {"score_mod": score_mod, "scale": scale}
    if mask_mod is not None:
        options["block_mask"] = create_block_mask(mask_mod, 2, 4, QUERIES, KEYS, device="cpu")
    model = Flex(**options)
    plain = model(query, key, value)
    with acutance.probe(model, verify=True) as probe:
        assert torch.equal(model(query, key, value), plain)
    summary = probe.summary()
    (layer,) = summary.layers
    assert (layer.status, layer.source, layer.heads) == ("verified", "flex_attention", 4)
    entropy = reference(query, key, 0.25 if scale is None else scale, score_mod, mask_mod)
    assert float((summary.mean("entropy") - entropy).abs().max()) < TOLERANCE


def test_rows_and_heads_may_be_chosen() -> None:
    query = 2 * torch.randn(2, 4, QUERIES, 16)
    key, value = torch.randn(2, 2, KEYS, 16), torch.randn(2, 2, KEYS, 16)
    model = Flex(score_mod=alibi)
    with acutance.probe(model, verify=True, heads=[1, 3], max_rows=9) as probe:
        model(query, key, value)
    (layer,) = probe.summary().layers
    assert (layer.status, layer.heads, layer.rows) == ("verified", 2, 9)
