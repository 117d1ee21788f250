"""How much a softmax over cosines can say at temperature τ, and the τ that lets it say enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from acutance import theory
from acutance.experiments.harness import sampling
from acutance.experiments.harness.experiment import Experiment, Run, mean, statistics
from acutance.experiments.harness.record import Claim, Record, Row
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    "widens",
    "the τ that allows a row 50, 90 or 99 % of log n does",
    SOURCE,
    within=1e-6,
    theorem=True,
)
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
    """Largest information of a row with the given numbers of keys at cosine +1, and its index."""
    place = torch.arange(n)
    best, which = -1.0, 0
    for part in counts.split(max(1, (1 << 20) // n)):
        cosines = torch.where(place < part[:, None], 1.0, -1.0).double()
        found = statistics(cosines / tau).information
        at = int(found.argmax())
        if float(found[at]) > best:
            best, which = float(found[at]), int(part[at])
    return best, which


def measure(run: Run) -> Sequence[Row]:
    """Information log n − H of rows of cosines at temperature τ, compared with theory.

    Rows with two values and random rows are compared with bounds, rows of random keys in d
    dimensions with expected values.
    """
    rows = []
    ns = (16, 256, 4096) if run.quick else (16, 256, 4096, 65536)
    most = float(theory.information_range_limit(1.0))
    for n in ns:
        for tau in TAUS:
            found, k = best_two_level(n, tau)
            exact = math.log(n) - float(theory.cosine_entropy_lower_bound(n, tau))
            rows.append(EXACT.row("log n − H, nat", exact, found, {"n": n, "τ": tau, "k": k}))
            if tau == 1:
                rows += [
                    RANGE.row("log n − H of two levels, nat", most, found, {"n": n}),
                    LIMIT.row("log n − H of two levels, nat", most, found, {"n": n}),
                ]
                if n >= 4096:
                    A = 2.0
                    top = (A / -math.expm1(-A) - 1) / math.expm1(A)
                    rows.append(SHARE.row("k / n", top, k / n, {"n": n}))
        z = 2 * run.uniform(run.size(64, 512), n) - 1
        corners = torch.where(run.uniform(*z.shape) < 0.2055, 1.0, -1.0).double()
        for name, cosines in {"even": z, "corners": corners}.items():
            found = float(statistics(cosines).information.max())
            rows.append(RANGE.row(f"log n − H of random rows ({name}), nat", most, found, {"n": n}))
        for fraction in FRACTIONS:
            tau = float(theory.tau_for_information(n, fraction))
            found, k = best_two_level(n, tau)
            rows.append(
                WIDENS.row(
                    "share of log n",
                    fraction,
                    found / math.log(n),
                    {"n": n, "f": fraction, "τ": tau},
                )
            )
    n, count = run.size(4096, 16384), run.size(1000, 2000)
    lams = (1 / math.sqrt(D), 0.5, 1.0, 2.0)
    sampled_rows = sampling.over_scales(
        run, sampling.cosine(D), n, count, [lam * D for lam in lams], ("information",)
    )
    for lam, information in zip(lams, sampled_rows["information"], strict=True):
        H = float(theory.expected_entropy(n, lam * D, "cosine", d=D))
        sampled = mean(information)
        rows += [
            RANDOM.row("log n − H, nat", math.log(n) - H, sampled, {"n": n, "d": D, "λ": lam}),
            LINEAR.row("log n − H, nat", 0.24 * lam * D, sampled, {"n": n, "d": D, "λ": lam}),
        ]
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Largest information against the temperature τ, and the τ needed for a share against n."""
    figure, [left, right] = plot_style.new_figure(
        "A softmax over cosines says at most 0.4745 nat at τ = 1; a smaller τ lets it say more",
        "Lines: closed form. Marks: the best row found by trying two-level rows. Right: the "
        "temperature that allows a row a share of log n.",
        panels=2,
        theme=theme,
    )
    line = np.geomspace(0.04, 2.2, 120)
    ns = list(dict.fromkeys(int(row.condition["n"]) for row in record.of("exact")))
    for n, curve in zip(ns, plot_style.curves(len(ns), theme), strict=True):
        own = record.of("exact", n=n)
        plot_style.draw_line_and_marks(
            left, line, math.log(n) - np.asarray(theory.cosine_entropy_lower_bound(n, line)),
            [row.condition["τ"] for row in own], [row.measured for row in own], curve, f"n = {n:,}",
        )  # fmt: skip
    left.plot(
        line, np.asarray(theory.information_range_limit(line)), color=theme.muted, linewidth=1.1,
        zorder=1.5, label="n → ∞",
    )  # fmt: skip
    plot_style.reference(left, theme, x=1.0, y=float(theory.information_range_limit(1.0)))
    wide = np.geomspace(16, 65536, 40)
    for fraction, curve in zip(FRACTIONS, plot_style.curves(3, theme), strict=True):
        own = record.of("widens", f=fraction)
        plot_style.draw_line_and_marks(
            right, wide, [float(theory.tau_for_information(int(n), fraction)) for n in wide],
            [row.condition["n"] for row in own], [row.condition["τ"] for row in own], curve,
            f"{fraction:.0%} of log n",
        )  # fmt: skip
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_ylim(0.07, 20)
    ticks = (0.05, 0.1, 0.2, 0.5, 1, 2)
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.set_yticks((0.1, 0.4745, 1, 3, 10), ["0.1", "0.4745", "1", "3", "10"])
    right.set_xscale("log", base=2)
    wider = (16, 256, 4096, 65536)
    right.set_xticks(wider, [f"{tick:,}" for tick in wider])
    for axes in (left, right):
        axes.minorticks_off()
    right.set_ylim(0.0, 0.6)
    plot_style.label(left, x="temperature τ", y="most information log n − H, nat", title="range")
    plot_style.label(right, x="keys n", y="temperature τ", title="temperature needed")
    plot_style.legend(left, theme, where="upper right")
    plot_style.legend(right, theme, where="upper right")
    return figure


EXPERIMENT = Experiment(
    name="temperature",
    title="the entropy range of cosine attention",
    prediction="log n − H ≤ 0.474474647 at τ = 1, reached with 20.55 % of the cosines at +1; "
    "90 % of log n needs τ = 0.340, 0.241, 0.183, 0.147 at n = 16, 256, 4096, 65536",
    claims=(RANGE, LIMIT, SHARE, EXACT, WIDENS, RANDOM, LINEAR),
    measure=measure,
    draw=draw,
)
