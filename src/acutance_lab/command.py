"""``acutance reproduce``: test published claims. Loads nothing heavy until it runs."""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.plugins import (
    INTERRUPTED,
    WRITE,
    OutputFile,
    check_outputs,
    command,
    console,
    keywords,
    write_and_show,
)

if TYPE_CHECKING:
    from rich.text import Text

    from acutance.plugins import Table
    from acutance_lab.experiment import Experiment
    from acutance_lab.record import Judgement, Record
    from acutance_lab.run import Outcome

_COLOURS = {"holds": "green", "holds only where": "yellow", "does not hold": "red"}
_RELATIONS = {"=": "", "<=": "≤ ", ">=": "≥ "}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ReproduceOptions:
    """The options of ``acutance reproduce``.

    Attributes:
        names: Experiments to run. Default: all.
        quick: Run at small sizes: about three minutes in total.
        out: Directory for records and figures.
        seed: Random seed.
        force: Repeat measurements and replace existing records.
        figures: Draw figures (needs matplotlib).
        json: Write all records to one JSON file; '-' for standard output.
        listing: List the experiments and exit.
    """

    names: Annotated[list[str] | None, typer.Argument(metavar="NAME")] = None
    quick: bool = False
    out: Annotated[Path, typer.Option(metavar="DIR")] = Path("acutance-reproduce")
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0
    force: bool = False
    figures: Annotated[bool, typer.Option("--figures/--no-figures")] = True
    json: OutputFile = None
    listing: Annotated[bool, typer.Option("--list")] = False


@command(ReproduceOptions, {WRITE: "out force figures json"})
def reproduce(options: ReproduceOptions) -> None:
    """Test published claims about attention: report prediction, measurement, verdict and figure.

    Exit code 1 if a verdict is not the one that was stated beforehand.
    """
    out = options.out
    for folder in (out, *out.parents):  # before a long run, not after its first experiment
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise typer.BadParameter(f"{folder} is not a directory", param_hint="--out")
    from rich.text import Text

    from acutance.plugins import note
    from acutance_lab.record import SCHEMA
    from acutance_lab.run import EXPERIMENTS, missing, pick, run

    try:
        chosen = pick(options.names or [], EXPERIMENTS)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from error
    if options.listing:
        console(stderr=False).print(listing(chosen))
        return
    if os.path.isdir(out):
        stored = {f"the record of {one.name}": out / f"{one.name}.json" for one in chosen}
        check_outputs({**stored, "--json": options.json})
    notes = console()
    status = notes.status("")
    needs = {experiment.name: missing(experiment, quick=options.quick) for experiment in chosen}
    if not all(needs.values()):  # otherwise the run says what to install
        chosen = [experiment for experiment in chosen if not needs[experiment.name]]
    try:
        outcomes = run(
            chosen, **keywords(run, options, note=lambda line: status.update(Text(line)))
        )
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from error
    for name, needed in needs.items():
        if needed:
            notes.print(Text(f"{name}: skipped, because it needs {needed}", style="yellow"))
    records: list[Record] = []
    failure: Exception | None = None

    def content() -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "complete": failure is None,
            "asked_for": [experiment.name for experiment in chosen],
            "records": [record.to_dict() for record in records],
        }

    try:
        with status:
            for record in _records(chosen, outcomes, status, quick=options.quick):
                records.append(record)
    except KeyboardInterrupt:
        failure = typer.Exit(INTERRUPTED)
        rest = (
            f" after {len(records)} of {len(chosen)} experiments; run the same command again to "
            "continue"
        )
        notes.print(note(("interrupted", "yellow"), rest))
    except Exception as error:  # what has finished is written first
        failure = error
    if records or options.json is not None:
        write_and_show(lambda: summary(records), json=(options.json, content))
        outputs = "records and figures" if options.figures else "records"
        notes.print(note((f"{outputs} in", "dim"), f" {out}"))
    if failure is not None:
        raise failure
    if not all(record.as_expected for record in records):
        raise typer.Exit(1)


def _records(
    chosen: "Sequence[Experiment]", outcomes: "Iterator[Outcome]", status: Any, *, quick: bool
) -> "Iterator[Record]":
    """The records as they finish; prints each prediction before, and what was found after."""
    from rich.padding import Padding
    from rich.text import Text

    show = status.console.print
    for index, experiment in enumerate(chosen, 1):
        tested = experiment.tested(quick=quick)
        lines = [f"predicted: {experiment.prediction}"]
        if left := [claim.text for claim in experiment.claims if claim not in tested]:
            lines.append(f"tested at full size only: {'; '.join(left)}")
        show(Text(f"{experiment.name}: {experiment.title}", style="bold"))
        show(Padding(Text("\n".join(lines)), (0, 0, 0, 2)))
        status.update(Text(f"{index}/{len(chosen)} {experiment.name}"))
        outcome = next(outcomes)
        record = outcome.record
        how = "read from an earlier run" if outcome.resumed else f"{record.seconds:.1f} s"
        line = Text("found: ").append_text(verdict(record.judgements[0]))
        show(Padding(line.append(f"  ({how})", style="dim"), (0, 0, 1, 2)))
        yield record


def verdict(judgement: "Judgement") -> "Text":
    """The verdict, coloured; marked if a theorem, unexpected, or not decided by the data."""
    from rich.text import Text

    text = Text(judgement.verdict, style=_COLOURS[judgement.kind])
    if judgement.claim.theorem:
        text.append(" (theorem)", style="dim")
    if not judgement.as_expected:
        text.append(f"  (expected: {judgement.claim.expected})", style="bold red")
    if not judgement.decided:
        undecided = "  (undecided: too few samples to tell a wrong prediction)"
        text.append(undecided, style="bold yellow")
    return text


def listing(experiments: "Iterable[Experiment]") -> "Table":
    """A table of experiments: name, title and number of claims."""
    from acutance.plugins import Column, Table

    columns = (Column("experiment", "name"), Column("about", "words"), Column("claims"))
    return Table("", columns, [(one.name, one.title, len(one.claims)) for one in experiments])


def summary(records: "Sequence[Record]") -> "Table":
    """Every claim with its verdict and the numbers of the row that is furthest off."""
    from acutance.plugins import Cell, Column, Table

    columns = (
        Column("experiment", "name"), Column("claim", "words"), Column("predicted"),
        Column("measured"), Column("rows"), Column("verdict", "words"),
        Column("seconds", format=".1f", from_width=100),
    )  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    for record in records:
        for judgement in record.judgements:
            worst = judgement.worst
            error = f" ± {worst.error:.1g}" if worst.error and math.isfinite(worst.error) else ""
            first = judgement is record.judgements[0]
            rows.append((
                record.name if first else None, judgement.claim.text,
                f"{_RELATIONS[worst.relation]}{worst.predicted:.4g}",
                f"{worst.measured:.4g}{error}", f"{judgement.agree}/{judgement.rows}",
                Cell(verdict(judgement).plain, _COLOURS[judgement.kind]),
                record.seconds if first else None,
            ))  # fmt: skip
    note = (
        "predicted and measured: the row that is furthest off for what it is allowed; "
        "rows: how many agree; theorem: follows by algebra, so agreement tests the code only"
    )
    return Table("", columns, rows, notes=[note])
