"""judge: which goals were met, from a report alone."""

from __future__ import annotations

from dataclasses import dataclass

from acutance.bench.goals import GOALS, Goal
from acutance.bench.records import BenchReport, CaseResult


@dataclass(frozen=True)
class Judgement:
    """One goal in one case.

    Attributes:
        goal: what was to be reached.
        case: name of the case.
        threads: with how many threads.
        value: the ratio's median, or MiB above the reference; None where there is no number.
    """

    goal: Goal
    case: str
    threads: int
    value: float | None

    @property
    def met(self) -> bool:
        """Whether there is a number and it is within the limit."""
        return self.value is not None and self.value <= self.goal.limit


def judge(report: BenchReport) -> list[Judgement]:
    """Every goal that the report's cases decide, in their order.

    Goals for another instruction set or number of threads are left out; a contender that failed or
    did not run has no number and meets none.
    """
    return [
        Judgement(goal, result.case.name, result.threads, value_of(goal, result))
        for result in report.results
        for goal in goals_of(report, result)
    ]


def goals_of(report: BenchReport, result: CaseResult) -> list[Goal]:
    """The goals that one result can decide, without those whose contender cannot run here."""
    here = report.environment
    found = (GOALS[name] for name in result.case.goals)
    return [
        goal
        for goal in found
        if goal.applies(here.cpu, result.threads, here.reference_cpu)
        and result.row(goal.contender).status not in ("not run", "unfinished")
    ]


def value_of(goal: Goal, result: CaseResult) -> float | None:
    """The number that a goal bounds."""
    row = result.row(goal.contender)
    if goal.unit == "MiB":
        return row.mib_above_reference
    spread = result.ratio(row)
    return None if spread is None else spread.median
