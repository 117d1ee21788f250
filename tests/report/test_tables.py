"""No table of any command cuts a number, whatever the width of the terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from acutance.calibration.result import Calibration, HeadCalibration
from acutance.cli import app
from acutance.comparison import Comparison, compare
from acutance.probing import HeadSummary, diff
from acutance.report import console_table
from acutance.report.diff_console import diff_view
from acutance.report.table import Column, Table
from acutance.reproduce import EXPERIMENTS
from acutance_lab.command import listing, summary
from acutance_lab.run import run_one
from benchmarks.cpu import render as bench_render
from benchmarks.cpu.records import BenchReport

Make = Callable[..., HeadSummary]
Printer = Callable[[Console], None]
WIDTHS = (40, 60, 80)
NUMBER = re.compile(r"[-+−±≈]?\d[\d.,]*(?:e[-+−]?\d+)?%?")
RECORD = Path(__file__).parents[2] / "docs" / "_static" / "bench.json"


def numbers(print_to: Printer, width: int) -> list[str]:
    file = io.StringIO()
    print_to(Console(file=file, width=width, force_terminal=True, color_system=None))
    text = file.getvalue()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    return [found.rstrip(".,") for found in NUMBER.findall(text)]


def shows(renderable: RenderableType) -> Printer:
    return lambda console: console.print(renderable)


def calibration(heads: int = 12, lengths: tuple[int, ...] = (64, 128, 256, 512)) -> Calibration:
    """Made-up factors of heads."""
    values = tuple(4.16123 + 0.1 * i for i in range(len(lengths)))
    one = [
        HeadCalibration(
            layer=0,
            head=head,
            module="h.0",
            lengths=lengths,
            target=values,
            before=values,
            before_error=(0.0123,) * len(lengths),
            after=values,
            after_error=(1.2e-4,) * len(lengths),
            factors=values,
            factor_errors=(1.3e-3,) * len(lengths),
            status=("held",) * len(lengths),
        )
        for head in range(heads)
    ]
    return Calibration(
        metric="entropy", value=None, reference=lengths[0], lengths=lengths, family="table",
        heads=tuple(one), windows=dict.fromkeys(lengths, 8), passes=3, model=None, skipped={},
    )  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_of_a_diff_are_whole(summary_of: Make, width: int) -> None:
    def shift(by: float) -> HeadSummary:
        places = {(layer, head): 0.3 + by * head for layer in range(3) for head in range(4)}
        return summary_of((4,) * 3, entropy=places, effective_keys={(0, 0): 123456.0})

    found = diff(shift(0.0), shift(1e-7))

    def printed(console: Console) -> None:
        console.print(diff_view(found, ("entropy", "effective_keys"), 20))

    assert set(numbers(printed, width)) <= set(numbers(printed, 200))
    assert len(numbers(printed, width)) >= len(numbers(printed, 99))  # the same columns as at 99


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("heads", [(12,) * 6, (32,) * 30, (64,) * 80, (3, 1, 40)])
def test_the_table_of_heads_keeps_the_mean_of_each_layer(
    summary_of: Make, width: int, heads: tuple[int, ...]
) -> None:
    file = io.StringIO()
    Console(file=file, width=width, no_color=True).print(console_table(summary_of(heads, rows=3)))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if re.match(r" *\d+ .*│", line)]
    means = [line for line in rows if re.search(r"│ +\d\.\d\d$", line.rstrip())]
    assert len(means) == len(heads)
    (header,) = [line for line in lines if line.startswith("layer") and "│" in line]
    assert header.rstrip().endswith("mean")
    ramp = next(line for line in lines if "0.00" in line)
    assert ramp.rstrip().endswith(("diffuse", "diffuse, uniform weights"))


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_of_a_calibration_are_whole(width: int) -> None:
    for heads in (12, 80):  # all of them, and the largest factors
        printed = shows(calibration(heads).table())
        assert set(numbers(printed, width)) == set(numbers(printed, 200))


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(["decay", "cosine", "softmax_one"], n=[64, 256], d=16, heads=2, samples=4)


@pytest.mark.few(2)
@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_of_a_comparison_are_whole(comparison: Comparison, width: int) -> None:
    printed = shows(comparison.table())
    assert set(numbers(printed, width)) <= set(numbers(printed, 200))
    assert len(numbers(printed, width)) >= len(numbers(printed, 100))


@pytest.mark.few(1)
@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_of_a_benchmark_are_whole(width: int) -> None:
    report = BenchReport.from_json(RECORD.read_text(encoding="utf-8"))

    def printed(console: Console) -> None:
        console.print(bench_render.table(report))
        console.print(bench_render.goals(report))

    def decimals(width: int) -> set[str]:  # names of cases may fold, and hold whole numbers
        return {number for number in numbers(printed, width) if "." in number}

    assert decimals(width) == decimals(200)


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_of_verdicts_are_whole(width: int) -> None:
    record = run_one(EXPERIMENTS["simplex"], quick=True)
    printed = shows(summary([record]))
    assert set(numbers(printed, width)) <= set(numbers(shows(summary([record])), 200))
    numbers(shows(listing(EXPERIMENTS.values())), width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "command", ["predict --n 4096 --logit-std 2 --sample 5", "temperature --n 256 --d 32"]
)
def test_numbers_of_a_prediction_are_whole(
    width: int, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(columns: int) -> set[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        text = CliRunner().invoke(app, command.split()).stdout.split("What it means")[0]
        assert "…" not in text
        return set(NUMBER.findall(text.split("\nWhy")[0]))

    assert tokens(width) == tokens(100)


def test_what_does_not_fit_goes_on_below_with_its_keys() -> None:
    def lines(width: int) -> list[str]:
        numbers = [Column(f"column {index}", format=".6f") for index in range(4)]
        row = ("a", *(index + 0.123456 for index in range(4)), "many words that may fold")
        table = Table("", (Column("name", "name"), *numbers, Column("words", "words")), [row])
        file = io.StringIO()
        Console(file=file, width=width).print(table)
        return [line.rstrip() for line in file.getvalue().splitlines()]

    assert len(lines(200)) == 2
    assert len(lines(60)) == 3  # the words fold
    narrow = lines(36)
    assert narrow[0].split() == ["name", "column", "0", "column", "1", "column", "2"]
    assert narrow[3].split() == ["name", "column", "3", "words"]
    words = " ".join(line[14:] for line in narrow[4:])
    assert words.split() == ["many", "words", "that", "may", "fold"]
    assert [line for line in lines(5) if "1.123456" in line.replace(" ", "")] == []
    assert "".join(lines(12)).count("1.123456") == 1
