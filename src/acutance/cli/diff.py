"""``acutance diff``: compare two saved states."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acutance.cli.options import READ, WRITE, Dark, FigureTo, JsonTo, check_metrics, command
from acutance.cli.outputs import check_outputs, write_and_show
from acutance.cli.shared import check_figure, plain_errors

if TYPE_CHECKING:
    from acutance.summary.head_summary import HeadSummary
    from acutance.summary.state import State


@dataclass(frozen=True, repr=False, eq=False)
class DiffOptions:
    """The options of ``acutance diff``."""

    before: Annotated[Path, typer.Argument(metavar="A", help="State before the change.")]
    after: Annotated[
        Path,
        typer.Argument(
            metavar="B", help="State to compare with it: another checkpoint, length or text."
        ),
    ]
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help=(
                "Metric to list heads and layers for, by its name in acutance.METRICS; repeat for "
                "more. Default: normalized_entropy."
            ),
        ),
    ] = None
    equal_n: Annotated[
        bool, typer.Option("--equal-n", help="Compare only rows that see the same number of keys.")
    ] = False
    top: Annotated[
        int, typer.Option("--top", min=1, help="Number of heads listed for each metric.")
    ] = 10
    json: JsonTo = None
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv",
            metavar="FILE",
            help="Write a table with one row per head and metric; '-' for standard output.",
        ),
    ] = None
    figure: FigureTo = None
    dark: Dark = False


@command(DiffOptions, {READ: "metric equal_n top", WRITE: "json csv figure dark"})
def diff(options: DiffOptions) -> None:
    """Compare two saved states: which heads changed most, and whether by more than noise."""
    targets = {"--json": options.json, "--csv": options.csv, "--figure": options.figure}
    check_outputs(targets, {"A": options.before, "B": options.after})
    check_figure("--figure", options.figure)
    check_metrics(options.metric or [])
    with plain_errors():
        from acutance.report.diff_console import print_diff
        from acutance.report.exports import put_csv, put_json
        from acutance.report.terminal import headline
        from acutance.summary.diff.diff import diff as diff_summaries

        difference = diff_summaries(
            _read(options.before), _read(options.after), equal_n=options.equal_n
        )
        shown = list(dict.fromkeys(options.metric or [])) or [headline(difference.metrics)]
        for name in shown:
            difference.of(name)

        def draw(path: Path) -> None:
            from acutance.report.diff_figures import draw_diff
            from acutance.report.plot_style import DARK, LIGHT

            draw_diff(difference, path, shown[0], theme=DARK if options.dark else LIGHT)

        write_and_show(
            {
                "--json": lambda path: put_json(difference.to_dict(), path),
                "--csv": lambda path: put_csv(difference.to_arrow(), path),
                "--figure": draw,
            },
            targets,
            lambda screen: print_diff(difference, screen, shown, options.top),
        )


def _read(path: Path) -> "HeadSummary | State":
    """A state with its run, or only the summary if the file has no run."""
    from acutance.summary import files
    from acutance.summary.head_summary import SCHEMA
    from acutance.summary.state import load, load_state

    header, _ = files.read(path, SCHEMA)
    return load_state(path) if "run" in header else load(path)
