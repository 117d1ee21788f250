"""Weights that are a power of the score cannot be sharpened by a temperature: it cancels."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from acutance import theory
from acutance_lab.experiment import Experiment, Run, gaussian, mean, statistics
from acutance_lab.figure import Axis, Level, Lines, Page, Panel
from acutance_lab.record import Claim, Row, Where

SOURCE = "Su Jianlin, kexue.fm/archives/9019"
N = 1024
LAMBDAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)

#: From scores to the logarithm of the weights, before they are normalised by their sum.
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda scores: scores,
    "relu²": lambda scores: 2 * scores.relu().log(),
    "|x|": lambda scores: scores.abs().log(),
    "|x|³": lambda scores: 3 * scores.abs().log(),
}
#: Powers k and the share of keys that take part, for the entropies below.
POWERS = {"relu²": (2.0, 0.5), "|x|": (1.0, 1.0), "|x|³": (3.0, 1.0)}

SHARPENS = Claim(
    "sharpens", "multiplying the scores by λ > 1 lowers the entropy", "common practice",
    "holds only where", relation="<=", bound="weights", sense="in",
)  # fmt: skip
CANCELS = Claim("cancels", "λ leaves relu² and |x|^k unchanged", SOURCE, within=1e-9, theorem=True)
ENTROPY = Claim(
    "entropy", "there H = log n + log E|x|^k − E|x|^k log|x|^k / E|x|^k, for any λ", within=0.005
)
EXP = Claim("exp", "exp: E H is the exact integral at every λ")


def power_entropy(n: int, k: float, share: float) -> float:
    """Entropy in nats, for large n, of n weights |z|^k of normal z, a ``share`` of them not 0."""
    moment = 2 ** (k / 2) * math.gamma((k + 1) / 2) / math.sqrt(math.pi)
    digamma = float(torch.special.digamma(torch.tensor((k + 1) / 2, dtype=torch.float64)))
    log_mean = k / 2 * (math.log(2) + digamma)  # E |z|^k log |z|^k over E |z|^k
    return math.log(n * share) + math.log(moment) - log_mean


def measure(run: Run) -> Iterator[Row]:
    """Mean entropy of the same Gaussian rows for each kind of weights and scale λ of the scores."""
    z = gaussian(run, run.size(256, 4096), N)
    exact = np.asarray(theory.expected_entropy_gauss(N, LAMBDAS))
    for kind, weigh in WEIGHTS.items():
        before = None
        for at, lam in enumerate(LAMBDAS):
            H = torch.cat([statistics(weigh(lam * block)).entropy for block in z.split(128)])
            where: Where = {"weights": kind, "λ": lam, "n": N}
            if kind == "exp":
                yield EXP.row("mean H, nat", exact[at], mean(H), where)
            else:
                yield ENTROPY.row("mean H, nat", power_entropy(N, *POWERS[kind]), mean(H), where)
            if before is not None:
                # at least a hundredth of a nat, each time λ doubles
                yield SHARPENS.row("H at λ − H at λ/2, nat", -0.01, mean(H - before), where)
                if kind != "exp":
                    change = float((H / before).sub(1).abs().max())
                    yield CANCELS.row("H at λ / H at λ/2", 1.0, 1 + change, where)
            before = H


EXPERIMENT = Experiment(
    "homogeneous", "temperature on homogeneous weights",
    "f(λx) = λ^k f(x) makes λ cancel in f(s)/Σf(s): the entropy of relu² and |x|^k is "
    "the same at every λ, that of exp falls",
    (SHARPENS, CANCELS, ENTROPY, EXP), measure,
    Page(
        "A temperature sharpens exp and nothing that is a power",
        f"n = {N} Gaussian scores multiplied by λ; weights are normalised by their sum. Lines: "
        "theory. Marks: mean over sampled rows.",
        Panel(
            Axis("scale λ of the scores", log=True, ticks=LAMBDAS),
            Axis("entropy H, nat", limits=(0.0, 7.4)),
            [Lines("exp", "λ", "exp"), Lines("entropy", "λ", "{}", by="weights")],
            levels=[Level(y=math.log(N), name="log n")],
            legend="lower left", legend_title="weights ∝",
        ),
    ),
)  # fmt: skip
