"""Replaying a log through the alarm: the monitor's alarms, restarts, misuse, figure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from acutance import testing


def run(*arguments: object) -> Any:
    return testing.run(["alarms", *map(str, arguments)])


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("x\n", (), "line 1: not JSON that can be read"),
        ('{"loss": 2}\n', (), "line 1: expected a JSON object with a whole number 'step'"),
        ('{"step": 1, "loss": 2}\n', (), "the log has no standard deviations of logits"),
        ("", (), "the log has no standard deviations of logits"),
        (
            '{"step": 1, "loss": 1' + "0" * 400 + "}\n",
            (),
            "line 1: not JSON that can be read: numbers must be finite, got 1000",
        ),
        (
            '{"step": 1, "loss": 1' + "0" * 9000 + "}\n",
            (),
            "line 1: not JSON that can be read: numbers must be finite, got 1000",
        ),
        ('{"step": 1' + "0" * 40 + "}\n", (), "with a whole number 'step' of at most"),
        ('{"step": 1, "x": ' + "[" * 100_000 + "\n", (), "line 1: it is nested too deeply"),
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


@pytest.mark.parametrize("name", ["run.jsonl", "trainer_state.json"])
def test_a_pipe_or_device_is_no_log(tmp_path: Path, name: str) -> None:
    pipe, zeros = tmp_path / name, tmp_path / f"zeros-{name}"
    os.mkfifo(pipe)
    zeros.symlink_to("/dev/zero")
    for path in (pipe, zeros):
        result = run(path)
        assert result.exit_code == 1
        assert "is a pipe or a device, not a file" in " ".join(result.output.split())
    state = tmp_path / "state.json"
    state.write_text('{"log_history": ' + "[" * 100_000, encoding="utf-8")
    result = run(state)
    assert result.exit_code == 2
    assert "state.json: it is nested too deeply" in " ".join(result.output.split())


def test_a_state_without_history_is_misuse(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("{}", encoding="utf-8")
    result = run(path)
    assert result.exit_code == 2
    assert "has no list 'log_history'" in " ".join(result.output.split())
