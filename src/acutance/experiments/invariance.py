"""Logits scaled by log n: for which of them attention stays as focused when n grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.optimize import brentq

from acutance import theory
from acutance.experiments.harness import sampling
from acutance.experiments.harness.experiment import Experiment, Run, mean, statistics
from acutance.experiments.harness.record import Claim, Estimate, Record, Row, Where
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "Su Jianlin, kexue.fm/archives/8823 and 9034"
START = 512
D = 64
#: Families of independent logits, with what theory calls them.
LAWS: dict[str, tuple[sampling.Draw, str, dict[str, Any]]] = {
    "Gaussian": (sampling.gaussian, "gaussian", {}),
    "uniform": (sampling.uniform, "uniform", {}),
    "exponential": (sampling.exponential, "exponential", {}),
    f"cosine, d = {D}": (sampling.cosine(D), "cosine", {"d": D}),
}
ONE = "one key above the rest"

ENTROPY = Claim(
    "entropy", "λ ∝ log n keeps H what it was at n = 512", SOURCE, "does not hold",
    within=0.01, bound="logits", sense="in",
)  # fmt: skip
KEYS = Claim(
    "effective keys", "λ ∝ log n keeps Σp² what it was at n = 512", expected="holds only where",
    within=0.03, bound="logits", sense="in",
)  # fmt: skip
DEVIATION = Claim(
    "deviation", "Gaussian logits of deviation log n / log 512 keep H", SOURCE, "does not hold",
    within=0.03,
)  # fmt: skip
COLLISION = Claim("collision", "under that law E Σp² is the exact integral")
DRIFT = Claim("drift", "under that law E H is the exact integral")
SCALE = Claim("scale", "the scale that does keep 1/E Σp² = 2 is the integral's solution")
MATCH = Claim(
    "match", "one key above the rest keeps H at λ = log(n − 1) + logit p, with "
    "h(p) + (1 − p)·log(n − 1) = H", rounding=1e-9, theorem=True,
)  # fmt: skip


def measured_scale(scores: Sequence[torch.Tensor], start: float) -> Estimate:
    """The scale at which rows of scores have a mean Σp² of 1/2, by the secant method.

    Args:
        scores: blocks of rows, each (rows, n).
        start: first guess of the scale.
    """

    def collision(scale: float) -> Estimate:
        return mean([statistics(scale * part).collision for part in scores])

    low, high = 0.9 * start, 1.1 * start
    at_low, at_high = collision(low), collision(high)
    slope = math.nan
    for _ in range(4):
        slope = (at_high.value - at_low.value) / (high - low)
        low, at_low, high = high, at_high, high + (0.5 - at_high.value) / slope
        at_high = collision(high)
        if abs(at_high.value - 0.5) < 1e-9:
            break
    return at_high._replace(value=high, error=at_high.error / slope)


def mean_given(values: torch.Tensor, control: torch.Tensor, expected: float) -> Estimate:
    """Mean of ``values``, made more precise by a control variate with the known mean ``expected``.

    Entropy varies from row to row mostly with Σp². So the error of the sample's mean Σp² tells most
    of the error of its mean entropy, which is subtracted.
    """
    centred = control - control.mean()
    slope = (centred * values).mean() / centred.square().mean()
    return mean(values - slope * (control - expected))


def scale_of_entropy(row: torch.Tensor, entropy: float) -> float:
    """The scale at which a row of scores has a given entropy in nats, by bisection."""

    def excess(scale: float) -> float:
        return float(statistics(scale * row).entropy) - entropy

    return float(brentq(excess, 0.0, 100.0, xtol=1e-12))


def measure(run: Run) -> Sequence[Row]:
    """Collision and entropy of rows of each family of logits, for n from 512 on.

    Measured twice: with a scale λ proportional to log n, and with the scale that should keep both
    constant.
    """
    rows = []
    ns = (START, 16384) if run.quick else (START, 1024, 4096, 16384, 65536)
    for name, (law, family, parameter) in LAWS.items():
        first = float(theory.scale_for_effective_keys(START, 2.0, family, **parameter))
        for n in ns:
            count = run.size(4000 if n == START else 1000, 6000 if n <= 4096 else (1 << 26) // n)
            scores = [law(run, size, n) for size in run.blocks(count, n)]
            lam = first * math.log(n) / math.log(START)
            stats = [statistics(lam * part) for part in scores]
            Y, H = (torch.cat([s[name] for s in stats]) for name in ("collision", "entropy"))
            where: Where = {"logits": name, "n": n, "λ": lam}
            exact = float(theory.expected_collision(n, lam, family, **parameter))
            kept = float(theory.scale_for_effective_keys(n, 2.0, family, **parameter))
            before, now = (
                float(theory.expected_entropy(keys, at, family, **parameter))
                for keys, at in ((START, first), (n, lam))
            )
            # all rows where they are short: 5 per cent must be more than 4 standard errors
            tried = scores if n == START else scores[: len(scores) // run.size(6, 3) + 1]
            rows += [
                ENTROPY.row("mean H, nat", before, mean_given(H, Y, exact), where),
                DRIFT.row("mean H, nat", now, mean(H), where),
                KEYS.row("mean Σp²", 0.5, mean(Y), where),
                COLLISION.row("mean Σp²", exact, mean(Y), where),
                SCALE.row(
                    "λ that keeps it",
                    kept,
                    measured_scale(tried, kept),
                    where,
                ),
            ]
            if name == "Gaussian":
                gamma = math.log(n) / math.log(START)
                mean_H = mean([statistics(gamma * part).entropy for part in scores])
                same = float(theory.expected_entropy_gauss(START, 1.0))
                there = float(theory.expected_entropy_gauss(n, gamma))
                rows += [
                    DEVIATION.row("mean H, nat", same, mean_H, {"n": n, "γ": gamma}),
                    DRIFT.row("mean H, nat", there, mean_H, {"n": n, "γ": gamma}),
                ]
    half = float(theory.needle_scale(START, 1.0))  # half of the weight on the one key
    for n in ns:
        one = torch.zeros(1, n, dtype=torch.float64)
        one[0, 0] = 1.0
        lam = half * math.log(n) / math.log(START)
        under = statistics(lam * one)
        kept = 0.25 * START / (START - 1)  # ¼ + ¼/(n − 1)
        start = math.log(2) + math.log(START - 1) / 2  # half on one key, half spread evenly
        where = {"n": n, "λ": lam, "logits": ONE}
        scale = float(theory.needle_scale_for_entropy(n, start))
        rows += [
            ENTROPY.row("H, nat", start, float(under.entropy), where),
            KEYS.row("Σp²", kept, float(under.collision), where),
            MATCH.row("λ that keeps H", scale, scale_of_entropy(one, start), {"n": n}),
        ]
    return rows


@cache
def _lines(name: str, at: tuple[float, ...]) -> tuple[sampling.Array, sampling.Array]:
    """For each n: effective keys with λ ∝ log n, and the scale λ that keeps them constant."""
    _, family, parameter = LAWS[name]
    n = np.array(at)
    kept = np.asarray(theory.scale_for_effective_keys(n, 2.0, family, **parameter))
    lam = kept[0] * np.log(n) / math.log(START)
    return 1 / np.asarray(theory.expected_collision(n, lam, family, **parameter)), kept


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Draw collision under λ ∝ log n, and the scale λ that keeps it constant, against n."""
    figure, [left, right] = plot_style.new_figure(
        "Scaling by log n keeps the effective keys of one kind of logits, not of all",
        "Left: effective keys under λ ∝ log n, matched at n = 512; lines exact, marks sampled. "
        "Right: the scale that does keep them; for uniform logits it leaves the panel, λ ∝ n.",
        panels=2,
        theme=theme,
    )
    names = [*LAWS, ONE]
    line = np.unique(np.geomspace((START,) * 2, (1800, 65536), 6).round())
    for name, curve in zip(names, plot_style.curves(len(names), theme), strict=True):
        own = record.of("effective keys", logits=name)
        at = [row.condition["n"] for row in own]
        if name == ONE:
            first = float(theory.needle_scale(START, 1.0))
            odds = (line - 1) * np.exp(-first * np.log(line) / math.log(START))
            left_line = (1 + odds) ** 2 / (1 + odds**2 / (line - 1))
            kept = np.asarray(theory.needle_scale(line, 1.0)) / first
            marks: list[float] = []
        else:
            left_line, kept = _lines(name, tuple(line))
            first = kept[0]
            kept = kept / first
            marks = [row.measured / first for row in record.of("scale", logits=name)]
        found = [own[0].predicted / row.measured for row in own]
        plot_style.draw_line_and_marks(left, line, left_line / left_line[0], at, found, curve, name)
        plot_style.draw_line(right, line, kept, curve)
        if marks:
            plot_style.draw_marks(right, at, marks, curve)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        ticks = (512, 2048, 8192, 65536)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
    left.set_yscale("log")
    left.set_yticks((0.5, 1, 2, 5, 10, 30, 60), ["0.5", "1", "2", "5", "10", "30", "60"])
    left.minorticks_off()
    right.set_ylim(0.85, 3.05)
    plot_style.label(
        left, x="keys n", y="effective keys, relative to n = 512", title="under λ ∝ log n"
    )
    plot_style.label(
        right,
        x="keys n",
        y="scale λ(n), relative to n = 512",
        title="what keeps the effective keys",
    )
    plot_style.legend(left, theme, where="upper left", title="logits")
    return figure


EXPERIMENT = Experiment(
    name="invariance",
    title="entropy invariance by scaling with log n",
    prediction="no family of logits keeps H under λ ∝ log n; one key above the rest keeps its Σp², "
    "while its H rises from 3.81 nat at n = 512 to 6.25 at 65536. For Σp² Gaussian logits need "
    "√log n, uniform ones n, exponential ones a constant; H of Gaussian logits drifts 5.74, 6.88, "
    "7.97 at n = 512, 2048, 8192",
    claims=(ENTROPY, KEYS, DEVIATION, COLLISION, DRIFT, SCALE, MATCH),
    measure=measure,
    draw=draw,
)
