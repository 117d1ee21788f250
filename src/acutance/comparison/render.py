"""The terminal view of a comparison: a table and sentences."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.text import Text

from acutance.comparison.record import COMPARED, Comparison, Reading, Result
from acutance.escapes import printable
from acutance.mechanisms import MECHANISMS
from acutance.report.screen import NumberTable

__all__ = ["WIDE", "heading", "legend", "sentences", "table"]

#: What each mechanism's sentence answers.
QUESTION = "Can it concentrate on few keys as n grows?"
#: Columns from which every quantity fits.
WIDE = 118
_FAR = 4.0  # standard errors, or per cent of a formula for many keys, that stand out


def table(comparison: Comparison) -> ConsoleRenderable:
    """A rich renderable: every mechanism at every length.

    Example:
        >>> from acutance.comparison import compare
        >>> found = compare("decay", n=[64, 256], d=16, heads=2, costs=False)
        >>> Console(width=80, no_color=True).print(table(found))
        Gaussian queries and keys, width 16; 32 rows, 2 heads
        <BLANKLINE>
        mechanism    n  entropy  sparsity  eff. keys  theory  off by  grad
        decay       64     3.23     0.580       18.9    18.9   exact     0
                   256     3.25     0.277       19.0    19.0   exact     0
    """
    return _Table(comparison)


class _Table:
    """The renderable of :func:`table`; its columns depend on the width of the console."""

    def __init__(self, comparison: Comparison) -> None:
        self.found = comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ascii_only, comparison = options.ascii_only, self.found
        wide = options.max_width >= WIDE
        costs = any(not math.isnan(result.seconds) for result in comparison.results)

        def shown(text: str) -> str:
            return printable(text, ascii_only)

        yield Text(shown(heading(comparison)), style="bold")
        yield Text()
        gap = 2 if wide or not costs else 1
        body = NumberTable(
            keys=2, box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim"
        )
        body.add_column("mechanism", no_wrap=True)
        names = ["n", "entropy"]
        names += ["theory", "sparsity", "theory"] if wide else ["sparsity"]
        names += ["eff. keys", "theory", "off by"]
        names += ["noise", "tr J"] if wide else []
        names += ["grad"]
        names += ["s"] if costs else []
        for name in names:
            body.add_column(name, justify="right", no_wrap=True)
        last = ""
        for result in comparison.results:
            cells = [f"{result.n}", _short(result["entropy"].measured)]
            if wide:
                cells += [_short(result["entropy"].predicted)]
            cells += [_short(result["sparsity"].measured)]
            if wide:
                cells += [_short(result["sparsity"].predicted)]
            keys = result["effective_keys"]
            cells += [_short(keys.measured), _short(keys.predicted)]
            line: list[Any] = [*map(shown, cells), _distance(keys, shown)]
            if wide:
                line += [shown(_short(result[name].measured)) for name in
                         ("noise_gain", "jacobian_trace")]  # fmt: skip
            line.append(shown(_short(result["query_gradient"].measured)))
            if costs:
                line.append(shown(_short(result.seconds)))
            body.add_row("" if result.mechanism == last else result.mechanism, *line)
            last = result.mechanism
        yield body


def heading(comparison: Comparison) -> str:
    """A line that describes the inputs of the comparison."""
    settings = comparison.settings
    heads = settings["heads"]
    rows = f"{settings['samples'] * heads * settings['batch']:,} rows, {heads} heads"
    causal = ", causal" if settings["is_causal"] else ""
    if settings["query_mean"] is None:
        return f"Queries and keys of a model, width {settings['d']}; {rows}{causal}"
    means = settings["query_mean"], settings["key_mean"]
    stds = settings["query_std"], settings["key_std"]
    more = ""
    if any(means):
        more += f", mean {means[0]:g}" + (f" and {means[1]:g}" if means[0] != means[1] else "")
    if stds != (1.0, 1.0):
        more += (f", standard deviation {stds[0]:g}") + (
            f" and {stds[1]:g}" if stds[0] != stds[1] else ""
        )
    return f"Gaussian queries and keys, width {settings['d']}{more}; {rows}{causal}"


def sentences(comparison: Comparison) -> list[str]:
    """The largest deviation from theory, then one sentence for each mechanism.

    Example:
        >>> from acutance.comparison import compare
        >>> found = compare(["identity", "l1"], n=64, d=16, heads=4, costs=False)
        >>> print(sentences(found)[-1][:72])
        identity, l1: No: for Gaussian keys its sparsity is never below √(2/π) =
    """
    mechanisms: dict[str, list[str]] = {}
    for name in comparison.mechanisms:
        mechanisms.setdefault(MECHANISMS[name].can_concentrate, []).append(name)
    lines = [f"{', '.join(names)}: {sentence}" for sentence, names in mechanisms.items()]
    return [line for line in (_agreement(comparison), _missing(comparison), *lines) if line]


def _agreement(comparison: Comparison) -> str:
    """A sentence on the largest distance between theory and measurement, in standard errors."""
    judged: list[tuple[float, Result, str]] = [
        (abs(reading.z), result, name)
        for result in comparison.results
        for name, reading in result.readings.items()
        if not math.isnan(reading.z)
    ]
    if not judged:
        return ""
    most, result, name = max(judged, key=lambda each: each[0])
    return (
        f"Of {len(judged)} exact expectations, the one that differs most from the measurement "
        f"is {most:.1f} standard errors away: {name.replace('_', ' ')} of {result.mechanism} "
        f"at n = {result.n}."
    )


def _missing(comparison: Comparison) -> str:
    """A sentence on the mechanisms without a prediction."""
    names = [
        name
        for name in comparison.mechanisms
        if all(math.isnan(result["effective_keys"].predicted) for result in comparison.of(name))
    ]
    return f"Without a prediction: {', '.join(names)}." if names else ""


def _distance(reading: Reading, encode: Any) -> Text:
    """Distance between measurement and prediction, in standard errors or per cent."""
    if math.isnan(reading.predicted) or math.isnan(reading.measured):
        return Text(encode("–"))
    if not math.isnan(reading.z):
        away, text = reading.z, f"{round(reading.z, 1) + 0.0:+.1f} se"
    elif reading.kind == "fixed" and abs(reading.deviation) < 1e-4:
        return Text("exact")
    else:
        away = 100 * reading.deviation
        text = f"{away:+.0f} %" if abs(away) >= 9.95 else f"{round(away, 1) + 0.0:+.1f} %"
    return Text(encode(text.replace("-", "−")), "bold" if abs(away) > _FAR else "")


def _short(value: float) -> str:
    """Format with three significant digits; "–" for NaN."""
    if math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:.0f}"
    if size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-").replace("-", "−")
    places = 2 - math.floor(math.log10(float(f"{size:.2e}")))
    return f"{value:.{max(0, places)}f}".replace("-", "−")


def legend(comparison: Comparison, wide: bool) -> list[str]:
    """A sentence for each column."""
    lines = ["grad: " + COMPARED["query_gradient"].meaning + "."]
    if wide:
        lines.append("noise: " + COMPARED["noise_gain"].meaning)
        lines.append("tr J: " + COMPARED["jacobian_trace"].meaning)
    if any(not math.isnan(result.seconds) for result in comparison.results):
        threads = comparison.settings["threads"]
        lines.append(
            "s: time of one head with n rows, including statistics, on "
            f"{threads} thread{'s' * (threads != 1)}."
        )
    return lines
