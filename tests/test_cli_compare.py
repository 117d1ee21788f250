"""``acutance compare`` as a shell user meets it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from acutance.cli import app
from acutance.comparison import Comparison, compare, figures, render, runner
from acutance.mechanisms import MECHANISMS
from acutance.probing import QueryKeySample
from acutance.report.plot_style import DARK, LIGHT

SMALL = ("compare", "--n", "16,32", "--d", "8", "--heads", "2", "--samples", "4", "--no-costs")
TWO = ("--mechanism", "relu2", "--mechanism", "decay")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("COLUMNS", "80")
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def found() -> Comparison:
    bare = compare("all", n=16, d=8, heads=2, samples=2, costs=False)
    results = (replace(result, n=n, seconds=1.234e-5) for result in bare.results for n in (16, 40))
    return replace(bare, results=tuple(results))


def flat(text: str) -> str:
    """Sentences without the line breaks that the width put in."""
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_table_fits_and_says_everything(
    found: Comparison, width: int, ascii_only: bool
) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if ascii_only else "utf-8")
    console = Console(width=width, no_color=True, record=True, file=file)
    console.print(render.table(found))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert max(map(len, lines)) <= width
    assert not any("…" in line or "..." in line for line in lines)
    assert lines[2].split()[:2] == ["mechanism", "n"]
    assert lines[2].split()[-2:] == ["grad", "s"]
    assert ("noise" in lines[2]) == (width == 120)
    for name in MECHANISMS:
        (index,) = [at for at, line in enumerate(lines) if line.split()[:1] == [name]]
        assert lines[index].split()[1] == "16"
        assert lines[index + 1].split()[0] == "40"
    assert all(line.isascii() for line in lines) or not ascii_only


def test_a_comparison_is_printed_with_its_sentences(run: Callable[..., Any]) -> None:
    result = run(*SMALL, *TWO, "--mechanism", "sigmoid")
    assert result.exit_code == 0, result.output
    said = flat(result.stdout)
    assert said.startswith("Gaussian queries and keys, width 8; 8 rows, 2 heads mechanism n")
    assert "Without a prediction: sigmoid." in said
    assert f"• relu2: {MECHANISMS['relu2'].can_concentrate}" in said
    assert "exact expectations, the one that differs most" in said


def test_options_reach_the_comparison(run: Callable[..., Any]) -> None:
    result = run(
        *SMALL, *TWO, "--mean", "1,-0.5", "--std", "2", "--causal", "--seed", "3", "--batch", "2",
        "--json", "-",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    given = record["settings"]
    assert (given["query_mean"], given["key_mean"]) == (1.0, -0.5)
    assert (given["query_std"], given["key_std"]) == (2.0, 2.0)
    assert (given["is_causal"], given["seed"], given["batch"]) == (True, 3, 2)
    assert [(each["mechanism"], each["n"]) for each in record["results"]] == [
        ("relu2", 16), ("relu2", 32), ("decay", 16), ("decay", 32),
    ]  # fmt: skip
    assert record["complete"] is True


def test_files_are_written(run: Callable[..., Any], tmp_path: Path) -> None:
    record, light, dark = tmp_path / "c.json", tmp_path / "l.png", tmp_path / "d.svg"
    result = run(*SMALL, *TWO, "--json", record, "--figure", light)
    assert result.exit_code == 0, result.output
    assert "figure written to" in result.output
    assert json.loads(record.read_text(encoding="utf-8"))["schema"] == "acutance.comparison/1"
    assert light.read_bytes().startswith(b"\x89PNG")
    result = run(*SMALL, *TWO, "--figure", dark, "--dark")
    assert result.exit_code == 0, result.output
    assert DARK.page in dark.read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "d.svg", "l.png"]


def test_the_figure_draws_every_mechanism_once(found: Comparison) -> None:
    for theme in (LIGHT, DARK):
        drawn = figures.figure(found, theme=theme)
        (axes,) = drawn.axes
        names = [text.get_text() for text in axes.get_legend().get_texts()]
        assert sorted(names) == sorted([*MECHANISMS, "all n keys"])
        assert drawn.get_facecolor()[:3] == pytest.approx(
            [int(theme.page[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        )
        assert axes.get_xscale() == axes.get_yscale() == "log"


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (
            ("--mechanism", "relu22"),
            2,
            "there is no mechanism named 'relu22'; did you mean 'relu2'?",
        ),
        (("--n", "16,x"), 2, "--n: must be whole numbers separated by commas, got '16,x'"),
        (("--n", ""), 2, "--n: must be whole numbers separated by commas, got ''"),
        (("--n", "1"), 2, "--n: must be at least 2, got '1'"),
        (
            ("--mean", "1,2,3"),
            2,
            "--mean: must be one number, or one for queries and one for keys, got '1,2,3'",
        ),
        (("--std", "0"), 2, "--std: must be finite and above 0, got '0'"),
        (("--mean", "nan"), 2, "--mean: must be finite, got 'nan'"),
        (("--from", "nowhere.safetensors"), 1, "no file at nowhere.safetensors"),
    ],
)
def test_misuse_is_one_sentence(
    run: Callable[..., Any], options: tuple[str, ...], status: int, says: str
) -> None:
    result = run(*SMALL, *TWO, *options)
    assert result.exit_code == status, result.output
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize("options", [("--d", "1"), ("--heads", "0"), ("--figure", "a.gif")])
def test_misuse_of_a_number_names_the_option(
    run: Callable[..., Any], options: tuple[str, str]
) -> None:
    result = run(*SMALL, *TWO, *options)
    assert result.exit_code == 2
    assert options[0] in result.output


def test_the_mechanisms_are_listed(run: Callable[..., Any]) -> None:
    result = run("compare", "--list")
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines()[1:] if not line.startswith(" ")]
    assert [line.split()[0] for line in lines] == list(MECHANISMS)


compare_runner = runner.compare


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_leaves_nothing_half_written(
    run: Callable[..., Any], tmp_path: Path, stop_at: Callable[..., None]
) -> None:
    record, figure = tmp_path / "c.json", tmp_path / "f.png"
    stop_at(runner, "_result", 1, interrupt)
    result = run(*SMALL, *TWO, "--json", record, "--figure", figure)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    written = json.loads(record.read_text(encoding="utf-8"))
    assert written["complete"] is False
    assert len(written["results"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]
    stop_at(runner, "_result", 0, interrupt)
    record.unlink()
    result = run(*SMALL, *TWO, "--json", record)
    assert result.exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_queries_and_keys_of_a_model(run: Callable[..., Any], tmp_path: Path) -> None:
    part = torch.randn(3, 40, 8)
    QueryKeySample(part, part.roll(1, 2), part, ("a", "b", "c"), True).save(tmp_path / "qk")
    one = ("--mechanism", "decay", "--no-costs")
    result = run("compare", "--from", tmp_path / "qk", *one, "--json", "-")
    assert result.exit_code == 0, result.output
    given = json.loads(result.stdout)["settings"]
    assert given["n"] == [10, 20, 40]
    assert given["heads_of_the_model"] == ["a", "b", "c"]
    assert given["is_causal"] is True
    assert given["query_mean"] is None
    result = run("compare", "--from", tmp_path / "qk", *one, "--n", "41")
    assert result.exit_code == 1
    assert "n must be at most the 40 tokens" in result.stderr


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from acutance.cli import app\n"
        "result = CliRunner().invoke(app, ['compare', '--help'])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_question_is_printed_with_its_answers_and_softmax_is_known() -> None:
    options = "compare --n 8 --d 8 --heads 2 --no-costs --mechanism softmax"
    result = CliRunner().invoke(app, options.split())
    assert result.exit_code == 0, result.output
    assert "What it shows: Can it concentrate on few keys as n grows?" in result.stdout
    assert "scaled_dot" in result.stdout
