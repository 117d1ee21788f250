"""Served rows: what the vLLM reader records equals the statistics of whole sequences."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import acutance
from acutance.serving import CacheLayout, ServedRows, register
from acutance.serving.vllm_plugin import Rows, Runs, VllmReader
from tests.serving.vllm_stand_in import BLOCK, HEADS, WIDTH, Attention, Engine, Impl

LENGTHS, PROMPTS = [40, 21, 9], [33, 17, 1]


def serve(
    impls: list[Any], every: int = 1, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """Run layers with these implementations under a reader, and return both."""
    served, engine = prepare(impls, every, dtype, **options)
    engine.run()
    return served, engine


def prepare(
    impls: list[Any], every: int = 1, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[ServedRows, Engine]:
    settings = {name: options.pop(name) for name in ("most_bytes",) if name in options}
    reader = VllmReader(ServedRows(every=every), options.pop("folder", None), 1e9, **settings)

    class Layer(Attention):
        pass

    reader.install(Layer)
    layers = [
        Layer(f"model.layers.{i}.self_attn.attn", impl, dtype) for i, impl in enumerate(impls)
    ]
    lengths, prompts = options.pop("lengths", LENGTHS), options.pop("prompts", PROMPTS)
    return reader.served, Engine(layers, list(lengths), list(prompts), **options)


def expected(
    engine: Engine, layer: int, without: set[tuple[int, int]] | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Means of metrics by head, over all rows that the engine computed, except some."""
    stats = [
        acutance.row_statistics(
            query.transpose(0, 1)[None].double(), key.transpose(0, 1)[None].double(),
            is_causal=True, enable_gqa=True, **options,
        )
        for query, key, _ in engine.inputs[layer]
    ]  # fmt: skip
    rows = [place for place in engine.computed if place not in (without or ())]
    return {
        name: torch.stack([stats[i][name][0, :, at].double() for i, at in rows]).mean(0)
        for name in ("entropy", "effective_keys", "max_logit", "sink_mass", "n_keys")
    }


def check(served: ServedRows, engine: Engine, **options: Any) -> None:
    """All rows that the engine computed were read, and they are right."""
    summary, layers = served.summary(), len(engine.layers)
    assert summary.unread == ()
    assert {layer.status for layer in summary.layers} == {"checked"}
    assert {layer.rows for layer in summary.layers} == {len(engine.computed)}
    for layer in range(layers):
        heads = slice(layer * HEADS, (layer + 1) * HEADS)
        for name, value in expected(engine, layer, **options).items():
            assert_close(summary.mean(name)[heads], value, rtol=1e-4, atol=1e-5)


SINKS, SLOPES = torch.tensor([0.5, 1.0, -1.0, 2.0]), torch.tensor([0.5, 0.25, 0.1, 0.01])


@pytest.mark.parametrize(
    ("impl", "options"),
    [
        ({}, {}),
        ({"window": 7}, {"window": 7}),
        ({"window": (6, 0)}, {"window": 7}),
        ({"window": (-1, -1), "softcap": 3.0}, {"softcap": 3.0}),
        ({"sinks": SINKS}, {"sinks": SINKS.double()}),
        ({"slopes": SLOPES}, {"alibi_slopes": SLOPES.double()}),
    ],
)
def test_all_rows_are_those_of_whole_sequences(impl: dict[str, Any], options: Any) -> None:
    served, engine = serve([Impl(**impl), Impl(**impl), Impl()])
    summary = served.summary()
    assert summary.unread == ()
    assert {layer.status for layer in summary.layers} == {"checked"}
    assert {layer.rows for layer in summary.layers} == {sum(LENGTHS)}
    assert summary.layers[0].module == "model.layers.0.self_attn"
    for layer in range(3):
        wanted = expected(engine, layer, **(options if layer < 2 else {}))
        heads = slice(layer * HEADS, (layer + 1) * HEADS)
        for name, value in wanted.items():
            assert_close(summary.mean(name)[heads], value, rtol=1e-4, atol=1e-5)


MANY = {"lengths": [70, 41, 52, 20, 64, 33], "prompts": [33, 17, 1, 19, 40, 32]}


@pytest.mark.parametrize(
    "options", [{}, {"chunk": 10}, {"prefix": 16, "batch": 3}, {"latest_first": True}]
)
def test_sequences_end_at_any_time_and_nothing_is_lost(options: dict[str, Any]) -> None:
    served, engine = serve([Impl(), Impl()], **(MANY | {"batch": 2} | options))
    check(served, engine)


def test_sequences_that_share_a_prefix_are_not_confused() -> None:
    served, engine = prepare([Impl()], lengths=[60, 60, 60], prompts=[32, 33, 40], prefix=32)
    engine.batch = 1
    engine.step()  # the first prompt is in the cache when the others begin
    engine.batch = 3
    engine.run()
    assert (1, 0) not in engine.computed
    check(served, engine)


def test_a_preempted_sequence_is_computed_again() -> None:
    served, engine = prepare([Impl()], **MANY, batch=3)
    for _ in range(5):
        engine.step()
    engine.stop(0, again=True)
    engine.run()
    assert engine.computed.count((0, 36)) == 2
    check(served, engine)


def test_rows_whose_keys_are_overwritten_unseen_are_not_read() -> None:
    options = {"lengths": [40, 20], "prompts": [33, 17], "batch": 1}
    served, engine = serve([Impl(), Impl()], latest_first=True, fused=True, **options)
    summary = served.summary()
    lost = {(0, at) for at in range(33, 40)}  # they waited for row 47
    assert {(layer.rows, layer.skipped) for layer in summary.layers} == {(53, 7)}
    for layer in range(2):
        heads = slice(layer * HEADS, (layer + 1) * HEADS)
        for name, value in expected(engine, layer, lost).items():
            assert_close(summary.mean(name)[heads], value, rtol=1e-4, atol=1e-5)


def test_blocks_of_a_layer_are_compared_with_its_blocks_only() -> None:
    options = {"lengths": [38, 20], "prompts": [33, 17], "batch": 1}
    served, engine = serve([Impl(), Impl(block=8)], latest_first=True, fused=True, **options)
    summary = served.summary()
    lost = {(0, at) for at in range(33, 38)}  # they waited for row 39
    assert summary.unread == ()
    assert {(layer.rows, layer.skipped) for layer in summary.layers} == {(53, 5)}
    for layer in range(2):
        heads = slice(layer * HEADS, (layer + 1) * HEADS)
        for name, value in expected(engine, layer, lost).items():
            assert_close(summary.mean(name)[heads], value, rtol=1e-4, atol=1e-5)


def test_rows_do_not_wait_where_graphs_replay_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    served, engine = prepare([Impl(), Impl()], **MANY, batch=2, latest_first=True)
    engine.step()
    with monkeypatch.context() as patch:  # a CUDA graph is captured
        for name in ("is_initialized", "is_current_stream_capturing"):
            patch.setattr(torch.cuda, name, lambda: True)
        engine.step()
    captured, engine.graphs = set(engine.computed[-2:]), True
    engine.run()
    unseen = engine.replayed | captured
    rows = len(engine.computed) - len(unseen)
    summary = served.summary()
    assert summary.unread == ("some passes are replayed by CUDA graphs and are not read",)
    assert {layer.rows for layer in summary.layers} == {rows}
    assert any(at >= MANY["prompts"][i] for i, at in set(engine.computed) - unseen)
    for layer in range(2):
        heads = slice(layer * HEADS, (layer + 1) * HEADS)
        for name, value in expected(engine, layer, unseen).items():
            assert_close(summary.mean(name)[heads], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [20, 32, 33])
def test_blocks_outside_of_a_window_may_be_freed(window: int) -> None:
    options = {"lengths": [100, 90, 80], "prompts": [3, 40, 50], "window": window}
    served, engine = serve([Impl(window), Impl(window)], latest_first=True, **options)
    check(served, engine, window=window)


def test_a_summary_in_between_has_all_rows_so_far() -> None:
    served, engine = prepare([Impl(), Impl()], **MANY, batch=2)
    for _ in range(12):
        engine.step()
        check(served, engine)
    engine.run()
    check(served, engine)


def test_a_summary_during_a_pass_loses_nothing() -> None:
    class Asking(Impl):
        served: ServedRows

        def forward(self, *args: Any, **options: Any) -> torch.Tensor:
            with contextlib.suppress(ValueError):  # no row yet
                summary = self.served.summary()
                assert len({layer.rows for layer in summary.layers}) == 1
            return super().forward(*args, **options)

    asking = Asking()
    served, engine = prepare([Impl(), asking, Impl()], **MANY, batch=2)
    asking.served = served
    engine.run()
    check(served, engine)


def test_little_memory_is_enough() -> None:
    check(*serve([Impl(), Impl()], **MANY, batch=2, most_bytes=1))


def test_every_row_has_the_same_chance() -> None:
    served, total = ServedRows(every=4), 800
    hits = torch.zeros(3, 100)
    for block in (16, 64):
        for _ in range(total):
            runs = Runs(served.draw)
            for step in range(35):  # prompts of 40, 1 and 17 tokens, then 34 decoded
                first = [(0, 40), (0, 1), (0, 17)]
                now = first if step == 0 else [(of[1] + step - 1, 1) for of in first]
                places = [(1000 * i + at, count) for i, (at, count) in enumerate(now)]
                rows = [
                    Rows(at, count, slot, slot + count - 1)
                    for (at, count), (slot, _) in zip(now, places, strict=True)
                ]
                for _, sequence, start, count in runs.follow(rows, block)[0]:
                    at = now[sequence][0] + start - sum(count for _, count in now[:sequence])
                    hits[sequence, at : at + count] += 1
    for sequence, length in enumerate((74, 35, 51)):
        assert float((hits[sequence, :length] / (2 * total) - 0.25).abs().max()) < 0.05


def test_an_engine_that_forgets_a_window_is_caught() -> None:
    served, _ = serve([Impl(window=7, forgets_window=True), Impl(window=7)])
    summary = served.summary()
    assert [layer.status for layer in summary.layers] == ["mismatch", "checked"]
    assert len(summary.unread) == 1
    assert summary.unread[0].startswith("model.layers.0.self_attn: do not trust its rows")


def test_a_cache_that_cannot_be_read_is_named_and_the_engine_runs_on() -> None:
    served, _ = serve([Impl()], dtype=torch.int8)
    assert served.unread == [
        "model.layers.0.self_attn: a cache of shape (64, 2, 16, 32) and torch.int8 does not "
        "consist of blocks of 2 heads with keys of width 16 and values of 16"
    ]
    with pytest.raises(ValueError, match="no row of attention was read yet"):
        served.summary()


def test_metadata_of_another_form_is_named_and_the_engine_runs_on() -> None:
    reader = VllmReader(ServedRows(every=1), None, 1e9)
    layer = Attention("model.layers.0.self_attn.attn", Impl())
    forward = reader.wrap(layer, lambda *args, **options: "output")
    query = torch.zeros(1, HEADS, WIDTH)
    for _ in range(2):
        assert forward(layer, query, query, query, layer.cache, object()) == "output"
    (sentence,) = reader.served.unread
    assert sentence.startswith("model.layers.0.self_attn: AttributeError:")


def test_a_layer_that_cannot_be_wrapped_is_named_and_the_model_is_loaded() -> None:
    served, engine = serve([Impl(window="wide", forgets_window=True), Impl()])
    summary = served.summary()
    (sentence,) = summary.unread
    assert sentence.startswith("model.layers.0.self_attn: TypeError:")
    assert [layer.rows for layer in summary.layers] == [len(engine.computed)]


def test_a_share_of_the_rows_is_read() -> None:
    served, engine = serve([Impl(), Impl()], every=3, **MANY)
    summary = served.summary()
    read = summary.layers[0].rows
    assert 0 < read < len(engine.computed)
    assert summary.layers[0].skipped == len(engine.computed) - read
    assert summary.sampled
    assert bool((summary.sampling_error("entropy") > 0).all())


@pytest.mark.parametrize("order", ["plain", "interleaved", "shuffled"])
def test_layouts_are_discovered(order: str) -> None:
    heads, tokens, width = 3, 20, 10
    shuffle = torch.randperm(tokens * width, generator=torch.Generator().manual_seed(0))

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: Any) -> None:
        kept = torch.zeros(tokens, heads, width, dtype=key.dtype)
        kept[slots] = key
        kept = kept.transpose(0, 1)
        if order == "interleaved":
            kept = kept.reshape(heads, tokens // 4, 4, width).transpose(2, 3)
        kept = kept.reshape(heads, -1)
        cache[0, :, 0] = kept[:, shuffle] if order == "shuffled" else kept
        cache[0, :, 1] = value.transpose(0, 1).flatten(1)

    cache = torch.zeros(4, heads, 2, tokens * width, dtype=torch.bfloat16)
    layout = CacheLayout.discover(write, cache, heads=heads, width=width, value_width=width)
    key, value = torch.randn(2, tokens, heads, width).to(torch.bfloat16)
    write(key, value, cache[2:3], torch.arange(tokens))
    for part, wanted in (("key", key), ("value", value)):
        out = torch.empty(heads, tokens, width, dtype=torch.bfloat16)
        layout.read(cache, torch.tensor([2]), out, part)
        assert torch.equal(out, wanted.transpose(0, 1))


def test_a_layout_that_loses_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="do not arrive in it one by one"):
        CacheLayout.discover(
            lambda key, value, cache, slots: None,
            torch.zeros(2, BLOCK, 2, WIDTH),
            heads=1, width=WIDTH, value_width=WIDTH,
        )  # fmt: skip


def test_the_plugin_does_nothing_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACUTANCE_VLLM_FOLDER", raising=False)
    register()  # imports no vLLM
    monkeypatch.setenv("ACUTANCE_VLLM_FOLDER", "somewhere")
    monkeypatch.setenv("ACUTANCE_VLLM_EVERY", "0")
    with pytest.raises(ValueError, match="ACUTANCE_VLLM_EVERY must be a positive whole number"):
        register()


def test_unknown_metrics_are_refused() -> None:
    with pytest.raises(ValueError, match="metrics must be among"):
        ServedRows(metrics=["noise_gain"])
