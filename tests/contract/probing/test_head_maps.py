"""Rows of attention weights of named heads, against the model's own maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import acutance
from tests.versions import CACHE

transformers = pytest.importorskip("transformers")


def test_rows_are_those_of_the_models_own_maps(case: Any) -> None:
    with torch.no_grad():
        output = case.eager(**case.inputs, output_attentions=True)
    for kind, model in case.models.items():
        if case.statuses.get(kind) == "unverified":
            continue  # its weights are made outside any function that tells queries and keys
        with acutance.probe(model, maps={"*.3": [0, 4, 8]}) as probe, torch.no_grad():
            model(**case.inputs)
        maps = probe.maps["*.3"]
        modules = [layer.module for layer in probe.summary().layers]
        for index, (field, place) in enumerate(case.layers):
            expected, real = output[field][place], case.real[field]
            rows = [one for one in maps if one.module == modules[index]]
            there = [[i for i in (0, 4, 8) if i < real.shape[1] and each[i]] for each in real]
            assert [one.sequence for one in rows] == [b for b, some in enumerate(there) if some]
            for one in rows:
                assert list(one.positions) == there[one.sequence]
                want = expected[one.sequence, 3][list(one.positions)]
                torch.testing.assert_close(one.weights, want, rtol=1e-4, atol=1e-6)


def test_rows_of_a_sequence_that_is_decoded(llama_models: Any, random_tokens: Any) -> None:
    ids = random_tokens(2, 8)
    model = llama_models["sdpa"]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with acutance.probe(model, maps={(1, 2): slice(6, 12, 2), "layer 0 head 0": 0}) as probe:
        answer = model.generate(ids, **options)
    with torch.no_grad():
        maps = llama_models["eager"](answer[:, :-1], output_attentions=True).attentions
    found = probe.maps
    assert list(found) == ["layer 1 head 2", "layer 0 head 0"]
    assert [one.weights.tolist() for one in found["layer 0 head 0"]] == [[[1.0] + [0.0] * 7]] * 2
    for one in found["layer 1 head 2"]:
        assert one.positions == (6, 8, 10)
        want = maps[1][one.sequence, 2, [6, 8, 10], :11]
        torch.testing.assert_close(one.weights, want, rtol=1e-4, atol=1e-6)


def probed(minilm: Any, **options: Any) -> acutance.probing.Probe:
    model = minilm.models["sdpa"]
    probe = acutance.probe(model, **options)
    with probe, torch.no_grad():
        model(**minilm.inputs)
    return probe


@pytest.mark.parametrize("options", [{"max_rows": 3}, {"max_rows": 3, "provide": True}])
def test_rows_are_the_same_where_statistics_are_of_a_sample(minilm: Any, options: Any) -> None:
    asked: dict[str, Any] = {"maps": {"5.3": [0, 3, 5], "0.2": [1, 4]}, "tokenizer": Words()}
    every, sampled = probed(minilm, **asked), probed(minilm, **asked, **options)
    assert sampled.summary().unread == ()
    assert all(layer.rows <= 3 for layer in sampled.summary().layers)
    for name, maps in every.maps.items():
        for one, other in zip(maps, sampled.maps[name], strict=True):
            assert other.record() == one.record()
            torch.testing.assert_close(other.weights, one.weights)


def test_a_sample_of_a_continued_sequence_keeps_its_places(
    llama_models: Any, random_tokens: Any
) -> None:
    ids, model = random_tokens(2, 10), llama_models["sdpa"]
    asked: dict[str, Any] = {"maps": {(1, 2): [5, 7, 9]}, "tokenizer": Words()}
    records = []
    for options in ({}, {"max_rows": 2, "structure": True}):
        with torch.no_grad(), acutance.probe(model, **asked, **options) as probe:
            cache = model(ids[:, :6], use_cache=True).past_key_values
            model(ids[:, 6:], **{CACHE: cache}, use_cache=True)
        assert probe.summary().unread == ()
        records.append([one.record() for one in probe.maps["layer 1 head 2"]])
        assert [one.positions for one in probe.maps["layer 1 head 2"]] == [(5, 7, 9)] * 2
        for one in probe.maps["layer 1 head 2"]:
            assert one.tokens == tuple(f"word{i}" for i in ids[one.sequence].tolist())
    assert records[0] == records[1]


class Words:
    """A tokenizer that names ids."""

    all_special_ids = (101, 102)

    def decode(self, ids: list[int]) -> str:
        return f"word{ids[0]}"


def test_files_hold_what_is_small(minilm: Any, tmp_path: Path) -> None:
    probe = probed(minilm, maps={"5.3": [0, 5]}, tokenizer=Words())
    summary = probe.summary()
    first = probe.maps["5.3"][0]
    ids = minilm.inputs["input_ids"][0]
    assert first.tokens == tuple(f"word{i}" for i in ids.tolist())
    summary.save(tmp_path / "state.safetensors")
    loaded = acutance.load(tmp_path / "state.safetensors")
    assert len(loaded.maps) == len(summary.maps) == 7
    for one, other in zip(loaded.maps, summary.maps, strict=True):
        assert one.record() == other.record()
        assert torch.equal(one.weights, other.weights)
    assert summary.to_dict()["maps"][0]["weights"] == first.weights.tolist()
    assert [one.sequence for one in summary.merge(loaded).maps] == [*range(7), 7]
    wide = torch.zeros(2, 1 << 18)
    large = [type(first)("5.3", "a", 3, 0, (0, 1), wide)]
    big = type(summary)(summary.layers, summary.metrics, summary.moments, maps=tuple(large))
    big.save(tmp_path / "large.safetensors")
    assert acutance.load(tmp_path / "large.safetensors").about["maps"] == (
        "1 maps were too large for the state"
    )
    assert big.to_dict()["maps_left_out"] == 1


@pytest.mark.parametrize(
    ("maps", "error", "why"),
    [
        ({}, TypeError, "maps must map heads to their rows"),
        ({"head 3": 0}, ValueError, "as 'layer 5 head 3', '5.3' or"),
        (
            {"9.3": 0},
            ValueError,
            "maps=9 is not a layer of the model: it has 6 blocks, 0 to 5",
        ),
        ({"2.12": 0}, ValueError, "head 12.*12"),
        ({"2.3": range(65)}, ValueError, "at most 64 rows .* '2.3' names 65"),
        ({"2.3": slice(3, None)}, ValueError, "must have an end"),
        ({"2.3": [-1]}, ValueError, "must be integers from 0 to 9223372036854775807, got"),
        ({"2.3": []}, ValueError, "must be integers from 0"),
        ({"2.3": 10**30}, ValueError, "must be integers from 0"),
        ({"2.3": "0"}, TypeError, "integers or a slice"),
    ],
)
def test_bad_maps_are_refused(minilm: Any, maps: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        acutance.probe(minilm.eager, maps=maps)


def test_damaged_files_are_refused(minilm: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    header, tensors = probed(minilm, maps={"5.3": [0, 5]}).summary().parts()
    changes: list[tuple[dict[str, str], dict[str, Any], str]] = [
        ({"maps": "[]"}, {}, "0 maps and 7 arrays"),
        (
            {"maps": header["maps"].replace('"head"', '"tail"', 1)},
            {},
            "with the fields name, module",
        ),
        ({}, {"maps.0": -tensors["maps.0"]}, "between 0 and 1"),
        ({}, {"maps.0": tensors["maps.0"][:1].clone()}, r"must have shape \(2, keys\)"),
    ]
    for headers, arrays, why in changes:
        path = tmp_path / "state.safetensors"
        save_file(tensors | arrays, path, metadata=header | headers)
        with pytest.raises(ValueError, match=why):
            acutance.load(path)


def test_rows_that_no_sequence_has_are_listed() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad(), acutance.probe(model, maps={"0.1": [2, 99], "0.0": [99]}) as probe:
        model(*[torch.randn(1, 5, 8)] * 3)
    assert [one.positions for one in probe.maps["0.1"]] == [(2,)]
    assert probe.summary().unread == ("maps: no sequence has row 99 of '0.0'",)


def test_a_row_that_only_the_longer_sequence_of_a_batch_has() -> None:
    model, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[3], [5]])
    with torch.no_grad(), acutance.probe(model, maps={"0.1": 4}) as probe:
        model(x, x, x, key_padding_mask=padding)
    assert [(one.sequence, one.positions) for one in probe.maps["0.1"]] == [(1, (4,))]
    assert probe.summary().unread == ()


@pytest.mark.parametrize("asked", [(0, 1), "0.1", "layer 0 head 1"])
def test_a_head_is_found_by_any_of_its_names(asked: Any) -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad(), acutance.probe(model, maps={asked: [2]}) as probe:
        model(*[torch.randn(1, 5, 8)] * 3)
    for name in ((0, 1), "0.1", "layer 0 head 1"):
        assert [one.positions for one in probe.maps[name]] == [(2,)]
    for name in ((0, 0), "0.0", "nothing"):
        with pytest.raises(KeyError, match="0" if name != "nothing" else "nothing"):
            probe.maps[name]
