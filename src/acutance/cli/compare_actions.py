"""What ``acutance compare`` does once its options are read: run, show, write."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.padding import Padding
from rich.text import Text

from acutance.comparison import render
from acutance.comparison.record import Comparison
from acutance.comparison.runner import DEFAULT_LENGTHS, Step, compare, pick
from acutance.escapes import printable
from acutance.files import write_each, write_text
from acutance.mechanisms import MECHANISMS
from acutance.probing.query_key_sample import QueryKeySample, load_queries_keys
from acutance.report.screen import NumberTable, note

__all__ = ["arguments", "listing", "run", "show", "source"]


#: What ``predict`` calls a mechanism, where that is another name.
_ALSO = {"softmax": "scaled_dot"}


def arguments(
    mechanisms: Sequence[str], n: str | None, mean: str, std: str, source: QueryKeySample | None
) -> dict[str, Any]:
    """Arguments of :func:`acutance.comparison.compare`, from the texts of options.

    Raises:
        ValueError: if a mechanism is unknown (the nearest is named), or a text holds no numbers.
    """
    found: dict[str, Any] = {
        "mechanisms": pick([_ALSO.get(name, name) for name in mechanisms] or None)
    }
    found["n"] = tuple(_numbers("n", n, int)) if n is not None else DEFAULT_LENGTHS
    if min(found["n"]) < 2:
        raise ValueError(f"n: a row sees at least 2 keys, got {n!r}")
    for name, text in (("mean", mean), ("std", std)):
        values = tuple(_numbers(name, text, float))
        if len(values) > 2:
            raise ValueError(f"{name}: one number, or two for queries and keys, got {text!r}")
        if not all(math.isfinite(value) and (name == "mean" or value > 0) for value in values):
            raise ValueError(
                f"{name}: finite{' and above 0' if name == 'std' else ''}, got {text!r}"
            )
        found[name] = values[0] if len(values) == 1 else values
    if source is not None:
        found["source"] = source
        if n is None:
            found["n"] = tuple(sorted({max(2, source.length // part) for part in (4, 2, 1)}))
    return found


def source(path: Path | None) -> QueryKeySample | None:
    """The queries and keys of a model, if they are asked for.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it holds something else.
    """
    return None if path is None else load_queries_keys(path)


def listing() -> NumberTable:
    """Every mechanism with its title."""
    body = NumberTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    body.add_column("mechanism", no_wrap=True)
    body.add_column("what it is")
    for name, entry in MECHANISMS.items():
        body.add_row(name, entry.title)
    return body


def run(given: dict[str, Any], console: Callable[..., Any]) -> Comparison:
    """Run the comparison with a bar on standard error; silent where that is no terminal."""
    with _bar(console()) as progress:
        return compare(**given, progress=progress)


def show(
    found: Comparison,
    *,
    json_to: Path | None,
    figure_to: Path | None,
    dark: bool,
    console: Callable[..., Any],
) -> None:
    """Print a comparison and write its files; of an interrupted one the record, and no figure.

    Raises:
        ImportError: if a figure is wanted without matplotlib.
        OSError: if a file cannot be written.
    """
    notes = console()
    if not found.complete:
        notes.print(note(("interrupted", "yellow"), ": what follows is what was done by then"))
    steps: dict[str, Callable[[], object]] = {}
    if str(json_to) == "-":
        steps[""] = lambda: sys.stdout.write(found.to_json())
    else:
        steps[""] = lambda: _print(found, console(stderr=False))
        if json_to is not None:
            steps["json"] = lambda: write_text(json_to, found.to_json())
    if figure_to is not None and found.complete:
        steps["figure"] = lambda: _draw(found, figure_to, dark)

    def written(name: str) -> None:
        if name:
            where = {"json": json_to, "figure": figure_to}[name]
            notes.print(note((f"{name} written to", "dim"), f" {where}"))

    write_each(steps, written)


def _draw(found: Comparison, path: Path, dark: bool) -> None:
    from acutance.comparison.figures import draw
    from acutance.report.plot_style import DARK, LIGHT

    draw(found, path, theme=DARK if dark else LIGHT)


def _print(found: Comparison, output: Any) -> None:
    ascii_only = output.options.ascii_only
    output.print(render.table(found))
    output.print()
    for line in render.legend(found, output.width >= render.WIDE):
        output.print(Text(printable(line, ascii_only), style="dim"))
    output.print(f"\nWhat it shows: {render.QUESTION}", style="bold")
    for line in render.sentences(found):
        output.print(Padding(Text(printable(f"• {line}", ascii_only)), (0, 0, 0, 1)))


def _numbers(name: str, text: str, kind: type[int] | type[float]) -> Iterator[int | float]:
    """Numbers between commas."""
    word = "whole numbers" if kind is int else "numbers"
    for part in text.split(","):
        try:
            yield kind(part)
        except ValueError:
            raise ValueError(f"{name}: {word} between commas, got {text!r}") from None


@contextmanager
def _bar(console: Any) -> Iterator[Callable[[Step], None]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("comparing"), BarColumn(), TextColumn("{task.completed} of {task.total}"),
        TextColumn("{task.fields[now]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("comparing", total=None, now="")

        def advance(step: Step) -> None:
            now = f"{step.mechanism}, n = {step.n}"
            bar.update(task, completed=step.done, total=step.total, now=now)

        yield advance
