"""Export a summary: CSV, Parquet, JSON, HTML page or figure."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from acutance.diagnose.recommendations import recommendations
from acutance.escapes import in_spreadsheet
from acutance.files import as_json, put_text, write_bytes
from acutance.summary.head_summary import HeadSummary

__all__ = ["STANDARD_OUTPUT", "Targets", "csv_bytes", "put_csv", "exports", "put_json"]

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
) -> dict[str, Callable[[Path], object]]:
    """Functions that write each export file, by the name of its option.

    Args:
        summary: any head summary.
        chart: name of the figure, from :data:`acutance.report.charts.CHARTS`.
        metric: metric of the figure; None for the figure's default.
        dark: use a dark background in the figure.
        key_norms: result of :meth:`acutance.probing.QueryKeySample.key_norms`, for the JSON and the
            page.
    """

    def json_to(path: Path) -> None:
        advice = [each.to_dict() for each in recommendations(summary)]
        more = {} if key_norms is None else {"key_norms": dict(key_norms)}
        put_json({**summary.to_dict(), "recommendations": advice, **more}, path)

    def page_to(path: Path) -> None:
        from acutance.report.html_page.write import write_html

        write_html(summary, path, key_norms)

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
