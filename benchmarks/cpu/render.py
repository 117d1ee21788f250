"""A report as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.cpu.goals import GOALS, PROVISO, Judgement, goals_of, judge, value_of
from benchmarks.cpu.records import BenchReport, CaseResult, Row, Spread

if TYPE_CHECKING:
    from rich.console import Group

    from acutance.report.table import Table

HEADER = (
    "contender",
    "ms",
    "×\nsdpa",
    "[q1–q3]",
    "goal",
    "GF/s",
    "of\npeak",
    "×\nfloor",
    "peak\nMiB",
    "above\nsdpa",
    "error\noutput",
    "error\nentropy",
)
_STYLES = {"failed": "bold red", "not run": "yellow", "unfinished": "dim"}


def table(report: BenchReport) -> Group:
    """The report for a terminal of 100 columns: for each case a line per contender.

    Behind them why a row has no times, and where the numbers were taken.
    """
    from rich.console import Group
    from rich.text import Text

    from acutance.report.table import Column, Table, styled

    columns = [Column(HEADER[0], "name"), *map(Column, HEADER[1:])]
    parts: list[Any] = [Text(_title(report), style="bold"), Text()]
    for result in report.results:
        heading = f"{result.case.name}, {count_of(result.threads)}: {result.case.shape}"
        rows = [
            styled(cells(report, result, row), _STYLES.get(row.status, "")) for row in result.rows
        ]
        parts += [Table(heading, columns, rows), Text()]
    said = [*notes(report), f"{where(report)} {how(report)}"]
    return Group(*parts, Text("\n".join(said), style="dim italic"))


def goals(report: BenchReport) -> Table:
    """What was to be reached and what was: a line per goal that the report's cases decide."""
    from acutance.report.table import Column, Table, styled

    columns = [
        Column("goal", "words"),
        *map(Column, ("limit", "best", "worst", "met")),
        Column("worst in", "words"),
    ]
    rows = [styled(texts, "" if met else "red") for texts, met in summary(judge(report))]
    return Table("Goals", columns, rows, notes=[PROVISO + "."])


def summary(judgements: list[Judgement]) -> list[tuple[tuple[str, ...], bool]]:
    """A line of cells for each goal: what, limit, best, worst, how many met it, the worst case.

    Beside each line whether all cases met it.
    """
    lines: list[tuple[tuple[str, ...], bool]] = []
    for goal in GOALS.values():
        found = [each for each in judgements if each.goal == goal]
        if not found:
            continue
        known = sorted(
            ((each.value, each) for each in found if each.value is not None), key=lambda two: two[0]
        )
        lost = [each for each in found if each.value is None]
        worst = lost[0] if lost else known[-1][1]
        met = sum(each.met for each in found)
        digits = 2 if goal.unit == "ratio" else 1
        lines.append(
            (
                (
                    goal.what,
                    goal.bound,
                    f"{known[0][0]:.{digits}f}" if known else "–",
                    "none" if worst.value is None else f"{worst.value:.{digits}f}",
                    f"{met} of {len(found)}",
                    f"{worst.case}, {count_of(worst.threads)}",
                ),
                met == len(found),
            )
        )
    return lines


def notes(report: BenchReport) -> list[str]:
    """A line for each row without times, or without its memory, saying why; equal ones in one."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for result in report.results:
        for row in result.rows:
            if row.reason:
                same = found.setdefault((row.contender, row.status, row.reason), [])
                same += [result.case.name] * (result.case.name not in same)
    return [f"{', '.join(names)}: {': '.join(said)}" for said, names in found.items()]


def cells(report: BenchReport, result: CaseResult, row: Row) -> list[str]:
    """The cells of one contender, as :data:`HEADER` names them."""
    ratio, spread = _spread(result.ratio(row))
    time = result.time(row)
    rate, share, floor = rates(report, result, row)
    return [
        row.contender,
        number(time.median if time else None),
        ratio,
        spread if row.status == "timed" else "" if row.status == "weighed" else row.status,
        goal_cell(report, result, row.contender),
        rate,
        share,
        floor,
        number(row.peak_mib),
        number(row.mib_above_reference, "+"),
        _error(row, "output"),
        _error(row, "entropy"),
    ]


def goal_cell(report: BenchReport, result: CaseResult, contender: str) -> str:
    """The tightest bound that is decided here and whether it was met: "≤ 0.85 ✓"."""
    found = [goal for goal in goals_of(report, result) if goal.contender == contender]
    if not found:
        return ""
    goal = min(found, key=lambda each: each.limit)
    value = value_of(goal, result)
    return f"{goal.bound} {'✓' if value is not None and value <= goal.limit else '✗'}"


def rates(report: BenchReport, result: CaseResult, row: Row) -> tuple[str, str, str]:
    """Operations a second, their share of the machine's peak, and time over the floor."""
    peak, time = report.peak(result.threads), result.time(row)
    if peak is None or time is None or time.median <= 0.0 or not row.gflop:
        return "", "", ""
    rate = 1e3 * row.gflop / time.median
    floor = time.median / peak.floor(result.case, row.gflop)
    return f"{rate:.0f}", f"{rate / peak.of(result.case.dtype):.0%}", times(floor)


def _spread(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "", ""
    return times(spread.median), f"[{times(spread.q1)}–{times(spread.q3)}]"


def times(ratio: float) -> str:
    """A ratio in at most four digits.

    Example:
        >>> [times(ratio) for ratio in (0.8149, 12.345, 123.45)]
        ['0.81', '12.3', '123']
    """
    return f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}"


def number(value: float | None, sign: str = "") -> str:
    """Three significant digits, without an exponent.

    Example:
        >>> [number(value) for value in (12345.6, 12.34, 0.01234, None)]
        ['12346', '12.3', '0.0123', '']
    """
    if value is None:
        return ""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 or not size else 3
    if not sign and 0 < size < 0.1:
        digits = 4
    return f"{value:{sign}.{digits}f}"


def _error(row: Row, quantity: str) -> str:
    if quantity not in {check.quantity for check in row.checks}:
        return ""
    error = row.error(quantity)
    return "∞" if error is None else f"{error:.0e}"


def count_of(threads: int) -> str:
    """A number of threads in words."""
    return "1 thread" if threads == 1 else f"{threads} threads"


def _title(report: BenchReport) -> str:
    state = "" if report.complete else ", INTERRUPTED"
    return f"Benchmark, medians of up to {report.settings.rounds} interleaved rounds{state}"


def where(report: BenchReport) -> str:
    """The machine, the versions and the date, in a sentence."""
    place = report.environment
    kernel = f"native kernel {place.cpu} ({place.compiler})" if place.cpu else place.compiler
    torch = f"torch {place.torch}" + f" ({place.reference_cpu})" * bool(place.reference_cpu)
    load = "" if place.load is None else f", load {place.load:g} at the start"
    peaks = "; ".join(
        f"{count_of(peak.threads)}: "
        + ", ".join(f"{rate:.0f} GFLOP/s {name}" for name, rate in peak.gflops.items())
        + f", {peak.exps:.1f}e9 exp/s"
        for peak in report.peaks
        if peak.gflops
    )
    measured = f" Measured peak, {peaks}." if peaks else ""
    return (
        f"acutance {place.acutance}, {kernel}, {torch}, Python {place.python}, "
        f"{place.processor}, {place.cores} cores, {place.platform}, {place.date}{load}.{measured}"
    )


def how(report: BenchReport) -> str:
    """What the columns hold, in sentences."""
    return (
        "Times and ratios are of CPU time with one thread and of wall time with more, ratios over "
        "sdpa's of the same round, quartiles in brackets. Floor: the matrix products at the "
        "measured peak and an exponential for every pair. Memory: "
        f"{report.environment.memory_method}; results included. Errors: largest absolute, against "
        "float64 (entropy in nats)."
    )
