"""The comparison itself: what is read, how it is predicted, what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from acutance.comparison import COMPARED, DEFAULT_MECHANISMS, Step, compare, pick
from acutance.mechanisms import MECHANISMS
from acutance.probing import QueryKeySample


@pytest.mark.few(8)
@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_is_read_in_full(name: str) -> None:
    found = compare(name, n=16, d=8, heads=3, batch=2, samples=4, is_causal=True, costs=False)
    assert found.complete
    assert found.mechanisms == (name,)
    assert found.lengths == (16,)
    for result in found.of(name):
        assert tuple(result.readings) == tuple(COMPARED)
        for reading in result.readings.values():
            missing = math.isnan(reading.measured) or math.isnan(reading.predicted)
            assert missing == bool(reading.why)
            assert math.isnan(reading.predicted) == (reading.kind == "")
        keys = result["effective_keys"]
        assert 1 <= keys.measured <= result.n
        assert (MECHANISMS[name].theory.law is None) == math.isnan(keys.predicted)
        assert math.isnan(result.seconds)


def test_mechanisms_see_the_same_rows() -> None:
    found = compare(["scaled_dot", "exp", "exp_l2"], n=48, d=8, heads=2, costs=False)
    first, *others = (found[name, 48]["effective_keys"].measured for name in found.mechanisms)
    assert others == pytest.approx([first, first], rel=1e-5)


def test_linear_attention_of_given_keys_is_an_identity() -> None:
    draw = torch.Generator().manual_seed(3)
    part = torch.randn(3, 40, 8, generator=draw)
    sample = QueryKeySample(part, 2 * part.roll(1, 1), part, ("a", "b", "c"), is_causal=False)
    for name in ("linear_elu1", "cosformer"):
        found = compare(name, n=40, source=sample, costs=False)[name, 40]["sparsity"]
        assert found.kind == "fixed"
        assert found.deviation == pytest.approx(0, abs=1e-5)


def test_time_is_of_one_head_with_n_rows() -> None:
    found = compare(["identity", "linear_elu1"], n=2048, d=16, heads=2, samples=2)
    assert [result.mechanism for result in found.results] == ["identity", "linear_elu1"]
    for result in found.results:
        assert 0 < result.seconds < 60
        assert result.cpu_seconds > 0


def test_an_interrupt_keeps_what_is_done() -> None:
    def stop(step: Step) -> None:
        if step.done == 2:
            raise KeyboardInterrupt

    found = compare(["lru", "decay"], n=[8, 16], d=4, heads=2, costs=False, progress=stop)
    assert not found.complete
    assert [(result.mechanism, result.n) for result in found.results] == [("lru", 8), ("decay", 8)]
    assert json.loads(found.to_json())["complete"] is False

    def at_once(step: Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        compare("dot", n=8, d=4, heads=2, costs=False, progress=at_once)


def test_progress_counts_every_step() -> None:
    steps: list[Step] = []
    compare(["lru", "decay"], n=[16, 8], d=4, heads=2, costs=False, progress=steps.append)
    assert [(step.done, step.total) for step in steps] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [step.n for step in steps] == [8, 8, 16, 16]


def test_the_record_is_plain_json_and_the_seed_decides() -> None:
    first = compare(["relu2", "lru"], n=16, d=4, heads=2, costs=False)
    record = json.loads(first.to_json())
    assert record["schema"] == "acutance.comparison/1"
    assert record["settings"]["query_std"] == 1.0
    assert record["settings"]["n"] == [16]
    assert set(record["mechanisms"]) == {"relu2", "lru"}
    reading = record["results"][0]["readings"]["entropy"]
    assert reading["measured"] is None
    assert reading["why"] == "The weights are not a distribution."
    assert record["results"][0]["readings"]["sparsity"]["measured"] > 0
    again = compare(["relu2", "lru"], n=16, d=4, heads=2, costs=False)
    other = compare(["relu2", "lru"], n=16, d=4, heads=2, seed=1, costs=False)
    assert again.to_json() == first.to_json()
    assert other["relu2", 16]["sparsity"] != first["relu2", 16]["sparsity"]


def test_names_and_places() -> None:
    assert [entry.name for entry in pick(None)] == list(DEFAULT_MECHANISMS)
    assert [entry.name for entry in pick(["dot", MECHANISMS["dot"]])] == ["dot"]
    assert len(pick("all")) == len(MECHANISMS)
    found = compare("decay", n=8, d=4, heads=1, costs=False)
    with pytest.raises(KeyError, match="relu2"):
        found["relu2", 8]
    with pytest.raises(
        ValueError, match="there is no quantity named 'speed': choose from entropy, "
    ):
        found["decay", 8]["speed"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"mechanisms": "softmaxx"}, "there is no mechanism named 'softmaxx'; did you mean "),
        ({"mechanisms": []}, "mechanisms must name at least one mechanism, got none"),
        ({"n": []}, "n must contain at least one number of keys, got none"),
        ({"n": 1}, "n must be .*at least 2, got 1"),
        ({"n": [64, -3]}, "n must be .*at least 2, got -3"),
        ({"d": 1}, "d must be .*at least 2, got 1"),
        ({"heads": 0}, "heads must be .*at least 1, got 0"),
        ({"samples": 0}, "samples must be .*at least 1, got 0"),
        ({"std": 0.0}, "std .*0.0"),
        ({"std": (1.0, -1.0)}, "std .*-1.0"),
        ({"mean": math.nan}, "mean .*nan"),
        ({"mean": (1.0, 2.0, 3.0)}, "mean must be one number, or one for queries and one for keys"),
        ({"seed": -1}, "seed must be .*at least 0, got -1"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        compare(**({"mechanisms": "dot", "n": 8, "d": 4, "costs": False} | arguments))
    assert "\n" not in str(caught.value)


def test_a_sample_has_only_so_many_tokens() -> None:
    part = torch.zeros(1, 10, 4)
    sample = QueryKeySample(part, part, part, ("a",), is_causal=False)
    with pytest.raises(ValueError, match=r"n must be at most the 10 tokens .* got 11"):
        compare("dot", n=11, source=sample, costs=False)
