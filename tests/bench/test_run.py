"""A run from end to end, its gate, and being interrupted."""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from acutance import bench
from acutance.bench import measure, runner
from acutance.bench.cases import EVERYONE, Case
from acutance.bench.contenders import (
    CONTENDERS,
    Contender,
    Inputs,
    Result,
    acutance_all,
    make_inputs,
    sdpa,
)
from acutance.bench.gate import Gate

TINY = Case("tiny", 64, 64, causal=True, width=16)
TINIEST = Case("tiniest", 16, 16, width=16, heads=2, key_heads=2)
PAIR = ("sdpa", "acutance")


def test_a_tiny_case_runs_end_to_end() -> None:
    case, threads = replace(TINY, contenders=("sdpa", "naive")), torch.get_num_threads()
    steps: list[bench.Progress] = []
    report = bench.run(case, rounds=3, progress=steps.append)

    assert report.complete
    assert torch.get_num_threads() == threads
    (result,) = report.results
    assert result.complete
    assert [row.contender for row in result.rows] == list(case.contenders)
    for row in result.rows:
        assert (row.status, row.reason, row.rounds) == ("timed", "", 3)
        assert row.milliseconds.median > 0
        assert row.ratio.q1 <= row.ratio.median <= row.ratio.q3
        assert row.peak_mib >= 0
        assert all(check.passed for check in row.checks)
    assert result.row("sdpa").ratio == bench.Spread(1.0, 1.0, 1.0)
    assert result.row("sdpa").mib_above_reference == 0.0
    assert [check.quantity for check in result.row("sdpa").checks] == ["output"]
    assert [check.quantity for check in result.row("naive").checks] == ["output", "entropy"]
    assert [(step.done, step.total) for step in steps] == [(i, 8) for i in range(8)]
    assert steps[2].message == "tiny: warming up"

    again = bench.BenchReport.from_json(report.to_json())
    assert again == report
    assert json.loads(report.to_json())["environment"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    "case",
    [
        TINY,
        replace(TINY, name="gqa", key_heads=2),
        replace(TINY, name="padded", causal=False, padded=True, batch=3),
        replace(TINY, name="decode", causal=False, queries=1),
        replace(TINY, name="bfloat16", dtype="bfloat16"),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_every_contender_passes_the_gate(case: Case, backward: bool) -> None:
    gate = Gate(make_inputs(case, requires_grad=backward), backward=backward)
    count = 0
    for name in EVERYONE:
        checks = gate.check(CONTENDERS[name])
        assert [check for check in checks if not check.passed] == [], name
        count += len(checks)
    assert count == (22 if backward else 8)


def wrong_output(x: Inputs) -> Result:
    output = sdpa(x).output
    return Result(output * 1.01)


def wrong_entropy(x: Inputs) -> Result:
    result = acutance_all(x)
    return Result(result.output, result.entropy + 1e-4)


def not_finite(x: Inputs) -> Result:
    return Result(sdpa(x).output * torch.nan)


def wrong_shape(x: Inputs) -> Result:
    return Result(sdpa(x).output[:1, :1])


def broken(x: Inputs) -> Result:
    raise RuntimeError("no such\nkernel")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (wrong_output, "output error "),
        (wrong_entropy, "entropy error 1.0e-04, tolerance "),
        (not_finite, "output error not finite, tolerance "),
        (wrong_shape, "ValueError: shape (1, 1, "),
        (broken, "RuntimeError: no such"),
    ],
)
def test_the_gate_refuses_a_wrong_contender(monkeypatch, call, reason: str) -> None:
    monkeypatch.setitem(CONTENDERS, "wrong", Contender("wrong", call))
    case = replace(TINY, contenders=("sdpa", "wrong", "acutance"))
    report = bench.run(case, rounds=1, memory=False)
    assert [row.status for row in report.results[0].rows] == ["timed", "failed", "timed"]
    row = report.results[0].row("wrong")
    assert row.reason.startswith(reason)
    assert row.milliseconds is row.ratio is row.peak_mib is None
    assert f"tiny: wrong: failed: {reason}" in bench.render.markdown(report)
    assert bench.BenchReport.from_json(report.to_json()) == report


def test_the_gate_refuses_a_wrong_gradient() -> None:
    def detached(x: Inputs) -> Result:
        return Result(sdpa(x).output, acutance_all(x).entropy * 1.0 + 0.0 * x.query.sum())

    def halved(x: Inputs) -> Result:
        result = acutance_all(x)
        return Result(result.output, (result.entropy + result.entropy.detach()) / 2)

    gate = Gate(make_inputs(TINY, requires_grad=True), backward=True)
    assert all(check.passed for check in gate.check(Contender("right", detached)))
    failed = [
        check.quantity for check in gate.check(Contender("wrong", halved)) if not check.passed
    ]
    assert failed == ["gradient of query", "gradient of key"]


def test_naive_is_allowed_what_its_formula_is_wrong_by() -> None:
    case = replace(TINY, causal=False, queries=4, keys=65536, heads=1, key_heads=1)
    gate = Gate(make_inputs(case))
    _, entropy = gate.check(CONTENDERS["naive"])
    assert entropy.passed
    assert entropy.error > 4e-5
    strict = replace(CONTENDERS["naive"], entropy_bias=lambda case: 0.0)
    assert not gate.check(strict)[1].passed


def test_maps_that_do_not_fit_are_reported_not_dropped(monkeypatch) -> None:
    monkeypatch.setattr(measure, "MEMORY_CAP", 1024)
    case = replace(TINIEST, contenders=("sdpa", "naive"))
    report = bench.run(case, rounds=1, memory=False)
    row = report.results[0].row("naive")
    assert row.status == "not run"
    assert row.reason.startswith("needs 0.0 GiB, limit 0.0 GiB")
    assert "tiniest: naive: not run: needs 0.0 GiB" in drawn(report)


def test_a_memory_that_cannot_be_measured_is_said(monkeypatch) -> None:
    def fail(case: Case, contender: str, *, threads: int, backward: bool) -> float:
        if contender == "acutance":
            raise RuntimeError("killed")
        return 2.0

    monkeypatch.setattr(runner, "weigh_apart", fail)
    report = bench.run(replace(TINIEST, contenders=PAIR), rounds=1)
    row = report.results[0].row("acutance")
    assert (row.status, row.reason, row.peak_mib) == ("timed", "killed", None)
    assert report.results[0].row("sdpa").peak_mib == 2.0


def test_backward_is_timed_too() -> None:
    case = replace(TINY, contenders=EVERYONE)
    report = bench.run(case, rounds=1, backward=True, memory=False)
    assert {row.status for row in report.results[0].rows} == {"timed"}
    quantities = [check.quantity for check in report.results[0].row("acutance-statistics").checks]
    assert quantities == ["entropy", "gradient of query", "gradient of key"]
    assert report.settings.backward


# -- interruption ---------------------------------------------------------------------------------


def interrupt_at(message: str):
    def progress(step: bench.Progress) -> None:
        said.append(step.message)
        if step.message == message:
            raise KeyboardInterrupt

    said: list[str] = []
    return progress, said


@pytest.mark.parametrize(
    ("message", "statuses", "rounds"),
    [
        ("second: checking acutance", ["unfinished", "unfinished"], 0),
        ("second: warming up", ["unfinished", "unfinished"], 0),
        ("second: round 2 of 3", ["timed", "timed"], 1),
        ("second: memory of sdpa", ["timed", "timed"], 3),
    ],
)
def test_an_interrupted_run_returns_what_was_finished(
    monkeypatch, message: str, statuses: list[str], rounds: int
) -> None:
    monkeypatch.setattr(runner, "weigh_apart", lambda *args, **options: 1.0)
    cases = [replace(TINIEST, name=name, contenders=PAIR) for name in ("first", "second", "third")]
    progress, said = interrupt_at(message)
    threads = torch.get_num_threads()
    report = bench.run(cases, rounds=3, progress=progress)
    assert torch.get_num_threads() == threads
    assert not report.complete
    assert said[-1] == "interrupted: 1 of 3 cases finished"
    assert [(result.case.name, result.complete) for result in report.results] == [
        ("first", True),
        ("second", False),
    ]
    assert [row.status for row in report.results[1].rows] == statuses
    assert {row.rounds for row in report.results[1].rows} == {rounds}
    assert "INTERRUPTED" in drawn(report)

    said.clear()
    resumed = bench.run(
        cases, rounds=3, progress=lambda step: said.append(step.message), resume=report
    )
    assert resumed.complete
    assert resumed.results[0] == report.results[0]
    assert [result.case.name for result in resumed.results] == ["first", "second", "third"]
    assert said[0] == "second: checking sdpa"


def test_a_round_cut_short_is_left_out(monkeypatch) -> None:
    calls = []

    def slow(x: Inputs) -> Result:
        calls.append(x)
        time.sleep(0.03)  # long enough not to be repeated
        if len(calls) == 4:  # the gate, the warm-up, a round, and now
            raise KeyboardInterrupt
        return sdpa(x)

    monkeypatch.setitem(CONTENDERS, "slow", Contender("slow", slow))
    case = replace(TINIEST, contenders=("sdpa", "slow"))
    report = bench.run(case, rounds=5, memory=False)
    assert not report.complete
    assert [row.rounds for row in report.results[0].rows] == [1, 1]
    assert report.results[0].row("slow").milliseconds.median > 30


def test_a_report_made_otherwise_is_not_resumed() -> None:
    report = bench.run(TINIEST, rounds=1, memory=False)
    with pytest.raises(ValueError, match="was made with"):
        bench.run(TINIEST, rounds=2, memory=False, resume=report)
    elsewhere = replace(report, environment=replace(report.environment, processor="another"))
    with pytest.raises(ValueError, match="was made elsewhere"):
        bench.run(TINIEST, rounds=1, memory=False, resume=elsewhere)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0}', '{"format": 1, "settings": {}}'])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a benchmark report"):
        bench.BenchReport.from_json(text)


# -- drawing --------------------------------------------------------------------------------------


def drawn(report: bench.BenchReport, width: int = 80) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(bench.render.table(report))
    return captured.get()


def spread(value: float) -> bench.Spread:
    return bench.Spread(value, value * 0.9, value * 1.1)


@pytest.fixture
def example() -> bench.BenchReport:
    """The widest numbers a table has to hold."""
    check = bench.Check("entropy", 1.5e-6, 1e-5)
    row = bench.Row(
        "acutance-statistics",
        "timed",
        "",
        (bench.Check("output", 1e-7, 1e-6), check),
        spread(12345.6),
        spread(12345.6),
        spread(17.25),
        spread(17.25),
        7,
        1534.2,
        1501.0,
    )
    absent = bench.Row("naive", "not run", "needs 24.0 GiB, limit 6.0 GiB")
    result = bench.CaseResult(bench.CASES["full-4096"], (row, absent), complete=True)
    report = bench.run(TINIEST, rounds=1, memory=False)
    return replace(report, results=(result,))


def test_the_table_fits_80_columns(example: bench.BenchReport) -> None:
    text = drawn(example)
    assert "…" not in text
    assert "full-4096: naive: not run: needs 24.0 GiB, limit 6.0 GiB" in text
    (line,) = [line for line in text.splitlines() if line.startswith("acutance-statistics")]
    assert line.split() == [
        "acutance-statistics", "12346", "17.25", "[15.53–18.98]", "17.25", "1534", "+1501",
        "1e-07", "2e-06",
    ]  # fmt: skip
    (line,) = [line for line in text.splitlines() if line.startswith("naive")]
    assert line.split() == ["naive", "not", "run"]


def test_the_markdown_holds_the_same_numbers(example: bench.BenchReport) -> None:
    lines = bench.render.markdown(example).splitlines()
    assert "### `full-4096`" in lines
    assert "B=1 H=8 L=S=4096 E=64 float32" in lines
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 4
    assert len({line.count("|") for line in rows}) == 1
    assert rows[2] == (
        "| acutance-statistics | 12346 | 17.25 | [15.53–18.98] | 17.25 | 1534 | +1501 "
        "| 1e-07 | 2e-06 |"
    )
    assert "- full-4096: naive: not run: needs 24.0 GiB, limit 6.0 GiB" in lines


# -- the script -----------------------------------------------------------------------------------


def script():
    path = Path(__file__).parents[2] / "benchmarks" / "run.py"
    spec = importlib.util.spec_from_file_location("benchmarks_run", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_writes_what_it_found(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setitem(bench.CASES, "tiniest", replace(TINIEST, contenders=PAIR))
    files = {name: tmp_path / name for name in ("report.json", "report.md")}
    arguments = ["tiniest", "--rounds", "1", "--no-memory", "--json", str(files["report.json"])]
    assert script().main([*arguments, "--markdown", str(files["report.md"])]) == 0
    report = bench.BenchReport.from_json(files["report.json"].read_text(encoding="utf-8"))
    assert files["report.md"].read_text(encoding="utf-8") == bench.render.markdown(report)
    assert "tiniest" in capsys.readouterr().out
    assert script().main([*arguments, "--resume", str(files["report.json"])]) == 0


def test_the_script_says_what_is_wrong_in_one_line(capsys) -> None:
    assert script().main(["casual-1024"]) == 2
    assert "did you mean 'causal-1024'?" in capsys.readouterr().out.replace("\n", " ")
