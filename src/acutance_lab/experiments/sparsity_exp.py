"""Sparsity of exponential weights over Gaussian scores, and where n keys are too few for it."""

import math
from collections.abc import Iterator

import numpy as np

from acutance import theory
from acutance_lab.experiment import Experiment, Run, gaussian, gaussian_collision, mean, over_scales
from acutance_lab.figure import Axis, Level, Lines, Page, Panel
from acutance_lab.record import Claim, Row, Where, values

SOURCE = "Su Jianlin, kexue.fm/archives/9889, eq. 5"
GAMMAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)

FORMULA = Claim(
    "formula", "S = exp(−γ²/2)", SOURCE, "holds only where",
    within=0.02, bound="γ/√(log n / 2)",
)  # fmt: skip
EXACT = Claim("exact", "E Σp² at finite n is the exact integral")
FLOOR = Claim("floor", "S ≥ 1/√n in every row", relation=">=", theorem=True)


def measure(run: Run) -> Iterator[Row]:
    """Mean sparsity S and collision Σp² of Gaussian rows, for each n and deviation γ."""
    for n in (16, 256, 4096) if run.quick else (16, 256, 4096, 65536):
        count = run.size(1000, 4000 if n <= 4096 else 1000)
        sampled = over_scales(run, gaussian, n, count, GAMMAS, ("sparsity",))["sparsity"]
        collision = gaussian_collision(run, n, count // 2, GAMMAS)
        exact = np.asarray(theory.expected_collision_gauss(n, GAMMAS))
        for at, gamma in enumerate(GAMMAS):
            where: Where = {"n": n, "γ": gamma, FORMULA.bound: gamma / math.sqrt(math.log(n) / 2)}
            S = mean(sampled[at])
            yield FORMULA.row("mean S", float(theory.sparsity_exp(gamma)), S, where)
            yield EXACT.row("mean Σp²", exact[at], collision[at], where)
            yield FLOOR.row("least S", n**-0.5, float(sampled[at].min()), where)


EXPERIMENT = Experiment(
    "sparsity_exp", "sparsity of exponential weights",
    "S = exp(−γ²/2) whatever β, until γ nears √(log n / 2); never below 1/√n",
    (FORMULA, EXACT, FLOOR), measure,
    Page(
        "Wide logits make softmax attention sparse, down to 1/√n",
        "Line: S = exp(−γ²/2), the limit of many keys. Marks: mean over sampled rows of n keys; "
        "dotted: the floor 1/√n below which no row can go.",
        Panel(
            Axis("logit deviation γ = σ‖q‖, nat"),
            Axis("sparsity S = E|a| / √E[a²]", log=True, limits=(2e-3, 1.4)),
            [
                Lines("formula", "γ", "exp(−γ²/2)", marks=False),
                Lines("formula", "γ", "n = {:,}", by="n", line=False),
            ],
            levels=lambda record: [Level(y=n**-0.5) for n in values(record.of("formula"), "n")],
            legend="lower left",
        ),
    ),
)  # fmt: skip
