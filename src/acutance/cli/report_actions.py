"""What ``acutance report`` does once its options are read: show a saved state, write its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from acutance.diagnose.findings import KEY_NORMS, describe_key_norms, findings
from acutance.diagnose.recommendations import in_words, no_recommendation, recommendations
from acutance.escapes import printable
from acutance.files import write_each
from acutance.report.exports import Targets, exports, to_output
from acutance.report.screen import note
from acutance.report.terminal import console_table
from acutance.summary.head_summary import HeadSummary, load

__all__ = ["TABLE", "report", "say_written", "show_and_write"]

#: What stands for the table among the options of files.
TABLE = "the table"

#: What the file of an option is called, where that is not the option's own name.
_CALLED = {"--out": "state", "--save": "state", "--keep-qk": "queries and keys"}


def report(
    path: Path,
    *,
    targets: Targets,
    chart: str,
    metric: str | None,
    dark: bool,
    console: Callable[..., Any],
) -> None:
    """Show a state again, and write what is asked for.

    Args:
        path: a file that ``probe --save``, ``merge -o`` or ``HeadSummary.save`` wrote.
        targets: paths by option.
        chart: which figure.
        metric: what the table and the figure show; None is what suits them.
        dark: whether the figure has a dark page.
        console: makes a rich console on standard error, or output with ``stderr=False``.

    Raises:
        ImportError: if a figure is wanted without matplotlib.
        OSError: if a file cannot be read or written.
        ValueError: if the file is no state, or lacks what is asked for.
    """
    summary = load(path)
    if metric is not None:
        summary.mean(metric)  # names what is near an unknown one
    show_and_write(summary, targets, console, chart=chart, metric=metric, dark=dark)


def show_and_write(
    summary: HeadSummary,
    targets: Targets,
    console: Callable[..., Any],
    *,
    chart: str = "heads",
    metric: str | None = None,
    dark: bool = False,
    first: Mapping[str, Callable[[], object]] | None = None,
    key_norms: Mapping[str, Any] | None = None,
) -> None:
    """Write what was asked for and say where; print the table unless a file takes its place.

    Args:
        summary: any head summary.
        targets: paths by option.
        console: makes a rich console on standard error, or output with ``stderr=False``.
        chart: which figure.
        metric: what the table and the figure show; None is what suits them.
        dark: whether the figure has a dark page.
        first: what else is written, by option, before the rest.
        key_norms: what the lengths of keys do in a sample of queries and keys, where there is one.
    """
    steps = dict(first or {})
    steps |= exports(summary, targets, chart=chart, metric=metric, dark=dark, key_norms=key_norms)
    if not to_output(targets):
        steps[TABLE] = lambda: _show(summary, metric, console(stderr=False), key_norms)
    write_each(steps, lambda option: say_written(option, targets, console))


def _show(
    summary: HeadSummary,
    metric: str | None,
    output: Any,
    key_norms: Mapping[str, Any] | None = None,
) -> None:
    """Print the table, then what stands out in it and what to do about it."""
    output.print(console_table(summary, metric))
    ascii_only = output.options.ascii_only
    sections = {
        "What stands out": [finding.sentence for finding in findings(summary)],
        KEY_NORMS: [] if key_norms is None else [describe_key_norms(key_norms)],
        "What to do": _advice(summary),
    }
    for title, sentences in sections.items():
        if sentences:
            output.print(f"\n{title}", style="bold")
            output.print(bullets(sentences, ascii_only))


def bullets(sentences: Sequence[str], ascii_only: bool) -> Table:
    """Sentences as a list whose lines hang behind the bullets."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for sentence in sentences:
        grid.add_row(" *" if ascii_only else " •", Text(printable(sentence, ascii_only)))
    return grid


def _advice(summary: HeadSummary) -> list[str]:
    """Recommendations in words; the line that there are none where there are none."""
    return in_words(recommendations(summary), no_recommendation(summary))


def say_written(option: str, targets: Targets, console: Callable[..., Any]) -> None:
    """Name the file of an option on standard error."""
    path = targets.get(option)
    if path is not None and str(path) != "-":
        what = _CALLED.get(option, option[2:])
        console().print(note((f"{what} written to", "dim"), f" {path}"))
