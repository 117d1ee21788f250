"""run: the gate, the turns and the weighing of each case, interruptible throughout."""

from __future__ import annotations

import datetime
import difflib
import gc
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from acutance.bench.cases import REFERENCE, Case, choose
from acutance.bench.contenders import (
    CONTENDERS,
    Contender,
    execute,
    make_inputs,
    make_upstream,
)
from acutance.bench.gate import Gate
from acutance.bench.measure import (
    Taken,
    memory_method,
    no_room,
    take_turns,
    warm_up,
    weigh_apart,
)
from acutance.bench.records import (
    BenchReport,
    CaseResult,
    Check,
    Environment,
    Progress,
    Row,
    Settings,
    Spread,
    Status,
)
from acutance.shapes import check_count, check_flag

Report = Callable[[Progress], None]


def run(
    cases: str | Case | Iterable[str | Case],
    *,
    threads: int = 1,
    rounds: int = 7,
    backward: bool = False,
    memory: bool = True,
    progress: Report | None = None,
    resume: BenchReport | None = None,
) -> BenchReport:
    """See :func:`acutance.bench.run`."""
    chosen = choose(cases)
    for case in chosen:
        _check_contenders(case)
    settings = Settings(
        threads=check_count("threads", threads, 1),
        rounds=check_count("rounds", rounds, 1),
        backward=check_flag("backward", backward),
        memory=check_flag("memory", memory),
    )
    environment = describe()
    kept = _reusable(resume, settings, environment)
    runs = [_CaseRun(case, settings) for case in chosen]
    steps = _Steps(sum(run.steps for run in runs), progress)
    results: list[CaseResult] = []
    complete = True
    former = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for each in runs:
            if each.case in kept:
                results.append(kept[each.case])
                steps.skip(each.steps)
                continue
            try:
                each.run(steps)
            finally:
                if each.begun:
                    results.append(each.result())
    except KeyboardInterrupt:
        complete = False
        steps.say(f"interrupted: {sum(r.complete for r in results)} of {len(runs)} cases finished")
    finally:
        torch.set_num_threads(former)
    return BenchReport(settings, environment, tuple(results), complete)


def describe() -> Environment:
    """The versions and the machine, now."""
    try:
        version = importlib.metadata.version("acutance")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return Environment(
        acutance=version,
        torch=torch.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cores=os.cpu_count() or 1,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        memory_method=memory_method(),
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _check_contenders(case: Case) -> None:
    for name in case.contenders:
        if name not in CONTENDERS:
            close = difflib.get_close_matches(name, CONTENDERS, n=1, cutoff=0.4)
            hint = (
                f"; did you mean {close[0]!r}?"
                if close
                else f": choose from {', '.join(CONTENDERS)}"
            )
            raise ValueError(f"no contender is named {name!r} (case {case.name!r}){hint}")


def _reusable(
    resume: BenchReport | None, settings: Settings, environment: Environment
) -> dict[Case, CaseResult]:
    """The finished cases of an earlier report, if its numbers may stand beside new ones."""
    if resume is None:
        return {}
    if resume.settings != settings:
        raise ValueError(f"the report to resume was made with {resume.settings}, not {settings}")
    if not resume.environment.same_place(environment):
        raise ValueError(
            f"the report to resume was made elsewhere: {resume.environment}, not {environment}"
        )
    return {result.case: result for result in resume.results if result.complete}


class _Steps:
    """Counts the steps of a run and tells the caller before each."""

    def __init__(self, total: int, report: Report | None) -> None:
        self._done, self._total, self._report = 0, total, report

    def begin(self, message: str) -> None:
        self.say(message)
        self._done += 1

    def skip(self, count: int) -> None:
        self._done += count

    def say(self, message: str) -> None:
        if self._report is not None:
            self._report(Progress(self._done, self._total, message))


class _CaseRun:
    """One case on its way to a :class:`CaseResult`."""

    def __init__(self, case: Case, settings: Settings) -> None:
        self.case, self.settings = case, settings
        self.begun = self.complete = False
        self._status: dict[str, tuple[Status, str]] = {}
        self._checks: dict[str, tuple[Check, ...]] = {}
        self._rounds: list[dict[str, Taken]] = []
        self._peaks: dict[str, float] = {}
        self._unweighed: dict[str, str] = {}

    @property
    def steps(self) -> int:
        """How many steps :meth:`run` announces."""
        count = len(self.case.contenders)
        return count + 1 + self.settings.rounds + count * self.settings.memory

    def run(self, steps: _Steps) -> None:
        """Gate, turns, memory."""
        self.begun = True
        self._gate_and_time(steps)
        gc.collect()  # the tensors of this process go before others measure theirs
        if self.settings.memory:
            self._weigh(steps)
        self.complete = True

    def _gate_and_time(self, steps: _Steps) -> None:
        name, backward = self.case.name, self.settings.backward
        inputs = make_inputs(self.case, requires_grad=backward)
        gate = Gate(inputs, backward=backward)
        for contender in self.case.contenders:
            steps.begin(f"{name}: checking {contender}")
            self._status[contender] = self._admit(contender, gate)
        upstream = make_upstream(inputs) if backward else None
        calls = {
            contender: partial(execute, CONTENDERS[contender], inputs, upstream)
            for contender, (status, _) in self._status.items()
            if status == "timed"
        }
        steps.begin(f"{name}: warming up")
        turns = take_turns(calls, self.settings.rounds, warm_up(calls))
        for index in range(self.settings.rounds):
            steps.begin(f"{name}: round {index + 1} of {self.settings.rounds}")
            self._rounds.append(next(turns))

    def _admit(self, name: str, gate: Gate) -> tuple[Status, str]:
        contender: Contender = CONTENDERS[name]
        crowded = no_room(contender.needs(self.case, self.settings.backward))
        if crowded is not None:
            return "not run", crowded
        try:
            self._checks[name] = gate.check(contender)
        except Exception as error:  # whatever a contender raises, the others still run
            return "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        wrong = [check for check in self._checks[name] if not check.passed]
        if wrong:
            return "failed", "; ".join(map(_refusal, wrong))
        return "timed", ""

    def _weigh(self, steps: _Steps) -> None:
        for contender in self.case.contenders:
            steps.begin(f"{self.case.name}: memory of {contender}")
            if self._status[contender][0] != "timed":
                continue
            try:
                self._peaks[contender] = weigh_apart(
                    self.case,
                    contender,
                    threads=self.settings.threads,
                    backward=self.settings.backward,
                )
            except RuntimeError as error:
                self._unweighed[contender] = str(error)

    def result(self) -> CaseResult:
        """What is known so far."""
        return CaseResult(self.case, tuple(map(self._row, self.case.contenders)), self.complete)

    def _row(self, name: str) -> Row:
        status, reason = self._status.get(name, ("unfinished", ""))
        checks = self._checks.get(name, ())
        if status == "timed" and not self._rounds:
            status, reason = "unfinished", ""
        if status != "timed":
            return Row(name, status, reason, checks)
        taken = [found[name] for found in self._rounds]
        base = [found[REFERENCE] for found in self._rounds if REFERENCE in found]
        peak, reference = self._peaks.get(name), self._peaks.get(REFERENCE)
        return Row(
            name,
            status,
            self._unweighed.get(name, ""),
            checks,
            milliseconds=Spread.of([1e3 * each.wall for each in taken]),
            cpu_milliseconds=Spread.of([1e3 * each.cpu for each in taken]),
            ratio=_ratio([each.wall for each in taken], [each.wall for each in base]),
            cpu_ratio=_ratio([each.cpu for each in taken], [each.cpu for each in base]),
            rounds=len(taken),
            peak_mib=peak,
            mib_above_reference=None if peak is None or reference is None else peak - reference,
        )


def _ratio(times: list[float], reference: list[float]) -> Spread | None:
    """Quartiles of per-round ratios; None without a reference that took measurable time."""
    if not reference or min(reference) <= 0.0:
        return None
    return Spread.of([time / base for time, base in zip(times, reference, strict=True)])


def _refusal(check: Check) -> str:
    error = "not finite" if check.error is None else f"{check.error:.1e}"
    return f"{check.quantity} error {error}, tolerance {check.tolerance:.1e}"
