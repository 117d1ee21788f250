"""The command that times attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acutance.cli.options import MEASURE, WRITE, grouped
from acutance.cli.outputs import Overwrite, check_outputs
from acutance.cli.shared import check_figure, console, plain_errors


def bench_command(
    case: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CASE]...", help="Cases, groups or sets. Default: all."),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option("--group", metavar="NAME,...", help="Groups of cases, see --list."),
    ] = None,
    threads: Annotated[
        str, typer.Option("--threads", metavar="N,...", help="Threads torch may use: 1,2 is both.")
    ] = "1",
    quick: Annotated[
        bool, typer.Option("--quick", help="A few small cases, three rounds: a minute.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", min=1, help="Interleaved rounds a case: 7, with --quick 3."),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Measure peak memory.")
    ] = True,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record, case by case.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what the file of --json has finished.")
    ] = False,
    overwrite: Overwrite = False,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the tables.")
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option("--figure", metavar="FILE", help="Draw (.svg, .png), light and dark."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Measure nothing: show this record."),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Show the cases and end.")] = False,
    info: Annotated[
        bool, typer.Option("--info", help="Only say which kernels run here, and why.")
    ] = False,
) -> None:
    """Check, then time, attention with statistics against PyTorch's own and the usual ways."""
    more = [] if figure is None else [figure.stem + end for end in ("-dark", "-time", "-time-dark")]
    figures = {f"--figure ({name})": figure.with_stem(name) for name in more if figure is not None}
    check_outputs(
        {"--json": json, "--markdown": markdown, "--figure": figure, **figures},
        {"--from": record},
        state="--json",
        resume=resume,
        overwrite=overwrite,
    )
    check_figure("--figure", figure)
    if info:
        with plain_errors():
            from acutance import kernels

            typer.echo(str(kernels.info()))
        return
    with plain_errors():
        from acutance.cli import bench_actions

        status = bench_actions.bench(
            [*(case or ()), *(group.split(",") if group else ())],
            threads=threads,
            quick=quick,
            rounds=rounds,
            memory=memory,
            to_json=json,
            resume=resume,
            to_markdown=markdown,
            to_figure=figure,
            record=record,
            listing=listing,
            console=console,
        )
    if status:
        raise typer.Exit(status)


grouped(
    bench_command,
    {
        MEASURE: "group threads quick rounds memory record listing info",
        WRITE: "json resume overwrite markdown figure",
    },
)
