"""Published claims about attention, tested: predicted beside measured, with a verdict on each.

One experiment is one file. It states its prediction and the verdict it expects before it runs,
measures with what measures everything else in acutance, compares with :mod:`acutance.theory`, and
leaves a record (JSON) and a figure (PNG and SVG, light and dark).
"""

from __future__ import annotations

from acutance.reproduce import (
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
    real_heads,
    scores,
    simplex,
    sparsity_decay,
    sparsity_exp,
    sparsity_identity,
    sparsity_linear,
    sparsity_relu2,
    ssmax,
    temperature,
)
from acutance.reproduce.experiment import Experiment, Run
from acutance.reproduce.record import Claim, Judgement, Record, Row, judge, load
from acutance.reproduce.runner import Outcome, pick, run, run_one
from acutance.reproduce.trained import decoder

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
        first,
        max_retrieval,
        mlm_table,
        calibrated_length,
    )
}

__all__ = [
    "Claim",
    "EXPERIMENTS",
    "Experiment",
    "Judgement",
    "Outcome",
    "Record",
    "Row",
    "Run",
    "decoder",
    "judge",
    "load",
    "pick",
    "run",
    "run_one",
]
