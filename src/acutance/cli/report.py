"""``acutance report``: show a saved state; probe and merge show theirs in the same way."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli.options import (
    READ,
    WRITE,
    InputFile,
    Role,
    SummaryOptions,
    check_metrics,
    command,
)
from acutance.cli.outputs import write_and_show

if TYPE_CHECKING:
    from acutance.summary.head_summary import HeadSummary


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ReportOptions(SummaryOptions):
    """The options of ``acutance report``.

    Attributes:
        state: State written by 'probe --save' or 'merge -o'.
        metric: Metric to show in the table and figure, by its name in acutance.METRICS. Default:
            normalized_entropy, if it was recorded.
        plan: Cache plan to show beside the heads, from 'budget -o', or with the cost of each head's
            share from 'budget --json'.
    """

    state: Annotated[Path, typer.Argument(metavar="STATE"), Role("input")]
    report: Annotated[
        Path | None, typer.Option("--html", "--report", "-o", metavar="HTML"), Role("output")
    ] = None
    metric: Annotated[str | None, typer.Option(metavar="NAME")] = None
    plan: InputFile = None


@command(ReportOptions, {READ: "metric plan", WRITE: "report json csv parquet figure chart dark"})
def report(options: ReportOptions) -> None:
    """Show a saved state as a table, page, figure or file, without running the model."""
    if options.chart == "theory" and options.metric is not None:
        raise typer.BadParameter(
            "'theory' shows entropy only; remove --metric", param_hint="--chart"
        )
    check_metrics([] if options.metric is None else [options.metric])
    from rich.console import Group

    from acutance.report.exports import summary_view
    from acutance.summary.state import load

    summary = load(options.state)
    if options.metric is not None:
        summary.mean(options.metric)  # names what is near an unknown one
    record = None
    tables: tuple[Any, ...] = ()
    if options.plan is not None:
        record, table = _plan_beside(options.plan, summary)
        tables = ("", table)
    write_and_show(
        lambda: Group(summary_view(summary, options.metric), *tables),
        **summary_files(summary, options, options.metric, plan=record),
    )


def summary_files(
    summary: "HeadSummary",
    options: SummaryOptions,
    metric: str | None = None,
    **more: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The files that options ask of a summary, as :func:`write_and_show` takes them.

    Args:
        summary: any head summary.
        options: where each file goes.
        metric: what the figure shows; None is what suits it.
        more: ``key_norms``, ``judged`` and ``plan`` of :func:`acutance.report.html`.
    """
    from acutance.report.charts import draw
    from acutance.report.exports import put_csv, summary_record
    from acutance.report.html_page.write import write_html

    draw_chart = partial(draw, summary, chart=options.chart, metric=metric, dark=options.dark)
    return {
        "json": (options.json, partial(summary_record, summary, **more)),
        "csv": (options.csv, lambda path: put_csv(summary.to_arrow(), path)),
        "parquet": (options.parquet, summary.to_parquet),
        "report": (options.report, lambda path: write_html(summary, path, **more)),
        "figure": (options.figure, draw_chart),
    }


#: Tokens at which a plan without costs is counted.
_PLAN_AT = 4096


def _plan_beside(path: Path, summary: "HeadSummary") -> tuple[dict[str, Any], Any]:
    """A plan as a record for the page, and as a table for the terminal.

    Raises:
        ValueError: if it cannot be read or is of another model than the summary.
    """
    from acutance.caching.plan import CachePlan
    from acutance.caching.plan_record import plan_record, plan_table, read_costs

    found, costs = CachePlan.load(path), read_costs(path)
    n = _PLAN_AT if costs is None else costs.n
    layers = [(layer.module, layer.numbers) for layer in summary.layers]
    model = str(summary.about.get("model", "model"))
    record = plan_record(found, layers, n, costs, name=str(path), model=model)
    return record, plan_table(found, [n], costs)
