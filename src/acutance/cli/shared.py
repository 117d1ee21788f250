"""Shared by all commands: consoles, progress bars and error handling."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import typer

from acutance.escapes import visible

INTERRUPTED = 130


def refuse(flag: str, reason: str) -> NoReturn:
    """End as misuse of an option or argument, with exit code 2."""
    raise typer.BadParameter(reason, param_hint=flag)


def check_figure(option: str, path: Path | None) -> None:
    """Before any work, refuse a figure with an unsupported format, or without matplotlib."""
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg"):
        refuse(option, f"must end in .png or .svg, got {path}")
    need("matplotlib", "plots", option)


def need(package: str, extra: str, what: str, instead: str = "") -> None:
    """Exit with one sentence and code 1 if a package of an extra is not installed.

    Args:
        package: the package to import.
        extra: the extra of acutance that installs it.
        what: what needs it, as the beginning of the sentence.
        instead: how to do without it.
    """
    if importlib.util.find_spec(package) is None:
        from acutance.extras import install

        fail(f"{what} needs {package}; install it with: {install(extra)}{instead}")
        raise typer.Exit(1)


#: Arguments whose option is given once for each of their parts.
_REPEATED = {"spans": "span", "maps": "map"}


@contextmanager
def misuse() -> Iterator[None]:
    """Context that reports theory's errors as misuse of the options: exit code 2."""
    try:
        yield
    except (TypeError, ValueError) as error:
        names, colon, rest = str(error).partition(": ")
        if colon and all(name.isidentifier() for name in names.split(", ")):
            options = (_REPEATED.get(name, name) for name in names.split(", "))
            names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        fail(f"{names}{colon}{rest}")
        raise typer.Exit(2) from error


def console(*, stderr: bool = True) -> Any:
    """A console without markup, by default on standard error."""
    from acutance.report.screen import Screen

    return Screen(stderr=stderr)


def tell(*parts: str | tuple[str, str], whole: bool = True) -> None:
    """Print texts and (text, style) pairs on standard error, as one line if ``whole``."""
    from acutance.report.screen import note

    console().print(note(*parts), soft_wrap=whole)


def ended_as_interrupted() -> None:
    """Let SIGTERM end a command like Ctrl-C: the state is written, exit code 130."""
    with suppress(ValueError):  # another thread than the main one takes no signals
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def plain_errors(
    code: int = 1, when: str = "before anything was read", save: Path | None = None
) -> Iterator[None]:
    """Context in which expected failures end with one sentence on standard error and an exit code.

    Misuse of options ends with exit code 2, Ctrl-C with 130.

    Args:
        code: the exit code of other failures; 2 where 1 means that a difference was found.
        when: what had not happened when Ctrl-C came.
        save: the file that ``--resume`` continues from; None if there is none.
    """
    try:
        yield
    except typer.Exit:  # a RuntimeError itself: it has been told
        raise
    except KeyboardInterrupt:
        fail(f"interrupted {when}" + (f"; continue from {save} with --resume" if save else ""))
        raise typer.Exit(INTERRUPTED) from None
    except (FloatingPointError, ImportError, OSError, RuntimeError, ValueError) as error:
        fail(_error_sentence(error), everywhere=getattr(error, "everywhere", False))
        raise typer.Exit(getattr(error, "exit_code", code)) from error


def _error_sentence(error: Exception) -> str:
    """The message of an error as one sentence; for file errors it begins with the file name."""
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def fail(message: str, *, everywhere: bool = False) -> None:
    """Print one line on standard error; with ``everywhere`` also on ranks other than the first."""
    stream = (sys.__stderr__ if everywhere else None) or sys.stderr
    stream.write(f"acutance: {visible(' '.join(message.split()))}\n")


@contextmanager
def bar(screen: Any, *columns: Any, shown: bool = True) -> Iterator[Any]:
    """A progress bar of rich that vanishes at its end; nothing where that is not a terminal.

    Args:
        screen: the console.
        columns: texts or columns of rich; the bar stands behind the first.
        shown: whether to show it at all.
    """
    from rich.progress import BarColumn, Progress, TextColumn

    first, *rest = (TextColumn(text) if isinstance(text, str) else text for text in columns)
    silent = not (shown and screen.is_terminal)
    with Progress(first, BarColumn(), *rest, console=screen, transient=True, disable=silent) as it:
        yield it


@contextmanager
def progress(
    what: str, windows: int, tokens: int, screen: Any
) -> Iterator[Callable[[int, int, bool], None]]:
    """Context with a progress bar that shows windows, rate and remaining time.

    Args:
        what: the activity, in a word.
        windows: number of windows of the whole run.
        tokens: number of tokens that the model reads in all.
        screen: the console.

    Yields:
        A function of the number of tokens read, the number of windows now done, and whether that
        happened now rather than in a resumed run.
    """
    import time

    count = "{task.fields[windows]:,} of {task.fields[total_windows]:,} windows"
    with bar(screen, what, count, "{task.fields[speed]}") as shown:
        task = shown.add_task(what, total=tokens, windows=0, total_windows=windows, speed="")
        started, ran, done = time.monotonic(), 0, 0

        def advance(count: int, count_windows: int, now: bool) -> None:
            nonlocal ran, done
            done += count_windows
            ran += count if now else 0
            shown.update(task, advance=count, windows=done)
            if ran:
                rate = ran / max(time.monotonic() - started, 1e-9)
                left = max(0, round((tokens - shown.tasks[0].completed) / rate))
                speed = f"{rate:,.0f} tokens/s, {left // 60}:{left % 60:02d} left"
                shown.update(task, speed=speed)

        yield advance


@contextmanager
def pass_progress(tokens: int) -> Iterator[Callable[[int, int, int], None]]:
    """Context with a progress bar for passes over one text, of ``tokens`` tokens each.

    Yields:
        A function of the tokens that were read, the pass from 1, and passes at most.
    """
    from rich.progress import TimeRemainingColumn

    count = "{task.completed:,.0f} of {task.total:,.0f} tokens"
    with bar(console(), "{task.description}", count, TimeRemainingColumn()) as shown:
        task = shown.add_task("measuring without a law", total=tokens)

        def advance(count: int, number: int, most: int) -> None:
            name = f"pass {number} of {most}{', without a law' * (number == 1)}"
            shown.update(task, total=tokens * most, description=name, advance=count)

        yield advance
