"""The mean-field entropy log n − λ(s_max − s̄): a bound, and the two errors that complete it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from acutance import theory
from acutance.experiments.harness import sampling
from acutance.experiments.harness.experiment import Experiment, Run, mean, statistics
from acutance.experiments.harness.record import Claim, Estimate, Record, Row, Where
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "Su Jianlin, kexue.fm/archives/9034"
LAMBDAS = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
FAMILIES = ("Gaussian", "uniform", "one-hot")
BOUND = "λ(s_max − s̄)/log n"

APPROXIMATE = Claim(
    "approximate", "H ≈ log n − λ(s_max − s̄)", SOURCE, "holds only where", within=0.02, bound=BOUND
)
IDENTITY = Claim("identity", "H = H_mf + J + G in every row", rounding=1e-9, theorem=True)
LOWER = Claim("lower", "H_mf ≤ H in every row", relation="<=", rounding=1e-9, theorem=True)
JENSEN = Claim("jensen", "E J = E log Z − log n − λE s̄, exactly")
GAP = Claim("gap", "E G = λ(E s_max − E⟨s⟩), exactly")

METRICS = ("entropy", "mean_field_entropy", "jensen_gap", "max_gap")


def entropy_by_definition(scores: torch.Tensor) -> torch.Tensor:
    """Entropy −Σ p log p (rows,) in nats, from the weights themselves and not acutance's sums."""
    log_p = torch.log_softmax(scores, -1)
    return -(log_p.exp() * log_p).sum(-1)


@cache
def expectation(family: str, n: int, lam: float) -> tuple[float, float]:
    """Expected Jensen gap J and max gap G, in nats, of n logits of a family at scale ``lam``."""
    if family == "one-hot":
        logits = np.zeros(n)
        logits[0] = 1.0
        return float(theory.jensen_gap(logits, lam)), float(theory.max_gap(logits, lam))
    law = family.lower()
    top = float(theory.expected_max_gauss(n)) if law == "gaussian" else (n - 1) / (n + 1)
    log_Z = float(theory.expected_logsumexp(n, lam, law))
    attended = float(theory.expected_weighted_mean(n, lam, law))
    return log_Z - math.log(n), lam * (top - attended)


def measure(run: Run) -> Sequence[Row]:
    """Check H = bound + J + G on sampled rows, and J and G against their expectations.

    For each family of logits, n and scale λ; J is the Jensen gap and G the max gap.
    """
    rows = []
    for n in (16, 4096) if run.quick else (16, 256, 4096, 65536):
        count = run.size(400, 2000 if n <= 4096 else 400)
        for family in FAMILIES:
            if family == "one-hot":
                scores = torch.zeros(1, n, dtype=torch.float64)
                scores[0, 0] = 1.0
            else:
                law = sampling.gaussian if family == "Gaussian" else sampling.uniform
                scores = torch.cat([law(run, size, n) for size in run.blocks(count, n)])
            for lam in LAMBDAS:
                where: Where = {"logits": family, "n": n, "λ": lam}
                values: dict[str, list[torch.Tensor]] = {name: [] for name in METRICS}
                definition: list[torch.Tensor] = []
                for part in scores.split(max(1, (1 << 17) // n)):
                    stats = statistics(lam * part)
                    definition.append(entropy_by_definition(lam * part))
                    for name in METRICS:
                        values[name].append(stats[name])
                found = {
                    name: mean(parts) if len(scores) > 1 else Estimate(float(parts[0]), 0.0)
                    for name, parts in values.items()
                }
                H = torch.cat(definition)
                bound, *gaps = (torch.cat(values[name]) for name in METRICS[1:])
                whole = bound + gaps[0] + gaps[1]
                furthest = int((whole - H).abs().argmax())
                J, G = expectation(family, n, lam)
                depth = (math.log(n) - found["mean_field_entropy"][0]) / math.log(n)
                H_mf = found["mean_field_entropy"][0]
                rows += [
                    APPROXIMATE.row("mean H, nat", H_mf, found["entropy"], where | {BOUND: depth}),
                    IDENTITY.row(
                        "H of the row furthest off, nat",
                        float(whole[furthest]),
                        float(H[furthest]),
                        where,
                    ),
                    LOWER.row("largest H_mf − H, nat", 0.0, float((bound - H).max()), where),
                    JENSEN.row("mean J, nat", J, found["jensen_gap"], where),
                    GAP.row("mean G, nat", G, found["max_gap"], where),
                ]
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Entropy, its bound and the two gaps against the scale λ, a panel for each family."""
    n = max(int(row.condition["n"]) for row in record.of("jensen"))
    figure, panels = plot_style.new_figure(
        "The mean-field entropy is a lower bound; two errors of one sign complete it",
        f"n = {n:,} keys. Lines: exact expectations. Marks: mean over sampled rows. H = H_mf + J + "
        "G in every row. Below 0 the bound says nothing.",
        panels=3,
        theme=theme,
    )
    names = {
        "H": "H",
        "H_mf": "H_mf",
        "J": "J, logsumexp above the mean",
        "G": "G, maximum above ⟨s⟩",
    }
    line = np.linspace(0.02, 8.0, 25)
    for axes, family in zip(panels, FAMILIES, strict=True):
        J, G = np.array([expectation(family, n, lam) for lam in line]).T
        depth = {
            "Gaussian": float(theory.expected_max_gauss(n)),
            "uniform": (n - 1) / (n + 1),
            "one-hot": 1 - 1 / n,
        }[family]
        H_mf = math.log(n) - line * depth
        lines = {"H": H_mf + J + G, "H_mf": H_mf, "J": J, "G": G}
        for (name, text), curve in zip(names.items(), plot_style.curves(4, theme), strict=True):
            claim = {"J": "jensen", "G": "gap"}.get(name, "approximate")
            own = record.of(claim, n=n, logits=family)
            marks = [row.predicted if name == "H_mf" else row.measured for row in own]
            at = [row.condition["λ"] for row in own]
            plot_style.draw_line_and_marks(axes, line, lines[name], at, marks, curve, text)
        axes.set_xlim(-0.15, 8.3)
        axes.set_ylim(-4.0, math.log(n) * 1.05)  # the legend lies where only H_mf goes
        plot_style.label(axes, x="scale λ", y="nat", title=f"{family} logits")
    plot_style.legend(panels[1], theme, where="lower left")
    return figure


EXPERIMENT = Experiment(
    name="mean_field",
    title="the mean-field entropy and its errors",
    prediction="H = log n − λ(s_max − s̄) + J + G with J, G ≥ 0, so the approximation is a lower "
    "bound, close only while λ(s_max − s̄) is a few per cent of log n",
    claims=(APPROXIMATE, IDENTITY, LOWER, JENSEN, GAP),
    measure=measure,
    draw=draw,
)
