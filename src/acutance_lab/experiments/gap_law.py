"""Which length law measured scores need: the scale Λ above which a row's maximum stands alone."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from acutance import theory
from acutance_lab.experiment import (
    Draw,
    Experiment,
    Run,
    exponential,
    gaussian,
    median,
    ratio,
    uniform,
)  # fmt: skip
from acutance_lab.figure import Axis, Lines, Page, Panel
from acutance_lab.record import Claim, Estimate, Row, Where

SOURCE = "Hayase & Karakida (2026), arXiv:2605.12697"
GAP = 0.5


def one_gap(run: Run, rows: int, n: int) -> torch.Tensor:
    """Logits (rows, n), all 0 but the first."""
    logits = torch.zeros(rows, n, dtype=torch.float64)
    logits[:, 0] = GAP
    return logits


#: Families of logits: what draws them, how Λ grows, and by which factor from n to N.
FAMILIES: dict[str, tuple[Draw, str, Callable[[int, int], float]]] = {
    "normal": (gaussian, "√log n", lambda n, N: math.sqrt(math.log(N) / math.log(n))),
    "one gap": (one_gap, "log n", lambda n, N: math.log(N) / math.log(n)),
    "uniform": (uniform, "n", lambda n, N: N / n),
    "exponential": (exponential, "constant", lambda n, N: 1.0),
}

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
    if kind == "exponential tail":
        gaps = np.log(arrivals[:, 1:] / arrivals[:, :1])
    else:
        gaps = arrivals[:, 1:] - arrivals[:, :1]
    return median(torch.from_numpy((np.log(np.arange(2, 201)) / gaps).max(axis=1)))


def critical_scale(run: Run, family: str, n: int) -> Estimate:
    """Median of the critical scale Λ over rows of n logits of a family."""
    # √log n is 0.057 off for normal logits at n = 256: whatever the seed that must be more than the
    # 4 standard errors and 2 per cent allowed
    many = 250_000 if family == "normal" else 60_000
    count = run.size(many if n <= 256 else 4000, 200_000)
    if family == "one gap":
        count = 1
    elif n > 1024:
        count = (1 << 26) // n
    draw = FAMILIES[family][0]
    scales = [
        np.atleast_1d(theory.critical_scale(draw(run, size, n).numpy()))
        for size in run.blocks(count, n)
    ]
    estimate = median([torch.from_numpy(block) for block in scales])
    return estimate if count > 1 else estimate._replace(error=0.0)


def measure(run: Run) -> Iterator[Row]:
    """Median over sampled rows of the critical scale Λ, for each family of logits and n.

    The median, since the mean is infinite. It is compared with the law predicted for the family.
    """
    samples = run.size(60000, 200000)
    tail = limit_constant("exponential tail", samples, run.seed)
    constants = {"normal": tail, "exponential": tail}
    constants["uniform"] = limit_constant("sharp end", samples, run.seed)
    ns = (64, 256, 1024) if run.quick else (64, 256, 1024, 4096, 16384)
    for family, (_, _, growth) in FAMILIES.items():
        first: Estimate | None = None
        for n in ns:
            scale = critical_scale(run, family, n)
            where: Where = {"n": n, GROWTH.bound: family}
            if family == "one gap":
                yield ONE_GAP.row("Λ, 1/nat", math.log(n) / GAP, scale, where)
            else:
                law = "gaussian" if family == "normal" else family
                c, h = constants[family], float(theory.hazard_scale(law, n))
                both = Estimate(scale.value, math.hypot(scale.error, c.error * h))
                yield LIMIT.row("median Λ, 1/nat", c.value * h, both, where)
            if family == "normal":
                yield LEVEL.row("median Λ, 1/nat", math.sqrt(2 * math.log(n)), scale, where)
            if first is None:
                first = scale
            else:
                grown = ratio(scale, first)
                yield GROWTH.row(f"Λ(n)/Λ({ns[0]})", growth(ns[0], n), grown, where)


_NAMES = {family: f"{family}: {grows}" for family, (_, grows, _) in FAMILIES.items()}
EXPERIMENT = Experiment(
    "gap_law", "gap counts and the length law they ask for",
    "Λ = sup_t log N(t)/t grows as √(2 log n) for iid normal logits (slowly: by the "
    "hazard rate at the top), is log n/Δ for one gap, ∝ n for uniform and constant for "
    "exponential ones",
    (GROWTH, ONE_GAP, LEVEL, LIMIT), measure,
    Page(
        "The length law that attention needs depends on the logits",
        "Marks: median of Λ = max_j log j / g_(j) over sampled rows, g_(j) the gaps to the "
        f"maximum. Lines: c·h(b_n), and log n/Δ with Δ = {GAP:g} for one gap.",
        Panel(
            Axis("keys n", log=True, ticks=(64, 256, 1024, 4096, 16384)),
            Axis("critical scale Λ, 1/nat", log=True, limits=(0.8, None)),
            [Lines(key, "n", _NAMES, by="logits", bars=True) for key in ("one gap", "limit")],
            legend="upper left", legend_title="logits: growth of Λ",
        ),
    ),
)  # fmt: skip
