"""A plan for the cache: what it says, what it costs, and its file."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import acutance
from acutance import CachePlan, HeadPlan
from acutance.caching import LayerShape, PlanError, cache_shapes
from tests.contract.trained import decoder
from tests.versions import CACHE

STREAMING = HeadPlan("streaming", first=4, recent=60)
SHAPE = LayerShape(heads=2, query_heads=4, key_width=64, value_width=32)


def llama(**changes: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def test_the_shapes_of_a_cache_are_those_of_its_tensors() -> None:
    model = llama(head_dim=16)
    cache = model(torch.zeros(1, 3, dtype=torch.int64), use_cache=True).past_key_values
    shapes = cache_shapes(model)
    assert list(shapes) == [f"model.layers.{layer}.self_attn" for layer in range(2)]
    for shape, layer in zip(shapes.values(), cache.layers, strict=True):
        assert layer.keys.shape == (1, shape.heads, 3, shape.key_width)
        assert layer.values.shape == (1, shape.heads, 3, shape.value_width)
        assert (shape.query_heads, shape.queries_per_key) == (4, 2)


def test_the_full_plan_costs_what_transformers_cache_holds() -> None:
    model = llama().bfloat16()
    cache = model(torch.zeros(1, 37, dtype=torch.int64), use_cache=True).past_key_values
    held = sum(one.nbytes for layer in cache.layers for one in (layer.keys, layer.values))
    plan = CachePlan.of(model)
    assert plan.bytes(37) == plan.full_bytes(37) == held
    assert plan.share(37) == 1.0
    assert plan.bytes(37, itemsize=4) == 2 * held


def test_a_plan_names_layers_and_heads() -> None:
    model = llama()
    plan = CachePlan.of(model, {(1, 0): STREAMING, 0: HeadPlan("dropped")})
    first, second = plan.layers.values()
    assert first == (HeadPlan("dropped"),) * 2
    assert second == (STREAMING, HeadPlan())
    assert plan.name == "cache plan (1 full, 1 streaming, 2 dropped)"
    bits = {(0, 0): HeadPlan(key_bits=4, value_bits=4), 1: HeadPlan(key_bits=8, value_bits=4)}
    assert CachePlan.of(model, bits).name == "cache plan (1 full, 2 in 8/4 bits, 1 in 4 bits)"
    assert CachePlan.of(model, STREAMING).layers["model.layers.1.self_attn"] == (STREAMING,) * 2
    assert CachePlan.of(model, {(1, 0): STREAMING}).share(640) == pytest.approx(0.775)


def test_the_law_of_a_plan_has_a_window_for_every_query_head_that_streams() -> None:
    plan = CachePlan.of(llama(), {(1, 1): STREAMING})
    window = acutance.scaling.Window(60, sinks=4)
    assert plan.law() == {("model.layers.1.self_attn", head): window for head in (2, 3)}
    for other in (HeadPlan("dropped"), HeadPlan(key_bits=4)):
        with pytest.raises(ValueError, match=r"a window cannot express"):
            CachePlan.of(llama(), {(0, 1): other}).law()


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_quantised_bytes_are_codes_scales_and_a_plain_rest(bits: Any) -> None:
    # 100 tokens: 100 - 20 = 80, so 5 groups of 16 are quantised and 20 tokens are not
    keys = 80 * 64 * bits // 8 + 5 * 64 * 4 + 20 * 64 * 2
    values = 80 * 32 * bits // 8 + 80 * 2 * 4 + 20 * 32 * 2
    plain = 100 * 2
    sizes = {"group": 16, "residual": 20}
    assert HeadPlan(key_bits=bits).bytes(100, SHAPE, **sizes) == keys + plain * 32
    assert HeadPlan(value_bits=bits).bytes(100, SHAPE, **sizes) == values + plain * 64
    both = HeadPlan(key_bits=bits, value_bits=bits)
    assert both.bytes(100, SHAPE, **sizes) == keys + values
    assert both.bytes(19, SHAPE, **sizes) == HeadPlan().bytes(19, SHAPE)


def test_a_streaming_head_stops_growing() -> None:
    assert [STREAMING.keys(n) for n in (10, 64, 1000)] == [10, 64, 64]
    assert STREAMING.bytes(1000, SHAPE) == STREAMING.bytes(64, SHAPE) == HeadPlan().bytes(64, SHAPE)
    assert HeadPlan("dropped").bytes(1000, SHAPE) == 0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kind": "half"}, "kind must be full, streaming, dropped, got 'half'"),
        ({"kind": "streaming", "first": 4}, "recent must be at least 1"),
        ({"first": 4}, "only a streaming head has first and recent keys"),
        ({"kind": "dropped", "recent": 4}, "only a streaming head has first and recent keys"),
        ({"key_bits": 3}, "key_bits must be 16, 8, 4, 2, got 3"),
        ({"value_bits": True}, "value_bits must be 16, 8, 4, 2, got True"),
        ({"kind": "dropped", "key_bits": 4}, "only full heads are quantised"),
    ],
)
def test_a_head_that_makes_no_sense_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        HeadPlan(**fields)


def test_places_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no key head 2: model.layers.0.self_attn has 2 key"):
        CachePlan.of(llama(), {(0, 2): STREAMING})
    with pytest.raises(ValueError, match=r"layer"):
        CachePlan.of(llama(), {(7, 0): STREAMING})
    with pytest.raises(TypeError, match=r"heads must be HeadPlan, got str"):
        CachePlan.of(llama(), {(0, 0): "streaming"})


def test_models_without_a_growing_cache_are_refused() -> None:
    from transformers import BertConfig, BertModel, MistralConfig, MistralForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    bert = BertModel(BertConfig(**small, num_attention_heads=2))
    mistral = MistralForCausalLM(
        MistralConfig(**small, num_attention_heads=2, num_key_value_heads=1, sliding_window=16)
    )
    with pytest.raises(PlanError, match=r"BertModel has no key-value cache"):
        cache_shapes(bert)
    with pytest.raises(PlanError, match=r"a layer has a DynamicSlidingWindowLayer"):
        cache_shapes(mistral)
    with pytest.raises(PlanError, match=r"Linear has no key-value cache"):
        cache_shapes(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got str"):
        cache_shapes("smollm2")  # type: ignore[arg-type]


# -- files ----------------------------------------------------------------------------------------


def a_plan() -> CachePlan:
    heads = {(0, 0): STREAMING, (0, 1): HeadPlan(key_bits=4, value_bits=2), 1: HeadPlan("dropped")}
    return CachePlan.of(llama(), heads, group=16, residual=0)


def test_a_file_returns_the_plan(tmp_path: Path) -> None:
    plan = a_plan()
    plan.save(tmp_path / "plan.json")
    loaded = CachePlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.words == plan.words != CachePlan.of(llama()).words
    assert loaded.check(llama()) == plan


def test_a_file_holds_the_search_and_files_without_one_are_the_same(tmp_path: Path) -> None:
    plan = CachePlan.of(llama(), {(0, 1): HeadPlan("streaming", first=2, recent=9)})
    search = {"n": 24, "mean_loss": 2.5, "delta": 0.01, "error": 0.002, "recall": {"plan": 0.71}}
    searched = dataclasses.replace(plan, search=search)
    assert (searched, searched.words) == (plan, plan.words)  # no part of its identity
    searched.save(tmp_path / "searched.json")
    plan.save(tmp_path / "plan.json")
    assert CachePlan.load(tmp_path / "searched.json").search == search
    old = json.loads((tmp_path / "plan.json").read_text())
    assert "search" not in old  # a release that does not know it reads the file
    assert CachePlan.load(tmp_path / "plan.json").search is None
    assert CachePlan.load(tmp_path / "searched.json").check(llama()).search == search


def test_a_text_longer_than_the_search_warns_once() -> None:
    model = llama()
    plan = CachePlan.of(model, HeadPlan("streaming", first=2, recent=9))
    ids = torch.ones(1, 25, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with acutance.apply(model, plan), torch.no_grad():
            model(ids)
        with acutance.apply(model, dataclasses.replace(plan, search={"n": 25})), torch.no_grad():
            model(ids)
    longer = dataclasses.replace(plan, search={"n": 24})
    sentence = "searched on windows of 24 tokens, and the text has 25"
    with warnings.catch_warnings(record=True) as caught, acutance.apply(model, longer):
        warnings.simplefilter("always")
        with torch.no_grad():
            cache = model(ids[:, :20]).past_key_values
            for _ in range(6):  # the fifth token is beyond, and it is said once
                model(ids[:, :1], **{CACHE: cache})
    (warning,) = caught
    assert sentence in str(warning.message)
    with pytest.warns(UserWarning, match=sentence):
        acutance.judge(model, torch.ones(2, 25, dtype=torch.int64), {"plan": longer})


def test_a_plan_fits_the_model_with_and_without_its_head() -> None:
    model = llama()
    assert list(a_plan().check(model.model).layers) == [f"layers.{n}.self_attn" for n in range(2)]
    assert CachePlan.of(model.model).check(model).layers == CachePlan.of(model).layers


def test_a_plan_of_another_model_is_refused() -> None:
    message = r"for another model, LlamaForCausalLM, not for this LlamaForCausalLM: it has width 32"
    with pytest.raises(PlanError, match=message):
        a_plan().check(llama(hidden_size=64))


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    a_plan().save(path)
    path.write_text(path.read_text().replace('"residual": 0', '"residual": 1'))
    with pytest.raises(PlanError, match=r"plan.json contains no cache plan: it is damaged"):
        CachePlan.load(path)


@pytest.mark.parametrize(
    ("where", "value", "sentence"),
    [
        (("schema",), "acutance.law/1", "its schema must be"),
        (("extra",), 1, "wrong is extra"),
        (("search",), 1, "search must be an object"),
        (("search",), {}, "search.n must be at least 1"),
        (("group",), 12, "group must be a multiple of 8"),
        (("residual",), -1, "residual must be at least 0"),
        (("residual",), "1", "residual must be"),
        (("layers",), [], "layers must be an object"),
        (("layers",), {}, "must name the same layers"),
        (("layers", "model.layers.0.self_attn"), 1, "must have a list under 'plan'"),
        (("layers", "model.layers.0.self_attn", "heads"), 3, "query_heads must be a multiple"),
        (("layers", "model.layers.0.self_attn", "heads"), 1, "has 1 key heads, but the plan has 2"),
        (("layers", "model.layers.0.self_attn", "key_width"), 0, "key_width must be at least 1"),
        (("layers", "model.layers.0.self_attn", "width"), 1, "has an unknown field 'width'"),
        (("layers", "model.layers.0.self_attn", "plan", 0), "full", "must be a JSON object"),
        (("layers", "model.layers.0.self_attn", "plan", 0, "kind"), "half", "must be one of full"),
        (("layers", "model.layers.0.self_attn", "plan", 1, "key_bits"), 5, "one of 16, 8, 4, 2"),
        (("layers", "model.layers.0.self_attn", "plan", 0, "recent"), 1.5, "a whole number"),
        (("layers", "model.layers.0.self_attn", "plan", 0, "recent"), -5, "recent must be at"),
        (("model", "heads"), "4", "'heads' of 'model' must be"),
    ],
)
def test_a_field_that_does_not_fit_is_refused(
    tmp_path: Path, where: tuple[Any, ...], value: Any, sentence: str
) -> None:
    path = tmp_path / "plan.json"
    record = json.loads(json.dumps(a_plan().record()))
    place = record
    for name in where[:-1]:
        place = place[name]
    place[where[-1]] = value
    path.write_text(json.dumps(record))
    with pytest.raises(PlanError, match=rf"plan.json contains no cache plan: .*{sentence}"):
        CachePlan.load(path)


def test_the_embedded_decoder_can_be_planned() -> None:
    plan = CachePlan.of(decoder(), STREAMING)
    assert 0 < plan.share(4096) < 0.05
