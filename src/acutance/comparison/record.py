"""The results of a comparison: a record for each mechanism and length, and all together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from acutance.files import as_json, finite
from acutance.mechanisms import MECHANISMS
from acutance.report.table import Cell, Column, Table, figures
from acutance.rowstats import METRICS

#: What each mechanism's sentence answers.
QUESTION = "Can it concentrate on few keys as n grows?"
#: Columns from which every quantity fits.
WIDE = 118
_FAR = 4.0  # standard errors, or per cent of a formula for many keys, that stand out


SCHEMA = "acutance.comparison/1"
#: What is said of a mechanism, beside its theory.
_DESCRIPTION = ("title", "formula", "source", "can_concentrate")


class Quantity(NamedTuple):
    """A compared quantity: its symbol, unit and meaning."""

    symbol: str
    unit: str
    meaning: str


#: What is read of every mechanism, in order.
COMPARED: dict[str, Quantity] = {
    name: Quantity(METRICS[name].symbol, METRICS[name].unit, METRICS[name].meaning)
    for name in ("entropy", "sparsity", "effective_keys", "noise_gain", "jacobian_trace")
}
COMPARED["query_gradient"] = Quantity(
    "g", "1",
    "change of the output with the query, both relative to their size: the median over a head's "
    "rows of ‖∂(o·u)/∂q‖ ‖q‖ / (√d ‖o‖), u normal; about 1 where the output is linear in q",
)  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """One quantity of one mechanism at one length, measured and predicted.

    Attributes:
        measured: mean over rows (``query_gradient``: median); NaN if missing.
        error: its standard error, heads treated as independent; 0 if rows are not random, NaN if
            unknown.
        predicted: the prediction for these rows; NaN if there is none.
        kind: kind of prediction, a key of :data:`acutance.theory.KINDS`; "" without one.
        z: difference of measurement and prediction, row by row, in standard errors; NaN if the
            prediction is not an expectation.
        why: reason for a missing value, as a sentence; "" if there is none.
    """

    measured: float = math.nan
    error: float = math.nan
    predicted: float = math.nan
    kind: str = ""
    z: float = math.nan
    why: str = ""

    @property
    def deviation(self) -> float:
        """Relative deviation of the measured value from the predicted one.

        Example:
            >>> Reading(measured=11.0, predicted=10.0).deviation
            0.1
        """
        if self.predicted == 0.0:
            return math.nan if self.measured else 0.0
        return (self.measured - self.predicted) / abs(self.predicted)


@dataclass(frozen=True)
class Result:
    """One mechanism at one length.

    Attributes:
        mechanism: name in :data:`acutance.MECHANISMS`.
        n: number of keys that a row sees.
        rows: number of measured rows.
        readings: by the names of :data:`COMPARED`.
        seconds: wall time of one head with L = S = n, statistics included; NaN if not measured.
        cpu_seconds: process CPU time of the same.
        parameters: parameters of the prediction, means over rows.
    """

    mechanism: str
    n: int
    rows: int
    readings: Mapping[str, Reading]
    seconds: float = math.nan
    cpu_seconds: float = math.nan
    parameters: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Reading:
        if name not in COMPARED:
            raise ValueError(
                f"there is no quantity named {name!r}: choose from {', '.join(COMPARED)}"
            )
        return self.readings[name]

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values, but for NaN; with each reading's deviation."""
        plain = asdict(self)
        for name, reading in self.readings.items():
            empty = {key: getattr(reading, key) or None for key in ("kind", "why")}
            plain["readings"][name] |= {"deviation": reading.deviation, **empty}
        return plain


@dataclass(frozen=True, repr=False)
class Comparison:
    """The results of all mechanisms at all lengths.

    Attributes:
        results: in the requested order, all lengths of one mechanism together.
        settings: settings of the inputs.
        complete: False if it was interrupted.
    """

    results: tuple[Result, ...]
    settings: Mapping[str, Any]
    complete: bool = True

    def __repr__(self) -> str:
        lengths = ", ".join(map(str, self.lengths))
        return f"<Comparison of {', '.join(self.mechanisms)} at n = {lengths}>"

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Names of the mechanisms, in order."""
        return tuple(dict.fromkeys(result.mechanism for result in self.results))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of keys, ascending."""
        return tuple(sorted({result.n for result in self.results}))

    def __getitem__(self, place: tuple[str, int]) -> Result:
        """The result of a mechanism at a length: ``found["relu2", 256]``.

        Raises:
            KeyError: if there is none.
        """
        for result in self.results:
            if (result.mechanism, result.n) == place:
                return result
        raise KeyError(place)

    def of(self, mechanism: str) -> tuple[Result, ...]:
        """The results of one mechanism, shortest rows first."""
        results = [result for result in self.results if result.mechanism == mechanism]
        return tuple(sorted(results, key=lambda result: result.n))

    def table(self) -> Table:
        """Every mechanism at every length, and a sentence on each mechanism.

        Example:
            >>> from acutance.comparison import compare
            >>> found = compare("decay", n=[64, 256], d=16, heads=2, costs=False)
            >>> print(found.table())
            Gaussian queries and keys, width 16; 32 rows, 2 heads
            <BLANKLINE>
            mechanism    n  entropy  sparsity  eff. keys  theory  off by  grad
            decay       64     3.23     0.580       18.9    18.9   exact     0
                       256     3.25     0.277       19.0    19.0   exact     0
            ...
        """
        rest = {"noise_gain": "noise", "jacobian_trace": "tr J", "query_gradient": "grad"}
        notes = {short: f"{short}: {COMPARED[name].meaning}" for name, short in rest.items()}
        theory = Column("theory", format=figures, from_width=WIDE)
        columns = [
            Column("mechanism", "name"), Column("n"),
            Column("entropy", format=figures), theory,
            Column("sparsity", format=figures), theory,
            Column("eff. keys", format=figures), Column("theory", format=figures),
            Column("off by"),
            Column("noise", format=figures, from_width=WIDE, note=notes["noise"]),
            Column("tr J", format=figures, from_width=WIDE, note=notes["tr J"]),
            Column("grad", format=figures, note=f"{notes['grad']}."),
        ]  # fmt: skip
        costs = any(not math.isnan(result.seconds) for result in self.results)
        if costs:
            threads = self.settings["threads"]
            note = (
                "s: time of one head with n rows, including statistics, on "
                f"{threads} thread{'s' * (threads != 1)}."
            )
            columns.append(Column("s", format=figures, note=note))
        rows = []
        last = ""
        for result in self.results:
            row: list[Any] = ["" if result.mechanism == last else result.mechanism, result.n]
            for name in ("entropy", "sparsity", "effective_keys"):
                row += [result[name].measured, result[name].predicted]
            row += [_distance(result["effective_keys"]), *(result[name].measured for name in rest)]
            rows.append(row + [result.seconds] * costs)
            last = result.mechanism
        question = f"What it shows: {QUESTION}"
        return Table(heading(self), columns, rows, sentences(self), heading=question, keys=2)

    def to_dict(self) -> dict[str, Any]:
        """All results as JSON values; NaN becomes None."""
        return {
            "schema": SCHEMA,
            "complete": self.complete,
            "settings": dict(self.settings),
            "quantities": {name: entry._asdict() for name, entry in COMPARED.items()},
            "mechanisms": {
                name: {key: getattr(MECHANISMS[name], key) for key in _DESCRIPTION}
                | {"theory": MECHANISMS[name].theory.how}
                for name in self.mechanisms
            },
            "results": finite([result.to_dict() for result in self.results]),
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as text."""
        return as_json(self.to_dict(), indent=1, ascii_only=False) + "\n"


def heading(comparison: Comparison) -> str:
    """A line that describes the inputs of the comparison."""
    settings = comparison.settings
    heads = settings["heads"]
    rows = f"{settings['samples'] * heads * settings['batch']:,} rows, {heads} heads"
    rows += ", causal" if settings["is_causal"] else ""
    if settings["query_mean"] is None:
        return f"Queries and keys of a model, width {settings['d']}; {rows}"
    more = ""
    for words, name, plain in (("mean", "mean", 0.0), ("standard deviation", "std", 1.0)):
        query, key = settings[f"query_{name}"], settings[f"key_{name}"]
        if query != plain or key != plain:
            more += f", {words} {query:g}" + (f" and {key:g}" if key != query else "")
    return f"Gaussian queries and keys, width {settings['d']}{more}; {rows}"


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
    lines = [_agreement(comparison)]
    predicted = {
        result.mechanism
        for result in comparison.results
        if not math.isnan(result["effective_keys"].predicted)
    }
    if missing := [name for name in comparison.mechanisms if name not in predicted]:
        lines.append(f"Without a prediction: {', '.join(missing)}.")
    lines += [f"{', '.join(names)}: {sentence}" for sentence, names in mechanisms.items()]
    return [line for line in lines if line]


def _agreement(comparison: Comparison) -> str:
    """A sentence on the largest distance between theory and measurement, in standard errors."""
    exact = [
        (abs(reading.z), f"{name.replace('_', ' ')} of {result.mechanism} at n = {result.n}")
        for result in comparison.results
        for name, reading in result.readings.items()
        if not math.isnan(reading.z)
    ]
    if not exact:
        return ""
    most, what = max(exact, key=lambda pair: pair[0])
    return (
        f"Of {len(exact)} exact expectations, the one that differs most from the measurement "
        f"is {most:.1f} standard errors away: {what}."
    )


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
