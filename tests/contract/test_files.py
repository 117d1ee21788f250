"""The files that commands wrote load, and the commands write files alike."""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import acutance
from acutance.probing import load_queries_keys, load_state
from acutance.reproduce import load as load_record
from tests.contract.files.make import COMMANDS, FOLDER, prepare
from tests.contract.trained import decoder

#: Values that differ between machines, releases and runs.
VARYING = {"seconds", "cpu_seconds", "threads", "about", "versions", "acutance", "machine", "date"}
#: Commands whose second run reads the state of the first and computes little.
RESUMED = {"calibrate", "judge", "budget", "extend"}
#: Commands that are fast enough to be run again.
REPEATED = {"diff", "verify", "compare", "alarms", "predict", "temperature", "plan", "reproduce"}


def written(name: str) -> Any:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def alike(found: Any, expected: Any, at: str = "") -> None:
    """The same keys and words, and the same numbers to what another processor rounds."""
    if isinstance(expected, dict):
        assert found.keys() >= expected.keys(), at
        for key in expected.keys() - VARYING:
            alike(found[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), at
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            alike(one, other, f"{at}[{index}]")
    elif isinstance(expected, float) and math.isfinite(expected):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4), at
    elif isinstance(expected, float | int | bool | None):
        assert found == expected or (found != found and expected != expected), at
    else:
        assert isinstance(found, str), at


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read, and the files that they wrote."""
    path = tmp_path_factory.mktemp("files")
    prepare(path)
    shutil.copytree(FOLDER, path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py*"))
    return path


@pytest.mark.parametrize("name", sorted(RESUMED | REPEATED))
def test_a_command_reads_its_state_and_writes_the_same_json(
    run: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(folder)
    options = ["--resume"] if name in RESUMED else []
    target = COMMANDS[name][COMMANDS[name].index("--json") + 1] if name != "plan" else ""
    result = run(name, *COMMANDS[name], *options)
    assert result.exit_code == 0, result.output
    if target:
        alike(json.loads((folder / target).read_text(encoding="utf-8")), written(target))


def test_a_state_has_the_numbers_of_its_tables() -> None:
    summary = acutance.load(FOLDER / "state.safetensors")
    assert load_state(FOLDER / "state.safetensors").run.windows > 1
    record = written("probe.json")
    (layer,) = summary.layers
    assert (layer.module, layer.heads, layer.status) == ("layers.0.self_attn", 1, "verified")
    (head,) = record["heads"]
    (row,) = csv.DictReader((FOLDER / "probe.csv").read_text(encoding="utf-8").splitlines())
    table = pyarrow.parquet.read_table(FOLDER / "probe.parquet").to_pylist()[0]
    assert set(summary.metrics) == set(record["metrics"]) == set(head["metrics"])
    for name in summary.metrics:
        mean = float(summary.mean(name))
        expected = None if math.isnan(mean) else pytest.approx(mean, rel=1e-12)
        assert head["metrics"][name]["mean"] == expected
        assert float(row[f"{name}_mean"] or "nan") == pytest.approx(mean, rel=1e-12, nan_ok=True)
        assert table[f"{name}_mean"] == pytest.approx(mean, rel=1e-12, nan_ok=True)
    assert 0 < float(summary.mean("entropy")) < math.log(64)
    again = json.loads(json.dumps(summary.to_dict()))
    alike(again["heads"], record["heads"])


def test_queries_and_keys() -> None:
    sample = load_queries_keys(FOLDER / "queries_keys.safetensors")
    assert sample.query.shape == sample.key.shape
    assert sample.heads == tuple(f"layers.0.self_attn/{head}" for head in range(4))


def test_a_law(tmp_path: Path) -> None:
    law = acutance.Law.load(FOLDER / "law.json")
    law.check(decoder())
    law.save(tmp_path / "law.json")
    assert json.loads((tmp_path / "law.json").read_text()) == written("law.json")


def test_a_plan_and_its_costs(tmp_path: Path) -> None:
    plan = acutance.CachePlan.load(FOLDER / "plan.json").check(decoder())
    assert plan.share(96) <= 0.5
    (chosen,) = [point for point in written("budget.json")["points"] if point["chosen"]]
    assert chosen["share"] == plan.share(96)
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == written("plan.json")


def test_a_record_of_an_experiment() -> None:
    record = load_record(FOLDER / "records" / "sparsity_identity.json")
    assert (record.name, len(record.rows)) == ("sparsity_identity", 82)
