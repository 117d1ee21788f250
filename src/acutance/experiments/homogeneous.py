"""Weights that are a power of the score cannot be sharpened by a temperature: it cancels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from acutance import theory
from acutance.experiments.harness.experiment import Experiment, Run, mean, statistics
from acutance.experiments.harness.record import Claim, Record, Row, Where
from acutance.experiments.harness.sampling import gaussian
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "Su Jianlin, kexue.fm/archives/9019"
N = 1024
LAMBDAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)

#: From scores to the logarithm of the weights, before they are normalised by their sum.
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda scores: scores,
    "relu²": lambda scores: 2 * scores.relu().log(),
    "|x|": lambda scores: scores.abs().log(),
    "|x|³": lambda scores: 3 * scores.abs().log(),
}
#: Powers k and the share of keys that take part, for the entropies below.
POWERS = {"relu²": (2.0, 0.5), "|x|": (1.0, 1.0), "|x|³": (3.0, 1.0)}

SHARPENS = Claim(
    "sharpens", "multiplying the scores by λ > 1 lowers the entropy", "common practice",
    "holds only where", relation="<=", bound="weights", sense="in",
)  # fmt: skip
CANCELS = Claim("cancels", "λ leaves relu² and |x|^k unchanged", SOURCE, within=1e-9, theorem=True)
ENTROPY = Claim(
    "entropy", "there H = log n + log E|x|^k − E|x|^k log|x|^k / E|x|^k, for any λ", within=0.005
)
EXP = Claim("exp", "exp: E H is the exact integral at every λ")


def power_entropy(n: int, k: float, share: float) -> float:
    """Entropy in nats, for large n, of n weights |z|^k of normal z, a ``share`` of them not 0."""
    moment = 2 ** (k / 2) * math.gamma((k + 1) / 2) / math.sqrt(math.pi)
    digamma = float(torch.special.digamma(torch.tensor((k + 1) / 2, dtype=torch.float64)))
    log_mean = k / 2 * (math.log(2) + digamma)  # E |z|^k log |z|^k over E |z|^k
    return math.log(n * share) + math.log(moment) - log_mean


def measure(run: Run) -> Sequence[Row]:
    """Mean entropy of the same Gaussian rows for each kind of weights and scale λ of the scores."""
    rows = []
    z = gaussian(run, run.size(256, 4096), N)
    exact = np.asarray(theory.expected_entropy_gauss(N, LAMBDAS))
    for kind, weigh in WEIGHTS.items():
        before = None
        for at, lam in enumerate(LAMBDAS):
            H = torch.cat([statistics(weigh(lam * part)).entropy for part in z.split(128)])
            where: Where = {"weights": kind, "λ": lam, "n": N}
            if kind == "exp":
                rows.append(EXP.row("mean H, nat", exact[at], mean(H), where))
            else:
                H0 = power_entropy(N, *POWERS[kind])
                rows.append(ENTROPY.row("mean H, nat", H0, mean(H), where))
            if before is not None:
                step = mean(H - before)
                # at least a hundredth of a nat, each time λ doubles
                rows.append(SHARPENS.row("H at λ − H at λ/2, nat", -0.01, step, where))
                if kind != "exp":
                    ratio = float((H / before).sub(1).abs().max())
                    rows.append(CANCELS.row("H at λ / H at λ/2", 1.0, 1 + ratio, where))
            before = H
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Entropy against the scale λ of the scores, a line for each kind of weights."""
    figure, [axes] = plot_style.new_figure(
        "A temperature sharpens exp and nothing that is a power",
        f"n = {N} Gaussian scores multiplied by λ; weights are normalised by their sum. Lines: "
        "theory. Marks: mean over sampled rows.",
        theme=theme,
    )
    line = [2 ** (step / 8) for step in range(-16, 33)]
    for kind, curve in zip(WEIGHTS, plot_style.curves(len(WEIGHTS), theme), strict=True):
        own = record.of("exp" if kind == "exp" else "entropy", weights=kind)
        curve_of = (
            theory.expected_entropy_gauss(N, line)
            if kind == "exp"
            else [power_entropy(N, *POWERS[kind])] * len(line)
        )
        plot_style.draw_line_and_marks(
            axes, line, curve_of, [row.condition["λ"] for row in own],
            [row.measured for row in own], curve, kind,
        )  # fmt: skip
    plot_style.reference(axes, theme, y=math.log(N), name="log n")
    axes.set_xscale("log", base=2)
    axes.set_xticks(LAMBDAS, [f"{lam:g}" for lam in LAMBDAS])
    axes.set_ylim(0.0, 7.4)
    plot_style.label(axes, x="scale λ of the scores", y="entropy H, nat")
    plot_style.legend(axes, theme, where="lower left", title="weights ∝")
    return figure


EXPERIMENT = Experiment(
    name="homogeneous",
    title="temperature on homogeneous weights",
    prediction="f(λx) = λ^k f(x) makes λ cancel in f(s)/Σf(s): the entropy of relu² and |x|^k is "
    "the same at every λ, that of exp falls",
    claims=(SHARPENS, CANCELS, ENTROPY, EXP),
    measure=measure,
    draw=draw,
)
