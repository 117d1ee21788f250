"""What scores say at initialisation, and weights that no temperature of the scores sharpens."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from scipy.special import digamma, roots_genlaguerre
from torch import Tensor
from torch.nn.functional import normalize

from acutance import row_statistics, theory
from acutance_lab.experiment import Measured, Run, experiment
from acutance_lab.figure import Axis, Level, Lines, Panel
from acutance_lab.record import Claim, Estimate, among, beyond, refuted, theorem, values
from acutance_lab.sampling import mean, statistics

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


def power_entropy(n: int, k: float, share: float) -> float:
    """Entropy in nats, for large n, of n weights |z|^k of normal z, a ``share`` of them not 0."""
    moment = 2 ** (k / 2) * math.gamma((k + 1) / 2) / math.sqrt(math.pi)
    log_mean = k / 2 * (math.log(2) + float(digamma((k + 1) / 2)))  # E |z|^k log |z|^k / E |z|^k
    return math.log(n * share) + math.log(moment) - log_mean


@experiment(
    among("sharpens", "multiplying the scores by λ > 1 lowers the entropy", "common practice",
          relation="<=", bound="weights"),
    theorem("cancels", "λ leaves relu² and |x|^k unchanged", "Su Jianlin, kexue.fm/archives/9019",
            within=1e-9),
    Claim("entropy", "there H = log n + log E|x|^k − E|x|^k log|x|^k / E|x|^k", within=0.005),
    Claim("exp", "exp: E H is the exact integral at every λ"),
    figure=[Panel(
        Axis("scale λ of the scores", log=True, ticks=LAMBDAS), Axis("entropy H, nat"),
        [Lines("exp", "λ", "exp"), Lines("entropy", "λ", "{}", by="weights")],
        levels=[Level(y=math.log(N), name="log n")], legend="weights ∝",
    )],
)  # fmt: skip
def homogeneous(run: Run) -> Iterator[Measured]:
    """Temperature on homogeneous weights.

    Mean entropy of the same Gaussian rows for each kind of weights and scale λ of the scores.

    Predicted: f(λx) = λ^k f(x) makes λ cancel in f(s)/Σf(s): the entropy of relu² and |x|^k is the
    same at every λ, that of exp falls.

    Figure: A temperature sharpens exp and nothing that is a power. n = 1024 Gaussian scores
    multiplied by λ; weights are normalised by their sum. Lines: theory. Marks: mean over sampled
    rows.
    """
    z = run.normal(run.size(256, 4096), N)
    for kind, weigh in WEIGHTS.items():
        before = None
        for lam in LAMBDAS:
            H = torch.cat([statistics(weigh(lam * block)).entropy for block in z.split(128)])
            where = {"weights": kind, "λ": lam, "n": N}
            if kind == "exp":
                yield "exp", "mean H, nat", theory.expected_entropy_gauss(N, lam), mean(H), where
            else:
                yield "entropy", "mean H, nat", power_entropy(N, *POWERS[kind]), mean(H), where
            if before is not None:
                # at least a hundredth of a nat, each time λ doubles
                yield "sharpens", "H at λ − H at λ/2, nat", -0.01, mean(H - before), where
                if kind != "exp":
                    change = float((H / before).sub(1).abs().max())
                    yield "cancels", "H at λ / H at λ/2", 1.0, 1 + change, where
            before = H


#: Kinds of scores, with their formulas.
KINDS = {"dot": "q·k", "scaled dot": "q·k / √d", "cosine": "q·k / ‖q‖‖k‖"}
WIDTHS = (4, 8, 16, 32, 64, 128, 256)


def expected(kind: str, n: int, d: int) -> float:
    """Expected entropy in nats at initialisation, for a kind of scores, n keys and d dimensions.

    The logits of one query q are N(0, ‖q‖²) times a scale, and ‖q‖² is chi-squared.
    """
    if kind == "cosine":
        return float(theory.expected_entropy(n, 1.0, "cosine", d=d))
    nodes, weights = roots_genlaguerre(12, d / 2 - 1)
    norms = np.sqrt(2 * nodes) * (1.0 if kind == "dot" else d**-0.5)
    return float(np.average(theory.expected_entropy_gauss(n, norms), weights=weights))


def entropy(run: Run, kind: str, n: int, d: int, sets: int) -> Estimate:
    """Measured mean entropy of random queries over ``sets`` independent sets of n random keys."""
    heads = []
    for count in run.blocks(sets, n * max(1, d // 16)):
        query, key = run.normal(count, 1, 8, d), run.normal(count, 1, n, d)
        if kind == "cosine":
            query, key = normalize(query, dim=-1), normalize(key, dim=-1)
        scale = d**-0.5 if kind == "scaled dot" else 1.0
        heads.append(row_statistics(query, key, scale=scale).entropy.mean((1, 2)))
    return mean(heads)


@experiment(
    Claim("variance", "q·k has variance d", "Vaswani et al. (2017), arXiv:1706.03762, footnote 4"),
    Claim("kurtosis", "and fourth moment (3 + 6/d)·d²: excess kurtosis 6/d"),
    beyond("half", "scaled dot products start at H = log n − ½", within=0.005, bound="n"),
    beyond("almost none", "cosines start with log n − H = 1/(2d)", within=0.03, bound="d"),
    Claim("entropy", "E H is the exact integral over logits and ‖q‖"),
    beyond("sharp", "dot products start with H below a fifth of log n", relation="<=",
           bound="d/(2 log n)"),
    theorem("query norm", "dividing by ‖q‖ is a temperature of the row: its top key stays"),
    refuted("key norm", "dividing by ‖k‖ is no more than that: the top key stays as well",
            "cosine read as a normalised dot product"),
    figure=[Panel(
        Axis("width d", log=True, ticks=WIDTHS), Axis("entropy H, nat"),
        [Lines("entropy", "d", KINDS, by="scores")],
        levels=lambda record: [
            Level(2 * math.log(n), math.log(n), "log n; d = 2 log n")
            for n in values(record.of("almost none"), "n")
        ],
    )],
)  # fmt: skip
def scores(run: Run) -> Iterator[Measured]:
    """Dot, scaled dot and cosine scores at initialisation.

    Variance and fourth moment of q·k, and entropy of each kind of scores, for each width d.

    Predicted: Var q·k = d, so q·k is frozen for d > 2 log n; q·k/√d starts at log n − ½, cosines at
    log n − 1/(2d); 1/‖q‖ keeps the order of the keys, 1/‖k‖ does not.

    Figure: At the start dot products are frozen and cosines say nothing. Queries and keys N(0, I),
    4,096 keys (512 at the quick size). Lines: exact integrals over logits and ‖q‖. Marks: mean over
    sampled queries and keys.
    """
    n = run.size(512, 4096)
    for d in WIDTHS:
        count = run.size(1 << 22, 1 << 26) // d
        products = torch.cat(
            [(run.normal(size, d) * run.normal(size, d)).sum(1) for size in run.blocks(count, d)]
        )
        yield "variance", "variance of q·k", d, mean(products.square()), {"d": d}
        yield "kurtosis", "E (q·k)⁴ / d²", 3 + 6 / d, mean(products.pow(4) / d**2), {"d": d}
        for kind in KINDS:
            H = entropy(run, kind, n, d, run.size(60, 200))
            where = {"scores": kind, "d": d, "n": n}
            yield "entropy", "mean H, nat", expected(kind, n, d), H, where
            if kind == "cosine":
                said = H._replace(value=math.log(n) - H.value)
                yield "almost none", "log n − H, nat", 1 / (2 * d), said, where
            if kind == "dot":
                where["d/(2 log n)"] = d / (2 * math.log(n))
                yield "sharp", "mean H, nat", math.log(n) / 5, H, where
    d = WIDTHS[-1]
    for keys in (16, 64, 256, n):
        H, where = entropy(run, "scaled dot", keys, d, run.size(200, 1000)), {"n": keys, "d": d}
        yield "half", "mean H, nat", math.log(keys) - 0.5, H, where
        yield "entropy", "mean H, nat", expected("scaled dot", keys, d), H, where
    for keys in (16, 64, 256):
        for kind in ("dot", "cosine"):
            H = entropy(run, kind, keys, 64, run.size(60, 200))
            where = {"kind": kind, "n": keys, "d": 64}
            yield "entropy", "mean H, nat", expected(kind, keys, 64), H, where
    for d in (4, 64, 256):
        query, key = run.normal(500, d), run.normal(256, d)
        products = query @ key.T
        top = products.argmax(1)
        norms = {"query norm": query.norm(dim=1)[:, None], "key norm": key.norm(dim=1)}
        for claim, norm in norms.items():
            stays = float(((products / norm).argmax(1) == top).double().mean())
            yield claim, "share of rows whose top key stays", 1.0, stays, {"d": d, "n": 256}
