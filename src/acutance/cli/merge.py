"""``acutance merge``: merge the states of shards that were probed separately."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from acutance.cli import options as cli
from acutance.cli.shared import tell


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class MergeOptions(cli.SummaryOptions):
    """The options of ``acutance merge``.

    Attributes:
        states: States written by 'probe --save'.
        out: Write the merged state to this file.
        overwrite: Replace an existing state file. Other outputs are always replaced.
    """

    states: Annotated[list[Path], typer.Argument(metavar="SHARD"), cli.Role("input")]
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE"), cli.Role("state")] = (
        None
    )
    overwrite: bool = False


@cli.command(MergeOptions)
def merge(options: MergeOptions) -> None:
    """Merge the states of shards that were probed separately."""
    from acutance.report.exports import summary_view
    from acutance.summary.state import merge_states

    state = merge_states(options.states)
    if not state.run.complete:
        done = f": {state.run.windows} of {state.run.total} windows"
        tell(("incomplete", "yellow"), done)
    view = partial(summary_view, state.summary)
    options.write_summary(state.summary, view, files={"state": (options.out, state.save)})
