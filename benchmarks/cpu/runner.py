"""run: the gate, the turns and the weighing of each case, interruptible throughout."""

from __future__ import annotations

import difflib
import gc
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch

from acutance.comparison.timing import Seconds
from acutance.kernels import library
from acutance.shapes import check_count, check_flag
from benchmarks.cpu.cases import CASES, REFERENCE, Case, choose
from benchmarks.cpu.contenders import CONTENDERS, UnavailableError
from benchmarks.cpu.gate import Gate
from benchmarks.cpu.inputs import make_inputs
from benchmarks.cpu.machine import PEAK_DTYPES, describe, measure_peak
from benchmarks.cpu.measure import take_turns, warm_up
from benchmarks.cpu.memory import no_room, weigh_apart
from benchmarks.cpu.passes import make_upstream, ready
from benchmarks.cpu.records import (
    BenchReport,
    CaseResult,
    Check,
    Environment,
    Peak,
    Progress,
    Row,
    Settings,
    Spread,
    Status,
)
from benchmarks.cpu.render import count_of

Report = Callable[[Progress], None]
#: Seconds beyond which a call is not made once more to warm up.
LONG = 2.0
Save = Callable[[BenchReport], None]


def run(
    cases: str | Case | Iterable[str | Case] = "all",
    *,
    threads: int | Iterable[int] = 1,
    rounds: int = 7,
    quick: bool = False,
    memory: bool = True,
    progress: Report | None = None,
    save: Save | None = None,
    resume: BenchReport | None = None,
) -> BenchReport:
    """Check, time and weigh the contenders of some cases, on the CPU.

    Interrupting it (^C) loses only the call in flight: the report then holds what was finished,
    with ``complete`` False, and may be given to a later run as ``resume``.

    Args:
        cases: names from :data:`CASES` or :data:`SETS`, or cases of your own.
        threads: torch's threads while it runs, one number or several; the former is restored.
        rounds: timed rounds; each contender has a turn in each, every other in reverse order. Long
            cases take fewer.
        quick: of a group or set take only its quick cases.
        memory: also measure peak memory, in fresh processes, where a case says so.
        progress: called before each step.
        save: called with all there is after each case, and at the end.
        resume: an earlier report, of the same settings, versions and machine; what it finished is
            in the new report too, and is not measured again.

    Returns:
        The report; :func:`benchmarks.cpu.render.table` draws it.

    Raises:
        TypeError: if an option's type is wrong.
        ValueError: if a case is unknown (the message names the nearest), a number is below 1, or
            the report to resume was made otherwise.

    Example:
        >>> tiny = Case("tiny", queries=16, keys=16, contenders=("sdpa", "acutance"))
        >>> report = run(tiny, rounds=1)
        >>> [(row.contender, row.status) for row in report.results[0].rows]
        [('sdpa', 'timed'), ('acutance', 'timed')]
    """
    chosen = choose(cases, quick=check_flag("quick", quick))
    for case in chosen:
        _check_contenders(case)
    counts = [threads] if isinstance(threads, int) else list(threads)
    counts = list(dict.fromkeys(check_count("threads", count, 1) for count in counts))
    if not counts:
        raise ValueError("threads must be a number of threads or several, got none")
    settings = Settings(
        rounds=check_count("rounds", rounds, 1), memory=check_flag("memory", memory)
    )
    environment = describe()
    if resume is not None:
        _check_resumable(resume, settings, environment)
    return _Run(settings, environment, progress, save, resume).run(chosen, counts)


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


def _check_resumable(resume: BenchReport, settings: Settings, environment: Environment) -> None:
    if resume.settings != settings:
        raise ValueError(f"the report to resume was made with {resume.settings}, not {settings}")
    if not resume.environment.same_place(environment):
        raise ValueError(
            f"the report to resume was made elsewhere: {resume.environment}, not {environment}"
        )


class _Run:
    """A run on its way to a report."""

    def __init__(
        self,
        settings: Settings,
        environment: Environment,
        progress: Report | None,
        save: Save | None,
        resume: BenchReport | None,
    ) -> None:
        self._settings, self._progress, self._save = settings, progress, save
        self._environment = environment if resume is None else resume.environment
        self._peaks: dict[int, Peak] = {}
        self._former: list[CaseResult] = []
        if resume is not None:
            self._former = [result for result in resume.results if result.complete]
            self._peaks = {peak.threads: peak for peak in resume.peaks}
        self._new: list[CaseResult] = []

    def run(self, cases: tuple[Case, ...], counts: list[int]) -> BenchReport:
        """Every case at each number of threads; what an earlier report finished is kept."""
        asked = {case.name: case for case in cases}
        self._former = [  # a case that has changed since is another one
            result
            for result in self._former
            if asked.get(result.case.name, result.case) == result.case
        ]
        finished = {(result.case, result.threads) for result in self._former}
        runs = [
            _CaseRun(case, count, self._settings)
            for count in counts
            for case in cases
            if (case, count) not in finished
        ]
        peaks = [count for count in counts if self._lacks(count, cases)]
        steps = _Steps(len(peaks) + sum(each.steps for each in runs), self._progress)
        complete, former = True, torch.get_num_threads()
        try:
            for count in peaks:
                steps.begin(f"what the machine can do with {count_of(count)}")
                self._peaks[count] = measure_peak(count, {case.dtype for case in cases})
            for each in runs:
                torch.set_num_threads(each.threads)
                try:
                    each.run(steps)
                finally:
                    if each.begun:
                        self._new.append(each.result())
                if self._save is not None:
                    self._save(self._report(complete=False))
        except KeyboardInterrupt:
            complete = False
            done = sum(result.complete for result in self._new)
            steps.say(f"interrupted: {done} of {len(runs)} cases finished")
        finally:
            torch.set_num_threads(former)
        report = self._report(complete)
        if self._save is not None:
            self._save(report)
        return report

    def _lacks(self, count: int, cases: Iterable[Case]) -> bool:
        """Whether a rate that the cases' floors need has not been measured."""
        named = {case.dtype for case in cases if case.timing != "memory"}
        known = self._peaks[count].gflops if count in self._peaks else {}
        return not named & set(PEAK_DTYPES) <= set(known) or bool(named and not known)

    def _report(self, complete: bool) -> BenchReport:
        """What is known so far, whenever it was found, in the order of :data:`CASES`."""
        place = {name: index for index, name in enumerate(CASES)}
        results = sorted(
            (*self._former, *self._new),
            key=lambda each: (place.get(each.case.name, len(place)), each.threads),
        )
        peaks = tuple(self._peaks[count] for count in sorted(self._peaks))
        return BenchReport(self._settings, self._environment, peaks, tuple(results), complete)


class _Steps:
    """Counts the steps of a run and tells the caller before each."""

    def __init__(self, total: int, report: Report | None) -> None:
        self._done, self._total, self._report = 0, total, report

    def begin(self, message: str) -> None:
        self.say(message)
        self._done += 1

    def say(self, message: str) -> None:
        if self._report is not None:
            self._report(Progress(self._done, self._total, message))


class _CaseRun:
    """One case at one number of threads, on its way to a :class:`CaseResult`."""

    def __init__(self, case: Case, threads: int, settings: Settings) -> None:
        self.case, self.threads = case, threads
        self.begun = self.complete = False
        self._timed = case.timing != "memory"
        self._rounds_wanted = min(settings.rounds, case.rounds or settings.rounds)
        self._weighed = case.weigh and settings.memory
        self._status: dict[str, tuple[Status, str]] = {}
        self._checks: dict[str, tuple[Check, ...]] = {}
        self._rounds: list[dict[str, Seconds]] = []
        self._peaks: dict[str, float] = {}
        self._unweighed: dict[str, str] = {}
        self._took: dict[str, float] = {}
        self._backends: dict[str, str] = {}

    @property
    def steps(self) -> int:
        """How many steps :meth:`run` announces."""
        count = len(self.case.contenders)
        timing = count + 1 + self._rounds_wanted if self._timed else 0
        return timing + count * self._weighed

    def run(self, steps: _Steps) -> None:
        """Gate, turns, memory."""
        self.begun = True
        if self._timed:
            self._gate_and_time(steps)
        gc.collect()  # the tensors of this process go before others measure theirs
        if self._weighed:
            self._weigh(steps)
        self.complete = True

    def _gate_and_time(self, steps: _Steps) -> None:
        name = self.case.name
        inputs = make_inputs(self.case)
        gate = Gate(inputs)
        for contender in self.case.contenders:
            steps.begin(f"{name}: checking {contender}")
            self._status[contender] = self._admit(contender, gate)
        upstream = make_upstream(inputs) if self.case.backward else None
        jobs = {
            contender: partial(ready, CONTENDERS[contender], inputs, upstream)
            for contender, (status, _) in self._status.items()
            if status == "timed"
        }
        steps.begin(f"{name}: warming up")
        short = {name: job for name, job in jobs.items() if self._took[name] < LONG}
        repeats = dict.fromkeys(jobs, 1) | warm_up(short)  # the gate warmed up the others
        turns = take_turns(jobs, self._rounds_wanted, repeats)
        for index in range(self._rounds_wanted):
            steps.begin(f"{name}: round {index + 1} of {self._rounds_wanted}")
            self._rounds.append(next(turns))

    def _admit(self, name: str, gate: Gate) -> tuple[Status, str]:
        contender = CONTENDERS[name]
        crowded = no_room(contender.needs(self.case))
        if crowded is not None:
            return "not run", crowded
        try:
            begin = time.perf_counter()
            self._checks[name] = gate.check(contender)
            self._took[name] = time.perf_counter() - begin
            self._backends[name] = gate.backend
        except UnavailableError as reason:
            return "not run", str(reason)
        except Exception as error:  # whatever a contender raises, the others still run
            return "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        wrong = [check for check in self._checks[name] if not check.passed]
        if wrong:
            return "failed", "; ".join(map(_refusal, wrong))
        return "timed", ""

    def _weigh(self, steps: _Steps) -> None:
        for contender in self.case.contenders:
            steps.begin(f"{self.case.name}: memory of {contender}")
            if self._timed and self._status[contender][0] != "timed":
                continue
            try:
                self._peaks[contender] = weigh_apart(self.case, contender, threads=self.threads)
            except RuntimeError as error:
                self._unweighed[contender] = str(error)
            if not self._timed:
                lost = self._unweighed.get(contender)
                self._status[contender] = ("failed", lost) if lost else ("weighed", "")

    def result(self) -> CaseResult:
        """What is known so far."""
        rows = tuple(map(self._row, self.case.contenders))
        return CaseResult(self.case, self.threads, rows, self.complete)

    def _row(self, name: str) -> Row:
        status, reason = self._status.get(name, ("unfinished", ""))
        checks = self._checks.get(name, ())
        if status == "timed" and not self._rounds:
            status, reason = "unfinished", ""
        if status not in ("timed", "weighed"):
            return Row(name, status, reason, checks)
        seconds = [times[name] for times in self._rounds]
        base = [times[REFERENCE] for times in self._rounds if REFERENCE in times]
        peak, reference = self._peaks.get(name), self._peaks.get(REFERENCE)
        return Row(
            name,
            status,
            self._unweighed.get(name, ""),
            checks,
            milliseconds=_spread([1e3 * each.wall for each in seconds]),
            cpu_milliseconds=_spread([1e3 * each.cpu for each in seconds]),
            ratio=_ratio([each.wall for each in seconds], [each.wall for each in base]),
            cpu_ratio=_ratio([each.cpu for each in seconds], [each.cpu for each in base]),
            rounds=len(seconds),
            gflop=CONTENDERS[name].gflop(self.case) if seconds else 0.0,
            peak_mib=peak,
            mib_above_reference=None if peak is None or reference is None else peak - reference,
            backend=_kernel(self._backends.get(name, ""), CONTENDERS[name].cpu),
        )


def _kernel(backend: str, cpu: str) -> str:
    """The backend and, of the native one, the instruction set."""
    if backend != "native":
        return backend
    found = library.load()
    return backend if isinstance(found, str) else f"native {cpu or found.cpu}"


def _spread(values: list[float]) -> Spread | None:
    return Spread.of(values) if values else None


def _ratio(times: list[float], reference: list[float]) -> Spread | None:
    """Quartiles of per-round ratios; None without a reference that took measurable time."""
    if not reference or min(reference) <= 0.0:
        return None
    return Spread.of([time / base for time, base in zip(times, reference, strict=True)])


def _refusal(check: Check) -> str:
    error = "not finite" if check.error is None else f"{check.error:.1e}"
    return f"{check.quantity} error {error}, tolerance {check.tolerance:.1e}"
