"""ProbeSettings: the checked options of a probe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from acutance.capture.find_layers import Chosen
from acutance.rowstats import METRICS, metric
from acutance.rowstats.metrics import metric_names
from acutance.shapes import check_count, check_flag
from acutance.structure import STRUCTURE
from acutance.summary.readouts.examples import MOST_ROWS

#: First token and one past the last; None is the end of the sequence.
Range: TypeAlias = tuple[int, "int | None"]
#: One range for all sequences, one for each, or a boolean (B, S).
Span: TypeAlias = "Range | Sequence[Range] | Tensor"
#: Which rows: one, several, or a slice with an end.
MapRows: TypeAlias = "int | Sequence[int] | slice"


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """The options of :func:`acutance.probe`, under the same names.

    ``noise``, ``gaps`` and ``structure`` are set to True if a requested metric or example needs
    them.

    Raises:
        TypeError: if an option has the wrong type.
        ValueError: if a metric does not exist, or a number is too small.

    Example:
        >>> settings = ProbeSettings(metrics=["noise_gain"], max_rows=64)
        >>> settings.recorded, settings.noise
        (('noise_gain',), True)
    """

    metrics: Sequence[str] | None = None
    verify: bool | Literal["first"] = "first"
    noise: bool = False
    gaps: bool = False
    keep: bool = False
    every: int = 1
    layers: Chosen | None = None
    heads: Chosen | None = None
    max_rows: int | None = None
    seed: int = 0
    provide: bool = False
    structure: bool = False
    tokenizer: Any = None
    special: Iterable[int] | None = None
    examples: int = 0
    profile: bool = True
    spans: Mapping[str, Span] | None = None
    maps: Mapping[Any, MapRows] | None = None
    attention_mask: Tensor | None = None
    rows: Tensor | str = "real"

    def __post_init__(self) -> None:
        if self.verify not in (True, False, "first"):
            raise ValueError(f'verify must be True, False or "first", got {self.verify!r}')
        if isinstance(self.metrics, str):
            raise TypeError(f"metrics must be a sequence of names, got the string {self.metrics!r}")
        check_flag("gaps", self.gaps)
        check_flag("profile", self.profile)
        if type(self.examples) is not int:
            raise TypeError(f"examples must be a whole number, got {self.examples!r}")
        if not 0 <= self.examples <= MOST_ROWS:
            raise ValueError(
                f"examples must be 0 to {MOST_ROWS} rows of each head, got {self.examples}"
            )
        check_count("every", self.every, 1)
        check_count("seed", self.seed, 0)
        if self.max_rows is not None:
            check_count("max_rows", self.max_rows, 2)
        if self.metrics is not None:
            entries = [metric(name) for name in self.metrics]
            if not entries:
                raise ValueError("metrics must name at least one metric, got none")
            self._imply("noise", any(entry.needs_values for entry in entries))
            self._imply("gaps", any(entry.needs_gaps for entry in entries))
        self._imply("structure", bool(self.examples))

    def _imply(self, name: str, needed: bool) -> None:
        """Set the option ``name`` to True if ``needed``, even if the user set it to False."""
        object.__setattr__(self, name, needed or getattr(self, name))

    @property
    def recorded(self) -> tuple[str, ...]:
        """Names of the metrics to record, in the order of :data:`acutance.METRICS`."""
        names = self.metrics
        requested = set(metric_names(noise=self.noise, gaps=self.gaps) if names is None else names)
        if self.structure:
            requested |= {"first_weight", *STRUCTURE}  # the weight on the first token
        return tuple(filter(requested.__contains__, (*METRICS, *STRUCTURE)))
