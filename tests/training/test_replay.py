"""Replaying a log through the alarm: the monitor's alarms, restarts, misuse, figure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from acutance.cli import app
from acutance.training import Alarm, AttentionMonitor, AttentionWarning
from acutance.training.growth import growth_limit
from acutance.training.replay import read_log, replay

NAME = "attention/layers.{}.attn/logit_std"


def written(path: Path, logits: list[float], **more: Any) -> Path:
    lines = [
        {"step": 10 * number, NAME.format(0): 30.0, NAME.format(1): logit, **more}
        for number, logit in enumerate(logits, 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["alarms", *map(str, arguments)])


def growing(log: Path) -> list[Alarm]:
    """The alarms of a monitor of a layer whose weights grow, written to a log."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    monitor = AttentionMonitor(every=1, log=log)
    x, raised = torch.randn(2, 6, 8), []
    for _ in range(30):
        with torch.no_grad():
            layer.in_proj_weight[:16] *= 1.15
        with monitor.watch(layer):
            layer(x, x, x)
        record = monitor.step()
        assert record is not None
        raised += [alarm for alarm in record.alarms if alarm.kind == "logit_growth"]
    return raised


def test_a_replay_has_the_alarms_that_the_monitor_raised(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with pytest.warns(AttentionWarning, match="logit growth"):
        raised = growing(log)
    (alarm,) = replay(read_log(log)).alarms
    assert (alarm.layer, alarm.step) == ("MultiheadAttention", raised[0].step)
    assert alarm.growth == pytest.approx(raised[0].value, rel=1e-6)
    assert alarm.measurements == len(raised)


def test_a_restart_replaces_what_was_logged_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = [(10, 1.0), (20, 2.0), (30, 3.0), (20, 5.0), (30, 6.0)]
    path.write_text(
        "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in lines),
        encoding="utf-8",
    )
    assert [(one["step"], one["loss"]) for one in read_log(path)] == [
        (10, 1.0), (20, 5.0), (30, 6.0),
    ]  # fmt: skip


def test_the_state_of_a_trainer_is_a_log(tmp_path: Path) -> None:
    history = []
    for step in range(10, 400, 10):
        history += [
            {"step": step, "loss": 2.0},
            {"step": step, NAME.format(0): math.exp(step / 100)},
        ]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": history}), encoding="utf-8")
    replayed = replay(read_log(path))
    assert replayed.loss[10] == 2.0
    assert [alarm.layer for alarm in replayed.alarms] == ["layers.0.attn"]


def test_logits_that_are_null_are_left_out(tmp_path: Path) -> None:
    records = read_log(written(tmp_path / "run.jsonl", [1.0] * 12))
    records[5][NAME.format(1)] = None
    replayed = replay(records)
    assert math.isnan(replayed.logit_std["layers.1.attn"][5])
    assert json.dumps(replayed.to_dict(), allow_nan=False)


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    limit = growth_limit(100.0)
    log = written(tmp_path / "run.jsonl", [10.0] * 17 + [10.0 * 1.1 * limit], loss=2.0)
    result = run(log, "--json", tmp_path / "out.json", "--figure", tmp_path / "out.png")
    assert result.exit_code == 0, result.output
    assert "layers.1.attn" in result.stdout
    assert "layers.0.attn" not in result.stdout
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert set(report["loss"]["values"]) == {2.0}
    assert report["grad_norm"] == {"steps": [], "values": []}
    assert [(one["layer"], one["step"]) for one in report["alarms"]] == [("layers.1.attn", 180)]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "No alarm." in run(log, "--false-alarms", 0.01).stdout


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("x\n", (), "line 1: not JSON"),
        ('{"loss": 2}\n', (), "line 1: expected a JSON object with a whole number 'step'"),
        ('{"step": 1, "loss": 2}\n', (), "the log has no standard deviations of logits"),
        ("", (), "the log has no standard deviations of logits"),
        ('{"step": 1}\n', ("--false-alarms", 0), "must be a number above 0"),
        ('{"step": 1}\n', ("--figure", "out.pdf"), "must end in .png or .svg"),
    ],
)
def test_misuse_ends_with_a_sentence_and_status_2(
    tmp_path: Path, text: str, arguments: tuple[Any, ...], words: str
) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text(text, encoding="utf-8")
    result = run(log, *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_a_state_without_history_is_misuse(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("{}", encoding="utf-8")
    result = run(path)
    assert result.exit_code == 2
    assert "has no list 'log_history'" in " ".join(result.output.split())
