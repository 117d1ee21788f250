"""What ``acutance predict`` and ``acutance temperature`` do once their options are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from acutance import theory
from acutance.files import write_text
from acutance.report.console import printable
from acutance.report.predicted import prediction_record, prediction_table
from acutance.report.tables import NumberTable
from acutance.report.temperature import Advice, advise


def predicted_row(mechanism: str, n: int, options: dict[str, Any]) -> theory.Prediction:
    """The prediction that the options ask for; ``q`` and ``mu`` are numbers between commas.

    Raises:
        ValueError: for whatever :func:`acutance.theory.predict` refuses.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("q", "mu"):
        if name in given:
            given[name] = _vector(name, given[name])
    return theory.predict(mechanism, n, **given)


def show_prediction(
    prediction: theory.Prediction,
    *,
    sample: int = 0,
    json_to: Path | None = None,
    plot_to: Path | None = None,
    dark: bool = False,
) -> None:
    """Print a prediction, with measured rows beside it if asked for, and write its files.

    Raises:
        ImportError: if a plot is wanted without matplotlib.
        OSError: if a file cannot be written.
        ValueError: if the mechanism has no plot, or its rows cannot be drawn.
    """
    found = None
    if sample:
        from acutance.report.sampled import sample as measure

        found = measure(prediction, sample)
    record = prediction_record(prediction)
    if found is not None:
        record["measured"] = {
            "rows": sample,
            "metrics": {
                name: {"mean": mean, "error": error} for name, (mean, error) in found.items()
            },
        }
    if not _write_json(record, json_to):
        console = Console()
        console.print(prediction_table(prediction, found))
        _print_sentences(console, "What it means", record["remarks"])
    if plot_to is not None:
        from acutance.report.predicted_figures import draw_prediction
        from acutance.report.style import DARK, LIGHT

        draw_prediction(prediction, plot_to, theme=DARK if dark else LIGHT)
    _say_written(json=json_to, figure=plot_to)


def advice_for(n: int, fraction: float, d: float | None, negatives: str | None) -> Advice:
    """The advice that the options ask for.

    Raises:
        ValueError: for whatever :func:`acutance.report.temperature.advise` refuses.
    """
    return advise(n, fraction, d, negatives)


def show_advice(
    advice: Advice,
    *,
    json_to: Path | None = None,
    plot_to: Path | None = None,
    dark: bool = False,
) -> None:
    """Print a recommended temperature with its reasons, and write its files.

    Raises:
        ImportError: if a plot is wanted without matplotlib.
        OSError: if a file cannot be written.
    """
    if not _write_json(advice.to_dict(), json_to):
        console = Console()
        ascii_only = console.options.ascii_only
        title = f"τ = {advice.tau:.4g} for {100 * advice.fraction:.6g} % of log {advice.n:,}"
        console.print(Text(printable(title, ascii_only), style="bold"))
        console.print()
        table = NumberTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("arrangement of keys")
        for name in ("τ", "scale"):
            table.add_column(printable(name, ascii_only), justify="right", no_wrap=True)
        table.add_column("needs")
        for setting in advice.settings:
            mark = "" if setting.feasible else " (not met)"
            style = "bold" if setting is advice.chosen else ""
            cells = (setting.name, f"{setting.tau:.4g}", f"{1 / setting.tau:.4g}")
            line = [printable(cell, ascii_only) for cell in (*cells, setting.needs + mark)]
            table.add_row(*line, style=style)
        console.print(table)
        _print_sentences(console, "Why", advice.sentences)
    if plot_to is not None:
        from acutance.report.predicted_figures import draw_temperatures
        from acutance.report.style import DARK, LIGHT

        draw_temperatures(advice, plot_to, theme=DARK if dark else LIGHT)
    _say_written(json=json_to, figure=plot_to)


def _print_sentences(console: Console, title: str, sentences: Iterable[str]) -> None:
    console.print(f"\n{title}", style="bold")
    ascii_only = console.options.ascii_only
    for sentence in sentences:
        text = Text(printable(f"• {sentence}", ascii_only))
        console.print(Padding(text, (0, 0, 0, 1)))


def _write_json(record: dict[str, Any], path: Path | None) -> bool:
    """Write the record if asked to; True where it went to standard output, instead of a table."""
    if path is None:
        return False
    text = json.dumps(record, allow_nan=False, ensure_ascii=False, indent=1) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return True
    write_text(path, text)
    return False


def _say_written(**paths: Path | None) -> None:
    console = Console(stderr=True)
    for name, path in paths.items():
        if path is not None and str(path) != "-":
            console.print(f"[dim]{name} written to[/] {path}", highlight=False)


def _vector(name: str, text: str) -> float | list[float]:
    """Numbers between commas; one number alone stays a number, but for ``q``."""
    try:
        values = [float(part) for part in str(text).split(",")]
    except ValueError:
        raise ValueError(f"{name}: numbers between commas, such as 1,2,0.5, got {text!r}") from None
    return values if len(values) > 1 or name == "q" else values[0]
