"""A report as Markdown: what the documentation's page includes, no number of it typed by hand."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cpu.cases import EVERYONE, GROUPS, REFERENCE
from benchmarks.cpu.goals import PROVISO, goals_of, judge
from benchmarks.cpu.records import BenchReport, CaseResult, Row
from benchmarks.cpu.render import (
    count_of,
    goal_cell,
    how,
    notes,
    number,
    rates,
    summary,
    times,
    where,
)

_TITLES = {
    "forward": "Forward",
    "scaling": "The longest",
    "statistics": "Statistics without values",
    "noise": "With noise metrics",
    "decode": "Decoding",
    "short": "Short sequences",
    "tiny": "A few tokens",
    "dtype": "Half precision",
    "mask": "Masks",
    "backward": "Gradients",
    "memory": "Memory",
}


def markdown(report: BenchReport) -> str:
    """The goals, a table for each group, every way of computing it, and where it was measured."""
    parts = ["" if report.complete else "*This run was interrupted: cases are missing.*"]
    parts += [where(report), PROVISO + ".", "### Goals", _goals(report)]
    for group in dict.fromkeys((*GROUPS, *(result.case.group for result in report.results))):
        results = [result for result in report.results if result.case.group == group]
        if results:
            parts += [f"### {_TITLES.get(group, group or 'Others')}", _group(report, results)]
    compared = [result for result in report.results if set(EVERYONE) <= set(result.case.contenders)]
    if compared:
        parts += ["### Every way of computing it", _ways(compared)]
    reasons = "\n".join(f"- {note}" for note in notes(report))
    if reasons:
        parts += ["### What was not timed", reasons]
    return "\n\n".join([*filter(None, parts), how(report)]) + "\n"


def _goals(report: BenchReport) -> str:
    lines = summary(judge(report))
    rows = [(*texts[:-1], f"`{texts[-1].split(',')[0]}`,{texts[-1].split(',')[1]}")
            for texts, _ in lines]  # fmt: skip
    return _table(("goal", "limit", "best", "worst", "met in", "worst case"), rows)


def _group(report: BenchReport, results: list[CaseResult]) -> str:
    """A line for each contender that decides a goal, or for the library's where none does."""
    counts = sorted({result.threads for result in results})
    if all(result.case.timing == "memory" for result in results):
        return _weights(report, results)
    header = ["case", "what", "sdpa, ms"]
    for count in counts:
        header += [f"× sdpa, {count_of(count)}", "quartiles"]
    header += ["goal", "GFLOP/s", "of peak", "× floor"]
    rows: dict[tuple[str, str], list[str]] = {}
    for result in results:
        base = result.time(result.row(REFERENCE))
        for name in _shown(report, result):
            row = result.row(name)
            line = rows.setdefault(
                (result.case.name, name),
                [f"`{result.case.name}`", f"`{name}`", number(base.median if base else None)]
                + [""] * (2 * len(counts))
                + ["", "", "", ""],
            )
            ratio, at = result.ratio(row), 3 + 2 * counts.index(result.threads)
            line[at] = times(ratio.median) if ratio else row.status
            line[at + 1] = f"{times(ratio.q1)}–{times(ratio.q3)}" if ratio else ""
            verdict = goal_cell(report, result, name)
            line[-4] = _verdict(line[-4], verdict)
            if result.threads == counts[0]:
                line[-3:] = rates(report, result, row)
    return _table(tuple(header), list(rows.values()))


def _verdict(before: str, now: str) -> str:
    """Of several numbers of threads: the limits, and a mark for each."""
    if not before or not now:
        return before or now
    same = before.rstrip("✓✗ ") == now.rstrip("✓✗ ")
    return before + now[-1] if same else f"{before}, {now}"


def _shown(report: BenchReport, result: CaseResult) -> list[str]:
    decisive = [goal.contender for goal in goals_of(report, result)]
    names = [name for name in result.case.contenders if name in decisive]
    return names or [name for name in result.case.contenders if name == "acutance"]


def _weights(report: BenchReport, results: list[CaseResult]) -> str:
    rows = [
        (
            f"`{result.case.name}`, {count_of(result.threads)}", f"`{row.contender}`",
            number(row.peak_mib), number(row.mib_above_reference, "+"),
            goal_cell(report, result, row.contender),
        )
        for result in results for row in result.rows
    ]  # fmt: skip
    return _table(("case", "what", "peak above the inputs, MiB", "above sdpa, MiB", "goal"), rows)


def _ways(results: list[CaseResult]) -> str:
    """A line for each contender, a column for each case, memory and error of the longest."""
    least = min(result.threads for result in results)
    results = [result for result in results if result.threads == least]
    longest = max(results, key=lambda each: each.case.keys)
    header = ["what", *(f"`{result.case.name}`" for result in results), "MiB", "entropy off by"]
    rows = []
    for name in longest.case.contenders:
        ratios = [_ratio(result, result.row(name)) for result in results]
        row = longest.row(name)
        error = row.error("entropy")
        off = "" if error is None else f"{error:.0e} nat"
        rows.append((f"`{name}`", *ratios, number(row.peak_mib), off))
    text = _table(tuple(header), rows)
    about = f"Ratios with {count_of(least)}; memory above the inputs and error at"
    return f"{text}\n\n{about} `{longest.case.name}`."


def _ratio(result: CaseResult, row: Row) -> str:
    ratio = result.ratio(row)
    return row.status if ratio is None else times(ratio.median)


def _table(header: tuple[str, ...], rows: Sequence[Sequence[str]]) -> str:
    rule = [":--", *["--:"] * (len(header) - 1)]
    lines = [header, rule, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
