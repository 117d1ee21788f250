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
from rich.console import Console

from acutance import testing
from acutance.comparison import Comparison, compare, figures, runner
from acutance.mechanisms import MECHANISMS
from acutance.report.plot_style import DARK, LIGHT
from tests.contract.test_cli_compare import SMALL, TWO


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: testing.run([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def found() -> Comparison:
    bare = compare("all", n=16, d=8, heads=2, samples=2, costs=False)
    results = (replace(result, n=n, seconds=1.234e-5) for result in bare.results for n in (16, 40))
    return replace(bare, results=tuple(results))


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_table_fits_and_says_everything(
    found: Comparison, width: int, ascii_only: bool
) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if ascii_only else "utf-8")
    console = Console(width=width, no_color=True, record=True, file=file)
    console.print(found.table())
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert max(map(len, lines)) <= width
    assert not any("…" in line or "..." in line for line in lines)
    assert lines[2].split()[:2] == ["mechanism", "n"]
    assert lines[2].split()[-2:] == ["grad", "s"]
    assert ("noise" in lines[2]) == (width == 120)
    rows = lines[3 : lines.index("", 3)]  # sentences come after
    assert len(rows) == 2 * len(MECHANISMS)
    for name in MECHANISMS:
        (index,) = [at for at, line in enumerate(rows) if line.split()[:1] == [name]]
        assert rows[index].split()[1] == "16"
        assert rows[index + 1].split()[0] == "40"
    assert all(line.isascii() for line in lines) or not ascii_only


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
    assert "interrupted" in result.err
    written = json.loads(record.read_text(encoding="utf-8"))
    assert written["complete"] is False
    assert len(written["results"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]
    stop_at(runner, "_result", 0, interrupt)
    record.unlink()
    result = run(*SMALL, *TWO, "--json", record)
    assert result.exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from acutance.cli import app\n"
        "result = CliRunner().invoke(app, ['compare', '--help'])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
