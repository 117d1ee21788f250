"""The benchmark: what statistics cost beside attention alone, behind a correctness gate.

A case names shapes and the ways of computing them that compete; each way is first checked against a
float64 reference, then timed in turns with the others, and where the case says so measured for
memory in a process of its own. ``acutance bench`` is a thin caller of :func:`run`.

Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from acutance.bench import render
from acutance.bench.cases import CASES, GROUPS, SETS, Case
from acutance.bench.goals import GOALS, Goal
from acutance.bench.judge import Judgement, judge
from acutance.bench.records import BenchReport, CaseResult, Check, Peak, Progress, Row, Spread

__all__ = [
    "run",
    "judge",
    "CASES",
    "GROUPS",
    "SETS",
    "GOALS",
    "Case",
    "Goal",
    "Judgement",
    "BenchReport",
    "CaseResult",
    "Row",
    "Check",
    "Peak",
    "Spread",
    "Progress",
    "render",
]


def run(
    cases: str | Case | Iterable[str | Case] = "all",
    *,
    threads: int | Iterable[int] = 1,
    rounds: int = 7,
    quick: bool = False,
    memory: bool = True,
    progress: Callable[[Progress], None] | None = None,
    save: Callable[[BenchReport], None] | None = None,
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
        The report; :func:`acutance.bench.render.table` draws it.

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
    from acutance.bench import runner  # torch

    return runner.run(
        cases,
        threads=threads,
        rounds=rounds,
        quick=quick,
        memory=memory,
        progress=progress,
        save=save,
        resume=resume,
    )
