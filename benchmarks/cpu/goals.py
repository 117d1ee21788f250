"""GOALS: what the library sets itself to cost; judge says which were met, from a report alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from benchmarks.cpu.records import BenchReport, CaseResult

#: Said wherever the goals stand beside measurements.
PROVISO = (
    "Goals are for AMD processors, where MKL, on which F.scaled_dot_product_attention runs, stays "
    "below its best; on an Intel Xeon, where it does not, 0.90 (full) and 0.81 (causal) were "
    "measured at 4096 tokens. The goal of AVX2 is decided only where SDPA has no more than AVX2"
)


@dataclass(frozen=True)
class Goal:
    """An upper bound of one number of one contender.

    Attributes:
        name: how a case refers to it.
        what: the case in words, one line.
        contender: whose number it is.
        limit: the bound.
        unit: "ratio" of its time to the reference's, or "MiB" of peak memory above the reference's.
        cpu: instruction set it is for, as the native kernel calls it, or the beginning of several
            names; empty for all.
        threads: number of threads it is for, or None for any.
        reference_cpu: instruction set of the reference it is held against, as PyTorch calls it, or
            the beginning of several names; empty for all.
    """

    name: str
    what: str
    contender: str
    limit: float
    unit: Literal["ratio", "MiB"] = "ratio"
    cpu: str = ""
    threads: int | None = None
    reference_cpu: str = ""

    @property
    def bound(self) -> str:
        """The bound as it is printed.

        Example:
            >>> GOALS["forward-full"].bound, GOALS["memory"].bound
            ('≤ 0.85', '≤ 10 MiB')
        """
        return f"≤ {self.limit:.2f}" if self.unit == "ratio" else f"≤ {self.limit:g} MiB"

    def applies(self, cpu: str, threads: int, reference_cpu: str = "") -> bool:
        """Whether a run on this instruction set, with so many threads, can decide it.

        Args:
            cpu: the widest instruction set of the native kernel there.
            threads: the run's.
            reference_cpu: the instruction set of the reference.

        Example:
            >>> GOALS["forward-full"].applies("avx512_bf16", 1), GOALS["blocked-2"].applies("", 1)
            (True, False)
            >>> [GOALS["forward-avx2"].applies("avx2", 1, other) for other in ("AVX2", "AVX512")]
            [True, False]
        """
        here = cpu.startswith(self.cpu) and reference_cpu.startswith(self.reference_cpu)
        return here and self.threads in (None, threads)


_ALL = "output and every statistic"
GOALS: dict[str, Goal] = {
    goal.name: goal
    for goal in (
        Goal("forward-full", f"{_ALL}, full, AVX-512", "acutance", 0.85, cpu="avx512"),
        Goal("forward-causal", f"{_ALL}, causal, AVX-512", "acutance", 0.80, cpu="avx512"),
        Goal("forward-avx2", f"{_ALL}, both AVX2", "acutance-avx2", 0.97, reference_cpu="AVX2"),
        Goal("statistics", "statistics alone, no values", "statistics", 0.55),
        Goal("noise", "with noise metrics", "noise", 1.25),
        Goal("decode", "decoding, 1 to 4 queries", "acutance-unread", 0.75),
        Goal("short", "short sequences, 64 to 512", "acutance-unread", 0.80),
        Goal("tiny", "1 to 32 tokens, overhead included", "acutance-unread", 1.5),
        Goal("bfloat16", "bfloat16 inputs, both", "acutance", 0.55),
        Goal("boolean", "boolean L × S mask, both", "acutance", 1.0),
        Goal("backward", "backward of output and every statistic", "acutance", 0.80),
        Goal("entropy-backward", "backward of the entropy alone", "statistics", 0.45),
        Goal("blocked-1", "plain PyTorch path, 1 thread", "blocked", 1.45, threads=1),
        Goal("blocked-2", "plain PyTorch path, 2 threads", "blocked", 1.8, threads=2),
        Goal("memory", "peak memory above SDPA's, L = 16384", "acutance", 10.0, unit="MiB"),
    )
}


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
