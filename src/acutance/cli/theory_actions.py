"""What ``acutance predict`` and ``acutance temperature`` do once their options are read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from acutance import theory
from acutance.escapes import printable
from acutance.files import as_json, write_each, write_text
from acutance.report.prediction_table import prediction_record, prediction_table
from acutance.report.screen import NumberTable, Screen, note
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
        from acutance.cli.predict_measured import sample as measure

        found = measure(prediction, sample)
    record = prediction_record(prediction)
    if found is not None:
        record["measured"] = {
            "rows": sample,
            "metrics": {
                name: {"mean": mean, "error": error} for name, (mean, error) in found.items()
            },
        }

    def table(console: Console) -> None:
        console.print(prediction_table(prediction, found))
        _print_sentences(console, "What it means", record["remarks"])

    def plot(path: Path) -> None:
        from acutance.report.plot_style import DARK, LIGHT
        from acutance.report.prediction_figures import draw_prediction

        draw_prediction(prediction, path, theme=DARK if dark else LIGHT)

    _write(record, table, plot, json_to, plot_to)


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

    def table(console: Console) -> None:
        ascii_only = console.options.ascii_only
        title = f"τ = {advice.tau:.4g} for {100 * advice.fraction:.6g} % of log {advice.n:,}"
        console.print(Text(printable(title, ascii_only), style="bold"))
        console.print()
        rows = NumberTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        rows.add_column("arrangement of keys")
        for name in ("τ", "scale"):
            rows.add_column(printable(name, ascii_only), justify="right", no_wrap=True)
        rows.add_column("needs")
        for setting in advice.settings:
            mark = "" if setting.feasible else " (not met)"
            style = "bold" if setting is advice.chosen else ""
            cells = (setting.name, f"{setting.tau:.4g}", f"{1 / setting.tau:.4g}")
            line = [printable(cell, ascii_only) for cell in (*cells, setting.needs + mark)]
            rows.add_row(*line, style=style)
        console.print(rows)
        _print_sentences(console, "Why", advice.sentences)

    def plot(path: Path) -> None:
        from acutance.report.plot_style import DARK, LIGHT
        from acutance.report.prediction_figures import draw_temperatures

        draw_temperatures(advice, path, theme=DARK if dark else LIGHT)

    _write(advice.to_dict(), table, plot, json_to, plot_to)


def _print_sentences(console: Console, title: str, sentences: Iterable[str]) -> None:
    console.print(f"\n{title}", style="bold")
    ascii_only = console.options.ascii_only
    for sentence in sentences:
        text = Text(printable(f"• {sentence}", ascii_only))
        console.print(Padding(text, (0, 0, 0, 1)))


def _write(
    record: dict[str, Any],
    table: Callable[[Console], object],
    plot: Callable[[Path], object],
    json_to: Path | None,
    plot_to: Path | None,
) -> None:
    """Print the table, or the record in its place, and write the files that were asked for."""
    steps: dict[str, Callable[[], object]] = {}
    if str(json_to) == "-":
        steps[""] = lambda: sys.stdout.write(_json(record))
    else:
        steps[""] = lambda: table(Screen())
        if json_to is not None:
            steps["json"] = lambda: write_text(json_to, _json(record))
    if plot_to is not None:
        steps["figure"] = lambda: plot(plot_to)
    paths = {"json": json_to, "figure": plot_to}

    def written(name: str) -> None:
        if name:
            Screen(stderr=True).print(note((f"{name} written to", "dim"), f" {paths[name]}"))

    write_each(steps, written)


def _json(record: dict[str, Any]) -> str:
    return as_json(record, indent=1, ascii_only=False) + "\n"


def _vector(name: str, text: str) -> float | list[float]:
    """Numbers between commas; one number alone stays a number, but for ``q``."""
    try:
        values = [float(part) for part in str(text).split(",")]
    except ValueError:
        raise ValueError(f"{name}: numbers between commas, such as 1,2,0.5, got {text!r}") from None
    return values if len(values) > 1 or name == "q" else values[0]
