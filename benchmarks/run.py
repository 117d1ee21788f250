"""Check and measure benchmark cases; ^C keeps what was finished, --resume goes on from there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from acutance import bench


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    known = ", ".join([*bench.SETS, *bench.CASES])
    parser.add_argument("cases", nargs="*", default=["quick"], metavar="CASE", help=known)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backward", action="store_true", help="time the backward pass too")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument("--json", type=Path, help="write the report here, interrupted or not")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--resume", type=Path, help="keep the finished cases of this JSON report")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    console = Console()
    bar = Progress(
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
    )
    try:
        resume = None
        if options.resume:
            resume = bench.BenchReport.from_json(options.resume.read_text(encoding="utf-8"))
        with bar:
            task = bar.add_task("")
            report = bench.run(
                options.cases,
                threads=options.threads,
                rounds=options.rounds,
                backward=options.backward,
                memory=not options.no_memory,
                resume=resume,
                progress=lambda step: bar.update(
                    task, completed=step.done, total=step.total, description=step.message
                ),
            )
    except (OSError, ValueError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    console.print(bench.render.table(report))
    if options.json:
        options.json.write_text(report.to_json(), encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(bench.render.markdown(report), encoding="utf-8")
    failed = any(row.status == "failed" for result in report.results for row in result.rows)
    return 130 if not report.complete else 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
