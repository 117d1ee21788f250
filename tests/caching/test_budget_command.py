"""acutance budget, as a shell user meets it."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import acutance
from acutance.cli import app
from acutance.experiments.models.trained import decoder, directory


@pytest.fixture
def run() -> Callable[..., Any]:
    runner = CliRunner(env={"COLUMNS": "160"})
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_text((Path(sysconfig.get_path("stdlib")) / "copy.py").read_text()[:2048])
    return path


def test_a_plan_is_found_written_and_judged(
    run: Callable[..., Any], text: Path, tmp_path: Path
) -> None:
    plan, record = tmp_path / "plan.json", tmp_path / "budget.json"
    result = run(
        "budget", directory(), "--text", text, "--lengths", 96, "--windows", 4, "--keep", 0.5,
        "--streaming", "2,14", "-o", plan, "--json", record, "--figure", tmp_path / "frontier.svg",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "The plan takes" in result.output
    loaded = acutance.CachePlan.load(plan).check(decoder())
    assert loaded.share(96) <= 0.5
    written = json.loads(record.read_text())
    (chosen,) = [one for one in written["points"] if one["chosen"]]
    assert chosen["share"] == loaded.share(96)
    assert written["plan"] == loaded.record()
    assert written["windows"] == 2
    assert "<svg" in (tmp_path / "frontier.svg").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", 0.5, "--max-loss", 0.1], "give keep or max_loss"),
        (["--streaming", "4"], "FIRST,RECENT"),
        (["--lengths", "64,96"], "a plan is for one length"),
    ],
)
def test_what_is_refused(
    run: Callable[..., Any], text: Path, options: list[Any], message: str
) -> None:
    given = [] if "--lengths" in options else ["--lengths", 96]
    result = run("budget", directory(), "--text", text, "--windows", 4, *given, *options)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
