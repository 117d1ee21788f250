"""``acutance reproduce``: test published claims. Loads nothing heavy until it runs."""

import json as json_format
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.plugins import INTERRUPTED, WRITE, check_outputs, command, console, need, plain_errors

if TYPE_CHECKING:
    from rich.text import Text

    from acutance.plugins import Table
    from acutance_lab.experiment import Experiment
    from acutance_lab.record import Judgement, Record, Row

AS_EXPECTED, OTHERWISE = 0, 1

_COLOURS = {"holds": "green", "holds only where": "yellow", "does not hold": "red"}
_RELATIONS = {"=": "", "<=": "≤ ", ">=": "≥ "}


@dataclass(frozen=True, repr=False, eq=False)
class ReproduceOptions:
    """The options of ``acutance reproduce``."""

    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Experiments to run. Default: all."),
    ] = None
    quick: Annotated[
        bool, typer.Option("--quick", help="Run at small sizes: about three minutes in total.")
    ] = False
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Directory for records and figures.")
    ] = Path("acutance-reproduce")
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Random seed.")] = 0
    force: Annotated[
        bool, typer.Option("--force", help="Repeat measurements and replace existing records.")
    ] = False
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Draw figures (needs acutance\\[plots]).")
    ] = True
    json: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write all records to one JSON file; '-' for standard output.",
        ),
    ] = None
    listing: Annotated[bool, typer.Option("--list", help="List the experiments and exit.")] = False


@command(ReproduceOptions, {WRITE: "out force figures json"})
def reproduce(options: ReproduceOptions) -> None:
    """Test published claims about attention: report prediction, measurement, verdict and figure."""
    out = options.out
    check_outputs({"--json": options.json})
    with plain_errors():
        for folder in (out, *out.parents):  # before a long run, not after its first experiment
            if os.path.exists(folder) and not os.path.isdir(folder):
                raise typer.BadParameter(f"{folder} is not a directory", param_hint="--out")
        from acutance_lab.run import EXPERIMENTS, check_others, pick

        try:
            chosen = pick(options.names or [], EXPERIMENTS)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="NAME") from error
        names = [experiment.name for experiment in chosen] if os.path.isdir(out) else []
        records = {f"the record of {name}": out / f"{name}.json" for name in names}
        check_outputs({**records, "--json": options.json})
        if options.listing:
            console(stderr=False).print(listing(chosen))
            return
        if not options.force:
            try:
                check_others(chosen, out, quick=options.quick, seed=options.seed)
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint="--out") from error
        if options.figures:
            need("matplotlib", "plots", "drawing", ", or skip figures with --no-figures")
        try:
            status = _run(chosen, options)
        except FloatingPointError as error:  # a training whose loss is no longer finite
            raise RuntimeError(str(error)) from error
    if status:
        raise typer.Exit(status)


def _run(chosen: "Sequence[Experiment]", options: ReproduceOptions) -> int:
    """Run experiments and print their results; each prediction is printed before its experiment.

    Experiments that need a package which is not installed are left out, unless all do.

    Returns:
        The exit status: 0 if every verdict is as expected, 1 if one is not, and 130 after Ctrl-C;
        finished experiments are then kept.
    """
    from rich.padding import Padding
    from rich.text import Text

    from acutance.plugins import note
    from acutance_lab.run import missing, run

    notes = console()
    lacking = {experiment.name: missing(experiment, quick=options.quick) for experiment in chosen}
    if not all(lacking.values()):  # otherwise the run says what to install
        for name, needed in lacking.items():
            if needed:
                skipped = f"{name}: skipped, because it needs {needed}"
                notes.print(Text(skipped, style="yellow"))
        chosen = [experiment for experiment in chosen if not lacking[experiment.name]]
    records: list[Record] = []
    complete, failure = True, None
    status: Any = None
    outcomes = run(
        chosen,
        options.out,
        quick=options.quick,
        seed=options.seed,
        force=options.force,
        figures=options.figures,
        note=lambda line: status.update(Text(line)),
    )
    try:
        for index, experiment in enumerate(chosen, 1):
            notes.print(Text(f"{experiment.name}: {experiment.title}", style="bold"))
            notes.print(Padding(Text(f"predicted: {experiment.prediction}"), (0, 0, 0, 2)))
            tested = experiment.tested(quick=options.quick)
            left = "; ".join(claim.text for claim in experiment.claims if claim not in tested)
            if left:
                notes.print(Padding(Text(f"tested at full size only: {left}"), (0, 0, 0, 2)))
            with notes.status(note(f"{index}/{len(chosen)} {experiment.name}")) as status:
                outcome = next(outcomes)
            record = outcome.record
            records.append(record)
            how = "read from an earlier run" if outcome.resumed else f"{record.seconds:.1f} s"
            line = Text("found: ").append_text(verdict(record.judgements[0], record.rows))
            notes.print(Padding(line.append(f"  ({how})", style="dim"), (0, 0, 1, 2)))
    except KeyboardInterrupt:
        complete = False
        rest = (
            f" after {len(records)} of {len(chosen)} experiments; run the same command again to "
            "continue"
        )
        notes.print(note(("interrupted", "yellow"), rest))
    except Exception as error:  # what has finished is written first
        complete, failure = False, error
    if options.json is not None:
        _write(records, chosen, complete, options.json)
    if records and str(options.json) != "-":
        console(stderr=False).print(summary(records))
        outputs = "records and figures" if options.figures else "records"
        notes.print(note((f"{outputs} in", "dim"), f" {options.out}"))
    if failure is not None:
        raise failure
    if not complete:
        return INTERRUPTED
    return AS_EXPECTED if all(record.as_expected for record in records) else OTHERWISE


def _write(
    records: "Sequence[Record]", chosen: "Sequence[Experiment]", complete: bool, path: Path
) -> None:
    """All records in one JSON file, or on standard output."""
    from acutance.plugins import put_text
    from acutance_lab.record import SCHEMA

    content = {
        "schema": SCHEMA,
        "complete": complete,
        "asked_for": [experiment.name for experiment in chosen],
        "records": [record.to_dict() for record in records],
    }
    text = json_format.dumps(content, ensure_ascii=False, allow_nan=False, indent=1)
    put_text(text + "\n", path)


def verdict(judgement: "Judgement", rows: "Sequence[Row]") -> "Text":
    """The verdict, coloured; marked if a theorem, unexpected, or not decided by the data."""
    from rich.text import Text

    from acutance_lab.record import decided

    text = Text(judgement.verdict, style=_COLOURS[judgement.kind])
    if judgement.claim.theorem:
        text.append(" (theorem)", style="dim")
    if not judgement.as_expected:
        text.append(f"  (expected: {judgement.claim.expected})", style="bold red")
    if not decided(judgement.claim, rows):
        text.append(
            "  (undecided: too few samples to tell a wrong prediction)", style="bold yellow"
        )
    return text


def listing(experiments: "Iterable[Experiment]") -> "Table":
    """A table of experiments: name, title and number of claims."""
    from acutance.plugins import Column, Table

    columns = (Column("experiment", "name"), Column("about", "words"), Column("claims"))
    rows = [
        (experiment.name, experiment.title, len(experiment.claims)) for experiment in experiments
    ]
    return Table("", columns, rows)


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
        name: str | None = record.name
        seconds: float | None = record.seconds
        for judgement in record.judgements:
            worst = judgement.worst
            error = f" ± {worst.error:.1g}" if worst.error and math.isfinite(worst.error) else ""
            rows.append((
                name, judgement.claim.text,
                f"{_RELATIONS[worst.relation]}{worst.predicted:.4g}",
                f"{worst.measured:.4g}{error}", f"{judgement.agree}/{judgement.rows}",
                Cell(verdict(judgement, record.rows).plain, _COLOURS[judgement.kind]), seconds,
            ))  # fmt: skip
            name = seconds = None  # shown once
    note = (
        "predicted and measured: the row that is furthest off for what it is allowed; "
        "rows: how many agree; theorem: follows by algebra, so agreement tests the code only"
    )
    return Table("", columns, rows, notes=[note])
