"""Entropy and collision of Gaussian logits at finite n: exact integrals and population formulas."""

import math
from collections.abc import Iterator

import numpy as np

from acutance import theory
from acutance_lab.experiment import Experiment, Run, gaussian, gaussian_collision, mean, over_scales
from acutance_lab.figure import GREY, Axis, Lines, Page, Panel
from acutance_lab.record import Claim, Row, Where

SOURCE = "Su Jianlin, kexue.fm/archives/8823 and 9889, in the limit of many keys"
GAMMAS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0)
BOUND = "γ/√(2 log n)"

ENTROPY = Claim("entropy", "E H is the exact integral, for every n and γ")
COLLISION = Claim("collision", "E Σp² is the exact integral, for every n and γ")
POPULATION_H = Claim(
    "population entropy", "H = log n − γ²/2", SOURCE, "holds only where", within=0.02, bound=BOUND
)
POPULATION_Y = Claim(
    "population collision", "Σp² = exp(γ²)/n", SOURCE, "holds only where", within=0.02, bound=BOUND
)


def measure(run: Run) -> Iterator[Row]:
    """Mean entropy H and collision Σp² of sampled Gaussian rows, for each n and deviation γ.

    Each is compared with the exact integral and with the formula for infinitely many keys.
    """
    for n in (16, 256, 4096) if run.quick else (16, 256, 4096, 65536):
        count = run.size(1000, 4000 if n <= 4096 else 1000)
        entropy = over_scales(run, gaussian, n, count, GAMMAS, ("entropy",))["entropy"]
        collision = gaussian_collision(run, n, count // 2, GAMMAS)
        exact_H = np.asarray(theory.expected_entropy_gauss(n, GAMMAS))
        exact_Y = np.asarray(theory.expected_collision_gauss(n, GAMMAS))
        for at, gamma in enumerate(GAMMAS):
            H, Y = mean(entropy[at]), collision[at]
            where: Where = {"n": n, "γ": gamma, BOUND: gamma / math.sqrt(2 * math.log(n))}
            yield ENTROPY.row("mean H, nat", exact_H[at], H, where)
            yield COLLISION.row("mean Σp²", exact_Y[at], Y, where)
            yield POPULATION_H.row("mean H, nat", math.log(n) - gamma**2 / 2, H, where)
            yield POPULATION_Y.row("mean Σp²", math.exp(gamma**2) / n, Y, where)


EXPERIMENT = Experiment(
    "finite_n", "Gaussian logits at finite n",
    "E H and E Σp² are the exact integrals (4 standard errors everywhere); exp(γ²)/n "
    "breaks at about half the γ at which log n − γ²/2 does",
    (ENTROPY, COLLISION, POPULATION_H, POPULATION_Y), measure,
    Page(
        "Gaussian logits at finite n: the exact integrals hold where the limit formulas break",
        "Lines: exact integrals. Thin grey lines: log n − γ²/2 and exp(γ²)/n, true for n → ∞ only. "
        "Marks: mean over sampled rows; standard errors are smaller than the marks.",
        Panel(
            Axis("logit deviation γ, nat"), Axis("entropy H, nat", limits=(0.0, 11.6)),
            [
                Lines("population entropy", "γ", by="n", marks=False, style=GREY),
                Lines("entropy", "γ", "n = {:,}", by="n"),
            ],
            "entropy", legend="upper right",
        ),
        Panel(
            Axis("logit deviation γ, nat"), Axis("collision Σp²", log=True, limits=(7e-6, 1.3)),
            [
                Lines("population collision", "γ", by="n", marks=False, style=GREY),
                Lines("collision", "γ", by="n"),
            ],
            "collision", legend=None,
        ),
    ),
)  # fmt: skip
