"""What ``acutance reproduce`` does: state, run, show, and leave an exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.padding import Padding
from rich.text import Text

from acutance.files import write_text
from acutance.report.screen import note
from acutance.reproduce import render
from acutance.reproduce.experiment import Experiment
from acutance.reproduce.record import SCHEMA, Record
from acutance.reproduce.runner import missing, run

AS_EXPECTED, OTHERWISE, INTERRUPTED = 0, 1, 130


def reproduce(
    chosen: Sequence[Experiment],
    out: Path,
    *,
    quick: bool,
    seed: int,
    force: bool,
    figures: bool,
    to_json: Path | None,
    console: Callable[..., Any],
) -> int:
    """Run experiments and print what they found.

    Each prediction is printed before its experiment begins. An interrupt keeps what has finished.
    Experiments that need a package which is not installed are left out, unless all do.

    Args:
        chosen: which experiments.
        out: directory of records and figures.
        quick: run at the small size.
        seed: of all random numbers.
        force: measure again whatever is there.
        figures: draw.
        to_json: one file with every record; "-" is standard output, in place of the table.
        console: makes a rich console on standard error, or output with ``stderr=False``.

    Returns:
        Exit status: 0 if every verdict is of the kind expected, 1 if one is not, 130 if
        interrupted.
    """
    notes = console()
    left_out = [experiment for experiment in chosen if missing(experiment)]
    if len(left_out) < len(chosen):  # otherwise the run says what to install
        for experiment in left_out:
            notes.print(
                Text(f"{experiment.name}: left out, it needs {experiment.needs}", style="yellow")
            )
        chosen = [experiment for experiment in chosen if experiment not in left_out]
    records: list[Record] = []
    complete, failure = True, None
    progress = _Progress()
    try:
        outcomes = run(
            chosen, out, quick=quick, seed=seed, force=force, figures=figures, note=progress
        )
        for index, experiment in enumerate(chosen, 1):
            notes.print(Text(f"{experiment.name}: {experiment.title}", style="bold"))
            notes.print(Padding(Text(f"predicted: {experiment.prediction}"), (0, 0, 0, 2)))
            tested = experiment.tested(quick=quick)
            left = "; ".join(claim.text for claim in experiment.claims if claim not in tested)
            if left:
                notes.print(Padding(Text(f"tested at full size only: {left}"), (0, 0, 0, 2)))
            with notes.status(note(f"{index}/{len(chosen)} {experiment.name}")) as progress.status:
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
                f" after {len(records)} of {len(chosen)} experiments; "
                "the same command goes on from there",
            )
        )
    except Exception as error:  # what has finished is written first
        complete, failure = False, error
    if to_json is not None:
        _write(records, chosen, complete, to_json)
    if records and str(to_json) != "-":
        output = console(stderr=False)
        output.print(render.summary(records, output.width))
        what = "records and figures" if figures else "records"
        notes.print(note((f"{what} in", "dim"), f" {out}"))
    if failure is not None:
        raise failure
    if not complete:
        return INTERRUPTED
    return AS_EXPECTED if all(record.as_expected for record in records) else OTHERWISE


class _Progress:
    """Lines of progress of an experiment, shown one over the other while it runs."""

    status: Any = None

    def __call__(self, line: str) -> None:
        if self.status is not None:
            self.status.update(Text(line))


def _write(
    records: Sequence[Record], chosen: Sequence[Experiment], complete: bool, path: Path
) -> None:
    """All records in one JSON file, or on standard output."""
    whole: Mapping[str, Any] = {
        "schema": SCHEMA,
        "complete": complete,
        "asked_for": [experiment.name for experiment in chosen],
        "records": [record.to_dict() for record in records],
    }
    text = json.dumps(whole, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        write_text(path, text)
