"""The guide quotes the measured effects as the benchmark wrote them, and says nothing beyond."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide" / "training.md").read_text(encoding="utf-8")
FOUND: dict[str, Any] = json.loads(
    (ROOT / "benchmarks" / "training_effects.json").read_text(encoding="utf-8")
)
COLUMNS = {
    "recall": {
        "accuracy_24": 3,
        "accuracy_96": 3,
        "final_loss": 3,
        "max_logit_24": 1,
        "entropy_24": 2,
    },
    "contrast": {"retrieval_1024": 3, "temperature": 3, "effective_negatives": 1},
}


def rows() -> dict[str, list[str]]:
    """Cells of the guide's tables by the name in their first cell."""
    lines = [line.strip("| ").split(" | ") for line in GUIDE.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): [cell.strip() for cell in cells[1:]] for cells in lines}


@pytest.mark.parametrize("kind", ["recall", "contrast"])
def test_the_tables_are_those_of_the_record(kind: str) -> None:
    shown = rows()
    assert len(FOUND[kind]) == {"recall": 9, "contrast": 5}[kind]
    for name, numbers in FOUND[kind].items():
        want = [
            f"{numbers[column]['mean']:.{digits}f} ± {numbers[column]['spread']:.{digits}f}"
            for column, digits in COLUMNS[kind].items()
        ]
        assert shown[name] == want, name


def test_seeds_and_steps_are_those_of_the_record() -> None:
    about = FOUND["about"]
    assert f"{about['steps']} steps" in GUIDE
    assert about["seeds"] == 3
    assert "three seeds" in GUIDE


def test_the_benchmark_runs_and_measures_what_the_record_has() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "training_effects.py"))
    assert set(script["RECALL"]) == set(FOUND["recall"])
    assert set(script["CONTRAST"]) == set(FOUND["contrast"])
    for run, kind in ((script["run_recall"], "recall"), (script["run_contrast"], "contrast")):
        for name in ("qk_clip",) if kind == "recall" else ("entropy_target",):
            found = run(name, 0, 2)
            assert set(found) == set(FOUND[kind][name])
            assert all(value == value for value in found.values())


def interval(kind: str, name: str, column: str) -> tuple[float, float]:
    """Mean less and plus the spread."""
    found = FOUND[kind][name][column]
    return found["mean"] - found["spread"], found["mean"] + found["spread"]


def test_the_sentences_hold_in_the_record() -> None:
    mean = {name: {c: v["mean"] for c, v in row.items()} for name, row in FOUND["recall"].items()}
    plain = mean["plain"]
    for name in ("qk_clip", "entropy_floor", "z_loss", "sigma_reparam", "temperature"):
        assert mean[name]["final_loss"] < plain["final_loss"]
    for name in ("qk_clip", "z_loss", "sigma_reparam"):
        assert mean[name]["max_logit_24"] < plain["max_logit_24"] / 2
    gentle, clipped = (
        interval("recall", f"gentle_{n}", "accuracy_96") for n in ("plain", "qk_clip")
    )
    assert clipped[1] < gentle[0] - 0.05
    best = interval("contrast", "fixed 0.07", "retrieval_1024")
    for name in ("learned", "log_n", "entropy_target"):
        found = FOUND["contrast"][name]["retrieval_1024"]["mean"]
        assert best[0] < found < best[1]
    assert FOUND["contrast"]["fixed 1"]["effective_negatives"]["mean"] > 200


def test_a_changed_number_is_noticed() -> None:
    cell = rows()["qk_clip"][0]
    assert re.fullmatch(r"\d\.\d{3} ± \d\.\d{3}", cell)
