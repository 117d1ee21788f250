"""The ``acutance`` command. Every command imports what it needs when it runs, so help is quick."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from acutance.cli import bench, calibration, comparison, probing, reproduce, states, theory
from acutance.cli.options import NO_TYPE, Command, Group
from acutance.cli.shared import INTERRUPTED, ended_as_interrupted

__all__ = ["INTERRUPTED", "app", "main"]

app = typer.Typer(
    name="acutance",
    cls=Group,
    help="How sharply does attention focus? Measure it on any model, for every head and row.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(shown: bool) -> None:
    if shown:
        from importlib.metadata import version

        typer.echo(f"acutance {version('acutance')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar=NO_TYPE,
            callback=_version,
            is_eager=True,
            help="Show the version.",
        ),
    ] = False,
) -> None:
    """How sharply does attention focus? Measure it on any model, for every head and row."""


app.command("probe", cls=Command)(probing.probe_command)
app.command("merge", cls=Command)(states.merge_command)
app.command("report", cls=Command)(states.report_command)
app.command("diff", cls=Command)(states.diff_command)
app.command("predict", cls=Command)(theory.predict_command)
app.command("temperature", cls=Command)(theory.temperature_command)
app.command("calibrate", cls=Command)(calibration.calibrate_command)
app.command("compare", cls=Command)(comparison.compare_command)
app.command("reproduce", cls=Command)(reproduce.reproduce_command)
app.command("bench", cls=Command)(bench.bench_command)


def main() -> None:
    """Entry point of the ``acutance`` command."""
    if sys.argv[1:2] == ["probe"] and os.environ.get("RANK", "0") != "0":
        # one of torchrun's: the first rank says what there is to say, once
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    ended_as_interrupted()
    app()
