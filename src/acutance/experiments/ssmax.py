"""Scalable softmax: one key above the rest keeps its weight at any length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

import acutance.attend
from acutance import theory
from acutance.experiments.harness.experiment import Experiment, Run
from acutance.experiments.harness.record import Claim, Record, Row
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "Nakanishi (2025), arXiv:2501.19399, figure 1"
TOP, REST, S = 3.0, -2.0, 0.43

FADES = Claim(
    "fades", "softmax leaves the one key half of the weight", "what one would expect of it",
    "holds only where", relation=">=", bound="n",
)  # fmt: skip
SSMAX = Claim(
    "ssmax",
    "with SSMax its weight is 1/(1 + (n − 1)·n^(−2.15)), near 1",
    SOURCE,
    within=1e-9,
    theorem=True,
)
SOFTMAX = Claim("softmax", "with softmax it is e⁵/(e⁵ + n − 1)", SOURCE, within=1e-9, theorem=True)
LEAST = Claim("least", "with SSMax it stays above 0.8", SOURCE, relation=">=", theorem=True)
CRITICAL = Claim(
    "critical", "a smaller s fails at some length: what counts is s·gap > 1", expected="holds",
    within=1e-9, theorem=True,
)  # fmt: skip


def weight(n: int, scale: float) -> float:
    """Measured weight of one key above n − 1 equal ones, with the logits times ``scale``."""
    key = torch.full((1, 1, n, 1), REST, dtype=torch.float64)
    key[..., 0, :] = TOP
    found = acutance.attend.row_statistics(torch.ones_like(key[:, :, :1]), key, scale=scale)
    return float(found.top_weight)


def measure(run: Run) -> Sequence[Row]:
    """Weight of one key above n − 1 equal ones, with and without the factor s log n.

    For n from 2 to 10^5, at full size 10^6.
    """
    rows = []
    ns = [2, 4, 10, 30, 100, 148, 149, 150, 300, 1000, 10**4, 10**5] + (
        [] if run.quick else [10**6]
    )
    for n in ns:
        plain, scaled = weight(n, 1.0), weight(n, S * math.log(n))
        gap = TOP - REST
        rows += [
            SSMAX.row("weight", 1 / (1 + (n - 1) * n ** (-S * gap)), scaled, {"n": n, "s": S}),
            SOFTMAX.row("weight", 1 / (1 + (n - 1) * math.exp(-gap)), plain, {"n": n}),
            LEAST.row("weight", 0.8, scaled, {"n": n, "s": S}),
            FADES.row("weight", 0.5, plain, {"n": n}),
        ]
        for s in (0.1, 0.2):
            at = float(n) ** (1 - s * gap) * (1 - 1 / n)  # odds of the rest
            found = weight(n, s * math.log(n))
            rows.append(CRITICAL.row("weight", 1 / (1 + at), found, {"n": n, "s": s}))
    needle = float(theory.needle_scale(1000, TOP - REST))
    rows.append(CRITICAL.row("weight", 0.5, weight(1000, needle), {"n": 1000, "s": "needle_scale"}))
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Weight of the one key above the rest against n, with and without the factor."""
    figure, [axes] = plot_style.new_figure(
        "Softmax fades with length; SSMax holds if s times the gap > 1",
        "One score of 3 among n − 1 scores of −2. Lines: closed forms. Marks: measured weight of "
        "the one key.",
        theme=theme,
    )
    gap, line = TOP - REST, np.geomspace(2, 1e6, 200)
    cases = [
        ("ssmax", {"s": S}, (line - 1) * line ** (-S * gap), f"SSMax, s = {S} (s·gap = 2.15)"),
        ("critical", {"s": 0.2}, (line - 1) / line, "SSMax, s = 0.2 (s·gap = 1)"),
        ("critical", {"s": 0.1}, (line - 1) * line ** (-0.1 * gap), "SSMax, s = 0.1 (s·gap = 0.5)"),
        ("softmax", {}, (line - 1) * math.exp(-gap), "softmax"),
    ]
    for (claim, where, odds, name), curve in zip(cases, plot_style.curves(4, theme), strict=True):
        own = record.of(claim, **where)
        plot_style.draw_line_and_marks(
            axes, line, 1 / (1 + odds), [row.condition["n"] for row in own],
            [row.measured for row in own], curve, name,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_ylim(-0.02, 1.04)
    plot_style.label(axes, x="keys n", y="weight of the one key")
    plot_style.legend(axes, theme, where=(0.53, 0.58))
    return figure


EXPERIMENT = Experiment(
    name="ssmax",
    title="scalable softmax on one key above the rest",
    prediction="weight e⁵/(e⁵ + n − 1) with softmax, 1/(1 + (n − 1)n^(−2.15)) with s = 0.43: 0.129 "
    "against 0.9997 at n = 1000; softmax keeps one half up to n = 149",
    claims=(SSMAX, SOFTMAX, LEAST, FADES, CRITICAL),
    measure=measure,
    draw=draw,
)
