"""``acutance report``: show a saved state; probe and merge show theirs in the same way."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli.held_out import judge_proposals
from acutance.cli.options import (
    READ,
    WRITE,
    Chart,
    CsvTo,
    Dark,
    FigureTo,
    JsonTo,
    Metric,
    ParquetTo,
    check_chart,
    check_metrics,
    command,
)
from acutance.cli.outputs import check_outputs, write_and_show
from acutance.cli.shared import check_figure, console, plain_errors

if TYPE_CHECKING:
    from acutance.cli.held_out import Judged
    from acutance.corpus.load_model import TextModel
    from acutance.corpus.probe_corpus import Outcome
    from acutance.judging.text_windows import HeldOut
    from acutance.summary.head_summary import HeadSummary


@dataclass(frozen=True, repr=False, eq=False)
class ReportOptions:
    """The options of ``acutance report``."""

    state: Annotated[
        Path, typer.Argument(metavar="STATE", help="State written by 'probe --save' or 'merge -o'.")
    ]
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", "--report", "-o", metavar="HTML", help="Write an HTML page with all results."
        ),
    ] = None
    json: JsonTo = None
    csv: CsvTo = None
    parquet: ParquetTo = None
    figure: FigureTo = None
    chart: Chart = "heads"
    metric: Metric = None
    dark: Dark = False
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="Cache plan to show beside the heads, from 'budget -o', or with the cost of each "
            "head's share from 'budget --json'.",
        ),
    ] = None


@command(ReportOptions, {READ: "metric plan", WRITE: "html json csv parquet figure chart dark"})
def report(options: ReportOptions) -> None:
    """Show a saved state as a table, page, figure or file, without running the model."""
    targets = {
        "--report": options.html,
        "--json": options.json,
        "--csv": options.csv,
        "--parquet": options.parquet,
        "--figure": options.figure,
    }
    check_outputs(targets, {"STATE": options.state, "--plan": options.plan})
    check_figure("--figure", options.figure)
    check_chart(options.chart, options.metric)
    check_metrics([] if options.metric is None else [options.metric])
    with plain_errors():
        from acutance.summary.state import load

        summary = load(options.state)
        if options.metric is not None:
            summary.mean(options.metric)  # names what is near an unknown one
        show_summary(
            summary,
            targets,
            chart=options.chart,
            metric=options.metric,
            dark=options.dark,
            plan=options.plan,
        )


def show_summary(
    summary: "HeadSummary",
    targets: Mapping[str, Path | None],
    *,
    first: Mapping[str, Callable[[Path], object]] | None = None,
    chart: str = "heads",
    metric: str | None = None,
    dark: bool = False,
    key_norms: Mapping[str, Any] | None = None,
    judged: "Judged | None" = None,
    plan: Path | None = None,
) -> None:
    """Write the files of a summary and print its table, findings and advice.

    Args:
        summary: any head summary.
        targets: where each file goes.
        first: what writes further files, before these.
        chart: what the figure shows.
        metric: what the table and the figure show; None is what suits them.
        dark: whether the figure has a dark page.
        key_norms: what the lengths of keys do in a sample of queries and keys, where there is one.
        judged: changes that were judged by the loss, with ``probe --judge``.
        plan: file of a cache plan to show beside the heads.
    """
    from acutance.report.exports import exports, print_summary
    from acutance.report.screen import print_sentences
    from acutance.summary.layer import judged_sentences

    record = None if judged is None else judged.to_dict()
    planned = None if plan is None else _plan_beside(plan, summary)
    more = exports(
        summary,
        chart=chart,
        metric=metric,
        dark=dark,
        key_norms=key_norms,
        judged=record,
        plan=None if planned is None else planned[0],
    )

    def show(screen: Any) -> None:
        print_summary(summary, screen, metric, key_norms)
        if judged is not None and judged.comparison is not None:
            screen.print("")
            screen.print(judged.comparison.table(judged.reasons))
        elif sentences := judged_sentences(summary.about):
            print_sentences(screen, "What changes do to the loss of held-out text", sentences)
        if planned is not None:
            screen.print("")
            screen.print(planned[1])

    write_and_show({**(first or {}), **more}, targets, show)


#: Tokens at which a plan without costs is counted.
_PLAN_AT = 4096


def _plan_beside(path: Path, summary: "HeadSummary") -> tuple[dict[str, Any], Any]:
    """A plan as a record for the page, and as a table for the terminal.

    Raises:
        ValueError: if it cannot be read or is of another model than the summary.
    """
    from acutance.caching.exchange.plan_record import plan_record, plan_table, read_costs
    from acutance.caching.plan import CachePlan

    found, costs = CachePlan.load(path), read_costs(path)
    n = _PLAN_AT if costs is None else costs.n
    layers = [(layer.module, layer.numbers) for layer in summary.layers]
    model = str(summary.about.get("model", "model"))
    record = plan_record(found, layers, n, costs, name=str(path), model=model)
    return record, plan_table(found, [n], costs)


def show_outcome(
    outcome: "Outcome",
    targets: dict[str, Path | None],
    save: Path | None,
    keep_qk: Path | None,
    judged: "Judged | None",
    *,
    chart: str,
    dark: bool,
) -> None:
    """Show and write the results of ``acutance probe``.

    Args:
        outcome: of the run.
        targets: path of each output by its name.
        save: path of the state, already written.
        keep_qk: path for the sample of queries and keys.
        judged: changes that were judged by the loss, with ``--judge``.
        chart: what the figure shows.
        dark: whether the figure has a dark page.
    """
    from acutance.probing.open_probe import ProbeError
    from acutance.report.screen import note

    if outcome.state is None:
        raise KeyboardInterrupt
    run = outcome.state.run
    if outcome.resumed:
        console().print(f"resumed after {outcome.resumed} windows")
    if not outcome.finished:
        done = f" after {run.windows} of {run.total} windows"
        console().print(note(("interrupted", "yellow"), done))
    first: dict[str, Callable[[Path], object]] = {"state": lambda _: None}  # written meanwhile
    targets = targets | {"state": save, "queries and keys": None}
    key_norms = None
    if keep_qk is not None and (opened := outcome.probe) is not None:
        targets["queries and keys"] = keep_qk
        first["queries and keys"] = lambda path: opened.queries_keys().save(path)
        with suppress(ProbeError):  # which writing the sample reports
            key_norms = opened.queries_keys().key_norms()
    show_summary(
        outcome.state.summary,
        targets,
        first=first,
        chart=chart,
        dark=dark,
        key_norms=key_norms,
        judged=judged,
    )


def judge_and_show(
    outcome: "Outcome", options: Any, headed: "TextModel", held: "HeldOut | None"
) -> None:
    """Judge what the statistics suggest, if asked; show and write the results of a run."""
    judged = None
    try:
        if held is not None and outcome.finished and outcome.state is not None:
            judged = judge_proposals(
                headed,
                held,
                outcome.state.summary,
                length=headed.window(options.length),
                train_length=options.train_length,
                save=options.save,
                save_every=options.save_every,
                resume=options.resume,
            )
            outcome = replace(outcome, state=judged.noted(outcome.state, options.save))
    finally:  # what was measured is shown whatever becomes of the judging
        show_outcome(
            outcome, options.targets, options.save, options.keep_qk, judged,
            chart=options.chart, dark=options.dark,
        )  # fmt: skip
    if judged is not None:
        judged.write_law(headed.model, options.write_law)
