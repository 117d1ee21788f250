"""The random energy model: above a critical scale a few keys hold the weight, whatever n."""

from collections.abc import Iterator

from acutance import theory
from acutance_lab.experiment import Experiment, Run, gaussian, gaussian_collision, mean, over_scales
from acutance_lab.figure import BROAD, Axis, Level, Lines, Page, Panel
from acutance_lab.record import Claim, Row, Where

SOURCE = "Derrida (1981), Phys. Rev. B 24, 2613"
RATIOS = (0.25, 0.5, 0.75, 1.05, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0)
BOUND = "γ/M_n"

COLLISION = Claim(
    "collision", "frozen: Σp² = 1 − m, m = M_n/γ", SOURCE, "holds only where",
    within=0.02, bound=BOUND, sense="from",
)  # fmt: skip
ENTROPY = Claim(
    "entropy", "frozen: H = ψ(1) − ψ(1 − m)", SOURCE, "holds only where",
    within=0.03, bound=BOUND, sense="from",
)  # fmt: skip
EXACT_Y = Claim("exact collision", "E Σp² at finite n is the exact integral")
EXACT_H = Claim("exact entropy", "E H at finite n is the exact integral")


def measure(run: Run) -> Iterator[Row]:
    """Mean entropy and collision of Gaussian rows whose deviation γ is below and above M_n.

    M_n is the expected maximum of n standard normal numbers. Above it, rows are also compared with
    the formulas for frozen rows.
    """
    for n in (16, 256, 4096) if run.quick else (16, 256, 4096, 65536):
        top = float(theory.expected_max_gauss(n))
        count = run.size(1000, 6000 if n <= 4096 else 1000)
        scales = [ratio * top for ratio in RATIOS]
        entropy = over_scales(run, gaussian, n, count, scales, ("entropy",))["entropy"]
        collision = gaussian_collision(run, n, count, scales)
        for at, ratio in enumerate(RATIOS):
            H, Y = mean(entropy[at]), collision[at]
            where: Where = {"n": n, BOUND: ratio}
            exact_Y = float(theory.expected_collision_gauss(n, scales[at]))
            exact_H = float(theory.expected_entropy_gauss(n, scales[at]))
            yield EXACT_Y.row("mean Σp²", exact_Y, Y, where)
            yield EXACT_H.row("mean H, nat", exact_H, H, where)
            if ratio > 1:
                yield COLLISION.row("mean Σp²", float(theory.frozen_collision(1 / ratio)), Y, where)
                yield ENTROPY.row("mean H, nat", float(theory.frozen_entropy(1 / ratio)), H, where)


_SCALE = Axis("scale in units of the maximum, γ/M_n", limits=(0.0, 6.3))
EXPERIMENT = Experiment(
    "freezing", "freezing of Gaussian logits",
    "with m = M_n/γ < 1: Σp² → 1 − m and H → ψ(1) − ψ(1 − m); at finite n the first is "
    "a few per cent low near γ = 2 M_n, the second too high by more",
    (COLLISION, ENTROPY, EXACT_Y, EXACT_H), measure,
    Page(
        "Above γ = M_n attention freezes onto a few keys, however many there are",
        "Thin lines: exact integrals at each n. Thick line: the frozen law of infinitely many "
        "keys, m = M_n/γ. Marks: mean over sampled rows.",
        Panel(
            _SCALE, Axis("collision Σp²", limits=(0.0, 1.0)),
            [
                Lines("collision", BOUND, "frozen law, n → ∞", marks=False, style=BROAD),
                Lines("exact collision", BOUND, "n = {:,}", by="n"),
            ],
            "collision", [Level(x=1.0)], legend="lower right",
        ),
        Panel(
            _SCALE, Axis("entropy H, nat", True, (0.2, 0.5, 1, 2, 5, 10), (0.15, 14)),
            [
                Lines("entropy", BOUND, marks=False, style=BROAD),
                Lines("exact entropy", BOUND, by="n"),
            ],
            "entropy", [Level(x=1.0)], legend=None,
        ),
    ),
)  # fmt: skip
