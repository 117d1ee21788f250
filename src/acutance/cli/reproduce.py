"""``acutance reproduce``: test published claims."""

import json as json_format
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli.options import WRITE, command
from acutance.cli.outputs import check_outputs
from acutance.cli.shared import INTERRUPTED, console, need, plain_errors

if TYPE_CHECKING:
    from acutance.experiments.harness.experiment import Experiment
    from acutance.experiments.harness.record import Record

AS_EXPECTED, OTHERWISE = 0, 1


@dataclass(frozen=True, repr=False, eq=False)
class ReproduceOptions:
    """The options of ``acutance reproduce``."""

    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Experiments to run. Default: all."),
    ] = None
    quick: Annotated[
        bool, typer.Option("--quick", help="Run at small sizes: one or two minutes in total.")
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
        for part in (out, *out.parents):  # before a long run, not after its first experiment
            if os.path.exists(part) and not os.path.isdir(part):
                raise typer.BadParameter(f"{part} is not a directory", param_hint="--out")
        from acutance.experiments import EXPERIMENTS
        from acutance.experiments.harness import render, runner

        try:
            chosen = runner.pick(options.names or [], EXPERIMENTS)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="NAME") from error
        records = {
            f"the record of {experiment.name}": out / f"{experiment.name}.json"
            for experiment in chosen
        }
        check_outputs({**(records if os.path.isdir(out) else {}), "--json": options.json})
        if options.listing:
            console(stderr=False).print(render.listing(chosen))
            return
        if not options.force:
            try:
                runner.check_others(chosen, out, quick=options.quick, seed=options.seed)
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

    from acutance.experiments.harness import render
    from acutance.experiments.harness.runner import missing, run
    from acutance.report.screen import note

    notes = console()
    lacking = {experiment.name: missing(experiment, quick=options.quick) for experiment in chosen}
    if not all(lacking.values()):  # otherwise the run says what to install
        for experiment in chosen:
            if package := lacking[experiment.name]:
                size = "" if package == experiment.needs else " at full size"
                message = f"{experiment.name}: skipped, because it needs {package}{size}"
                notes.print(Text(message, style="yellow"))
        chosen = [experiment for experiment in chosen if not lacking[experiment.name]]
    records: list[Record] = []
    complete, failure = True, None
    status: Any = None

    def progress(line: str) -> None:
        status.update(Text(line))

    try:
        outcomes = run(
            chosen,
            options.out,
            quick=options.quick,
            seed=options.seed,
            force=options.force,
            figures=options.figures,
            note=progress,
        )
        for index, experiment in enumerate(chosen, 1):
            notes.print(Text(f"{experiment.name}: {experiment.title}", style="bold"))
            notes.print(Padding(Text(f"predicted: {experiment.prediction}"), (0, 0, 0, 2)))
            tested = experiment.tested(quick=options.quick)
            left = "; ".join(claim.text for claim in experiment.claims if claim not in tested)
            if left:
                notes.print(Padding(Text(f"tested at full size only: {left}"), (0, 0, 0, 2)))
            with notes.status(note(f"{index}/{len(chosen)} {experiment.name}")) as status:
                outcome = next(outcomes)
            records.append(outcome.record)
            how = (
                "read from an earlier run" if outcome.resumed else f"{outcome.record.seconds:.1f} s"
            )
            line = Text("found: ").append_text(
                render.verdict(outcome.record.judgements[0], outcome.record.rows)
            )
            notes.print(Padding(line.append(f"  ({how})", style="dim"), (0, 0, 1, 2)))
    except KeyboardInterrupt:
        complete = False
        notes.print(
            note(
                ("interrupted", "yellow"),
                f" after {len(records)} of {len(chosen)} experiments; run the same command "
                "again to continue",
            )
        )
    except Exception as error:  # what has finished is written first
        complete, failure = False, error
    if options.json is not None:
        _write(records, chosen, complete, options.json)
    if records and str(options.json) != "-":
        output = console(stderr=False)
        output.print(render.summary(records, output.width))
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
    from acutance.experiments.harness.record import SCHEMA
    from acutance.files import put_text

    whole = {
        "schema": SCHEMA,
        "complete": complete,
        "asked_for": [experiment.name for experiment in chosen],
        "records": [record.to_dict() for record in records],
    }
    text = json_format.dumps(whole, ensure_ascii=False, allow_nan=False, indent=1)
    put_text(text + "\n", path)
