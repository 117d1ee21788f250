"""``acutance compare``: mechanisms side by side."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acutance.cli import options as cli
from acutance.cli.shared import INTERRUPTED, bar, console, misuse, tell

if TYPE_CHECKING:
    from acutance.comparison.runner import Step
    from acutance.report.table import Table

#: What ``predict`` calls a mechanism, where that is another name.
_ALSO = {"softmax": "scaled_dot"}


def _lengths(text: str) -> tuple[int, ...]:
    """Parse ``--n``."""
    lengths = cli.read_numbers(text, int)
    if min(lengths) < 2:
        raise ValueError(f"must be at least 2, got {text!r}")
    return lengths


def _of_queries_and_keys(text: str) -> tuple[float, float]:
    """Parse ``--mean`` or ``--std``, one number for both or one for each."""
    values = cli.read_numbers(text)
    if len(values) > 2:
        raise ValueError(f"must be one number, or one for queries and one for keys, got {text!r}")
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"must be finite, got {text!r}")
    return values[0], values[-1]


def _positive(text: str) -> tuple[float, float]:
    values = _of_queries_and_keys(text)
    if min(values) <= 0:
        raise ValueError(f"must be finite and above 0, got {text!r}")
    return values


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CompareOptions(cli.OutputOptions):
    """The options of ``acutance compare``.

    Attributes:
        n: Number of keys that a row sees. Default: 256,1024,4096.
        d: Width of queries and keys.
        mechanism: Mechanism to compare, or 'all'; repeat for more. Default: the twelve that
            --list marks.
        heads: Number of heads, each with different keys.
        batch: Number of sequences.
        samples: Number of rows measured per head.
        mean: Mean of each component of the random queries, and of the keys. Default: 0.
        std: Standard deviation of each component of the random queries, and of the keys.
            Default: 1.
        is_causal: Use a causal mask.
        seed: Random seed.
        state: Use queries and keys written by 'probe --keep-qk' instead of random ones.
        costs: Measure time.
        figure: Draw effective keys against n as .png or .svg.
        listing: List the mechanisms and exit.
    """

    n: Annotated[
        tuple[int, ...] | None, typer.Option(metavar="NUMBERS"), cli.Role(read=_lengths)
    ] = None
    d: Annotated[int, typer.Option(min=2)] = 64
    mechanism: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None
    heads: cli.Least1 = 16
    batch: cli.Least1 = 1
    samples: cli.Least1 = 16
    mean: Annotated[
        tuple[float, float], typer.Option(metavar="Q[,K]"), cli.Role(read=_of_queries_and_keys)
    ] = (0.0, 0.0)
    std: Annotated[tuple[float, float], typer.Option(metavar="Q[,K]"), cli.Role(read=_positive)] = (
        1.0, 1.0,
    )  # fmt: skip
    is_causal: Annotated[bool, typer.Option("--causal")] = False
    seed: cli.Count = 0
    state: Annotated[Path | None, typer.Option("--from", metavar="STATE"), cli.Role("input")] = None
    costs: Annotated[bool, typer.Option("--costs/--no-costs")] = True
    listing: Annotated[bool, typer.Option("--list")] = False


@cli.command(
    CompareOptions,
    {cli.MEASURE: "n d mechanism heads batch samples mean std is_causal seed state costs"},
)
def compare(options: CompareOptions) -> None:
    """Compare attention mechanisms on the same keys: concentration and time.

    Concentration is measured and, where theory allows it, predicted.
    """
    from acutance.comparison import runner
    from acutance.comparison.figures import draw
    from acutance.probing.query_key_sample import load_queries_keys

    if options.listing:
        console(stderr=False).print(_listing())
        return
    source = None if options.state is None else load_queries_keys(options.state)
    n = options.n or runner.DEFAULT_LENGTHS
    if options.n is None and source is not None:
        n = tuple(sorted({max(2, source.length // share) for share in (4, 2, 1)}))
    with misuse():
        names = [_ALSO.get(name, name) for name in options.mechanism or []]
        mechanisms = runner.pick(names or None)
    columns = ("comparing", "{task.completed} of {task.total}", "{task.description}")
    with bar(console(), *columns) as shown:
        task = shown.add_task("", total=None)

        def advance(step: "Step") -> None:
            now = f"{step.mechanism}, n = {step.n}"
            shown.update(task, completed=step.done, total=step.total, description=now)

        given = cli.keywords(runner.compare, options, n=n, source=source, progress=advance)
        comparison = runner.compare(mechanisms, **given)
    if not comparison.complete:
        tell(("interrupted", "yellow"), ": the results so far follow")
    drawn = partial(draw, comparison) if comparison.complete else None
    options.write_and_show(comparison.table, comparison.to_dict, drawn)
    if not comparison.complete:
        raise typer.Exit(INTERRUPTED)


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
