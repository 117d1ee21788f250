"""Which rows count: a mask over tokens says what is padding, not the keys that no row selects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance
from acutance.probing import Layer
from tests.versions import CACHE

LENGTHS, TOKENS, VOCABULARY = (11, 6), 11, 97
REAL = torch.arange(TOKENS) < torch.tensor(LENGTHS).unsqueeze(1)
TOLERANCE = 1e-6


def entropy(weights: Tensor) -> Tensor:
    p = weights.double()
    return -torch.xlogy(p, p).sum(-1)


def over(rows: Tensor, real: Tensor) -> Tensor:
    """Mean of (B, H, L) over the rows (B, L) that count."""
    kept = real[:, None].expand_as(rows)
    return torch.where(kept, rows, 0.0).sum((0, 2)) / kept.sum((0, 2))


def one(model: nn.Module, *args: Any, probe: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """The summary of a call that the probe does not change."""
    plain = model(*args, **kwargs)
    with acutance.probe(model, verify=True, **(probe or {})) as opened:
        assert torch.equal(model(*args, **kwargs), plain)
    assert opened.unread == []
    return opened.summary()


def counts(layer: Layer) -> tuple[int, int, int, int]:
    return layer.rows, layer.padded, layer.empty, layer.unseen


# -- written by hand -------------------------------------------------------------------------------


class Sparse(nn.Module):
    """One head; each row keeps its two largest scores among those that a mask leaves."""

    def __init__(self, scale: float = 4.0, memory: int = 0) -> None:
        super().__init__()
        self.scale = scale
        self.memory = nn.Parameter(torch.randn(memory, 8)) if memory else None
        self.weights: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None, most: int | None = 2) -> Tensor:
        keys = x
        if self.memory is not None:
            keys = torch.cat([self.memory.expand(len(x), -1, -1), x], 1)
        scores = self.scale * (x @ keys.mT)
        if mask is not None:
            whole = F.pad(mask, (keys.shape[1] - x.shape[1], 0), value=True)
            scores = scores.masked_fill(~whole[:, None, :], -torch.inf)
        if most is not None:
            least = scores.topk(most, -1).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        weights = torch.softmax(scores, -1)
        self.weights = weights.detach().unsqueeze(1)
        return weights @ keys


def test_keys_that_no_row_selects_are_no_padding() -> None:
    torch.manual_seed(0)
    model, x = Sparse(), torch.randn(2, 50, 8)
    summary = one(model, x)
    (layer,) = summary.layers
    unseen = int((model.weights.amax(2) == 0).sum())
    assert unseen > 10
    assert counts(layer) == (100, 0, 0, unseen)
    every = torch.ones(2, 50, dtype=torch.bool)
    expected = over(entropy(model.weights), every)
    assert torch.allclose(summary.mean("entropy"), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("how", ["call", "probe"])
@pytest.mark.parametrize("memory", [0, 3])
def test_a_mask_over_tokens_tells_padding_from_keys_that_none_selects(
    how: str, memory: int
) -> None:
    torch.manual_seed(1)
    model, x = Sparse(memory=memory), torch.randn(2, TOKENS, 8)
    if how == "call":
        summary = one(model, x, mask=REAL)
    else:
        summary = one(model, x, probe={"attention_mask": REAL.long()})
    (layer,) = summary.layers
    assert counts(layer) == (17, 5, 0, 0)
    assert layer.padded_by == ("mask" if how == "call" else "the given attention_mask")
    expected = over(entropy(model.weights), REAL)
    assert torch.allclose(summary.mean("entropy"), expected, atol=TOLERANCE, rtol=0)


class Masked(nn.Module):
    """SDPA of four heads with a mask that the module holds."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        query = x.view(*x.shape[:2], 4, -1).transpose(1, 2)
        return F.scaled_dot_product_attention(query, query, query, attn_mask=self.mask)


def test_a_strictly_causal_mask_keeps_its_longest_row() -> None:
    places = torch.arange(TOKENS)
    strict = places[:, None] > places
    (layer,) = one(Masked(strict), torch.randn(2, TOKENS, 8)).layers
    # the first token sees no key; the last is seen by none, and reads all others
    assert counts(layer) == (2 * (TOKENS - 1), 0, 2, 2)


@pytest.mark.parametrize("keys_only", [False, True])
def test_tokens_that_only_read_are_counted(keys_only: bool) -> None:
    mask = torch.ones(1 if keys_only else TOKENS, TOKENS, dtype=torch.bool)
    mask[:, -3:] = False
    (layer,) = one(Masked(mask), torch.randn(2, TOKENS, 8)).layers
    assert counts(layer) == (22, 0, 0, 6)


@pytest.mark.parametrize("materialised", [False, True])
def test_keys_hidden_from_whole_sequences_are_padding_where_sequences_differ(
    materialised: bool,
) -> None:
    mask = REAL[:, None, None, :]
    if materialised:
        mask = mask.expand(2, 1, TOKENS, TOKENS).clone()
    (layer,) = one(Masked(mask), torch.randn(2, TOKENS, 8)).layers
    assert (*counts(layer), layer.padded_by) == (17, 5, 0, 0, "attn_mask")


def test_a_token_that_sees_no_key_and_that_no_row_sees_is_padding() -> None:
    mask = (REAL[:, :, None] & REAL[:, None, :])[:, None]
    (layer,) = one(Masked(mask), torch.randn(2, TOKENS, 8)).layers
    assert (*counts(layer), layer.padded_by) == (17, 5, 0, 0, "masks")


class Named(nn.Module):
    """Attends to all tokens, whatever mask it is called with."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_a_mask_that_hides_nothing_from_real_rows_is_not_believed() -> None:
    x = torch.randn(2, 1, TOKENS, 8)
    (layer,) = one(Named(), x, REAL.long()).layers
    assert counts(layer) == (22, 0, 0, 0)
    (layer,) = one(Named(), x, REAL.long(), probe={"attention_mask": REAL}).layers
    assert counts(layer) == (17, 5, 0, 0)  # the user knows


# -- what the user says ----------------------------------------------------------------------------


def test_rows_asked_for_are_read_and_the_rest_counted() -> None:
    torch.manual_seed(2)
    model, x = Sparse(), torch.randn(2, TOKENS, 8)
    asked = torch.zeros(TOKENS, dtype=torch.bool)
    asked[4:8] = True
    summary = one(model, x, mask=REAL, probe={"rows": asked})
    (layer,) = summary.layers
    assert (layer.rows, layer.padded, layer.excluded) == (6, 5, 11)
    expected = over(entropy(model.weights), REAL & asked)
    assert torch.allclose(summary.mean("entropy"), expected, atol=TOLERANCE, rtol=0)
    (layer,) = one(model, x, mask=REAL, probe={"rows": "all"}).layers
    assert (layer.rows, layer.padded, layer.excluded) == (22, 0, 0)


def test_rows_that_do_not_fit_are_listed() -> None:
    with (
        pytest.raises(acutance.ProbeError, match=r"rows has shape \(1, 3\), but its queries are"),
        acutance.probe(model := Sparse(), rows=torch.ones(3, dtype=torch.bool)),
    ):
        model(torch.randn(2, TOKENS, 8))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"attention_mask": [1, 0]}, TypeError, "attention_mask must be a tensor .* got list"),
        ({"attention_mask": torch.ones(3)}, ValueError, r"\(batch, tokens\), got shape \(3,\)"),
        (
            {"attention_mask": torch.full((1, 2), 2)},
            ValueError,
            "1 on real tokens and 0 on padding",
        ),
        (
            {"rows": "some"},
            ValueError,
            "rows must be 'real', 'all' or a boolean tensor .* got 'some'",
        ),
        ({"rows": 3}, TypeError, "rows must be 'real', 'all' or a boolean tensor .* got int"),
        ({"rows": torch.ones(3)}, ValueError, r"got torch.float32 of shape \(3,\)"),
    ],
)
def test_masks_and_rows_of_other_kinds_are_refused(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        acutance.probe(Sparse(), **options)


def test_the_mask_is_set_for_each_batch() -> None:
    model, x = Sparse(), torch.randn(2, TOKENS, 8)
    with acutance.probe(model) as probe:
        for mask in (REAL, None, REAL.flip(0)):
            probe.attention_mask = mask
            model(x)
    (layer,) = probe.summary().layers
    assert (layer.calls, layer.rows, layer.padded) == (3, 17 + 22 + 17, 10)
    with pytest.raises(ValueError, match="got shape"):
        probe.attention_mask = torch.ones(3)


class Layered(nn.Module):
    """A layer that is given tokens too, as those that route by them, and keys that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _Routed()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = F.one_hot(input_ids, VOCABULARY).float()
        return self.layer(states, mask=attention_mask[:, None, None], input_ids=input_ids)


class _Routed(nn.Module):
    def forward(self, hidden_states: Tensor, input_ids: Tensor, **kwargs: Tensor) -> Tensor:
        x = hidden_states[:, None]
        keys = torch.cat([x, x[:, :, :4]], 2)
        mask = F.pad(kwargs["mask"], (0, 4), value=1) == 1
        return F.scaled_dot_product_attention(x, keys, keys, attn_mask=mask)


def test_a_layer_that_takes_tokens_beside_states_is_masked_as_its_model() -> None:
    (layer,) = one(Layered(), ids(), REAL.long()).layers
    assert (*counts(layer), layer.padded_by) == (17, 5, 0, 0, "attention_mask")


def test_layers_merge_what_told_of_padding() -> None:
    first = Layer("a", 2, rows=3, padded=1, padded_by="mask, masks", excluded=2)
    both = first.merge(Layer("a", 2, rows=3, padded_by="attention_mask", unseen=1))
    assert (both.padded_by, both.excluded, both.unseen) == ("attention_mask, mask, masks", 2, 1)


# -- transformers ----------------------------------------------------------------------------------


def sharpened(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model.eval()


def ids(length: int = TOKENS) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(7))


def selecting(kind: str) -> nn.Module:
    """A model whose rows see eight keys each, those that its indexer selects."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {kind}")
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        moe_intermediate_size=32, num_attention_heads=4, num_key_value_heads=4, index_topk=8,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, index_n_heads=2,
        index_head_dim=64, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=32,
        qk_nope_head_dim=16, v_head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return sharpened(AutoModelForCausalLM.from_config(config).double())


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_of_transformers_reads_every_real_row(kind: str) -> None:
    model, tokens = selecting(kind), ids(60)
    padding = torch.ones_like(tokens)
    padding[1, 35:] = 0
    for mask, real in ((None, torch.ones(2, 60).bool()), (padding, padding.bool())):
        given = {"input_ids": tokens, "attention_mask": mask}
        with torch.no_grad():
            maps = model(**given, output_attentions=True).attentions
            with acutance.probe(model, verify=True) as probe:
                model(**given)
        summary = probe.summary()
        rows = int(real.sum())
        assert [counts(layer) for layer in summary.layers] == [(rows, 120 - rows, 0, 0)] * 2
        assert {layer.status for layer in summary.layers} == {"verified"}
        expected = torch.cat([over(entropy(weights), real) for weights in maps])
        assert torch.allclose(summary.mean("entropy"), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out_where_a_layer_adds_compressed_keys(side: str) -> None:
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if "deepseek_v4" not in CONFIG_MAPPING:
        pytest.skip("this release of transformers has no deepseek_v4")
    torch.manual_seed(0)
    kinds = ["heavily_compressed_attention", "compressed_sparse_attention"]
    rates = dict(zip(kinds, (8, 4), strict=True))
    config = AutoConfig.for_model(
        "deepseek_v4", vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2,
        layer_types=kinds, compress_rates=rates, num_attention_heads=4, head_dim=32,
        q_lora_rank=32, o_lora_rank=16, o_groups=2, index_topk=4, index_n_heads=2,
        index_head_dim=32, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
        num_hash_layers=0, sliding_window=64, max_position_embeddings=512,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model, tokens = sharpened(AutoModelForCausalLM.from_config(config)), ids(30)
    real = torch.arange(30) < torch.tensor([[30], [17]])
    real = real if side == "right" else real.flip(1)
    given = {"input_ids": tokens, "attention_mask": real.long()}
    with torch.no_grad():
        maps = model(**given, output_attentions=True).attentions
        with acutance.probe(model, verify=True) as probe:
            model(**given)
    summary = probe.summary()
    assert all(weights.shape[3] > 30 for weights in maps)
    assert [counts(layer) for layer in summary.layers] == [(47, 13, 0, 0)] * 2
    sinks = [torch.cat([weights, 1 - weights.sum(-1, keepdim=True)], -1) for weights in maps]
    expected = torch.cat([over(entropy(weights.clamp(min=0)), real) for weights in sinks])
    assert torch.allclose(summary.mean("entropy"), expected, atol=1e-4, rtol=0)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        attn_implementation="eager",
    )  # fmt: skip
    return sharpened(LlamaForCausalLM(config).double())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out_where_a_prefix_of_keys_comes_before(side: str) -> None:
    from transformers import DynamicCache

    model, tokens, width = llama(), ids(), 5
    real = REAL if side == "right" else REAL.flip(1)
    whole = torch.cat([torch.ones(2, width), real], 1).long()  # as PEFT's prefix tuning has it

    def prefix() -> Any:
        chance = torch.Generator().manual_seed(3)
        cache = DynamicCache()
        for layer in range(2):
            key, value = torch.randn(2, 2, 2, width, 8, dtype=torch.float64, generator=chance)
            cache.update(key, value, layer)
        return cache

    given = {"input_ids": tokens, "attention_mask": whole}
    with torch.no_grad():
        maps = model(**given, **{CACHE: prefix()}, output_attentions=True).attentions
        with acutance.probe(model, verify=True) as probe:
            model(**given, **{CACHE: prefix()})
    summary = probe.summary()
    assert [counts(layer) for layer in summary.layers] == [(17, 5, 0, 0)] * 2
    expected = torch.cat([over(entropy(weights), real) for weights in maps])
    assert torch.allclose(summary.mean("entropy"), expected, atol=1e-5, rtol=0)


def test_a_decoder_without_a_mask_does_not_take_that_of_the_encoder() -> None:
    from transformers import BartConfig, BartModel

    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
        decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    model = BartModel(config).eval()
    with torch.no_grad(), acutance.probe(model, verify=True) as probe:
        model(input_ids=ids(), attention_mask=REAL.long(), decoder_input_ids=ids())
    assert [layer.rows for layer in probe.summary().layers] == [17, 22, 22]
