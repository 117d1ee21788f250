"""RowStatistics: the finished result, every metric by name, computed when it is read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from acutance.rowstats.metrics import METRICS, metric
from acutance.rowstats.state import RowState, has_noise, merge


def _read(name: str) -> property:
    entry = METRICS[name]
    compute = entry.compute

    def value(self: RowStatistics) -> Tensor:
        return compute(self.state)

    value.__doc__ = f"{entry.meaning}; unit {entry.unit}, range {entry.range}."
    return property(value)


@dataclass(frozen=True)
class RowStatistics:
    """Every metric of :data:`~acutance.rowstats.METRICS` for each row, as attributes.

    A metric is computed from :attr:`state` when it is read, so unread ones cost nothing and each
    carries its gradient.

    Attributes:
        state: the mergeable sums, fields (B, Hq, L).

    Example:
        >>> from acutance.rowstats import observe
        >>> import torch
        >>> stats = RowStatistics(observe(torch.zeros(2, 8)))
        >>> stats.effective_keys
        tensor([8., 8.])
        >>> stats["entropy"].shape
        torch.Size([2])
    """

    state: RowState

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

    def __getitem__(self, name: str) -> Tensor:
        return metric(name).compute(self.state)

    @property
    def available(self) -> tuple[str, ...]:
        """Names of the metrics this result can give, in the table's order."""
        noise = has_noise(self.state)
        return tuple(name for name, entry in METRICS.items() if noise or not entry.needs_values)

    def as_dict(self) -> dict[str, Tensor]:
        """All available metrics by name."""
        return {name: self[name] for name in self.available}

    def merge(self, other: RowStatistics) -> RowStatistics:
        """Statistics of the same rows over both sets of keys (:func:`~acutance.rowstats.merge`)."""
        return RowStatistics(merge(self.state, other.state))
