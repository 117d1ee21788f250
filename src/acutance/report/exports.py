"""Output of a summary: to the terminal, and as CSV, Parquet, JSON, HTML page or figure."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group

from acutance.diagnose.findings import KEY_NORMS, describe_key_norms
from acutance.diagnose.overview import advice_in_brief, overview
from acutance.diagnose.recommendations import recommendations
from acutance.escapes import in_spreadsheet
from acutance.files import write_bytes
from acutance.report.screen import Wrapped
from acutance.report.table import Column, Table
from acutance.report.terminal import console_table
from acutance.summary.head_summary import HeadSummary
from acutance.summary.layer import judged_sentences, what_was_read
from acutance.summary.readouts.spans import ALL_ROWS, OTHER, Spans


def summary_record(
    summary: HeadSummary,
    key_norms: Mapping[str, Any] | None = None,
    judged: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All results as JSON values; the arguments are those of :func:`acutance.report.html`."""
    advice = [recommendation.to_dict() for recommendation in recommendations(summary)]
    more = {} if key_norms is None else {"key_norms": dict(key_norms)}
    more |= {} if judged is None else {"judged": judged["laws"]}
    more |= {} if plan is None else {"cache_plan": dict(plan)}
    return {**summary.to_dict(), "recommendations": advice, **more}


def put_csv(table: Any, path: Path) -> None:
    """Write a pyarrow table as CSV to a file or to standard output."""
    data = csv_bytes(table)
    if str(path) == "-":
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


def summary_view(
    summary: HeadSummary,
    metric: str | None = None,
    key_norms: Mapping[str, Any] | None = None,
    judged: Table | None = None,
) -> Group:
    """What a console prints of a summary: what was read, the table, findings and advice.

    Args:
        summary: any head summary.
        metric: what the table shows; None is what suits it.
        key_norms: what the lengths of keys do in a sample of queries and keys, where there is one.
        judged: a comparison of losses; None for what the summary itself says of one.
    """
    named = (str(summary.about.get("model", "")), what_was_read(summary.about))
    line = " · ".join(filter(None, named))
    parts: list[Any] = [*([Wrapped(line, "bold")] if line else []), console_table(summary, metric)]
    sections: dict[str, list[str]] = {}
    if summary.spans is not None and bool(summary.spans.rows.any()):
        parts += ["", span_table(summary.spans)]
        sections["Who looks there most"] = most_on_spans(summary)
    sections["What stands out"] = overview(summary)
    sections[KEY_NORMS] = [] if key_norms is None else [describe_key_norms(key_norms)]
    sections["What to do"] = advice_in_brief(summary)
    if judged is None:
        title = "What changes do to the loss of held-out text"
        sections[title] = judged_sentences(summary.about)
    for title, sentences in sections.items():
        if sentences:
            parts += ["", Table("", (), (), sentences, heading=title)]
    if judged is not None:
        parts += ["", judged]
    return Group(*parts)


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
