"""A large scale and the gradient: the typical row loses it, the mean over rows does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from acutance import theory
from acutance.experiments.harness.experiment import Experiment, Run, mean, median
from acutance.experiments.harness.record import Claim, Record, Row, untested_row
from acutance.experiments.harness.sampling import curve, gaussian, over_scales
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N = 512
SU_GRADIENT = "Su Jianlin, kexue.fm/archives/9812"
SOURCE = "Su Jianlin, kexue.fm/archives/9593"
LAMBDAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 40.0)

VANISHES = Claim(
    "vanishes", "beyond its best scale the mean gradient λ(1 − Σp²) falls", SU_GRADIENT,
    "does not hold", relation="<=",
)  # fmt: skip
SURROGATE = Claim(
    "surrogate", "E λ(1 − Σp²) = λ(1 − exp(λ²)/n), greatest at λ = 2.008 for n = 512",
    SU_GRADIENT, "holds only where", within=0.02, bound="λ",
)  # fmt: skip
EXACT = Claim("exact", "E λ(1 − Σp²) = λ(1 − E Σp²), the exact integral, rising to M_n")
TYPICAL = Claim(
    "typical", "at scales of 4 M_n and more the median row has lost half of its best gradient",
    relation="<=",
)  # fmt: skip
ENTROPY = Claim("entropy", "E H falls from log n to 0 as the exact integral")
RANGE = Claim(
    "range", "0 ≤ H ≤ log n in every row", SOURCE, relation="<=", rounding=1e-9, theorem=True
)
FROBENIUS = Claim("frobenius", "E ‖J‖_F² = E[Σp² − 2 Σp³ + (Σp²)²], the exact integral")
TYPICAL_NORM = Claim(
    "typical_norm", "at scales of 4 M_n and more the median ‖λJ‖_F has lost half of its best",
    relation="<=",
)  # fmt: skip
TRACE = Claim(
    "trace", "1 − Σp² ≤ H in every row: low entropy, small Jacobian", relation="<=", theorem=True
)


def measure(run: Run) -> Sequence[Row]:
    """Entropy and softmax Jacobian of rows of 512 Gaussian logits, at each scale λ."""
    thrice = tuple(3 * lam for lam in LAMBDAS)  # log Σp³ = log Z(3λ) − 3 log Z(λ)
    found = over_scales(
        run,
        gaussian,
        N,
        run.size(4000, 40000),
        LAMBDAS + thrice,
        ("entropy", "jacobian_trace", "lse"),
    )
    lse, Y = found["lse"], [1 - trace for trace in found["jacobian_trace"]]
    cubes = [torch.exp(lse[at + len(LAMBDAS)] - 3 * lse[at]) for at in range(len(LAMBDAS))]
    squares = [(y - 2 * t + y * y).clamp(min=0.0) for y, t in zip(Y, cubes, strict=False)]
    exact_J = np.asarray(theory.expected_jacobian_fro2(N, LAMBDAS))
    best = float(theory.scale_gradmax_annealed(N))
    top = float(theory.expected_max_gauss(N))
    exact_H = np.asarray(theory.expected_entropy_gauss(N, LAMBDAS))
    exact_Y = np.asarray(theory.expected_collision_gauss(N, LAMBDAS))
    medians = [
        median(lam * trace) for lam, trace in zip(LAMBDAS, found["jacobian_trace"], strict=False)
    ]
    norms = [median(lam * square.sqrt()) for lam, square in zip(LAMBDAS, squares, strict=True)]
    peak, height = (max(part.value for part in each) for each in (medians, norms))
    rows, before = [], None
    for at, lam in enumerate(LAMBDAS):
        H, trace = found["entropy"][at], found["jacobian_trace"][at]
        gradient, where = mean(lam * trace), {"n": N, "λ": lam}
        rows += [
            EXACT.row("mean λ(1 − Σp²)", lam * (1 - exact_Y[at]), gradient, where),
            SURROGATE.row(
                "mean λ(1 − Σp²)", lam * (1 - math.exp(min(lam**2, 700)) / N), gradient, where
            ),
            ENTROPY.row("mean H, nat", exact_H[at], mean(H), where),
            RANGE.row("largest H, nat", math.log(N), float(H.max()), where),
            RANGE.row("largest −H, nat", 0.0, float(-H.min()), where),
            FROBENIUS.row("mean ‖J‖_F²", exact_J[at], mean(squares[at]), where),
            TRACE.row("largest 1 − Σp² − H", 0.0, float((trace - H).max()), where),
        ]
        if lam > best and before is not None:
            # the same rows at both scales: the step's own spread is its error
            step = mean(lam * trace - before[0] * before[1])
            rows.append(VANISHES.row("mean λ(1 − Σp²), gain", 0.0, step, where))
        if lam >= 4 * top:
            rows.append(TYPICAL.row("median λ(1 − Σp²)", peak / 2, medians[at], where))
            rows.append(TYPICAL_NORM.row("median ‖λJ‖_F", height / 2, norms[at], where))
        before = (lam, trace)
    rows += [
        untested_row("median λ(1 − Σp²)", estimate, {"n": N, "λ": lam})
        for lam, estimate in zip(LAMBDAS, medians, strict=True)
    ]
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Entropy, and λ times the size of the softmax Jacobian, against the scale λ of the logits."""
    figure, [left, right, last] = plot_style.new_figure(
        "Large logits: entropy vanishes, and the typical gradient with it, but not the mean",
        f"n = {N} Gaussian logits. Lines: exact integrals. Marks: mean over sampled rows, and "
        "their median. Dotted: M_n, which the mean tends to.",
        panels=3,
        theme=theme,
    )
    line = np.geomspace(0.2, 42, 61)
    one, two, three = plot_style.curves(3, theme)
    at = [row.condition["λ"] for row in record.of("entropy")]
    plot_style.draw_line_and_marks(
        left, line, curve(theory.expected_entropy_gauss, N, at=tuple(line)), at,
        [row.measured for row in record.of("entropy")], one, "mean H",
    )  # fmt: skip
    plot_style.reference(left, theme, y=math.log(N), name="log n")
    plot_style.draw_line_and_marks(
        right, line, line * (1 - curve(theory.expected_collision_gauss, N, at=tuple(line))), at,
        [row.measured for row in record.of("exact")], one, "mean",
    )  # fmt: skip
    medians = record.of("")
    plot_style.draw_marks(right, at, [row.measured for row in medians], two, "median", hollow=True)
    short = line[line < 2.49]
    plot_style.draw_line(
        right, short, short * (1 - np.exp(short**2) / N), three, "λ(1 − exp(λ²)/n), article 9812"
    )
    plot_style.reference(right, theme, y=float(theory.expected_max_gauss(N)), name="M_n")
    plot_style.draw_line_and_marks(
        last, line, curve(theory.expected_jacobian_fro2, N, at=tuple(line)), at,
        [row.measured for row in record.of("frobenius")], one, "mean",
    )  # fmt: skip
    for axes in (left, right, last):
        axes.set_xscale("log")
        ticks = (0.25, 0.5, 1, 2, 5, 10, 20, 40)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    right.set_ylim(-0.15, 5.0)
    plot_style.label(left, x="logit scale λ, nat", y="entropy H, nat", title="entropy")
    plot_style.label(right, x="logit scale λ, nat", y="gradient λ(1 − Σp²)", title="gradient")
    plot_style.label(last, x="logit scale λ, nat", y="‖J‖_F²", title="Jacobian norm, squared")
    plot_style.legend(left, theme, where="lower left")
    plot_style.legend(last, theme, where="upper left")
    plot_style.legend(right, theme, where="upper left")
    return figure


EXPERIMENT = Experiment(
    name="information",
    title="entropy and gradient of large logits",
    prediction="E λ(1 − Σp²) = E⟨z⟩ rises with λ without end, to M_n = 3.04 at n = 512; its median "
    "rises and falls; the annealed optimum 2.008 is that of a surrogate",
    claims=(
        VANISHES,
        SURROGATE,
        EXACT,
        TYPICAL,
        FROBENIUS,
        TYPICAL_NORM,
        ENTROPY,
        RANGE,
        TRACE,
    ),
    measure=measure,
    draw=draw,
)
