"""A comparison as a table and sentences."""

from __future__ import annotations

import math

from acutance.comparison.record import COMPARED, Comparison, Reading, Result
from acutance.mechanisms import MECHANISMS
from acutance.report.table import Cell, Column, Table, figures

__all__ = ["heading", "sentences", "table"]

#: What each mechanism's sentence answers.
QUESTION = "Can it concentrate on few keys as n grows?"
#: Columns from which every quantity fits.
WIDE = 118
_FAR = 4.0  # standard errors, or per cent of a formula for many keys, that stand out


def table(comparison: Comparison) -> Table:
    """Every mechanism at every length, and a sentence on each mechanism.

    Example:
        >>> from rich.console import Console
        >>> from acutance.comparison import compare
        >>> found = compare("decay", n=[64, 256], d=16, heads=2, costs=False)
        >>> Console(width=80, no_color=True).print(table(found))
        Gaussian queries and keys, width 16; 32 rows, 2 heads
        <BLANKLINE>
        mechanism    n  entropy  sparsity  eff. keys  theory  off by  grad
        decay       64     3.23     0.580       18.9    18.9   exact     0
                   256     3.25     0.277       19.0    19.0   exact     0
        ...
    """
    noise, trace, gradient = (
        COMPARED[name].meaning for name in ("noise_gain", "jacobian_trace", "query_gradient")
    )
    columns = [
        Column("mechanism", "name"),
        Column("n"),
        Column("entropy", format=figures),
        Column("theory", format=figures, from_width=WIDE),
        Column("sparsity", format=figures),
        Column("theory", format=figures, from_width=WIDE),
        Column("eff. keys", format=figures),
        Column("theory", format=figures),
        Column("off by"),
        Column("noise", format=figures, from_width=WIDE, note=f"noise: {noise}"),
        Column("tr J", format=figures, from_width=WIDE, note=f"tr J: {trace}"),
        Column("grad", format=figures, note=f"grad: {gradient}."),
    ]
    costs = any(not math.isnan(result.seconds) for result in comparison.results)
    if costs:
        threads = comparison.settings["threads"]
        note = (
            "s: time of one head with n rows, including statistics, on "
            f"{threads} thread{'s' * (threads != 1)}."
        )
        columns.append(Column("s", format=figures, note=note))
    rows = []
    last = ""
    for result in comparison.results:
        entropy, sparsity = result["entropy"], result["sparsity"]
        keys = result["effective_keys"]
        row = [
            "" if result.mechanism == last else result.mechanism,
            result.n,
            *(entropy.measured, entropy.predicted, sparsity.measured, sparsity.predicted),
            *(keys.measured, keys.predicted, _distance(keys)),
            *(result[name].measured for name in ("noise_gain", "jacobian_trace", "query_gradient")),
        ]
        rows.append(row + [result.seconds] * costs)
        last = result.mechanism
    return Table(
        heading(comparison),
        columns,
        rows,
        sentences(comparison),
        heading=f"What it shows: {QUESTION}",
        keys=2,
    )


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


def _distance(reading: Reading) -> Cell:
    """Distance between measurement and prediction, in standard errors or per cent."""
    if math.isnan(reading.predicted) or math.isnan(reading.measured):
        return Cell("–")
    if not math.isnan(reading.z):
        away, text = reading.z, f"{round(reading.z, 1) + 0.0:+.1f} se"
    elif reading.kind == "fixed" and abs(reading.deviation) < 1e-4:
        return Cell("exact")
    else:
        away = 100 * reading.deviation
        text = f"{away:+.0f} %" if abs(away) >= 9.95 else f"{round(away, 1) + 0.0:+.1f} %"
    return Cell(text.replace("-", "−"), "bold" if abs(away) > _FAR else "")
