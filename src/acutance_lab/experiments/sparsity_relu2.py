"""Sparsity of squared-ReLU weights over Gaussian scores: sharp only where β/γ is far below 0."""

import math
from collections.abc import Iterator

import torch
from scipy.special import ndtr

from acutance import theory
from acutance_lab.experiment import Experiment, Run, difference, mean, sparsity
from acutance_lab.figure import Axis, Level, Lines, Page, Panel
from acutance_lab.record import Claim, Row, Where

SOURCE = "Su Jianlin, kexue.fm/archives/9889, eq. 6"
BETAS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
GAMMAS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
BOUND = 1 / math.sqrt(6)

FORMULA = Claim(
    "formula", "S = M₂/√M₄, a function of u = β/γ alone", SOURCE, "holds only where",
    within=0.02, bound="n·Φ(u)", sense="from",
)  # fmt: skip
PRINTED = Claim(
    "printed", "eq. 6, typeset rightly, is M₂/√M₄", SOURCE, rounding=0.0, within=1e-9, theorem=True
)
BOUNDED = Claim("bounded", "for β ≥ 0, S ≥ 1/√6", SOURCE, relation=">=", within=0.005)
FLOOR = Claim("floor", "S ≥ 1/√n in every row", relation=">=", theorem=True)
OPPOSITE = Claim("opposite", "for β < 0, a smaller γ is sparser", SOURCE, relation="<=")


def printed(beta: float, gamma: float) -> float:
    """Sparsity by equation 6 of the article, term by term as printed there."""
    e, square = math.exp(-(beta**2) / (2 * gamma**2)), beta**2 + gamma**2
    tail = math.erf(beta / (math.sqrt(2) * gamma)) + 1
    top = e * (math.sqrt(2) * beta * gamma + math.sqrt(math.pi) / e * square * tail)
    fourth = beta**4 + 6 * beta**2 * gamma**2 + 3 * gamma**4
    first = 2 * math.sqrt(2) * beta * gamma * e * (beta**2 + 5 * gamma**2)
    below = math.sqrt(first + 2 * math.sqrt(math.pi) * fourth * tail)
    return float(top / (math.pi**0.25 * below))


def measure(run: Run) -> Iterator[Row]:
    """Mean sparsity S of rows with a positive score, for each mean β and deviation γ."""
    n, count = run.size(4096, 65536), run.size(60, 100)
    blocks = [run.normal(size, n) for size in run.blocks(count, n)]
    for beta in BETAS:
        before = None
        for gamma in GAMMAS:
            u = beta / gamma
            S = float(theory.sparsity_relu2(beta, gamma))
            where: Where = {"β": beta, "γ": gamma, "n": n, FORMULA.bound: n * float(ndtr(u))}
            if u > -3:
                yield PRINTED.row("S", printed(beta, gamma), S, where)
            sampled = torch.cat([sparsity((beta + gamma * z).relu().square()) for z in blocks])
            sampled = sampled[torch.logical_not(sampled.isnan())]  # rows in which a key is active
            if len(sampled) < count / 2:
                continue
            estimate = mean(sampled)
            yield FORMULA.row("mean S", S, estimate, where)
            yield FLOOR.row("least S", n**-0.5, float(sampled.min()), where)
            if beta >= 0:
                yield BOUNDED.row("mean S", BOUND, estimate, where)
            elif before is not None:
                rise = difference(before, estimate)
                yield OPPOSITE.row("S here − S at next γ", 0, rise, where)
            before = estimate


EXPERIMENT = Experiment(
    "sparsity_relu2", "sparsity of squared-ReLU weights",
    "S depends on u = β/γ alone and rises with it; S ≥ 1/√6 for β ≥ 0, S → 0 only as "
    "β/γ → −∞; the formula needs many active keys, n·Φ(u) ≫ 1; one active key has S = 1/√n",
    (FORMULA, PRINTED, BOUNDED, OPPOSITE, FLOOR), measure,
    Page(
        "Squared ReLU is sparse only where most scores are negative",
        lambda record: "Lines: eq. 6 of article 9889. Marks: mean over sampled rows of "
        f"{record.of('formula')[0].condition['n']:,} keys; they leave the line where too few keys "
        "are active. Dotted: 1/√6, the bound for β ≥ 0.",
        Panel(
            Axis("standard deviation of the scores γ = σ‖q‖", True, (0.25, 0.5, 1, 2, 5, 10)),
            Axis("sparsity S = E|a| / √E[a²]", limits=(0.0, 1.02)),
            [Lines("formula", "γ", "β = {:g}", by="β")],
            levels=[Level(y=BOUND)], legend="upper right", columns=2,
        ),
    ),
)  # fmt: skip
