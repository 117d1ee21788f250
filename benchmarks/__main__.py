"""``python -m benchmarks``: check, then time, attention with statistics on the CPU.

It stands beside PyTorch's own attention and the usual ways of computing an entropy. The exit code
is 1 if a contender was refused for wrong results, 130 after ^C, which keeps what is finished.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from acutance.files import check_regular, write_text
from acutance.report.screen import Screen
from acutance.report.table import Column, Table
from benchmarks.cpu import figures, page, render
from benchmarks.cpu.cases import GROUPS, choose
from benchmarks.cpu.records import BenchReport, Progress
from benchmarks.cpu.runner import run

ROUNDS, QUICK_ROUNDS = 7, 3
#: Columns a table takes.
WIDTH = 100
INTERRUPTED, FAILED = 130, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, run, show and write; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.listing:
            _screen().print(_table_of_cases(options.cases, options.quick))
            return 0
        report = read(options.record) if options.record else _measure(options)
        screen = _screen()
        screen.print(render.table(report))
        screen.print()
        screen.print(render.goals(report))
        if options.markdown:
            write_text(options.markdown, page.markdown(report))
        if options.figure:
            figures.draw(report, options.figure)
    except (ImportError, OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    if not report.complete and not options.record:
        return INTERRUPTED
    refused = any(row.status == "failed" for result in report.results for row in result.rows)
    return FAILED if refused else 0


def read(path: Path) -> BenchReport:
    """The record in a file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is no record; the message names the file.
    """
    check_regular(path)
    try:
        return BenchReport.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument  # fmt: off
    add(
        "cases",
        nargs="*",
        default=["all"],
        metavar="CASE",
        help="cases, groups or sets of cases; default: all",
    )
    add(
        "--threads",
        type=_counts,
        default=[1],
        metavar="N,...",
        help="threads torch may use: 1,2 is both",
    )
    add("--quick", action="store_true", help="a few small cases, three rounds: a minute")
    add("--rounds", type=int, help="interleaved rounds a case: 7, with --quick 3")
    add("--no-memory", action="store_true", help="leave peak memory out")
    add("--json", type=Path, metavar="FILE", help="write the record, case by case")
    add("--resume", action="store_true", help="keep what the file of --json has finished")
    add(
        "--from", dest="record", type=Path, metavar="FILE", help="measure nothing: show this record"
    )
    add("--markdown", type=Path, metavar="FILE", help="write the tables")
    add("--figure", type=_figure, metavar="FILE", help="draw (.svg, .png), light and dark")
    add("--list", dest="listing", action="store_true", help="show the cases and end")
    # fmt: on
    return parser


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


_counts.__name__ = "list of whole numbers"  # what argparse calls it


def _figure(text: str) -> Path:
    """A path that figures can be written to, asked for before the hours that they take."""
    if Path(text).suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"must end in .png or .svg, got {text}")
    return Path(text)


def _measure(options: argparse.Namespace) -> BenchReport:
    """Run the cases; the record is written after each of them."""
    target: Path | None = options.json
    if options.resume and target is None:
        raise ValueError("--resume goes on with the file of --json, and none is given")
    there = target is not None and target.exists()
    if there and not options.resume:
        raise ValueError(f"--json: {target} is there already: --resume goes on from it")
    return run(
        options.cases,
        threads=options.threads,
        rounds=options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS),
        quick=options.quick,
        memory=not options.no_memory,
        progress=_say,
        save=None if target is None else lambda report: write_text(target, report.to_json()),
        resume=read(target) if target is not None and there else None,
    )


def _say(step: Progress) -> None:
    print(f"{step.done}/{step.total} {step.message}", file=sys.stderr)


def _screen() -> Screen:
    screen = Screen()
    if not screen.is_terminal:  # nobody set a width
        screen.width = max(screen.width, WIDTH)
    return screen


def _table_of_cases(names: Sequence[str], quick: bool) -> Table:
    """Every case asked for: group, name, shape and goals."""
    chosen = choose(names, quick=quick)
    rows = [
        (group, case.name, case.shape, ", ".join(case.goals))
        for group in dict.fromkeys((*GROUPS, ""))
        for case in chosen
        if case.group == group
    ]
    columns = [
        Column("group", "words"),
        Column("case", "name"),
        *(Column(name, "words") for name in ("shape", "goals")),
    ]
    return Table("", columns, rows, keys=2)


if __name__ == "__main__":
    sys.exit(main())
