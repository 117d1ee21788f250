"""Sparsity of weights that decay geometrically: S falls with n, the effective keys do not."""

from collections.abc import Iterator

import numpy as np
import torch

from acutance import theory
from acutance_lab.experiment import Experiment, Run, sparsity, statistics
from acutance_lab.figure import Axis, Level, Lines, Page, Panel
from acutance_lab.record import Claim, Row, Where

SOURCE = "Su Jianlin, kexue.fm/archives/9889, on linear RNNs"
LAMBDAS = (0.5, 0.9, 0.99, 0.999)

FORMULA = Claim(
    "formula", "S = (1 − λⁿ)/(√n(1 − λ))·√((1 − λ²)/(1 − λ²ⁿ))", SOURCE, within=1e-9, theorem=True
)
VANISHES = Claim("vanishes", "S → 0 as n grows", SOURCE, relation="<=", theorem=True)
KEYS = Claim(
    "keys", "so it attends to ever fewer keys: 1/Σp² falls as S does", "a reading of article 9889",
    "does not hold", within=0.02,
)  # fmt: skip
LIMIT = Claim(
    "limit", "1/Σp² → (1 + λ)/(1 − λ), whatever n", expected="holds only where",
    within=0.01, bound="n·(1 − λ)", sense="from",
)  # fmt: skip


def measure(run: Run) -> Iterator[Row]:
    """Sparsity S and effective keys of n weights λ^(n−1), …, λ, 1, for n from 16 to 65,536."""
    for lam in LAMBDAS:
        before = None
        for n in (16, 64, 256, 1024, 4096, 16384, 65536):
            far = torch.arange(n - 1, -1, -1, dtype=torch.float64)
            S = float(sparsity((lam**far)[None]))
            # weights below float64's range still have logarithms
            keys = float(statistics((far * float(np.log(lam)))[None]).effective_keys)
            where: Where = {"λ": lam, "n": n}
            near = where | {LIMIT.bound: n * (1 - lam)}
            yield FORMULA.row("S", float(theory.sparsity_decay(lam, n)), S, where)
            yield LIMIT.row("effective keys", (1 + lam) / (1 - lam), keys, near)
            if before is not None:
                yield VANISHES.row("S at n − S at n/4", 0.0, S - before[0], where)
                yield KEYS.row("effective keys", before[1] * S / before[0], keys, where)
            before = (S, keys)


_N = Axis("keys n", log=True, ticks=(16, 256, 4096, 65536))

EXPERIMENT = Experiment(
    "sparsity_decay", "sparsity of geometrically decaying weights",
    "S ~ √((1 + λ)/((1 − λ)n)) → 0, while 1/Σp² = nS² → (1 + λ)/(1 − λ): 3, 19, 199, "
    "1999 keys for λ = 0.5, 0.9, 0.99, 0.999",
    (FORMULA, VANISHES, KEYS, LIMIT), measure,
    Page(
        "A decaying linear RNN: S → 0, but it goes on attending to the same keys",
        "Lines: closed forms. Marks: the weights (λ^(n−1), …, λ, 1) themselves. S falls only "
        "because zeros are appended; dotted: (1 + λ)/(1 − λ).",
        Panel(
            _N, Axis("sparsity S = E|a| / √E[a²]", log=True),
            [Lines("formula", "n", "λ = {:g}", by="λ")], "sparsity", legend="lower left",
        ),
        Panel(
            _N, Axis("effective keys 1/Σp²", log=True),
            [Lines("limit", "n", by="λ")], "effective keys",
            [Level(y=(1 + lam) / (1 - lam)) for lam in LAMBDAS], legend=None,
        ),
    ),
)  # fmt: skip
