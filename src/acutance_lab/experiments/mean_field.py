"""The mean-field entropy log n − λ(s_max − s̄): a bound, and the two errors that complete it."""

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch

from acutance import theory
from acutance_lab.experiment import Experiment, Run, gaussian, mean, statistics, uniform
from acutance_lab.figure import Axis, Lines, Page, Panel
from acutance_lab.record import Claim, Estimate, Row, Where

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


def measure(run: Run) -> Iterator[Row]:
    """Check H = bound + J + G on sampled rows, and J and G against their expectations.

    For each family of logits, n and scale λ; J is the Jensen gap and G the max gap.
    """
    for n in (16, 4096) if run.quick else (16, 256, 4096, 65536):
        count = run.size(400, 2000 if n <= 4096 else 400)
        for family in FAMILIES:
            if family == "one-hot":
                scores = torch.zeros(1, n, dtype=torch.float64)
                scores[0, 0] = 1.0
            else:
                law = gaussian if family == "Gaussian" else uniform
                scores = torch.cat([law(run, size, n) for size in run.blocks(count, n)])
            for lam in LAMBDAS:
                yield from _of_scores(family, scores, lam)


def _of_scores(family: str, scores: torch.Tensor, lam: float) -> Iterator[Row]:
    """Rows on scores (rows, n) of a family at a scale."""
    n = scores.shape[1]
    blocks = (lam * scores).split(max(1, (1 << 17) // n))
    stats = [statistics(block) for block in blocks]
    H = torch.cat([entropy_by_definition(block) for block in blocks])
    rows = {name: torch.cat([own[name] for own in stats]) for name in METRICS}
    means = {
        name: mean(metric) if len(scores) > 1 else Estimate(float(metric), 0.0)
        for name, metric in rows.items()
    }
    total = rows["mean_field_entropy"] + rows["jensen_gap"] + rows["max_gap"]
    furthest = int((total - H).abs().argmax())
    J, G = expectation(family, n, lam)
    H_mf = means["mean_field_entropy"].value
    where: Where = {"logits": family, "n": n, "λ": lam}
    depth = {BOUND: (math.log(n) - H_mf) / math.log(n)}
    bound = float((rows["mean_field_entropy"] - H).max())
    off = float(total[furthest]), float(H[furthest])
    yield APPROXIMATE.row("mean H, nat", H_mf, means["entropy"], where | depth)
    yield IDENTITY.row("H of the row furthest off, nat", *off, where)
    yield LOWER.row("largest H_mf − H, nat", 0.0, bound, where)
    yield JENSEN.row("mean J, nat", J, means["jensen_gap"], where)
    yield GAP.row("mean G, nat", G, means["max_gap"], where)


def _lines(family: str) -> list[Lines]:
    """The curves of a family of logits, at the largest n."""
    where: Where = {"logits": family}
    return [
        Lines("approximate", "λ", "H", where=where, largest="n", line=False),
        Lines("approximate", "λ", "H_mf", where=where, largest="n", marks=False),
        Lines("jensen", "λ", "J, logsumexp above the mean", where=where, largest="n"),
        Lines("gap", "λ", "G, maximum above ⟨s⟩", where=where, largest="n"),
    ]


EXPERIMENT = Experiment(
    "mean_field", "the mean-field entropy and its errors",
    "H = log n − λ(s_max − s̄) + J + G with J, G ≥ 0, so the approximation is a lower "
    "bound, close only while λ(s_max − s̄) is a few per cent of log n",
    (APPROXIMATE, IDENTITY, LOWER, JENSEN, GAP), measure,
    Page(
        "The mean-field entropy is a lower bound; two errors of one sign complete it",
        "At the largest n. Lines: exact expectations, and H_mf. Marks: mean over sampled rows. "
        "H = H_mf + J + G in every row. Below 0 the bound says nothing.",
        *(
            Panel(
                Axis("scale λ", limits=(-0.15, 8.3)), Axis("nat", limits=(-4.0, None)),
                _lines(family), f"{family} logits",
                legend="lower left" if family == "uniform" else None,
            )
            for family in FAMILIES
        ),
    ),
)  # fmt: skip
