"""The record of a prediction: one field for each metric, with subtraction to compare records.

Theory imports nothing of what measures, so the names stand here once more; a test holds them to
``acutance.METRICS``, name by name and in order.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

__all__ = ["KINDS", "MetricRecord", "Prediction"]

Kind = Literal["fixed", "mean", "plug-in"]

#: What kind of number a predicted metric is.
KINDS: dict[Kind, str] = {
    "fixed": "the same for every row",
    "mean": "the expectation of the metric over rows, exact at this n",
    "plug-in": "the metric's formula at expected values; it is not the expectation of the metric",
}


@dataclass(frozen=True)
class MetricRecord:
    """A number, tensor or array for each metric of ``acutance.METRICS``; NaN where there is none.

    Subtraction works metric by metric, on either side, with another record, with ``RowStatistics``
    (the result has a tensor with one value per row), with a ``HeadSummary`` (its means, one per
    head), or with a mapping from names to values.

    Example:
        >>> MetricRecord(entropy=2.0) - {"entropy": 1.5, "lse": 3.0}
        MetricRecord(entropy=0.5)
    """

    n_keys: Any = math.nan
    entropy: Any = math.nan
    normalized_entropy: Any = math.nan
    information: Any = math.nan
    effective_keys: Any = math.nan
    sparsity: Any = math.nan
    collision: Any = math.nan
    top_weight: Any = math.nan
    first_weight: Any = math.nan
    sink_mass: Any = math.nan
    max_logit: Any = math.nan
    lse: Any = math.nan
    logit_mean: Any = math.nan
    logit_std: Any = math.nan
    varentropy: Any = math.nan
    entropy_slope: Any = math.nan
    mean_field_entropy: Any = math.nan
    jensen_gap: Any = math.nan
    max_gap: Any = math.nan
    gaussian_entropy: Any = math.nan
    first_gap: Any = math.nan
    rest_logit_std: Any = math.nan
    rest_jensen_gap: Any = math.nan
    jacobian_trace: Any = math.nan
    noise_gain: Any = math.nan

    def __getitem__(self, name: str) -> Any:
        if name not in NAMES:
            raise ValueError(f"there is no metric named {name!r}: choose from {', '.join(NAMES)}")
        return getattr(self, name)

    def as_dict(self) -> dict[str, Any]:
        """Every metric by name, NaN included."""
        return {name: getattr(self, name) for name in NAMES}

    def __sub__(self, other: Any) -> "MetricRecord":
        theirs = _values(other)
        return NotImplemented if theirs is None else _difference(self.as_dict(), theirs)

    def __rsub__(self, other: Any) -> "MetricRecord":
        theirs = _values(other)
        return NotImplemented if theirs is None else _difference(theirs, self.as_dict())

    def __repr__(self) -> str:
        known = [f"{name}={value!r}" for name, value in self.as_dict().items() if not _nan(value)]
        return f"MetricRecord({', '.join(known)})"


NAMES: tuple[str, ...] = tuple(entry.name for entry in fields(MetricRecord))


@dataclass(frozen=True, repr=False)
class Prediction(MetricRecord):
    """Expected metrics of an attention row, with the kind of each number.

    Attributes:
        mechanism: name of the mechanism.
        parameters: what was given, with defaults filled in.
        kinds: for each metric that has a value, a key of ``KINDS`` that says how it was computed.
        why: for each metric without a value, the reason in a sentence.
        population: the values for infinitely many keys; NaN where there is no formula.
    """

    mechanism: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    population: MetricRecord = field(default_factory=MetricRecord)

    def __repr__(self) -> str:
        known = [f"{name}={getattr(self, name):.6g}" for name in self.kinds]
        return f"Prediction({self.mechanism!r}: {', '.join(known)})"


def _difference(left: dict[str, Any], right: dict[str, Any]) -> MetricRecord:
    return MetricRecord(**{name: left[name] - right[name] for name in NAMES})


def _values(other: Any) -> dict[str, Any] | None:
    """Metrics of a record, statistics, summary or mapping, NaN if missing; None for other types."""
    if isinstance(other, MetricRecord):
        return other.as_dict()
    if isinstance(other, Mapping):
        return {name: other.get(name, math.nan) for name in NAMES}
    if hasattr(other, "metrics") and hasattr(other, "mean"):  # a summary over rows
        return {n: other.mean(n) if n in other.metrics else math.nan for n in NAMES}
    if hasattr(other, "available"):  # statistics of rows
        return {n: getattr(other, n) if n in other.available else math.nan for n in NAMES}
    return None


def _nan(value: Any) -> bool:
    """Whether a value is NaN."""
    return isinstance(value, float) and math.isnan(value)


def wanted_names(metrics: Iterable[str] | None) -> set[str]:
    """The requested metric names, all if None; raises for an unknown one."""
    if metrics is None:
        return set(NAMES)
    if isinstance(metrics, str):
        raise ValueError(f"metrics: must be a list or tuple of names, got {metrics!r}")
    requested = set(metrics)
    if unknown := requested - set(NAMES):
        raise ValueError(f"metrics: there is no metric named {min(unknown)!r}")
    return requested
