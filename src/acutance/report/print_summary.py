"""Terminal output of a summary: the table, findings and recommendations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from acutance.diagnose.findings import KEY_NORMS, describe_key_norms
from acutance.diagnose.overview import advice_in_brief, overview
from acutance.escapes import printable
from acutance.report.screen import NumberTable
from acutance.report.terminal import console_table
from acutance.summary.head_summary import HeadSummary
from acutance.summary.spans import ALL_ROWS, OTHER, Spans

__all__ = ["print_summary"]


def print_summary(
    summary: HeadSummary,
    output: Any,
    metric: str | None = None,
    key_norms: Mapping[str, Any] | None = None,
) -> None:
    """Print the table, then findings and recommendations."""
    output.print(console_table(summary, metric))
    ascii_only = output.options.ascii_only
    sections = {
        "What stands out": overview(summary),
        KEY_NORMS: [] if key_norms is None else [describe_key_norms(key_norms)],
        "What to do": advice_in_brief(summary),
    }
    if summary.spans is not None and bool(summary.spans.rows.any()):
        output.print(
            "\nWeight on parts of the input, mean over heads (in brackets: uniform attention)",
            style="bold",
        )
        output.print(span_table(summary.spans, ascii_only))
        sections = {"Who looks there most": most_on_spans(summary), **sections}
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


def span_table(spans: Spans, ascii_only: bool) -> Table:
    """Mean weight by span of query and key, with uniform attention's in brackets."""
    table = NumberTable(keys=1, box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column(" rows of", no_wrap=True)
    for name in (*spans.names, OTHER):
        table.add_column(Text(f"on {printable(name, ascii_only)}"), justify="right")
    for row, kind in enumerate((*spans.names, OTHER, ALL_ROWS)):
        there = spans.rows[:, row] > 0
        if not bool(there.any()):
            continue
        means, even = (part[there, row].mean(0).tolist() for part in (spans.mean, spans.even))
        cells = [f"{one:.2f} ({other:.2f})" for one, other in zip(means, even, strict=True)]
        table.add_row(Text(f" {printable(kind, ascii_only)}"), *cells)
    return table


def most_on_spans(summary: HeadSummary, count: int = 3) -> list[str]:
    """For each span, a sentence on the heads whose rows put most weight on it."""
    spans = summary.spans
    assert spans is not None
    sentences = []
    for name in spans.names:
        weight = spans.weight(name).nan_to_num(-1.0)
        best = weight.topk(min(count, len(weight))).indices.tolist()
        heads = [
            f"L{layer} H{head} {float(weight[at]):.2f}"
            for at in best
            for layer, head in [summary.places[at]]
            if float(weight[at]) >= 0
        ]
        sentences.append(f"{name}: {', '.join(heads)}")
    return sentences
