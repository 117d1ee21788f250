"""Which length law measured scores need: the scale Λ above which a row's maximum stands alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from acutance import theory
from acutance.experiments.harness import sampling
from acutance.experiments.harness.experiment import Experiment, Run, median
from acutance.experiments.harness.record import Claim, Estimate, Record, Row, Where
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "Hayase & Karakida (2026), arXiv:2605.12697"
GAP = 0.5
GROWS = {"normal": "√log n", "one gap": "log n", "uniform": "n", "exponential": "constant"}
FAMILIES = tuple(GROWS)

GROWTH = Claim(
    "growth", "Λ grows as √log n (normal), log n (one gap), n (uniform), not at all (exponential)",
    SOURCE, "holds only where", within=0.02, bound="logits", sense="in",
)  # fmt: skip
ONE_GAP = Claim(
    "one gap", "one key Δ above the rest: Λ = log n / Δ", SOURCE, within=1e-9, theorem=True
)
LEVEL = Claim("level", "Λ = √(2 log n) for normal logits", SOURCE, "does not hold", within=0.02)
LIMIT = Claim(
    "limit", "median Λ = c·h(b_n): hazard rate at the top, c from the Poisson limit of the gaps",
    expected="holds only where", within=0.01, bound="logits", sense="in",
)  # fmt: skip


def limit_constant(kind: str, samples: int, seed: int) -> Estimate:
    """Median of Λ/h for infinitely many keys: the critical scale over the hazard rate h.

    Γ_j being the arrivals of a Poisson process, the gaps g_(j) to the maximum times h are
    log(Γ_j/Γ_1) if logits have an exponential tail, and Γ_j − Γ_1 if they have a sharp upper end.

    Args:
        kind: "exponential tail" or "sharp end".
        samples: rows that are drawn.
        seed: of the random numbers.
    """
    generator = np.random.default_rng(seed)
    arrivals = generator.exponential(size=(samples, 200)).cumsum(axis=1)
    gaps = (
        np.log(arrivals[:, 1:] / arrivals[:, :1])
        if kind == "exponential tail"
        else arrivals[:, 1:] - arrivals[:, :1]
    )
    best = (np.log(np.arange(2, 201)) / gaps).max(axis=1)
    return median(torch.from_numpy(best))


def draw_logits(run: Run, family: str, rows: int, n: int) -> torch.Tensor:
    """Logits (rows, n): drawn from a family, or for "one gap" all 0 but the first."""
    if family == "one gap":
        found = torch.zeros(rows, n, dtype=torch.float64)
        found[:, 0] = GAP
        return found
    law = {
        "normal": sampling.gaussian,
        "uniform": sampling.uniform,
        "exponential": sampling.exponential,
    }[family]
    return law(run, rows, n)


def measure(run: Run) -> Sequence[Row]:
    """Median over sampled rows of the critical scale Λ, for each family of logits and n.

    The median, since the mean is infinite. It is compared with the law predicted for the family.
    """
    rows = []
    samples = run.size(60000, 200000)
    constants = {
        family: limit_constant(
            "sharp end" if family == "uniform" else "exponential tail", samples, run.seed
        )
        for family in ("normal", "uniform", "exponential")
    }
    ns = (64, 256, 1024) if run.quick else (64, 256, 1024, 4096, 16384)
    for family in FAMILIES:
        first: Estimate | None = None
        for n in ns:
            # √log n is 0.057 off for normal logits at n = 256: whatever the seed that must be more
            # than the 4 standard errors and 2 per cent allowed
            many = 250_000 if family == "normal" else 60_000
            count = run.size(many if n <= 256 else 4000, 200_000)
            if family == "one gap":
                count = 1
            elif n > 1024:
                count = (1 << 26) // n
            parts = [
                torch.from_numpy(
                    np.atleast_1d(theory.critical_scale(draw_logits(run, family, size, n).numpy()))
                )
                for size in run.blocks(count, n)
            ]
            found = median(parts)
            found = found if count > 1 else found._replace(error=0.0)
            where: Where = {"n": n, GROWTH.bound: family}
            if family == "one gap":
                rows.append(ONE_GAP.row("Λ, 1/nat", math.log(n) / GAP, found, where))
            else:
                law = "gaussian" if family == "normal" else family
                c, h = constants[family], float(theory.hazard_scale(law, n))
                error = math.hypot(found.error, c.error * h)
                rows.append(
                    LIMIT.row("median Λ, 1/nat", c.value * h, Estimate(found.value, error), where)
                )
            if family == "normal":
                level = math.sqrt(2 * math.log(n))
                rows.append(LEVEL.row("median Λ, 1/nat", level, found, where))
            if first is None:
                first = found
                continue
            growth = {
                "normal": math.sqrt(math.log(n) / math.log(ns[0])),
                "one gap": math.log(n) / math.log(ns[0]),
                "uniform": n / ns[0],
                "exponential": 1.0,
            }[family]
            ratio = found.value / first.value
            error = ratio * math.hypot(found.error / found.value, first.error / first.value)
            rows.append(GROWTH.row(f"Λ(n)/Λ({ns[0]})", growth, Estimate(ratio, error), where))
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Plot the critical scale Λ against n for every family of logits."""
    figure, [axes] = plot_style.new_figure(
        "The length law that attention needs depends on the logits",
        "Marks: median of Λ = max_j log j / g_(j) over sampled rows, g_(j) the gaps to the "
        f"maximum. Lines: c·h(b_n), and log n/Δ with Δ = {GAP:g} for one gap.",
        theme=theme,
    )
    for family, curve in zip(FAMILIES, plot_style.curves(len(FAMILIES), theme), strict=True):
        claim = "one gap" if family == "one gap" else "limit"
        own = record.of(claim, **{GROWTH.bound: family})
        n = [float(row.condition["n"]) for row in own]
        plot_style.draw_line_and_marks(
            axes, n, [row.predicted for row in own], n, [row.measured for row in own], curve,
            f"{family}: {GROWS[family]}",
            error=[row.error for row in own],
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(0.8, 20 * max(row.measured for row in record.of("limit")))
    ticks = [int(row.condition["n"]) for row in record.of("one gap")]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    plot_style.label(axes, x="keys n", y="critical scale Λ, 1/nat")
    plot_style.legend(axes, theme, where="upper left", title="logits: growth of Λ")
    return figure


EXPERIMENT = Experiment(
    name="gap_law",
    title="gap counts and the length law they ask for",
    prediction="Λ = sup_t log N(t)/t grows as √(2 log n) for iid normal logits (slowly: by the "
    "hazard rate at the top), is log n/Δ for one gap, ∝ n for uniform and constant for "
    "exponential ones",
    claims=(GROWTH, ONE_GAP, LEVEL, LIMIT),
    measure=measure,
    draw=draw,
)
