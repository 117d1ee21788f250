"""``acutance merge``: merge the states of shards that were probed separately."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from acutance.cli.options import (
    WRITE,
    CsvTo,
    FigureTo,
    JsonTo,
    ParquetTo,
    ReportTo,
    command,
)
from acutance.cli.outputs import Overwrite, check_outputs
from acutance.cli.report import show_summary
from acutance.cli.shared import check_figure, console, plain_errors


@dataclass(frozen=True, repr=False, eq=False)
class MergeOptions:
    """The options of ``acutance merge``."""

    states: Annotated[
        list[Path],
        typer.Argument(metavar="SHARD", help="States written by 'probe --save'."),
    ]
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the merged state to this file."),
    ] = None
    overwrite: Overwrite = False
    report: ReportTo = None
    json: JsonTo = None
    csv: CsvTo = None
    parquet: ParquetTo = None
    figure: FigureTo = None


@command(MergeOptions, {WRITE: "out overwrite report json csv parquet figure"})
def merge(options: MergeOptions) -> None:
    """Merge the states of shards that were probed separately."""
    files = {
        "--report": options.report,
        "--json": options.json,
        "--csv": options.csv,
        "--parquet": options.parquet,
        "--figure": options.figure,
    }
    check_outputs(
        {"--out": options.out, **files},
        {"SHARD": options.states},
        state="--out",
        overwrite=options.overwrite,
    )
    check_figure("--figure", options.figure)
    with plain_errors():
        from acutance.report.screen import note
        from acutance.summary.state import merge_states

        state = merge_states(options.states)
        if not state.run.complete:
            part = f": {state.run.windows} of {state.run.total} windows"
            console().print(note(("incomplete", "yellow"), part))
        show_summary(state.summary, {"state": options.out, **files}, first={"state": state.save})
