"""Sparsity of exponential weights over Gaussian scores, and where n keys are too few for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from acutance import theory
from acutance.experiments.harness.experiment import Experiment, Run, mean
from acutance.experiments.harness.record import Claim, Record, Row, Where
from acutance.experiments.harness.sampling import gaussian, gaussian_collision, over_scales
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "Su Jianlin, kexue.fm/archives/9889, eq. 5"
GAMMAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)

FORMULA = Claim(
    "formula", "S = exp(−γ²/2)", SOURCE, "holds only where",
    within=0.02, bound="γ/√(log n / 2)",
)  # fmt: skip
EXACT = Claim("exact", "E Σp² at finite n is the exact integral")
FLOOR = Claim("floor", "S ≥ 1/√n in every row", relation=">=", theorem=True)


def measure(run: Run) -> Sequence[Row]:
    """Mean sparsity S and collision Σp² of Gaussian rows, for each n and deviation γ."""
    rows = []
    for n in (16, 256, 4096) if run.quick else (16, 256, 4096, 65536):
        count = run.size(1000, 4000 if n <= 4096 else 1000)
        found = over_scales(run, gaussian, n, count, GAMMAS, ("sparsity",))
        collision = gaussian_collision(run, n, count // 2, GAMMAS)
        exact = np.asarray(theory.expected_collision_gauss(n, GAMMAS))
        for at, gamma in enumerate(GAMMAS):
            where: Where = {"n": n, "γ": gamma, FORMULA.bound: gamma / math.sqrt(math.log(n) / 2)}
            S = found["sparsity"][at]
            rows += [
                FORMULA.row("mean S", float(theory.sparsity_exp(gamma)), mean(S), where),
                EXACT.row("mean Σp²", exact[at], collision[at], where),
                FLOOR.row("least S", n**-0.5, float(S.min()), where),
            ]
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Mean sparsity S against the deviation γ of the logits, with the least S of n keys."""
    rows = record.of("formula")
    figure, [axes] = plot_style.new_figure(
        "Wide logits make softmax attention sparse, down to 1/√n",
        "Line: S = exp(−γ²/2), the limit of many keys. Marks: mean over sampled rows of n keys; "
        "dotted: the floor 1/√n below which no row can go.",
        theme=theme,
    )
    line = np.linspace(0.0, 5.0, 200)
    ns = list(dict.fromkeys(row.condition["n"] for row in rows))
    first, *others = plot_style.curves(len(ns) + 1, theme)
    plot_style.draw_line(axes, line, np.asarray(theory.sparsity_exp(line)), first, "exp(−γ²/2)")
    for n, curve in zip(ns, others, strict=True):
        own = [row for row in rows if row.condition["n"] == n]
        at = [row.condition["γ"] for row in own]
        plot_style.draw_marks(axes, at, [row.measured for row in own], curve, f"n = {n}")
        plot_style.reference(axes, theme, y=float(n) ** -0.5)
    axes.set_yscale("log")
    axes.set_ylim(2e-3, 1.4)
    plot_style.label(axes, x="logit deviation γ = σ‖q‖, nat", y="sparsity S = E|a| / √E[a²]")
    plot_style.legend(axes, theme, where="lower left")
    return figure


EXPERIMENT = Experiment(
    name="sparsity_exp",
    title="sparsity of exponential weights",
    prediction="S = exp(−γ²/2) whatever β, until γ nears √(log n / 2); never below 1/√n",
    claims=(FORMULA, EXACT, FLOOR),
    measure=measure,
    draw=draw,
)
