"""Commands on saved states: merge, report, diff."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acutance.cli.options import (
    READ,
    WRITE,
    Chart,
    CsvTo,
    Dark,
    FigureTo,
    JsonTo,
    Metric,
    ParquetTo,
    ReportTo,
    check_chart,
    check_metrics,
    grouped,
)
from acutance.cli.outputs import Overwrite, check_outputs
from acutance.cli.shared import check_figure, console, plain_errors


def merge_command(
    states: Annotated[
        list[Path],
        typer.Argument(metavar="SHARD...", help="States that 'probe --save' wrote."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the joint state.")
    ] = None,
    overwrite: Overwrite = False,
    report: ReportTo = None,
    json: JsonTo = None,
    csv: CsvTo = None,
    parquet: ParquetTo = None,
    figure: FigureTo = None,
) -> None:
    """Join the states of shards that were probed apart: one run, no window twice."""
    targets = {
        "--out": out,
        "--report": report,
        "--json": json,
        "--csv": csv,
        "--parquet": parquet,
        "--figure": figure,
    }
    check_outputs(targets, {"SHARD": states}, state="--out", overwrite=overwrite)
    check_figure("--figure", figure)
    with plain_errors():
        from acutance.cli import probe_actions

        probe_actions.merge(states, targets=targets, console=console)


def report_command(
    state: Annotated[
        Path, typer.Argument(metavar="STATE", help="What 'probe --save' or 'merge -o' wrote.")
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", "--report", "-o", metavar="HTML", help="Write a page with the heat map."
        ),
    ] = None,
    json: JsonTo = None,
    csv: CsvTo = None,
    parquet: ParquetTo = None,
    figure: FigureTo = None,
    chart: Chart = "heads",
    metric: Metric = None,
    dark: Dark = False,
) -> None:
    """Show a saved state again, as a table, page, figure or file. No model is run."""
    targets = {
        "--report": html,
        "--json": json,
        "--csv": csv,
        "--parquet": parquet,
        "--figure": figure,
    }
    check_outputs(targets, {"STATE": state})
    check_figure("--figure", figure)
    check_chart(chart, metric)
    check_metrics([] if metric is None else [metric])
    with plain_errors():
        from acutance.cli import report_actions

        report_actions.report(
            state, targets=targets, chart=chart, metric=metric, dark=dark, console=console
        )


def diff_command(
    before: Annotated[Path, typer.Argument(metavar="A", help="A saved state.")],
    after: Annotated[
        Path,
        typer.Argument(metavar="B", help="Another: a checkpoint, a length, a text, a shard later."),
    ],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="Whose heads and layers to list; repeat it for more. Default: normalized_entropy.",
        ),
    ] = None,
    equal_n: Annotated[
        bool, typer.Option("--equal-n", help="Compare only rows that see as many keys.")
    ] = False,
    top: Annotated[int, typer.Option("--top", min=1, help="Heads listed for each metric.")] = 10,
    json: JsonTo = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv",
            metavar="FILE",
            help="Write a table, one row per head and metric, '-' for standard output.",
        ),
    ] = None,
    figure: FigureTo = None,
    dark: Dark = False,
) -> None:
    """Compare two saved states: the heads that moved most, and whether beyond noise."""
    targets = {"--json": json, "--csv": csv, "--figure": figure}
    check_outputs(targets, {"A": before, "B": after})
    check_figure("--figure", figure)
    check_metrics(metric or [])
    with plain_errors():
        from acutance.cli import diff_actions

        diff_actions.diff(
            before,
            after,
            metrics=metric or [],
            top=top,
            equal_n=equal_n,
            targets=targets,
            dark=dark,
            console=console,
        )


_FILES = "json csv parquet figure"
grouped(merge_command, {WRITE: f"out overwrite report {_FILES}"})
grouped(report_command, {READ: "metric", WRITE: f"html {_FILES} chart dark"})
grouped(diff_command, {READ: "metric equal_n top", WRITE: "json csv figure dark"})
