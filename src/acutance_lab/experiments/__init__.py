"""EXPERIMENTS: the catalogue of published claims that are tested, one file each."""

from importlib import import_module

from acutance_lab.experiment import Experiment

#: Files of this folder, in the order in which they run.
_NAMES = (
    "noise", "information", "temperature", "invariance", "mean_field",
    "sparsity_exp", "sparsity_relu2", "sparsity_identity", "sparsity_linear", "sparsity_decay",
    "homogeneous", "scores", "finite_n", "gap_law", "simplex", "entropy_floor", "ssmax", "freezing",
    "real_heads", "real_sinks", "real_topk", "real_distance", "real_lengths",
    "first", "max_retrieval", "mlm_table", "qk_norm_scale", "calibrated_length", "swan",
)  # fmt: skip

#: Every experiment by name, in the order they run.
EXPERIMENTS: dict[str, Experiment] = {
    name: import_module(f"{__name__}.{name}").EXPERIMENT for name in _NAMES
}

__all__ = ["EXPERIMENTS"]
