"""Row statistics: the mergeable state, the metrics on it, and a dense float64 reference."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acutance.rowstats.dense import dense_statistics
    from acutance.rowstats.metrics import (
        METRICS,
        Metric,
        collision,
        effective_keys,
        entropy,
        entropy_slope,
        first_gap,
        first_weight,
        gaussian_entropy,
        information,
        jacobian_trace,
        jensen_gap,
        keys_50,
        keys_90,
        keys_95,
        keys_99,
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
        rest_jensen_gap,
        rest_logit_std,
        sink_mass,
        sparsity,
        top_weight,
        varentropy,
    )
    from acutance.rowstats.sharded_keys import all_reduce_keys
    from acutance.rowstats.state import RowState, empty, merge, observe
    from acutance.rowstats.statistics import NamedMetrics, RowStatistics
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

#: The names of each file. They load on first use: what describes metrics
#: needs no PyTorch.
_FILES = {
    "dense": ("dense_statistics",),
    "sharded_keys": ("all_reduce_keys",),
    "metrics": (
        "METRICS",
        "Metric",
        "collision",
        "effective_keys",
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
        "metric",
        "n_keys",
        "noise_gain",
        "normalized_entropy",
        "rest_jensen_gap",
        "rest_logit_std",
        "sink_mass",
        "sparsity",
        "top_weight",
        "varentropy",
    ),
    "state": (
        "RowState",
        "empty",
        "merge",
        "observe",
    ),
    "statistics": ("NamedMetrics", "RowStatistics"),
    "weighted": (
        "WeightStatistics",
        "WeightSums",
        "empty_weights",
        "merge_weights",
        "observe_weights",
    ),
}
_HOMES = {name: file for file, names in _FILES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
