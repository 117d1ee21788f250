"""``acutance compare``: mechanisms side by side."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli.options import MEASURE, WRITE, Dark, JsonTo, command
from acutance.cli.outputs import check_outputs, write_and_show
from acutance.cli.shared import (
    INTERRUPTED,
    check_figure,
    console,
    misuse,
    plain_errors,
)

if TYPE_CHECKING:
    from acutance.comparison.record import Comparison
    from acutance.comparison.runner import Step
    from acutance.probing.query_key_sample import QueryKeySample
    from acutance.report.table import Table

#: What ``predict`` calls a mechanism, where that is another name.
_ALSO = {"softmax": "scaled_dot"}


@dataclass(frozen=True, repr=False, eq=False)
class CompareOptions:
    """The options of ``acutance compare``."""

    n: Annotated[
        str | None,
        typer.Option(
            "--n",
            metavar="NUMBERS",
            help="Number of keys that a row sees. Default: 256,1024,4096.",
        ),
    ] = None
    d: Annotated[int, typer.Option("--d", min=2, help="Width of queries and keys.")] = 64
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            "--mechanism",
            metavar="NAME",
            help=(
                "Mechanism to compare, or 'all'; repeat for more. Default: the twelve that "
                "--list marks."
            ),
        ),
    ] = None
    heads: Annotated[
        int, typer.Option("--heads", min=1, help="Number of heads, each with different keys.")
    ] = 16
    batch: Annotated[int, typer.Option("--batch", min=1, help="Number of sequences.")] = 1
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Number of rows measured per head.")
    ] = 16
    mean: Annotated[
        str,
        typer.Option(
            "--mean",
            metavar="Q[,K]",
            help="Mean of each component of the random queries, and of the keys.",
        ),
    ] = "0"
    std: Annotated[
        str,
        typer.Option(
            "--std",
            metavar="Q[,K]",
            help="Standard deviation of each component of the random queries, and of the keys.",
        ),
    ] = "1"
    causal: Annotated[bool, typer.Option("--causal", help="Use a causal mask.")] = False
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed.")] = 0
    state: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="STATE",
            help="Use queries and keys written by 'probe --keep-qk' instead of random ones.",
        ),
    ] = None
    costs: Annotated[bool, typer.Option("--costs/--no-costs", help="Measure time.")] = True
    json: JsonTo = None
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure", metavar="FILE", help="Draw effective keys against n as .png or .svg."
        ),
    ] = None
    dark: Dark = False
    listing: Annotated[bool, typer.Option("--list", help="List the mechanisms and exit.")] = False


@command(
    CompareOptions,
    {
        MEASURE: "n d mechanism heads batch samples mean std causal seed state costs",
        WRITE: "json figure dark",
    },
)
def compare(options: CompareOptions) -> None:
    """Compare attention mechanisms on the same keys: concentration and time.

    Concentration is measured and, where theory allows it, predicted.
    """
    check_outputs({"--json": options.json, "--figure": options.figure}, {"--from": options.state})
    check_figure("--figure", options.figure)
    if options.listing:
        with plain_errors():
            console(stderr=False).print(_listing())
        return
    with plain_errors():
        from acutance.comparison import runner
        from acutance.probing.query_key_sample import load_queries_keys

        source = None if options.state is None else load_queries_keys(options.state)
    with misuse():
        arguments = _arguments(options, source)
    with plain_errors():
        with _bar(console()) as progress:
            comparison = runner.compare(**arguments, progress=progress)
        _show(comparison, options)
    if not comparison.complete:
        raise typer.Exit(INTERRUPTED)


def _show(comparison: "Comparison", options: CompareOptions) -> None:
    """Print a comparison and write its files; of an interrupted one the record, and no figure."""
    from acutance.files import put_text
    from acutance.report.screen import note

    if not comparison.complete:
        suffix = ": the results so far follow"
        console().print(note(("interrupted", "yellow"), suffix))

    def draw(path: Path) -> None:
        from acutance.comparison.figures import draw
        from acutance.report.plot_style import DARK, LIGHT

        draw(comparison, path, theme=DARK if options.dark else LIGHT)

    write_and_show(
        {"json": lambda path: put_text(comparison.to_json(), path), "figure": draw},
        {"json": options.json, "figure": options.figure if comparison.complete else None},
        lambda screen: screen.print(comparison.table()),
    )


def _listing() -> "Table":
    """Every mechanism with its title; a star marks those compared by default."""
    from acutance.comparison.runner import DEFAULT_MECHANISMS
    from acutance.mechanisms import MECHANISMS
    from acutance.report.table import Column, Table

    return Table(
        "",
        (Column("mechanism (* by default)", "name"), Column("what it is", "words")),
        [
            (f"{name} *" if name in DEFAULT_MECHANISMS else name, entry.title)
            for name, entry in MECHANISMS.items()
        ],
    )


def _arguments(options: CompareOptions, source: "QueryKeySample | None") -> dict[str, Any]:
    """Keyword arguments of :func:`acutance.comparison.compare`, from the command's options.

    Args:
        options: the command-line options.
        source: queries and keys of a model to compare on; None compares on random ones.

    Raises:
        ValueError: if a mechanism is unknown (the message names the nearest), ``--n``, ``--mean``
            or ``--std`` is not a list of numbers, or one is out of range.
    """
    from acutance.comparison.runner import DEFAULT_LENGTHS, pick

    n = options.n
    names = [_ALSO.get(name, name) for name in options.mechanism or []]
    arguments: dict[str, Any] = {"mechanisms": pick(names or None)}
    arguments["n"] = tuple(_numbers("n", n, int)) if n is not None else DEFAULT_LENGTHS
    if min(arguments["n"]) < 2:
        raise ValueError(f"n: must be at least 2, got {n!r}")
    for name, text in (("mean", options.mean), ("std", options.std)):
        values = tuple(_numbers(name, text, float))
        if len(values) > 2:
            raise ValueError(
                f"{name}: must be one number, or one for queries and one for keys, got {text!r}"
            )
        if not all(math.isfinite(value) and (name == "mean" or value > 0) for value in values):
            raise ValueError(
                f"{name}: must be finite{' and above 0' if name == 'std' else ''}, got {text!r}"
            )
        arguments[name] = values[0] if len(values) == 1 else values
    if source is not None:
        arguments["source"] = source
        if n is None:
            arguments["n"] = tuple(sorted({max(2, source.length // part) for part in (4, 2, 1)}))
    for name in ("d", "heads", "batch", "samples", "seed", "costs"):
        arguments[name] = getattr(options, name)
    return arguments | {"is_causal": options.causal}


def _numbers(name: str, text: str, kind: type[int] | type[float]) -> Iterator[int | float]:
    """Parse numbers separated by commas."""
    word = "whole numbers" if kind is int else "numbers"
    for part in text.split(","):
        try:
            yield kind(part)
        except ValueError:
            raise ValueError(f"{name}: must be {word} separated by commas, got {text!r}") from None


@contextmanager
def _bar(screen: Any) -> "Iterator[Callable[[Step], None]]":
    """Show a progress bar on standard error; yields the function that advances it."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("comparing"), BarColumn(), TextColumn("{task.completed} of {task.total}"),
        TextColumn("{task.fields[now]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("comparing", total=None, now="")

        def advance(step: "Step") -> None:
            now = f"{step.mechanism}, n = {step.n}"
            bar.update(task, completed=step.done, total=step.total, now=now)

        yield advance
