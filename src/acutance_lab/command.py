"""``acutance reproduce``: test published claims. Loads nothing heavy until it runs."""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance import plugins

if TYPE_CHECKING:
    from rich.text import Text

    from acutance_lab.experiment import Experiment
    from acutance_lab.record import Judgement, Record

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
    json: plugins.OutputFile = None
    listing: Annotated[bool, typer.Option("--list")] = False


@plugins.command(ReproduceOptions, {plugins.WRITE: "out force figures json"})
def reproduce(options: ReproduceOptions) -> None:
    """Test published claims about attention: report prediction, measurement, verdict and figure.

    Exit code 1 if a verdict is not the one that was stated beforehand.
    """
    out = options.out
    for folder in (out, *out.parents):  # before a long run, not after its first experiment
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise typer.BadParameter(f"{folder} is not a directory", param_hint="--out")
    from rich.padding import Padding
    from rich.text import Text

    from acutance_lab.record import SCHEMA
    from acutance_lab.run import EXPERIMENTS, missing, pick, run

    notes = plugins.console()
    status = notes.status("")
    try:
        chosen = pick(options.names or [], EXPERIMENTS)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from error
    if options.listing:
        plugins.console(stderr=False).print(listing(chosen))
        return
    if os.path.isdir(out):
        stored = {f"the record of {one.name}": out / f"{one.name}.json" for one in chosen}
        plugins.check_outputs({**stored, "--json": options.json})
    needs = {one.name: missing(one, quick=options.quick) for one in chosen}
    # if none can run, the run says what to install
    chosen = [one for one in chosen if not needs[one.name]] or chosen
    given = plugins.keywords(run, options, note=lambda line: status.update(Text(line)))
    try:
        outcomes = run(chosen, **given)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from error
    for name, needed in needs.items():
        if needed:
            notes.print(Text(f"{name}: skipped, because it needs {needed}", style="yellow"))
    records: list[Record] = []
    try:
        with status:
            for number, experiment in enumerate(chosen, 1):
                notes.print(Text(f"{experiment.name}: {experiment.title}", style="bold"))
                notes.print(Padding(_predicted(experiment, options.quick), (0, 0, 0, 2)))
                status.update(Text(f"{number}/{len(chosen)} {experiment.name}"))
                outcome = next(outcomes)
                records.append(outcome.record)
                seconds = f"{outcome.record.seconds:.1f} s"
                how = "read from an earlier run" if outcome.resumed else seconds
                found = Text("found: ").append_text(verdict(outcome.record.judgements[0]))
                notes.print(Padding(found.append(f"  ({how})", style="dim"), (0, 0, 1, 2)))
    except KeyboardInterrupt as error:
        rest = (
            f" after {len(records)} of {len(chosen)} experiments; run the same command again to "
            "continue"
        )
        notes.print(plugins.note(("interrupted", "yellow"), rest))
        raise typer.Exit(plugins.INTERRUPTED) from error
    finally:  # whatever ended it, what has finished is written
        if records or options.json is not None:
            content = {
                "schema": SCHEMA,
                "complete": len(records) == len(chosen),
                "asked_for": [experiment.name for experiment in chosen],
                "records": [record.to_dict() for record in records],
            }
            plugins.write_and_show(lambda: summary(records), json=(options.json, lambda: content))
            outputs = "records and figures" if options.figures else "records"
            notes.print(plugins.note((f"{outputs} in", "dim"), f" {out}"))
    if not all(record.as_expected for record in records):
        raise typer.Exit(1)


def _predicted(experiment: "Experiment", quick: bool) -> str:
    """What an experiment predicts, and which of its claims this size does not test."""
    tested = experiment.tested(quick=quick)
    left = "; ".join(claim.text for claim in experiment.claims if claim not in tested)
    untested = f"\ntested at full size only: {left}" if left else ""
    return f"predicted: {experiment.prediction}{untested}"


def verdict(judgement: "Judgement") -> "Text":
    """The verdict, coloured; marked if a theorem, unexpected, or not decided by the data."""
    from rich.text import Text

    theorem = " (theorem)" if judgement.claim.theorem else ""
    expected = "" if judgement.as_expected else f"  (expected: {judgement.claim.expected})"
    undecided = "  (undecided: too few samples to tell a wrong prediction)"
    return Text.assemble(
        (judgement.verdict, _COLOURS[judgement.kind]), (theorem, "dim"), (expected, "bold red"),
        ("" if judgement.decided else undecided, "bold yellow"),
    )  # fmt: skip


def listing(experiments: "Iterable[Experiment]") -> "plugins.Table":
    """A table of experiments: name, title and number of claims."""
    column = plugins.Column
    columns = (column("experiment", "name"), column("about", "words"), column("claims"))
    return plugins.Table(
        "", columns, [(one.name, one.title, len(one.claims)) for one in experiments]
    )


def summary(records: "Sequence[Record]") -> "plugins.Table":
    """Every claim with its verdict and the numbers of the row that is furthest off."""
    column = plugins.Column
    columns = (
        column("experiment", "name"), column("claim", "words"), column("predicted"),
        column("measured"), column("rows"), column("verdict", "words"),
        column("seconds", format=".1f", from_width=100),
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
                plugins.Cell(verdict(judgement).plain, _COLOURS[judgement.kind]),
                record.seconds if first else None,
            ))  # fmt: skip
    note = (
        "predicted and measured: the row that is furthest off for what it is allowed; "
        "rows: how many agree; theorem: follows by algebra, so agreement tests the code only"
    )
    return plugins.Table("", columns, rows, notes=[note])
