"""A report as a table for the terminal, and as Markdown for a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from acutance.bench.records import BenchReport, CaseResult, Row, Spread

if TYPE_CHECKING:
    from rich.table import Table

_HEADER = (
    "contender",
    "ms",
    "×\nsdpa",
    "[q1–q3]",
    "CPU\n×",
    "peak\nMiB",
    "above\nsdpa",
    "error\nout",
    "error\nentropy",
)
_STYLES = {"failed": "bold red", "not run": "yellow", "unfinished": "dim"}


def table(report: BenchReport) -> Table:
    """The report for a terminal of 80 columns: a line per case, then one per contender.

    The caption says why a row has no times, and where the numbers were taken.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
        title=_title(report),
        caption="\n".join([*notes(report), _where(report)]),
        title_justify="left",
        caption_justify="left",
    )
    for index, heading in enumerate(_HEADER):
        drawn.add_column(heading, justify="right" if index else "left", no_wrap=index in (0, 3))
    for result in report.results:
        drawn.add_row(Text(result.case.name, style="bold"))
        for row in result.rows:
            style = _STYLES.get(row.status, "")
            drawn.add_row(*(Text(cell, style=style) for cell in _cells(row)))
        drawn.add_section()
    return drawn


def notes(report: BenchReport) -> list[str]:
    """A line for each row without times, or without its memory, saying why."""
    return [
        f"{result.case.name}: {row.contender}: {row.status}: {row.reason}"
        for result in report.results
        for row in result.rows
        if row.reason
    ]


def markdown(report: BenchReport) -> str:
    """The report as Markdown: a table per case, what was compared, and where."""
    reasons = [f"- {note}" for note in notes(report)]
    parts = [f"{_title(report)}.", *map(_markdown_case, report.results), "\n".join(reasons)]
    return "\n\n".join([*filter(None, parts), _where(report)]) + "\n"


def _markdown_case(result: CaseResult) -> str:
    header = [heading.replace("\n", " ") for heading in _HEADER]
    rule = [":--", *["--:"] * (len(_HEADER) - 1)]
    lines = [header, rule, *map(_cells, result.rows)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"### `{result.case.name}`\n\n{result.case.shape}\n\n{text}"


def _cells(row: Row) -> list[str]:
    ratio, spread = _spread(row.ratio)
    return [
        row.contender,
        _number(row.milliseconds.median if row.milliseconds else None),
        ratio,
        spread if row.status == "timed" else row.status,
        _spread(row.cpu_ratio)[0],
        _number(row.peak_mib),
        _number(row.mib_above_reference, "+"),
        _error(row, "output"),
        _error(row, "entropy"),
    ]


def _spread(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "", ""
    return f"{spread.median:.2f}", f"[{spread.q1:.2f}–{spread.q3:.2f}]"


def _number(value: float | None, sign: str = "") -> str:
    """Three significant digits, without an exponent."""
    if value is None:
        return ""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:{sign}.{digits}f}"


def _error(row: Row, quantity: str) -> str:
    if quantity not in {check.quantity for check in row.checks}:
        return ""
    error = row.error(quantity)
    return "∞" if error is None else f"{error:.0e}"


def _title(report: BenchReport) -> str:
    settings = report.settings
    passes = "forward and backward" if settings.backward else "forward"
    threads = "1 thread" if settings.threads == 1 else f"{settings.threads} threads"
    state = "" if report.complete else ", INTERRUPTED"
    return f"Benchmark, {passes}, {threads}, medians of {settings.rounds} interleaved rounds{state}"


def _where(report: BenchReport) -> str:
    place = report.environment
    return (
        f"acutance {place.acutance}, torch {place.torch}, Python {place.python}, "
        f"{place.processor}, {place.cores} cores, {place.platform}, {place.date}. "
        "Ratios: wall time (beside it CPU time) over sdpa's of the same round, quartiles in "
        f"brackets. Memory: {place.memory_method}; results included. "
        "Errors: largest absolute, against float64 (entropy in nats)."
    )
