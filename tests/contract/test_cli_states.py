"""``acutance report``, ``diff`` and ``merge`` as a shell user meets them: no model is run."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

import acutance
from acutance import testing
from acutance.probing import HeadSummary, Layer, Moments

METRICS = ("n_keys", "entropy", "normalized_entropy")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: testing.run([str(argument) for argument in arguments])


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Save a state of two layers of three heads; ``shift`` moves layer 1 head 2."""

    def save(name: str, shift: float = 0.0, **about: Any) -> Path:
        rows = torch.rand(3, 6, 40, generator=torch.Generator().manual_seed(len(name))) / 10 + 0.5
        rows[0] *= 100
        rows[:, 5] += shift
        layers = tuple(Layer(f"h.{index}.attn", 3, "verified", 4, 40) for index in range(2))
        path = tmp_path / name
        HeadSummary(layers, METRICS, Moments.of(rows, METRICS), {"model": "m"} | about).save(path)
        return path

    return save


def test_a_saved_state_is_shown_again(
    run: Callable[..., Any], saved: Callable[..., Path], tmp_path: Path
) -> None:
    state = saved("a.safetensors")
    files = {name: tmp_path / f"o.{name}" for name in ("html", "csv", "parquet", "json")}
    options = [part for name, path in files.items() for part in (f"--{name}", path)]
    result = run("report", state, *options, "--figure", tmp_path / "o.svg")
    assert result.exit_code == 0, result.output
    assert "mean normalized entropy over rows" in result.out
    assert "What stands out" in result.out
    for kind in ("report", "csv", "parquet", "json", "figure"):
        assert f"{kind} written to" in result.err
    summary = acutance.load(state)
    assert len(list(csv.reader(io.StringIO(files["csv"].read_text())))) == 7
    assert pyarrow.parquet.read_table(files["parquet"]).num_rows == 6
    record = json.loads(files["json"].read_text())
    entropy = [head["metrics"]["entropy"]["mean"] for head in record["heads"]]
    assert entropy == summary.mean("entropy").tolist()
    assert "<html" in files["html"].read_text()
    assert "<svg" in (tmp_path / "o.svg").read_text()


def test_another_metric_and_chart_are_shown(
    run: Callable[..., Any], saved: Callable[..., Path], tmp_path: Path
) -> None:
    figure = tmp_path / "o.png"
    options = ("--metric", "n_keys", "--chart", "layers", "--dark", "--figure", figure)
    result = run("report", saved("a"), *options)
    assert result.exit_code == 0, result.output
    assert "mean n keys (keys) over rows" in result.out
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert run("report", saved("a"), "--metric", "n_kyes").exit_code == 2
    for arguments in (["report", saved("a")], ["diff", saved("a"), saved("b")]):
        result = run(*arguments, "--metric", "n_kyes")
        assert result.exit_code == 2
        assert "did you mean 'n_keys'" in " ".join(result.err.replace("│", " ").split())


def test_the_head_that_moved_leads_the_diff(
    run: Callable[..., Any], saved: Callable[..., Path], tmp_path: Path
) -> None:
    table, record, figure = (tmp_path / name for name in ("o.csv", "o.json", "o.png"))
    one, other = saved("one", text=["a.txt"]), saved("two!", shift=2.0, text=["b.txt"])
    result = run("diff", one, other, "--csv", table, "--json", record, "--figure", figure)
    assert result.exit_code == 0, result.output
    lines = result.out.splitlines()
    start = lines.index("Heads whose normalized entropy changed most; heads that moved come first")
    leading = next(line for line in lines[start + 1 :] if line.strip()[:1].isdigit())
    assert leading.split()[:2] == ["1", "h2"]
    assert "moved" in leading
    assert "! They read different texts, a.txt and b.txt" in result.out
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert len(rows) == 18
    moved = {
        (row["metric"], row["layer"], row["head"]) for row in rows if row["verdict"] == "moved"
    }
    assert moved >= {("entropy", "1", "2"), ("normalized_entropy", "1", "2")}
    assert {place[1:] for place in moved} == {("1", "2")}
    whole = json.loads(record.read_text())
    assert len(whole["heads"]) == 18
    assert any("different texts" in sentence for sentence in whole["warnings"])
    assert figure.read_bytes()[:4] == b"\x89PNG"


def test_metrics_are_chosen_and_the_list_cut(
    run: Callable[..., Any], saved: Callable[..., Path]
) -> None:
    result = run("diff", saved("one"), saved("two!"), "--metric", "entropy", "--top", 2)
    assert "Heads whose entropy (nat) changed most" in result.out
    assert "and 4 more" in result.out
    assert "normalized entropy over heads" not in result.out


@pytest.mark.parametrize("option", ["--json", "--csv"])
@pytest.mark.parametrize("command", ["report", "diff"])
def test_standard_output_holds_the_file_and_nothing_else(
    saved: Callable[..., Path], run: Callable[..., Any], command: str, option: str
) -> None:
    states = [saved("one"), saved("two!")][: 1 + (command == "diff")]
    result = run(command, *states, option, "-")
    assert result.exit_code == 0, result.output
    if option == "--json":
        assert json.loads(result.out)["schema"].startswith("acutance.")
    else:
        rows = list(csv.reader(io.StringIO(result.out)))
        assert len({len(row) for row in rows}) == 1
        assert len(rows) == (19 if command == "diff" else 7)


def test_failures_are_one_sentence_and_exit_1(
    run: Callable[..., Any], saved: Callable[..., Path], tmp_path: Path
) -> None:
    good, broken = saved("good"), tmp_path / "broken"
    broken.write_bytes(good.read_bytes()[:-100])
    other = tmp_path / "other"
    layer = Layer("elsewhere", 1)
    HeadSummary((layer,), METRICS, Moments.none(1, 3)).save(other)
    cases = [
        (["report", tmp_path / "none"], "no file at"),
        (["report", broken], "is not a complete safetensors file"),
        (["diff", good, broken], "is not a complete safetensors file"),
        (["diff", good, other], "have no head in common"),
        (["diff", good, good, "--metric", "lse"], "'lse' is not in both states"),
        (["report", good, "--chart", "lengths", "--figure", tmp_path / "x.png"], "older version"),
    ]
    for arguments, sentence in cases:
        result = run(*arguments)
        assert result.exit_code == 1, (arguments, result.output)
        assert sentence in result.err.replace("\n", " "), result.err
        assert len([line for line in result.err.splitlines() if line]) == 1
        assert "Traceback" not in result.output
    assert not (tmp_path / "x.png").exists()


def test_misuse_is_exit_2(
    run: Callable[..., Any], saved: Callable[..., Path], tmp_path: Path
) -> None:
    state = saved("a")
    for arguments in (
        ["report"],
        ["report", state, "--figure", tmp_path / "x.pdf"],
        ["report", state, "--chart", "pie"],
        ["report", state, "--chart", "theory", "--metric", "entropy"],
        ["report", state, "--csv", "-", "--json", "-"],
        ["report", state, "--parquet", "-"],
        ["diff", state],
        ["diff", state, state, "--top", 0],
        ["diff", state, state, "--csv", tmp_path],
        ["merge", state, "--csv", tmp_path / "no" / "where.csv"],
    ):
        result = run(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
