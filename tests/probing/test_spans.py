"""Weight on named spans of the input, against attention maps that are really formed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance
from acutance.probing.settings import Span
from acutance.summary.readouts.spans import Spans

transformers = pytest.importorskip("transformers")

TWO: dict[str, Span] = {"system": (0, 3), "text": (3, 7)}


def labels_of(spans: Sequence[Sequence[tuple[int, int]]], length: int) -> Tensor:
    """(B or 1, length): number of each token's span, of spans given for each sequence."""
    labels = torch.full((len(spans[0]), length), len(spans))
    for index, span in enumerate(spans):
        for row, (start, stop) in enumerate(span):
            labels[row, start:stop] = index
    return labels


def table(
    maps: Tensor, queries: Tensor | None, keys: Tensor, counted: Tensor, spans: int
) -> Tensor:
    """Mean weight of rows by span of query and key, (heads, K + 2, K + 1), in float64.

    Args:
        maps: (B, heads, L, S).
        queries: (B or 1, L), spans of the queries; None where they are of another sequence.
        keys: (B or 1, S), spans of the keys.
        counted: boolean (B, L), rows that count.
        spans: K.
    """
    batch, heads, length, _ = maps.shape
    queries = torch.full((1, length), spans) if queries is None else queries
    mean = torch.zeros(heads, spans + 2, spans + 1, dtype=torch.float64)
    for kind in range(spans + 2):
        rows = counted & (torch.tensor(True) if kind > spans else queries == kind)
        for column in range(spans + 1):
            on = (keys == column).expand(batch, -1)[:, None, None]
            weight = torch.where(on, maps.double(), 0.0).sum(-1)
            weight = torch.where(rows[:, None], weight, 0.0).sum((0, 2))
            mean[:, kind, column] = weight / rows.sum().clamp(min=1)
    return mean


def spans_of(summary: acutance.HeadSummary, layer: int) -> Spans:
    assert summary.spans is not None
    start = sum(one.heads for one in summary.layers[:layer])
    return summary.spans.heads(start, start + summary.layers[layer].heads)


# -- transformers' models -------------------------------------------------------------------------


def test_weights_are_those_of_the_models_own_maps(case: Any) -> None:
    with torch.no_grad():
        output = case.eager(**case.inputs, output_attentions=True)
    for model in case.models.values():
        with acutance.probe(model, spans=TWO) as probe, torch.no_grad():
            model(**case.inputs)
        summary = probe.summary()
        for index, (field, place) in enumerate(case.layers):
            maps = output[field][place]
            found = spans_of(summary, index)
            if field == "decoder_attentions":  # its keys are no part of the input
                assert not found.rows.any()
                continue
            keys = labels_of([[(0, 3)], [(3, 7)]], maps.shape[3])
            queries = None if field == "cross_attentions" else keys
            seen = maps.sum(-1).amax(1) > 0
            expected = table(maps, queries, keys, case.real[field] & seen, 2)
            torch.testing.assert_close(found.mean, expected, rtol=1e-4, atol=1e-5)
            assert int(found.rows[0, -1]) == summary.layers[index].rows
            if not case.sinks:
                there = found.rows > 0
                assert (found.mean.sum(-1)[there] - 1).abs().max() < 1e-5


def even_maps(maps: Tensor) -> Tensor:
    seen = (maps > 0).double()
    return seen / seen.sum(-1, keepdim=True).clamp(min=1)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_even_weights_follow_the_masks(kind: str, gpt2_models: Any, left_padding: Any) -> None:
    ids = torch.arange(3, 25).view(2, 11)
    mask = left_padding([11, 6], 11)
    with torch.no_grad():
        maps = gpt2_models["eager"](ids, attention_mask=mask, output_attentions=True).attentions
    given: dict[str, Span] = {"system": [(0, 3), (5, 8)], "text": [(3, 11), (8, 11)]}
    model = gpt2_models[kind]
    with acutance.probe(model, spans=given) as probe, torch.no_grad():
        model(ids, attention_mask=mask)
    labels = labels_of([[(0, 3), (5, 8)], [(3, 11), (8, 11)]], 11)
    for layer in range(3):
        found = spans_of(probe.summary(), layer)
        even = table(even_maps(maps[layer]), labels, labels, mask.bool(), 2)
        torch.testing.assert_close(found.even, even)
        expected = table(maps[layer], labels, labels, mask.bool(), 2)
        torch.testing.assert_close(found.mean, expected, rtol=1e-4, atol=1e-5)
        assert found.rows[0].tolist() == [6, 11, 0, 17]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_name", ["llama", "mistral"])
def test_spans_are_places_in_the_input_while_decoding(
    model_name: str, cache: str, request: pytest.FixtureRequest, random_tokens: Any
) -> None:
    models = request.getfixturevalue("llama_models") if model_name == "llama" else _windowed()
    ids = random_tokens(2, 8)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    spans: dict[str, Span] = {"system": (0, 2), "prompt": (2, 8), "answer": (8, None)}
    model = models["sdpa"]
    with acutance.probe(model, spans=spans) as probe:
        answer = model.generate(
            ids, **options, cache_implementation=None if cache == "dynamic" else cache
        )
    with torch.no_grad():
        maps = models["eager"](answer[:, :-1], output_attentions=True).attentions
    labels = labels_of([[(0, 2)], [(2, 8)], [(8, 20)]], answer.shape[1] - 1)
    counted = torch.ones(2, answer.shape[1] - 1, dtype=torch.bool)
    for layer, expected in enumerate(maps):
        found = spans_of(probe.summary(), layer)
        expected = table(expected, labels, labels, counted, 3)
        torch.testing.assert_close(found.mean, expected, rtol=1e-4, atol=1e-5)
        assert found.rows[0].tolist() == [4, 12, 10, 0, 26]


def _windowed() -> dict[str, Any]:
    config = transformers.MistralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=5,
        max_position_embeddings=64,
    )
    models = {}
    for kind in ("eager", "sdpa"):
        torch.manual_seed(0)
        model = transformers.MistralForCausalLM._from_config(config, attn_implementation=kind)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(8.0)
        models[kind] = model.eval()
    return models


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_model_is_weighed_in_float32(dtype: torch.dtype, llama_models: Any) -> None:
    ids = torch.arange(3, 25).view(2, 11)
    model = llama_models["sdpa"].to(dtype)
    with acutance.probe(model, spans=TWO) as probe, torch.no_grad():
        model(ids)
    mean = spans_of(probe.summary(), 0).mean
    total = mean.sum(-1)[spans_of(probe.summary(), 0).rows > 0]
    assert (total - 1).abs().max() < 1e-6


def test_minilm_by_mask_for_each_sequence(minilm: Any) -> None:
    ids = minilm.inputs["input_ids"]
    real = minilm.inputs["attention_mask"].bool()
    places = torch.arange(ids.shape[1]).expand_as(ids)
    first = (places > 0) & (places < real.sum(1, keepdim=True) // 2)
    spans: dict[str, Span] = {"opening": (0, 1), "first half": first}
    labels = torch.where(first, 1, 2)
    labels[:, 0] = 0
    with torch.no_grad():
        maps = minilm.eager(**minilm.inputs, output_attentions=True).attentions
    with acutance.probe(minilm.models["sdpa"], spans=spans) as probe, torch.no_grad():
        minilm.models["sdpa"](**minilm.inputs)
    for layer in range(6):
        found = spans_of(probe.summary(), layer)
        expected = table(maps[layer], labels, labels, real, 2)
        torch.testing.assert_close(found.mean, expected, rtol=1e-4, atol=1e-5)
        assert int(found.groups[0, -1]) == len(ids)


# -- a model in float64 ---------------------------------------------------------------------------


class Plain(nn.Module):
    """Causal attention in float64 by :func:`scaled_dot_product_attention`, or by hand."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.num_heads, self.by_hand = 4, by_hand
        self.queries = nn.Linear(16, 16, bias=False, dtype=torch.float64)
        self.keys = nn.Linear(16, 16, bias=False, dtype=torch.float64)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            part.view(*x.shape[:2], 4, 4).transpose(1, 2)
            for part in (self.queries(x), self.keys(x), x)
        )
        return query, key, value

    def weights(self, x: Tensor) -> Tensor:
        query, key, _ = self.heads(x)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return (query @ key.mT / 2).masked_fill(hidden, -torch.inf).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        if self.by_hand:
            return self.weights(x) @ value
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def plain(by_hand: bool = False) -> Plain:
    torch.manual_seed(0)
    return Plain(by_hand).eval()


def inputs(batch: int = 3, length: int = 30, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(batch, length, 16, dtype=torch.float64, generator=generator)


def probed(*batches: Tensor, spans: Any = None, **options: Any) -> acutance.HeadSummary:
    model = plain(options.pop("by_hand", False))
    spans = TWO if spans is None else spans
    with acutance.probe(model, spans=spans, **options) as probe, torch.no_grad():
        for x in batches:
            model(x)
    return probe.summary()


@pytest.mark.parametrize(
    "options", [{}, {"by_hand": True}, {"provide": True}, {"structure": True}], ids=str
)
def test_float64_is_exact(options: dict[str, Any]) -> None:
    x = inputs()
    with torch.no_grad():
        maps = plain().weights(x)
    found = probed(x, **options).spans
    assert found is not None
    labels = labels_of([[(0, 3)], [(3, 7)]], 30)
    counted = torch.ones(3, 30, dtype=torch.bool)
    torch.testing.assert_close(
        found.mean, table(maps, labels, labels, counted, 2), rtol=1e-12, atol=0
    )
    even = table(even_maps(maps), labels, labels, counted, 2)
    torch.testing.assert_close(found.even, even, rtol=1e-12, atol=0)


def test_the_error_is_that_of_the_means_of_sequences() -> None:
    x = inputs(5)
    found = probed(x).spans
    with torch.no_grad():
        means = plain().weights(x)[:, :, :, :3].sum(-1).mean(2)
    assert found is not None
    torch.testing.assert_close(found.error[:, -1, 0], means.std(0) / math.sqrt(5))
    alone = probed(x[:1]).spans
    assert alone is not None
    assert alone.error.isnan().all()


def test_batches_and_summaries_add_up() -> None:
    x, y = inputs(), inputs(2, 12, seed=2)
    both, parts = probed(x, y), [probed(x), probed(y)]
    merged = parts[0].merge(parts[1])
    for one in (both.spans, merged.spans):
        assert one is not None
        for name, array in one.tensors().items():
            other = probed(y).merge(probed(x)).spans
            assert other is not None
            torch.testing.assert_close(array, other.tensors()[name], msg=name)
    assert merged.spans is not None
    assert merged.spans.rows[0].tolist() == [15, 20, 23 * 3 + 5 * 2, 114]
    lacking = parts[0].merge(
        replace(parts[1], optional_parts=probed(y, profile=False).optional_parts)
    )
    assert lacking.spans is not None
    assert lacking.profile is None


def test_heads_and_rows_that_are_read_alone() -> None:
    x = inputs()
    whole, some = probed(x).spans, probed(x, heads=[1, 3]).spans
    assert whole is not None
    assert some is not None
    assert torch.equal(some.mean, whole.mean[[1, 3]])
    drawn = probed(x, max_rows=45).spans
    assert drawn is not None
    assert drawn.rows[:, -1].tolist() == [45] * 4
    assert (drawn.mean[:, -1] - whole.mean[:, -1]).abs().max() < 0.1


def test_files_hold_them(tmp_path: Path) -> None:
    summary = probed(inputs())
    summary.save(tmp_path / "state.safetensors")
    loaded = acutance.load(tmp_path / "state.safetensors")
    assert loaded.spans is not None
    assert summary.spans is not None
    assert loaded.spans.names == ("system", "text")
    for name, array in summary.spans.tensors().items():
        assert torch.equal(loaded.spans.tensors()[name], array), name
    summary.to_json(tmp_path / "all.json")
    record = json.loads((tmp_path / "all.json").read_text())["heads"][2]["spans"]
    assert list(record) == ["system", "text", "other", "all"]
    on = record["all"]["weight_on"]["system"]
    assert on["mean"] == pytest.approx(float(summary.spans.weight("system")[2]))
    assert on["error"] == pytest.approx(float(summary.spans.error[2, -1, 0]))
    columns = summary.columns()
    assert columns["weight_on_system"] == summary.spans.weight("system").tolist()
    assert {"weight_on_text_even", "weight_on_other_error"} <= set(columns)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    header, tensors = probed(inputs()).parts()
    changes: list[tuple[dict[str, str], dict[str, Tensor], str]] = [
        ({"spans": '["system"]'}, {}, "spans must have shape"),
        ({"spans": '["system", "system"]'}, {}, "different names"),
        ({"spans": '["system", 3]'}, {}, "names"),
        ({"spans": "{}"}, {}, "must be a list"),
        ({}, {"spans.mean": -tensors["spans.mean"]}, "invalid value"),
    ]
    for headers, arrays, why in changes:
        path = tmp_path / "state.safetensors"
        save_file(tensors | arrays, path, metadata=header | headers)
        with pytest.raises(ValueError, match=why):
            acutance.load(path)


def test_spans_of_the_next_batch() -> None:
    x, y, model = inputs(2), inputs(3, 12, seed=2), plain()
    with acutance.probe(model, spans={"image": [(0, 4), (5, 9)]}) as probe, torch.no_grad():
        model(x)
        mask = torch.zeros(3, 12, dtype=torch.bool)
        mask[:, 2:5] = True
        probe.spans = {"image": mask}
        model(y)
    found = probe.summary().spans
    assert found is not None
    assert found.rows[0].tolist() == [4 * 2 + 3 * 3, 26 * 2 + 9 * 3, 96]
    assert probe.spans == {"image": mask}
    with pytest.raises(ValueError, match="same names for every batch, image, got picture"):
        probe.spans = {"picture": (0, 3)}
    with pytest.raises(ValueError, match="opened with spans="):
        acutance.probe(model).spans = TWO


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "error", "why"),
    [
        ({}, ValueError, "must name 1 to 32 parts"),
        ([(0, 3)], TypeError, "map names to ranges"),
        ({"other": (0, 3)}, ValueError, "must be text other than"),
        ({"": (0, 3)}, ValueError, "must be text other than"),
        (
            {"a": (-1, 3)},
            ValueError,
            r"'a' must have 0 <= start < stop, got \(-1, 3\)",
        ),
        ({"a": (3, 3)}, ValueError, r"got \(3, 3\)"),
        ({"a": "0:3"}, TypeError, "'a' must be a pair"),
        ({"a": (0, 3, 5)}, TypeError, "'a' must be a pair"),
        ({"a": []}, TypeError, "'a' must be a pair"),
        (
            {"a": (0, 4), "b": (3, 5)},
            ValueError,
            "must not overlap: 'b' and a span before it both contain token 3",
        ),
        ({"a": (2, None), "b": (9, 12)}, ValueError, "both contain token 9"),
        ({"a": [(0, 4), (0, 2)], "b": (2, 5)}, ValueError, "token 2 of sequence 0"),
        ({"a": [(0, 4)] * 2, "b": [(5, 6)] * 3}, ValueError, "'a' for 2, 'b' for 3"),
        (
            {"a": torch.zeros(2, 5)},
            ValueError,
            r"boolean mask \(B, S\), got \(2, 5\) of torch.float32",
        ),
        ({"a": torch.zeros(2, 5).bool()}, ValueError, "contains no token"),
        (
            {"a": torch.ones(2, 5).bool(), "b": torch.ones(2, 6).bool()},
            ValueError,
            "the same length, got 5, 6",
        ),
        ({"a": torch.ones(2, 5).bool(), "b": (1, 2)}, ValueError, "token 1 of sequence 0"),
    ],
)
def test_bad_spans_are_refused(spans: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        acutance.probe(plain(), spans=spans)


def test_a_span_beyond_the_sequence_is_told_at_the_end() -> None:
    for spans, end in (({"a": (0, 31)}, "31"), ({"a": (0, 2), "b": (30, None)}, "the end")):
        with pytest.raises(
            ValueError, match=f"tokens [0-9]+ to {end}, but the longest sequence has 30"
        ):
            probed(inputs(), spans=spans)
    assert probed(inputs(), inputs(1, 12), spans={"a": (0, 30)}).spans is not None


def test_a_batch_of_another_size_is_listed() -> None:
    model = plain()
    for spans, why in (
        ({"a": [(0, 3), (1, 4)]}, "spans are given for 2 sequences, but the call has 3"),
        ({"a": torch.ones(3, 9).bool()}, "spans are given for 9 tokens, but the call has 30 keys"),
    ):
        with acutance.probe(model, spans=spans) as probe, torch.no_grad():  # type: ignore[arg-type]
            model(inputs())
        (text,) = probe.unread
        assert text == f"Plain: its weight on the spans is not known: {why}"
        found = probe.summary().spans
        assert found is not None
        assert not found.rows.any()
        assert probe.summary().mean("entropy").isfinite().all()


def test_summaries_of_other_spans_do_not_merge() -> None:
    left, right = probed(inputs()), probed(inputs(), spans={"system": (0, 3)})
    with pytest.raises(
        ValueError, match="same spans, got system, text in one and system in the other"
    ):
        left.merge(right)
    assert left.spans is not None
    with pytest.raises(
        ValueError, match="there is no span named 'sys': choose from system, text, other"
    ):
        left.spans.weight("sys")


def test_a_call_without_rows_is_a_call() -> None:
    layer, x = nn.MultiheadAttention(8, 1, batch_first=True).eval(), torch.randn(2, 6, 8)
    with acutance.probe(layer, spans={"start": (0, 1)}) as probe:
        for tokens in (x[:, :0], x):
            layer(tokens, tokens, tokens)
    summary = probe.summary()
    assert (summary.layers[0].calls, summary.unread) == (2, ())
