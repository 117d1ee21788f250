"""What the terminal shows of a summary: the table, what stands out in it, what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from acutance.diagnose.findings import KEY_NORMS, describe_key_norms
from acutance.diagnose.overview import advice_in_brief, overview
from acutance.escapes import printable
from acutance.report.terminal import console_table
from acutance.summary.head_summary import HeadSummary

__all__ = ["print_summary"]


def print_summary(
    summary: HeadSummary,
    output: Any,
    metric: str | None = None,
    key_norms: Mapping[str, Any] | None = None,
) -> None:
    """Print the table, then what stands out in it and what to do about it."""
    output.print(console_table(summary, metric))
    ascii_only = output.options.ascii_only
    sections = {
        "What stands out": overview(summary),
        KEY_NORMS: [] if key_norms is None else [describe_key_norms(key_norms)],
        "What to do": advice_in_brief(summary),
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
