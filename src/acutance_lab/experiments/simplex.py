"""Tokens at equal angles under attention scaled by log n: what they become has two phases."""

import math
from collections.abc import Iterator

import torch

from acutance import attention
from acutance_lab.experiment import Experiment, Run
from acutance_lab.figure import Axis, Level, Lines, Page, Panel
from acutance_lab.record import Claim, Row, Where

SOURCE = "Chen, Lin, Polyanskiy & Rigollet (2025), arXiv:2510.05554"
COSINES = (0.25, 0.5, 0.75)
FACTORS = (0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0, 3.0)  # γ(1 − ρ)
BOUND = "|γ(1 − ρ) − 1|·log n"
SHOWN = 0.5  # the cosine ρ of the figure

PHASES = Claim(
    "phases", "away from γ(1 − ρ) = 1: outputs' cosine → 1 below, ρ above", SOURCE,
    "holds only where", within=0.02, bound=BOUND, sense="from",
)  # fmt: skip
CRITICAL = Claim(
    "critical", "at γ(1 − ρ) = 1 the cosine of two outputs is 4ρ/(1 + 3ρ)", SOURCE,
    "holds only where", within=0.01, bound="n", sense="from",
)  # fmt: skip
EXACT = Claim("exact", "the cosine at finite n is the closed form", within=1e-9, theorem=True)


def closed_form(n: float, rho: float, gamma: float) -> float:
    """Cosine of two outputs of n tokens of unit norm and pairwise cosine ρ at scale γ log n."""
    odds = (n - 1) * float(n) ** (-gamma * (1 - rho))
    own, other = 1 / (1 + odds), odds / (1 + odds) / (n - 1)
    # an output is (own − other) x_i + other Σ x_j
    c = own - other
    total = n * (1 + (n - 1) * rho)  # ‖Σ x_j‖²
    share = 1 + (n - 1) * rho  # x_i · Σ x_j
    common = 2 * c * other * share + other**2 * total
    cosine: float = (c**2 * rho + common) / (c**2 + common)
    return cosine


def outputs_cosine(n: int, rho: float, gamma: float) -> float:
    """The cosine of :func:`closed_form`, measured by running attention on such tokens."""
    tokens = math.sqrt(1 - rho) * torch.eye(n, n + 1, dtype=torch.float64)
    tokens[:, n] = math.sqrt(rho)
    x = tokens[None, None]
    two = attention(x[:, :, :2], x, x, scale=gamma * math.log(n))
    assert isinstance(two, torch.Tensor)
    return float(torch.nn.functional.cosine_similarity(two[0, 0, 0], two[0, 0, 1], dim=0))


def measure(run: Run) -> Iterator[Row]:
    """Cosine of two attention outputs for n = 16 to 4096 tokens of equal pairwise cosine ρ.

    Gives a row for each n, ρ and scale γ log n, with the closed form or the limit as prediction.
    """
    for n in (16, 128, 1024) if run.quick else (16, 128, 1024, 4096):
        for rho in COSINES:
            for factor in FACTORS:
                gamma = factor / (1 - rho)
                cosine = outputs_cosine(n, rho, gamma)
                where: Where = {"n": n, "ρ": rho, "γ(1 − ρ)": factor}
                yield EXACT.row("cosine", closed_form(n, rho, gamma), cosine, where)
                if factor == 1:
                    yield CRITICAL.row("cosine", 4 * rho / (1 + 3 * rho), cosine, where)
                else:
                    far: Where = {BOUND: abs(factor - 1) * math.log(n)}
                    yield PHASES.row("cosine", 1.0 if factor < 1 else rho, cosine, where | far)


EXPERIMENT = Experiment(
    "simplex", "tokens at equal angles, logits scaled by γ log n",
    "outputs' cosine → 1, 4ρ/(1 + 3ρ), ρ for γ below, at, above 1/(1 − ρ), for "
    "n ≫ 1; 0.800 at ρ = ½, γ = 2",
    (CRITICAL, PHASES, EXACT), measure,
    Page(
        "Logits scaled by γ log n: tokens merge below a critical γ",
        f"Tokens of pairwise cosine ρ = {SHOWN}. Lines: closed form. Marks: attention run on such "
        "tokens. At the critical γ the cosine of two outputs is 4ρ/(1 + 3ρ) = 0.8 for n ≫ 1.",
        Panel(
            Axis("scale over its critical value, γ(1 − ρ)"),
            Axis("cosine of two outputs", limits=(0.48, 1.02)),
            [Lines("exact", "γ(1 − ρ)", "n = {:,}", by="n", where={"ρ": SHOWN})],
            levels=[Level(1.0, 4 * SHOWN / (1 + 3 * SHOWN), "critical point")],
            legend="upper right",
        ),
    ),
)  # fmt: skip
