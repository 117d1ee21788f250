"""A run from end to end, its gate, and being interrupted."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from acutance.comparison.timing import Seconds
from acutance.kernels import library
from benchmarks.cpu import contenders, machine, memory, page, runner
from benchmarks.cpu.cases import EVERYONE, Case
from benchmarks.cpu.contenders import (
    CONTENDERS,
    Contender,
    Result,
    UnavailableError,
    instruction_set,
    ours,
    sdpa,
)
from benchmarks.cpu.gate import Gate
from benchmarks.cpu.goals import judge
from benchmarks.cpu.inputs import Inputs, make_inputs
from benchmarks.cpu.records import BenchReport, Progress, Spread
from benchmarks.cpu.runner import run

TINY = Case("tiny", 64, 64, causal=True, width=16)
TINIEST = Case("tiniest", 16, 16, width=16, heads=2, key_heads=2)
PAIR = ("sdpa", "acutance")
RUNNABLE = tuple(name for name in EVERYONE if name != "flex")  # compiling takes half a minute


@pytest.fixture(autouse=True)
def small_machine(limits: Callable[..., None]) -> None:
    """Its rates need not be right here, and take a second."""
    limits(machine, _SQUARES=(32,), _CONVOLUTIONS=())


@pytest.mark.parametrize("weigh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_tiny_case_runs_end_to_end(weigh: bool) -> None:  # weighing starts processes
    case = replace(TINY, contenders=("sdpa", "naive"), weigh=weigh)
    threads = torch.get_num_threads()
    steps: list[Progress] = []
    report = run(case, rounds=3, progress=steps.append)

    assert report.complete
    assert torch.get_num_threads() == threads
    (result,) = report.results
    assert (result.complete, result.threads) == (True, 1)
    assert [row.contender for row in result.rows] == list(case.contenders)
    for row in result.rows:
        assert (row.status, row.reason, row.rounds) == ("timed", "", 3)
        assert row.milliseconds.median > 0
        assert row.ratio.q1 <= row.ratio.median <= row.ratio.q3
        assert row.peak_mib >= 0 if weigh else row.peak_mib is None
        assert all(check.passed for check in row.checks)
    assert result.row("sdpa").ratio == Spread(1.0, 1.0, 1.0)
    assert result.row("sdpa").mib_above_reference == (0.0 if weigh else None)
    assert [check.quantity for check in result.row("sdpa").checks] == ["output"]
    assert [check.quantity for check in result.row("naive").checks] == [
        "output",
        "output beside sdpa",
        "entropy",
    ]
    count = 9 if weigh else 7
    assert [(step.done, step.total) for step in steps] == [(i, count) for i in range(count)]
    assert steps[0].message == "what the machine can do with 1 thread"
    assert steps[3].message == "tiny: warming up"
    assert report.peak(1).gflops.keys() == {"float32"}
    assert report.peak(1).gflops["float32"] > 0.0

    again = BenchReport.from_json(report.to_json())
    assert again == report
    assert json.loads(report.to_json())["environment"]["torch"] == torch.__version__


def test_each_number_of_threads_is_a_result_and_its_ratio_of_the_right_time() -> None:
    case = replace(TINIEST, contenders=PAIR)
    used: list[int] = []
    report = run(
        case, threads=[2, 1, 2], rounds=2, progress=lambda _: used.append(torch.get_num_threads())
    )
    assert [result.threads for result in report.results] == [1, 2]
    assert {1, 2} <= set(used)
    assert [peak.threads for peak in report.peaks] == [1, 2]
    one, two = report.result("tiniest", 1), report.result("tiniest", 2)
    row = one.row("acutance")
    assert (one.ratio(row), one.time(row)) == (row.cpu_ratio, row.cpu_milliseconds)
    row = two.row("acutance")
    assert (two.ratio(row), two.time(row)) == (row.ratio, row.milliseconds)


def test_ratios_are_of_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = {"sdpa": [1.0, 2.0, 4.0], "acutance": [2.0, 2.0, 2.0]}

    def turns(jobs, rounds, repeats):
        for index in range(rounds):
            yield {name: Seconds(wall[name][index], 10 * wall[name][index] ** 2) for name in jobs}

    monkeypatch.setattr(runner, "take_turns", turns)
    report = run(replace(TINIEST, contenders=PAIR), rounds=3)
    row = report.results[0].row("acutance")
    assert row.milliseconds == Spread(2000.0, 2000.0, 2000.0)
    assert row.ratio == Spread(1.0, 0.75, 1.5)  # quartiles of 2, 1 and 0.5
    assert row.cpu_ratio == Spread(1.0, 0.625, 2.5)  # of 4, 1 and 0.25


FORMS = [
    TINY,
    replace(TINY, name="gqa", key_heads=2),
    replace(TINY, name="padded", causal=False, mask="padding", batch=3),
    replace(TINY, name="boolean", causal=False, mask="boolean"),
    replace(TINY, name="additive", causal=False, mask="additive"),
    replace(TINY, name="window", window=9),
    replace(TINY, name="decode", causal=False, queries=1),
    replace(TINY, name="bfloat16", dtype="bfloat16"),
    replace(TINY, name="float16", dtype="float16"),
]


@pytest.mark.parametrize("case", FORMS, ids=lambda case: case.name)
def test_every_contender_passes_the_gate(case: Case) -> None:
    gate = Gate(make_inputs(case))
    counts = {}
    for name in (*RUNNABLE, "statistics", "gaps", "noise", "acutance-avx512"):
        try:
            checks = gate.check(CONTENDERS[name])
        except UnavailableError:
            continue  # of another instruction set
        wrong = [check.quantity for check in checks if not check.passed]
        # the trick does not know what a mask adds to the scores; 1e-9 is 0 in float16, and so
        # log(p + 1e-9) of a hidden key is −∞
        lost = (name, case.name) in {("entropy-trick", "additive"), ("naive", "float16")}
        assert wrong == (["entropy"] if lost else []), name
        counts[name] = len(checks)
    assert counts["sdpa"] == 1
    assert counts["statistics"] == counts["gaps"] == 9
    assert counts["acutance"] == counts["acutance-unread"] == 11
    assert counts["acutance-metrics"] == 11  # the others are formulas of theory
    assert counts["noise"] == 12
    assert counts["naive"] == counts["entropy-trick"] == 3


@pytest.mark.parametrize("timing", ["backward", "step"])
@pytest.mark.parametrize("loss", ["all", "entropy"])
def test_every_contender_has_the_right_gradients(timing: str, loss: str) -> None:
    gate = Gate(make_inputs(replace(TINY, timing=timing, loss=loss)))
    for name in ("sdpa", "acutance", "statistics", "blocked", "naive"):
        checks = gate.check(CONTENDERS[name])
        assert [check for check in checks if not check.passed] == [], name
        graded = [check.quantity for check in checks if check.quantity.startswith("gradient")]
        entropy_alone = name == "statistics" or (loss == "entropy" and name != "sdpa")
        assert len(graded) == (2 if entropy_alone else 3), name


def made(change: Callable[[Result], Result]) -> Contender:
    return Contender("wrong", lambda x: lambda: change(ours(x)()))


WRONG = {
    "output error ": lambda found: Result(found.output * 1.01),
    "entropy error 1.0e-04, tolerance ": lambda found: Result(
        found.output, {"entropy": found.metrics["entropy"] + 1e-4}
    ),
    "varentropy error 1.0e-02, tolerance ": lambda found: Result(
        None, {"varentropy": found.metrics["varentropy"] - 0.01}
    ),
    "output error not finite, tolerance ": lambda found: Result(found.output * math.nan),
    "ValueError: shape (1, 1, ": lambda found: Result(found.output[:1, :1]),
}


@pytest.mark.parametrize("reason", WRONG)
def test_the_gate_refuses_a_wrong_contender(monkeypatch, reason: str) -> None:
    monkeypatch.setitem(CONTENDERS, "wrong", made(WRONG[reason]))
    case = replace(TINY, contenders=("sdpa", "wrong", "acutance"))
    report = run(case, rounds=1)
    assert [row.status for row in report.results[0].rows] == ["timed", "failed", "timed"]
    row = report.results[0].row("wrong")
    assert row.reason.startswith(reason)
    assert row.milliseconds is row.ratio is row.peak_mib is None
    assert f"tiny: wrong: failed: {reason}" in page.markdown(report)
    assert BenchReport.from_json(report.to_json()) == report


def test_a_row_that_nobody_looked_at_is_held_against_sdpa() -> None:
    case = replace(TINY, queries=128, keys=128)
    gate = Gate(make_inputs(case))
    hidden = next(row for row in range(128) if row not in gate.rows.tolist())

    def change(found: Result) -> Result:
        output = found.output.clone()
        output[:, :, hidden] += 0.01
        return Result(output)

    gate.check(CONTENDERS["sdpa"])
    checks = {check.quantity: check.passed for check in gate.check(made(change))}
    assert checks == {"output": True, "output beside sdpa": False}


def test_what_raises_is_refused_and_what_cannot_run_is_said(monkeypatch) -> None:
    def broken(x: Inputs) -> Callable[[], Result]:
        raise RuntimeError("no such\nkernel")

    def absent(x: Inputs) -> Callable[[], Result]:
        raise UnavailableError("not on this machine")

    monkeypatch.setitem(CONTENDERS, "broken", Contender("broken", broken))
    monkeypatch.setitem(CONTENDERS, "absent", Contender("absent", absent))
    report = run(replace(TINIEST, contenders=("sdpa", "broken", "absent")), rounds=1)
    _, first, second = report.results[0].rows
    assert (first.status, first.reason) == ("failed", "RuntimeError: no such")
    assert (second.status, second.reason) == ("not run", "not on this machine")


def test_the_gate_refuses_a_wrong_gradient() -> None:
    def halved(found: Result) -> Result:
        entropy = found.metrics["entropy"]
        return Result(found.output, {"entropy": (entropy + entropy.detach()) / 2})

    gate = Gate(make_inputs(replace(TINY, timing="backward")))
    right = gate.check(made(lambda found: Result(found.output, found.metrics)))
    assert all(check.passed for check in right)
    failed = [check.quantity for check in gate.check(made(halved)) if not check.passed]
    assert failed == ["gradient of query", "gradient of key"]


def test_naive_is_allowed_what_its_formula_is_wrong_by() -> None:
    case = replace(TINY, causal=False, queries=4, keys=65536, heads=1)
    gate = Gate(make_inputs(case))
    entropy = gate.check(CONTENDERS["naive"])[-1]
    assert entropy.quantity == "entropy"
    assert entropy.passed
    assert entropy.error > 4e-5
    strict = replace(CONTENDERS["naive"], entropy_bias=lambda case: 0.0)
    assert not gate.check(strict)[-1].passed


def test_an_instruction_set_is_used_and_given_back() -> None:
    found = library.load()
    if isinstance(found, str):
        with pytest.raises(UnavailableError, match="native"), instruction_set("avx2"):
            pass
        return
    former = found.cpu
    with instruction_set("baseline"):
        assert found.cpu == "baseline"
    assert found.cpu == former
    with pytest.raises(UnavailableError, match="not sse9"), instruction_set("sse9"):
        pass
    if former != "baseline":
        case = replace(TINIEST, contenders=("sdpa", "acutance", "acutance-baseline"))
        report = run(case, rounds=1)
        backends = [row.backend for row in report.results[0].rows]
        assert backends == ["", f"native {former}", "native baseline"]


def test_flex_attention_says_why_it_does_not_run(monkeypatch) -> None:
    def refuse(function: object) -> None:
        raise NotImplementedError("`return_lse` is not supported yet.\nand a long trace")

    contenders._flex_refusal.cache_clear()
    monkeypatch.setattr(torch, "compile", refuse)
    try:
        report = run(replace(TINIEST, contenders=("sdpa", "flex")), rounds=1)
    finally:
        contenders._flex_refusal.cache_clear()
    row = report.results[0].row("flex")
    assert row.status == "not run"
    assert row.reason == "NotImplementedError: `return_lse` is not supported yet."


def test_maps_that_do_not_fit_are_reported_not_dropped(limits) -> None:
    limits(memory, MEMORY_CAP=1024)
    case = replace(TINIEST, contenders=("sdpa", "naive"))
    report = run(case, rounds=1)
    row = report.results[0].row("naive")
    assert row.status == "not run"
    assert row.reason.startswith("needs 0.0 GiB, limit 0.0 GiB")


def weighed_by(monkeypatch: pytest.MonkeyPatch, weigh: Callable[..., float]) -> None:
    """Memory of contenders without a process for each, which takes seconds to start."""
    monkeypatch.setattr(runner, "weigh_apart", weigh)


def test_a_memory_that_cannot_be_measured_is_said(monkeypatch) -> None:
    def fail(case: Case, contender: str, *, threads: int) -> float:
        if contender == "acutance":
            raise RuntimeError("killed")
        return 2.0

    weighed_by(monkeypatch, fail)
    case = replace(TINIEST, contenders=PAIR, weigh=True)
    report = run(case, rounds=1)
    row = report.results[0].row("acutance")
    assert (row.status, row.reason, row.peak_mib) == ("timed", "killed", None)
    assert report.results[0].row("sdpa").peak_mib == 2.0
    assert run(case, rounds=1, memory=False).results[0].row("sdpa").peak_mib is None


def test_a_case_of_memory_alone_is_not_timed(monkeypatch) -> None:
    sizes = {"sdpa": 8.0, "acutance": 12.5}
    weighed_by(monkeypatch, lambda case, contender, threads: sizes[contender])
    case = replace(TINIEST, timing="memory", weigh=True, contenders=PAIR, goals=("memory",))
    report = run(case, rounds=3)
    assert report.peaks == ()
    row = report.results[0].row("acutance")
    assert (row.status, row.rounds, row.milliseconds) == ("weighed", 0, None)
    assert (row.peak_mib, row.mib_above_reference) == (12.5, 4.5)
    (judgement,) = judge(report)
    assert (judgement.value, judgement.met) == (4.5, True)


@pytest.mark.parametrize("timing", ["backward", "step"])
def test_gradients_are_timed_too(timing: str) -> None:
    case = replace(TINY, timing=timing, contenders=("sdpa", "acutance", "statistics", "naive"))
    report = run(case, rounds=2)
    assert {row.status for row in report.results[0].rows} == {"timed"}
    quantities = [check.quantity for check in report.results[0].row("statistics").checks]
    assert quantities[-2:] == ["gradient of query", "gradient of key"]


def test_the_forward_pass_is_not_in_the_time_of_the_backward_pass(monkeypatch) -> None:
    def slow(x: Inputs) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            time.sleep(0.05)
            return sdpa(x)()

        return call

    monkeypatch.setitem(CONTENDERS, "slow", Contender("slow", slow, lambda out: Result(out)))
    case = replace(TINIEST, contenders=("sdpa", "slow"), timing="backward")
    taken = {
        timing: run(replace(case, timing=timing), rounds=1).results[0].row("slow")
        for timing in ("backward", "step")
    }
    assert taken["backward"].milliseconds.median < 45 < taken["step"].milliseconds.median


# -- interruption ---------------------------------------------------------------------------------


def interrupt_at(message: str):
    def progress(step: Progress) -> None:
        said.append(step.message)
        if step.message == message:
            raise KeyboardInterrupt

    said: list[str] = []
    return progress, said


@pytest.mark.few(2)
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
    weighed_by(monkeypatch, lambda *args, **options: 1.0)
    cases = [
        replace(TINIEST, name=name, contenders=PAIR, weigh=True)
        for name in ("first", "second", "third")
    ]
    saved: list[BenchReport] = []
    progress, said = interrupt_at(message)
    threads = torch.get_num_threads()
    report = run(cases, rounds=3, progress=progress, save=saved.append)
    assert torch.get_num_threads() == threads
    assert not report.complete
    assert said[-1] == "interrupted: 1 of 3 cases finished"
    assert [(result.case.name, result.complete) for result in report.results] == [
        ("first", True),
        ("second", False),
    ]
    assert [row.status for row in report.results[1].rows] == statuses
    assert {row.rounds for row in report.results[1].rows} == {rounds}
    assert [len(each.results) for each in saved] == [1, 2]
    assert saved[-1] == report

    said.clear()
    resumed = run(cases, rounds=3, progress=lambda step: said.append(step.message), resume=report)
    assert resumed.complete
    assert resumed.results[0] == report.results[0]
    assert (resumed.environment, resumed.peaks) == (report.environment, report.peaks)
    assert [result.case.name for result in resumed.results] == ["first", "second", "third"]
    assert said[0] == "second: checking sdpa"


def test_a_round_cut_short_is_left_out(monkeypatch) -> None:
    calls = []

    def slow(x: Inputs) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            calls.append(x)
            time.sleep(0.03)  # long enough not to be repeated
            if len(calls) == 5:  # the gate, twice to warm up, a round, and now
                raise KeyboardInterrupt
            return sdpa(x)()

        return call

    monkeypatch.setitem(CONTENDERS, "slow", Contender("slow", slow, lambda out: Result(out)))
    report = run(replace(TINIEST, contenders=("sdpa", "slow")), rounds=5)
    assert not report.complete
    assert [row.rounds for row in report.results[0].rows] == [1, 1]
    assert report.results[0].row("slow").milliseconds.median > 30


def test_a_resumed_report_keeps_what_is_not_asked_for_again() -> None:
    case = replace(TINIEST, contenders=PAIR)
    first = run(case, rounds=1)
    second = run(replace(case, name="other"), rounds=1, resume=first)
    assert [result.case.name for result in second.results] == ["tiniest", "other"]
    assert second.results[0] == first.results[0]
    changed = run(replace(case, keys=17), rounds=1, resume=first)
    assert [result.case.keys for result in changed.results] == [17]  # a case that is no more goes


def test_a_report_made_otherwise_is_not_resumed() -> None:
    report = run(TINIEST, rounds=1)
    with pytest.raises(ValueError, match="was made with"):
        run(TINIEST, rounds=2, resume=report)
    elsewhere = replace(report, environment=replace(report.environment, processor="another"))
    with pytest.raises(ValueError, match="was made elsewhere"):
        run(TINIEST, rounds=1, resume=elsewhere)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0}', '{"format": 1, "settings": {}}'])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a benchmark report"):
        BenchReport.from_json(text)
