"""The ``acutance`` command. Every command imports what it needs when it runs, so help is quick.

Packages add commands by entry points of the group ``acutance.commands``, see
:mod:`acutance.plugins`.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from acutance.cli.options import NO_TYPE, Command, Group
from acutance.cli.shared import INTERRUPTED, ended_as_interrupted, fail

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
    """Print the version and exit, if requested."""
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
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """How sharply does attention focus? Measure it on any model, for every head and row."""


@app.command(
    "bench",
    cls=Command,
    hidden=True,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def _bench() -> None:
    """Print that ``acutance bench`` is now ``python -m benchmarks``, and exit with status 2."""
    fail(
        "'acutance bench' was removed: run 'python -m benchmarks' in a checkout of acutance, "
        "or 'acutance info' to see which kernels are available"
    )
    raise typer.Exit(2)


def main() -> None:
    """Entry point of the ``acutance`` command."""
    if sys.argv[1:2] == ["probe"] and os.environ.get("RANK", "0") != "0":
        # one of torchrun's: the first rank says what there is to say, once
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    ended_as_interrupted()
    app()
