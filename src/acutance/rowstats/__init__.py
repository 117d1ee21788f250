"""Row statistics: the mergeable state, the metrics on it, and a dense float64 reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from acutance.lazy import lazy

if TYPE_CHECKING:
    from acutance.rowstats.dense import *
    from acutance.rowstats.metrics import *
    from acutance.rowstats.sharded_keys import *
    from acutance.rowstats.state import *
    from acutance.rowstats.weighted import *

__all__ = [
    "METRICS",
    "Metric",
    "NamedMetrics",
    "RowState",
    "RowStatistics",
    "WeightStatistics",
    "WeightSums",
    "all_reduce_keys",
    "collision",
    "dense_statistics",
    "effective_keys",
    "empty",
    "empty_weights",
    "entropy",
    "entropy_slope",
    "first_gap",
    "first_weight",
    "gaussian_entropy",
    "information",
    "jacobian_trace",
    "jensen_gap",
    "keys_50",
    "keys_90",
    "keys_95",
    "keys_99",
    "logit_mean",
    "logit_std",
    "lse",
    "max_gap",
    "max_logit",
    "mean_field_entropy",
    "merge",
    "merge_weights",
    "metric",
    "n_keys",
    "noise_gain",
    "normalized_entropy",
    "observe",
    "observe_weights",
    "rest_jensen_gap",
    "rest_logit_std",
    "sink_mass",
    "sparsity",
    "top_weight",
    "varentropy",
]

#: The names of each file but ``metrics``. All load on first use: what describes metrics needs no
#: PyTorch.
_HOMES = {
    "acutance.rowstats.dense": ("dense_statistics",),
    "acutance.rowstats.sharded_keys": ("all_reduce_keys",),
    "acutance.rowstats.state": ("RowState", "empty", "merge", "observe"),
    "acutance.rowstats.weighted": (
        "WeightStatistics", "WeightSums", "empty_weights", "merge_weights", "observe_weights",
    ),
}  # fmt: skip
__getattr__, __dir__ = lazy(__name__, __all__, _HOMES, "acutance.rowstats.metrics")
