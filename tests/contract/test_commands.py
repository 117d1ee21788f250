"""Exit codes of every command, and the keys of its JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.files.make import FOLDER

ABSENT, STATE = "/no/such/file", FOLDER / "state.safetensors"
#: For each command: a run that succeeds, one that fails, and one of wrong arguments.
RUNS: dict[str, dict[int, tuple[Any, ...]]] = {
    "probe": {1: (ABSENT,), 2: ("--length", 1)},
    "merge": {1: (ABSENT, "-o", "x"), 2: ()},
    "report": {0: (STATE,), 1: (ABSENT,), 2: ()},
    "diff": {0: (STATE, STATE), 1: (ABSENT, STATE), 2: (STATE,)},
    "predict": {0: ("--n", 16, "--logit-std", 1), 2: ("--n", 16)},
    "temperature": {0: ("--n", 16), 2: ("--n", 1)},
    "calibrate": {1: (ABSENT,), 2: ("--lengths", "a")},
    "judge": {1: (ABSENT, "--law", "ssmax"), 2: ()},
    "budget": {1: (ABSENT,), 2: ()},
    "plan": {0: (FOLDER / "plan.json",), 1: (ABSENT,), 2: ()},
    "extend": {1: (ABSENT, "--to", 64), 2: ()},
    "verify": {2: (ABSENT,)},  # 1 is for what it finds
    "compare": {0: ("--list",), 1: ("--from", ABSENT), 2: ("--n", "a")},
    "reproduce": {0: ("--list",), 2: ("nothing",)},
    "alarms": {1: (ABSENT,), 2: ()},
    "info": {0: (), 2: ("more",)},
}
#: The schema and the other keys of the JSON that each command writes.
KEYS = {
    "probe": """
        acutance.head_summary/1 about notices layers metrics heads unread coverage
        not_provided maps recommendations key_norms
    """,
    "diff": """
        acutance.diff/1 before after warnings only_before only_after equal_n errors assumes
        confidence verdicts layers heads
    """,
    "calibration": """
        acutance.loss_calibration_report/1 law metric family passes loss mean_loss delta
        error windows fitted stopped skipped changed heads choices gates
    """,
    "judge": """
        acutance.judgement/1 laws windows tokens loss mean_loss lengths groups unit
        confidence method about
    """,
    "budget": """
        acutance.budget/1 loss n windows mean_loss untrained recall full_bytes points
        options costs plan
    """,
    "plan": "acutance.cache_plan/1 model group residual layers search sha256",
    "extend": """
        acutance.extension/1 to train_length chosen helps finals gain_over_rope tried ranges
        search_windows final_windows max_cost complete seconds method about
    """,
    "verify": "acutance.verification/1 ok complete left_out about checks findings notes",
    "compare": "acutance.comparison/1 complete settings quantities mechanisms results",
    "records": "1 complete asked_for records",
    "predict": "acutance.prediction/1 mechanism parameters metrics remarks",
    "temperature": "acutance.temperature/1 tau scale n fraction d settings chosen sentences",
}


@pytest.mark.parametrize(
    ("command", "code", "arguments"),
    [(name, code, given) for name, runs in RUNS.items() for code, given in runs.items()],
)
def test_exit_codes(
    run: Callable[..., Any], command: str, code: int, arguments: tuple[Any, ...]
) -> None:
    result = run(command, *arguments)
    assert result.exit_code == code, result.output
    assert bool(result.err) >= bool(code)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", RUNS)
def test_help_succeeds_and_an_unknown_option_is_misuse(
    run: Callable[..., Any], command: str
) -> None:
    assert run(command, "--help").exit_code == 0
    wrong = run(command, "--no-such-option")
    assert (wrong.exit_code, wrong.out) == (2, "")


def test_every_command_is_here(run: Callable[..., Any]) -> None:
    listed = run("--help").out
    assert [name for name in RUNS if f" {name} " not in listed] == []
    assert run("no-such-command").exit_code == 2


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_json(name: str) -> None:
    """Of the files, which :mod:`tests.contract.test_files` compares with those written now."""
    record = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    schema, *keys = KEYS[name].split()
    assert str(record["schema"]) == schema
    assert sorted(record) == sorted(["schema", *keys])


def test_the_kernels_are_told(run: Callable[..., Any], tmp_path: Path) -> None:
    assert run("info", "--json", tmp_path / "info.json").exit_code == 0
    record = json.loads((tmp_path / "info.json").read_text(encoding="utf-8"))
    assert record.keys() >= {"native", "why_not", "path", "cpu", "dtypes", "threads", "auto"}
