"""Sparsity of linear attention with weights of both signs: never below √(2/π) for Gaussian keys."""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from acutance import theory
from acutance_lab.experiment import Experiment, Run, mean, sparsity
from acutance_lab.figure import Axis, Level, Lines, Page, Panel
from acutance_lab.record import Claim, Record, Row, Where

SOURCE = "Su Jianlin, kexue.fm/archives/9889, eq. 7"
BETAS = (0.0, 0.5, 1.0, 2.0, 4.0)
GAMMAS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
BOUND = math.sqrt(2 / math.pi)

FORMULA = Claim(
    "formula", "S = (√(2/π)·e^(−u²/2) + u·erf(u/√2)) / √(1 + u²), u = β/γ", SOURCE, within=0.001
)
LEAST = Claim(
    "bounded", "linear attention has S ≥ √(2/π) whatever the query", SOURCE, "holds only where",
    relation=">=", within=0.001, bound="keys", sense="in",
)  # fmt: skip


def measure(run: Run) -> Iterator[Row]:
    """Mean sparsity S of signed weights: normal scores of mean β and deviation γ, then others."""
    n, count = run.size(4096, 65536), run.size(100, 200)
    blocks = [run.normal(size, n) for size in run.blocks(count, n)]
    for beta in BETAS:
        for gamma in GAMMAS:
            estimate = mean([sparsity(beta + gamma * z) for z in blocks])
            where: Where = {"β": beta, "γ": gamma, "n": n}
            yield FORMULA.row(
                "mean S", float(theory.sparsity_identity(beta, gamma)), estimate, where
            )
            yield LEAST.row("mean S", BOUND, estimate, where | {LEAST.bound: "Gaussian"})
    # one component of the query matters, and the keys' law is seen as it is
    others: dict[str, list[Tensor]] = {"Laplace": [], "nine in ten zero": []}
    for z in blocks:
        u = 2 * run.uniform(*z.shape) - 1
        others["Laplace"].append(sparsity(-u.sign() * (1 - u.abs()).log()))
        others["nine in ten zero"].append(sparsity(z * (run.uniform(*z.shape) < 0.1)))
    for law, sampled in others.items():
        yield LEAST.row("mean S", BOUND, mean(sampled), {"n": n} | {LEAST.bound: law})


def _name_others(axes: Any, record: Record, theme: Any) -> None:
    """Name the levels of keys that are not Gaussian, at the right edge."""
    for row in record.of("bounded"):
        law = row.condition[LEAST.bound]
        if law != "Gaussian":
            axes.annotate(
                f"keys: {law}", (11.0, row.measured), (8.6, row.measured + 0.03), ha="right",
                va="bottom", color=theme.ink, size=9.5,
                arrowprops={"arrowstyle": "->", "color": theme.ink},
            )  # fmt: skip


EXPERIMENT = Experiment(
    "sparsity_identity", "sparsity of linear attention",
    "S is even in β, rises with |β|/γ and is least at β = 0, where it is √(2/π) = "
    "0.7979; that bound is a property of Gaussian keys, not of linear attention",
    (FORMULA, LEAST), measure,
    Page(
        "Linear attention over Gaussian keys cannot be sparse",
        lambda record: "Lines: eq. 7 of article 9889. Marks: mean over sampled rows of "
        f"{record.of('formula')[0].condition['n']:,} keys. Dotted: √(2/π), the bound for Gaussian "
        "keys; keys of other laws, at the right edge, go below it.",
        Panel(
            Axis(
                "standard deviation of the scores γ = σ‖q‖", log=True,
                ticks=(0.25, 0.5, 1, 2, 5, 10), limits=(0.22, 11),
            ),
            Axis("sparsity S = E|a| / √E[a²]", limits=(0.2, 1.02)),
            [Lines("formula", "γ", "β = {:g}", by="β")],
            levels=[Level(y=BOUND)], legend="lower left", also=_name_others,
        ),
    ),
)  # fmt: skip
