"""Sparsity of linear attention with weights of both signs: never below √(2/π) for Gaussian keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from acutance import theory
from acutance.experiments.harness.experiment import Experiment, Run, mean, sparsity
from acutance.experiments.harness.record import Claim, Record, Row, Where
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "Su Jianlin, kexue.fm/archives/9889, eq. 7"
BETAS = (0.0, 0.5, 1.0, 2.0, 4.0)
GAMMAS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
BOUND = math.sqrt(2 / math.pi)

FORMULA = Claim(
    "formula", "S = (√(2/π)·e^(−u²/2) + u·erf(u/√2)) / √(1 + u²), u = β/γ", SOURCE, within=0.001
)
LEAST = Claim(
    "bounded", "linear attention has S ≥ √(2/π) whatever the query", SOURCE, "holds only where",
    relation=">=", within=0.001, bound="keys", sense="in",
)  # fmt: skip


def measure(run: Run) -> Sequence[Row]:
    """Mean sparsity S of signed weights: normal scores of mean β and deviation γ, then others."""
    rows = []
    n, count = run.size(4096, 65536), run.size(100, 200)
    blocks = [run.normal(size, n) for size in run.blocks(count, n)]
    for beta in BETAS:
        for gamma in GAMMAS:
            found = mean([sparsity(beta + gamma * z) for z in blocks])
            where: Where = {"β": beta, "γ": gamma, "n": n}
            S = float(theory.sparsity_identity(beta, gamma))
            rows.append(FORMULA.row("mean S", S, found, where))
            rows.append(LEAST.row("mean S", BOUND, found, where | {LEAST.bound: "Gaussian"}))
    # one component of the query matters, and the keys' law is seen as it is
    others: dict[str, list[Tensor]] = {"Laplace": [], "nine in ten zero": []}
    for z in blocks:
        u = 2 * run.uniform(*z.shape) - 1
        others["Laplace"].append(sparsity(-u.sign() * (1 - u.abs()).log()))
        others["nine in ten zero"].append(sparsity(z * (run.uniform(*z.shape) < 0.1)))
    for law, values in others.items():
        rows.append(LEAST.row("mean S", BOUND, mean(values), {"n": n} | {LEAST.bound: law}))
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Sparsity S against the deviation γ for each mean β; other distributions as levels."""
    n = record.of("formula")[0].condition["n"]
    figure, [axes] = plot_style.new_figure(
        "Linear attention over Gaussian keys cannot be sparse",
        f"Lines: eq. 7 of article 9889. Marks: mean over sampled rows of {n:,} keys. Dotted: "
        "√(2/π), the bound for Gaussian keys; keys of other laws, at the right edge, go below it.",
        theme=theme,
    )
    line = np.geomspace(0.2, 11.0, 200)
    for beta, curve in zip(BETAS, plot_style.curves(len(BETAS), theme), strict=True):
        own = record.of("formula", β=beta)
        plot_style.draw_line_and_marks(
            axes, line, np.asarray(theory.sparsity_identity(beta, line)),
            [row.condition["γ"] for row in own], [row.measured for row in own],
            curve, f"β = {beta:g}",
        )  # fmt: skip
    plot_style.reference(axes, theme, y=BOUND)
    laws = [row for row in record.of("bounded") if row.condition[LEAST.bound] != "Gaussian"]
    for law in dict.fromkeys(str(row.condition[LEAST.bound]) for row in laws):
        level = next(row.measured for row in laws if row.condition[LEAST.bound] == law)
        axes.annotate(
            f"keys: {law}", (11.0, level), (8.6, level + 0.03), ha="right", va="bottom",
            color=theme.ink, size=9.5, arrowprops={"arrowstyle": "->", "color": theme.ink},
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(0.22, 11)
    axes.set_ylim(0.2, 1.02)
    ticks = (0.25, 0.5, 1, 2, 5, 10)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    plot_style.label(
        axes, x="standard deviation of the scores γ = σ‖q‖", y="sparsity S = E|a| / √E[a²]"
    )
    plot_style.legend(axes, theme, where="lower left")
    return figure


EXPERIMENT = Experiment(
    name="sparsity_identity",
    title="sparsity of linear attention",
    prediction="S is even in β, rises with |β|/γ and is least at β = 0, where it is √(2/π) = "
    "0.7979; that bound is a property of Gaussian keys, not of linear attention",
    claims=(FORMULA, LEAST),
    measure=measure,
    draw=draw,
)
