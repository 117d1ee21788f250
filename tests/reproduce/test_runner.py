"""Runs keep what finished, pick up where they ended, and say how they went."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from acutance.cli import INTERRUPTED, app
from acutance.reproduce import EXPERIMENTS, Experiment, Row, Run, load, pick, run
from acutance_lab.training import Plan, fit

QUICKEST = ("sparsity_decay", "ssmax")


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., Any]:
    runner = CliRunner()
    return lambda *arguments: runner.invoke(
        app,
        ["reproduce", "--quick", "--out", str(tmp_path), *map(str, arguments)],
        env={"COLUMNS": "200"},
    )


def counted(experiment: Experiment, calls: list[str]) -> Experiment:
    def measure(run: Run) -> Any:
        calls.append(run.name)
        return experiment.measure(run)

    return replace(experiment, measure=measure)


def test_names_are_picked_once_in_order() -> None:
    assert [one.name for one in pick([], EXPERIMENTS)] == list(EXPERIMENTS)
    assert [one.name for one in pick(["ssmax", "noise", "ssmax"], EXPERIMENTS)] == [
        "noise",
        "ssmax",
    ]


@pytest.mark.parametrize(
    ("name", "hint"), [("frezing", "did you mean 'freezing'"), ("zzz", "there are: noise, ")]
)
def test_an_unknown_name_gets_the_nearest_one(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        pick(["noise", name], EXPERIMENTS)


def test_a_rerun_measures_only_what_is_not_there(tmp_path: Path) -> None:
    calls: list[str] = []
    chosen = [counted(EXPERIMENTS[name], calls) for name in QUICKEST]
    first = list(run(chosen, tmp_path, quick=True, figures=False))
    assert calls == list(QUICKEST)
    assert not any(outcome.resumed for outcome in first)
    again = list(run(chosen, tmp_path, quick=True, figures=False))
    assert calls == list(QUICKEST)
    assert all(outcome.resumed for outcome in again)
    assert [one.record.rows for one in again] == [one.record.rows for one in first]
    # a half-written record is another measurement; force is one in any case
    list(run(chosen[:1], tmp_path, quick=True, figures=False, force=True))
    assert len(calls) == 3
    (tmp_path / "ssmax.json").write_text("{", encoding="utf-8")
    list(run(chosen[1:], tmp_path, quick=True, figures=False))
    assert len(calls) == 4
    list(run(chosen[1:], tmp_path, quick=True, figures=False, force=True))
    assert len(calls) == 5


def test_records_of_other_runs_stay(tmp_path: Path, call: Callable[..., Any]) -> None:
    calls: list[str] = []
    chosen = [counted(EXPERIMENTS["ssmax"], calls)]
    list(run(chosen, tmp_path, quick=True, figures=False))
    path = tmp_path / "ssmax.json"
    before = path.read_bytes()
    for quick in (True, False):
        with pytest.raises(
            ValueError, match=r"ssmax.json is a record of seed 0 at quick size, but"
        ):
            list(run(chosen, tmp_path, quick=quick, figures=False, seed=1))
    refused = call("ssmax", "--seed", 1, "--no-figures")
    assert refused.exit_code == 2
    assert "seed 0 at quick size" in " ".join(refused.output.split())
    assert (len(calls), path.read_bytes()) == (1, before)
    list(run(chosen, tmp_path, quick=True, figures=False, seed=1, force=True))
    assert (len(calls), load(path).seed) == (2, 1)
    replace(load(path), quick=False).save(path)
    with pytest.raises(
        ValueError, match="of seed 1 at full size, but this run is for seed 1 at quick"
    ):
        list(run(chosen, tmp_path, quick=True, figures=False, seed=1))


@pytest.mark.slow
def test_figures_of_other_numbers_do_not_stay(tmp_path: Path) -> None:
    chosen = [EXPERIMENTS["ssmax"]]
    (outcome,) = run(chosen, tmp_path, quick=True)
    stamps = {path: path.read_bytes() for path in outcome.files}
    assert len(stamps) == 5
    (tmp_path / "ssmax.png").write_bytes(b"old")
    list(run(chosen, tmp_path, quick=True, force=True))
    assert (tmp_path / "ssmax.png").read_bytes() == stamps[tmp_path / "ssmax.png"]
    (tmp_path / "ssmax.svg").unlink()
    (resumed,) = run(chosen, tmp_path, quick=True)
    assert resumed.resumed
    assert (tmp_path / "ssmax.svg").read_bytes() == stamps[tmp_path / "ssmax.svg"]


def test_the_command_writes_records_and_a_table(call: Callable[..., Any], tmp_path: Path) -> None:
    result = call(*QUICKEST, "--json", tmp_path / "all.json", "--no-figures")
    assert result.exit_code == 0, result.output
    assert "holds only where n ≤ 149" in " ".join(result.output.split())
    whole = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert whole["complete"] is True
    assert [record["name"] for record in whole["records"]] == list(QUICKEST)
    assert load(tmp_path / "ssmax.json").as_expected
    assert result.output.index("predicted:") < result.output.index("found:")


def test_an_interrupt_keeps_what_finished(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(run: Run) -> list[Row]:
        raise KeyboardInterrupt

    one = replace(EXPERIMENTS["ssmax"], measure=interrupted)
    with monkeypatch.context() as patch:
        patch.setitem(EXPERIMENTS, "ssmax", one)
        result = call(*QUICKEST, "--json", tmp_path / "all.json", "--no-figures")
    assert result.exit_code == INTERRUPTED
    assert "interrupted after 1 of 2 experiments" in result.output
    assert load(tmp_path / "sparsity_decay.json").as_expected
    assert not (tmp_path / "ssmax.json").exists()
    whole = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert whole["complete"] is False
    assert [record["name"] for record in whole["records"]] == ["sparsity_decay"]
    rest = call(*QUICKEST, "--no-figures")
    assert rest.exit_code == 0
    assert "read from an earlier run" in rest.output


def test_another_verdict_than_expected_is_exit_1(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ssmax = EXPERIMENTS["ssmax"]
    claims = (replace(ssmax.claims[0], expected="does not hold"), *ssmax.claims[1:])
    monkeypatch.setitem(EXPERIMENTS, "ssmax", replace(ssmax, claims=claims))
    result = call("ssmax", "--no-figures")
    assert result.exit_code == 1
    assert "expected: does not hold" in " ".join(result.output.split())


def test_misuse_is_exit_2_before_anything_runs(call: Callable[..., Any], tmp_path: Path) -> None:
    result = call("frezing")
    assert result.exit_code == 2
    assert "did you mean 'freezing'" in " ".join(result.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())
    assert call("ssmax", "--json", tmp_path).exit_code == 2


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_an_output_that_is_a_file_is_misuse(
    call: Callable[..., Any], tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    result = call("ssmax", "--no-figures", "--out", tmp_path / place)
    assert result.exit_code == 2
    assert "is not a directory" in " ".join(result.output.replace("│", " ").split())
    assert "predicted" not in result.output


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_models_cannot_have_is_misuse(call: Callable[..., Any], seed: int) -> None:
    assert call("ssmax", "--no-figures", "--seed", seed).exit_code == 2
    with pytest.raises(
        ValueError, match=f"seed must be a whole number from 0 to 4294967295, got {seed}"
    ):
        Run("ssmax", True, seed)


def test_a_training_that_fails_ends_with_one_sentence(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverges(run: Run) -> list[Row]:
        raise FloatingPointError("tiny: the loss is nan after 50 steps")

    monkeypatch.setitem(EXPERIMENTS, "ssmax", replace(EXPERIMENTS["ssmax"], measure=diverges))
    result = call("ssmax", "--no-figures")
    assert result.exit_code == 1
    assert "acutance: tiny: the loss is nan after 50 steps" in result.output


def test_claims_of_the_full_size_are_named_and_not_judged(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replace(EXPERIMENTS["ssmax"], full_only=("fades",))
    monkeypatch.setitem(EXPERIMENTS, "ssmax", one)
    for how in ("s)", "read from an earlier run"):
        result = call("ssmax", "--no-figures")
        assert result.exit_code == 0
        shown = " ".join(result.output.split())
        assert "tested at full size only: softmax leaves the one key half of the weight" in shown
        assert how in shown
    keys = [judgement.claim.key for judgement in load(tmp_path / "ssmax.json").judgements]
    assert keys == ["ssmax", "softmax", "least", "critical"]


def test_what_needs_a_missing_package_is_left_out_or_named(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = replace(EXPERIMENTS["noise"], needs="no_such_package")
    monkeypatch.setitem(EXPERIMENTS, "noise", lacking)
    both = call("noise", "ssmax", "--no-figures")
    assert both.exit_code == 0
    assert "noise: skipped, because it needs no_such_package" in both.output
    alone = call("noise", "--no-figures")
    assert alone.exit_code == 1
    assert "the experiment noise needs no_such_package; install it with" in alone.output


def test_what_only_the_full_size_needs_is_not_missed_by_the_quick_one(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lacking = replace(EXPERIMENTS["ssmax"], full_needs="no_such_package")
    monkeypatch.setitem(EXPERIMENTS, "ssmax", lacking)
    assert call("ssmax", "--no-figures", "--quick").exit_code == 0
    with pytest.raises(ImportError, match=r"ssmax needs no_such_package at full size; install it"):
        next(run([lacking], tmp_path / "full", figures=False))


def test_without_matplotlib_it_says_what_to_do(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = [name for name in sys.modules if name.startswith("matplotlib.")]
    for name in ("matplotlib", *loaded):
        monkeypatch.setitem(sys.modules, name, None)
    result = call("ssmax")
    assert result.exit_code == 1
    assert "drawing needs matplotlib; install it with" in result.output
    assert "or skip figures with --no-figures" in result.output
    assert not (tmp_path / "ssmax.json").exists()
    without = call("ssmax", "--no-figures")
    assert without.exit_code == 0
    assert "records in" in without.output
    assert "figures in" not in without.output


def test_models_stay_so_that_a_training_is_not_done_twice(tmp_path: Path) -> None:
    notes: list[str] = []

    def measure(given: Run) -> list[Row]:
        def loss(model: torch.nn.Module, generator: torch.Generator) -> torch.Tensor:
            return model(torch.randn(4, 2, generator=generator)).square().mean()

        fit(lambda: torch.nn.Linear(2, 1), loss, Plan("tiny", 50, 1e-2), **given.saving("tiny"))
        return EXPERIMENTS["ssmax"].measure(given)  # type: ignore[return-value]

    chosen = [replace(EXPERIMENTS["ssmax"], measure=measure)]
    for _ in range(2):
        list(run(chosen, tmp_path, quick=True, figures=False, force=True, note=notes.append))
    assert [path.name for path in (tmp_path / "models").iterdir()] == [
        "tiny-quick-seed0.checkpoint"
    ]
    assert len(notes) == 1
    assert notes[0].startswith("tiny: step 50/50, loss ")


def test_the_list_names_every_experiment(call: Callable[..., Any]) -> None:
    result = call("--list")
    assert result.exit_code == 0
    assert all(name in result.output for name in EXPERIMENTS)


def test_help_needs_no_torch() -> None:
    check = (
        "import sys\n"
        "from acutance import cli\n"
        "try: cli.app(['reproduce', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert "--quick" in done.stdout
