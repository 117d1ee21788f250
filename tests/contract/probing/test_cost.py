"""Spending less: parts of a model, parts of its calls, drawn rows, provided attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance
from acutance.probing import Moments


class Attend(nn.Module):
    """One SDPA call."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, **options)


def qkv(batch: int = 2, heads: int = 4, queries: int = 12, keys: int = 12, groups: int = 4) -> Any:
    chance = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, 8, generator=chance) * 2

    return made(batch, heads, queries), made(batch, groups, keys), made(batch, groups, keys)


def probed(model: nn.Module, *args: Any, options: dict[str, Any], **given: Any) -> Any:
    with torch.no_grad(), acutance.probe(model, **options) as probe:
        model(*args, **given)
    return probe.summary()


# -- every, layers, heads -------------------------------------------------------------------------


def test_every_reads_the_first_of_so_many_passes() -> None:
    model, (query, key, value) = Attend(), qkv()
    probe = acutance.probe(model, every=3)
    expected = []
    with probe:
        for turn in range(7):
            model(query * (1 + turn), key, value)
            if turn % 3 == 0:
                expected.append(acutance.row_statistics(query * (1 + turn), key).entropy)
    (layer,) = probe.summary().layers
    assert (layer.calls, layer.rows) == (3, 72)
    mean = torch.stack(expected).double().mean((0, 1, 3))
    assert torch.allclose(probe.summary().mean("entropy"), mean, atol=1e-6)


def test_every_counts_encoder_and_decoder_apart(translator: Any) -> None:
    model, ids = translator.models["sdpa"], translator.inputs["input_ids"]
    with acutance.probe(model, every=2) as probe:
        model.generate(ids, max_new_tokens=5, min_new_tokens=5, num_beams=1, do_sample=False)
    found = {layer.module.split(".")[1]: layer.calls for layer in probe.summary().layers}
    assert found == {"encoder": 1, "decoder": 3}  # of five steps the first, third and fifth


def test_chosen_layers_and_heads_are_those_of_the_whole(
    llama_models: Any, random_tokens: Any
) -> None:
    model, ids = llama_models["sdpa"], random_tokens(2, 9)
    whole = probed(model, ids, options={})
    part = probed(model, ids, options={"layers": -1, "heads": "1,-1", "verify": True})
    assert [layer.module for layer in part.layers] == ["model.layers.1.self_attn"]
    assert part.layers[0].status == "verified"
    assert part.places == [(0, 1), (0, 3)]
    assert part.columns()["head"] == [1, 3]
    assert torch.equal(part.mean("entropy"), whole.mean("entropy")[[5, 7]])


@pytest.mark.parametrize("provide", [False, True])
def test_heads_with_masks_and_sinks_of_their_own(provide: bool) -> None:
    model, (query, key, value) = Attend(), qkv(groups=2)
    chance = torch.Generator().manual_seed(4)
    mask = torch.rand(2, 4, 12, 12, generator=chance) > 0.4
    given = {"attn_mask": mask, "enable_gqa": True}
    whole = probed(model, query, key, value, options={}, **given)
    options = {"heads": [0, 3], "provide": provide, "verify": not provide}
    part = probed(model, query, key, value, options=options, **given)
    assert torch.allclose(part.mean("entropy"), whole.mean("entropy")[[0, 3]], atol=1e-6)
    assert part.layers[0].status == "verified"


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"every": 1.5}, TypeError, r"every must be an integer, got 1\.5"),
        ({"max_rows": 1}, ValueError, "max_rows must be at least 2, got 1"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"heads": "a"}, ValueError, "heads must be numbers or ranges, such as 0,4-7, got 'a'"),
        ({"heads": []}, ValueError, r"heads must name at least one, got \[\]"),
        ({"heads": [True]}, TypeError, "heads must contain numbers, ranges and text, got True"),
        ({"heads": "5-2"}, ValueError, "heads must have ranges low-high, got '5-2'"),
        ({"layers": "self_atn"}, ValueError, r"is not a layer of the model; did you mean 'self"),
        (
            {"layers": 3},
            ValueError,
            "layers=3 is not a layer of the model: it has 1 attention layer, 0",
        ),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        acutance.probe(nn.TransformerEncoderLayer(8, 2, batch_first=True), **options)


def test_blocks_that_are_not_present() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3)
    with pytest.raises(ValueError, match="it has 3 blocks, 0 to 2"):
        acutance.probe(model, layers="0,3")


def test_layers_that_run_no_attention_and_heads_that_are_not_present() -> None:
    model = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with (
        pytest.raises(
            acutance.ProbeError, match="in the requested layers of TransformerEncoderLayer"
        ),
        acutance.probe(model, layers="linear1"),
    ):
        model(torch.randn(1, 3, 8))
    for heads, named in ((4, "4"), ("0-2", "2"), (-3, "-3")):
        with pytest.raises(
            ValueError, match=rf"includes head {named}, but the layers .* have 2 heads"
        ):
            acutance.probe(model, heads=heads)


# -- the first call is verified -------------------------------------------------------------------


def test_the_first_call_of_each_kind_is_verified() -> None:
    model = Attend()
    with torch.no_grad(), acutance.probe(model) as probe:
        model(*qkv())
        assert probe.summary().layers[0].status == "verified"
        model(*qkv())
        layer = probe.summary().layers[0]
        assert (layer.status, layer.calls) == ("checked", 2)
        assert layer.error is not None
        assert layer.error < 1e-4
        query, key, value = qkv()
        model(query[:, :, :1], key, value)  # a step of decoding is of another kind
    with pytest.raises(ValueError, match="verify must be True, False or"):
        acutance.probe(model, verify="frist")


# -- rows drawn at random -------------------------------------------------------------------------


def drawn(model: nn.Module, *args: Any, seed: int = 0, most: int = 5, **given: Any) -> Any:
    options = {"max_rows": most, "seed": seed, "verify": True}
    return probed(model, *args, options=options, **given)


def test_the_standard_error_is_that_of_the_draw() -> None:
    model, parts = Attend(), qkv(queries=40, keys=40)
    truth = probed(model, *parts, options={"metrics": ["entropy"]}, is_causal=True).mean("entropy")
    scores = []
    for seed in range(200):
        summary = drawn(model, *parts, seed=seed, most=20, is_causal=True)
        scores.append((summary.mean("entropy") - truth) / summary.sampling_error("entropy"))
    scores = torch.stack(scores)
    # 200 draws: the mean of t over 19 degrees of freedom is 0 ± 0.075, its spread 1.06 ± 0.06
    assert float(scores.mean(0).abs().max()) < 0.35
    assert float(scores.std(0).min()) > 0.85
    assert float(scores.std(0).max()) < 1.35


def test_draws_of_calls_of_different_size_weigh_by_rows() -> None:
    model = Attend()
    large, small = qkv(queries=300, keys=300), qkv(queries=3, keys=3)
    options = {"max_rows": 50, "metrics": ["n_keys"]}
    with torch.no_grad(), acutance.probe(model, **options) as probe:
        model(*large, is_causal=True)
        model(*small, is_causal=True)
    summary = probe.summary()
    truth = (2 * 300 * 150.5 + 2 * 3 * 2.0) / 606
    error = summary.sampling_error("n_keys")
    assert bool((error > 0).all())
    assert bool(((summary.mean("n_keys") - truth).abs() < 4 * error).all())
    assert bool((summary.moments.weight == 606).all())
    assert bool((summary.moments.count == 56).all())
    half = {"max_rows": 50, "metrics": ["n_keys"]}
    first, second = (probed(model, *p, options=half, is_causal=True) for p in (large, small))
    joined = first.merge(second)
    assert torch.allclose(joined.sampling_error("n_keys"), error)
    assert torch.allclose(joined.mean("n_keys"), summary.mean("n_keys"))


def test_draws_are_seeded_and_differ_by_pass(llama_models: Any, random_tokens: Any) -> None:
    model, ids = llama_models["sdpa"], random_tokens(2, 11)
    first, again, other = (drawn(model, ids, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.mean("entropy"), again.mean("entropy"))
    assert not torch.equal(first.mean("entropy"), other.mean("entropy"))
    with torch.no_grad(), acutance.probe(model, max_rows=5) as twice:
        model(ids)
        model(ids)
    column = twice.metrics.index("entropy")
    rows = twice.summary().moments.histogram[:, column].gt(0).sum(1)
    assert float(twice.summary().moments.std[:, column].min()) > 0
    assert not torch.equal(twice.summary().mean("entropy"), first.mean("entropy"))
    assert int(rows.max()) > 1


def test_padding_is_never_drawn(llama_models: Any, random_tokens: Any) -> None:
    model, ids = llama_models["sdpa"], random_tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 3:] = 0
    summary = drawn(model, ids, most=8, attention_mask=mask)
    assert [(layer.rows, layer.padded, layer.skipped) for layer in summary.layers] == [
        (8, 6, 4)
    ] * 2
    assert {layer.status for layer in summary.layers} == {"verified"}


def test_what_was_drawn_survives_a_file_and_is_told(tmp_path: Any) -> None:
    summary = drawn(Attend(), *qkv())
    summary.save(tmp_path / "state")
    loaded = acutance.load(tmp_path / "state")
    assert torch.equal(loaded.sampling_error("entropy"), summary.sampling_error("entropy"))
    assert "entropy_sampling_error" in loaded.columns()
    assert loaded.to_dict()["heads"][0]["metrics"]["entropy"]["sampling_error"] > 0
    whole = probed(Attend(), *qkv(), options={})
    assert not bool(whole.sampling_error("entropy").any())
    assert "entropy_sampling_error" not in whole.columns()
    with pytest.raises(ValueError, match="was not recorded"):
        probed(Attend(), *qkv(), options={"metrics": ["lse"]}).sampling_error("entropy")


def test_one_row_has_no_standard_error() -> None:
    found = Moments.of(torch.tensor([[[2.0]]]), ("entropy",)).sampled(10, 1)
    assert found.sampling_error.isnan().all()
    assert float(found.mean) == 2.0


# -- provided -------------------------------------------------------------------------------------


def gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return [part.grad.clone() for part in model.parameters() if part.grad is not None]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_provided_attention_backpropagates(
    llama_models: Any, random_tokens: Any, checkpointing: bool | None
) -> None:
    model, ids = llama_models["sdpa"].train(), random_tokens(2, 8)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    plain = gradients(model, ids)
    probe = acutance.probe(model, provide=True, every=2)
    with probe:
        found = [gradients(model, ids) for _ in range(3)]
    assert len(plain) > 10
    for each in found:
        for mine, theirs in zip(each, plain, strict=True):
            assert float((mine - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max()) + 1e-9
    assert probe.not_provided == []
    assert [(layer.calls, layer.provided) for layer in probe.summary().layers] == [(2, 2)] * 2


def test_provided_outputs_are_equal_to_rounding_and_read_once(
    llama_models: Any, random_tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, ids = llama_models["sdpa"], random_tokens(2, 8)
    own, runs = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def counting(*args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return own(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", counting)
    with torch.no_grad():
        plain = model(ids).logits
        runs.clear()
        with acutance.probe(model, provide=True) as probe:
            outputs = [model(ids).logits for _ in range(3)]
    assert len(runs) == 2  # each layer's first call is compared with the model's own function
    for output in outputs:
        assert 0 < float((output - plain).abs().max()) < 1e-5 * float(plain.abs().max())
    layers = probe.summary().layers
    assert [(layer.calls, layer.provided, layer.status) for layer in layers] == [
        (3, 3, "checked")
    ] * 2
    assert all(layer.error is not None and layer.error < 1e-5 for layer in layers)


@pytest.mark.parametrize("kind", ["dropout", "eager", "weights", "func"])
def test_what_is_not_provided_is_left_to_the_model_and_listed(
    kind: str, llama_models: Any, random_tokens: Any
) -> None:
    reasons = {
        "dropout": "dropout makes its weights random",
        "eager": "eager attention may return its weights, which only it computes",
        "weights": "its weights are requested: call it with need_weights=False",
        "func": "it runs inside a transform of torch.func",
    }
    if kind == "eager":
        model, ids = llama_models["eager"], random_tokens(2, 6)
        call = lambda: model(ids).logits.detach()  # noqa: E731
    elif kind == "func":
        model, parts = Attend(), qkv()
        call = lambda: torch.func.grad(lambda q: model(q, *parts[1:]).sum())(parts[0])  # noqa: E731
    else:
        model = nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.5 * (kind == "dropout"))
        x = torch.randn(2, 5, 16)

        def call() -> Tensor:
            torch.manual_seed(0)
            return model(x, x, x, need_weights=kind == "weights")[0].detach()

    plain = call()
    with acutance.probe(model, provide=True) as probe:
        assert torch.equal(call(), plain)
    assert {text.partition(": ")[2] for text in probe.not_provided} == {reasons[kind]}
    assert {layer.provided for layer in probe.summary().layers} == {0}
    assert probe.unread == []


@pytest.mark.parametrize("dims", [2, 3, 4, 5])
def test_provided_outputs_have_the_shape_of_sdpas(dims: int) -> None:
    parts = [part[0, 0] for part in qkv()] if dims == 2 else list(qkv())
    parts = [part[:, 0] for part in parts] if dims == 3 else parts
    parts = [torch.stack([part, part.flip(0), part]) for part in parts] if dims == 5 else parts
    model = Attend()
    plain = model(*parts, is_causal=True)
    with acutance.probe(model, provide=True) as probe:
        output = model(*parts, is_causal=True)
    assert output.shape == plain.shape
    assert torch.allclose(output, plain, atol=1e-5)
    assert probe.summary().layers[0].provided == 1


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_nested_probes_where_some_provide(outer: bool, inner: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sdpa, self.mha = Attend(), nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.sdpa(x, x, x)
            return self.mha(x, x, x, need_weights=False)[0]

    model, x = Model(), torch.randn(2, 6, 16)
    plain = model(x)
    with (
        acutance.probe(model, provide=outer) as first,
        acutance.probe(model, provide=inner) as second,
    ):
        outputs = [model(x) for _ in range(3)]
    assert all(torch.allclose(output, plain, atol=1e-5) for output in outputs)
    expected = probed(model, x, options={}).mean("entropy")
    for probe in (first, second):
        summary = probe.summary()
        assert [(layer.module, layer.calls) for layer in summary.layers] == [
            ("sdpa", 3),
            ("mha", 3),
        ]
        assert torch.allclose(summary.mean("entropy"), expected, atol=1e-5)
    provided = [sum(layer.provided for layer in p.summary().layers) for p in (first, second)]
    assert sum(provided) == (6 if outer or inner else 0)


# -- memory and small calls -----------------------------------------------------------------------


def test_drawn_rows_and_provided_attention_hold_no_matrix() -> None:
    model, length = Attend(), 4096
    query, key, value = qkv(batch=1, heads=1, groups=1, queries=length, keys=length)
    from torch.profiler import ProfilerActivity, profile

    for options in ({}, {"provide": True}, {"max_rows": 64}, {"verify": True}):
        probed(model, query, key, value, options=options)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            probed(model, query, key, value, options=options, is_causal=True)
        largest = max(abs(event.cpu_memory_usage) for event in seen.events())
        assert largest < length * length, options  # bytes: a quarter of the scores


def test_small_calls_are_summarised_together() -> None:
    model, (query, key, value) = Attend(), qkv()
    with acutance.probe(model, metrics=["entropy"]) as probe:
        for step in range(12):
            model(query[:, :, step : step + 1], key[:, :, : step + 1], value[:, :, : step + 1])
    summary = probe.summary()
    expected = acutance.row_statistics(query, key, is_causal=True).entropy.double().mean((0, 2))
    assert torch.allclose(summary.mean("entropy"), expected, atol=1e-6)
    assert summary.layers[0].rows == 24
