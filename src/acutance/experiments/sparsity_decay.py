"""Sparsity of weights that decay geometrically: S falls with n, the effective keys do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from acutance import theory
from acutance.experiments.harness.experiment import Experiment, Run, sparsity, statistics
from acutance.experiments.harness.record import Claim, Record, Row, Where
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "Su Jianlin, kexue.fm/archives/9889, on linear RNNs"
LAMBDAS = (0.5, 0.9, 0.99, 0.999)

FORMULA = Claim(
    "formula", "S = (1 − λⁿ)/(√n(1 − λ))·√((1 − λ²)/(1 − λ²ⁿ))", SOURCE, within=1e-9, theorem=True
)
VANISHES = Claim("vanishes", "S → 0 as n grows", SOURCE, relation="<=", theorem=True)
KEYS = Claim(
    "keys", "so it attends to ever fewer keys: 1/Σp² falls as S does", "a reading of article 9889",
    "does not hold", within=0.02,
)  # fmt: skip
LIMIT = Claim(
    "limit", "1/Σp² → (1 + λ)/(1 − λ), whatever n", expected="holds only where",
    within=0.01, bound="n·(1 − λ)", sense="from",
)  # fmt: skip


def measure(run: Run) -> Sequence[Row]:
    """Sparsity S and effective keys of n weights λ^(n−1), …, λ, 1, for n from 16 to 65,536."""
    rows = []
    for lam in LAMBDAS:
        before = None
        for n in (16, 64, 256, 1024, 4096, 16384, 65536):
            far = torch.arange(n - 1, -1, -1, dtype=torch.float64)
            weights = (lam**far)[None]
            S = float(sparsity(weights))
            # weights below float64's range still have logarithms
            keys = float(statistics((far * float(np.log(lam)))[None]).effective_keys)
            where: Where = {"λ": lam, "n": n}
            near = where | {LIMIT.bound: n * (1 - lam)}
            rows += [
                FORMULA.row("S", float(theory.sparsity_decay(lam, n)), S, where),
                LIMIT.row("effective keys", (1 + lam) / (1 - lam), keys, near),
            ]
            if before is not None:
                rows.append(VANISHES.row("S at n − S at n/4", 0.0, S - before[0], where))
                fallen = before[1] * S / before[0]
                rows.append(KEYS.row("effective keys", fallen, keys, where))
            before = (S, keys)
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Sparsity S and effective keys against n."""
    figure, [left, right] = plot_style.new_figure(
        "A decaying linear RNN: S → 0, but it goes on attending to the same keys",
        "Lines: closed forms. Marks: the weights (λ^(n−1), …, λ, 1) themselves. S falls only "
        "because zeros are appended; dotted: (1 + λ)/(1 − λ).",
        panels=2,
        theme=theme,
    )
    line = np.unique(np.geomspace(16, 65536, 60).round())
    for lam, curve in zip(LAMBDAS, plot_style.curves(len(LAMBDAS), theme), strict=True):
        for axes, claim, form in (
            (left, "formula", theory.sparsity_decay),
            (right, "limit", theory.effective_keys_decay),
        ):
            own = record.of(claim, λ=lam)
            plot_style.draw_line_and_marks(
                axes, line, np.asarray(form(lam, line)), [row.condition["n"] for row in own],
                [row.measured for row in own], curve, f"λ = {lam:g}",
            )  # fmt: skip
        plot_style.reference(right, theme, y=(1 + lam) / (1 - lam))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = (16, 256, 4096, 65536)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
    plot_style.label(left, x="keys n", y="sparsity S = E|a| / √E[a²]", title="sparsity")
    plot_style.label(right, x="keys n", y="effective keys 1/Σp²", title="effective keys")
    plot_style.legend(left, theme, where="lower left")
    return figure


EXPERIMENT = Experiment(
    name="sparsity_decay",
    title="sparsity of geometrically decaying weights",
    prediction="S ~ √((1 + λ)/((1 − λ)n)) → 0, while 1/Σp² = nS² → (1 + λ)/(1 − λ): 3, 19, 199, "
    "1999 keys for λ = 0.5, 0.9, 0.99, 0.999",
    claims=(FORMULA, VANISHES, KEYS, LIMIT),
    measure=measure,
    draw=draw,
)
