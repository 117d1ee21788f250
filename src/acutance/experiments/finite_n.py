"""Entropy and collision of Gaussian logits at finite n: exact integrals and population formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from acutance import theory
from acutance.experiments.harness.experiment import Experiment, Run, mean
from acutance.experiments.harness.record import Claim, Record, Row, Where
from acutance.experiments.harness.sampling import curve as curve_of
from acutance.experiments.harness.sampling import gaussian, gaussian_collision, over_scales
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "Su Jianlin, kexue.fm/archives/8823 and 9889, in the limit of many keys"
GAMMAS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0)
BOUND = "γ/√(2 log n)"

ENTROPY = Claim("entropy", "E H is the exact integral, for every n and γ")
COLLISION = Claim("collision", "E Σp² is the exact integral, for every n and γ")
POPULATION_H = Claim(
    "population entropy", "H = log n − γ²/2", SOURCE, "holds only where", within=0.02, bound=BOUND
)
POPULATION_Y = Claim(
    "population collision", "Σp² = exp(γ²)/n", SOURCE, "holds only where", within=0.02, bound=BOUND
)


def measure(run: Run) -> Sequence[Row]:
    """Mean entropy H and collision Σp² of sampled Gaussian rows, for each n and deviation γ.

    Each is compared with the exact integral and with the formula for infinitely many keys.
    """
    rows = []
    for n in (16, 256, 4096) if run.quick else (16, 256, 4096, 65536):
        count = run.size(1000, 4000 if n <= 4096 else 1000)
        found = over_scales(run, gaussian, n, count, GAMMAS, ("entropy",))
        collision = gaussian_collision(run, n, count // 2, GAMMAS)
        exact_H = np.asarray(theory.expected_entropy_gauss(n, GAMMAS))
        exact_Y = np.asarray(theory.expected_collision_gauss(n, GAMMAS))
        for at, gamma in enumerate(GAMMAS):
            H, Y = mean(found["entropy"][at]), collision[at]
            where: Where = {"n": n, "γ": gamma, BOUND: gamma / math.sqrt(2 * math.log(n))}
            rows += [
                ENTROPY.row("mean H, nat", exact_H[at], H, where),
                COLLISION.row("mean Σp²", exact_Y[at], Y, where),
                POPULATION_H.row("mean H, nat", math.log(n) - gamma**2 / 2, H, where),
                POPULATION_Y.row("mean Σp²", math.exp(gamma**2) / n, Y, where),
            ]
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Entropy and collision against the deviation γ for each n, with the formulas for n → ∞."""
    figure, [left, right] = plot_style.new_figure(
        "Gaussian logits at finite n: the exact integrals hold where the limit formulas break",
        "Lines: exact integrals. Thin grey lines: log n − γ²/2 and exp(γ²)/n, true for n → ∞ only. "
        "Marks: mean over sampled rows; standard errors are smaller than the marks.",
        panels=2,
        theme=theme,
    )
    line = np.linspace(0.05, 10.0, 31)
    ns = list(dict.fromkeys(float(row.condition["n"]) for row in record.of("entropy")))
    for n, curve in zip(ns, plot_style.curves(len(ns), theme), strict=True):
        grey: dict[str, Any] = {"color": theme.muted, "linewidth": 1.0, "zorder": 1.5}
        left.plot(line, math.log(n) - line**2 / 2, **grey)
        right.plot(line, np.exp(np.minimum(line**2, 50)) / n, **grey)
        for axes, claim, form in (
            (left, "entropy", theory.expected_entropy_gauss),
            (right, "collision", theory.expected_collision_gauss),
        ):
            own = record.of(claim, n=n)
            plot_style.draw_line_and_marks(
                axes, line, curve_of(form, n, at=tuple(line)), [row.condition["γ"] for row in own],
                [row.measured for row in own], curve, f"n = {n:,.0f}",
            )  # fmt: skip
    left.set_ylim(0.0, math.log(max(ns)) * 1.05)
    right.set_yscale("log")
    right.set_ylim(0.5 / max(ns), 1.3)
    plot_style.label(left, x="logit deviation γ, nat", y="entropy H, nat", title="entropy")
    plot_style.label(right, x="logit deviation γ, nat", y="collision Σp²", title="collision")
    plot_style.legend(left, theme, where="upper right")
    return figure


EXPERIMENT = Experiment(
    name="finite_n",
    title="Gaussian logits at finite n",
    prediction="E H and E Σp² are the exact integrals (4 standard errors everywhere); exp(γ²)/n "
    "breaks at about half the γ at which log n − γ²/2 does",
    claims=(ENTROPY, COLLISION, POPULATION_H, POPULATION_Y),
    measure=measure,
    draw=draw,
)
