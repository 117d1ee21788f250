"""RowStatistics: the finished result, every metric by name, computed when it is read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from acutance.rowstats.metrics import METRICS, metric
from acutance.rowstats.named import NamedMetrics
from acutance.rowstats.state import RowState, has_noise, merge, unplaced


@dataclass(frozen=True, repr=False)
class RowStatistics(NamedMetrics):
    """Every metric of :data:`~acutance.rowstats.METRICS` for each row, as attributes.

    A metric is computed from :attr:`state` when it is read, so unread ones cost nothing and each
    carries its gradient.

    Attributes:
        state: the mergeable sums, fields (B, Hq, L).
        backend: name of the kernel that summed them; None where none did.

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
        """Names of the metrics this result can give, in the table's order."""
        noise = has_noise(self.state)
        return tuple(name for name, entry in METRICS.items() if noise or not entry.needs_values)

    def merge(self, other: RowStatistics) -> RowStatistics:
        """Statistics of the same rows over both sets of keys (:func:`~acutance.rowstats.merge`).

        The other's keys come after these: ``first_weight`` is that of the first key visible here,
        and only where a row has none here, of the first one there.

        Raises:
            TypeError: if ``other`` is no :class:`RowStatistics`.
        """
        if not isinstance(other, RowStatistics):
            raise TypeError(f"RowStatistics merge with RowStatistics, got {type(other).__name__}")
        parts = (
            part._replace(first_index=unplaced(part.first_index))
            for part in (self.state, other.state)
        )
        return RowStatistics(merge(*parts))
