"""How much a softmax over cosines can say at temperature τ, and the τ that lets it say enough."""

import math
from collections.abc import Iterator

import torch

from acutance import theory
from acutance_lab.experiment import Experiment, Run, cosine, mean, over_scales, statistics
from acutance_lab.figure import Axis, Curve, Level, Lines, Page, Panel, Points
from acutance_lab.record import Claim, Record, Row, values

SOURCE = "Su Jianlin, kexue.fm/archives/9593"
TAUS = (2.0, 1.0, 0.5, 0.2, 0.1, 0.05)
FRACTIONS = (0.5, 0.9, 0.99)
D = 16

RANGE = Claim(
    "range", "at τ = 1 a row of cosines has H ≥ log n − 0.4745", SOURCE, relation="<=",
    theorem=True,
)  # fmt: skip
LIMIT = Claim("limit", "that range is reached as n grows: D(2) = 0.474474647", within=0.005)
SHARE = Claim("share", "with 20.55 % of the cosines at +1, the others at −1", within=0.002)
EXACT = Claim(
    "exact", "the least entropy at finite n is that of two levels", within=1e-9, theorem=True
)
WIDENS = Claim(
    "widens", "the τ that allows a row 50, 90 or 99 % of log n does", SOURCE, within=1e-6,
    theorem=True,
)  # fmt: skip
RANDOM = Claim("random", "random keys: the exact integral over cosines in R^d")
LINEAR = Claim(
    "linear", f"random keys at scale λd lose 0.24·λd nat (d = {D})",
    "Su Jianlin, kexue.fm/archives/8823", "holds only where", within=0.02,
    bound="λ", sense="in",
)  # fmt: skip


def best_two_level(n: int, tau: float) -> tuple[float, int]:
    """Largest information log n − H of rows with k cosines at +1 and n − k at −1, and its k.

    Found by trying many k.
    """
    counts = torch.arange(1, n)
    if n > 512:  # a coarse grid first, then every count near its best
        grid = torch.unique(torch.logspace(0, math.log10(n - 1), 60).long())
        _, near = _information(n, tau, grid)
        at = int((grid == near).nonzero())
        low, high = int(grid[max(at - 1, 0)]), int(grid[min(at + 1, len(grid) - 1)])
        while high - low > 8:  # information rises, then falls
            middle = (low + high) // 2
            _, best = _information(n, tau, torch.tensor([middle, middle + 1]))
            low, high = (middle, high) if best > middle else (low, middle + 1)
        counts = torch.arange(low, high + 1)
    return _information(n, tau, counts)


def _information(n: int, tau: float, counts: torch.Tensor) -> tuple[float, int]:
    """Largest information of a row with the given numbers of keys at cosine +1, and its number."""
    keys = torch.arange(n)
    best = (-1.0, 0)
    for block in counts.split(max(1, (1 << 20) // n)):
        cosines = torch.where(keys < block[:, None], 1.0, -1.0).double()
        information = statistics(cosines / tau).information
        at = int(information.argmax())
        best = max(best, (float(information[at]), int(block[at])), key=lambda pair: pair[0])
    return best


def measure(run: Run) -> Iterator[Row]:
    """Information log n − H of rows of cosines at temperature τ, compared with theory.

    Rows with two values and random rows are compared with bounds, rows of random keys in d
    dimensions with expected values.
    """
    most = float(theory.information_range_limit(1.0))
    for n in (16, 256, 4096) if run.quick else (16, 256, 4096, 65536):
        for tau in TAUS:
            said, k = best_two_level(n, tau)
            exact = math.log(n) - float(theory.cosine_entropy_lower_bound(n, tau))
            yield EXACT.row("log n − H, nat", exact, said, {"n": n, "τ": tau, "k": k})
            if tau == 1:
                yield RANGE.row("log n − H of two levels, nat", most, said, {"n": n})
                yield LIMIT.row("log n − H of two levels, nat", most, said, {"n": n})
                if n >= 4096:
                    A = 2.0
                    top = (A / -math.expm1(-A) - 1) / math.expm1(A)
                    yield SHARE.row("k / n", top, k / n, {"n": n})
        z = 2 * run.uniform(run.size(64, 512), n) - 1
        corners = torch.where(run.uniform(*z.shape) < 0.2055, 1.0, -1.0).double()
        for name, cosines in {"even": z, "corners": corners}.items():
            said = float(statistics(cosines).information.max())
            yield RANGE.row(f"log n − H of random rows ({name}), nat", most, said, {"n": n})
        for fraction in FRACTIONS:
            tau = float(theory.tau_for_information(n, fraction))
            share = best_two_level(n, tau)[0] / math.log(n)
            yield WIDENS.row("share of log n", fraction, share, {"n": n, "f": fraction, "τ": tau})
    n, count = run.size(4096, 16384), run.size(1000, 2000)
    lams = (1 / math.sqrt(D), 0.5, 1.0, 2.0)
    sampled = over_scales(run, cosine(D), n, count, [lam * D for lam in lams], ("information",))
    for lam, information in zip(lams, sampled["information"], strict=True):
        H = float(theory.expected_entropy(n, lam * D, "cosine", d=D))
        estimate, where = mean(information), {"n": n, "d": D, "λ": lam}
        yield RANDOM.row("log n − H, nat", math.log(n) - H, estimate, where)
        yield LINEAR.row("log n − H, nat", 0.24 * lam * D, estimate, where)


def _needed(record: Record) -> Iterator[Curve]:
    for fraction in FRACTIONS:
        rows = record.of("widens", f=fraction)
        points = Points(values(rows, "n"), [float(row.condition["τ"]) for row in rows])
        yield Curve(f"{fraction:.0%} of log n", points, points)


EXPERIMENT = Experiment(
    "temperature", "the entropy range of cosine attention",
    "log n − H ≤ 0.474474647 at τ = 1, reached with 20.55 % of the cosines at +1; "
    "90 % of log n needs τ = 0.340, 0.241, 0.183, 0.147 at n = 16, 256, 4096, 65536",
    (RANGE, LIMIT, SHARE, EXACT, WIDENS, RANDOM, LINEAR), measure,
    Page(
        "A softmax over cosines says at most 0.4745 nat at τ = 1; a smaller τ lets it say more",
        "Lines: closed form. Marks: the best row found by trying two-level rows. Right: the "
        "temperature that allows a row a share of log n.",
        Panel(
            Axis("temperature τ", log=True, ticks=(0.05, 0.1, 0.2, 0.5, 1, 2)),
            Axis("most information log n − H, nat", True, (0.1, 0.4745, 1, 3, 10), (0.07, 20)),
            [Lines("exact", "τ", "n = {:,}", by="n")], "range",
            lambda record: [Level(1.0, float(theory.information_range_limit(1.0)))],
            legend="upper right",
        ),
        Panel(
            Axis("keys n", log=True, ticks=(16, 256, 4096, 65536)),
            Axis("temperature τ", limits=(0.0, 0.6)), [_needed], "temperature needed",
            legend="upper right",
        ),
    ),
)  # fmt: skip
