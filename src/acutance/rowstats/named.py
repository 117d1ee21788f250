"""Every metric as an attribute, for any record that gives metrics by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor

from acutance.rowstats.metrics import METRICS

__all__ = ["NamedMetrics"]


def _read(name: str) -> property:
    entry = METRICS[name]

    def value(self: NamedMetrics) -> Tensor:
        return self[name]

    value.__doc__ = f"{entry.meaning}; unit {entry.unit}, range {entry.range}."
    return property(value)


class NamedMetrics(ABC):
    """The metrics of :data:`~acutance.rowstats.METRICS` as attributes, computed when read."""

    n_keys = _read("n_keys")
    entropy = _read("entropy")
    normalized_entropy = _read("normalized_entropy")
    information = _read("information")
    effective_keys = _read("effective_keys")
    sparsity = _read("sparsity")
    collision = _read("collision")
    top_weight = _read("top_weight")
    first_weight = _read("first_weight")
    sink_mass = _read("sink_mass")
    max_logit = _read("max_logit")
    lse = _read("lse")
    logit_mean = _read("logit_mean")
    logit_std = _read("logit_std")
    varentropy = _read("varentropy")
    entropy_slope = _read("entropy_slope")
    mean_field_entropy = _read("mean_field_entropy")
    jensen_gap = _read("jensen_gap")
    max_gap = _read("max_gap")
    gaussian_entropy = _read("gaussian_entropy")
    jacobian_trace = _read("jacobian_trace")
    noise_gain = _read("noise_gain")

    @abstractmethod
    def __getitem__(self, name: str) -> Tensor:
        """The metric of a name, for each row."""

    @property
    @abstractmethod
    def available(self) -> tuple[str, ...]:
        """Names of the metrics this result can give, in the table's order."""

    def __repr__(self) -> str:
        return (
            f"statistics of rows {tuple(self['n_keys'].shape)}: {len(self.available)} metrics as "
            "attributes (effective_keys, ...), all of them in as_dict()"
        )

    def __dir__(self) -> list[str]:
        """Without the metrics that these rows do not have."""
        missing = METRICS.keys() - set(self.available)
        return [name for name in super().__dir__() if name not in missing]

    def as_dict(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """All available metrics by name, or those named; faster than one after the other.

        Raises:
            ValueError: if a name is no metric's.
        """
        return {name: self[name] for name in (self.available if names is None else names)}
