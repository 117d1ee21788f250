"""A large scale and the gradient: the typical row loses it, the mean over rows does not."""

import math
from collections.abc import Iterator

import numpy as np
import torch

from acutance import theory
from acutance_lab.experiment import Experiment, Run, gaussian, mean, median, over_scales
from acutance_lab.figure import Axis, Level, Lines, Page, Panel
from acutance_lab.record import Claim, Row, untested_row

N = 512
SU_GRADIENT = "Su Jianlin, kexue.fm/archives/9812"
SOURCE = "Su Jianlin, kexue.fm/archives/9593"
LAMBDAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 40.0)

VANISHES = Claim(
    "vanishes", "beyond its best scale the mean gradient λ(1 − Σp²) falls", SU_GRADIENT,
    "does not hold", relation="<=",
)  # fmt: skip
SURROGATE = Claim(
    "surrogate", "E λ(1 − Σp²) = λ(1 − exp(λ²)/n), greatest at λ = 2.008 for n = 512",
    SU_GRADIENT, "holds only where", within=0.02, bound="λ",
)  # fmt: skip
EXACT = Claim("exact", "E λ(1 − Σp²) = λ(1 − E Σp²), the exact integral, rising to M_n")
TYPICAL = Claim(
    "typical", "at scales of 4 M_n and more the median row has lost half of its best gradient",
    relation="<=",
)  # fmt: skip
ENTROPY = Claim("entropy", "E H falls from log n to 0 as the exact integral")
RANGE = Claim(
    "range", "0 ≤ H ≤ log n in every row", SOURCE, relation="<=", rounding=1e-9, theorem=True
)
FROBENIUS = Claim("frobenius", "E ‖J‖_F² = E[Σp² − 2 Σp³ + (Σp²)²], the exact integral")
TYPICAL_NORM = Claim(
    "typical_norm", "at scales of 4 M_n and more the median ‖λJ‖_F has lost half of its best",
    relation="<=",
)  # fmt: skip
TRACE = Claim(
    "trace", "1 − Σp² ≤ H in every row: low entropy, small Jacobian", relation="<=", theorem=True
)


def measure(run: Run) -> Iterator[Row]:
    """Entropy and softmax Jacobian of rows of 512 Gaussian logits, at each scale λ."""
    scales = LAMBDAS + tuple(3 * lam for lam in LAMBDAS)  # log Σp³ = log Z(3λ) − 3 log Z(λ)
    metrics = ("entropy", "jacobian_trace", "lse")
    sampled = over_scales(run, gaussian, N, run.size(4000, 40000), scales, metrics)
    lse, entropies, traces = sampled["lse"], sampled["entropy"], sampled["jacobian_trace"]
    squares = []  # ‖J‖_F² of each row
    for at in range(len(LAMBDAS)):
        collision, cubes = 1 - traces[at], torch.exp(lse[at + len(LAMBDAS)] - 3 * lse[at])
        squares.append((collision - 2 * cubes + collision * collision).clamp(min=0.0))
    exact_J = np.asarray(theory.expected_jacobian_fro2(N, LAMBDAS))
    exact_H = np.asarray(theory.expected_entropy_gauss(N, LAMBDAS))
    exact_Y = np.asarray(theory.expected_collision_gauss(N, LAMBDAS))
    best, top = float(theory.scale_gradmax_annealed(N)), float(theory.expected_max_gauss(N))
    medians = [median(lam * trace) for lam, trace in zip(LAMBDAS, traces, strict=False)]
    norms = [median(lam * square.sqrt()) for lam, square in zip(LAMBDAS, squares, strict=True)]
    peak, height = (max(estimate.value for estimate in estimates) for estimates in (medians, norms))
    before = None
    for at, lam in enumerate(LAMBDAS):
        H, trace = entropies[at], traces[at]
        gradient, where = mean(lam * trace), {"n": N, "λ": lam}
        surrogate = lam * (1 - math.exp(min(lam**2, 700)) / N)
        yield EXACT.row("mean λ(1 − Σp²)", lam * (1 - exact_Y[at]), gradient, where)
        yield SURROGATE.row("mean λ(1 − Σp²)", surrogate, gradient, where)
        yield ENTROPY.row("mean H, nat", exact_H[at], mean(H), where)
        yield RANGE.row("largest H, nat", math.log(N), float(H.max()), where)
        yield RANGE.row("largest −H, nat", 0.0, float(-H.min()), where)
        yield FROBENIUS.row("mean ‖J‖_F²", exact_J[at], mean(squares[at]), where)
        yield TRACE.row("largest 1 − Σp² − H", 0.0, float((trace - H).max()), where)
        if lam > best and before is not None:
            # the same rows at both scales: the step's own spread is its error
            yield VANISHES.row("mean λ(1 − Σp²), gain", 0.0, mean(lam * trace - before), where)
        if lam >= 4 * top:
            yield TYPICAL.row("median λ(1 − Σp²)", peak / 2, medians[at], where)
            yield TYPICAL_NORM.row("median ‖λJ‖_F", height / 2, norms[at], where)
        before = lam * trace
    for lam, estimate in zip(LAMBDAS, medians, strict=True):
        yield untested_row("median λ(1 − Σp²)", estimate, {"n": N, "λ": lam})


_SCALE = Axis("logit scale λ, nat", log=True, ticks=(0.25, 0.5, 1, 2, 5, 10, 20, 40))
EXPERIMENT = Experiment(
    "information", "entropy and gradient of large logits",
    "E λ(1 − Σp²) = E⟨z⟩ rises with λ without end, to M_n = 3.04 at n = 512; its median "
    "rises and falls; the annealed optimum 2.008 is that of a surrogate",
    (VANISHES, SURROGATE, EXACT, TYPICAL, FROBENIUS, TYPICAL_NORM, ENTROPY, RANGE, TRACE),
    measure,
    Page(
        "Large logits: entropy vanishes, and the typical gradient with it, but not the mean",
        f"n = {N} Gaussian logits. Lines: exact integrals. Marks: mean over sampled rows, and "
        "their median. Dotted: M_n, which the mean tends to.",
        Panel(
            _SCALE, Axis("entropy H, nat"),
            [Lines("entropy", "λ", "mean H")],
            "entropy", [Level(y=math.log(N), name="log n")], legend="lower left",
        ),
        Panel(
            _SCALE, Axis("gradient λ(1 − Σp²)", limits=(-0.15, 5.0)),
            [
                Lines("exact", "λ", "mean"),
                Lines("", "λ", "median", line=False, hollow=True),
                Lines("surrogate", "λ", "λ(1 − exp(λ²)/n), article 9812", marks=False),
            ],
            "gradient",
            lambda record: [Level(y=float(theory.expected_max_gauss(N)), name="M_n")],
            legend="upper left",
        ),
        Panel(
            _SCALE, Axis("‖J‖_F²"),
            [Lines("frobenius", "λ", "mean")],
            "Jacobian norm, squared", legend="upper left",
        ),
    ),
)  # fmt: skip
