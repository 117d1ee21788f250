"""State files that are cut short, foreign, or made to do harm: refused with one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import acutance
from acutance.probing import load_state
from acutance.summary.files import expand
from acutance.summary.state import Run, State
from tests.contract.probing.test_state_files import assert_refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good state of two layers."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
    with acutance.probe(model, metrics=["entropy", "top_weight"]) as probe:
        model(torch.randn(2, 5, 8))
    run = Run({"model": "a", "length": 5}, 4, ((0, 2),), 10)
    State(probe.summary({"text": "x"}), run).save(tmp_path / "state.safetensors")
    return tmp_path / "state.safetensors"


def rewrite(
    path: Path,
    *,
    summary: Callable[[dict[str, Any]], Any] | None = None,
    run: Callable[[dict[str, Any]], Any] | None = None,
    tensors: Callable[[dict[str, Any]], Any] | None = None,
) -> None:
    """Change parts of a file as an attacker, or another program, might."""
    with safe_open(path, framework="pt") as file:
        header = dict(file.metadata())
    del header["sha256"]  # whoever writes a file can seal it too
    arrays = {name: tensor.clone() for name, tensor in expand(header, load_file(path)).items()}
    header.pop("stored", None)  # every array as in memory
    for field, change in (("summary", summary), ("run", run)):
        if change is not None:
            record = json.loads(header[field])
            header[field] = json.dumps(change(record) or record)
    if tensors is not None:
        tensors(arrays)
    save_file(arrays, path, metadata=header)


def test_states_of_earlier_versions_have_no_seal(path: Path) -> None:
    before = load_state(path)
    rewrite(path)
    assert load_state(path).run == before.run


def test_heads_that_no_model_has(path: Path) -> None:
    rewrite(path, summary=lambda record: record["layers"][0].update(heads=1 << 17))
    assert_refused(path, "a state can hold at most 131072 heads, got 131074")


def set_at(name: str, index: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        arrays[name][index] = value

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("M2"), "the array 'M2' is missing"),
        (lambda t: t.update(more=torch.zeros(1)), "the array 'more' does not belong to a summary"),
        (lambda t: t.update(mean=t["mean"][:1].clone()), r"'mean' must have shape \(4, 2\)"),
        (lambda t: t.update(mean=t["mean"].float()), r"got \(4, 2\) and torch.float32"),
        (lambda t: t.update(count=t["count"].double() * torch.nan), "'count' .* dtype torch.int64"),
        (lambda t: t.update(histogram=t["histogram"][..., 0].clone()), r"have shape \(4, 2, 64\)"),
        (set_at("count", (1, 0), -3), "'count' has an invalid value at head 1, metric 0"),
        (set_at("count", (1, 0), 2**62), "'count' has an invalid value"),
        (set_at("histogram", (0, 1, 5), 2**61), "'histogram' has an invalid value at head 0"),
        (set_at("count", (0, 0), 11), "'histogram' has an invalid value"),
        (set_at("mean", (2, 1), torch.nan), "'mean' has an invalid value at head 2, metric 1"),
        (set_at("mean", (2, 1), torch.inf), "'mean' has an invalid value"),
        (set_at("mean", (0, 0), -1e300), "'mean' has an invalid value"),
        (set_at("M2", (0, 0), 1e300), "'M2' has an invalid value"),
        (set_at("M2", (0, 0), -1.0), "'M2' has an invalid value"),
        (set_at("M2", (0, 0), torch.nan), "'M2' has an invalid value"),
        (set_at("low", (0, 0), 1e9), "'high' has an invalid value"),
        (set_at("low", (0, 0), -torch.inf), "'low' has an invalid value"),
        (set_at("high", (3, 1), torch.nan), "'high' has an invalid value"),
    ],
)  # fmt: skip
def test_arrays_that_no_rows_give(
    path: Path, change: Callable[[dict[str, Any]], None], match: str
) -> None:
    rewrite(path, tensors=change)
    assert_refused(path, match)


def layer(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["layers"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda r: [r], "'summary' must be a JSON object, got list"),
        (lambda r: r.update(layers={}), r"layers of 'summary' must be a list, got \{\}"),
        (lambda r: r.update(layers=[3]), r"layers\[0\] must be a JSON object, got 3"),
        (lambda r: r.update(about="x"), "about of 'summary' must be a JSON object, got 'x'"),
        (lambda r: r.update(unread=[{}]), "an entry of unread of 'summary' must be text"),
        (lambda r: r.update(metrics=["entropy", "wit"]), "'wit' is not a metric of this version"),
        (lambda r: r.update(metrics=["entropy", ["entropy"]]), "is not a metric of this version"),
        (lambda r: r.update(metrics=["entropy"] * 2), "'metrics' must name each metric once"),
        (lambda r: r.update(layers=r["layers"][:1] * 2), "'layers' must name each layer once"),
        (lambda r: r["layers"][0].pop("heads"), r"layers\[0\] lacks the field 'heads'"),
        (layer(heads=2.0), r"heads of layers\[0\] must be a whole number, got 2.0"),
        (layer(heads=0), r"heads of layers\[0\] must be a whole number, got 0"),
        (layer(heads=True), r"heads of layers\[0\] must be a whole number, got True"),
        (layer(heads=10**5), r"'count' must have shape \(100002, 2\)"),
        (layer(rows=-1), r"rows of layers\[0\] must be a whole number, got -1"),
        (layer(calls="9"), r"calls of layers\[0\] must be a whole number, got '9'"),
        (layer(module=None), r"module of layers\[0\] must be text, got None"),
        (
            layer(status="perfect"),
            r"status of layers\[0\] must be one of verified, .* got 'perfect'",
        ),
        (layer(error="small"), r"error of layers\[0\] must be a number, 0 or more, got 'small'"),
        (layer(error=float("nan")), r"error of layers\[0\] must be a number, 0 or more, got nan"),
        (layer(error=10**400), r"error of layers\[0\] must be a number, 0 or more, got 1000"),
        (layer(wit=1), r"layers\[0\] has an unknown field 'wit'"),
    ],
)
def test_records_that_no_probe_writes(
    path: Path, change: Callable[[dict[str, Any]], Any], match: str
) -> None:
    def changed(record: dict[str, Any]) -> Any:
        found = change(record)
        return found if isinstance(found, list) and found and found[0] is record else None

    rewrite(path, summary=changed)
    assert_refused(path, match)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"settings": []}, "settings of 'run' must be a JSON object, got \\[\\]"),
        ({"total": -1}, "total and tokens of 'run' must be 0 or more, got -1 and"),
        ({"tokens": 1.5}, "tokens of 'run' must be a whole number, got 1.5"),
        ({"done": None}, "done of 'run' must be a list, got None"),
        ({"done": [[0, 9]]}, r"'done' of 'run' must be ascending ranges \[start, stop\] up to 4"),
        ({"done": [[2, 3], [0, 1]]}, "'done' of 'run' must be ascending ranges"),
        ({"done": [[0, 2], [1, 3]]}, "'done' of 'run' must be ascending ranges"),
        ({"done": [[1, 1]]}, "'done' of 'run' must be ascending ranges"),
        ({"done": [["0", 1]]}, "an entry of done of 'run' must be a whole number, got '0'"),
        ({"shard": "3/2"}, "a shard must be i/n with 1 ≤ i ≤ n, as 2/4, got '3/2'"),
        ({"shard": "9" * 5000}, "a shard must be i/n"),
    ],
)
def test_runs_that_no_probe_writes(path: Path, fields: dict[str, Any], match: str) -> None:
    rewrite(path, run=lambda record: record.update(fields))
    assert_refused(path, match)


def test_a_huge_about_is_only_text(path: Path) -> None:
    rewrite(path, summary=lambda record: record["about"].update(text="x" * 10**6))
    assert len(acutance.load(path).about["text"]) == 10**6
