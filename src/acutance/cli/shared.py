"""What the commands share: what output needs, and how a failure ends."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

INTERRUPTED = 130


def check_figure(option: str, path: Path | None) -> None:
    """Refuse, before any work, a figure in a format that is not drawn, or without matplotlib."""
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg"):
        raise typer.BadParameter(f"a figure ends in .png or .svg, got {path}", param_hint=option)
    need("matplotlib", "plots", option)


def need(package: str, extra: str, what: str, instead: str = "") -> None:
    """End with one sentence and exit code 1 where a package of an extra is not installed.

    Args:
        package: what is imported.
        extra: the extra of acutance that has it.
        what: what needs it, as the sentence begins.
        instead: how to do without.
    """
    if importlib.util.find_spec(package) is None:
        fail(f'{what} needs {package}; install it with: pip install "acutance[{extra}]"{instead}')
        raise typer.Exit(1)


@contextmanager
def misuse() -> Iterator[None]:
    """What the theory refuses, with the names of its arguments as options, is misuse: exit 2."""
    try:
        yield
    except (TypeError, ValueError) as error:
        names, colon, rest = str(error).partition(": ")
        if colon and all(name.isidentifier() for name in names.split(", ")):
            names = ", ".join(f"--{name.replace('_', '-')}" for name in names.split(", "))
        fail(f"{names}{colon}{rest}")
        raise typer.Exit(2) from error


def console(*, stderr: bool = True) -> Any:
    """A rich console, on standard error unless told otherwise."""
    from rich.console import Console

    return Console(stderr=stderr)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Expected failures end with one sentence on standard error and exit code 1; misuse with 2."""
    try:
        yield
    except typer.Exit:  # a RuntimeError itself: it has been told
        raise
    except KeyboardInterrupt:
        fail("interrupted before anything was read")
        raise typer.Exit(INTERRUPTED) from None
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        fail(str(error) or type(error).__name__)
        raise typer.Exit(getattr(error, "exit_code", 1)) from error


def fail(message: str) -> None:
    """One line on standard error."""
    sys.stderr.write(f"acutance: {' '.join(message.split())}\n")
