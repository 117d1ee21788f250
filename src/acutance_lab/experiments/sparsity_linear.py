"""Sparsity of linear attention with non-negative features, and what the width d does to it."""

import math
from collections.abc import Iterator

import torch

from acutance import theory
from acutance_lab.experiment import Experiment, Run, difference, mean, sparsity
from acutance_lab.figure import Axis, Lines, Page, Panel
from acutance_lab.record import Claim, Row, Where

SOURCE = "Su Jianlin, kexue.fm/archives/9889, on general linear attention"
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHAPES = (0.25, 1.0, 4.0)  # of the gamma law; σ'/μ' = 1/√shape

IDENTITY = Claim(
    "identity", "S = (1 + q'Σ'q' / (q'·μ')²)^(−1/2) with the row's own μ', Σ'", SOURCE,
    within=1e-9, theorem=True,
)  # fmt: skip
IID = Claim(
    "iid", "independent components: S = (1 + (σ'/μ')²‖q'‖₂²/‖q'‖₁²)^(−1/2)", SOURCE, within=0.002
)
WIDER = Claim(
    "wider", "a larger d makes it sparser", f"{SOURCE}, as two public copies have it",
    "does not hold", relation="<=",
)  # fmt: skip
RATIO = Claim(
    "ratio", "‖q'‖₂/‖q'‖₁ ≥ d^(−1/2): a minimum, not a maximum", relation=">=", theorem=True
)


def measure(run: Run) -> Iterator[Row]:
    """Sparsity S of sampled features, compared with the formula from their moments.

    First with the empirical moments of the row, then with those of the distribution.
    """
    for n in (16, 1024):
        query, keys = run.uniform(8), run.normal(n, 8).exp()
        centred = keys - keys.mean(0)
        formula = theory.sparsity_linear(query, keys.mean(0), centred.T @ centred / n)
        direct = float(sparsity((keys @ query)[None]))
        yield IDENTITY.row("S", float(formula), direct, {"n": n, "d": 8, "keys": "log-normal"})
    n = run.size(1024, 4096)
    for shape in SHAPES:
        spread, before = 1 / math.sqrt(shape), None
        for d in WIDTHS:
            law = torch.full((n, d), shape, dtype=torch.float64)
            query = torch.ones(d, dtype=torch.float64)  # dense
            sampled = [
                sparsity((torch._standard_gamma(law, generator=run.generator) @ query)[None])
                for _ in range(32)
            ]
            estimate = mean(sampled)
            where: Where = {"d": d, "σ'/μ'": spread, "n": n}
            S = float(theory.sparsity_linear_iid(query, 1.0, spread))
            yield IID.row("mean S", S, estimate, where)
            if before is not None:
                gain = difference(estimate, before)
                yield WIDER.row("S at d − S at the d before", 0.0, gain, where)
            before = estimate
            q = run.uniform(1000, d)
            norms = q.norm(dim=1) / q.sum(1)
            yield RATIO.row("least of 1000 queries", d**-0.5, float(norms.min()), {"d": d})


EXPERIMENT = Experiment(
    "sparsity_linear", "sparsity of linear attention with non-negative features",
    "S is set by the features' relative spread along q'; ‖q'‖₂/‖q'‖₁ is least, "
    "d^(−1/2), for a dense query, so S → 1 as d grows",
    (IDENTITY, IID, WIDER, RATIO), measure,
    Page(
        "A wider non-negative linear attention is less sparse, not more",
        lambda record: "Lines: S = (1 + (σ'/μ')²/d)^(−1/2) for a dense query and independent "
        "feature components. Marks: mean over sampled rows of "
        f"{record.of('iid')[0].condition['n']:,} keys with gamma-distributed components.",
        Panel(
            Axis("width d of the features", log=True, ticks=(1, 4, 16, 64, 256)),
            Axis("sparsity S = E|a| / √E[a²]", limits=(0.35, 1.02)),
            [Lines("iid", "d", "σ'/μ' = {:g}", by="σ'/μ'")],
            legend="lower right",
        ),
    ),
)  # fmt: skip
