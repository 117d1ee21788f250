"""The benchmark: what statistics cost beside attention alone, behind a correctness gate.

A case names shapes and the ways of computing them that compete; each way is first checked against a
float64 reference, then timed in turns with the others, then measured for memory in a process of its
own. ``acutance bench`` and ``benchmarks/run.py`` are thin callers of :func:`run`.

Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from acutance.bench import render
from acutance.bench.cases import CASES, SETS, Case
from acutance.bench.records import BenchReport, CaseResult, Check, Progress, Row, Spread

__all__ = [
    "run",
    "CASES",
    "SETS",
    "Case",
    "BenchReport",
    "CaseResult",
    "Row",
    "Check",
    "Spread",
    "Progress",
    "render",
]


def run(
    cases: str | Case | Iterable[str | Case] = "quick",
    *,
    threads: int = 1,
    rounds: int = 7,
    backward: bool = False,
    memory: bool = True,
    progress: Callable[[Progress], None] | None = None,
    resume: BenchReport | None = None,
) -> BenchReport:
    """Check, time and weigh the contenders of some cases, on the CPU.

    Interrupting it (^C) loses only the call in flight: the report then holds what was finished,
    with ``complete`` False, and may be given to a later run as ``resume``.

    Args:
        cases: names from :data:`CASES` or :data:`SETS`, or cases of your own.
        threads: torch's threads while it runs; the former number is restored.
        rounds: timed rounds; each contender has a turn in each, every other in reverse order.
        backward: time the forward and backward passes of a loss on output and entropy together.
        memory: also measure each contender's peak memory, in a fresh process.
        progress: called before each step.
        resume: an earlier report; its finished cases are kept if settings and versions agree.

    Returns:
        The report; :func:`acutance.bench.render.table` draws it.

    Raises:
        TypeError: if an option's type is wrong.
        ValueError: if a case is unknown (the message names the nearest), or a number is below 1.

    Example:
        >>> tiny = Case("tiny", queries=16, keys=16, contenders=("sdpa", "acutance"))
        >>> report = run(tiny, rounds=1, memory=False)
        >>> [(row.contender, row.status) for row in report.results[0].rows]
        [('sdpa', 'timed'), ('acutance', 'timed')]
    """
    from acutance.bench import runner  # torch

    return runner.run(
        cases,
        threads=threads,
        rounds=rounds,
        backward=backward,
        memory=memory,
        progress=progress,
        resume=resume,
    )
