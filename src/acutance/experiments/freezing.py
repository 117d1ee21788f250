"""The random energy model: above a critical scale a few keys hold the weight, whatever n."""

from __future__ import annotations

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

SOURCE = "Derrida (1981), Phys. Rev. B 24, 2613"
RATIOS = (0.25, 0.5, 0.75, 1.05, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0)
BOUND = "γ/M_n"

COLLISION = Claim(
    "collision", "frozen: Σp² = 1 − m, m = M_n/γ", SOURCE, "holds only where",
    within=0.02, bound=BOUND, sense="from",
)  # fmt: skip
ENTROPY = Claim(
    "entropy", "frozen: H = ψ(1) − ψ(1 − m)", SOURCE, "holds only where",
    within=0.03, bound=BOUND, sense="from",
)  # fmt: skip
EXACT_Y = Claim("exact collision", "E Σp² at finite n is the exact integral")
EXACT_H = Claim("exact entropy", "E H at finite n is the exact integral")


def measure(run: Run) -> Sequence[Row]:
    """Mean entropy and collision of Gaussian rows whose deviation γ is below and above M_n.

    M_n is the expected maximum of n standard normal numbers. Above it, rows are also compared with
    the formulas for frozen rows.
    """
    rows = []
    for n in (16, 256, 4096) if run.quick else (16, 256, 4096, 65536):
        top = float(theory.expected_max_gauss(n))
        count = run.size(1000, 6000 if n <= 4096 else 1000)
        scales = [ratio * top for ratio in RATIOS]
        found = over_scales(run, gaussian, n, count, scales, ("entropy",))
        collision = gaussian_collision(run, n, count, scales)
        for at, ratio in enumerate(RATIOS):
            H, Y = mean(found["entropy"][at]), collision[at]
            where: Where = {"n": n, BOUND: ratio}
            exact_H = float(theory.expected_entropy_gauss(n, scales[at]))
            exact_Y = float(theory.expected_collision_gauss(n, scales[at]))
            rows += [
                EXACT_Y.row("mean Σp²", exact_Y, Y, where),
                EXACT_H.row("mean H, nat", exact_H, H, where),
            ]
            if ratio > 1:
                frozen_H = float(theory.frozen_entropy(1 / ratio))
                frozen_Y = float(theory.frozen_collision(1 / ratio))
                rows += [
                    COLLISION.row("mean Σp²", frozen_Y, Y, where),
                    ENTROPY.row("mean H, nat", frozen_H, H, where),
                ]
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Collision and entropy against γ/M_n for each n, with the formulas for frozen rows."""
    figure, [left, right] = plot_style.new_figure(
        "Above γ = M_n attention freezes onto a few keys, however many there are",
        "Thin lines: exact integrals at each n. Thick line: the frozen law of infinitely many "
        "keys, m = M_n/γ. Marks: mean over sampled rows.",
        panels=2,
        theme=theme,
    )
    ns = list(dict.fromkeys(float(row.condition["n"]) for row in record.of("collision")))
    line, frozen = np.linspace(0.1, 6.3, 32), np.linspace(1.02, 6.3, 200)
    thick: dict[str, Any] = {
        "color": theme.ink,
        "linewidth": 2.6,
        "alpha": 0.55,
        "label": "frozen law, n → ∞",
    }
    left.plot(frozen, np.asarray(theory.frozen_collision(1 / frozen)), **thick)
    right.plot(frozen, np.asarray(theory.frozen_entropy(1 / frozen)), **thick)
    for n, curve in zip(ns, plot_style.curves(len(ns), theme), strict=True):
        top = float(theory.expected_max_gauss(n))
        for axes, claim, form in (
            (left, "exact collision", theory.expected_collision_gauss),
            (right, "exact entropy", theory.expected_entropy_gauss),
        ):
            own = [row for row in record.of(claim, n=n) if float(row.condition[BOUND]) <= 6]
            plot_style.draw_line_and_marks(
                axes, line, curve_of(form, n, at=tuple(line * top)),
                [row.condition[BOUND] for row in own],
                [row.measured for row in own], curve, f"n = {n:,.0f}",
            )  # fmt: skip
    for axes in (left, right):
        plot_style.reference(axes, theme, x=1.0)
        axes.set_xlim(0.0, 6.3)
    left.set_ylim(0.0, 1.0)
    right.set_yscale("log")
    right.set_ylim(0.15, 14)
    ticks = (0.2, 0.5, 1, 2, 5, 10)
    right.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    right.minorticks_off()
    plot_style.label(
        left, x="scale in units of the maximum, γ/M_n", y="collision Σp²", title="collision"
    )
    plot_style.label(
        right, x="scale in units of the maximum, γ/M_n", y="entropy H, nat", title="entropy"
    )
    plot_style.legend(left, theme, where="lower right")
    return figure


EXPERIMENT = Experiment(
    name="freezing",
    title="freezing of Gaussian logits",
    prediction="with m = M_n/γ < 1: Σp² → 1 − m and H → ψ(1) − ψ(1 − m); at finite n the first is "
    "a few per cent low near γ = 2 M_n, the second too high by more",
    claims=(COLLISION, ENTROPY, EXACT_Y, EXACT_H),
    measure=measure,
    draw=draw,
)
