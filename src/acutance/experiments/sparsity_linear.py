"""Sparsity of linear attention with non-negative features, and what the width d does to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from acutance import theory
from acutance.experiments.harness.experiment import Experiment, Run, mean, sparsity
from acutance.experiments.harness.record import Claim, Estimate, Record, Row
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "Su Jianlin, kexue.fm/archives/9889, on general linear attention"
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHAPES = (0.25, 1.0, 4.0)  # of the gamma law; σ'/μ' = 1/√shape

IDENTITY = Claim(
    "identity", "S = (1 + q'Σ'q' / (q'·μ')²)^(−1/2) with the row's own μ', Σ'", SOURCE,
    within=1e-9, theorem=True,
)  # fmt: skip
IID = Claim(
    "iid", "independent components: S = (1 + (σ'/μ')²‖q'‖₂²/‖q'‖₁²)^(−1/2)", SOURCE, within=0.002
)
WIDER = Claim(
    "wider", "a larger d makes it sparser", f"{SOURCE}, as two public copies have it",
    "does not hold", relation="<=",
)  # fmt: skip
RATIO = Claim(
    "ratio", "‖q'‖₂/‖q'‖₁ ≥ d^(−1/2): a minimum, not a maximum", relation=">=", theorem=True
)


def measure(run: Run) -> Sequence[Row]:
    """Sparsity S of sampled features, compared with the formula from their moments.

    First with the empirical moments of the row, then with those of the distribution.
    """
    rows = []
    for n in (16, 1024):
        query, keys = run.uniform(8), run.normal(n, 8).exp()
        centred = keys - keys.mean(0)
        own = theory.sparsity_linear(query, keys.mean(0), centred.T @ centred / n)
        direct = sparsity((keys @ query)[None])
        rows.append(
            IDENTITY.row("S", float(own), float(direct), {"n": n, "d": 8, "keys": "log-normal"})
        )

    n, count = run.size(1024, 4096), 32
    for shape in SHAPES:
        ratio, before = 1 / math.sqrt(shape), None
        for d in WIDTHS:
            law = torch.full((n, d), shape, dtype=torch.float64)
            query = torch.ones(d, dtype=torch.float64)  # dense
            sampled = [
                sparsity((torch._standard_gamma(law, generator=run.generator) @ query)[None])
                for _ in range(count)
            ]
            found, where = mean(sampled), {"d": d, "σ'/μ'": ratio, "n": n}
            S = float(theory.sparsity_linear_iid(query, 1.0, ratio))
            rows.append(IID.row("mean S", S, found, where))
            if before is not None:
                error = math.hypot(before.error, found.error)
                gain = found.value - before.value
                rows.append(
                    WIDER.row("S at d − S at the d before", 0.0, Estimate(gain, error), where)
                )
            before = found
            q = run.uniform(1000, d)
            norms = q.norm(dim=1) / q.sum(1)
            rows.append(RATIO.row("least of 1000 queries", d**-0.5, float(norms.min()), {"d": d}))
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Sparsity S against the width d for three distributions of the features."""
    n = record.of("iid")[0].condition["n"]
    figure, [axes] = plot_style.new_figure(
        "A wider non-negative linear attention is less sparse, not more",
        "Lines: S = (1 + (σ'/μ')²/d)^(−1/2) for a dense query and independent feature components. "
        f"Marks: mean over sampled rows of {n:,} keys with gamma-distributed components.",
        theme=theme,
    )
    line = np.geomspace(1.0, 256.0, 100)
    for shape, curve in zip(SHAPES, plot_style.curves(len(SHAPES), theme), strict=True):
        ratio = 1 / math.sqrt(shape)
        own = record.of("iid", **{"σ'/μ'": ratio})
        plot_style.draw_line_and_marks(
            axes, line, (1 + ratio**2 / line) ** -0.5, [row.condition["d"] for row in own],
            [row.measured for row in own], curve, f"σ'/μ' = {ratio:g}",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    ticks = (1, 4, 16, 64, 256)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0.35, 1.02)
    plot_style.label(axes, x="width d of the features", y="sparsity S = E|a| / √E[a²]")
    plot_style.legend(axes, theme, where="lower right")
    return figure


EXPERIMENT = Experiment(
    name="sparsity_linear",
    title="sparsity of linear attention with non-negative features",
    prediction="S is set by the features' relative spread along q'; ‖q'‖₂/‖q'‖₁ is least, "
    "d^(−1/2), for a dense query, so S → 1 as d grows",
    claims=(IDENTITY, IID, WIDER, RATIO),
    measure=measure,
    draw=draw,
)
