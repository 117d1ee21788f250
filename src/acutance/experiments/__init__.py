"""EXPERIMENTS: the catalogue of published claims that are tested, one file each."""

from __future__ import annotations

from acutance.experiments import (
    calibrated_length,
    entropy_floor,
    finite_n,
    first,
    freezing,
    gap_law,
    homogeneous,
    information,
    invariance,
    max_retrieval,
    mean_field,
    mlm_table,
    noise,
    qk_norm_scale,
    real_distance,
    real_heads,
    real_lengths,
    real_sinks,
    real_topk,
    scores,
    simplex,
    sparsity_decay,
    sparsity_exp,
    sparsity_identity,
    sparsity_linear,
    sparsity_relu2,
    ssmax,
    swan,
    temperature,
)
from acutance.experiments.harness.experiment import Experiment

#: Every experiment by name, in the order they run.
EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        noise,
        information,
        temperature,
        invariance,
        mean_field,
        sparsity_exp,
        sparsity_relu2,
        sparsity_identity,
        sparsity_linear,
        sparsity_decay,
        homogeneous,
        scores,
        finite_n,
        gap_law,
        simplex,
        entropy_floor,
        ssmax,
        freezing,
        real_heads,
        real_sinks,
        real_topk,
        real_distance,
        real_lengths,
        first,
        max_retrieval,
        mlm_table,
        qk_norm_scale,
        calibrated_length,
        swan,
    )
}

__all__ = ["EXPERIMENTS"]
