"""The ``bench`` command behind its options: what runs, what is shown, what is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from acutance.bench import figures, page, render, run
from acutance.bench.cases import GROUPS, choose
from acutance.bench.records import BenchReport
from acutance.files import check_regular, write_each, write_text
from acutance.report.screen import note

ROUNDS, QUICK_ROUNDS = 7, 3
#: Columns a table takes.
WIDTH = 100
INTERRUPTED = 130
FAILED = 1


def bench(
    names: Sequence[str],
    *,
    threads: str,
    quick: bool,
    rounds: int | None,
    memory: bool,
    to_json: Path | None,
    resume: bool,
    to_markdown: Path | None,
    to_figure: Path | None,
    record: Path | None,
    listing: bool,
    console: Callable[..., Any],
) -> int:
    """Run, show and write; see ``acutance bench --help``.

    Returns:
        The exit code: 1 if a contender was refused for wrong results, 130 if interrupted.

    Raises:
        ValueError: if a name, a number of threads or a record is wrong.
    """
    screen = console(stderr=False)
    if not screen.is_terminal:  # nobody set a width
        screen.width = max(screen.width, WIDTH)
    asked = [name.strip() for name in names] or ["all"]
    if listing:
        screen.print(_listing(asked, quick))
        return 0
    if resume and to_json is None:
        raise ValueError("--resume goes on with the file of --json, and none is given")
    if record is not None:
        idle = {"a case or group": names, "--json": to_json, "--resume": resume}
        if given := [option for option, value in idle.items() if value]:
            raise ValueError(
                f"--from measures nothing and shows a whole record: leave out {given[0]}"
            )
        report = read(record)
    else:
        earlier = None
        if resume and to_json is not None and os.path.exists(to_json):
            earlier = read(to_json)
        with console().status("starting") as status:
            report = run(
                asked,
                threads=_counts(threads),
                rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
                quick=quick,
                memory=memory,
                progress=lambda step: status.update(
                    note(f"{step.done}/{step.total} {step.message}")
                ),
                save=None if to_json is None else lambda found: _write(to_json, found.to_json()),
                resume=earlier,
            )
    steps: dict[str, Callable[[], object]] = {"table": lambda: _show(report, screen)}
    if to_markdown is not None:
        steps["--markdown"] = lambda: write_text(to_markdown, page.markdown(report))
    if to_figure is not None:
        steps["--figure"] = lambda: figures.draw(report, to_figure)
    write_each(steps)
    if not report.complete and record is None:
        return INTERRUPTED
    refused = any(row.status == "failed" for result in report.results for row in result.rows)
    return FAILED if refused else 0


def _show(report: BenchReport, screen: Any) -> None:
    screen.print(render.table(report))
    screen.print()
    screen.print(render.goals(report))


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


def _write(path: Path, text: str) -> None:
    write_text(path, text)


def _counts(text: str) -> list[int]:
    """Numbers of threads from "1,2".

    Raises:
        ValueError: if a part is no whole number.

    Example:
        >>> _counts("1, 2")
        [1, 2]
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--threads takes whole numbers, as in 1,2, got {text!r}") from None


def _listing(asked: Sequence[str], quick: bool) -> Any:
    """Every case asked for: group, name, shape and goals."""
    from rich import box

    from acutance.report.screen import NumberTable

    drawn = NumberTable(
        keys=2, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    for heading in ("group", "case", "shape", "goals"):
        drawn.add_column(heading, no_wrap=heading == "case")
    chosen = choose(asked, quick=quick)
    for group in dict.fromkeys((*GROUPS, "")):
        for case in (case for case in chosen if case.group == group):
            drawn.add_row(group, case.name, case.shape, ", ".join(case.goals))
    return drawn
