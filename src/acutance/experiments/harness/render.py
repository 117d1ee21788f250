"""What ``acutance reproduce`` prints: predictions, verdicts and the summary table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from acutance.experiments.harness.experiment import Experiment
from acutance.experiments.harness.record import Judgement, Record, Row, decided
from acutance.report.screen import NumberTable

_COLOURS = {"holds": "green", "holds only where": "yellow", "does not hold": "red"}
_WIDE = 110  # columns
_RELATIONS = {"=": "", "<=": "≤ ", ">=": "≥ "}


def number(value: float) -> str:
    """A number with four significant digits.

    Example:
        >>> number(0.474474647), number(1e-9), number(float("inf")), number(12345.6)
        ('0.4745', '1e-09', 'inf', '1.235e+04')
    """
    return f"{value:.4g}"


def measurement(row: Row) -> str:
    """What was measured, with its standard error if it has one."""
    if not row.error or not math.isfinite(row.error):
        return number(row.measured)
    return f"{number(row.measured)} ± {row.error:.1g}"


def where(row: Row) -> str:
    """The row's condition as text, such as "n = 256, γ = 2"."""
    parts = (
        f"{key} = {number(value) if isinstance(value, float) else value}"
        for key, value in row.condition.items()
    )
    return ", ".join(parts)


def verdict(judgement: Judgement, rows: Sequence[Row]) -> Text:
    """The verdict, coloured; marked if a theorem, unexpected, or not decided by the data."""
    text = Text(judgement.verdict, style=_COLOURS[judgement.kind])
    if judgement.claim.theorem:
        text.append(" (theorem)", style="dim")
    if not judgement.as_expected:
        text.append(f"  (expected: {judgement.claim.expected})", style="bold red")
    if not decided(judgement.claim, rows):
        text.append(
            "  (undecided: too few samples to tell a wrong prediction)", style="bold yellow"
        )
    return text


def listing(experiments: Iterable[Experiment]) -> Table:
    """A table of experiments: name, title and number of claims."""
    table = NumberTable(box=None, pad_edge=False, header_style="bold")
    table.add_column("experiment", no_wrap=True)
    table.add_column("about")
    table.add_column("claims", justify="right", no_wrap=True)
    for experiment in experiments:
        table.add_row(experiment.name, experiment.title, str(len(experiment.claims)))
    return table


def summary(records: Sequence[Record], width: int = _WIDE) -> Table:
    """Every claim with its verdict and the numbers of the row that is furthest off.

    Args:
        records: in the order to show.
        width: of the terminal; below 110 columns the numbers go under the claim.
    """
    table = (_wide if width >= _WIDE else _narrow)(records)
    table.caption = (
        "predicted and measured: the row that is furthest off for what it is allowed; "
        "rows: how many agree; theorem: follows by algebra, so agreement tests the code only"
    )
    table.caption_justify = "left"
    return table


def _wide(records: Sequence[Record]) -> Table:
    """The summary for wide terminals: a column each for experiment, claim, verdict and numbers."""
    table = Table(header_style="bold")
    table.add_column("experiment", no_wrap=True)
    table.add_column("claim", ratio=3)
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("verdict", ratio=3)
    table.add_column("seconds", justify="right", no_wrap=True)
    for record in records:
        for index, judgement in enumerate(record.judgements):
            first, worst = index == 0, judgement.worst
            table.add_row(
                record.name if first else "",
                Text(judgement.claim.text),
                _RELATIONS[worst.relation] + number(worst.predicted),
                measurement(worst),
                f"{judgement.agree}/{judgement.rows}",
                verdict(judgement, record.rows),
                f"{record.seconds:.1f}" if first else "",
                end_section=index == len(record.judgements) - 1,
            )
    return table


def _narrow(records: Sequence[Record]) -> Table:
    """The summary for narrow terminals: claims under their experiment, numbers under claims."""
    table = Table(header_style="bold", show_header=False)
    table.add_column("claim", overflow="fold")
    for record in records:
        table.add_row(Text.assemble((record.name, "bold"), (f"  {record.seconds:.1f} s", "dim")))
        for index, judgement in enumerate(record.judgements):
            worst = judgement.worst
            numbers = (
                f"\n  predicted {_RELATIONS[worst.relation]}{number(worst.predicted)}, measured "
                f"{measurement(worst)}; {judgement.agree}/{judgement.rows} rows"
            )
            text = Text(f"• {judgement.claim.text}: ").append_text(verdict(judgement, record.rows))
            last = index == len(record.judgements) - 1
            table.add_row(text.append(numbers, style="dim"), end_section=last)
    return table
