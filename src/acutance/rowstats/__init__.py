"""Row statistics: the mergeable state, the metrics on it, and the dense float64 oracle."""

from __future__ import annotations

from acutance.rowstats.dense import dense_statistics
from acutance.rowstats.keys import all_reduce_keys
from acutance.rowstats.metrics import (
    METRICS,
    Metric,
    collision,
    effective_keys,
    entropy,
    entropy_slope,
    first_weight,
    gaussian_entropy,
    information,
    jacobian_trace,
    jensen_gap,
    logit_mean,
    logit_std,
    lse,
    max_gap,
    max_logit,
    mean_field_entropy,
    metric,
    n_keys,
    noise_gain,
    normalized_entropy,
    sink_mass,
    sparsity,
    top_weight,
    varentropy,
)
from acutance.rowstats.named import NamedMetrics
from acutance.rowstats.state import RowState, empty, merge, observe
from acutance.rowstats.statistics import RowStatistics
from acutance.rowstats.weighted import (
    WeightStatistics,
    WeightSums,
    empty_weights,
    merge_weights,
    observe_weights,
)

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
    "first_weight",
    "gaussian_entropy",
    "information",
    "jacobian_trace",
    "jensen_gap",
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
    "sink_mass",
    "sparsity",
    "top_weight",
    "varentropy",
]
