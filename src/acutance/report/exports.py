"""Output of a summary: to the terminal, and as CSV, Parquet, JSON, HTML page or figure."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from acutance.diagnose.findings import KEY_NORMS, describe_key_norms
from acutance.diagnose.overview import advice_in_brief, overview
from acutance.diagnose.recommendations import recommendations
from acutance.escapes import in_spreadsheet
from acutance.files import as_json, put_text, write_bytes
from acutance.report.screen import Wrapped, print_sentences
from acutance.report.table import Column, Table
from acutance.report.terminal import console_table
from acutance.summary.head_summary import HeadSummary
from acutance.summary.layer import what_was_read
from acutance.summary.spans import ALL_ROWS, OTHER, Spans

__all__ = [
    "STANDARD_OUTPUT",
    "Targets",
    "csv_bytes",
    "exports",
    "print_summary",
    "put_csv",
    "put_json",
]


#: Where each option's file goes; None where it was not asked for.
Targets = Mapping[str, Path | None]
STANDARD_OUTPUT = "-"


def exports(
    summary: HeadSummary,
    *,
    chart: str = "heads",
    metric: str | None = None,
    dark: bool = False,
    key_norms: Mapping[str, Any] | None = None,
    judged: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
) -> dict[str, Callable[[Path], object]]:
    """Functions that write each export file, by the name of its option.

    Args:
        summary: any head summary.
        chart: name of the figure, from :data:`acutance.report.charts.CHARTS`.
        metric: metric of the figure; None for the figure's default.
        dark: use a dark background in the figure.
        key_norms: result of :meth:`acutance.probing.QueryKeySample.key_norms`, for the JSON and the
            page.
        judged: a comparison of losses as plain JSON values, with ``laws`` and, if there are any,
            ``sentences``; for the JSON and the page.
        plan: a cache plan as plain JSON values; for the JSON and the page.
    """

    def json_to(path: Path) -> None:
        advice = [each.to_dict() for each in recommendations(summary)]
        more = {} if key_norms is None else {"key_norms": dict(key_norms)}
        more |= {} if judged is None else {"judged": judged["laws"]}
        more |= {} if plan is None else {"cache_plan": dict(plan)}
        put_json({**summary.to_dict(), "recommendations": advice, **more}, path)

    def page_to(path: Path) -> None:
        from acutance.report.html_page.write import write_html

        write_html(summary, path, key_norms, judged, plan)

    def figure_to(path: Path) -> None:
        from acutance.report.charts import draw

        draw(summary, path, chart=chart, metric=metric, dark=dark)

    return {
        "--json": json_to,
        "--csv": lambda path: put_csv(summary.to_arrow(), path),
        "--parquet": summary.to_parquet,
        "--report": page_to,
        "--figure": figure_to,
    }


def put_json(record: Any, path: Path) -> None:
    """Write a record as JSON to a file or to standard output."""
    text = as_json(record)
    put_text(text + "\n" if str(path) == STANDARD_OUTPUT else text, path)


def put_csv(table: Any, path: Path) -> None:
    """Write a pyarrow table as CSV to a file or to standard output."""
    data = csv_bytes(table)
    if str(path) == STANDARD_OUTPUT:
        sys.stdout.write(data.decode("utf-8"))
    else:
        write_bytes(path, data)


def csv_bytes(table: Any) -> bytes:
    r"""Encode a pyarrow table as UTF-8 CSV with a header line; NaN becomes an empty field.

    Text is always quoted, so that a module's name cannot end a field or a line; text that a
    spreadsheet would read as a formula is prefixed with an apostrophe.

    Example:
        >>> import pyarrow
        >>> csv_bytes(pyarrow.table({"module": ["a,b"], "mean": [float("nan")], "rows": [3]}))
        b'"module","mean","rows"\n"a,b",,3\n'
    """
    import pyarrow
    import pyarrow.compute as compute
    from pyarrow import csv

    for index, name in enumerate(table.column_names):
        column = table.column(index)
        if pyarrow.types.is_floating(column.type):
            known = compute.if_else(compute.is_nan(column), None, column)
            table = table.set_column(index, name, known)
        elif pyarrow.types.is_string(column.type):
            safe = {text: text and in_spreadsheet(text) for text in column.unique().to_pylist()}
            if any(text != quoted for text, quoted in safe.items()):
                known = pyarrow.array([safe[text] for text in column.to_pylist()], column.type)
                table = table.set_column(index, name, known)
    buffer = io.BytesIO()
    csv.write_csv(table, buffer)
    return buffer.getvalue()


def print_summary(
    summary: HeadSummary,
    output: Any,
    metric: str | None = None,
    key_norms: Mapping[str, Any] | None = None,
) -> None:
    """Print what was read, the table, findings and recommendations."""
    named = (str(summary.about.get("model", "")), what_was_read(summary.about))
    if line := " · ".join(filter(None, named)):
        output.print(Wrapped(line, "bold"))
    output.print(console_table(summary, metric))
    sections = {
        "What stands out": overview(summary),
        KEY_NORMS: [] if key_norms is None else [describe_key_norms(key_norms)],
        "What to do": advice_in_brief(summary),
    }
    if summary.spans is not None and bool(summary.spans.rows.any()):
        output.print("", span_table(summary.spans))
        sections = {"Who looks there most": most_on_spans(summary), **sections}
    for title, sentences in sections.items():
        if sentences:
            print_sentences(output, title, sentences)


def span_table(spans: Spans) -> Table:
    """Mean weight by span of query and key, with uniform attention's in brackets."""
    rows = []
    for row, kind in enumerate((*spans.names, OTHER, ALL_ROWS)):
        heads = spans.rows[:, row] > 0
        if bool(heads.any()):
            means, even = (part[heads, row].mean(0).tolist() for part in (spans.mean, spans.even))
            weights = zip(means, even, strict=True)
            rows.append((f" {kind}", *(f"{mean:.2f} ({uniform:.2f})" for mean, uniform in weights)))
    return Table(
        "Weight on parts of the input, mean over heads (in brackets: uniform attention)",
        [Column(" rows of", "name"), *(Column(f"on {name}") for name in (*spans.names, OTHER))],
        rows,
    )


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
