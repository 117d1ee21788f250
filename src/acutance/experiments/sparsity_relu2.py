"""Sparsity of squared-ReLU weights over Gaussian scores: sharp only where β/γ is far below 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.special import ndtr

from acutance import theory
from acutance.experiments.harness.experiment import Experiment, Run, mean, sparsity
from acutance.experiments.harness.record import Claim, Estimate, Record, Row, Where
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "Su Jianlin, kexue.fm/archives/9889, eq. 6"
BETAS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
GAMMAS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
BOUND = 1 / math.sqrt(6)

FORMULA = Claim(
    "formula", "S = M₂/√M₄, a function of u = β/γ alone", SOURCE, "holds only where",
    within=0.02, bound="n·Φ(u)", sense="from",
)  # fmt: skip
PRINTED = Claim(
    "printed", "eq. 6, typeset rightly, is M₂/√M₄", SOURCE, rounding=0.0, within=1e-9, theorem=True
)
BOUNDED = Claim("bounded", "for β ≥ 0, S ≥ 1/√6", SOURCE, relation=">=", within=0.005)
FLOOR = Claim("floor", "S ≥ 1/√n in every row", relation=">=", theorem=True)
OPPOSITE = Claim("opposite", "for β < 0, a smaller γ is sparser", SOURCE, relation="<=")


def printed(beta: float, gamma: float) -> float:
    """Sparsity by equation 6 of the article, term by term as printed there."""
    e, square = math.exp(-(beta**2) / (2 * gamma**2)), beta**2 + gamma**2
    one = math.erf(beta / (math.sqrt(2) * gamma)) + 1
    top = e * (math.sqrt(2) * beta * gamma + math.sqrt(math.pi) / e * square * one)
    fourth = beta**4 + 6 * beta**2 * gamma**2 + 3 * gamma**4
    first = 2 * math.sqrt(2) * beta * gamma * e * (beta**2 + 5 * gamma**2)
    below = math.sqrt(first + 2 * math.sqrt(math.pi) * fourth * one)
    return float(top / (math.pi**0.25 * below))


def measure(run: Run) -> Sequence[Row]:
    """Mean sparsity S of rows with a positive score, for each mean β and deviation γ."""
    rows = []
    n, count = run.size(4096, 65536), run.size(60, 100)
    blocks = [run.normal(size, n) for size in run.blocks(count, n)]
    for beta in BETAS:
        before = None
        for gamma in GAMMAS:
            u = beta / gamma
            active = n * float(ndtr(u))
            S = float(theory.sparsity_relu2(beta, gamma))
            where: Where = {"β": beta, "γ": gamma, "n": n, FORMULA.bound: active}
            if u > -3:
                rows.append(PRINTED.row("S", printed(beta, gamma), S, where))
            S_rows = torch.cat([sparsity((beta + gamma * z).relu().square()) for z in blocks])
            S_rows = S_rows[torch.logical_not(S_rows.isnan())]  # of rows in which a key is active
            if len(S_rows) < count / 2:
                continue
            found = mean(S_rows)
            rows.append(FORMULA.row("mean S", S, found, where))
            rows.append(FLOOR.row("least S", n**-0.5, float(S_rows.min()), where))
            if beta >= 0:
                rows.append(BOUNDED.row("mean S", BOUND, found, where))
            elif before is not None:
                error = math.hypot(before.error, found.error)
                rows.append(
                    OPPOSITE.row(
                        "S here − S at next γ",
                        0,
                        Estimate(before.value - found.value, error),
                        where,
                    )
                )
            before = found
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Sparsity S against the deviation γ of the scores, a line for each mean β."""
    figure, [axes] = plot_style.new_figure(
        "Squared ReLU is sparse only where most scores are negative",
        "Lines: eq. 6 of article 9889. Marks: mean over sampled rows of "
        f"{record.of('formula')[0].condition['n']:,} keys; they leave the line where too few keys "
        "are active. Dotted: 1/√6, the bound for β ≥ 0.",
        theme=theme,
    )
    line = np.geomspace(0.2, 11.0, 200)
    for beta, curve in zip(BETAS, plot_style.curves(len(BETAS), theme), strict=True):
        own = record.of("formula", β=beta)
        plot_style.draw_line_and_marks(
            axes, line, np.asarray(theory.sparsity_relu2(beta, line)),
            [row.condition["γ"] for row in own], [row.measured for row in own],
            curve, f"β = {beta:g}".replace("-", "−"),
        )  # fmt: skip
    plot_style.reference(axes, theme, y=BOUND)
    axes.set_xscale("log")
    axes.set_xlim(0.22, 11)
    axes.set_ylim(0.0, 1.02)
    ticks = (0.25, 0.5, 1, 2, 5, 10)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    plot_style.label(
        axes, x="standard deviation of the scores γ = σ‖q‖", y="sparsity S = E|a| / √E[a²]"
    )
    plot_style.legend(axes, theme, where="upper right", columns=2)
    return figure


EXPERIMENT = Experiment(
    name="sparsity_relu2",
    title="sparsity of squared-ReLU weights",
    prediction="S depends on u = β/γ alone and rises with it; S ≥ 1/√6 for β ≥ 0, S → 0 only as "
    "β/γ → −∞; the formula needs many active keys, n·Φ(u) ≫ 1; one active key has S = 1/√n",
    claims=(FORMULA, PRINTED, BOUNDED, OPPOSITE, FLOOR),
    measure=measure,
    draw=draw,
)
