"""``acutance report``: show a saved state; probe and merge show theirs in the same way."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli import options as cli
from acutance.cli.shared import refuse

if TYPE_CHECKING:
    from acutance.summary.head_summary import HeadSummary


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ReportOptions(cli.SummaryOptions):
    """The options of ``acutance report``.

    Attributes:
        state: State written by 'probe --save' or 'merge -o'.
        metric: Metric to show in the table and figure, by its name in acutance.METRICS. Default:
            normalized_entropy, if it was recorded.
        plan: Cache plan to show beside the heads, from 'budget -o', or with the cost of each head's
            share from 'budget --json'.
    """

    state: Annotated[Path, typer.Argument(metavar="STATE"), cli.Role("input")]
    report: Annotated[
        Path | None, typer.Option("--html", "--report", "-o", metavar="HTML"), cli.Role("output")
    ] = None
    metric: Annotated[str | None, typer.Option(metavar="NAME")] = None
    plan: cli.InputFile = None


@cli.command(ReportOptions, {cli.READ: "plan"})
def report(options: ReportOptions) -> None:
    """Show a saved state as a table, page, figure or file, without running the model."""
    if options.chart == "theory" and options.metric is not None:
        refuse("--chart", "'theory' shows entropy only; remove --metric")
    cli.check_metrics([] if options.metric is None else [options.metric])
    from rich.console import Group

    from acutance.report.exports import summary_view
    from acutance.summary.state import load

    summary = load(options.state)
    if options.metric is not None:
        summary.mean(options.metric)  # names what is near an unknown one
    record, tables = None, []
    if options.plan is not None:
        record, table = _plan_beside(options.plan, summary)
        tables = ["", table]

    def show() -> Group:
        return Group(summary_view(summary, options.metric), *tables)

    options.write_summary(summary, show, options.metric, plan=record)


#: Tokens at which a plan without costs is counted.
_PLAN_AT = 4096


def _plan_beside(path: Path, summary: "HeadSummary") -> tuple[dict[str, Any], Any]:
    """A plan as a record for the page, and as a table for the terminal.

    Raises:
        ValueError: if it cannot be read or is of another model than the summary.
    """
    from acutance.caching.frontier import plan_record, plan_table, read_costs
    from acutance.caching.plan import CachePlan

    found, costs = CachePlan.load(path), read_costs(path)
    n = _PLAN_AT if costs is None else costs.n
    layers = [(layer.module, layer.numbers) for layer in summary.layers]
    model = str(summary.about.get("model", "model"))
    record = plan_record(found, layers, n, costs, name=str(path), model=model)
    return record, plan_table(found, [n], costs)
