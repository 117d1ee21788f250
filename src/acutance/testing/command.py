"""Run the command in this process: what a test of it needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CommandResult:
    """What a run of the command left behind.

    Attributes:
        exit_code: 0 for success, 1 for an error or a negative verdict, 2 for wrong arguments.
        out: what was written to standard output.
        err: what was written to standard error.
    """

    exit_code: int
    out: str
    err: str

    @property
    def output(self) -> str:
        """Standard output followed by standard error."""
        return self.out + self.err


def run(
    argv: Sequence[str | os.PathLike[str]], *, stdin: str = "", columns: int | None = None
) -> CommandResult:
    """Run the ``acutance`` command in this process, without starting another one.

    Args:
        argv: arguments of the command, without its name.
        stdin: what it reads from standard input.
        columns: width of the terminal, in characters; None for that of the environment, or 80.

    Returns:
        The exit code and both outputs, without colours.

    Raises:
        Exception: an error that the command does not turn into a message is raised here.

    Example:
        >>> from acutance.testing import run
        >>> result = run(["predict", "--n", "1024", "--logit-std", "1", "--json", "-"])
        >>> result.exit_code, result.err
        (0, '')
        >>> run(["predict", "--n", "many"]).exit_code
        2
    """
    from typer.testing import CliRunner

    from acutance.cli import app

    runner = CliRunner(env={} if columns is None else {"COLUMNS": str(columns)})
    result = runner.invoke(app, [os.fspath(argument) for argument in argv], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return CommandResult(result.exit_code, result.stdout, result.stderr)
