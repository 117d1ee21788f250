"""Every condition a model may run under, against the entropies of its own eager weights."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import acutance

TOLERANCE = 1e-5


def entropies_of(maps: Any, entropies: Callable[..., Tensor], kept: Tensor | None = None) -> Tensor:
    """Mean entropy of each head, all layers in a row, over the rows kept (B, L)."""
    found = []
    for weights in maps:
        rows = entropies(weights.detach()).transpose(0, 1).flatten(1)
        found.append((rows if kept is None else rows[:, kept.flatten()]).mean(1))
    return torch.cat(found)


def assert_near(summary: Any, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    measured = summary.mean("entropy")
    assert measured.shape == expected.shape
    assert float((measured - expected).abs().max()) < tolerance


# -- packed sequences -----------------------------------------------------------------------------

LENGTHS = (5, 2, 4)
EDGES = torch.tensor([0, 5, 7, 11], dtype=torch.int32)


def alone(eager: nn.Module, ids: Tensor, entropies: Callable[..., Tensor]) -> Tensor:
    """Mean entropies of documents that are run one by one."""
    rows = []
    with torch.no_grad():
        for part in ids.split(LENGTHS, 1):
            maps = eager(input_ids=part, output_attentions=True).attentions
            rows.append(torch.stack([entropies(layer)[0] for layer in maps]))  # (layers, heads, L)
    return torch.cat(rows, 2).mean(2).flatten()


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("provide", [False, True])
@pytest.mark.parametrize("how", ["positions", "mask", "additive"])
def test_packed_documents_are_read_as_if_alone(
    llama_models: Any, kind: str, how: str, provide: bool, entropies: Any, random_tokens: Any
) -> None:
    model, ids = llama_models[kind], random_tokens(1, sum(LENGTHS))
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    given: dict[str, Any] = {"position_ids": places, "use_cache": False}
    if how != "positions":
        document = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
        mask = (document[:, None] == document).tril()[None, None]
        hidden = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        given["attention_mask"] = mask if how == "mask" and kind == "sdpa" else hidden
    with torch.no_grad(), acutance.probe(model, verify=True, provide=provide) as probe:
        model(ids, **given)
    summary = probe.summary()
    assert_near(summary, alone(llama_models["eager"], ids, entropies))
    assert {(layer.rows, layer.status) for layer in summary.layers} == {(11, "verified")}
    assert float(summary.moments.high[:, summary.metrics.index("n_keys")].max()) == max(LENGTHS)
    assert {layer.provided for layer in summary.layers} == {int(provide and kind == "sdpa")}


@pytest.mark.parametrize(("max_rows", "lengths"), [(None, True), (8, True), (None, False)])
def test_packed_documents_of_flash_attention_are_read(
    llama_models: Any,
    entropies: Any,
    random_tokens: Any,
    monkeypatch: pytest.MonkeyPatch,
    max_rows: int | None,
    lengths: bool,
) -> None:
    def packed(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        out = acutance.attention(
            *(query, key, value),
            is_causal=True,
            scale=kwargs["scaling"],
            enable_gqa=True,
            cu_seqlens=EDGES,
        )
        return out.transpose(1, 2), None

    model, ids = llama_models["sdpa"], random_tokens(1, sum(LENGTHS))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "my_flash_attention", packed)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "my_flash_attention", flash_attention_mask)
    monkeypatch.setattr(model.config, "_attn_implementation", "my_flash_attention")
    given: dict[str, Any] = {
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None]
    }
    if lengths:  # otherwise it is for the positions alone to tell
        given |= {f"cu_seq_lens_{part}": EDGES for part in "qk"}
        given |= {f"max_length_{part}": max(LENGTHS) for part in "qk"}
    with (
        torch.no_grad(),
        acutance.probe(model, verify=True, max_rows=max_rows, metrics=["entropy"]) as probe,
    ):
        model(ids, use_cache=False, **given)
    summary = probe.summary()
    assert {layer.status for layer in summary.layers} == {"verified"}
    expected = alone(llama_models["eager"], ids, entropies)
    if max_rows is None:
        assert_near(summary, expected)
    else:
        assert [(layer.rows, layer.skipped) for layer in summary.layers] == [(8, 3)] * 2


# -- generation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("provide", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_provided_or_not(
    llama_models: Any, cache: str, provide: bool, entropies: Any, random_tokens: Any
) -> None:
    model, ids, steps = llama_models["sdpa"], random_tokens(2, 7), 5
    options: dict[str, Any] = {
        "max_new_tokens": steps + 1,
        "do_sample": False,
        "cache_implementation": cache,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    plain = model.generate(ids, **options)
    with acutance.probe(model, provide=provide) as probe:
        assert torch.equal(model.generate(ids, **options), plain)
    with torch.no_grad():
        maps = llama_models["eager"](plain[:, :-1], output_attentions=True).attentions
    summary = probe.summary()
    assert_near(summary, entropies_of(maps, entropies))
    assert [layer.provided for layer in summary.layers] == [(1 + steps) * provide] * 2
    assert probe.not_provided == []


def test_assisted_generation(llama_models: Any, entropies: Any, random_tokens: Any) -> None:
    model, ids = llama_models["sdpa"], random_tokens(1, 6)
    helper = copy.deepcopy(model)  # guesses right, so that tokens come in batches
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    with acutance.probe(model, verify=True) as probe:
        probed = model.generate(ids, assistant_model=helper, **options)
    assert torch.equal(probed, plain)
    summary = probe.summary()
    assert {layer.status for layer in summary.layers} == {"verified"}
    assert summary.layers[0].calls < 9  # several tokens at once
    with torch.no_grad():
        maps = llama_models["eager"](plain[:, :-1], output_attentions=True).attentions
    tokens = plain.shape[1] - 1
    assert summary.layers[0].rows == tokens  # every guess was right: each token was read once
    assert_near(summary, entropies_of(maps, entropies))


@pytest.mark.parametrize("provide", [False, True])
def test_cross_attention_with_a_cache(
    translator: Any, provide: bool, entropies: Any, random_tokens: Any
) -> None:
    model, eager = translator.models["sdpa"], translator.models["eager"]
    ids, mask = translator.inputs["input_ids"], translator.inputs["attention_mask"]
    options = {
        "attention_mask": mask,
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "num_beams": 1,
    }
    plain = model.generate(ids, **options)
    with acutance.probe(model, verify=True, provide=provide) as probe:
        assert torch.equal(model.generate(ids, **options), plain)
    with torch.no_grad():
        output = eager(
            input_ids=ids,
            attention_mask=mask,
            decoder_input_ids=plain[:, :-1],
            output_attentions=True,
        )
    expected = [
        entropies_of([layer], entropies, mask.bool()) for layer in output.encoder_attentions
    ]
    for layer, cross in zip(output.decoder_attentions, output.cross_attentions, strict=True):
        expected += [entropies_of([layer], entropies), entropies_of([cross], entropies)]
    summary = probe.summary()
    assert {layer.status for layer in summary.layers} == {"verified"}
    assert_near(summary, torch.cat(expected))


# -- precision, compilation, threads --------------------------------------------------------------


@pytest.mark.parametrize("provide", [False, True])
def test_a_bfloat16_model(
    llama_models: Any, provide: bool, entropies: Any, random_tokens: Any
) -> None:
    models = {kind: copy.deepcopy(model).bfloat16() for kind, model in llama_models.items()}
    ids = random_tokens(2, 9)
    with torch.no_grad():
        # sdpa in the reference too: the second layer's input is then the same to the bit
        queries: list[Any] = []
        handle = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def spying(module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **kw: Any) -> Any:
            queries.append((query.double(), key.double(), kw["scaling"]))
            return handle(module, query, key, *rest, **kw)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", spying)
            models["sdpa"](ids)
        with acutance.probe(models["sdpa"], verify=True, provide=provide) as probe:
            models["sdpa"](ids)
    maps = []
    for query, key, scale in queries:
        scores = query @ key.repeat_interleave(2, 1).mT * scale
        hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
        maps.append(scores.masked_fill(hidden, -torch.inf).softmax(-1))
    expected = entropies_of(maps, entropies)
    summary = probe.summary()
    assert {layer.status for layer in summary.layers} == {"verified"}
    # a provided output may round the other way, which the second layer then reads
    assert_near(summary, expected, 0.02 if provide else TOLERANCE)
    assert float((summary.mean("entropy") - expected)[:4].abs().max()) < TOLERANCE


@pytest.mark.few(1)
@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_models(
    llama_models: Any, when: str, fullgraph: bool, entropies: Any, random_tokens: Any
) -> None:
    model, ids = llama_models["sdpa"], random_tokens(2, 9)

    def compiled() -> Any:
        torch.compiler.reset()
        return torch.compile(model, backend="eager", fullgraph=fullgraph)

    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        maps = llama_models["eager"](ids, output_attentions=True).attentions
        if when == "before":
            ready = compiled()
            ready(ids, use_cache=False)
            with acutance.probe(ready, verify=True) as probe:
                output = ready(ids, use_cache=False).logits
        else:
            with acutance.probe(model, verify=True) as probe:
                ready = compiled()
                output = ready(ids, use_cache=False).logits
        assert torch.equal(output, plain)
        after = ready(ids, use_cache=False).logits  # compiled anew, with nothing of the probe
        assert torch.allclose(after, plain, atol=1e-5)
    summary = probe.summary()
    assert_near(summary, entropies_of(maps, entropies))
    assert [layer.module for layer in summary.layers] == [
        f"model.layers.{index}.self_attn" for index in range(2)
    ]
    assert {(layer.calls, layer.status) for layer in summary.layers} == {(1, "verified")}


@pytest.mark.parametrize("provide", [False, True])
def test_two_models_in_two_threads(
    llama_models: Any, gpt2_models: Any, provide: bool, entropies: Any, random_tokens: Any
) -> None:
    ids, turns = random_tokens(2, 8), 4
    start = threading.Barrier(2)
    found: dict[str, Any] = {}

    def work(name: str, model: nn.Module) -> None:
        start.wait(20)
        probe = acutance.probe(model, provide=provide)
        with probe, torch.no_grad():
            for _ in range(turns):
                model(ids)
        found[name] = probe

    pairs = {"llama": llama_models, "gpt2": gpt2_models}
    threads = [threading.Thread(target=work, args=(n, m["sdpa"])) for n, m in pairs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(found) == set(pairs)
    for name, models in pairs.items():
        with torch.no_grad():
            maps = models["eager"](ids, output_attentions=True).attentions
        summary = found[name].summary()
        assert_near(summary, entropies_of(maps, entropies))
        assert {layer.calls for layer in summary.layers} == {turns}
        assert {layer.provided for layer in summary.layers} == {turns * provide}
        assert found[name].unread == []


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("provide", [False, True])
def test_padding_on_either_side(
    llama_models: Any, side: str, provide: bool, entropies: Any, random_tokens: Any
) -> None:
    model, ids = llama_models["sdpa"], random_tokens(2, 9)
    real = torch.ones(2, 9, dtype=torch.long)
    real[1, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    given = {
        "attention_mask": real,
        "position_ids": (real.cumsum(1) - 1).clamp(min=0),
        "use_cache": False,
    }
    with torch.no_grad():
        plain = model(ids, **given).logits
        maps = llama_models["eager"](ids, output_attentions=True, **given).attentions
        with acutance.probe(model, verify=True, provide=provide) as probe:
            output = model(ids, **given).logits
    assert float((output - plain).abs().max()) <= (1e-4 if provide else 0.0)
    summary = probe.summary()
    assert_near(summary, entropies_of(maps, entropies, real.bool()))
    assert [(layer.rows, layer.padded, layer.provided) for layer in summary.layers] == [
        (14, 4, int(provide))
    ] * 2
