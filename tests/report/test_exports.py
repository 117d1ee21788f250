"""Files of a summary: each holds what the others do."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest

from acutance.cli.options import SummaryOptions
from acutance.probing import HeadSummary
from acutance.report.exports import csv_bytes

Make = Callable[..., HeadSummary]


def test_csv_parquet_and_json_hold_the_same(summary_of: Make, tmp_path: Path) -> None:
    wild = 'a,"b"\n=1+1\u00e9'
    summary = summary_of((2, 1), layer={1: {"module": wild}}, entropy={(0, 1): math.nan})
    targets = {name: tmp_path / f"o.{name}" for name in ("csv", "parquet", "json", "report")}
    SummaryOptions(**targets).write_summary(summary, lambda: "")
    lines = list(csv.DictReader(io.StringIO((tmp_path / "o.csv").read_text("utf-8"), newline="")))
    table = pyarrow.parquet.read_table(tmp_path / "o.parquet")
    record = json.loads((tmp_path / "o.json").read_text("utf-8"))
    assert len(lines) == table.num_rows == len(record["heads"]) == 3
    assert list(lines[0]) == table.column_names
    assert lines[2]["module"] == wild.replace("\n", r"\n")  # control characters are shown
    assert record["layers"][1]["module"] == wild
    assert lines[1]["entropy_mean"] == ""
    assert record["heads"][1]["metrics"]["entropy"]["mean"] is None
    for line, mean, head in zip(
        lines, table.column("lse_mean").to_pylist(), record["heads"], strict=True
    ):
        assert float(line["lse_mean"]) == mean == head["metrics"]["lse"]["mean"]
    assert (tmp_path / "o.report").read_text("utf-8").lstrip().lower().startswith("<!doctype html")


def test_standard_output_takes_the_table_of_one(
    summary_of: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, written = summary_of((2,)), {}
    for name in ("csv", "json"):
        options = SummaryOptions(**{name: Path("-")})
        options.write_summary(summary, lambda: "")
        written[name] = capsys.readouterr().out
    assert len(list(csv.reader(io.StringIO(written["csv"])))) == 3
    assert len(json.loads(written["json"])["heads"]) == 2


def test_numbers_of_a_csv_are_whole(summary_of: Make) -> None:
    summary = summary_of((1,), entropy={(0, 0): 1 / 3})
    rows = list(csv.DictReader(io.StringIO(csv_bytes(summary.to_arrow()).decode())))
    assert float(rows[0]["entropy_mean"]) == float(summary.mean("entropy")[0])
