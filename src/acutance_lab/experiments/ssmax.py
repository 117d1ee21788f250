"""Scalable softmax: one key above the rest keeps its weight at any length."""

import math
from collections.abc import Iterator

import torch

from acutance import row_statistics, theory
from acutance_lab.experiment import Experiment, Run
from acutance_lab.figure import Axis, Lines, Page, Panel
from acutance_lab.record import Claim, Row

SOURCE = "Nakanishi (2025), arXiv:2501.19399, figure 1"
TOP, REST, S = 3.0, -2.0, 0.43
GAP = TOP - REST

FADES = Claim(
    "fades", "softmax leaves the one key half of the weight", "what one would expect of it",
    "holds only where", relation=">=", bound="n",
)  # fmt: skip
SSMAX = Claim(
    "ssmax", "with SSMax its weight is 1/(1 + (n − 1)·n^(−2.15)), near 1", SOURCE, within=1e-9,
    theorem=True,
)  # fmt: skip
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
    return float(row_statistics(torch.ones_like(key[:, :, :1]), key, scale=scale).top_weight)


def measure(run: Run) -> Iterator[Row]:
    """Weight of one key above n − 1 equal ones, with and without the factor s log n.

    For n from 2 to 10^5, at full size 10^6.
    """
    for n in (2, 4, 10, 30, 100, 148, 149, 150, 300, 1000, 10**4, 10**5, 10**6):
        if n == 10**6 and run.quick:
            continue
        plain, scaled = weight(n, 1.0), weight(n, S * math.log(n))
        ssmax, softmax = (1 / (1 + (n - 1) * rest) for rest in (n ** (-S * GAP), math.exp(-GAP)))
        yield SSMAX.row("weight", ssmax, scaled, {"n": n, "s": S})
        yield SOFTMAX.row("weight", softmax, plain, {"n": n})
        yield LEAST.row("weight", 0.8, scaled, {"n": n, "s": S})
        yield FADES.row("weight", 0.5, plain, {"n": n})
        for s in (0.1, 0.2):
            odds = float(n) ** (1 - s * GAP) * (1 - 1 / n)  # of the rest
            smaller = weight(n, s * math.log(n))
            yield CRITICAL.row("weight", 1 / (1 + odds), smaller, {"n": n, "s": s})
    needle = weight(1000, float(theory.needle_scale(1000, GAP)))
    yield CRITICAL.row("weight", 0.5, needle, {"n": 1000, "s": "needle_scale"})


EXPERIMENT = Experiment(
    "ssmax", "scalable softmax on one key above the rest",
    "weight e⁵/(e⁵ + n − 1) with softmax, 1/(1 + (n − 1)n^(−2.15)) with s = 0.43: 0.129 "
    "against 0.9997 at n = 1000; softmax keeps one half up to n = 149",
    (SSMAX, SOFTMAX, LEAST, FADES, CRITICAL), measure,
    Page(
        "Softmax fades with length; SSMax holds if s times the gap > 1",
        "One score of 3 among n − 1 scores of −2. Lines: closed forms. Marks: measured weight of "
        "the one key.",
        Panel(
            Axis("keys n", log=True), Axis("weight of the one key", limits=(-0.02, 1.04)),
            [
                Lines("ssmax", "n", f"SSMax, s = {S} (s·gap = 2.15)"),
                Lines("critical", "n", "SSMax, s = 0.2 (s·gap = 1)", where={"s": 0.2}),
                Lines("critical", "n", "SSMax, s = 0.1 (s·gap = 0.5)", where={"s": 0.1}),
                Lines("softmax", "n", "softmax"),
            ],
            legend=(0.53, 0.58),
        ),
    ),
)  # fmt: skip
