"""The progress bar of a long run over windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress(
    what: str, windows: int, tokens: int, screen: Any
) -> Iterator[Callable[[int, int, bool], None]]:
    """A bar on standard error: windows, rate and time left; silent where that is not a terminal.

    Args:
        what: what is being done, in a word.
        windows: windows of the whole run.
        tokens: tokens that the model reads in all.
        screen: the console.

    Yields:
        A function of the tokens that were read, the windows that are now done, and whether that
        was now rather than in a run that is resumed.
    """
    import time

    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        """Tokens per second since the start of the run, and the remaining time at this rate."""

        def render(self, task: Task) -> Text:
            rate = task.fields["rate"]
            if not rate:
                return Text("")
            left = max(0, round(task.fields["end"] - time.monotonic()))
            return Text(f"{rate:,.0f} tokens/s, {left // 60}:{left % 60:02d} left")

    columns = (
        TextColumn(what),
        BarColumn(),
        TextColumn("{task.fields[windows]:,} of {task.fields[total_windows]:,} windows"),
        Rate(),
    )
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(what, total=tokens, windows=0, total_windows=windows, rate=0.0, end=0.0)
        started, ran, done = time.monotonic(), 0, 0

        def advance(count: int, count_windows: int, now: bool) -> None:
            nonlocal ran, done
            done += count_windows
            ran += count if now else 0
            bar.update(task, advance=count, windows=done)
            if ran:
                clock = time.monotonic()
                rate = ran / max(clock - started, 1e-9)
                left = tokens - bar.tasks[0].completed
                bar.update(task, rate=rate, end=clock + left / rate)

        yield advance
