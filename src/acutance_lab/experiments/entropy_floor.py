"""The lowest entropy that logits of a given norm allow, and the row that reaches it."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from acutance import theory
from acutance_lab.experiment import Experiment, Run, statistics
from acutance_lab.figure import Axis, Lines, Page, Panel
from acutance_lab.record import Claim, Row, Where

SOURCE = "Zhai et al. (2023), arXiv:2303.06296"
NORMS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0)
RANDOM = "least H of random rows, nat"
NS = (16, 256, 4096)

ATTAINED = Claim(
    "attained", "one logit above all others, alike, has exactly the least entropy", SOURCE,
    within=1e-9, theorem=True,
)  # fmt: skip
FLOOR = Claim(
    "floor", "no row of logits of norm s has less", SOURCE, relation=">=", rounding=1e-9,
    theorem=True,
)  # fmt: skip
REACHED = Claim("reached", "gradient descent on the measured entropy ends there", within=0.01)


def one_above_rest(n: int, norm: float) -> Tensor:
    """A row of n logits, (1, n), with mean 0 and a given norm, all equal but the first."""
    logits = torch.full((1, n), -norm / math.sqrt(n * (n - 1)), dtype=torch.float64)
    logits[0, 0] = norm * math.sqrt((n - 1) / n)
    return logits


def descend(logits: Tensor, norm: float, steps: int) -> Tensor:
    """Lowest entropies found by gradient descent over logits (rows, n) of a fixed Euclidean norm.

    Returns:
        Entropies in nats after ``steps`` steps, (rows,).
    """
    logits = logits / logits.norm(dim=1, keepdim=True) * norm
    for step in range(steps):
        logits.requires_grad_()
        (slope,) = torch.autograd.grad(statistics(logits).entropy.sum(), logits)
        logits = logits.detach()
        radial = (slope * logits).sum(1, keepdim=True) / norm**2
        along = slope - radial * logits
        pace = 0.3 * norm * (1 - step / steps)
        logits = logits - pace * along / along.norm(dim=1, keepdim=True).clamp(min=1e-300)
        logits = logits / logits.norm(dim=1, keepdim=True) * norm
    entropy: Tensor = statistics(logits).entropy
    return entropy


def measure(run: Run) -> Iterator[Row]:
    """Compare entropies of rows of logits with the lower bound for their norm.

    Three kinds of rows: the one that should attain the bound, random rows, and rows whose entropy
    was lowered by gradient descent.
    """
    starts, steps = run.size(64, 256), run.size(200, 1000)
    for n in NS:
        for norm in NORMS:
            least = float(theory.entropy_lower_bound(n, norm))
            where: Where = {"n": n, "s": norm}
            H = float(statistics(one_above_rest(n, norm)).entropy)
            yield ATTAINED.row("H of one above rest, nat", least, H, where)
            z = run.normal(starts, n)
            z = z - z.mean(1, keepdim=True)
            H = float(statistics(z / z.norm(dim=1, keepdim=True) * norm).entropy.min())
            yield FLOOR.row(RANDOM, least, H, where)
            if n == 16:
                H = float(descend(z, norm, steps).min())
                yield FLOOR.row("least H of descended rows, nat", least, H, where)
                yield REACHED.row("least H of descended rows, nat", least, H, where)


EXPERIMENT = Experiment(
    "entropy_floor", "the entropy floor of bounded logits",
    "H ≥ log(1 + (n−1)b) + s√(n(n−1))·b/(1 + (n−1)b), b = exp(−s√(n/(n−1))), attained "
    "by one key above the rest: 2.7168, 1.7675, 0.2137, 0.0056 at n = 16, s = 1, 3, 6, 10",
    (ATTAINED, FLOOR, REACHED), measure,
    Page(
        "Small logits cannot collapse: the entropy floor at logit norm s",
        "Lines: the closed form. Filled marks: one logit above the rest. Hollow marks: the least "
        "of random rows of that norm; none lies below its line.",
        Panel(
            Axis("norm s of the row's centred logits, nat"),
            Axis("entropy H, nat", limits=(-0.1, 10.2)),
            [
                Lines("attained", "s", "n = {:,}", by="n", style=0),
                Lines("floor", "s", by="n", quantity=RANDOM, line=False, hollow=True, style=0),
            ],
            legend="upper center", columns=3,
        ),
    ),
)  # fmt: skip
