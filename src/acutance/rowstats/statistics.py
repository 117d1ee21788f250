"""Row metrics as attributes that are computed when read: NamedMetrics, RowStatistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from acutance.rowstats import coverage
from acutance.rowstats.metrics import METRICS, metric, metric_names
from acutance.rowstats.state import RowState, has_gaps, has_noise, merge, unplaced


def _read(name: str) -> property:
    """A property that computes the metric of this name."""
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
    first_gap = _read("first_gap")
    rest_logit_std = _read("rest_logit_std")
    rest_jensen_gap = _read("rest_jensen_gap")
    jacobian_trace = _read("jacobian_trace")
    noise_gain = _read("noise_gain")
    keys_50 = _read("keys_50")
    keys_90 = _read("keys_90")
    keys_95 = _read("keys_95")
    keys_99 = _read("keys_99")

    @abstractmethod
    def __getitem__(self, name: str) -> Tensor:
        """The metric of a name, for each row."""

    @property
    @abstractmethod
    def available(self) -> tuple[str, ...]:
        """Names of the metrics defined for this result, in the order of METRICS."""

    def __repr__(self) -> str:
        return (
            f"statistics of rows {tuple(self['n_keys'].shape)}: {len(self.available)} metrics as "
            "attributes (effective_keys, ...), all of them in as_dict()"
        )

    def __dir__(self) -> list[str]:
        """Attribute names without the metrics that these rows lack."""
        missing = METRICS.keys() - set(self.available)
        return [name for name in super().__dir__() if name not in missing]

    def as_dict(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """All available metrics by name, or the named ones; faster than reading them one by one.

        Raises:
            ValueError: if there is no metric of a given name.
        """
        return {name: self[name] for name in (self.available if names is None else names)}


@dataclass(frozen=True, repr=False)
class RowStatistics(NamedMetrics):
    """Every metric of :data:`~acutance.rowstats.METRICS` for each row, as attributes.

    A metric is computed from :attr:`state` when read, so unread ones cost nothing; gradients pass
    through.

    Attributes:
        state: the mergeable sums; each field has one entry per row, (B, Hq, L) for attention.
        backend: name of the kernel that computed them; None if no kernel did.

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
    backend: str | None = None

    def __getitem__(self, name: str) -> Tensor:
        return metric(name).compute(self.state)

    @property
    def available(self) -> tuple[str, ...]:
        """Names of the metrics that are defined for this result, in the table's order."""
        return metric_names(noise=has_noise(self.state), gaps=has_gaps(self.state))

    def keys_holding(self, share: float) -> Tensor:
        """Smallest number of keys that hold a share of each row's weight, (B, Hq, L).

        Needs ``gaps=True``.

        Raises:
            ValueError: if the share is not above 0 and at most 1, or the call had no ``gaps=True``.

        Example:
            >>> import torch, acutance
            >>> query = torch.zeros(1, 1, 3, 8)
            >>> acutance.row_statistics(query, query, gaps=True).keys_holding(0.6)
            tensor([[[2., 2., 2.]]])
        """
        return coverage.keys_holding(self.state, share)

    def mass_of_largest(self, keys: int) -> Tensor:
        """Share of each row's weight on its ``keys`` largest keys, (B, Hq, L); needs ``gaps=True``.

        Raises:
            ValueError: if ``keys`` is below 1, or the call had no ``gaps=True``.
        """
        return coverage.mass_of_largest(self.state, keys)

    def mass_below(self, gap: float) -> Tensor:
        """Share of each row's weight on keys far below its maximum; needs ``gaps=True``.

        Args:
            gap: how many nats below the maximum; dropping the keys beyond it loses this share.

        Raises:
            ValueError: if the gap is negative, or the call had no ``gaps=True``.
        """
        return coverage.mass_below(self.state, gap)

    def mass_bounds(
        self, *, keys: int | None = None, gap: float | None = None
    ) -> coverage.MassBounds:
        """Bounds of :meth:`mass_of_largest` or :meth:`mass_below`; needs ``gaps=True``.

        Args:
            keys: bound the share of this many largest keys.
            gap: bound the share of keys more than this below the maximum, in nats.

        Raises:
            ValueError: unless exactly one valid argument is given, or if the call had no
                ``gaps=True``.
        """
        return coverage.mass_bounds(self.state, keys=keys, gap=gap)

    def critical_ratio(self) -> Tensor:
        """Score scale over the scale from which the largest key dominates; needs ``gaps=True``.

        Raises:
            ValueError: if the call had no ``gaps=True``.
        """
        return coverage.critical_ratio(self.state)

    def merge(self, other: RowStatistics) -> RowStatistics:
        """Statistics of the same rows over both sets of keys (:func:`~acutance.rowstats.merge`).

        The other's keys come after these: ``first_weight`` is that of the first key visible here,
        or of the first one there in rows that see none here.

        Raises:
            TypeError: if ``other`` is not a :class:`RowStatistics`.
        """
        if not isinstance(other, RowStatistics):
            raise TypeError(
                f"RowStatistics can be merged only with RowStatistics, got {type(other).__name__}"
            )
        parts = (
            part._replace(first_index=unplaced(part.first_index))
            for part in (self.state, other.state)
        )
        return RowStatistics(merge(*parts))
