"""Dot, scaled dot and cosine scores of random queries and keys: what each norm factor does."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from scipy.special import roots_genlaguerre

from acutance import row_statistics, theory
from acutance_lab.experiment import Experiment, Run, mean
from acutance_lab.figure import Axis, Level, Lines, Page, Panel
from acutance_lab.record import Claim, Estimate, Record, Row, Where

VASWANI = "Vaswani et al. (2017), arXiv:1706.03762, footnote 4"
#: Kinds of scores, with their formulas.
KINDS = {"dot": "q·k", "scaled dot": "q·k / √d", "cosine": "q·k / ‖q‖‖k‖"}
WIDTHS = (4, 8, 16, 32, 64, 128, 256)

VARIANCE = Claim("variance", "q·k has variance d", VASWANI)
KURTOSIS = Claim("kurtosis", "and fourth moment (3 + 6/d)·d²: excess kurtosis 6/d")
HALF = Claim(
    "half", "scaled dot products start at H = log n − ½", "",
    "holds only where", within=0.005, bound="n", sense="from",
)  # fmt: skip
ALMOST_NONE = Claim(
    "almost none", "cosines start with log n − H = 1/(2d), almost no information",
    expected="holds only where", within=0.03, bound="d", sense="from",
)  # fmt: skip
ENTROPY = Claim("entropy", "E H is the exact integral over logits and ‖q‖")
SHARP = Claim(
    "sharp", "dot products start with H below a fifth of log n", expected="holds only where",
    relation="<=", bound="d/(2 log n)", sense="from",
)  # fmt: skip
QUERY = Claim(
    "query norm", "dividing by ‖q‖ is a temperature of the row: its top key stays", theorem=True
)
KEY = Claim(
    "key norm", "dividing by ‖k‖ is no more than that: the top key stays as well",
    "cosine read as a normalised dot product", "does not hold",
)  # fmt: skip


def expected(kind: str, n: int, d: int) -> float:
    """Expected entropy in nats at initialisation, for a kind of scores, n keys and d dimensions.

    The logits of one query q are N(0, ‖q‖²) times a scale, and ‖q‖² is chi-squared.
    """
    if kind == "cosine":
        return float(theory.expected_entropy(n, 1.0, "cosine", d=d))
    nodes, weights = roots_genlaguerre(12, d / 2 - 1)
    norms = np.sqrt(2 * nodes) * (1.0 if kind == "dot" else d**-0.5)
    share = weights / weights.sum()
    keep = share > 1e-14
    return float((np.asarray(theory.expected_entropy_gauss(n, norms[keep])) * share[keep]).sum())


def entropy(run: Run, kind: str, n: int, d: int, sets: int) -> Estimate:
    """Measured mean entropy of random queries over ``sets`` independent sets of n random keys."""
    heads = []
    for count in run.blocks(sets, n * max(1, d // 16)):
        query, key = run.normal(count, 1, 8, d), run.normal(count, 1, n, d)
        if kind == "cosine":
            query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
        scale = d**-0.5 if kind == "scaled dot" else 1.0
        heads.append(row_statistics(query, key, scale=scale).entropy.mean((1, 2)))
    return mean(heads)


def measure(run: Run) -> Iterator[Row]:
    """Variance and fourth moment of q·k, and entropy of each kind of scores, for each width d."""
    n = run.size(512, 4096)
    for d in WIDTHS:
        count = run.size(1 << 22, 1 << 26) // d
        products = torch.cat(
            [(run.normal(size, d) * run.normal(size, d)).sum(1) for size in run.blocks(count, d)]
        )
        yield VARIANCE.row("variance of q·k", d, mean(products.square()), {"d": d})
        yield KURTOSIS.row("E (q·k)⁴ / d²", 3 + 6 / d, mean(products.pow(4) / d**2), {"d": d})
        for kind in KINDS:
            H = entropy(run, kind, n, d, run.size(60, 200))
            where: Where = {"scores": kind, "d": d, "n": n}
            yield ENTROPY.row("mean H, nat", expected(kind, n, d), H, where)
            if kind == "cosine":
                said = H._replace(value=math.log(n) - H.value)
                yield ALMOST_NONE.row("log n − H, nat", 1 / (2 * d), said, where)
            if kind == "dot":
                where |= {SHARP.bound: d / (2 * math.log(n))}
                yield SHARP.row("mean H, nat", math.log(n) / 5, H, where)
    d = WIDTHS[-1]
    for keys in (16, 64, 256, n):
        H, where = entropy(run, "scaled dot", keys, d, run.size(200, 1000)), {"n": keys, "d": d}
        yield HALF.row("mean H, nat", math.log(keys) - 0.5, H, where)
        yield ENTROPY.row("mean H, nat", expected("scaled dot", keys, d), H, where)
    d = 64
    for keys in (16, 64, 256):
        for kind in ("dot", "cosine"):
            H = entropy(run, kind, keys, d, run.size(60, 200))
            where = {"kind": kind, "n": keys, "d": d}
            yield ENTROPY.row("mean H, nat", expected(kind, keys, d), H, where)
    for d in (4, 64, 256):
        query, key = run.normal(500, d), run.normal(256, d)
        products = query @ key.T
        top = products.argmax(1)
        for claim, norm in ((QUERY, query.norm(dim=1)[:, None]), (KEY, key.norm(dim=1))):
            stays = float(((products / norm).argmax(1) == top).double().mean())
            yield claim.row("share of rows whose top key stays", 1.0, stays, {"d": d, "n": 256})


def _n(record: Record) -> int:
    return int(record.of("entropy")[0].condition["n"])


EXPERIMENT = Experiment(
    "scores", "dot, scaled dot and cosine scores at initialisation",
    "Var q·k = d, so q·k is frozen for d > 2 log n; q·k/√d starts at log n − ½, cosines "
    "at log n − 1/(2d); 1/‖q‖ keeps the order of the keys, 1/‖k‖ does not",
    (VARIANCE, KURTOSIS, HALF, ALMOST_NONE, ENTROPY, SHARP, QUERY, KEY), measure,
    Page(
        "At the start dot products are frozen and cosines say nothing",
        lambda record: f"Queries and keys N(0, I), n = {_n(record):,} keys. Lines: exact integrals "
        "over logits and ‖q‖. Marks: mean over sampled queries and keys.",
        Panel(
            Axis("width d", log=True, ticks=WIDTHS), Axis("entropy H, nat", limits=(0.0, None)),
            [Lines("entropy", "d", KINDS, by="scores")], legend="center right",
            levels=lambda record: [
                Level(2 * math.log(_n(record)), math.log(_n(record)), "log n; d = 2 log n")
            ],
        ),
    ),
)  # fmt: skip
