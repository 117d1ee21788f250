"""``acutance diff``: compare two saved states."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acutance.cli import options as cli

if TYPE_CHECKING:
    from acutance.summary.head_summary import HeadSummary
    from acutance.summary.state import State


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class DiffOptions(cli.OutputOptions):
    """The options of ``acutance diff``.

    Attributes:
        before: State before the change.
        after: State to compare with it: another checkpoint, length or text.
        metric: Metric to list heads and layers for, by its name in acutance.METRICS; repeat for
            more. Default: normalized_entropy.
        equal_n: Compare only rows that see the same number of keys.
        top: Number of heads listed for each metric.
        csv: Write a table with one row per head and metric; '-' for standard output.
    """

    before: Annotated[Path, typer.Argument(metavar="A"), cli.Role("input")]
    after: Annotated[Path, typer.Argument(metavar="B"), cli.Role("input")]
    metric: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None
    equal_n: bool = False
    top: cli.Least1 = 10
    csv: cli.OutputFile = None


@cli.command(DiffOptions, {cli.READ: "equal_n top"})
def diff(options: DiffOptions) -> None:
    """Compare two saved states: which heads changed most, and whether by more than noise."""
    cli.check_metrics(options.metric or [])
    from acutance.report.diff_console import diff_view
    from acutance.report.diff_figures import draw_diff
    from acutance.report.exports import put_csv
    from acutance.report.terminal import headline
    from acutance.summary.diff import diff as diff_summaries

    changes = diff_summaries(_read(options.before), _read(options.after), equal_n=options.equal_n)
    shown = list(dict.fromkeys(options.metric or [])) or [headline(changes.metrics)]
    for name in shown:
        changes.of(name)
    options.write_and_show(
        partial(diff_view, changes, shown, options.top),
        changes.to_dict,
        partial(draw_diff, changes, metric=shown[0]),
        csv=(options.csv, lambda path: put_csv(changes.to_arrow(), path)),
    )


def _read(path: Path) -> "HeadSummary | State":
    """A state with its run, or only the summary if the file has no run."""
    from acutance.summary import files
    from acutance.summary.head_summary import SCHEMA
    from acutance.summary.state import load, load_state

    header, _ = files.read(path, SCHEMA)
    return load_state(path) if "run" in header else load(path)
