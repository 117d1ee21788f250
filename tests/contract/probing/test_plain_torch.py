"""Attention written in plain PyTorch: SDPA, nn.MultiheadAttention, transformer layers, softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance

TOLERANCE = 1e-5


class Attend(nn.Module):
    """One SDPA call."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, **options)


class Named(nn.Module):
    """An attention module under a name of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, Attend())

    def forward(self, *args: Any, **options: Any) -> Any:
        return next(self.children())(*args, **options)


@contextmanager
def slow_path() -> Iterator[None]:
    """PyTorch without its fused inference path, which a probe turns off."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def head_means(weights: Tensor, kept: Tensor, entropies: Callable[..., Tensor]) -> Tensor:
    """Mean entropy of each head of (B, H, L, S) weights over the rows kept, (B, H, L)."""
    return torch.where(kept, entropies(weights), 0.0).sum((0, 2)) / kept.sum((0, 2))


def dense(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The weights SDPA uses, (B, Hq, L, S), in float64; rows that see no key are NaN."""
    group = query.shape[1] // key.shape[1]
    k = key.double().repeat_interleave(group, 1)
    scores = query.double() @ k.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal, -torch.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.double()
    return scores.softmax(-1)


def qkv(
    batch: int = 2, heads: int = 3, queries: int = 5, keys: int = 7, key_heads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    kv = (batch, key_heads or heads, keys)
    return torch.randn(batch, heads, queries, 4) * 2, torch.randn(*kv, 4), torch.randn(*kv, 6)


FULL = torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(1)) > 0.3
HIDING = torch.randn(2, 1, 5, 7, generator=torch.Generator().manual_seed(2)).masked_fill(
    ~FULL[:, :1], -torch.inf
)


@pytest.mark.parametrize(
    ("options", "key_heads"),
    [
        ({}, None),
        ({"scale": 0.9}, None),
        ({"is_causal": True}, None),
        ({"is_causal": True, "scale": 1.3}, None),
        ({"attn_mask": FULL}, None),
        ({"attn_mask": FULL[0, 0]}, None),
        ({"attn_mask": FULL[:, :1]}, None),
        ({"attn_mask": HIDING}, None),
        ({"attn_mask": torch.zeros(1, 1, 1, 7).index_fill(3, torch.tensor([6]), -1e30)}, None),
        ({"enable_gqa": True}, 1),
        ({"enable_gqa": True, "attn_mask": FULL}, 1),
    ],
)
def test_sdpa_is_read(options: Any, key_heads: int | None, entropies: Any) -> None:
    query, key, value = qkv(key_heads=key_heads)
    model = Attend()
    plain = model(query, key, value, **options)
    with acutance.probe(model, verify=True) as probe:
        assert torch.equal(model(query, key, value, **options), plain)
    mask, causal = options.get("attn_mask"), options.get("is_causal", False)
    weights = dense(query, key, mask, causal, options.get("scale"))
    kept = weights.isfinite().all(-1)
    summary = probe.summary()
    assert float((summary.mean("entropy") - head_means(weights, kept, entropies)).abs().max()) < (
        TOLERANCE
    )
    assert [layer.status for layer in summary.layers] == ["verified"]
    assert summary.layers[0].rows == int(kept.sum((0, 2)).max())


def test_sdpa_arguments_may_be_positional(entropies: Any) -> None:
    class Positional(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, None, 0.0, True)

    query, key, value = qkv()
    model = Positional()
    with acutance.probe(model, verify=True) as probe:
        model(query, key, value)
    weights = dense(query, key, is_causal=True)
    expected = head_means(weights, weights.isfinite().all(-1), entropies)
    assert torch.allclose(probe.summary().mean("entropy"), expected, atol=TOLERANCE, rtol=0)
    assert probe.summary().layers[0].status == "verified"


@pytest.mark.parametrize("dims", [3, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_of_other_ranks(dims: int, masked: bool, entropies: Any) -> None:
    query, key, value = qkv()
    mask = FULL if masked else None
    if dims == 3:
        query, key, value = (part[:, 0] for part in (query, key, value))
        options = {"attn_mask": FULL[:, 0]} if masked else {}
        four = (query.unsqueeze(1), key.unsqueeze(1))
        mask = FULL[:, :1] if masked else None
    else:
        four = (query.repeat(2, 1, 1, 1), key.repeat(2, 1, 1, 1))
        query, key, value = (part.expand(2, *part.shape) for part in (query, key, value))
        options = {"attn_mask": FULL.unsqueeze(0)} if masked else {}
        mask = FULL.repeat(2, 1, 1, 1) if masked else None
    model = Attend()
    with acutance.probe(model, verify=True) as probe:
        model(query, key, value, **options)
    weights = dense(*four, mask)
    summary = probe.summary()
    expected = head_means(weights, weights.isfinite().all(-1), entropies)
    assert torch.allclose(summary.mean("entropy"), expected, atol=TOLERANCE, rtol=0)
    assert summary.layers[0].status == "verified"
    assert probe.unread == []


def test_sdpa_broadcasts_batches_and_heads(entropies: Any) -> None:
    query, key, value = qkv()
    query, key, value = query, key[:1, :1], value[:1, :1]
    model = Attend()
    with acutance.probe(model, verify=True) as probe:
        model(query, key, value)
    weights = dense(query, key.expand(2, 3, -1, -1))
    expected = head_means(weights, weights.isfinite().all(-1), entropies)
    assert torch.allclose(probe.summary().mean("entropy"), expected, atol=TOLERANCE, rtol=0)
    assert probe.summary().layers[0].status == "verified"


def test_two_calls_of_one_module_are_two_layers(entropies: Any) -> None:
    class SelfAndCross(nn.Module):
        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
            return F.scaled_dot_product_attention(x, memory, memory)

    x, _, _ = qkv()
    memory = torch.randn(2, 3, 9, 4)
    model = SelfAndCross()
    with acutance.probe(model, verify=True) as probe:
        model(x, memory)
        model(x, memory)
    summary = probe.summary()
    assert [layer.module for layer in summary.layers] == ["SelfAndCross", "SelfAndCross#1"]
    assert [layer.calls for layer in summary.layers] == [2, 2]
    assert [layer.status for layer in summary.layers] == ["verified", "verified"]
    inner = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    expected = [
        head_means(weights, weights.isfinite().all(-1), entropies)
        for weights in (dense(x, x, is_causal=True), dense(inner, memory))
    ]
    assert torch.allclose(summary.mean("entropy"), torch.cat(expected), atol=TOLERANCE, rtol=0)


def test_padding_is_excluded_from_self_but_not_from_cross_attention() -> None:
    query, key, value = qkv(queries=6, keys=6)
    mask = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])[:, None, None]
    rows = {}
    for name in ("attn", "cross_attn"):
        model = Named(name)
        with acutance.probe(model) as probe:
            model(query, key, value, attn_mask=mask)
        rows[name] = (probe.summary().layers[0].rows, probe.summary().layers[0].padded)
    assert rows == {"attn": (8, 4), "cross_attn": (12, 0)}


def test_rows_that_see_no_key_are_counted_apart() -> None:
    query, key, value = qkv()
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[1] = False
    model = Attend()
    with acutance.probe(model, verify=True) as probe:
        model(query, key, value, attn_mask=mask)
    layer = probe.summary().layers[0]
    assert (layer.rows, layer.empty, layer.padded, layer.status) == (8, 2, 0, "verified")


# -- nn.MultiheadAttention ------------------------------------------------------------------------

PADDED = torch.tensor([[False] * 6, [False] * 3 + [True] * 3])
CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)
PER_HEAD = (torch.rand(8, 6, 6, generator=torch.Generator().manual_seed(3)) > 0.6) & ~torch.eye(
    6, dtype=torch.bool
)


def floating(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


SELF_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "padding": ({}, {"key_padding_mask": PADDED}),
    "padding-float": ({}, {"key_padding_mask": floating(PADDED)}),
    "causal": ({}, {"attn_mask": CAUSAL}),
    "causal-hint": ({}, {"attn_mask": CAUSAL, "is_causal": True}),
    "causal-padding-hint": (
        {},
        {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDED},
    ),
    "float-mask": ({}, {"attn_mask": floating(CAUSAL) + 0.5 * torch.eye(6)}),
    "float-mask-padding": (
        {},
        {"attn_mask": floating(CAUSAL), "key_padding_mask": floating(PADDED)},
    ),
    "per-head": ({}, {"attn_mask": PER_HEAD}),
    "per-head-float": ({}, {"attn_mask": floating(PER_HEAD)}),
    "bias-kv": ({"add_bias_kv": True}, {"key_padding_mask": PADDED}),
    "zero-attn": ({"add_zero_attn": True}, {"key_padding_mask": PADDED, "attn_mask": CAUSAL}),
    "both-added": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    "no-bias": ({"bias": False}, {}),
}


def attention_layer(**options: Any) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(16, 4, batch_first=True, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2.0)
    return layer


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", SELF_CASES)
def test_multi_head_self_attention(
    name: str, need_weights: bool, training: bool, entropies: Any
) -> None:
    build, call = SELF_CASES[name]
    layer = attention_layer(**build).train(training)
    x = torch.randn(2, 6, 16) * 1.5
    with slow_path():
        plain, maps = layer(x, x, x, need_weights=need_weights, **call)
        _, weights = layer(x, x, x, need_weights=True, average_attn_weights=False, **call)
    with acutance.probe(layer, verify=True) as probe:
        output, probed_maps = layer(x, x, x, need_weights=need_weights, **call)
    assert torch.equal(output, plain)
    assert (probed_maps is None) == (maps is None)
    if need_weights:
        assert torch.equal(probed_maps, maps)
    real = ~PADDED if "key_padding_mask" in call else torch.ones(2, 6, dtype=torch.bool)
    kept = real[:, None, :].expand(2, 4, 6)
    summary = probe.summary()
    expected = head_means(weights.detach(), kept, entropies)
    assert torch.allclose(summary.mean("entropy"), expected, atol=TOLERANCE, rtol=0)
    (found,) = summary.layers
    assert (found.status, found.rows, found.padded) == (
        "verified",
        int(real.sum()),
        int((~real).sum()),
    )
    assert found.module == "MultiheadAttention"
    assert probe.unread == []


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_multi_head_cross_attention(
    need_weights: bool, batch_first: bool, batched: bool, entropies: Any
) -> None:
    layer = nn.MultiheadAttention(16, 4, kdim=5, vdim=9, batch_first=batch_first)
    query, key, value = torch.randn(2, 6, 16) * 4, torch.randn(2, 6, 5) * 4, torch.randn(2, 6, 9)
    mask = PADDED
    if not batched:
        query, key, value, mask = query[1], key[1], value[1], mask[1]
    elif not batch_first:
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
    plain, _ = layer(query, key, value, key_padding_mask=mask, need_weights=need_weights)
    _, weights = layer(query, key, value, key_padding_mask=mask, average_attn_weights=False)
    with acutance.probe(layer, verify=True) as probe:
        output, _ = layer(query, key, value, key_padding_mask=mask, need_weights=need_weights)
    assert torch.equal(output, plain)
    weights = weights.detach() if batched else weights.detach().unsqueeze(0)
    kept = torch.ones(weights.shape[:3], dtype=torch.bool)  # queries are of another sequence
    expected = head_means(weights, kept, entropies)
    summary = probe.summary()
    assert torch.allclose(summary.mean("entropy"), expected, atol=TOLERANCE, rtol=0)
    assert (summary.layers[0].status, summary.layers[0].rows) == ("verified", 12 if batched else 6)


def test_query_and_key_of_one_memory_are_one_sequence() -> None:
    layer = attention_layer()
    x, value = torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    with acutance.probe(layer) as probe:  # batch_first: query and key become two views
        layer(x, x, value, key_padding_mask=PADDED)
    assert probe.summary().layers[0].rows == 9


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_wholly_padded_sequence_is_left_out(need_weights: bool) -> None:
    layer = attention_layer()
    x = torch.randn(2, 6, 16)
    mask = torch.stack([torch.zeros(6), torch.ones(6)]).bool()
    with acutance.probe(layer, verify=True) as probe:
        layer(x, x, x, key_padding_mask=mask, need_weights=need_weights)
    summary = probe.summary()
    assert (summary.layers[0].rows, summary.layers[0].padded) == (6, 6)
    assert (summary.layers[0].status, probe.unread) == ("verified", [])
    assert summary.mean("entropy").isfinite().all()


def test_a_head_may_see_less_than_another() -> None:
    layer = attention_layer()
    mask = torch.zeros(8, 6, 6, dtype=torch.bool)
    mask[1, 2:] = True  # batch 0, head 1 sees nothing from its third row on
    x = torch.randn(2, 6, 16)
    with acutance.probe(layer, metrics=["n_keys"]) as probe:
        layer(x, x, x, attn_mask=mask, need_weights=False)
    summary = probe.summary()
    assert summary.moments.count[:, 0].tolist() == [12, 8, 12, 12]
    assert summary.layers[0].rows == 12


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_is_after_the_statistics(need_weights: bool) -> None:
    torch.manual_seed(0)
    layer = attention_layer(dropout=0.5)
    x = torch.randn(2, 6, 16)
    with acutance.probe(layer.eval()) as quiet:
        layer(x, x, x, need_weights=need_weights)
    layer.train()
    torch.manual_seed(5)
    plain, _ = layer(x, x, x, need_weights=need_weights)
    torch.manual_seed(5)
    with acutance.probe(layer, verify=True) as probe:
        output, _ = layer(x, x, x, need_weights=need_weights)
    assert torch.equal(output, plain)
    assert torch.equal(probe.summary().mean("entropy"), quiet.summary().mean("entropy"))
    assert probe.summary().layers[0].status == "captured"  # the output was drawn at random


def test_multi_head_attention_under_autocast() -> None:
    layer = attention_layer().eval()
    x = torch.randn(2, 6, 16)
    with acutance.probe(layer) as exact:
        layer(x, x, x, key_padding_mask=PADDED, need_weights=False)
    means = {}
    for need_weights in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with slow_path():
                plain, _ = layer(x, x, x, key_padding_mask=PADDED, need_weights=need_weights)
            with acutance.probe(layer, verify=True) as probe:
                output, _ = layer(x, x, x, key_padding_mask=PADDED, need_weights=need_weights)
        assert torch.equal(output, plain)
        assert output.dtype == torch.bfloat16
        assert (probe.summary().layers[0].status, probe.unread) == ("verified", [])
        means[need_weights] = probe.summary().mean("entropy")
    assert torch.equal(means[False], means[True])
    difference = (means[True] - exact.summary().mean("entropy")).abs().max()
    assert 0 < float(difference) < 0.02  # read from the bfloat16 queries and keys


# -- whole transformers ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("training", [False, True])
def test_transformer_encoder(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=True).train(training)
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        fast = model(x, src_key_padding_mask=PADDED)
        with slow_path():
            slow = model(x, src_key_padding_mask=PADDED)
        with acutance.probe(model, verify=True) as probe:
            output = model(x, src_key_padding_mask=PADDED)
    assert torch.equal(output, slow)
    real = ~PADDED  # the fused path leaves zeros on padding
    assert float((output - fast)[real].abs().max()) < TOLERANCE
    summary = probe.summary()
    assert [layer.module for layer in summary.layers] == [
        f"layers.{index}.self_attn" for index in range(3)
    ]
    assert {(layer.status, layer.rows, layer.padded) for layer in summary.layers} == {
        ("verified", 9, 3)
    }
    assert float(summary.moments.high[:, summary.metrics.index("n_keys")].max()) == 6


@pytest.mark.parametrize("training", [False, True])
def test_transformer_decoder(training: bool) -> None:
    layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).train(training)
    target, memory = torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    options = {
        "tgt_mask": CAUSAL,
        "tgt_is_causal": True,
        "tgt_key_padding_mask": PADDED,
        "memory_key_padding_mask": PADDED.flip(0),
    }
    with torch.no_grad():
        with slow_path():
            plain = model(target, memory, **options)
        with acutance.probe(model, verify=True) as probe:
            output = model(target, memory, **options)
    assert torch.equal(output, plain)
    summary = probe.summary()
    assert [layer.module for layer in summary.layers] == [
        "layers.0.self_attn",
        "layers.0.multihead_attn",
        "layers.1.self_attn",
        "layers.1.multihead_attn",
    ]
    # the padded queries are left out of the cross-attention of the same block as well
    assert {(layer.status, layer.rows, layer.padded) for layer in summary.layers} == {
        ("verified", 9, 3)
    }


# -- written by hand ------------------------------------------------------------------------------


class ByHand(nn.Module):
    """Attention as tutorials write it; ``spelling`` is how its softmax is called."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling

    def forward(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        scores = (query @ key.mT) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if self.spelling == "functional":
            return F.softmax(scores, dim=-1) @ key
        if self.spelling == "method":
            return scores.softmax(3) @ key
        if self.spelling == "module":
            return nn.Softmax(dim=-1)(scores) @ key
        return torch.softmax(scores, -1) @ key


@pytest.mark.parametrize("spelling", ["functional", "method", "module", "torch"])
def test_softmax_by_hand_is_read_but_not_verified(spelling: str, entropies: Any) -> None:
    query, key, _ = qkv(queries=6, keys=6)
    mask = (~PADDED)[:, None, None, :].expand(2, 1, 6, 6)
    model = ByHand(spelling)
    plain = model(query, key, mask)
    with acutance.probe(model, verify=True, noise=True) as probe:
        assert torch.equal(model(query, key, mask), plain)
    summary = probe.summary()
    kept = (~PADDED)[:, None, :].expand(2, 3, 6)
    expected = head_means(dense(query, key, mask), kept, entropies)
    assert torch.allclose(summary.mean("entropy"), expected, atol=TOLERANCE, rtol=0)
    (layer,) = summary.layers
    assert (layer.status, layer.rows, layer.padded) == ("unverified", 9, 3)
    assert summary.mean("noise_gain").isnan().all()  # there were no values to see


def test_softmax_that_is_no_attention_is_not_read() -> None:
    class Mixed(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query.flatten(1).softmax(-1)  # two dimensions
            query.softmax(1)  # over another dimension
            return F.scaled_dot_product_attention(query, key, value)

    model = Mixed()
    with acutance.probe(model) as probe:
        model(*qkv())
    assert [layer.source for layer in probe.summary().layers] == ["scaled_dot_product_attention"]
