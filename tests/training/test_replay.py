"""Replaying a log through the alarm: the monitor's alarms, restarts, misuse, figure."""

from __future__ import annotations

import json
import math
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from acutance.training import Alarm, AttentionMonitor, AttentionWarning
from acutance.training.alarms import SETTLING, growth_limit
from acutance.training.replay import read_log, replay
from tests.contract.training.test_replay import run

NAME = "attention/layers.{}.attn/logit_std"


def written(path: Path, logits: list[float], **more: Any) -> Path:
    lines = [
        {"step": 10 * number, NAME.format(0): 30.0, NAME.format(1): logit, **more}
        for number, logit in enumerate(logits, 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def growing(log: Path) -> list[Alarm]:
    """The alarms of a monitor of a layer whose weights grow, written to a log."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    monitor = AttentionMonitor(every=1, log=log)
    x, raised = torch.randn(2, 6, 8), []
    for step in range(SETTLING + 30):
        with torch.no_grad():
            layer.in_proj_weight[:16] *= 1.15 if step >= SETTLING else 1.0
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


@pytest.mark.parametrize("value", ["null", "NaN", "Infinity", "-Infinity", '"nan"'])
def test_logits_that_are_not_finite_alarm(tmp_path: Path, value: str) -> None:
    pytest.importorskip("matplotlib")
    log = written(tmp_path / "run.jsonl", [1.0] * 4 + [777.0] * 3)
    log.write_text(log.read_text(encoding="utf-8").replace("777.0", value), encoding="utf-8")
    replayed = replay(read_log(log))
    (alarm,) = replayed.alarms
    assert (alarm.kind, alarm.layer, alarm.step) == ("not_finite", "layers.1.attn", 50)
    assert alarm.measurements == 3
    assert json.dumps(replayed.to_dict(), allow_nan=False)
    result = run(log, "--figure", tmp_path / "out.svg")
    assert result.exit_code == 0, result.output
    assert "layers.1.attn not finite 50" in " ".join(result.out.split())


def test_logits_that_become_nan_alarm_as_the_monitor_did(tmp_path: Path) -> None:
    """A layer without finite rows is not in the record: the monitor's count of alarms is."""
    torch.manual_seed(0)
    layer, log = nn.MultiheadAttention(8, 2, batch_first=True), tmp_path / "run.jsonl"
    monitor, x = AttentionMonitor(every=1, max_logit=1e3, log=log), torch.randn(2, 6, 8)
    for step in range(1, 8):
        with torch.no_grad():
            layer.in_proj_weight[:16] *= 1e3 if step == 3 else 1
            layer.in_proj_weight[0 if step == 5 else slice(8 * (step == 6)), 0] += (
                math.nan if step >= 5 else 0
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttentionWarning)
            with monitor.watch(layer):
                layer(x, x, x)
            monitor.step()
    found = [(one.kind, one.layer, one.step) for one in replay(read_log(log)).alarms]
    assert found == [("large_logit", "", 3), ("not_finite", "", 5)]
    assert "not finite" in run(log).out


def test_a_log_of_nothing_finite_alarms() -> None:
    (alarm,) = replay([{"step": 1, "attention/alarms/not_finite": 2.0}]).alarms
    assert (alarm.kind, alarm.step) == ("not_finite", 1)


def test_losses_at_the_end_of_a_log_leave_its_measurements(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    measured = [{"step": step, NAME.format(0): math.exp(step / 100)} for step in range(10, 400, 10)]
    losses = [{"step": step, "loss": float(step)} for step in range(5, 405, 5)]
    lines = [json.dumps(one) + "\n" for one in measured + losses]
    path.write_text("".join(lines), encoding="utf-8")
    expected = replay(read_log(path))
    assert expected.steps == tuple(range(10, 400, 10))
    assert list(expected.loss) == list(range(5, 405, 5))
    assert [alarm.layer for alarm in expected.alarms] == ["layers.0.attn"]
    random.Random(0).shuffle(lines)
    path.write_text("".join(lines), encoding="utf-8")
    assert replay(read_log(path)).to_dict() == expected.to_dict()


def test_the_figure_reaches_to_the_end_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alarm at step 200 of a training that diverges 28 steps before its end."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from acutance.training.replay import draw_replay

    drawn, written = [], Figure.savefig

    def savefig(figure: Any, *given: Any, **options: Any) -> None:
        drawn.append(figure)
        written(figure, *given, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    records = [
        {"step": step, NAME.format(0): 1.0 if step < 200 else 9.0, "loss": step}
        for step in range(0, 1000, 10)
    ]
    replayed = replay([*records, {"step": 1028, "loss": 50.0}])
    assert [alarm.step for alarm in replayed.alarms] == [200]
    draw_replay(replayed, tmp_path / "out.svg")
    for axes in drawn[0].axes:
        assert axes.get_xlim() == (0, 1028)
    assert drawn[0].axes[0].lines[0].get_xdata()[-1] == 1028


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    limit = growth_limit(100.0)
    log = written(tmp_path / "run.jsonl", [10.0] * 17 + [10.0 * 1.1 * limit], loss=2.0)
    result = run(log, "--json", tmp_path / "out.json", "--figure", tmp_path / "out.png")
    assert result.exit_code == 0, result.output
    assert "layers.1.attn" in result.out
    assert "layers.0.attn" not in result.out
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert set(report["loss"]["values"]) == {2.0}
    assert report["grad_norm"] == {"steps": [], "values": []}
    assert [(one["layer"], one["step"]) for one in report["alarms"]] == [("layers.1.attn", 180)]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "No alarm." in run(log, "--false-alarms", 0.01).out
